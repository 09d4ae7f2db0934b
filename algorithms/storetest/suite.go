package storetest

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// group is cases, and the policies that [subject.each] runs them for.
type group struct {
	name     string
	cases    []testCase
	policies []algorithms.Policy
}

// Run holds a store to every promise that can be seen through [algorithms.Store]. newStore must
// return an empty store that takes its time from clock; it is called once per test, and Run closes
// what it returns.
func Run(t *testing.T, newStore func(t *testing.T, clock *Clock) algorithms.Store) {
	groups := []group{
		{"promise", promiseCases, policies},
		{"batch", batchCases, nil},
		{"refund", refundCases, nil},
		{"field", fieldCases, nil},
		{"concurrent", concurrentCases, nil},
		{"differential", []testCase{{"random_batches", func(s *subject) { Differential(s, s.store, s.clock, 5000, 1) }}}, nil},
		{"queue_promise", promiseCases, queuePolicies},
		{"queue", queueCases, nil},
		{"lease", leaseCases, leasePolicies},
		{"ban", banCases, nil},
	}
	for _, g := range groups {
		t.Run(g.name, func(t *testing.T) {
			for _, c := range g.cases {
				t.Run(c.name, func(t *testing.T) {
					clock := NewClock()
					store := newStore(t, clock)
					defer func() {
						if err := store.Close(); err != nil {
							t.Errorf("close: %v", err)
						}
					}()
					c.run(&subject{T: t, store: store, clock: clock, policies: g.policies})
				})
			}
		})
	}
}

type testCase struct {
	name string
	run  func(s *subject)
}

// subject is a store under test with its clock. Every answer that passes through it is checked for
// what must hold of any answer.
type subject struct {
	*testing.T
	store    algorithms.Store
	clock    *Clock
	policies []algorithms.Policy
}

// policies are one or two of each kind, with a coarse tick, a fraction and large numbers among
// them.
var policies = []algorithms.Policy{
	{Algorithm: algorithms.FixedWindow, Quota: 5, Window: time.Minute},
	{Algorithm: algorithms.SlidingLog, Quota: 3, Window: 10 * time.Second},
	{Algorithm: algorithms.SlidingWindow, Quota: 10, Window: time.Minute},
	{Algorithm: algorithms.SlidingWindow, Quota: 1000, Window: 365 * 24 * time.Hour},
	{Algorithm: algorithms.TokenBucket, Quota: 3, Window: time.Second, Burst: 3},
	{Algorithm: algorithms.TokenBucket, Quota: 7, Window: time.Second, Burst: 20},
	{Algorithm: algorithms.TokenBucket, Quota: 100_000_000, Window: time.Second, Burst: 1000},
	{Algorithm: algorithms.TokenBucket, Quota: 999, Window: 365 * 24 * time.Hour, Burst: 999},
	{Algorithm: algorithms.LeakyBucket, Quota: 10, Window: time.Second, Burst: 1},
	{Algorithm: algorithms.LeakyBucket, Quota: 10, Window: time.Second, Burst: 6},
}

func (s *subject) limit(zone string, p algorithms.Policy) *algorithms.Limit {
	s.Helper()
	l, err := algorithms.Compile(zone, p)
	if err != nil {
		s.Fatalf("compile %+v: %v", p, err)
	}
	return l
}

func (s *subject) apply(charges ...algorithms.Charge) []algorithms.Outcome {
	s.Helper()
	// Longer than needed, and dirty: a store answers every charge in full and touches nothing else.
	dirty := algorithms.Outcome{OK: true, Remaining: -7, Retry: 7, Next: -7, Delay: 7, Mark: 7}
	out := make([]algorithms.Outcome, len(charges)+1)
	for i := range out {
		out[i] = dirty
	}
	asked := slices.Clone(charges)
	if err := s.store.Apply(context.Background(), charges, out); err != nil {
		s.Fatalf("apply: %v", err)
	}
	for i := range charges {
		if err := plausible(&charges[i], out[i]); err != "" {
			s.Fatalf("%s: charge %+v of limit %+v answered %+v", err, charges[i], charges[i].Limit.Policy, out[i])
		}
	}
	if out[len(charges)] != dirty || !slices.Equal(charges, asked) {
		s.Fatalf("apply changed what is not its own: charges %+v, out %+v", charges, out)
	}
	return out[:len(charges)]
}

// plausible says what is wrong with an answer that no store may ever give.
func plausible(c *algorithms.Charge, o algorithms.Outcome) string {
	switch {
	case o.Remaining < 0 || o.Remaining > c.Limit.Capacity:
		return "remaining out of range"
	case o.OK != (o.Retry == 0):
		return "a wait must be exactly when refused"
	case !isWait(c, o.Retry) || !isWait(c, o.Next) || o.Next == 0:
		return "a wait must be above 0, but for units in flight, where it must be unknown or never"
	case o.Delay < 0 || o.Delay > 0 && (!o.OK || c.Cost <= 0 || c.Limit.Queue == 0):
		return "a delay must be of what passes a queue"
	case (o.Next == algorithms.Never) != (o.Remaining == c.Limit.Capacity):
		return "next must be never exactly when nothing more can become available"
	case !o.OK && (c.Cost <= 0 || c.Force):
		return "what takes nothing or is forced cannot be refused"
	}
	return ""
}

// isWait reports whether a time may be a wait of the charge's limit.
func isWait(c *algorithms.Charge, d time.Duration) bool {
	if c.Limit.Algorithm == algorithms.Concurrency {
		return d == 0 || d == algorithms.Unknown || d == algorithms.Never
	}
	return d >= 0
}

func (s *subject) ask(l *algorithms.Limit, key string, cost int64) algorithms.Outcome {
	s.Helper()
	return s.apply(algorithms.Charge{Key: key, Limit: l, Cost: cost})[0]
}

func (s *subject) peek(l *algorithms.Limit, key string, cost int64) algorithms.Outcome {
	s.Helper()
	return s.apply(algorithms.Charge{Key: key, Limit: l, Cost: cost, Peek: true})[0]
}

// take must be admitted.
func (s *subject) take(l *algorithms.Limit, key string, cost int64) algorithms.Outcome {
	s.Helper()
	o := s.ask(l, key, cost)
	if !o.OK {
		s.Fatalf("%v refused a cost of %d: %+v", l.Policy, cost, o)
	}
	return o
}

// refused must be refused for the given wait; below 0, for any.
func (s *subject) refused(l *algorithms.Limit, key string, cost int64, wait time.Duration) algorithms.Outcome {
	s.Helper()
	o := s.ask(l, key, cost)
	if o.OK || (wait >= 0 && o.Retry != wait) {
		s.Fatalf("%v answered a cost of %d with %+v, want a refusal for %v", l.Policy, cost, o, wait)
	}
	return o
}

// left checks what remains.
func (s *subject) left(l *algorithms.Limit, key string, want int64) {
	s.Helper()
	if o := s.peek(l, key, 1); o.Remaining != want {
		s.Fatalf("%v has %d remaining, want %d", l.Policy, o.Remaining, want)
	}
}

// each runs body for one limit of every kind, each in a zone of its own and a little after the
// start of a window.
func (s *subject) each(body func(s *subject, l *algorithms.Limit)) {
	for i, p := range s.policies {
		s.Run(p.Algorithm.String()+"_"+p.Window.String(), func(t *testing.T) {
			sub := &subject{T: t, store: s.store, clock: s.clock}
			sub.clock.align(p.Window)
			sub.clock.Advance(p.Window / 7)
			body(sub, sub.limit(fmt.Sprint("zone.", i), p))
		})
	}
}
