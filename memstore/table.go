package memstore

// A table holds the counters of one space and bounds them.

import (
	"math/bits"
	"sync/atomic"

	"github.com/caddy-sluice/sluice/algorithms"
)

type table struct {
	shards    []shard
	mask      uint64
	keys      atomic.Int64
	evictions atomic.Int64
	limit     atomic.Pointer[algorithms.Limit] // the one that was bound last, to judge what is idle
}

const (
	maxShards    = 64
	keysPerShard = 1024
)

// newTable makes a table with as many shards as the bound deserves: with one, the bound is exact and the choice of what
// is forgotten the best; with many, requests rarely wait for one another.
func newTable(l *algorithms.Limit, rank uint64) *table {
	n := min(maxShards, max(1, maxKeys(l)/keysPerShard))
	n = 1 << (bits.Len64(uint64(n)) - 1)
	t := &table{shards: make([]shard, n), mask: uint64(n - 1)}
	for i := range t.shards {
		t.shards[i].rank = rank + uint64(i)
		t.shards[i].log = l.Algorithm == algorithms.SlidingLog
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

// How far the hand looks for each new key.
const (
	glance = 2  // slots, in passing, so that idle keys go even if nobody calls Sweep
	sample = 8  // keys, to choose one that must go
	reach  = 32 // slots, to find that many
)

// insert makes a counter if it holds anything: a refund, for one, never makes a key.
func (t *table) insert(s *shard, k digest, state *algorithms.State, l *algorithms.Limit, now int64) {
	if l.Idle(*state, now) {
		return
	}
	t.pass(s, l, now, glance, glance)
	bound := maxKeys(l)
	// Two at most, so that a bound that a reload lowered is reached without stopping anyone for long.
	// A shard that has nothing to give up lets the table grow beyond the bound, by one for each shard.
	for i := 0; i < 2 && (t.keys.Load() >= bound || s.live >= maxSlots); i++ {
		if least, ok := t.pass(s, l, now, sample, reach); ok {
			t.forget(s, least)
			t.evictions.Add(1)
		}
	}
	s.add(k, state)
	t.keys.Add(1)
}

// pass moves the hand over some slots and forgets those that are idle. If there was none, it returns
// the one that uses the least of its capacity.
func (t *table) pass(s *shard, l *algorithms.Limit, now int64, keys, slots int) (least uint32, ok bool) {
	var lowest int64
	idle := false
	var state algorithms.State
	for ; keys > 0 && slots > 0 && s.live > 0; slots-- {
		n := s.hand
		if s.hand++; s.hand >= s.top {
			s.hand = 0
		}
		if s.slot(n).id == 0 {
			continue
		}
		keys--
		s.load(n, &state)
		used := l.Used(state, now)
		if used == 0 {
			t.forget(s, n)
			idle = true
		} else if !ok || used < lowest {
			least, lowest, ok = n, used, true
		}
	}
	return least, ok && !idle
}

func (t *table) forget(s *shard, n uint32) {
	s.remove(n)
	t.keys.Add(-1)
}

// stride is how many slots a sweep looks at before it lets others have the lock: some ten microseconds' worth.
const stride = 512

// sweep forgets every idle key and gives memory back where most have gone.
func (t *table) sweep(clock func() int64) {
	l := t.limit.Load()
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
	var state algorithms.State
	for n := from; n < to; n++ {
		if s.slot(n).id == 0 {
			continue
		}
		s.load(n, &state)
		if l.Idle(state, now) {
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
