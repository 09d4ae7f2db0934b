package storetest

// Several charges on one request: all or none, and sums on one counter.

import (
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

var batchCases = []testCase{
	{"all_or_none", allOrNone},
	{"sum_on_one_counter", sumOnOneCounter},
	{"dry_run", dryRuns},
	{"force", forced},
	{"held", held},
	{"empty", func(s *subject) { s.apply() }},
}

// three returns a limit of every kind, all with the same capacity.
func (s *subject) three(zone string, n int64) []*algorithms.Limit {
	return []*algorithms.Limit{
		s.limit(zone, algorithms.Policy{Algorithm: algorithms.FixedWindow, Quota: n, Window: time.Minute}),
		s.limit(zone, algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: n, Window: time.Minute}),
		s.limit(zone, algorithms.Policy{Algorithm: algorithms.SlidingWindow, Quota: n, Window: time.Minute}),
		s.limit(zone, algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: n, Window: time.Minute, Burst: n}),
		s.limit(zone, algorithms.Policy{Algorithm: algorithms.LeakyBucket, Quota: n, Window: time.Minute, Burst: n}),
	}
}

func allOrNone(s *subject) {
	wide, narrow := s.three("wide", 10), s.three("narrow", 3)
	for _, n := range narrow {
		key := n.Algorithm.String()
		for i := range int64(5) {
			charges := make([]algorithms.Charge, 0, len(wide)+1)
			for _, w := range wide {
				charges = append(charges, algorithms.Charge{Key: key, Limit: w, Cost: 1})
			}
			charges = append(charges, algorithms.Charge{Key: key, Limit: n, Cost: 1})
			out := s.apply(charges...)
			admitted := i < 3
			if binding := algorithms.Binding(charges, out); admitted != (binding < 0) || (!admitted && binding != len(wide)) {
				s.Fatalf("request %d: binding %d, %+v", i, binding, out)
			}
			for j, w := range wide {
				if want := 10 - min(i+1, 3); out[j].Remaining != want || !out[j].OK || (out[j].Mark != 0) != admitted {
					s.Fatalf("request %d, %v: %+v, want %d remaining", i, w.Policy, out[j], want)
				}
			}
		}
		for _, w := range wide {
			s.left(w, key, 7)
		}
	}
}

func sumOnOneCounter(s *subject) {
	for _, l := range s.three("z", 5) {
		c := algorithms.Charge{Key: "k", Limit: l, Cost: 2}
		out := s.apply(c, c)
		if !out[0].OK || !out[1].OK || out[0].Remaining != 1 || out[1].Remaining != 1 {
			s.Fatalf("%v: %+v", l.Policy, out)
		}
		c.Cost = 1
		if out = s.apply(c, c); out[0].OK || out[1].OK || out[0].Retry != out[1].Retry {
			s.Fatalf("%v: two of one each on one remaining: %+v", l.Policy, out)
		}
		s.left(l, "k", 1)
		s.clock.Advance(out[0].Retry - tick)
		if out = s.apply(c, c); out[0].OK || out[0].Retry != tick {
			s.Fatalf("%v: one tick before the wait is over: %+v", l.Policy, out)
		}
		s.clock.Advance(tick)
		if out = s.apply(c, c); !out[0].OK || !out[1].OK {
			s.Fatalf("%v: after the wait: %+v", l.Policy, out)
		}
		c.Cost = 3
		if out = s.apply(c, c); out[0].Retry != algorithms.Never {
			s.Fatalf("%v: a sum above the capacity: %+v", l.Policy, out)
		}
	}
}

func dryRuns(s *subject) {
	wide, narrow := s.three("wide", 10), s.three("narrow", 3)
	for i, l := range narrow {
		w := wide[(i+1)%len(wide)]
		key := l.Algorithm.String()
		enforce := algorithms.Charge{Key: key, Limit: w, Cost: 4}
		dry := algorithms.Charge{Key: key, Limit: l, Cost: 3, DryRun: true}
		s.apply(enforce, dry)
		s.left(w, key, 6)
		s.left(l, key, 0)
		// A dry run that would refuse refuses nothing and takes nothing.
		if out := s.apply(enforce, dry); algorithms.Binding([]algorithms.Charge{enforce, dry}, out) >= 0 || out[1].OK {
			s.Fatalf("%v: %+v", l.Policy, out)
		}
		s.left(w, key, 2)
		// When the enforced rule refuses, the dry run takes nothing either.
		dry.Key = "other"
		if out := s.apply(enforce, dry); out[0].OK || !out[1].OK || out[1].Mark != 0 {
			s.Fatalf("%v: %+v", l.Policy, out)
		}
		s.left(l, "other", 3)
	}
}

func forced(s *subject) {
	for _, l := range s.three("z", 5) {
		out := s.apply(algorithms.Charge{Key: "k", Limit: l, Cost: 8, Force: true})
		if !out[0].OK || out[0].Remaining != 0 {
			s.Fatalf("%v: %+v", l.Policy, out[0])
		}
		o := s.refused(l, "k", 1, -1)
		s.clock.Advance(o.Retry - tick)
		s.refused(l, "k", 1, tick)
		s.clock.Advance(tick)
		s.take(l, "k", 1)
	}
}

// held: what the request took in an earlier batch is asked for again by its retry.
func held(s *subject) {
	for _, l := range s.three("z", 5) {
		s.take(l, "k", 5)
		both := s.peek(l, "k", 3).Retry
		out := s.apply(algorithms.Charge{Key: "k", Limit: l, Cost: 1, Held: 2})
		if out[0].OK || out[0].Retry != both {
			s.Fatalf("%v: retry %v, want %v", l.Policy, out[0].Retry, both)
		}
		out = s.apply(algorithms.Charge{Key: "k", Limit: l, Cost: 1, Held: 5})
		if out[0].Retry != algorithms.Never {
			s.Fatalf("%v: retry %v, want never", l.Policy, out[0].Retry)
		}
	}
}
