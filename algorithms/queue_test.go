package algorithms

// What the numbered promises do not say of queues, leases and bans.

import (
	"math/rand/v2"
	"testing"
	"time"
)

// server is a queue by another definition than a level: it works on each unit for window/quota, one
// after the other in order of arrival. Times are in 1/quota µs, so that nothing is rounded; done is
// when all that was admitted is done.
type server struct {
	l    *Limit
	done int64
}

// admit says when a cost that arrives at now may begin, and false if it finds the queue full or
// would wait too long.
func (s *server) admit(now, cost int64) (delay time.Duration, ok bool) {
	l := s.l
	arrival := (now - now%l.tick) * l.Quota
	ahead := max(0, s.done-arrival)
	if ahead+cost*l.window > l.Burst*l.window {
		return 0, false
	}
	if late := ahead - (l.Burst-1-l.Queue)*l.window; l.Queue > 0 && late > 0 {
		ticks := ceilDiv(late, l.Quota*l.tick)
		if l.MaxWait > 0 && ticks*l.tick > l.MaxWait.Microseconds() {
			return 0, false
		}
		delay = time.Duration(ticks*l.tick-now%l.tick) * time.Microsecond
	}
	s.done = arrival + ahead + cost*l.window
	return delay, true
}

// randomQueue has small enough numbers for a server to count exactly, and in half of the cases a
// coarse tick.
func randomQueue(r *rand.Rand) *Limit {
	for {
		p := Policy{Algorithm: LeakyBucket, Quota: logUniform(r, 10_000), Burst: 2 + r.Int64N(40)}
		p.Window = time.Duration(10*logUniform(r, 1_000_000_000)) * time.Microsecond
		p.Queue = 1 + r.Int64N(p.Burst-1)
		if r.IntN(2) == 0 {
			p.MaxWait = time.Duration(1+r.Int64N(p.Burst*p.Window.Microseconds()/p.Quota+1)) * time.Microsecond
		}
		if l, err := Compile("z", p); err == nil && l.tick == 1 {
			return coarser(l, []int64{1, 10}[r.IntN(2)])
		}
	}
}

// A delay is exactly the time to the slot: what a server that works at the constant rate would need
// to get there.
func TestQueueServesInOrderAtTheConstantRate(t *testing.T) {
	var delayed, refused int
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 20))
		s := &single{l: randomQueue(r)}
		l, model := s.l, &server{l: s.l}
		now, last, units := int64(0), int64(-1), int64(0)
		for range 60 {
			cost := int64(1)
			if r.IntN(4) == 0 {
				cost += r.Int64N(l.Burst)
			}
			at := time.Duration(now) * time.Microsecond
			look := s.peek(at, cost)
			o := s.ask(at, cost)
			delay, ok := model.admit(now, cost)
			if o.OK != ok || o.Delay != delay || look.OK != ok || look.Delay != delay {
				t.Fatalf("seed %d: %+v tick %d at %d, cost %d: %+v, looked at %+v, want %t %v", seed, l.Policy, l.tick, now, cost, o, look, ok, delay)
			}
			if o.Delay < 0 || (l.MaxWait > 0 && o.Delay > l.MaxWait) {
				t.Fatalf("seed %d: %+v: %+v", seed, l.Policy, o)
			}
			if departs := now + delay.Microseconds(); ok && l.Queue == l.Burst-1 {
				if last >= 0 && (departs-last+l.tick)*l.Quota <= units*l.window {
					t.Fatalf("seed %d: %+v: %d units depart at %d and the next at %d", seed, l.Policy, units, last, departs)
				}
				last, units = departs, cost
			}
			if !ok {
				refused++
			} else if delay > 0 {
				delayed++
			}
			if r.IntN(3) == 0 {
				now += r.Int64N(4*l.window/l.Quota + 2)
			}
			if !o.OK && o.Retry != Never && r.IntN(3) == 0 {
				now += o.Retry.Microseconds()
			}
		}
	}
	if delayed < rounds || refused < rounds {
		t.Errorf("only %d delayed and %d refused: the schedule no longer tries", delayed, refused)
	}
}

// Charges of one batch on one counter share the slot of their sum, so that none of them waits
// longer than MaxWait.
func TestQueueBatchHasOneSlot(t *testing.T) {
	l := newQueue(t, 5, 0, ms(250)).l
	c := Charge{Limit: l, Cost: 2}
	r := request{}
	for i, want := range []time.Duration{0, ms(400)} {
		out, ok := r.apply(ms(0), c, c)
		if i == 1 {
			if ok || out[0].Retry != ms(200) || out[0].Delay != 0 { // room for 2 of 4, and 400 ms would be too long
				t.Errorf("%+v", out)
			}
			continue
		}
		if !ok || out[0].Delay != want || out[1].Delay != want {
			t.Errorf("%+v, want both at %v", out, want)
		}
	}
	if out, ok := r.apply(ms(200), c, Charge{Limit: l, Cost: 1, DryRun: true}); !ok || out[0].Delay != ms(200) || out[1].Delay != ms(200) {
		t.Errorf("%+v", out)
	}
}

// What takes nothing has no slot, and a refusal none either.
func TestQueueDelaysWhatTakes(t *testing.T) {
	s := newQueue(t, 5, 0, 0)
	mark := s.ask(0, 3).Mark
	for _, c := range []struct {
		charge Charge
		want   time.Duration
	}{
		{Charge{Cost: 0}, 0}, {Charge{Cost: 4}, 0}, {Charge{Cost: 4, DryRun: true}, 0},
		{Charge{Cost: 1, Peek: true}, ms(300)}, {Charge{Cost: 1, Check: true}, ms(300)},
		{Charge{Cost: -1, Mark: mark}, 0}, {Charge{Cost: 9, Force: true}, ms(200)}, {Charge{Cost: 1, Force: true}, ms(1100)},
	} {
		if o := s.decide(0, c.charge); o.Delay != c.want {
			t.Errorf("%+v: %+v, want %v", c.charge, o, c.want)
		}
	}
	if l := newSingle(t, Policy{Algorithm: LeakyBucket, Window: time.Second, Burst: 6, Queue: 5}); l.ask(0, 1).Retry != Never {
		t.Error("a queue at a rate of 0 admits")
	}
}

// Given back by force from anywhere, or without it from the end: what is left in the queue is as if
// never taken.
func TestQueueGivesBack(t *testing.T) {
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 21))
		s := &single{l: randomQueue(r)}
		s.l.Policy.MaxWait, s.l.latest = 0, MaxExact
		with := single{l: s.l}
		var marks []int64
		for range s.l.Burst { // all at one moment: a queue that is full
			marks = append(marks, s.ask(0, 1).Mark)
		}
		// One waits: all but those that are served at once.
		i := s.l.Burst - s.l.Queue + r.Int64N(s.l.Queue)
		now := time.Duration(r.Int64N((i-(s.l.Burst-1-s.l.Queue))*s.l.window/s.l.Quota+1)/2) * time.Microsecond
		for range s.l.Burst - 1 {
			with.ask(0, 1)
		}
		leaver := Charge{Cost: -1, Mark: marks[i]}
		last := marks[i] == marks[s.l.Burst-1] // or within the same tick as the last
		before := s.state
		if s.decide(now, leaver); !last && !sameState(before, s.state) {
			t.Fatalf("seed %d: %+v: number %d was not the last, and its slot was given back", seed, s.l.Policy, i)
		}
		if leaver.Force = true; !last {
			s.decide(now, leaver)
		}
		if a, b := s.peek(now, 1), with.peek(now, 1); a != b {
			t.Fatalf("seed %d: %+v at %v, number %d left: %+v, want %+v", seed, s.l.Policy, now, i, a, b)
		}
	}
}

func TestIntervalRoundsDown(t *testing.T) {
	third := newSingle(t, Policy{Algorithm: LeakyBucket, Quota: 3, Window: time.Second, Burst: 6, Queue: 5}).l
	for units, want := range map[int64]time.Duration{0: 0, 1: 333_333, 2: 666_666, 3: 1_000_000, 6: 2_000_000, 7: 2_000_000} {
		if got := third.Interval(units); got != want*time.Microsecond {
			t.Errorf("%d units: %v, want %v", units, got, want*time.Microsecond)
		}
	}
	coarse := newSingle(t, Policy{Algorithm: LeakyBucket, Quota: 99_999, Window: 8760 * time.Hour, Burst: 9999, Queue: 9998}).l
	if got := coarse.Interval(1); got != 315_363_150*time.Microsecond { // in ticks of 10 µs, of 315.3631536… s
		t.Errorf("%v, tick %d", got, coarse.tick)
	}
	if got := newSingle(t, Policy{Algorithm: FixedWindow, Quota: 3, Window: time.Second}).l.Interval(1); got != 0 {
		t.Error(got)
	}
}

// Requests that come, renew, go, and are lost: in flight are those that came and neither went nor
// were silent for a lease time; never more than the quota pass, and each gives back once.
func TestLeases(t *testing.T) {
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 22))
		n, window := 1+r.Int64N(8), 1+r.Int64N(1000)
		s := newSingle(t, Policy{Algorithm: Concurrency, Quota: n, Window: time.Duration(window) * time.Microsecond})
		var leases []int64 // their moments, which are their marks
		for now := 10 * window; now < 20*window; now += r.Int64N(window/4 + 2) {
			at := time.Duration(now) * time.Microsecond
			live := int64(0)
			for _, moment := range leases {
				if now-moment < window {
					live++
				}
			}
			switch k := r.IntN(4); {
			case k < 2:
				o := s.ask(at, 1)
				if o.OK != (live < n) || (o.OK && o.Mark != now) || (!o.OK && o.Retry != Unknown) {
					t.Fatalf("seed %d: %d of %d in flight: %+v", seed, live, n, o)
				}
				if o.OK {
					leases = append(leases, now)
					live++
				}
			case len(leases) == 0:
			case k == 2: // goes, late perhaps, and any of those that came with it may be the one
				i := r.IntN(len(leases))
				if now-leases[i] < window {
					live--
				}
				s.decide(at, Charge{Cost: -1, Mark: leases[i]})
				leases = append(leases[:i], leases[i+1:]...)
			default: // renews; what was silent for too long takes its place by force, since it is in flight
				i := r.IntN(len(leases))
				if now-leases[i] >= window {
					live++
				}
				out, _ := request{s.l: s}.apply(at, Charge{Limit: s.l, Cost: -1, Mark: leases[i]}, Charge{Limit: s.l, Cost: 1, Force: true})
				leases[i] = out[1].Mark
			}
			if left := s.peek(at, 0).Remaining; left != max(0, n-live) || s.l.Used(s.state, now) != live {
				t.Fatalf("seed %d: %d of %d in flight, %d remaining, %d used", seed, live, n, left, s.l.Used(s.state, now))
			}
		}
	}
}

// A ban lasts exactly as long as it was said to, by however many it was asked for at once; the
// clock may step back.
func TestBanLastsExactly(t *testing.T) {
	ban := Ban("z")
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 23))
		d := time.Duration(logUniform(r, MaxWindow.Microseconds())) * time.Microsecond
		now := 50 * 365 * 24 * time.Hour
		all := request{}
		for i := range 3 { // refusals on several instances
			if _, ok := all.apply(now, Ask(ban, "k"), Banish(ban, "k", d)); ok != (i == 0) {
				t.Fatalf("seed %d: ban %d of %v: %t", seed, i, d, ok)
			}
		}
		left := func(at, want time.Duration) {
			t.Helper()
			out, ok := all.apply(at, Ask(ban, "k"))
			if ok != (want == 0) || out[0].Retry != want || (out[0].Remaining == 0) != (want > 0) {
				t.Fatalf("seed %d: ban of %v, at %v: %+v, want %v", seed, d, at-now, out[0], want)
			}
		}
		part := time.Duration(r.Int64N(d.Microseconds())) * time.Microsecond
		left(now+part, d-part)
		left(now+d-time.Microsecond, time.Microsecond)
		left(now+d, 0)
		half := (part / 2).Truncate(time.Microsecond)
		left(now+half, d-half) // back to a moment within the ban: it ends when it was to end
		// Back to a moment before: the rest is what it was at the most.
		before := now - time.Duration(2+r.Int64N(d.Microseconds()+1))*time.Microsecond
		left(before, d)
		left(before+d-time.Microsecond, time.Microsecond)
		left(before+d, 0)
	}
	if out, _ := (request{}).apply(0, Banish(ban, "k", 0), Banish(ban, "k", -time.Hour), Ask(ban, "k")); !out[2].OK || out[2].Remaining != 1 {
		t.Errorf("bans of no time: %+v", out)
	}
}

// What a kernel that is not written in Go is told: without a queue no level is above the bounds of
// waiting.
func TestParams(t *testing.T) {
	p := newQueue(t, 5, 3, ms(250)).l.Params()
	want := Params{
		Kernel: Meter, Capacity: 6, Quota: 10, Window: 1_000_000, Tick: 1, Ticks: 1_000_000, Num: 1, Den: 100_000,
		Ceiling: MaxExact, Slack: 300_000, Latest: 550_000,
	}
	if p != want {
		t.Errorf("%+v, want %+v", p, want)
	}
	none := Policy{Algorithm: LeakyBucket, Window: time.Second, Burst: 6, Queue: 5}
	if got := newSingle(t, none).l.Params(); got.Slack != MaxExact || got.Latest != MaxExact || got.Capacity != 0 {
		t.Errorf("a quota of 0: %+v", got)
	}
	for a := FixedWindow; a <= Concurrency; a++ {
		p := Policy{Algorithm: a, Quota: 3, Window: time.Second}
		if a.Bucket() {
			p.Burst = 3
		}
		if got := newSingle(t, p).l.Params(); got.Slack != MaxExact || got.Latest != MaxExact || got.Capacity != 3 || got.Quota != 3 {
			t.Errorf("%v: %+v", a, got)
		}
	}
}

func TestUnaskedSaysNothing(t *testing.T) {
	if o := Unasked; !o.OK || o.Asked() || !(&Outcome{}).Asked() {
		t.Errorf("%+v", o)
	}
}
