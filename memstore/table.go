package memstore

// A table holds the counters of one space and bounds them.

import (
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync/atomic"

	"github.com/caddy-sluice/sluice/algorithms"
)

type table struct {
	shards    []shard
	mask      uint64
	keys      atomic.Int64
	evictions atomic.Int64
	plans     atomic.Pointer[plans]
}

// plans are what the limits have in common that the keys of a table may be under: those of a zone's
// plans, and of configs that run side by side. No slot says which of them its key is under, so that
// a key is idle only if it is by the slowest, and uses the share of the smallest that holds so
// much.
type plans struct {
	slowest    *algorithms.Limit
	capacities []int64 // ascending
}

// maxCapacities bounds how many are told apart.
const maxCapacities = 64

// with adds a limit. A nil p has none.
func (p *plans) with(l *algorithms.Limit) *plans {
	if p == nil {
		return &plans{l, []int64{l.Capacity}}
	}
	more := *p
	if perUnit(l) > perUnit(p.slowest) {
		more.slowest = l
	}
	if i, known := slices.BinarySearch(p.capacities, l.Capacity); !known && len(p.capacities) < maxCapacities {
		more.capacities = slices.Insert(slices.Clone(p.capacities), i, l.Capacity)
	}
	return &more
}

// perUnit is how long a bucket takes to give a unit back. One that admits nothing is never filled.
func perUnit(l *algorithms.Limit) float64 {
	if l.Quota == 0 {
		return 0
	}
	return float64(l.Window) / float64(l.Quota)
}

// share is the part of its limit that a key uses.
func (p *plans) share(used int64) float64 {
	capacity := p.capacities[len(p.capacities)-1]
	if i, _ := slices.BinarySearch(p.capacities, used); i < len(p.capacities) {
		capacity = p.capacities[i]
	}
	return float64(used) / float64(max(1, capacity))
}

const (
	maxShards    = 64
	keysPerShard = 1024
)

// newTable makes a table with as many shards as the bound deserves: with one, the bound is exact
// and the choice of what is forgotten the best; with many, requests rarely wait for one another.
func newTable(l *algorithms.Limit, rank uint64) *table {
	n := min(maxShards, max(1, maxKeys(l)/keysPerShard))
	n = 1 << (bits.Len64(uint64(n)) - 1)
	t := &table{shards: make([]shard, n), mask: uint64(n - 1)}
	for i := range t.shards {
		t.shards[i].rank = rank + uint64(i)
		t.shards[i].log = l.Algorithm.Log()
	}
	return t
}

func maxKeys(l *algorithms.Limit) int64 {
	if l.MaxKeys <= 0 {
		return algorithms.DefaultMaxKeys
	}
	return int64(l.MaxKeys)
}

func (t *table) shard(k digest) *shard { return &t.shards[k.more>>32&t.mask] }

// How far is looked for each new key.
const (
	glance = 2  // slots that the hand passes, so that idle keys go even if nobody calls Sweep
	search = 8  // slots that the hand passes when the table is full
	sample = 8  // keys of which one must go when none was idle,
	reach  = 64 // among so many slots; a shard of no more than these is looked at whole
)

// insert makes a counter if it holds anything: a refund, for one, never makes a key.
func (t *table) insert(s *shard, k digest, state *algorithms.State, l *algorithms.Limit, now int64) {
	if l.Idle(*state, now) {
		return
	}
	bound, slowest := maxKeys(l), t.plans.Load().slowest
	if s.top >= chunkSize { // before that there is no memory to be saved
		t.pass(s, slowest, now, glance)
	}
	if t.full(s, bound) {
		t.pass(s, slowest, now, search)
	}
	// Two at most, so that a bound that a reload lowered is reached without stopping anyone for
	// long. A shard that has next to nothing to give up lets the table grow beyond the bound, by
	// one or two a shard.
	for range 2 {
		if t.full(s, bound) {
			t.evict(s, now)
		}
	}
	s.add(k, state)
	t.keys.Add(1)
}

func (t *table) full(s *shard, bound int64) bool {
	return t.keys.Load() >= bound || s.live >= maxSlots
}

// pass moves the hand over some slots and forgets what is idle.
func (t *table) pass(s *shard, l *algorithms.Limit, now int64, slots int) {
	for ; slots > 0 && s.live > 0; slots-- {
		if s.hand++; s.hand >= s.top {
			s.hand = 0
		}
		if used, ok := s.used(s.hand, l, now); ok && used == 0 {
			t.forget(s, s.hand)
		}
	}
}

// evict forgets the key that uses the smallest share of its limit, of a random sample: neighbours
// came together, so eight of them might be the very ones that are being limited.
func (t *table) evict(s *shard, now int64) {
	var least, seen uint32
	p, lowest := t.plans.Load(), math.Inf(1)
	for i := uint32(0); i < min(reach, s.top) && (seen < sample || s.top <= reach); i++ {
		n := i
		if s.top > reach {
			n = rand.Uint32N(s.top)
		}
		used, ok := s.used(n, p.slowest, now)
		if ok {
			seen++
		}
		if share := p.share(used); ok && share < lowest {
			least, lowest = n, share
		}
	}
	if seen == 0 {
		return
	}
	t.forget(s, least)
	if lowest > 0 {
		t.evictions.Add(1)
	}
}

func (t *table) forget(s *shard, n uint32) {
	s.remove(n)
	t.keys.Add(-1)
}

// stride is how many slots a sweep looks at before it lets others have the lock: some ten
// microseconds' worth.
const stride = 512

// sweep forgets every idle key and gives memory back where most have gone.
func (t *table) sweep(clock func() int64) {
	l := t.plans.Load().slowest
	for i := range t.shards {
		s := &t.shards[i]
		for from := uint32(0); ; from += stride {
			now := clock()
			s.mu.Lock()
			if from >= s.top {
				s.compact()
				s.mu.Unlock()
				break
			}
			t.sweepSlots(s, l, now, from, min(from+stride, s.top))
			s.mu.Unlock()
		}
	}
}

func (t *table) sweepSlots(s *shard, l *algorithms.Limit, now int64, from, to uint32) {
	for n := from; n < to; n++ {
		if used, ok := s.used(n, l, now); ok && used == 0 {
			t.forget(s, n)
		}
	}
}

// drop forgets one key.
func (t *table) drop(k digest) {
	s := t.shard(k)
	s.mu.Lock()
	defer s.mu.Unlock()
	if n, ok := s.find(k); ok {
		t.forget(s, n)
	}
}
