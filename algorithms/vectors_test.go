package algorithms

// The numbers of SEMANTICS, in its milliseconds: waits are rounded up to them.

import (
	"testing"
	"time"
)

// single is one counter, driven by hand.
type single struct {
	l     *Limit
	state State
}

// scratch lets a test decide millions of times without allocating; decisions of one package's tests
// are not concurrent.
var scratch struct {
	counter  Counter
	counters [1]*Counter
	charges  [1]Charge
	out      [1]Outcome
}

func newSingle(t testing.TB, p Policy) *single {
	t.Helper()
	l, err := Compile("z", p)
	if err != nil {
		t.Fatal(err)
	}
	return &single{l: l}
}

// decide applies one charge at a moment since the epoch, as a store does.
func (s *single) decide(now time.Duration, c Charge) Outcome {
	c.Key, c.Limit = "k", s.l
	x := &scratch
	x.counter, x.counters[0], x.charges[0] = Counter{State: s.state}, &x.counter, c
	x.counter.Log = append([]Entry(nil), s.state.Log...)
	if Decide(now.Microseconds(), x.charges[:], x.counters[:], x.out[:]) || x.counter.Anchored {
		s.state = x.counter.State
	}
	return x.out[0]
}

func (s *single) ask(now time.Duration, cost int64) Outcome { return s.decide(now, Charge{Cost: cost}) }

func (s *single) peek(now time.Duration, cost int64) Outcome {
	return s.decide(now, Charge{Cost: cost, Peek: true})
}

func ms(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// upMS is a wait in milliseconds, rounded up; never is -1.
func upMS(d time.Duration) int64 {
	if d == Never {
		return never
	}
	return (d + ms(1) - 1).Milliseconds()
}

const never, skip = -1, -2

// vector: at a moment a cost is answered with what remains and the wait for it; full is the wait
// until the whole capacity is there again.
type vector struct{ at, cost, left, retry, full int64 }

func (s *single) follow(t *testing.T, vectors []vector) {
	t.Helper()
	for i, v := range vectors {
		o := s.ask(ms(v.at), v.cost)
		if upMS(o.Retry) != v.retry || (v.left != skip && o.Remaining != v.left) {
			t.Errorf("%d: at %d cost %d: remaining %d, retry %v; want %+v", i, v.at, v.cost, o.Remaining, o.Retry, v)
		}
		if full := s.peek(ms(v.at), s.l.Capacity).Retry; v.full != skip && upMS(full) != v.full {
			t.Errorf("%d: at %d cost %d: full again in %v, want %d", i, v.at, v.cost, full, v.full)
		}
	}
}

func TestVectorsFixedWindow(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: FixedWindow, Quota: 5, Window: ms(60000)})
	s.follow(t, []vector{
		{59000, 1, 4, 0, 1000}, {59000, 1, 3, 0, 1000}, {59000, 1, 2, 0, 1000}, {59000, 1, 1, 0, 1000}, {59000, 1, 0, 0, 1000},
		{59000, 1, 0, 1000, 1000}, {59999, 1, 0, 1, 1}, {60000, 1, 4, 0, 60000},
	})
}

func TestVectorsSlidingLog(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: SlidingLog, Quota: 3, Window: ms(10000)})
	s.follow(t, []vector{
		{0, 1, 2, 0, 10000}, {1000, 1, 1, 0, 10000}, {4000, 1, 0, 0, 10000},
		{5000, 1, 0, 5000, 9000}, {9999, 1, 0, 1, 4001}, {10000, 1, 0, 0, 10000}, {10000, 1, 0, 1000, 10000},
		{10000, 2, 0, 4000, skip}, {10000, 4, 0, never, skip},
	})
}

func TestVectorsSlidingWindow(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: SlidingWindow, Quota: 50, Window: ms(60000)})
	s.follow(t, []vector{
		{30000, 42, 8, 0, skip}, {75000, 18, 0, 0, 105000}, {75000, 1, 0, 715, skip}, {75714, 1, 0, 1, skip},
		{75000, 2, 0, 2143, skip}, {75000, 10, 0, 13572, skip}, {75000, 32, 0, 45000, skip}, {75000, 33, 0, 48334, skip},
		{75000, 50, 0, 105000, skip}, {75000, 51, 0, never, skip}, {75715, 1, 0, 0, skip},
	})
	s = newSingle(t, Policy{Algorithm: SlidingWindow, Quota: 10, Window: ms(60000)})
	s.follow(t, []vector{
		{30000, 10, 0, 0, 90000}, {30000, 1, 0, 36000, skip}, {30000, 5, 0, 60000, skip}, {30000, 10, 0, 90000, skip},
	})
}

func TestVectorsTokenBucket(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: TokenBucket, Quota: 3, Window: ms(1000), Burst: 3})
	s.follow(t, []vector{
		{0, 1, 2, 0, 334}, {0, 1, 1, 0, 667}, {0, 1, 0, 0, 1000}, {0, 1, 0, 334, 1000}, {333, 1, 0, 1, skip},
		{334, 1, 0, 0, skip}, {667, 1, 0, 0, skip}, {999, 1, 0, 1, skip}, {1000, 1, 0, 0, 1000},
		{1000, 2, 0, 667, skip}, {1000, 3, 0, 1000, skip}, {1000, 4, 0, never, skip},
	})
	s = newSingle(t, Policy{Algorithm: TokenBucket, Quota: 1, Window: ms(1000), Burst: 5})
	s.follow(t, []vector{
		{0, 6, 5, never, 0}, {0, 1, 4, 0, 1000}, {0, 1, 3, 0, 2000}, {0, 1, 2, 0, 3000}, {0, 1, 1, 0, 4000}, {0, 1, 0, 0, 5000},
		{0, 1, 0, 1000, 5000}, {3000, 1, 2, 0, 3000}, {3100, 1, 1, 0, 3900}, {4000, 1, 1, 0, 4000}, {8000, 1, 4, 0, 1000},
		{9500, 1, 4, 0, 1000}, {9500, 0, 4, 0, 1000}, {9500, 2, 2, 0, 3000}, {9500, 5, 2, 3000, 3000},
	})
}

func TestVectorsLeakyBucket(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: LeakyBucket, Quota: 10, Window: ms(1000), Burst: 1})
	s.follow(t, []vector{{0, 1, 0, 0, 100}, {0, 1, 0, 100, 100}, {99, 1, 0, 1, 1}, {100, 1, 0, 0, 100}})
}

// slots asks for one unit at a time at one moment and wants the delays, in milliseconds; below 0 a
// refusal and its wait.
func (s *single) slots(t *testing.T, at int64, want ...int64) {
	t.Helper()
	for i, delay := range want {
		o := s.ask(ms(at), 1)
		if o.OK != (delay >= 0) || (o.OK && upMS(o.Delay) != delay) || (!o.OK && upMS(o.Retry) != -delay) {
			t.Errorf("request %d at %d: %+v, want %d", i, at, o, delay)
		}
	}
}

func newQueue(t *testing.T, queue, delay int64, maxWait time.Duration) *single {
	return newSingle(t, Policy{
		Algorithm: LeakyBucket, Quota: 10, Window: ms(1000), Burst: queue + 1, Queue: queue - delay, MaxWait: maxWait,
	})
}

func TestVectorsQueue(t *testing.T) {
	s := newQueue(t, 5, 0, 0)
	s.slots(t, 0, 0, 100, 200, 300, 400, 500, -100)
	s.slots(t, 99, -1)
	s.slots(t, 100, 500, -100) // the one that left made room for one
	s.slots(t, 650, 50, 150, 250, 350, 450, -50)
	s.slots(t, 2000, 0)

	s = newQueue(t, 5, 3, 0)
	s.slots(t, 0, 0, 0, 0, 0, 100, 200, -100)
	s.slots(t, 100, 200, -100)
}

func TestVectorsQueueMaxWait(t *testing.T) {
	newQueue(t, 5, 0, ms(250)).slots(t, 0, 0, 100, 200, -50)
	newQueue(t, 5, 0, ms(300)).slots(t, 0, 0, 100, 200, 300, -100) // exactly as long is not longer
	newQueue(t, 5, 0, ms(299)).slots(t, 0, 0, 100, 200, -1)
	newQueue(t, 5, 3, ms(100)).slots(t, 0, 0, 0, 0, 0, 100, -100)
	newQueue(t, 5, 0, time.Microsecond).slots(t, 0, 0, -100)
	newQueue(t, 5, 0, MaxWindow).slots(t, 0, 0, 100, 200, 300, 400, 500, -100)
}

// The leaver: A 0, B 100, C 200, D 300; B leaves at 10, and a newcomer gets 300, for C and D have
// moved up.
func TestVectorsQueueLeaver(t *testing.T) {
	s := newQueue(t, 5, 0, 0)
	s.slots(t, 0, 0)
	b := s.ask(0, 1)
	s.slots(t, 0, 200, 300)
	leaves := Charge{Cost: -1, Mark: b.Mark}
	if o := s.decide(ms(10), leaves); o.Remaining != s.l.Capacity-4 {
		t.Errorf("a slot with others behind it was given back: %+v", o)
	}
	leaves.Force = true
	s.decide(ms(10), leaves)
	s.slots(t, 10, 290)
	last := s.ask(ms(10), 1) // 390, that is at 400
	s.decide(ms(10), Charge{Cost: -1, Mark: last.Mark})
	s.slots(t, 10, 390)
}

func TestVectorsConcurrency(t *testing.T) {
	s := newSingle(t, Policy{Algorithm: Concurrency, Quota: 2, Window: ms(60000)})
	first := s.ask(ms(1000), 1)
	for _, c := range []struct {
		at     int64
		charge Charge
		want   Outcome
	}{
		{2000, Charge{Cost: 1}, Outcome{OK: true, Next: Unknown, Mark: 2_000_000}},
		{3000, Charge{Cost: 1}, Outcome{Retry: Unknown, Next: Unknown}},
		{3000, Charge{Cost: 3}, Outcome{Retry: Never, Next: Unknown}},
		{3000, Charge{Cost: -1, Mark: first.Mark}, Outcome{OK: true, Remaining: 1, Next: Unknown, Mark: first.Mark}},
		{3000, Charge{Cost: -1, Mark: first.Mark}, Outcome{OK: true, Remaining: 1, Next: Unknown}}, // once
		{3000, Charge{Cost: 2}, Outcome{Remaining: 1, Retry: Unknown, Next: Unknown}},
		{4000, Charge{Cost: 1}, Outcome{OK: true, Next: Unknown, Mark: 4_000_000}},
		{61_999, Charge{Cost: 1}, Outcome{Retry: Unknown, Next: Unknown}},
		{62_000, Charge{Cost: 1}, Outcome{OK: true, Next: Unknown, Mark: 62_000_000}}, // the lease of 2000 is over
		{62_000, Charge{Cost: -1, Mark: 2_000_000}, Outcome{OK: true, Next: Unknown}},
		{200_000, Charge{Cost: 0}, Outcome{OK: true, Remaining: 2, Next: Never}},
	} {
		if got := s.decide(ms(c.at), c.charge); got != c.want {
			t.Errorf("at %d %+v: %+v, want %+v", c.at, c.charge, got, c.want)
		}
	}
}

func TestVectorsBan(t *testing.T) {
	ban := Ban("z")
	r := request{}
	ask := func(at int64, want int64) {
		t.Helper()
		if out, _ := r.apply(ms(at), Ask(ban, "k")); upMS(out[0].Retry) != want {
			t.Errorf("at %d: %+v, want %d ms left", at, out[0], want)
		}
	}
	ask(0, 0)
	for _, at := range []int64{1000, 2000} { // the second does not extend the first
		out, ok := r.apply(ms(at), Ask(ban, "k"), Banish(ban, "k", ms(5000)))
		if ok != (at == 1000) || out[0].OK != ok {
			t.Errorf("at %d: %+v", at, out)
		}
	}
	ask(1000, 5000)
	ask(5999, 1)
	ask(6000, 0)
	r.apply(ms(7000), Banish(ban, "k", ms(1000)))
	r.apply(ms(7000), Banish(ban, "k", ms(2000))) // unasked, the times add up
	ask(7000, 3000)
}
