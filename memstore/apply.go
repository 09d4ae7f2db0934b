package memstore

// The way of a batch: find every counter, lock, decide at one moment, write back what was
// committed.

import (
	"cmp"
	"slices"
	"sync"

	"github.com/caddy-sluice/sluice/algorithms"
)

// inline is the longest batch that needs no allocation.
const inline = 8

// visit is one charge's way to its counter and back.
type visit struct {
	table   *table
	shard   *shard
	key     digest
	slot    uint32
	found   bool
	dirty   bool // to be written back
	first   int  // the first visit to the same counter, which holds it
	counter algorithms.Counter
}

func (s *Store) begin(v *visit, charges []algorithms.Charge, i int) {
	v.table = s.table(charges[i].Limit, charges)
	v.key = s.digest(charges[i].Key)
	v.shard = v.table.shard(v.key)
}

func (s *Store) beginAll(charges []algorithms.Charge, visits []visit) {
	for i := range charges {
		v := &visits[i]
		s.begin(v, charges, i)
		v.first = i
		for j := range i {
			if visits[j].shard == v.shard && visits[j].key == v.key {
				v.first = j
				break
			}
		}
	}
}

func (v *visit) load() {
	if v.slot, v.found = v.shard.find(v.key); v.found {
		v.shard.load(v.slot, &v.counter.State)
	}
}

// changed reports whether a charge left something to be written back. A refusal, a peek and a cost
// of 0 do not.
func changed(c *algorithms.Charge, o *algorithms.Outcome, counter *algorithms.Counter, committed bool) bool {
	return counter.Anchored || committed && o.OK && c.Commits() && c.Cost != 0
}

// applyOne is what most batches need, without the loops.
func (s *Store) applyOne(charges []algorithms.Charge, out []algorithms.Outcome) {
	var v visit
	s.begin(&v, charges, 0)
	counters := [1]*algorithms.Counter{&v.counter}
	now := s.clock()
	v.shard.mu.Lock()
	if now < v.shard.now { // see moment
		now = s.clock()
	}
	v.shard.now = now
	v.load()
	committed := algorithms.Decide(now, charges, counters[:], out)
	if changed(&charges[0], &out[0], &v.counter, committed) {
		if v.found {
			v.shard.store(v.slot, &v.counter.State)
		} else {
			v.table.insert(v.shard, v.key, &v.counter.State, charges[0].Limit, now)
		}
	}
	v.shard.mu.Unlock()
}

// applyFew is applyMany on the stack. The compiler lets pointers to visits stay there only while
// the array that they are put into is in sight, which is why the two lines in the middle stand
// twice.
func (s *Store) applyFew(charges []algorithms.Charge, out []algorithms.Outcome) {
	var visits [inline]visit
	var counters [inline]*algorithms.Counter
	var shards [inline]*shard
	s.beginAll(charges, visits[:])
	for i := range charges {
		counters[i], shards[i] = &visits[visits[i].first].counter, visits[i].shard
	}
	s.applyAll(charges, out, visits[:len(charges)], counters[:], shards[:len(charges)])
}

// batch is the memory of a long batch.
type batch struct {
	visits   []visit
	counters []*algorithms.Counter
	shards   []*shard
}

var batches = sync.Pool{New: func() any { return new(batch) }}

func (s *Store) applyMany(charges []algorithms.Charge, out []algorithms.Outcome) {
	b, n := batches.Get().(*batch), len(charges)
	b.visits, b.counters, b.shards = slices.Grow(b.visits[:0], n)[:n], slices.Grow(b.counters[:0], n)[:n], slices.Grow(b.shards[:0], n)[:n]
	clear(b.visits)
	s.beginAll(charges, b.visits)
	for i := range charges {
		b.counters[i], b.shards[i] = &b.visits[b.visits[i].first].counter, b.visits[i].shard
	}
	s.applyAll(charges, out, b.visits, b.counters, b.shards)
	if n <= maxPooled {
		batches.Put(b)
	}
}

// maxPooled keeps one huge batch from being held for ever.
const maxPooled = 256

func (s *Store) applyAll(charges []algorithms.Charge, out []algorithms.Outcome, visits []visit, counters []*algorithms.Counter, shards []*shard) {
	now := s.clock()
	shards = lock(shards)
	now = s.moment(shards, now)
	for i := range visits {
		if visits[i].first == i {
			visits[i].load()
		}
	}
	committed := algorithms.Decide(now, charges, counters, out)
	for i := range visits {
		if changed(&charges[i], &out[i], counters[i], committed) {
			visits[visits[i].first].dirty = true
		}
	}
	keep(charges, visits, now)
	for _, s := range shards {
		s.mu.Unlock()
	}
}

// keep writes back. Counters that are new come last: a place for one may be made by forgetting any
// other, so after the first of them no slot number of this batch is good.
func keep(charges []algorithms.Charge, visits []visit, now int64) {
	for i := range visits {
		if v := &visits[i]; v.dirty && v.found {
			v.shard.store(v.slot, &v.counter.State)
		}
	}
	for i := range visits {
		if v := &visits[i]; v.dirty && !v.found {
			v.table.insert(v.shard, v.key, &v.counter.State, charges[i].Limit, now)
		}
	}
}

// lock takes each shard once, in the order of their ranks, which is the same for every batch.
func lock(shards []*shard) []*shard {
	slices.SortFunc(shards, func(a, b *shard) int { return cmp.Compare(a.rank, b.rank) })
	shards = slices.Compact(shards)
	for _, s := range shards {
		s.mu.Lock()
	}
	return shards
}

// moment makes the decisions of a shard follow one another in time. The clock is read before the
// locks, because reading it takes as long as the decision does, and once more only if someone with
// a later reading was faster. A reading that is older than a counter by more than its window would
// otherwise grant its credit twice.
func (s *Store) moment(shards []*shard, now int64) int64 {
	for _, sh := range shards {
		if now < sh.now {
			now = s.clock()
			break
		}
	}
	for _, sh := range shards {
		sh.now = now
	}
	return now
}
