// Package memstore counts in this process: an [algorithms.Store] for any number of goroutines,
// without a goroutine or timer of its own, bounded in keys, and with no pointer per key for the
// algorithms of constant size.
//
// What it promises beyond the contract of [algorithms.Store]:
//
//   - A counter costs about 40 bytes, whatever the quota and the length of the key. A sliding log and the leases of a
//     key cost about 40 more, and 16 for each moment at which something was admitted.
//   - Keys are not kept. A key is a keyed hash of at least 86 bits under seeds that are new in each process, so nobody
//     can prepare keys that meet; at a million keys held and a million new ones a second, two would share a counter
//     once in two million years.
//   - A space (zone, algorithm, window) holds at most [algorithms.Limit.MaxKeys] keys. Idle keys are forgotten first,
//     then the ones that use the least of their capacity, so a key that is being limited is the last to go, as are a long
//     ban and a key with many requests in flight. The use is judged and not how recently a key was seen, because a refusal
//     leaves no trace.
//   - Counters are shared by name and survive as long as one [Zone] of that name is open.
package memstore

import (
	"context"
	"hash/maphash"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Store is a set of counters in memory. Use [New]. It is safe for concurrent use.
type Store struct {
	clock func() int64
	seeds [2]maphash.Seed

	// bound finds a limit's table without a lock. It is a cache of spaces: replaced, never changed.
	bound atomic.Pointer[map[*algorithms.Limit]*table]

	mu     sync.Mutex // guards what follows, and replacing bound
	spaces map[algorithms.Space]*table
	opened map[string]int // zones, by how many hold them open
	ranks  uint64         // lock ranks given out to shards
}

// Option changes how a [Store] is made.
type Option func(*Store)

// WithClock makes the store ask now for the moment, in microseconds since the Unix epoch and below
// 2^52. The default is the monotonic clock, anchored to wall time once, so that a correction of the
// wall clock never grants or denies anything. The store may ask more than once for one batch, and
// asks from many goroutines. A clock that steps back is met as package algorithms says, except that
// what was idle and forgotten at the later moment is not remembered.
func WithClock(now func() int64) Option {
	return func(s *Store) { s.clock = now }
}

// New returns an empty store. It needs no Close to be collected.
func New(opts ...Option) *Store {
	s := &Store{
		clock:  anchoredClock(),
		seeds:  [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()},
		opened: map[string]int{},
	}
	s.reset()
	for _, opt := range opts {
		opt(s)
	}
	return s
}

func anchoredClock() func() int64 {
	start := time.Now()
	wall := start.UnixMicro()
	return func() int64 { return wall + time.Since(start).Microseconds() }
}

func (s *Store) reset() {
	s.spaces = map[algorithms.Space]*table{}
	s.bound.Store(&map[*algorithms.Limit]*table{})
}

// Close drops every counter. It never fails; the error is there for the contract of
// [algorithms.Store].
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reset()
	return nil
}

// Apply decides and commits a batch as [algorithms.Store] says. It works on any zone, opened or
// not; counters are made on first use. Nothing here waits for anything but other batches, so ctx is
// not consulted, and the error is always nil.
func (s *Store) Apply(_ context.Context, charges []algorithms.Charge, out []algorithms.Outcome) error {
	switch n := len(charges); {
	case n == 1:
		s.applyOne(charges, out)
	case n <= inline:
		s.applyFew(charges, out)
	default:
		s.applyMany(charges, out)
	}
	return nil
}

// boundLimits keeps a caller that compiles a limit for each request from growing the cache without
// end.
const boundLimits = 1024

// table returns that of a limit, for a batch.
func (s *Store) table(l *algorithms.Limit, charges []algorithms.Charge) *table {
	if t := (*s.bound.Load())[l]; t != nil {
		return t
	}
	return s.bind(l, charges)
}

// bind makes the limit's table known to table, and makes the table if the space is new. A batch
// that only gives back gets an empty one of its own: if it outlived its zone, nobody would free
// another.
func (s *Store) bind(l *algorithms.Limit, charges []algorithms.Charge) *table {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.spaces[l.Space]
	if t == nil {
		t = newTable(l, s.ranks)
		s.ranks += uint64(len(t.shards))
		t.plans.Store(t.plans.Load().with(l))
		if s.opened[l.Space.Zone] == 0 && !slices.ContainsFunc(charges, func(c algorithms.Charge) bool { return c.Cost > 0 }) {
			return t
		}
		s.spaces[l.Space] = t
	}
	t.plans.Store(t.plans.Load().with(l))
	bound := maps.Clone(*s.bound.Load())
	if len(bound) >= boundLimits {
		clear(bound)
	}
	bound[l] = t
	s.bound.Store(&bound)
	return t
}

func (s *Store) digest(key string) digest {
	d := digest{id: maphash.String(s.seeds[0], key), more: maphash.String(s.seeds[1], key)}
	if d.id == 0 { // that is how a free slot is told
		d.id = 1
	}
	return d
}
