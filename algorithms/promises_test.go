package algorithms

// The promises as properties of random policies, histories and moments. A failure prints its seed.
//
// Units in flight have no wait that would be true: of the promises 1, 3 and 9 Concurrency keeps
// that it says so ([Unknown]), and 11 is not its own. The others it keeps like the log that it is.

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

const rounds = 4000

// forAll runs a property on counters with random policies and histories.
func forAll(t *testing.T, property func(t *testing.T, r *rand.Rand, s *single, now time.Duration)) {
	t.Helper()
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 2))
		s := &single{l: randomLimit(r)}
		now := s.randomHistory(r)
		property(t, r, s, now)
		if t.Failed() {
			t.Fatalf("seed %d: %+v tick %d, state %+v at %d µs", seed, s.l.Policy, s.l.tick, s.state, now.Microseconds())
		}
	}
}

func logUniform(r *rand.Rand, limit int64) int64 {
	return max(1, int64(math.Exp(r.Float64()*math.Log(float64(limit)))))
}

// randomLimit has any algorithm, every other leaky bucket a queue, quotas from 1 to 10^9 and
// windows from 1 µs to ten years, many of them round.
func randomLimit(r *rand.Rand) *Limit { return randomLimitUpTo(r, 315_360_000_000_000) }

// randomLimitUpTo keeps the window short enough for a test that counts many of them.
func randomLimitUpTo(r *rand.Rand, longest int64) *Limit {
	for {
		p := Policy{Algorithm: Algorithm(1 + r.IntN(int(Concurrency))), Quota: logUniform(r, 1_000_000_000)}
		window := logUniform(r, longest)
		for _, round := range []int64{1_000_000, 1000} {
			if window > round && r.IntN(3) > 0 {
				window -= window % round
			}
		}
		p.Window = time.Duration(window) * time.Microsecond
		if r.IntN(4) == 0 {
			p.Quota = 1 + r.Int64N(10)
		}
		if p.Algorithm.Bucket() {
			p.Burst = logUniform(r, 2*p.Quota+2)
		}
		if p.Algorithm == LeakyBucket && p.Burst > 1 && r.IntN(2) == 0 {
			p.Queue = logUniform(r, p.Burst-1)
			p.MaxWait = time.Duration(r.IntN(2)*int(logUniform(r, window))) * time.Microsecond
		}
		if l, err := Compile("z", p); err == nil {
			return l
		}
	}
}

// randomHistory charges the counter a few times and returns a moment after, or a little before, the
// last of them.
func (s *single) randomHistory(r *rand.Rand) time.Duration {
	now := 50 * 365 * 24 * time.Hour
	for range r.IntN(8) {
		s.decide(now, Charge{Cost: 1 + r.Int64N(s.l.Capacity), Force: r.IntN(8) == 0})
		now += s.randomStep(r)
	}
	switch r.IntN(10) {
	case 0:
		now -= time.Duration(r.Int64N(s.l.window+1)) * time.Microsecond
	case 1:
		now -= time.Duration(r.Int64N(3*s.l.window+1)) * time.Microsecond
	}
	s.decide(now, Charge{}) // a state that is far ahead is brought back now, so that properties see one clock
	return now
}

func (s *single) randomStep(r *rand.Rand) time.Duration {
	switch r.IntN(4) {
	case 0:
		return 0
	case 1:
		return s.l.Window
	case 2:
		return time.Duration(r.Int64N(s.l.window+1)) * time.Microsecond
	default:
		return time.Duration(r.Int64N(s.l.window/max(1, s.l.Capacity)+1)) * time.Microsecond
	}
}

func TestPromise01RetryIsTight(t *testing.T) {
	forAll(t, func(t *testing.T, r *rand.Rand, s *single, now time.Duration) {
		cost := 1 + r.Int64N(s.l.Capacity)
		o := s.ask(now, cost)
		if o.OK || s.l.Algorithm == Concurrency {
			if o.OK != (o.Retry == 0) || (!o.OK && o.Retry != Unknown) {
				t.Errorf("cost %d: %+v", cost, o)
			}
			return
		}
		if o.Retry < time.Microsecond || o.Retry%time.Microsecond != 0 || o.Retry == Never {
			t.Errorf("cost %d: %+v", cost, o)
			return
		}
		before := s.state
		early := o.Retry - time.Duration(1+r.Int64N(o.Retry.Microseconds()))*time.Microsecond
		for _, wait := range []time.Duration{early, o.Retry - time.Microsecond} {
			if got := s.ask(now+wait, cost); got.OK || got.Retry != o.Retry-wait {
				t.Errorf("cost %d, retry %v, asked after %v: %+v", cost, o.Retry, wait, got)
			}
		}
		if !sameState(before, s.state) {
			t.Errorf("refusals changed %+v", before)
		}
		if got := s.ask(now+o.Retry, cost); !got.OK {
			t.Errorf("cost %d waited %v: %+v", cost, o.Retry, got)
		}
	})
}

func TestPromise02RemainingIsTrue(t *testing.T) {
	forAll(t, func(t *testing.T, r *rand.Rand, s *single, now time.Duration) {
		o := s.ask(now, r.Int64N(s.l.Capacity+2))
		if o.Remaining < 0 || o.Remaining > s.l.Capacity {
			t.Errorf("%+v", o)
		}
		if got := s.ask(now, o.Remaining+1); got.OK {
			t.Errorf("%d remaining, but one more passes: %+v", o.Remaining, got)
		}
		if got := s.ask(now, o.Remaining); !got.OK || (o.Remaining > 0 && got.Remaining != 0) {
			t.Errorf("%d remaining, asked for: %+v", o.Remaining, got)
		}
	})
}

func TestPromise03NextIsTight(t *testing.T) {
	forAll(t, func(t *testing.T, r *rand.Rand, s *single, now time.Duration) {
		o := s.ask(now, r.Int64N(s.l.Capacity+2))
		if o.Remaining == s.l.Capacity {
			if o.Next != Never {
				t.Errorf("full: %+v", o)
			}
			return
		}
		if s.l.Algorithm == Concurrency {
			if o.Next != Unknown {
				t.Errorf("in flight: %+v", o)
			}
			return
		}
		if o.Next == Never || o.Next <= 0 {
			t.Errorf("%+v", o)
			return
		}
		left := o.Remaining
		if s.l.Algorithm == SlidingWindow && left > 0 { // used as early as it can be, it weighs on
			left = s.ask(now, left).Remaining
		}
		if got := s.peek(now+o.Next-time.Microsecond, 0); got.Remaining != left {
			t.Errorf("%+v, one tick before next %+v", o, got)
		}
		if got := s.peek(now+o.Next, 0); got.Remaining <= left {
			t.Errorf("%+v, at next %+v", o, got)
		}
	})
}

func TestPromise04And06NothingChanges(t *testing.T) {
	forAll(t, func(t *testing.T, r *rand.Rand, s *single, now time.Duration) {
		before := s.state
		for range 5 {
			now += s.randomStep(r)
			left := s.peek(now, 0).Remaining
			for _, c := range []Charge{
				{Cost: left + 1}, {Cost: 0}, {Cost: r.Int64N(s.l.Capacity + 2), Peek: true}, {Cost: left + 1, DryRun: true},
				{Cost: s.l.Capacity, Peek: true, Force: true}, {Cost: -5, Mark: now.Microseconds() - 10*s.l.window}, {Cost: -5, Peek: true},
				{Cost: r.Int64N(s.l.Capacity + 2), Check: true}, {Cost: s.l.Capacity, Check: true, Force: true}, {Cost: -5, Check: true},
			} {
				a := s.decide(now, c)
				if b := s.decide(now, c); a != b || (c.Cost >= 0 && a.Mark != 0) || a.Remaining != left {
					t.Errorf("%+v: %+v, then %+v", c, a, b)
				}
				if !sameState(before, s.state) {
					t.Fatalf("%+v changed %+v to %+v", c, before, s.state)
				}
			}
		}
	})
}

func TestPromise05AboveCapacityNever(t *testing.T) {
	forAll(t, func(t *testing.T, r *rand.Rand, s *single, now time.Duration) {
		for _, cost := range []int64{s.l.Capacity + 1, s.l.Capacity + 1 + r.Int64N(1000), MaxExact, MaxExact + 1, math.MaxInt64} {
			if o := s.ask(now, cost); o.OK || o.Retry != Never {
				t.Errorf("cost %d: %+v", cost, o)
			}
		}
		if o := s.peek(now, s.l.Capacity); o.Retry == Never {
			t.Errorf("cost of the capacity %d: %+v", s.l.Capacity, o)
		}
	})
}

// The charges of a batch on different counters are each decided as if alone, and committed together
// or not at all.
func TestPromise07AllOrNone(t *testing.T) {
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 3))
		n := 1 + r.IntN(4)
		var singles []*single
		charges, counters, alone := make([]Charge, n), make([]*Counter, n), make([]Outcome, n)
		now := 60 * 365 * 24 * time.Hour
		want := true
		for i := range n {
			s := &single{l: randomLimit(r)}
			s.randomHistory(r)
			s.decide(now, Charge{}) // re-anchored, if it was ahead
			c := Charge{Limit: s.l, Cost: r.Int64N(s.l.Capacity + 2), DryRun: r.IntN(4) == 0, Peek: r.IntN(4) == 0, Check: r.IntN(4) == 0, Force: r.IntN(8) == 0}
			charges[i], counters[i], singles = c, &Counter{State: s.state}, append(singles, s)
			counters[i].Log = append([]Entry(nil), s.state.Log...)
			probe := single{l: s.l, state: s.state}
			alone[i] = probe.decide(now, Charge{Cost: c.Cost, Peek: true, Force: c.Force})
			want = want && (alone[i].OK || c.DryRun || c.Peek)
		}
		out := make([]Outcome, n)
		committed := Decide(now.Microseconds(), charges, counters, out)
		if committed != want || committed != (Binding(charges, out) < 0) {
			t.Fatalf("seed %d: committed %t, want %t; binding %d", seed, committed, want, Binding(charges, out))
		}
		for i, s := range singles {
			if out[i].OK != alone[i].OK || out[i].Retry != alone[i].Retry {
				t.Fatalf("seed %d: charge %+v in a batch %+v, alone %+v", seed, charges[i], out[i], alone[i])
			}
			if c := charges[i]; committed && !c.Peek && !c.Check && out[i].OK {
				s.decide(now, Charge{Cost: c.Cost, Force: c.Force})
			} else if out[i] != alone[i] {
				t.Fatalf("seed %d: not committed, but %+v became %+v", seed, alone[i], out[i])
			}
			if !sameState(s.state, counters[i].State) {
				t.Fatalf("seed %d: charge %+v left %+v, want %+v", seed, charges[i], counters[i].State, s.state)
			}
		}
	}
}

// Charges on one counter pass exactly if one charge of their sum does, and leave what that would
// leave.
func TestPromise07Sums(t *testing.T) {
	forAll(t, func(t *testing.T, r *rand.Rand, s *single, now time.Duration) {
		a, b := 1+r.Int64N(s.l.Capacity), 1+r.Int64N(s.l.Capacity)
		if r.IntN(2) == 0 {
			a, b = 1+a/3, 1+b/3
		}
		c := &Counter{State: s.state}
		c.Log = append([]Entry(nil), c.Log...)
		charges, out := []Charge{{Limit: s.l, Cost: a}, {Limit: s.l, Cost: b}}, make([]Outcome, 2)
		Decide(now.Microseconds(), charges, []*Counter{c, c}, out)
		sum := s.ask(now, a+b)
		sum.Mark, out[0].Mark, out[1].Mark = 0, 0, 0
		if out[0] != sum || out[1] != sum {
			t.Errorf("%d and %d: %+v, their sum %+v", a, b, out, sum)
		}
		if left := (&single{l: s.l, state: c.State}).peek(now, 0); left != s.peek(now, 0) {
			t.Errorf("%d and %d leave %+v, their sum %+v", a, b, left, s.peek(now, 0))
		}
	})
}

// Dry runs, forced charges and what an earlier batch holds, on one counter.
func TestPromise07SumsOfEveryKind(t *testing.T) {
	l := newSingle(t, Policy{Algorithm: FixedWindow, Quota: 5, Window: time.Minute}).l
	take := func(n int64) Charge { return Charge{Limit: l, Cost: n} }
	dry := func(n int64) Charge { return Charge{Limit: l, Cost: n, DryRun: true} }
	force := func(n int64) Charge { return Charge{Limit: l, Cost: n, Force: true} }
	peek := func(n int64) Charge { return Charge{Limit: l, Cost: n, Peek: true} }
	check := func(n int64) Charge { return Charge{Limit: l, Cost: n, Check: true} }
	back := func(n int64) Charge { return Charge{Limit: l, Cost: -n} }
	held := func(n, h int64) Charge { return Charge{Limit: l, Cost: n, Held: h} }
	for i, c := range []struct {
		charges []Charge
		ok      string // one letter a charge
		used    int64
	}{
		{[]Charge{take(2), take(3)}, "yy", 5},
		{[]Charge{take(3), take(3)}, "nn", 0},
		{[]Charge{take(1), take(1), take(4)}, "nnn", 0},
		{[]Charge{take(3), dry(3)}, "yn", 3},
		{[]Charge{dry(3), take(3)}, "ny", 3},
		{[]Charge{take(2), dry(3)}, "yy", 5},
		{[]Charge{dry(3), dry(3)}, "nn", 0},
		{[]Charge{dry(2), dry(3)}, "yy", 5},
		{[]Charge{take(3), force(3)}, "ny", 0},
		{[]Charge{take(2), force(3)}, "yy", 5},
		{[]Charge{force(3), force(3)}, "yy", 6},
		{[]Charge{peek(5), take(5)}, "yy", 5},
		{[]Charge{peek(6), take(5)}, "ny", 5},
		{[]Charge{check(5), take(5)}, "yy", 5},
		{[]Charge{check(6), take(5)}, "ny", 0},
		{[]Charge{check(6), force(5)}, "ny", 0},
		{[]Charge{take(5), check(1)}, "yy", 5},
		{[]Charge{take(5), back(5)}, "yy", 0},
		{[]Charge{take(6), back(5)}, "ny", 0},
		{[]Charge{take(0), take(5)}, "yy", 5},
		{[]Charge{take(0), take(6)}, "yn", 0},
		{[]Charge{take(6), take(0)}, "ny", 0},
		{[]Charge{held(5, 3)}, "y", 5},
		{[]Charge{held(6, 0)}, "n", 0},
		{[]Charge{take(MaxExact), take(math.MaxInt64)}, "nn", 0},
		{[]Charge{force(MaxExact), force(math.MaxInt64)}, "yy", MaxExact},
	} {
		counter, out := &Counter{}, make([]Outcome, len(c.charges))
		counters := make([]*Counter, len(c.charges))
		for j := range counters {
			counters[j] = counter
		}
		Decide(0, c.charges, counters, out)
		got := ""
		for _, o := range out {
			got += map[bool]string{true: "y", false: "n"}[o.OK]
		}
		if used := l.Used(counter.State, 0); got != c.ok || used != c.used {
			t.Errorf("case %d, %+v: %s used %d, want %s used %d", i, c.charges, got, used, c.ok, c.used)
		}
	}
}

func TestHeldLengthensTheWait(t *testing.T) {
	forAll(t, func(t *testing.T, r *rand.Rand, s *single, now time.Duration) {
		cost, held := 1+r.Int64N(s.l.Capacity), r.Int64N(s.l.Capacity+2)
		plain, both := s.peek(now, cost), s.peek(now, cost+held)
		if plain.OK {
			both.OK, both.Retry, both.Delay = true, 0, plain.Delay
		}
		if got := s.decide(now, Charge{Cost: cost, Held: held, Peek: true}); got != both {
			t.Errorf("cost %d held %d: %+v, want %+v", cost, held, got, both)
		}
	})
}

// However the clock jitters within a window, no more is admitted than its furthest moment allows.
func TestPromise08NoCreditTwice(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 4))
		s := &single{l: randomLimitUpTo(r, 86_400_000_000*30)}
		w, cost := s.l.window, 1+r.Int64N(s.l.Capacity)
		start := int64(1000) * w
		now, furthest, admitted := start, start, int64(0)
		for range 200 {
			if s.ask(time.Duration(now)*time.Microsecond, cost).OK {
				admitted += cost
			}
			now = furthest + r.Int64N(w+1) - w*int64(r.IntN(2))
			now = max(now, furthest-w)
			furthest = max(furthest, now)
		}
		windows := (furthest-start)/w + 2
		limit := s.l.Capacity + windows*s.l.Quota
		if s.l.Algorithm == SlidingWindow {
			limit += s.l.Quota
		}
		if admitted > limit {
			t.Errorf("seed %d: %+v admitted %d in %d windows, want at most %d", seed, s.l.Policy, admitted, windows, limit)
		}
	}
}

// After a step of any size no key is locked for more than a window beyond the longest wait that the
// algorithm itself knows.
func TestPromise08NoKeyIsLocked(t *testing.T) {
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 5))
		s := &single{l: randomLimitUpTo(r, 86_400_000_000*365)}
		now := time.Duration(20*s.l.window+r.Int64N(s.l.window)) * time.Microsecond
		for range 3 {
			s.ask(now, 1+r.Int64N(s.l.Capacity))
			now += s.randomStep(r)
		}
		now -= time.Duration(r.Int64N(19*s.l.window)) * time.Microsecond
		bound := 2 * s.l.Window
		switch s.l.Algorithm {
		case TokenBucket, LeakyBucket:
			bound = s.l.Window + s.l.Refill()
		case SlidingWindow:
			bound = 3 * s.l.Window // with a quota of 1 it takes two windows as it is
		}
		o := s.ask(now, 1)
		if o.Retry == Unknown {
			o.Retry = bound // at the latest
		}
		if !o.OK && o.Retry > bound {
			t.Fatalf("seed %d: %+v locked for %v, want at most %v", seed, s.l.Policy, o.Retry, bound)
		}
		// What was re-anchored was kept, though the request was refused: the wait runs.
		if !o.OK && !s.ask(now+o.Retry, 1).OK {
			t.Fatalf("seed %d: %+v: waited %v in vain", seed, s.l.Policy, o.Retry)
		}
	}
}

// The whole band up to one window stands still, to the microsecond; one more re-anchors, on a
// refusal too.
func TestPromise08TheEdgeIsOneWindow(t *testing.T) {
	for a := FixedWindow; a <= Concurrency; a++ {
		p := Policy{Algorithm: a, Quota: 4, Window: time.Second}
		if a.Bucket() {
			p.Burst = 4
		}
		s, base := newSingle(t, p), 100*time.Second
		s.ask(base, 4)
		before := s.state
		s.ask(base-time.Second, 1)
		if !sameState(before, s.state) {
			t.Errorf("%v: one window ahead: %+v became %+v", a, before, s.state)
		}
		s.ask(base-time.Second-time.Microsecond, 1)
		if s.state.T > (base - time.Second).Microseconds() {
			t.Errorf("%v: more than one window ahead and still at %+v", a, s.state)
		}
		if used := s.l.Used(s.state, (base - time.Second - time.Microsecond).Microseconds()); used != 4 {
			t.Errorf("%v: %d used after re-anchoring, want 4", a, used)
		}
	}
}

// A wait is at least a whole microsecond, so that rounded up to seconds it is at least 1.
func TestPromise09WaitsAreAtLeastATick(t *testing.T) {
	forAll(t, func(t *testing.T, r *rand.Rand, s *single, now time.Duration) {
		o := s.ask(now, 1+r.Int64N(s.l.Capacity))
		for _, wait := range []time.Duration{o.Retry, o.Next} {
			if unknown := s.l.Algorithm == Concurrency && wait == Unknown; !unknown && wait != Never && (wait < 0 || wait%time.Microsecond != 0) {
				t.Errorf("%+v", o)
			}
		}
		if !o.OK && o.Retry < time.Microsecond && o.Retry != Unknown {
			t.Errorf("%+v", o)
		}
	})
}

// A changed quota keeps the units in use; a bucket of another scale rounds them up, by less than
// one of its steps.
func TestPromise10ChangedQuotaKeepsUsage(t *testing.T) {
	forAll(t, func(t *testing.T, r *rand.Rand, s *single, now time.Duration) {
		s.decide(now, Charge{Cost: 1 + r.Int64N(s.l.Capacity), Force: true})
		p := s.l.Policy
		if p.Quota = logUniform(r, 1_000_000_000); p.Algorithm.Bucket() {
			p.Burst = logUniform(r, 2*p.Quota+2)
		}
		if p.Queue = min(p.Queue, max(0, p.Burst-1)); p.Queue == 0 {
			p.MaxWait = 0
		}
		l, err := Compile("z", p)
		if err != nil {
			return
		}
		if bound := MaxExact / max(l.ticks, s.l.ticks); p.Algorithm == SlidingWindow && max(s.state.A, s.state.B) > bound {
			return // counts that the new quota could not have left are bounded, so that products stay exact
		}
		used := s.l.Used(s.state, now.Microseconds())
		if p.Algorithm.Bucket() {
			used = min(used, l.ceiling/l.den) // the largest debt whose wait is exact
		}
		// What passes within one of the coarser of both ticks is seen under the finer one only.
		slack := int64(0)
		switch {
		case p.Algorithm.Bucket():
			slack = 1 + max(s.l.tick, l.tick)/l.tick*l.num/l.den
		case s.l.tick != l.tick:
			slack = 1 + s.state.B*max(s.l.tick, l.tick)/l.window
		}
		got := l.Used(s.state, now.Microseconds())
		if got > used+slack || got < used-slack || (got < used && s.l.tick <= l.tick) {
			t.Errorf("%d used under %+v are %d under %+v", used, s.l.Policy, got, p)
		}
		after := single{l: l, state: s.state}
		if o := after.peek(now, 0); o.Remaining != max(0, l.Capacity-got) && (l.MaxWait == 0 || o.Remaining != 0) {
			t.Errorf("%d used of %d: %+v", got, l.Capacity, o)
		}
		// The answers under the new quota are tight too.
		cost := 1 + r.Int64N(l.Capacity)
		if o := after.peek(now, cost); !o.OK && o.Retry != Unknown && (after.peek(now+o.Retry-time.Microsecond, cost).OK || !after.peek(now+o.Retry, cost).OK) {
			t.Errorf("cost %d under %+v: %+v", cost, p, o)
		}
	})
}

// A meter's level in another scale is the next one up.
func TestRescaleRoundsUp(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 6))
	for range 100_000 {
		from, to := logUniform(r, 1<<20), logUniform(r, 1<<20)
		level := r.Int64N(1 << 31)
		got := rescale(level, from, to)
		// got/to ≥ level/from > (got−1)/to
		if got*from < level*to || (got-1)*from >= level*to {
			t.Fatalf("level %d of scale %d is %d of scale %d", level, from, got, to)
		}
	}
	for _, c := range []struct{ level, from, to, want int64 }{
		{7, 0, 5, 7},                               // a level without a scale is none to convert
		{MaxExact, 1, 2, MaxExact},                 // too much to be exact is all there can be
		{MaxExact / 2, 1, 2, MaxExact},             // this just fits
		{MaxExact/2 + 1, 1, 2, MaxExact},           // this does not
		{1 << 40, 1<<40 + 1, 1 << 40, 1 << 40},     // a fraction whose product is not exact: a whole unit
		{1<<40 + 2, 1<<40 + 1, 1 << 13, 1<<13 + 1}, // a product that is exact: not a whole one
		{1<<40 + 1, 1<<40 + 1, 1 << 40, 1 << 40},   // a whole unit
		{1<<39 + 1, 1<<40 + 1, 1 << 13, 1 << 13},   // just not exact any more: a whole unit
		{1 << 39, 1<<40 + 1, 1 << 13, 1 << 12},     // just exact
	} {
		if got := rescale(c.level, c.from, c.to); got != c.want {
			t.Errorf("level %d of scale %d is %d of scale %d, want %d", c.level, c.from, got, c.to, c.want)
		}
	}
}

// The smallest level there is, one unit at one tick a unit, keeps its unit under a far slower rate.
func TestPromise10SmallestLevel(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 1_000_000, Window: time.Second, Burst: 5})
	s.ask(0, 1)
	slow := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 1, Window: time.Second, Burst: 5}).l
	if used := slow.Used(s.state, 0); used != 1 || s.state.A != 1 {
		t.Errorf("%d used, state %+v, want 1", used, s.state)
	}
}

// A debt that a quicker rate had for its bound, read at a slower one of the same scale: no wait
// leaves the numbers.
func TestPromise10DebtAtASlowerRate(t *testing.T) {
	const window = 365 * 24 * time.Hour
	fast := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 97, Window: window, Burst: 1500})
	slow := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 43, Window: window, Burst: 1500})
	if fast.l.den != slow.l.den || fast.l.tick != slow.l.tick || fast.l.ceiling == slow.l.ceiling {
		t.Fatalf("%+v and %+v differ in more than their bounds", fast.l, slow.l)
	}
	now := 50 * window
	fast.decide(now, Charge{Cost: MaxExact, Force: true})
	slow.state = fast.state
	if o := slow.peek(now, 1500); o.Retry <= 0 || o.Retry.Microseconds() > MaxExact {
		t.Errorf("%+v", o)
	}
}

// A bucket whose tick becomes coarser in the middle of one: nothing is credited twice and the waits
// are tight.
func TestPromise10CoarserTick(t *testing.T) {
	fine := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 1, Window: 1000 * time.Hour, Burst: 3})
	coarse := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 7777777, Window: 1000 * time.Hour, Burst: 7777777}).l
	if fine.l.tick != 1 || coarse.tick == 1 {
		t.Fatalf("ticks %d and %d", fine.l.tick, coarse.tick)
	}
	for offset := range time.Duration(2 * coarse.tick) {
		s := *fine
		at := time.Hour + offset*time.Microsecond
		s.ask(at, 3)
		s.l = coarse
		for _, later := range []time.Duration{0, time.Microsecond, 7 * time.Microsecond} {
			o := s.peek(at+later, 7777777)
			if o.OK || s.peek(at+later+o.Retry-time.Microsecond, 7777777).OK || !s.peek(at+later+o.Retry, 7777777).OK {
				t.Errorf("offset %d, %v later: %+v", offset, later, o)
			}
			if used := coarse.Used(s.state, (at + later).Microseconds()); used != 3 {
				t.Errorf("offset %d, %v later: %d used, want 3", offset, later, used)
			}
		}
	}
}

// Units given back at once are as if never taken; later, in windows and logs, as if their place had
// stayed empty.
func TestPromise12RefundUndoes(t *testing.T) {
	forAll(t, func(t *testing.T, r *rand.Rand, s *single, now time.Duration) {
		without := single{l: s.l, state: s.state}
		without.state.Log = append([]Entry(nil), s.state.Log...)
		before := s.peek(now, 0)
		if before.Remaining == 0 {
			return
		}
		cost := 1 + r.Int64N(before.Remaining)
		mark := s.ask(now, cost).Mark
		back := 1 + r.Int64N(cost)
		left := before.Remaining - cost + back
		if o := s.decide(now, Charge{Cost: -back, Mark: mark}); !o.OK || o.Mark != mark || (o.Remaining != left && (s.l.MaxWait == 0 || o.Remaining != 0)) {
			t.Errorf("took %d and gave back %d of %+v: %+v", cost, back, before, o)
		}
		if s.l.Algorithm.Bucket() {
			return
		}
		without.decide(now, Charge{Cost: cost - back, Force: true})
		more := s.decide(now, Charge{Cost: -math.MaxInt64, Mark: mark}).Remaining // all of it, or of its window
		for range 4 {
			now += s.randomStep(r)
			if s.peek(now, 0).Remaining < without.peek(now, 0).Remaining {
				t.Errorf("after giving back all (%d left): %+v, without %+v", more, s.peek(now, 0), without.peek(now, 0))
			}
		}
	})
}

// Whatever is given back, however late and however often: never above the capacity, never to
// another window.
func TestPromise12RefundsStayWithinWhatWasTaken(t *testing.T) {
	for seed := range uint64(rounds) {
		r := rand.New(rand.NewPCG(seed, 7))
		s := &single{l: randomLimitUpTo(r, 86_400_000_000*30)}
		now := time.Duration(40*s.l.window) * time.Microsecond
		type receipt struct{ mark, units, at int64 }
		var receipts []receipt
		for range 30 {
			before := s.free(now)
			if len(receipts) > 0 && r.IntN(2) == 0 {
				c := receipts[r.IntN(len(receipts))]
				o := s.decide(now, Charge{Cost: -c.units, Mark: c.mark})
				// For a bucket as far as the mark tells: see unfill.
				void := now.Microseconds() >= c.mark && s.l.Algorithm.Bucket() ||
					now.Microseconds() >= c.at+2*s.l.window && !s.l.Algorithm.Bucket()
				if free := s.free(now); free < before || free > before+c.units || free > s.l.Capacity || (void && free != before) {
					t.Fatalf("seed %d: %+v: giving back %+v at %d: %d remaining, then %+v", seed, s.l.Policy, c, now.Microseconds(), before, o)
				}
			} else if cost := 1 + r.Int64N(s.l.Capacity); before >= cost {
				receipts = append(receipts, receipt{s.ask(now, cost).Mark, cost, now.Microseconds()})
			}
			now += s.randomStep(r)
		}
	}
}

// free is what remains, were there no longest wait.
func (s *single) free(now time.Duration) int64 {
	return max(0, s.l.Capacity-s.l.Used(s.state, now.Microseconds()))
}

// What is given back to nothing leaves nothing: the zero state, which a store need not keep.
func TestRefundToZeroIsTheZeroState(t *testing.T) {
	for a := FixedWindow; a <= Concurrency; a++ {
		p := Policy{Algorithm: a, Quota: 5, Window: time.Second}
		if a.Bucket() {
			p.Burst = 5
		}
		s := newSingle(t, p)
		now := 50 * time.Second
		mark := s.ask(now, 3).Mark
		s.decide(now, Charge{Cost: -2, Mark: mark})
		if s.l.Idle(s.state, now.Microseconds()) || s.l.Used(s.state, now.Microseconds()) != 1 {
			t.Errorf("%v: %+v", a, s.state)
		}
		s.decide(now, Charge{Cost: -1, Mark: mark})
		if !sameState(s.state, State{}) || !s.l.Idle(s.state, now.Microseconds()) {
			t.Errorf("%v: %+v, want the zero state", a, s.state)
		}
		s.decide(now, Charge{Cost: math.MinInt64, Mark: mark})
		if !sameState(s.state, State{}) {
			t.Errorf("%v: %+v, want the zero state", a, s.state)
		}
	}
}

// A log gives back to the entry of the mark alone, never more than is in it, and keeps no empty
// entries.
func TestRefundOfOneLogEntry(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: SlidingLog, Quota: 9, Window: 10 * time.Second})
	at := func(n int64) int64 { return (ms(n)).Microseconds() }
	s.ask(ms(1000), 2)
	mark := s.ask(ms(2000), 3).Mark
	s.ask(ms(3000), 4)
	s.decide(ms(4000), Charge{Cost: -1, Mark: mark})
	if want := (State{T: at(3000), Log: []Entry{{at(1000), 2}, {at(2000), 4}, {at(3000), 8}}}); !sameState(s.state, want) {
		t.Errorf("%+v, want %+v", s.state, want)
	}
	s.decide(ms(4000), Charge{Cost: -100, Mark: mark})
	if want := (State{T: at(3000), Log: []Entry{{at(1000), 2}, {at(3000), 6}}}); !sameState(s.state, want) {
		t.Errorf("%+v, want %+v", s.state, want)
	}
	s.decide(ms(4000), Charge{Cost: -1, Mark: mark + 1})
	if used := s.l.Used(s.state, at(4000)); used != 6 {
		t.Errorf("%d used, want 6", used)
	}
}

// A log that stood too far ahead keeps what lies before now and has the rest at now, in one entry.
func TestReanchoredLog(t *testing.T) {
	l := newSingle(t, Policy{Algorithm: SlidingLog, Quota: 9, Window: time.Second}).l
	for _, c := range []struct{ before, after State }{
		{State{T: 9e6, A: 1, Log: []Entry{{9e6, 2}}}, State{T: 5e6, A: 1, Log: []Entry{{5e6, 2}}}},
		{State{T: 9e6, Log: []Entry{{49e5, 2}, {5e6, 3}, {6e6, 4}, {9e6, 6}}}, State{T: 5e6, Log: []Entry{{49e5, 2}, {5e6, 6}}}},
		{State{T: 9e6, Log: []Entry{{49e5, 2}, {5e6 + 1, 3}}}, State{T: 5e6, Log: []Entry{{49e5, 2}, {5e6, 3}}}},
		{State{T: 9e6, Log: []Entry{{49e5, 2}}}, State{T: 5e6, Log: []Entry{{49e5, 2}}}}, // the newest was given back
	} {
		s := single{l: l, state: c.before}
		s.ask(5*time.Second, 9)
		if !sameState(s.state, c.after) {
			t.Errorf("%+v became %+v, want %+v", c.before, s.state, c.after)
		}
	}
}

// The most that passes within any span of one window's length, on a schedule that tries for it.
func TestWorstCaseWithinAWindow(t *testing.T) {
	for a := FixedWindow; a <= LeakyBucket; a++ {
		for _, n := range []int64{1, 2, 3, 10} {
			p := Policy{Algorithm: a, Quota: n, Window: time.Millisecond}
			bound := map[Algorithm]int64{FixedWindow: 2 * n, SlidingLog: n, SlidingWindow: 2*n - 1}[a]
			if a.Bucket() {
				p.Burst, bound = n+2, n+n+2
			}
			var worst int64
			for seed := range uint64(60) {
				worst = max(worst, busiest(newSingle(t, p), rand.New(rand.NewPCG(seed, 8))))
			}
			if worst > bound {
				t.Errorf("%+v: %d within a window, want at most %d", p, worst, bound)
			}
			if tight := a != SlidingWindow || n > 1; tight && worst < bound-1 {
				t.Errorf("%+v: only %d within a window: the schedule no longer tries", p, worst)
			}
		}
	}
}

// busiest asks for all that remains at random moments and returns the most that passed within one
// window's length.
func busiest(s *single, r *rand.Rand) (most int64) {
	var log []event
	for now := int64(0); now < 20*s.l.window; now += 1 + r.Int64N(s.l.window/2) {
		if r.IntN(3) == 0 { // the last and first moments of a window
			now += s.l.window - now%s.l.window - int64(r.IntN(2))
		}
		left := s.peek(time.Duration(now)*time.Microsecond, 0).Remaining
		if left > 0 && r.IntN(3) > 0 {
			s.ask(time.Duration(now)*time.Microsecond, left)
			log = append(log, event{now, left})
		}
	}
	for i := range log {
		var sum int64
		for _, e := range log[i:] {
			if e.at < log[i].at+s.l.window {
				sum += e.units
			}
		}
		most = max(most, sum)
	}
	return most
}

func TestBinding(t *testing.T) {
	ok, no := Outcome{OK: true}, func(s int) Outcome { return Outcome{Retry: time.Duration(s) * time.Second} }
	for i, c := range []struct {
		charges []Charge
		out     []Outcome
		want    int
	}{
		{nil, nil, -1},
		{make([]Charge, 2), []Outcome{ok, ok}, -1},
		{make([]Charge, 3), []Outcome{ok, no(1), no(2)}, 2},
		{make([]Charge, 3), []Outcome{no(2), no(1), no(2)}, 0},
		{make([]Charge, 2), []Outcome{no(9), {Retry: Never}}, 1},
		{[]Charge{{DryRun: true}, {}}, []Outcome{no(9), no(1)}, 1},
		{[]Charge{{Peek: true}, {}}, []Outcome{no(9), ok}, -1},
		{[]Charge{{Check: true}, {}}, []Outcome{no(9), ok}, 0},
		{make([]Charge, 2), []Outcome{ok, {Retry: Unknown}}, 1},
		{make([]Charge, 3), []Outcome{{Retry: Unknown}, no(1), {Retry: Unknown}}, 1},
	} {
		if got := Binding(c.charges, c.out); got != c.want {
			t.Errorf("case %d: %d, want %d", i, got, c.want)
		}
	}
}

// A key that is never idle: the running sums of its log begin again before they exceed 2^52.
func TestLogSumsStayExact(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: SlidingLog, Quota: MaxExact, Window: time.Second})
	now, last := time.Duration(0), int64(0)
	for i := range 100 {
		cost := MaxExact/2 - int64(i)
		if o := s.ask(now, cost); !o.OK || o.Remaining != MaxExact-cost-last {
			t.Fatalf("request %d: %+v", i, o)
		}
		now, last = now+500*time.Millisecond, cost
		for _, e := range append(s.state.Log, Entry{Sum: s.state.A}) {
			if e.Sum < 0 || e.Sum > MaxExact {
				t.Fatalf("request %d: sums %+v", i, s.state)
			}
		}
	}
	now += time.Minute
	s.ask(now, 7)
	if !sameState(s.state, State{T: now.Microseconds(), Log: []Entry{{now.Microseconds(), 7}}}) {
		t.Errorf("idle for a minute, and the sums go on: %+v", s.state)
	}
	for range 3000 { // debts do not add up beyond what is exact
		s.decide(now, Charge{Cost: math.MaxInt64, Force: true})
		now += time.Microsecond
	}
	if used := s.l.Used(s.state, now.Microseconds()); used != MaxExact {
		t.Errorf("%d used, want 2^52", used)
	}
}

func ExampleDecide() {
	limit, err := Compile("api", Policy{Algorithm: SlidingLog, Quota: 2, Window: 10 * time.Second})
	if err != nil {
		panic(err)
	}
	var state State // what a store keeps of one key
	for _, second := range []int64{0, 4, 5, 10} {
		counter, out := Counter{State: state}, make([]Outcome, 1)
		charges := []Charge{{Key: "alice", Limit: limit, Cost: 1}}
		if Decide(second*1_000_000, charges, []*Counter{&counter}, out) {
			state = counter.State
		}
		fmt.Println(second, out[0].OK, out[0].Remaining, out[0].Retry)
	}
	// Output:
	// 0 true 1 0s
	// 4 true 0 0s
	// 5 false 0 5s
	// 10 true 0 0s
}
