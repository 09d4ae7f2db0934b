package algorithms

import (
	"testing"
	"time"
)

// bench is a single counter driven by hand.
type single struct {
	l     *Limit
	state State
}

func newSingle(t testing.TB, p Policy) *single {
	l, err := Compile("z", p)
	if err != nil {
		t.Fatal(err)
	}
	return &single{l: l}
}

func (s *single) ask(now time.Duration, cost int64) Outcome {
	c := Counter{State: s.state}
	var out [1]Outcome
	if Decide(now.Microseconds(), []Charge{{Key: "k", Limit: s.l, Cost: cost}}, []*Counter{&c}, out[:]) || c.Anchored {
		s.state = c.State
	}
	return out[0]
}

func ms(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

func TestSlidingWindowNumbers(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: SlidingWindow, Quota: 50, Window: ms(60000)})
	s.state = State{T: ms(60000).Microseconds(), A: 18, B: 42}
	for _, c := range []struct{ cost, retry int64 }{{1, 715}, {2, 2143}, {10, 13572}, {32, 45000}, {33, 48334}, {50, 105000}} {
		got := s.ask(ms(75000), c.cost)
		if got.OK || (got.Retry+ms(1)-1).Truncate(ms(1)) != ms(c.retry) || got.Remaining != 0 {
			t.Errorf("cost %d: %+v want %d", c.cost, got, c.retry)
		}
	}
	if got := s.ask(ms(75000), 51); got.Retry != Never {
		t.Error(got)
	}
}

func TestTokenBucketNumbers(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 3, Window: ms(1000), Burst: 3})
	for i := 0; i < 3; i++ {
		if !s.ask(0, 1).OK {
			t.Fatal(i)
		}
	}
	if got := s.ask(0, 1); got.OK || got.Retry != 333334*time.Microsecond {
		t.Fatal(got)
	}
	for _, c := range []struct {
		at int64
		ok bool
	}{{333, false}, {334, true}, {667, true}, {999, false}, {1000, true}} {
		if got := s.ask(ms(c.at), 1); got.OK != c.ok {
			t.Fatal(c, got)
		}
	}
}
