package algorithms

// Cases from the field: each went wrong in some limiter that people run.

import (
	"errors"
	"testing"
	"time"
)

func TestF01FullTokenAfterExactlyTheInterval(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 1, Window: time.Hour, Burst: 1})
	for i := range time.Duration(1000) {
		if o := s.ask(i*time.Hour, 1); !o.OK {
			t.Fatalf("hour %d: %+v", i, o)
		}
		if o := s.ask((i+1)*time.Hour-time.Microsecond, 1); o.Retry != time.Microsecond {
			t.Fatalf("hour %d, one tick early: %+v", i, o)
		}
	}
}

func TestF02FirstRequestOfAFractionalRate(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 10, Window: 13 * time.Second, Burst: 1})
	if o := s.ask(0, 1); !o.OK || o.Next != 1300*time.Millisecond {
		t.Error(o)
	}
}

func TestF03QuotaZeroRefusesEverything(t *testing.T) {
	for a := FixedWindow; a <= Concurrency; a++ {
		for _, burst := range []int64{0, 5} {
			if burst > 0 && !a.Bucket() {
				continue
			}
			s := newSingle(t, Policy{Algorithm: a, Window: time.Second, Burst: burst})
			for at := time.Duration(0); at < 5*time.Second; at += 500 * time.Millisecond {
				if o := s.ask(at, 1); o.OK || o.Retry != Never || o.Next != Never || o.Remaining != 0 {
					t.Errorf("%v: %+v", a, o)
				}
			}
			if refill := s.l.Refill(); refill != time.Second {
				t.Errorf("%v: refill %v", a, refill)
			}
		}
	}
}

func TestF04LongIdleIsFullNotNegative(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 1_000_000, Window: time.Second, Burst: 1_000_000})
	now := time.Duration(0)
	for _, idle := range []time.Duration{12 * time.Hour, 365 * 24 * time.Hour, 50 * 365 * 24 * time.Hour} {
		if o := s.ask(now, 1_000_000); !o.OK || o.Remaining != 0 {
			t.Fatalf("after %v: %+v", idle, o)
		}
		now += idle
		if o := s.ask(now, 1_000_001); o.Remaining != 1_000_000 {
			t.Fatalf("after %v: %+v", idle, o)
		}
	}
}

func TestF05RemaindersAreNotLost(t *testing.T) {
	for a, want := range map[Algorithm]int{FixedWindow: 200, SlidingLog: 200, SlidingWindow: 181, TokenBucket: 209, LeakyBucket: 209} {
		p := Policy{Algorithm: a, Quota: 10, Window: 30 * time.Second}
		if a.Bucket() {
			p.Burst = 10
		}
		s, admitted := newSingle(t, p), 0
		for at := time.Duration(0); at < 10*time.Minute; at += time.Second {
			if s.ask(at, 1).OK {
				admitted++
			}
		}
		// Ten minutes are 20 windows: 10 each, and a bucket's full start beside; the sliding
		// counter 9 each, and one more in its first window.
		if admitted != want {
			t.Errorf("%v: %d admitted in 10 minutes, want %d", a, admitted, want)
		}
	}
}

func TestF06DecisionsWithinAMillisecond(t *testing.T) {
	for _, rate := range []int64{8_000, 20_000} {
		s := newSingle(t, Policy{Algorithm: LeakyBucket, Quota: rate, Window: time.Second, Burst: 1})
		interval := time.Second / time.Duration(rate)
		s.ask(0, 1)
		if o := s.ask(interval-time.Microsecond, 1); o.OK || o.Retry != time.Microsecond {
			t.Errorf("%d/s: %+v", rate, o)
		}
		if o := s.ask(interval, 1); !o.OK {
			t.Errorf("%d/s: %+v", rate, o)
		}
	}
}

func TestF07VeryFastAndVerySlow(t *testing.T) {
	for _, c := range []struct {
		quota  int64
		window time.Duration
	}{{100_000_000, time.Second}, {1, 365 * 24 * time.Hour}} {
		for a := FixedWindow; a <= LeakyBucket; a++ {
			p := Policy{Algorithm: a, Quota: c.quota, Window: c.window}
			if a.Bucket() {
				p.Burst = c.quota
			}
			s := newSingle(t, p)
			if o := s.ask(0, c.quota); !o.OK || o.Remaining != 0 {
				t.Errorf("%+v: %+v", p, o)
			}
			o := s.ask(0, 1)
			if o.OK || s.peek(o.Retry-time.Microsecond, 1).OK || !s.peek(o.Retry, 1).OK {
				t.Errorf("%+v: %+v", p, o)
			}
		}
	}
	_, err := Compile("z", Policy{Algorithm: SlidingWindow, Quota: 1 << 40, Window: 365*24*time.Hour + time.Microsecond})
	if !errors.Is(err, ErrInexact) {
		t.Errorf("a limit that cannot be exact: %v", err)
	}
}

func TestF08RemainingWithinBoundsAfterLowering(t *testing.T) {
	for a := FixedWindow; a <= Concurrency; a++ {
		with := func(n int64) *Limit {
			p := Policy{Algorithm: a, Quota: n, Window: time.Minute}
			if a.Bucket() {
				p.Burst = n
			}
			return newSingle(t, p).l
		}
		s := &single{l: with(100)}
		s.ask(0, 50)
		s.l = with(10)
		if o := s.ask(0, 1); o.OK || o.Remaining != 0 || s.l.Used(s.state, 0) != 50 {
			t.Errorf("%v lowered: %+v, used %d", a, o, s.l.Used(s.state, 0))
		}
		s.l = with(200)
		if o := s.peek(0, 150); !o.OK || o.Remaining != 150 {
			t.Errorf("%v raised: %+v", a, o)
		}
		if o := s.peek(0, 151); o.OK {
			t.Errorf("%v raised: %+v", a, o)
		}
	}
}

func TestF09CostAboveTheBurst(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 1, Window: time.Second, Burst: 5})
	if o := s.ask(0, 10); o.OK || o.Retry != Never || o.Remaining != 5 {
		t.Error(o)
	}
}

func TestF10ClockStepsBackAndForward(t *testing.T) {
	for a := FixedWindow; a <= LeakyBucket; a++ {
		p := Policy{Algorithm: a, Quota: 10, Window: time.Second}
		if a.Bucket() {
			p.Burst = 10
		}
		s, base := newSingle(t, p), 1000*time.Second
		s.ask(base, 10)
		for i := range 10 { // back and forth: nothing is refilled twice
			at := base - time.Duration(i%2)*time.Second
			if o := s.ask(at, 1); o.OK || at+o.Retry > base+2*time.Second {
				t.Errorf("%v: at %v: %+v", a, at, o)
			}
		}
		// No stall longer than the window after the clock is right again, 2 for the sliding
		// counter's tail.
		o := s.ask(base, 1)
		if o.Retry > s.l.Window*11/10 || !s.ask(base+o.Retry, 1).OK {
			t.Errorf("%v: %+v", a, o)
		}
	}
}

func TestF12StartOfTheNextSlidingWindow(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: SlidingWindow, Quota: 10, Window: time.Minute})
	s.ask(30*time.Second, 10)
	o := s.ask(time.Minute, 1)
	if o.OK || o.Retry != 6*time.Second {
		t.Fatal(o)
	}
	if early := s.ask(time.Minute+o.Retry-time.Microsecond, 1); early.OK {
		t.Error(early)
	}
	if !s.ask(time.Minute+o.Retry, 1).OK {
		t.Error("the promised wait was not enough")
	}
}

func TestF16LateRefundIsVoid(t *testing.T) {
	for a := FixedWindow; a <= Concurrency; a++ {
		p := Policy{Algorithm: a, Quota: 5, Window: time.Minute}
		if a.Bucket() {
			p.Burst = 5
		}
		s := newSingle(t, p)
		mark := s.ask(0, 5).Mark
		late := 3 * time.Minute
		if o := s.decide(late, Charge{Cost: -5, Mark: mark}); o.Remaining != 5 || s.peek(late, 6).OK {
			t.Errorf("%v, idle: %+v", a, o)
		}
		s.ask(late, 2)
		before := s.state
		if o := s.decide(late, Charge{Cost: -5, Mark: mark}); o.Remaining != 3 || !sameState(before, s.state) {
			t.Errorf("%v, in use: %+v", a, o)
		}
	}
}

func TestF20RefillIsTheWindowOnTheWire(t *testing.T) {
	for _, c := range []struct {
		p    Policy
		want time.Duration
	}{
		{Policy{Algorithm: FixedWindow, Quota: 100, Window: 24 * time.Hour}, 24 * time.Hour},
		{Policy{Algorithm: SlidingWindow, Quota: 100, Window: 500 * time.Millisecond}, 500 * time.Millisecond},
		{Policy{Algorithm: SlidingLog, Quota: 3, Window: time.Minute}, time.Minute},
		{Policy{Algorithm: TokenBucket, Quota: 100, Window: time.Minute, Burst: 100}, time.Minute},
		{Policy{Algorithm: TokenBucket, Quota: 1, Window: time.Second, Burst: 5}, 5 * time.Second},
		{Policy{Algorithm: TokenBucket, Quota: 3, Window: time.Second, Burst: 2}, 666667 * time.Microsecond},
		{Policy{Algorithm: LeakyBucket, Quota: 10, Window: time.Second, Burst: 6}, 600 * time.Millisecond},
		{Policy{Algorithm: TokenBucket, Quota: 0, Window: time.Second, Burst: 5}, time.Second},
		{Policy{Algorithm: TokenBucket, Quota: 1_000_003, Window: 365 * 24 * time.Hour, Burst: 1_000_003}, 365 * 24 * time.Hour}, // a coarse tick
		{Policy{Algorithm: TokenBucket, Quota: 999, Window: 365 * 24 * time.Hour, Burst: 999}, 365 * 24 * time.Hour},
	} {
		if got := newSingle(t, c.p).l.Refill(); got != c.want {
			t.Errorf("%+v: %v, want %v", c.p, got, c.want)
		}
	}
}

// request decides several charges at one moment, charges with equal key and limit on one counter,
// and commits as a store does.
type request map[*Limit]*single

func (r request) apply(now time.Duration, charges ...Charge) ([]Outcome, bool) {
	opened, counters, out := map[*Limit]*Counter{}, make([]*Counter, len(charges)), make([]Outcome, len(charges))
	for i, c := range charges {
		if r[c.Limit] == nil {
			r[c.Limit] = &single{l: c.Limit}
		}
		if opened[c.Limit] == nil {
			opened[c.Limit] = &Counter{State: r[c.Limit].state}
		}
		counters[i] = opened[c.Limit]
	}
	committed := Decide(now.Microseconds(), charges, counters, out)
	for l, c := range opened {
		r[l].state = c.State
	}
	return out, committed
}

func TestF30GroupAndSpecialLimit(t *testing.T) {
	group := newSingle(t, Policy{Algorithm: FixedWindow, Quota: 10, Window: time.Minute}).l
	special := newSingle(t, Policy{Algorithm: SlidingLog, Quota: 3, Window: time.Minute}).l
	r, admitted, left := request{}, 0, int64(0)
	for range 5 {
		out, ok := r.apply(0, Charge{Limit: group, Cost: 1}, Charge{Limit: special, Cost: 1})
		if left = out[0].Remaining; ok {
			admitted++
		}
	}
	if admitted != 3 || left != 7 {
		t.Errorf("%d admitted, the group has %d left; want 3 and 7", admitted, left)
	}
}

func TestF31RefusedRequestsDoNotCount(t *testing.T) {
	for a, want := range map[Algorithm]int{FixedWindow: 50, SlidingLog: 50, SlidingWindow: 41, TokenBucket: 54, LeakyBucket: 50} {
		p := Policy{Algorithm: a, Quota: 5, Window: time.Second}
		switch a {
		case TokenBucket:
			p.Burst = 5
		case LeakyBucket:
			p.Burst = 1
		}
		s, admitted := newSingle(t, p), 0
		for at := time.Duration(0); at < 10*time.Second; at += 100 * time.Millisecond {
			if s.ask(at, 1).OK {
				admitted++
			}
		}
		if admitted != want {
			t.Errorf("%v: %d of 100 admitted, want %d", a, admitted, want)
		}
	}
}

func TestF32OneOfThreeRefuses(t *testing.T) {
	a := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 10, Window: time.Minute, Burst: 10}).l
	b := newSingle(t, Policy{Algorithm: SlidingWindow, Quota: 10, Window: time.Minute}).l
	c := newSingle(t, Policy{Algorithm: SlidingLog, Quota: 1, Window: time.Minute}).l
	charges := []Charge{{Limit: a, Cost: 1}, {Limit: c, Cost: 1}, {Limit: b, Cost: 1}}
	r := request{}
	if _, ok := r.apply(0, charges...); !ok {
		t.Fatal("the first request is refused")
	}
	before := map[*Limit]State{a: r[a].state, b: r[b].state, c: r[c].state}
	out, ok := r.apply(7*time.Second, charges...)
	if ok || Binding(charges, out) != 1 || out[1].Retry != 53*time.Second {
		t.Errorf("%+v", out)
	}
	if !out[0].OK || !out[2].OK || out[0].Remaining != 10 || out[2].Remaining != 9 {
		t.Errorf("what the others have: %+v", out)
	}
	for l, s := range before {
		if !sameState(s, r[l].state) {
			t.Errorf("%v changed from %+v to %+v", l.Algorithm, s, r[l].state)
		}
	}
}

func TestF33OneCounterTwiceIsDecidedOnTheSum(t *testing.T) {
	for a := FixedWindow; a <= Concurrency; a++ {
		p := Policy{Algorithm: a, Quota: 1, Window: time.Second}
		if a.Bucket() {
			p.Burst = 1
		}
		l := newSingle(t, p).l
		out, ok := request{}.apply(0, Charge{Limit: l, Cost: 1}, Charge{Limit: l, Cost: 1})
		if ok || out[0].Retry != Never || out[1].Retry != Never || out[0].Remaining != 1 {
			t.Errorf("%v: %+v", a, out)
		}
	}
}
