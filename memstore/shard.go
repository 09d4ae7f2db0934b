package memstore

// A shard is a set of counters under one lock: a slab of slots, and an index from hash to slot.
//
// Slots are 32 bytes without a pointer, in chunks that never move, so growing copies nothing and
// the garbage collector has nothing to follow. The index is 4 bytes a slot at a load of 35 to 70
// percent and is all that is rebuilt when a shard grows. A map[digest]State would hold its entries
// in the index itself: at up to twice the memory, with all of them moved at each growth, and
// without an order in which a hand can pass over them a few at a time.

import (
	"sync"

	"github.com/caddy-sluice/sluice/algorithms"
)

// digest stands for a key.
type digest struct{ id, more uint64 }

const (
	checkBits = 11
	checkMask = 1<<checkBits - 1
)

// slot is one counter. The level and the scale of a state are at most 2^52 (see the 2^52 rule of
// package algorithms), which leaves 11 bits in each word for more of the key's hash.
type slot struct {
	id   uint64 // digest.id; 0 in a free slot
	t    int64  // State.T
	a, b uint64 // State.A and State.B, each above 11 bits of digest.more; in a free slot a is the next free one
}

func (p *slot) is(k digest) bool {
	return p.id == k.id && (p.a^k.more)&checkMask == 0 && (p.b^k.more>>checkBits)&checkMask == 0
}

// A chunk of 2 KiB is small enough that a quiet zone costs little. What a shard grows beyond a block
// lies in whole blocks, so that ten million keys are few objects for the garbage collector.
const (
	chunkSize = 64
	blockSize = 1024
)

type (
	chunk [chunkSize]slot
	block [blockSize]slot
)

// An index entry is a slot's number plus one, above 8 bits of its hash that save most looks at
// wrong slots; 0 is empty.
const (
	tagBits   = 8
	maxSlots  = 1<<(32-tagBits) - 1
	firstSize = 16 // of an index; a power of two
)

type shard struct {
	mu    sync.Mutex
	now   int64                  // the latest moment of a decision
	index []uint32               // open addressing, linear probing
	slots []*chunk               // the first block's
	more  []*block               // all behind it
	logs  *[]*[chunkSize]history // beside slots, for the log kernel only; the pointer keeps a shard to two cache lines
	top   uint32                 // slots from here on were never used
	free  uint32                 // the first free slot below top, plus one
	live  uint32
	hand  uint32 // the next slot that may be forgotten
	log   bool
	rank  uint64 // the order of locking
}

func (s *shard) slot(n uint32) *slot {
	if n < blockSize {
		return &s.slots[n/chunkSize][n%chunkSize]
	}
	return &s.more[n/blockSize-1][n%blockSize]
}

func (s *shard) history(n uint32) *history { return &(*s.logs)[n/chunkSize][n%chunkSize] }

func entry(n uint32, id uint64) uint32 { return (n+1)<<tagBits | uint32(id>>(64-tagBits)) }

// find returns the slot of a key.
func (s *shard) find(k digest) (uint32, bool) {
	if len(s.index) == 0 {
		return 0, false
	}
	mask, tag := uint64(len(s.index)-1), uint32(k.id>>(64-tagBits))
	for i := k.id & mask; ; i = (i + 1) & mask {
		e := s.index[i]
		if e == 0 {
			return 0, false
		}
		if n := e>>tagBits - 1; e&(1<<tagBits-1) == tag && s.slot(n).is(k) {
			return n, true
		}
	}
}

func (s *shard) load(n uint32, state *algorithms.State) {
	p := s.slot(n)
	state.T = p.t
	if s.log {
		s.history(n).load(state)
		return
	}
	state.A, state.B = int64(p.a>>checkBits), int64(p.b>>checkBits)
}

func (s *shard) store(n uint32, state *algorithms.State) {
	p := s.slot(n)
	p.t = state.T
	if s.log {
		s.history(n).store(state)
		return
	}
	p.a = uint64(state.A)<<checkBits | p.a&checkMask
	p.b = uint64(state.B)<<checkBits | p.b&checkMask
}

// used returns the units that a slot's counter holds, and false for a free slot.
func (s *shard) used(n uint32, l *algorithms.Limit, now int64) (int64, bool) {
	if s.slot(n).id == 0 {
		return 0, false
	}
	var state algorithms.State
	s.load(n, &state)
	return l.Used(state, now), true
}

// add makes a slot for a key that has none. The shard must hold less than maxSlots.
func (s *shard) add(k digest, state *algorithms.State) {
	if (s.live+1)*10 > uint32(len(s.index))*7 {
		s.reindex(max(firstSize, 2*len(s.index)))
	}
	n := s.top
	if s.free != 0 {
		n = s.free - 1
		s.free = uint32(s.slot(n).a)
	} else {
		s.grow()
	}
	s.live++
	*s.slot(n) = slot{id: k.id, a: k.more & checkMask, b: k.more >> checkBits & checkMask}
	s.store(n, state)
	s.enter(n, k.id)
}

// grow makes top a usable slot and moves top up.
func (s *shard) grow() {
	if s.log && s.top%chunkSize == 0 {
		if s.logs == nil {
			s.logs = new([]*[chunkSize]history)
		}
		*s.logs = append(*s.logs, new([chunkSize]history))
	}
	switch {
	case s.top < blockSize && s.top%chunkSize == 0:
		s.slots = append(s.slots, new(chunk))
	case s.top >= blockSize && s.top%blockSize == 0:
		s.more = append(s.more, new(block))
	}
	s.top++
}

func (s *shard) enter(n uint32, id uint64) {
	mask := uint64(len(s.index) - 1)
	i := id & mask
	for s.index[i] != 0 {
		i = (i + 1) & mask
	}
	s.index[i] = entry(n, id)
}

func (s *shard) reindex(size int) {
	s.index = make([]uint32, size)
	for n := range s.top {
		if id := s.slot(n).id; id != 0 {
			s.enter(n, id)
		}
	}
}

// remove forgets a slot in use.
func (s *shard) remove(n uint32) {
	p := s.slot(n)
	s.leave(n, p.id)
	if s.log {
		*s.history(n) = history{}
	}
	*p = slot{a: uint64(s.free)}
	s.free = n + 1
	s.live--
}

// leave takes a slot out of the index and closes the gap: tombstones would fill an index that is at
// its bound, where every new key removes another.
func (s *shard) leave(n uint32, id uint64) {
	mask := uint64(len(s.index) - 1)
	gap := id & mask
	for s.index[gap]>>tagBits != n+1 {
		gap = (gap + 1) & mask
	}
	for i := (gap + 1) & mask; s.index[i] != 0; i = (i + 1) & mask {
		home := s.slot(s.index[i]>>tagBits-1).id & mask
		if (i-home)&mask >= (i-gap)&mask {
			s.index[gap], gap = s.index[i], i
		}
	}
	s.index[gap] = 0
}

// compact gives memory back after most keys have gone. Slots move, so no slot number stays good.
func (s *shard) compact() {
	if s.top <= chunkSize || s.live >= s.top/4 {
		return
	}
	old := shard{slots: s.slots, more: s.more, logs: s.logs, top: s.top, log: s.log}
	s.index, s.slots, s.more, s.logs = nil, nil, nil, nil
	s.top, s.free, s.live, s.hand = 0, 0, 0, 0
	var state algorithms.State
	for n := range old.top {
		if p := old.slot(n); p.id != 0 {
			old.load(n, &state)
			s.add(digest{p.id, p.a&checkMask | p.b&checkMask<<checkBits}, &state)
		}
	}
}
