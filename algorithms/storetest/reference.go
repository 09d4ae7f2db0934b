package storetest

import (
	"context"
	"strings"
	"sync"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Reference is the simplest store that is right: a map, a mutex and [algorithms.Decide]. It forgets
// nothing, so it is no store to serve with; it is what others are compared with.
type Reference struct {
	clock func() int64

	mu       sync.Mutex
	counters map[counterKey]algorithms.State
}

type counterKey struct {
	space algorithms.Space
	key   string
}

// NewReference returns an empty store that reads its time, in microseconds, from clock.
func NewReference(clock func() int64) *Reference {
	return &Reference{clock: clock, counters: map[counterKey]algorithms.State{}}
}

// Apply implements [algorithms.Store].
func (r *Reference) Apply(_ context.Context, charges []algorithms.Charge, out []algorithms.Outcome) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	opened := make(map[counterKey]*algorithms.Counter, len(charges))
	counters := make([]*algorithms.Counter, len(charges))
	for i := range charges {
		k := counterKey{charges[i].Limit.Space, charges[i].Key}
		if opened[k] == nil {
			state := r.counters[k]
			// A copy of the log too: what a refused batch did to it must be seen by nobody.
			state.Log = append([]algorithms.Entry(nil), state.Log...)
			opened[k] = &algorithms.Counter{State: state}
		}
		counters[i] = opened[k]
	}
	committed := algorithms.Decide(r.clock(), charges, counters, out)
	for k, c := range opened {
		if committed || c.Anchored {
			k.key = strings.Clone(k.key) // the caller's, which it may build in a buffer
			r.counters[k] = c.State
		}
	}
	return nil
}

// Close implements [algorithms.Store].
func (r *Reference) Close() error { return nil }
