package storetest

// What goes beyond counting: queues, which answer with a slot; leases, which are given back; bans,
// which are asked for.

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// queuePolicies have a part that may go at once, a bound in time, a fraction and a coarse tick
// among them.
var queuePolicies = []algorithms.Policy{
	{Algorithm: algorithms.LeakyBucket, Quota: 10, Window: time.Second, Burst: 6, Queue: 5},
	{Algorithm: algorithms.LeakyBucket, Quota: 7, Window: 2 * time.Second, Burst: 20, Queue: 12},
	{Algorithm: algorithms.LeakyBucket, Quota: 3, Window: 3 * time.Second, Burst: 6, Queue: 5, MaxWait: 2 * time.Second},
	{Algorithm: algorithms.LeakyBucket, Quota: 999, Window: 365 * 24 * time.Hour, Burst: 999, Queue: 500, MaxWait: 30 * 24 * time.Hour},
}

var leasePolicies = []algorithms.Policy{
	{Algorithm: algorithms.Concurrency, Quota: 1, Window: time.Second},
	{Algorithm: algorithms.Concurrency, Quota: 100, Window: time.Minute},
}

var queueCases = []testCase{
	{"slots", queueSlots},
	{"max_wait", queueMaxWait},
	{"constant_rate", queueConstantRate},
	{"leaver", queueLeaver},
	{"who_has_a_slot", queueWhoHasASlot},
	{"a_batch_has_one_slot", queueOneSlot},
	{"reload", queueReload},
	{"concurrent", queueConcurrent},
}

// leaseCases begin with the numbered promises that need no wait: there is none for units in flight.
var leaseCases = []testCase{
	{"2_remaining_is_true", remainingIsTrue},
	{"5_above_capacity_never", aboveCapacityNever},
	{"6_peek_changes_nothing", peekChangesNothing},
	{"6_cost_zero_takes_nothing", costZeroTakesNothing},
	{"F51_given_back_once", leaseOneEach},
	{"expire_exactly", leaseExpires},
	{"renewed", leaseRenewed},
	{"of_one_moment", leasesOfOneMoment},
	{"changed_quota", leaseChangedQuota},
	{"concurrent", leaseConcurrent},
}

var banCases = []testCase{
	{"lasts_exactly", banLastsExactly},
	{"is_not_extended", banIsNotExtended},
	{"refuses_all_of_a_batch", banRefusesAll},
	{"a_check_takes_nothing", checkTakesNothing},
	{"clock_steps", banClockSteps},
	{"concurrent", banConcurrent},
}

// queue is ten a second of which some wait.
func (s *subject) queue(zone string, queue, delay int64, maxWait time.Duration) *algorithms.Limit {
	s.Helper()
	return s.limit(zone, algorithms.Policy{
		Algorithm: algorithms.LeakyBucket, Quota: 10, Window: time.Second, Burst: queue + 1, Queue: queue - delay, MaxWait: maxWait,
	})
}

func (s *subject) leases(zone string, n int64) *algorithms.Limit {
	s.Helper()
	return s.limit(zone, algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: n, Window: time.Minute})
}

// slots takes one unit after the other at one moment and wants the delays, in milliseconds.
func (s *subject) slots(l *algorithms.Limit, want ...int64) (last algorithms.Outcome) {
	s.Helper()
	for i, delay := range want {
		if last = s.take(l, "k", 1); last.Delay != time.Duration(delay)*time.Millisecond {
			s.Fatalf("%v: request %d has the slot %v, want %d ms", l.Policy, i, last.Delay, delay)
		}
	}
	return last
}

func queueSlots(s *subject) {
	l, some := s.queue("z", 5, 0, 0), s.queue("some at once", 5, 3, 0)
	s.slots(l, 0, 100, 200, 300, 400, 500)
	s.refused(l, "k", 1, 100*time.Millisecond)
	s.slots(some, 0, 0, 0, 0, 100, 200)
	s.refused(some, "k", 1, 100*time.Millisecond)
	s.clock.Advance(100*time.Millisecond - tick)
	s.refused(l, "k", 1, tick)
	s.clock.Advance(tick)
	s.slots(l, 500)
	s.slots(some, 200)
	s.clock.Advance(550 * time.Millisecond)
	s.slots(l, 50, 150, 250, 350, 450)
	s.clock.Advance(time.Hour)
	s.slots(l, 0, 100)
}

func queueMaxWait(s *subject) {
	short, exact := s.queue("short", 5, 0, 250*time.Millisecond), s.queue("exact", 5, 0, 300*time.Millisecond)
	almost := s.queue("almost", 5, 0, 300*time.Millisecond-tick)
	s.slots(short, 0, 100, 200)
	s.slots(exact, 0, 100, 200, 300)
	s.slots(almost, 0, 100, 200)
	for l, wait := range map[*algorithms.Limit]time.Duration{short: 50 * time.Millisecond, exact: 100 * time.Millisecond, almost: tick} {
		if o := s.refused(l, "k", 1, wait); o.Remaining != 0 || o.Next != wait {
			s.Errorf("%v: %+v", l.Policy, o)
		}
	}
	s.clock.Advance(tick)
	if o := s.take(almost, "k", 1); o.Delay != 300*time.Millisecond-tick {
		s.Errorf("%+v", o)
	}
}

// queueConstantRate: three a second have no whole interval, and lose nothing by it.
func queueConstantRate(s *subject) {
	l := s.limit("z", algorithms.Policy{Algorithm: algorithms.LeakyBucket, Quota: 3, Window: time.Second, Burst: 301, Queue: 300})
	for i := range int64(300) {
		if o, want := s.take(l, "k", 1), time.Duration((i*1_000_000+2)/3)*tick; o.Delay != want {
			s.Fatalf("request %d has the slot %v, want %v", i, o.Delay, want)
		}
	}
	if o := s.take(l, "k", 1); o.Delay != 100*time.Second {
		s.Errorf("%+v", o)
	}
}

// queueLeaver: only the last slot can be given back, unless those behind it move up; then it is
// given back by force.
func queueLeaver(s *subject) {
	l := s.queue("z", 5, 0, 0)
	s.slots(l, 0)
	b := s.slots(l, 100)
	s.slots(l, 200)
	last := s.slots(l, 300)
	s.clock.Advance(10 * time.Millisecond)
	back := algorithms.Charge{Key: "k", Limit: l, Cost: -1, Mark: b.Mark}
	if o := s.apply(back)[0]; !o.OK || o.Remaining != 2 {
		s.Errorf("a slot with others behind it was given back: %+v", o)
	}
	s.slots(l, 390)
	back.Force = true
	if o := s.apply(back)[0]; o.Remaining != 2 {
		s.Errorf("a slot was not given back by force: %+v", o)
	}
	// The last is the one that was taken last; its mark is where it stands, not who had it.
	back.Force, back.Mark = false, last.Mark
	if o := s.apply(back)[0]; o.Remaining != 3 {
		s.Errorf("the last slot was not given back: %+v", o)
	}
	s.slots(l, 290)
}

func queueWhoHasASlot(s *subject) {
	l := s.queue("z", 5, 0, 0)
	c := algorithms.Charge{Key: "k", Limit: l, Cost: 1}
	s.take(l, "k", 3)
	peek, check, dry, forced, never := c, c, c, c, c
	peek.Peek, check.Check, dry.DryRun, forced.Force, never.Cost = true, true, true, true, 4
	for _, want := range []struct {
		charge algorithms.Charge
		delay  time.Duration
	}{
		{peek, 300 * time.Millisecond}, {check, 300 * time.Millisecond}, {never, 0}, {algorithms.Charge{Key: "k", Limit: l}, 0},
		{dry, 300 * time.Millisecond}, {forced, 400 * time.Millisecond}, {c, 500 * time.Millisecond}, {forced, 600 * time.Millisecond}, {c, 0},
	} {
		if o := s.apply(want.charge)[0]; o.Delay != want.delay {
			s.Errorf("%+v: %+v, want a delay of %v", want.charge, o, want.delay)
		}
	}
}

// queueOneSlot: two charges on one counter wait for the slot of their sum, so neither waits longer
// than max_wait.
func queueOneSlot(s *subject) {
	l := s.queue("z", 5, 0, 200*time.Millisecond)
	c := algorithms.Charge{Key: "k", Limit: l, Cost: 1}
	for _, want := range []time.Duration{0, 200 * time.Millisecond} {
		if out := s.apply(c, c); !out[0].OK || !out[1].OK || out[0].Delay != want || out[1].Delay != want {
			s.Errorf("%+v, want both at %v", out, want)
		}
	}
	s.refused(l, "k", 1, 200*time.Millisecond)
}

// queueReload: a meter that becomes a queue is the same counter, and so is a queue with another
// rate.
func queueReload(s *subject) {
	meter := s.limit("z", algorithms.Policy{Algorithm: algorithms.LeakyBucket, Quota: 10, Window: time.Second, Burst: 6})
	faster := s.limit("z", algorithms.Policy{Algorithm: algorithms.LeakyBucket, Quota: 20, Window: time.Second, Burst: 6, Queue: 5})
	if o := s.take(meter, "k", 3); o.Delay != 0 {
		s.Errorf("a meter delays: %+v", o)
	}
	s.slots(s.queue("z", 5, 0, 0), 300)
	s.slots(faster, 200)
	if o := s.take(meter, "k", 1); o.Delay != 0 || o.Remaining != 0 {
		s.Errorf("a meter delays: %+v", o)
	}
}

// queueConcurrent: of many who come at once each gets a slot of its own.
func queueConcurrent(s *subject) {
	l := s.queue("z", 50, 10, 0)
	var mu sync.Mutex
	var slots []time.Duration
	var all sync.WaitGroup
	for range 64 {
		all.Go(func() {
			charges, out := []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1)
			if err := s.store.Apply(context.Background(), charges, out); err != nil {
				s.Error(err)
			} else if out[0].OK {
				mu.Lock()
				defer mu.Unlock()
				slots = append(slots, out[0].Delay)
			}
		})
	}
	all.Wait()
	slices.Sort(slots)
	for i, slot := range slots {
		if want := time.Duration(max(0, i-10)) * 100 * time.Millisecond; slot != want {
			s.Fatalf("slot %d is at %v, want %v", i, slot, want)
		}
	}
	if len(slots) != 51 {
		s.Errorf("%d slots given, want 51", len(slots))
	}
}

// refusedInFlight must be refused for nobody knows how long.
func (s *subject) refusedInFlight(l *algorithms.Limit) {
	s.Helper()
	if o := s.ask(l, "k", 1); o.OK || o.Retry != algorithms.Unknown || o.Next != algorithms.Unknown || o.Remaining != 0 {
		s.Fatalf("%v: %+v, want a refusal without a wait", l.Policy, o)
	}
}

// giveBack ends a lease, without force: what was not taken cannot be given back.
func (s *subject) giveBack(l *algorithms.Limit, mark, left int64) {
	s.Helper()
	o := s.apply(algorithms.Charge{Key: "k", Limit: l, Cost: -1, Mark: mark})[0]
	if !o.OK || o.Remaining != left {
		s.Fatalf("%v: given back: %+v, want %d remaining", l.Policy, o, left)
	}
}

// renew gives back and takes anew at once, whatever the state.
func (s *subject) renew(l *algorithms.Limit, mark, left int64) int64 {
	s.Helper()
	out := s.apply(algorithms.Charge{Key: "k", Limit: l, Cost: -1, Mark: mark}, algorithms.Charge{Key: "k", Limit: l, Cost: 1, Force: true})
	if !out[0].OK || !out[1].OK || out[1].Remaining != left || out[1].Mark != s.clock.Now() {
		s.Fatalf("%v: renewed: %+v, want %d remaining", l.Policy, out, left)
	}
	return out[1].Mark
}

func leaseOneEach(s *subject) {
	l := s.leases("z", 3)
	var marks []int64
	for range 3 {
		marks = append(marks, s.take(l, "k", 1).Mark)
		s.clock.Advance(time.Second)
	}
	s.refusedInFlight(l)
	s.refused(l, "k", 4, algorithms.Never)
	s.take(l, "other", 3)
	s.giveBack(l, marks[1], 1)
	s.giveBack(l, marks[1], 1) // once
	s.giveBack(l, marks[1]+1, 1)
	s.take(l, "k", 1)
	s.refusedInFlight(l)
	s.giveBack(l, marks[0], 1)
	s.giveBack(l, marks[2], 2)
	if o := s.apply(algorithms.Charge{Key: "k", Limit: l, Cost: -9, Mark: s.clock.Now()})[0]; o.Remaining != 3 || o.Next != algorithms.Never {
		s.Errorf("all given back: %+v", o)
	}
	s.giveBack(l, marks[0], 3)
}

// leaseExpires: who is silent for the lease time is no longer in flight, to the microsecond, and
// gives nothing back.
func leaseExpires(s *subject) {
	l := s.leases("z", 2)
	first := s.take(l, "k", 1).Mark
	s.clock.Advance(10 * time.Second)
	s.take(l, "k", 1)
	s.clock.Advance(l.Window - 10*time.Second - tick)
	s.refusedInFlight(l)
	s.clock.Advance(tick)
	s.left(l, "k", 1)
	s.giveBack(l, first, 1)
	s.take(l, "k", 1)
	s.refusedInFlight(l)
	s.clock.Advance(l.Window)
	s.left(l, "k", 2)
}

func leaseRenewed(s *subject) {
	l := s.leases("z", 2)
	mark := s.take(l, "k", 1).Mark
	s.take(l, "k", 1) // never renewed
	for range 5 {
		s.clock.Advance(l.Window / 3)
		left := s.peek(l, "k", 0).Remaining
		mark = s.renew(l, mark, left)
	}
	s.left(l, "k", 1)
	s.giveBack(l, mark, 2)
	// Renewed too late: it is in flight all the same, beyond the quota if its place was taken.
	late := s.take(l, "k", 1).Mark
	s.clock.Advance(l.Window)
	s.take(l, "k", 2)
	late = s.renew(l, late, 0)
	s.refusedInFlight(l)
	s.giveBack(l, late, 0)
	s.giveBack(l, late, 1) // of the same moment: one of the two that were taken then
}

// leasesOfOneMoment are interchangeable: each gives back one.
func leasesOfOneMoment(s *subject) {
	l := s.leases("z", 5)
	mark := s.take(l, "k", 1).Mark
	for range 4 {
		if m := s.take(l, "k", 1).Mark; m != mark {
			s.Fatalf("the marks of one moment are %d and %d", mark, m)
		}
	}
	s.refusedInFlight(l)
	s.clock.Advance(time.Second)
	renewed := s.renew(l, mark, 0)
	for i := range int64(4) {
		s.giveBack(l, mark, i+1)
	}
	s.giveBack(l, mark, 4)
	s.giveBack(l, renewed, 5)
}

func leaseChangedQuota(s *subject) {
	s.take(s.leases("z", 10), "k", 6)
	s.refusedInFlight(s.leases("z", 4))
	s.left(s.leases("z", 8), "k", 2)
	s.refused(s.leases("z", 0), "k", 1, algorithms.Never)
	s.refused(s.leases("none", 0), "k", 1, algorithms.Never)
}

// leaseConcurrent: never more in flight than may be, and none is left at the end.
func leaseConcurrent(s *subject) {
	l := s.leases("z", 7)
	var inFlight, admitted atomic.Int64
	var all sync.WaitGroup
	apply := func(charges ...algorithms.Charge) []algorithms.Outcome {
		out := make([]algorithms.Outcome, len(charges))
		if err := s.store.Apply(context.Background(), charges, out); err != nil {
			s.Error(err)
		}
		return out
	}
	for g := range uint64(32) {
		all.Go(func() {
			r := rand.New(rand.NewPCG(g, 0))
			for range 40 {
				o := apply(algorithms.Charge{Key: "k", Limit: l, Cost: 1})[0]
				if !o.OK {
					continue
				}
				admitted.Add(1)
				if n := inFlight.Add(1); n > 7 {
					s.Errorf("%d in flight, want at most 7", n)
				}
				mark := o.Mark
				if r.IntN(3) == 0 {
					s.clock.Advance(tick)
					mark = apply(algorithms.Charge{Key: "k", Limit: l, Cost: -1, Mark: mark}, algorithms.Charge{Key: "k", Limit: l, Cost: 1, Force: true})[1].Mark
				}
				inFlight.Add(-1)
				apply(algorithms.Charge{Key: "k", Limit: l, Cost: -1, Mark: mark})
			}
		})
	}
	all.Wait()
	if s.left(l, "k", 7); admitted.Load() < 40 {
		s.Errorf("%d admitted", admitted.Load())
	}
}

// banned wants the key to be banned for the time.
func (s *subject) banned(ban *algorithms.Limit, key string, left time.Duration) {
	s.Helper()
	o := s.apply(algorithms.Ask(ban, key))[0]
	if o.OK != (left == 0) || o.Retry != left || (o.Remaining == 0) != (left > 0) || o.Mark != 0 || (left > 0 && o.Next != left) {
		s.Fatalf("%s: %+v, want banned for %v", key, o, left)
	}
}

func banLastsExactly(s *subject) {
	ban, other := algorithms.Ban("z"), algorithms.Ban("other")
	for i, d := range []time.Duration{tick, time.Second, 24 * time.Hour, 10 * 365 * 24 * time.Hour} {
		key := fmt.Sprint("key ", i)
		s.banned(ban, key, 0)
		s.apply(algorithms.Ask(ban, key), algorithms.Banish(ban, key, d))
		s.banned(ban, key, d)
		s.banned(other, key, 0)
		s.banned(ban, "another", 0)
		s.clock.Advance(d - tick)
		s.banned(ban, key, tick)
		s.clock.Advance(tick)
		s.banned(ban, key, 0)
	}
}

func banIsNotExtended(s *subject) {
	ban := algorithms.Ban("z")
	for i := range time.Duration(3) {
		charges := []algorithms.Charge{algorithms.Ask(ban, "k"), algorithms.Banish(ban, "k", time.Minute)}
		if binding := algorithms.Binding(charges, s.apply(charges...)); (binding < 0) != (i == 0) {
			s.Errorf("ban %d: binding %d", i, binding)
		}
		s.banned(ban, "k", time.Minute-i*time.Second)
		s.clock.Advance(time.Second)
	}
	s.apply(algorithms.Banish(ban, "k", time.Minute)) // unasked the times add up
	s.banned(ban, "k", 2*time.Minute-3*time.Second)
	s.apply(algorithms.Banish(ban, "k", 0), algorithms.Banish(ban, "k", -time.Minute))
	s.banned(ban, "k", 2*time.Minute-3*time.Second)
}

// banRefusesAll: a banned client takes nothing from any limit, and is told the rest of the ban.
func banRefusesAll(s *subject) {
	ban := algorithms.Ban("z")
	s.apply(algorithms.Banish(ban, "k", time.Hour))
	for _, l := range append(s.five("z", 5), s.queue("queue", 4, 0, 0), s.leases("z", 5)) {
		charges := []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}, algorithms.Ask(ban, "k")}
		out := s.apply(charges...)
		if algorithms.Binding(charges, out) != 1 || out[1].Retry != time.Hour || out[0].Mark != 0 {
			s.Errorf("%v: %+v", l.Policy, out)
		}
		s.left(l, "k", l.Capacity)
	}
}

// checkTakesNothing: a check of any limit refuses what a peek would only tell, and takes no more
// than that.
func checkTakesNothing(s *subject) {
	for _, l := range append(s.five("z", 5), s.queue("queue", 4, 0, 0), s.leases("z", 5)) {
		s.take(l, "k", 3)
		check := func(n int64) algorithms.Charge { return algorithms.Charge{Key: "k", Limit: l, Cost: n, Check: true} }
		other := algorithms.Charge{Key: "other", Limit: l, Cost: 1}
		for _, n := range []int64{0, 2, -1, 3, 6} {
			looked := s.peek(l, "k", n)
			out := s.apply(other, check(n))
			if out[1] != looked || (out[0].Mark != 0) != looked.OK {
				s.Errorf("%v: a check of %d: %+v, a peek %+v", l.Policy, n, out, looked)
			}
			s.left(l, "k", 2)
		}
		s.left(l, "other", 2)
		// Beside a charge on the same counter it asks about what was there before.
		if out := s.apply(check(2), algorithms.Charge{Key: "k", Limit: l, Cost: 2}, check(1)); !out[0].OK || !out[1].OK || !out[2].OK || out[0].Remaining != 0 {
			s.Errorf("%v: %+v", l.Policy, out)
		}
		dry := check(3)
		if dry.DryRun = true; s.apply(other, dry)[0].Mark == 0 {
			s.Errorf("%v: a dry run refused", l.Policy)
		}
	}
}

// banClockSteps: a clock that goes back shortens no ban, and lengthens none beyond its own time.
func banClockSteps(s *subject) {
	ban := algorithms.Ban("z")
	s.apply(algorithms.Banish(ban, "k", time.Minute))
	s.clock.Advance(time.Second)
	s.banned(ban, "k", 59*time.Second)
	s.clock.Advance(-time.Hour)
	s.banned(ban, "k", time.Minute)
	s.clock.Advance(59 * time.Second)
	s.banned(ban, "k", time.Second)
	s.clock.Advance(time.Second)
	s.banned(ban, "k", 0)
}

// banConcurrent: of all instances that want to ban a key at once, one does.
func banConcurrent(s *subject) {
	ban := algorithms.Ban("z")
	got := s.storm(32, 5, func(int, int) []algorithms.Charge {
		return []algorithms.Charge{algorithms.Ask(ban, "k"), algorithms.Banish(ban, "k", time.Minute)}
	})
	if got != 1 {
		s.Errorf("banned %d times", got)
	}
	s.banned(ban, "k", time.Minute)
}
