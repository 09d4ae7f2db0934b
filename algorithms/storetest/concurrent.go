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
	for _, l := range s.three("z", 367) {
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
