package storetest

// Several charges on one request: all or none, and sums on one counter.

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

var batchCases = []testCase{
	{"all_or_none", allOrNone},
	{"sum_on_one_counter", sumOnOneCounter},
	{"dry_run", dryRuns},
	{"force", forced},
	{"held", held},
	{"F30_group_and_special", groupAndSpecial},
	{"F32_three_zones_one_refuses", threeZones},
	{"F33_one_counter_twice_never", oneCounterTwice},
	{"equal_limits_share_a_counter", equalLimits},
	{"more_than_a_few_charges", manyCharges},
	{"huge_costs", hugeCosts},
	{"empty", func(s *subject) { s.apply() }},
}

// five returns a limit of every kind, all with the same capacity.
func (s *subject) five(zone string, n int64) []*algorithms.Limit {
	return []*algorithms.Limit{
		s.limit(zone, algorithms.Policy{Algorithm: algorithms.FixedWindow, Quota: n, Window: time.Minute}),
		s.limit(zone, algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: n, Window: time.Minute}),
		s.limit(zone, algorithms.Policy{Algorithm: algorithms.SlidingWindow, Quota: n, Window: time.Minute}),
		s.limit(zone, algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: n, Window: time.Minute, Burst: n}),
		s.limit(zone, algorithms.Policy{Algorithm: algorithms.LeakyBucket, Quota: n, Window: time.Minute, Burst: n}),
	}
}

func allOrNone(s *subject) {
	wide, narrow := s.five("wide", 10), s.five("narrow", 3)
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
	for _, l := range s.five("z", 5) {
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
	wide, narrow := s.five("wide", 10), s.five("narrow", 3)
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
	for _, l := range s.five("z", 5) {
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
	for _, l := range s.five("z", 5) {
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

func groupAndSpecial(s *subject) {
	for i, group := range s.five("group", 10) {
		special := s.five("special", 3)[(i+2)%5]
		admitted := 0
		for range 5 {
			charges := []algorithms.Charge{{Key: "k", Limit: group, Cost: 1}, {Key: "k", Limit: special, Cost: 1}}
			if algorithms.Binding(charges, s.apply(charges...)) < 0 {
				admitted++
			}
		}
		if admitted != 3 {
			s.Errorf("%v and %v: %d of 5 admitted, want 3", group.Policy, special.Policy, admitted)
		}
		s.left(group, "k", 7)
	}
}

func threeZones(s *subject) {
	for i, narrow := range s.five("narrow", 1) {
		a, b := s.five("a", 10)[i], s.five("b", 5)[(i+1)%5]
		charges := []algorithms.Charge{{Key: "k", Limit: a, Cost: 1}, {Key: "k", Limit: narrow, Cost: 1}, {Key: "k", Limit: b, Cost: 1}}
		s.apply(charges...)
		before := []algorithms.Outcome{s.peek(a, "k", 1), s.peek(narrow, "k", 1), s.peek(b, "k", 1)}
		out := s.apply(charges...)
		if algorithms.Binding(charges, out) != 1 || !slices.Equal(out, before) {
			s.Errorf("%v refuses: %+v, looked at alone %+v", narrow.Policy, out, before)
		}
		after := []algorithms.Outcome{s.peek(a, "k", 1), s.peek(narrow, "k", 1), s.peek(b, "k", 1)}
		if !slices.Equal(before, after) {
			s.Errorf("%v refused, and %+v became %+v", narrow.Policy, before, after)
		}
	}
}

func oneCounterTwice(s *subject) {
	for _, l := range s.five("z", 1) {
		c := algorithms.Charge{Key: "k", Limit: l, Cost: 1}
		if out := s.apply(c, c); out[0].Retry != algorithms.Never || out[1].Retry != algorithms.Never {
			s.Errorf("%v: %+v, want never", l.Policy, out)
		}
		s.left(l, "k", 1)
	}
}

// equalLimits: two handlers compile the same zone each for itself, and charge one counter, in one
// batch too.
func equalLimits(s *subject) {
	one, two := s.five("z", 5), s.five("z", 5)
	for i := range one {
		s.take(one[i], "k", 2)
		s.left(two[i], "k", 3)
		out := s.apply(algorithms.Charge{Key: "k", Limit: one[i], Cost: 2}, algorithms.Charge{Key: "k", Limit: two[i], Cost: 2})
		if out[0].OK || out[1].OK {
			s.Errorf("%v: 2 and 2 of 3 remaining: %+v", one[i].Policy, out)
		}
		out = s.apply(algorithms.Charge{Key: "k", Limit: one[i], Cost: 1}, algorithms.Charge{Key: "k", Limit: two[i], Cost: 2})
		if !out[0].OK || !out[1].OK || out[0].Remaining != 0 || out[1].Remaining != 0 {
			s.Errorf("%v: 1 and 2 of 3 remaining: %+v", one[i].Policy, out)
		}
	}
}

func manyCharges(s *subject) {
	var charges []algorithms.Charge
	for i := range 40 {
		for _, l := range s.five(fmt.Sprint("zone.", i%13), 5) {
			charges = append(charges, algorithms.Charge{Key: fmt.Sprint("key ", i), Limit: l, Cost: int64(i%5) + 1})
		}
	}
	for i, o := range s.apply(charges...) {
		if !o.OK || o.Remaining != 5-charges[i].Cost {
			s.Errorf("charge %d: %+v", i, o)
		}
	}
	// One that cannot pass, at the very end.
	charges = append(charges, algorithms.Charge{Key: "last", Limit: charges[0].Limit, Cost: 6})
	for i := range charges {
		charges[i].Cost = min(charges[i].Cost, 6)
		if i < len(charges)-1 {
			charges[i].Key += " afresh"
		}
	}
	if out := s.apply(charges...); algorithms.Binding(charges, out) != len(charges)-1 {
		s.Errorf("binding %d, want the last", algorithms.Binding(charges, out))
	}
	for _, c := range charges {
		s.left(c.Limit, c.Key, 5)
	}
}

func hugeCosts(s *subject) {
	for _, l := range s.five("z", 5) {
		for _, cost := range []int64{6, algorithms.MaxExact, algorithms.MaxExact + 1, math.MaxInt64} {
			s.refused(l, "k", cost, algorithms.Never)
			c := algorithms.Charge{Key: "k", Limit: l, Cost: cost}
			if out := s.apply(c, c); out[0].Retry != algorithms.Never {
				s.Errorf("%v: twice %d: %+v", l.Policy, cost, out)
			}
		}
		s.left(l, "k", 5)
		// A debt of any size is one that has an end, and can be given back.
		o := s.apply(algorithms.Charge{Key: "k", Limit: l, Cost: math.MaxInt64, Force: true})[0]
		if o.Remaining != 0 || s.peek(l, "k", 5).Retry == algorithms.Never {
			s.Errorf("%v: %+v", l.Policy, o)
		}
		s.refund(l, "k", math.MaxInt64, o.Mark)
		s.left(l, "k", 5)
	}
}
