package storetest

// Many goroutines on one store: never a unit too many, never one too few.

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

var concurrentCases = []testCase{
	{"F34_exactly_the_limit", exactlyTheLimit},
	{"F35_new_key", newKey},
	{"F36_never_above_the_bound", neverAboveTheBound},
	{"batches_in_any_order", batchesInAnyOrder},
	{"all_or_none", concurrentAllOrNone},
	{"refunds", concurrentRefunds},
}

// storm lets the goroutines ask n times each and counts who was admitted.
func (s *subject) storm(goroutines, n int, charges func(g, i int) []algorithms.Charge) int64 {
	var admitted, failed atomic.Int64
	var ready, done sync.WaitGroup
	start := make(chan struct{})
	for g := range goroutines {
		ready.Add(1)
		done.Go(func() {
			ready.Done()
			<-start
			for i := range n {
				batch := charges(g, i)
				out := make([]algorithms.Outcome, len(batch))
				if err := s.store.Apply(context.Background(), batch, out); err != nil {
					failed.Add(1)
				} else if algorithms.Binding(batch, out) < 0 {
					admitted.Add(1)
				}
			}
		})
	}
	ready.Wait()
	close(start)
	done.Wait()
	if failed.Load() > 0 {
		s.Errorf("%d batches failed", failed.Load())
	}
	return admitted.Load()
}

func exactlyTheLimit(s *subject) {
	for _, l := range s.five("z", 367) {
		got := s.storm(100, 20, func(int, int) []algorithms.Charge {
			return []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}
		})
		if got != 367 {
			s.Errorf("%v: %d of 2000 admitted, want 367", l.Policy, got)
		}
	}
}

func newKey(s *subject) {
	for _, p := range []algorithms.Algorithm{algorithms.FixedWindow, algorithms.SlidingLog, algorithms.SlidingWindow} {
		l := s.limit("z", algorithms.Policy{Algorithm: p, Quota: 10, Window: time.Minute})
		for round := range 20 {
			key := fmt.Sprint("key ", round)
			got := s.storm(64, 1, func(int, int) []algorithms.Charge {
				return []algorithms.Charge{{Key: key, Limit: l, Cost: 1}}
			})
			if got != 10 {
				s.Errorf("%v: %d of 64 first requests admitted, want 10", l.Policy, got)
			}
			s.left(l, key, 0)
		}
	}
}

// neverAboveTheBound: offered far more than the limit while time passes, exactly what one client
// alone would get.
func neverAboveTheBound(s *subject) {
	for _, l := range s.five("z", 5) {
		p := l.Policy
		p.Window = time.Second
		l, reference := s.limit("z", p), NewReference(s.clock.Now)
		alone := &subject{T: s.T, store: reference, clock: s.clock}
		s.clock.align(p.Window)
		for step := range 50 {
			want := int64(0)
			for alone.ask(l, "k", 1).OK {
				want++
			}
			if got := s.storm(16, 1, func(int, int) []algorithms.Charge {
				return []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}
			}); got != want {
				s.Fatalf("%v, step %d: %d admitted, want %d", p, step, got, want)
			}
			s.clock.Advance(40 * time.Millisecond)
		}
	}
}

// batchesInAnyOrder: the same counters, named in every order, must not wait for each other for
// ever.
func batchesInAnyOrder(s *subject) {
	limits := s.five("z", 1_000_000)
	s.storm(16, 100, func(g, i int) []algorithms.Charge {
		batch := make([]algorithms.Charge, 6)
		for j := range batch {
			k := (g*7 + i*3 + j*(1+2*(g%2))) % 10
			batch[j] = algorithms.Charge{Key: fmt.Sprint("key ", k/2), Limit: limits[k%len(limits)], Cost: 1}
		}
		return batch
	})
	used := int64(0)
	for _, l := range limits {
		for k := range 5 {
			used += l.Capacity - s.peek(l, fmt.Sprint("key ", k), 0).Remaining
		}
	}
	if used != 16*100*6 {
		s.Errorf("%d units in use, want %d", used, 16*100*6)
	}
}

// concurrentAllOrNone: what the narrow limit refused, the wide one never sees.
func concurrentAllOrNone(s *subject) {
	wide := s.five("wide", 1000)
	for i, narrow := range s.five("narrow", 50) {
		w := wide[(i+1)%len(wide)]
		got := s.storm(32, 10, func(g, _ int) []algorithms.Charge {
			batch := []algorithms.Charge{{Key: narrow.Algorithm.String(), Limit: w, Cost: 2}, {Key: "k", Limit: narrow, Cost: 1}}
			if g%2 == 0 {
				batch[0], batch[1] = batch[1], batch[0]
			}
			return batch
		})
		if left := s.peek(w, narrow.Algorithm.String(), 0).Remaining; got != 50 || left != 900 {
			s.Errorf("%v and %v: %d admitted, %d of 1000 left; want 50 and 900", narrow.Policy, w.Policy, got, left)
		}
	}
}

// concurrentRefunds: everything taken is given back, and nothing is left in use.
func concurrentRefunds(s *subject) {
	for _, l := range s.five("z", 100) {
		var done sync.WaitGroup
		for range 16 {
			done.Go(func() {
				for range 20 {
					take, out := []algorithms.Charge{{Key: "k", Limit: l, Cost: 3}}, make([]algorithms.Outcome, 1)
					if err := s.store.Apply(context.Background(), take, out); err != nil || !out[0].OK {
						s.Errorf("%v: take: %+v, %v", l.Policy, out[0], err)
						return
					}
					back := []algorithms.Charge{{Key: "k", Limit: l, Cost: -3, Mark: out[0].Mark}}
					if err := s.store.Apply(context.Background(), back, out); err != nil || !out[0].OK {
						s.Errorf("%v: give back: %+v, %v", l.Policy, out[0], err)
					}
				}
			})
		}
		done.Wait()
		s.left(l, "k", 100)
	}
}
