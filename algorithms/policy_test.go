package algorithms

import (
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// Every error says what was wrong and what would be right.
func TestCompileErrors(t *testing.T) {
	second := time.Second
	for _, c := range []struct {
		p    Policy
		kind error
		text string
	}{
		{Policy{Quota: 1, Window: second}, ErrAlgorithm, "unknown algorithm: algorithm(0), want one of [fixed_window sliding_log sliding_window token_bucket leaky_bucket]"},
		{Policy{Algorithm: 7, Quota: 1, Window: second}, ErrAlgorithm, "algorithm(7)"},
		{Policy{Algorithm: FixedWindow, Quota: -1, Window: second}, ErrQuota, "quota out of range: -1, want 0 to 4503599627370496"},
		{Policy{Algorithm: FixedWindow, Quota: MaxExact + 1, Window: second}, ErrQuota, "4503599627370497"},
		{Policy{Algorithm: FixedWindow, Quota: 1}, ErrWindow, "window out of range: 0s, want whole microseconds from 1µs to 312749h58m26.842624s"},
		{Policy{Algorithm: FixedWindow, Quota: 1, Window: -second}, ErrWindow, "-1s"},
		{Policy{Algorithm: FixedWindow, Quota: 1, Window: 999}, ErrWindow, "999ns"},
		{Policy{Algorithm: FixedWindow, Quota: 1, Window: 1500}, ErrWindow, "1.5µs"},
		{Policy{Algorithm: FixedWindow, Quota: 1, Window: MaxWindow + time.Microsecond}, ErrWindow, "312749h58m26.842625s"},
		{Policy{Algorithm: FixedWindow, Quota: 1, Window: second, Burst: 2}, ErrBurst, "burst out of range: 2, but fixed_window has no burst; use token_bucket or leaky_bucket"},
		{Policy{Algorithm: SlidingLog, Quota: 0, Window: second, Burst: -1}, ErrBurst, "sliding_log has no burst"},
		{Policy{Algorithm: SlidingWindow, Quota: 1, Window: second, Burst: 1}, ErrBurst, "sliding_window has no burst"},
		{Policy{Algorithm: TokenBucket, Quota: 1, Window: second}, ErrBurst, "burst out of range: 0, want 1 to 4503599627370496"},
		{Policy{Algorithm: LeakyBucket, Quota: 1, Window: second, Burst: -3}, ErrBurst, "-3, want 1 to"},
		{Policy{Algorithm: TokenBucket, Quota: 1, Window: second, Burst: MaxExact + 1}, ErrBurst, "4503599627370497, want 1 to"},
		{Policy{Algorithm: TokenBucket, Quota: 1, Window: 365 * 24 * time.Hour, Burst: 100}, ErrBurst, "burst out of range: 100, which takes more than 312749h58m26.842624s"},
		{Policy{Algorithm: SlidingWindow, Quota: 1 << 40, Window: time.Hour + time.Microsecond}, ErrInexact, "limit cannot be counted exactly: 1099511627776 per 1h0m0.000001s needs numbers above 2^52 at every tick that divides the window; use a smaller quota or burst, or a rounder window"},
		{Policy{Algorithm: TokenBucket, Quota: 1, Window: MaxWindow, Burst: 1}, ErrBurst, "takes more than"},
		{Policy{Algorithm: Concurrency, Quota: 1, Window: second, Burst: 1}, ErrBurst, "concurrency has no burst"},
		{Policy{Algorithm: TokenBucket, Quota: 1, Window: second, Burst: 2, Queue: 1}, ErrQueue, "queue out of range: 1 waiting, but token_bucket has no queue; use leaky_bucket"},
		{Policy{Algorithm: SlidingLog, Quota: 1, Window: second, MaxWait: second}, ErrQueue, "0 waiting, but sliding_log has no queue"},
		{Policy{Algorithm: LeakyBucket, Quota: 1, Window: second, Burst: 3, Queue: 3}, ErrQueue, "3 waiting of a burst of 3, want 1 to 2"},
		{Policy{Algorithm: LeakyBucket, Quota: 1, Window: second, Burst: 3, MaxWait: second}, ErrQueue, "0 waiting of a burst of 3, want 1 to 2"},
		{Policy{Algorithm: LeakyBucket, Quota: 1, Window: second, Burst: 3, Queue: 2, MaxWait: 1500}, ErrQueue, "the longest wait is 1.5µs, want whole microseconds"},
		{Policy{Algorithm: LeakyBucket, Quota: 1, Window: second, Burst: 3, Queue: 2, MaxWait: -time.Microsecond}, ErrQueue, "the longest wait is -1µs, want"},
		{Policy{Algorithm: LeakyBucket, Quota: 1, Window: second, Burst: 3, Queue: 2, MaxWait: MaxWindow + time.Microsecond}, ErrQueue, "up to 312749h58m26.842624s"},
		{Policy{Algorithm: SlidingWindow, Quota: 5e10, Window: 1e6 * 1000 * time.Second}, ErrInexact, "50000000000 per"},
		{Policy{Algorithm: TokenBucket, Quota: 999_999_937, Window: 999_999_937 * time.Second, Burst: 1 << 50}, ErrBurst, "takes more than"},
	} {
		l, err := Compile("z", c.p)
		if l != nil || !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%+v: %v, want %q", c.p, err, c.text)
		}
	}
}

// The ends of every range compile.
func TestCompileBounds(t *testing.T) {
	for _, p := range []Policy{
		{Algorithm: FixedWindow, Quota: MaxExact, Window: MaxWindow},
		{Algorithm: SlidingLog, Quota: MaxExact, Window: time.Microsecond},
		{Algorithm: SlidingWindow, Quota: MaxExact, Window: time.Microsecond},
		{Algorithm: SlidingWindow, Quota: 0, Window: MaxWindow},
		{Algorithm: TokenBucket, Quota: MaxExact, Window: time.Microsecond, Burst: MaxExact},
		{Algorithm: TokenBucket, Quota: 1, Window: MaxWindow - time.Microsecond, Burst: 1},
		{Algorithm: LeakyBucket, Quota: 0, Window: time.Second},
		{Algorithm: SlidingWindow, Quota: 4e9, Window: 1e6 * 1000 * time.Second}, // in ticks of 1000 s, the coarsest
		{Algorithm: LeakyBucket, Quota: 0, Window: time.Second, Burst: 6},
		{Algorithm: LeakyBucket, Quota: MaxExact, Window: time.Microsecond, Burst: MaxExact, Queue: MaxExact - 1, MaxWait: MaxWindow},
		{Algorithm: LeakyBucket, Quota: 0, Window: time.Second, Burst: 6, Queue: 5, MaxWait: time.Microsecond},
		{Algorithm: Concurrency, Quota: MaxExact, Window: MaxWindow},
		{Algorithm: Concurrency, Quota: 0, Window: time.Microsecond},
	} {
		l, err := Compile("zone", p)
		if err != nil {
			t.Errorf("%+v: %v", p, err)
			continue
		}
		if l.Policy != p || l.Space != (Space{"zone", p.Algorithm, p.Window}) || l.MaxKeys != 0 {
			t.Errorf("%+v compiled to %+v", p, l)
		}
		want := p.Quota
		if p.Algorithm.Bucket() && p.Quota > 0 {
			want = p.Burst
		}
		if l.Capacity != want {
			t.Errorf("%+v: capacity %d, want %d", p, l.Capacity, want)
		}
		s := &single{l: l}
		now := MaxWindow // the longest waits from the latest moments are still exact
		s.ask(now, l.Capacity)
		if o := s.ask(now, l.Capacity); o.OK || (o.Retry != Never && o.Retry != Unknown && (o.Retry <= 0 || o.Retry > 2*MaxWindow)) {
			if p.Quota > 0 {
				t.Errorf("%+v: %+v", p, o)
			}
		}
	}
}

// The 2^52 rule: whatever compiles has no product above it, and no finer tick would do.
func TestCompileKeepsTheBound(t *testing.T) {
	coarse := map[Algorithm]int{}
	for seed := range uint64(100_000) {
		r := rand.New(rand.NewPCG(seed, 10))
		l := randomLimit(r)
		products := func(tick int64) int64 {
			ticks := l.window / tick
			if l.Algorithm == SlidingWindow {
				return saturatingMul(ticks, l.Quota)
			}
			return saturatingMul(ticks/gcd(l.Quota, ticks), l.Capacity)
		}
		switch l.Algorithm {
		case FixedWindow, SlidingLog, Concurrency:
			if l.tick != 1 {
				t.Fatalf("%+v: tick %d", l.Policy, l.tick)
			}
			continue
		case TokenBucket, LeakyBucket:
			if l.num*l.ticks != l.den*l.Quota || l.Capacity*l.den > l.ceiling || l.ceiling > MaxExact || ceilDiv(l.ceiling, l.num)*l.tick > MaxExact {
				t.Fatalf("%+v: %d/%d of %d, ceiling %d", l.Policy, l.num, l.den, l.ticks, l.ceiling)
			}
			if l.slack < 0 || l.slack > l.latest || l.latest > MaxExact || (l.slack < MaxExact) != (l.Queue > 0) {
				t.Fatalf("%+v: slack %d, latest %d", l.Policy, l.slack, l.latest)
			}
			if l.Refill() > MaxWindow {
				t.Fatalf("%+v: refill %v", l.Policy, l.Refill())
			}
		}
		if l.window%l.tick != 0 || l.ticks*l.tick != l.window || products(l.tick) > MaxExact {
			t.Fatalf("%+v: tick %d", l.Policy, l.tick)
		}
		if l.tick > 1 {
			coarse[l.Algorithm]++
			if products(l.tick/10) <= MaxExact {
				t.Fatalf("%+v: tick %d, a finer one would be exact", l.Policy, l.tick)
			}
		}
	}
	if coarse[TokenBucket] < 100 || coarse[SlidingWindow] < 100 {
		t.Errorf("coarse ticks met: %v", coarse)
	}
}

func saturatingMul(a, b int64) int64 {
	if a != 0 && b > math.MaxInt64/a {
		return math.MaxInt64
	}
	return a * b
}

// With the largest capacity a cost above it, one by itself or a sum, still is above it.
func TestCostsAboveTheLargestCapacity(t *testing.T) {
	for a := FixedWindow; a <= Concurrency; a++ {
		p := Policy{Algorithm: a, Quota: MaxExact, Window: time.Microsecond}
		if a.Bucket() {
			p.Burst = MaxExact
		}
		s := newSingle(t, p)
		for _, cost := range []int64{MaxExact + 1, MaxExact + 2, math.MaxInt64} {
			if o := s.ask(0, cost); o.OK || o.Retry != Never || o.Remaining != MaxExact {
				t.Errorf("%v, cost %d: %+v", a, cost, o)
			}
		}
		for _, c := range [][]Charge{{{Limit: s.l, Cost: MaxExact}, {Limit: s.l, Cost: 1}}, {{Limit: s.l, Cost: 1}, {Limit: s.l, Cost: math.MaxInt64}}} {
			if out, ok := (request{}).apply(0, c...); ok || out[0].Retry != Never || out[1].Retry != Never {
				t.Errorf("%v, %+v: %+v", a, c, out)
			}
		}
		if o := s.ask(0, MaxExact); !o.OK || o.Remaining != 0 {
			t.Errorf("%v: %+v", a, o)
		}
	}
}

func TestAlgorithmNames(t *testing.T) {
	names := AlgorithmNames()
	if len(names) != 5 {
		t.Fatalf("%q", names)
	}
	for i, name := range names {
		a, ok := ParseAlgorithm(name)
		if !ok || a != Algorithm(i+1) || a.String() != name || a.Bucket() != strings.HasSuffix(name, "_bucket") {
			t.Errorf("%q is %v, %t", name, a, ok)
		}
	}
	names[0] = "changed" // a copy: no caller can rename an algorithm
	if FixedWindow.String() != "fixed_window" {
		t.Error(FixedWindow)
	}
	for _, name := range []string{"", "gcra", "Fixed_Window", Concurrency.String()} {
		if a, ok := ParseAlgorithm(name); ok || a != 0 {
			t.Errorf("%q is %v", name, a)
		}
	}
	if Algorithm(0).String() != "algorithm(0)" || Algorithm(200).String() != "algorithm(200)" {
		t.Error(Algorithm(0), Algorithm(200))
	}
}
