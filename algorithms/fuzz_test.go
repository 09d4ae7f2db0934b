package algorithms

import (
	"encoding/binary"
	"math"
	"slices"
	"testing"
	"time"
)

// FuzzDecide lets bytes choose a policy and then charges and moments, and holds every answer to
// what must always be true: bounds, tight waits, nothing changed by a refusal or a look. Found
// inputs are kept in testdata/fuzz.
func FuzzDecide(f *testing.F) {
	f.Add(byte(0), int64(5), int64(60_000_000), int64(0), []byte{0, 1, 1, 1, 5, 2, 9, 3, 200})
	f.Add(byte(1), int64(3), int64(10_000_000), int64(0), []byte{1, 1, 4, 1, 2, 4, 3, 9, 0, 3})
	f.Add(byte(2), int64(50), int64(60_000_000), int64(0), []byte{1, 42, 4, 1, 18, 2, 5, 1})
	f.Add(byte(2), int64(1000), int64(31_536_000_000_000), int64(0), []byte{1, 255, 2, 1, 8, 9, 7, 1})
	f.Add(byte(3), int64(3), int64(1_000_000), int64(3), []byte{1, 1, 1, 1, 1, 1, 2, 1, 9, 6, 1})
	f.Add(byte(3), int64(999), int64(31_536_000_000_000), int64(999), []byte{6, 255, 2, 5, 8, 1, 9})
	f.Add(byte(4), int64(10), int64(1_000_000), int64(1), []byte{1, 1, 7, 8, 9, 6, 3})
	f.Add(byte(4), int64(0), int64(1), int64(0), []byte{6, 1, 1, 1})
	f.Add(byte(3), MaxExact, int64(1), MaxExact, []byte{6, 255, 6, 255, 1, 255})
	f.Add(byte(130), int64(10), int64(1_000_000), int64(6), []byte{1, 1, 1, 1, 1, 1, 207, 0, 1, 3, 7, 0, 2, 1, 201, 3})
	f.Add(byte(191), int64(3), int64(31_536_000_000_000), int64(999), []byte{1, 9, 1, 9, 2, 2, 1, 9, 207, 1})
	f.Add(byte(192), int64(2), int64(60_000_000), int64(0), []byte{1, 1, 1, 1, 1, 1, 207, 0, 201, 1, 4, 200, 1, 2})
	f.Fuzz(func(t *testing.T, algorithm byte, quota, window, burst int64, ops []byte) {
		if window <= 0 || window > MaxWindow.Microseconds() {
			return
		}
		p := Policy{Algorithm: 1 + Algorithm(algorithm%5), Quota: quota, Window: time.Duration(window) * time.Microsecond, Burst: burst}
		switch {
		case algorithm >= 192:
			p.Algorithm = Concurrency
		case algorithm >= 128: // a queue of which a part may go at once, every other one with a bound in time
			p.Algorithm, p.Queue = LeakyBucket, max(1, burst-1-int64(algorithm%8))
			p.MaxWait = time.Duration(int64(algorithm%2)*max(1, window*3/16)) * time.Microsecond
		}
		l, err := Compile("z", p)
		if err != nil {
			return
		}
		w := fuzzWalk{t: t, l: l, s: &single{l: l}, now: MaxExact / 4}
		for ops = ops[:min(len(ops), 64)]; len(ops) >= 2; ops = ops[2:] {
			w.step(ops[0], int64(ops[1]))
		}
	})
}

type fuzzWalk struct {
	t     *testing.T
	l     *Limit
	s     *single
	now   int64
	marks []Charge
}

// step spends two bytes: what to do, and how much of it.
func (w *fuzzWalk) step(kind byte, n int64) {
	amount := n * max(1, w.l.Capacity/255)
	if n == 255 {
		amount = w.l.Capacity
	}
	c := Charge{Cost: amount}
	kind, special := kind%10, kind >= 200
	switch kind {
	case 0:
		c.Cost, c.Peek = amount, true
	case 2: // jump to the end of the wait, or one beside it
		if o := w.look(amount); o.Retry != Never {
			w.now += o.Retry.Microseconds() + n%3 - 1
		}
	case 3:
		w.now += w.l.window - w.now%w.l.window + n%3 - 1
	case 4:
		w.now += n * max(1, w.l.window/128)
	case 5:
		w.now -= n * max(1, w.l.window/128)
	case 6:
		c.Force, c.Cost = true, amount*n
	case 1:
		c.Check = special
	case 7:
		if len(w.marks) > 0 {
			c = w.marks[n%int64(len(w.marks))]
			c.Cost, c.Force = -min(c.Cost, n+1), special
		}
	case 8:
		c.DryRun = true
	case 9:
		c.Held = amount
	}
	w.now = min(max(w.now, 0), MaxExact)
	w.look(c.Cost)
	w.apply(c)
}

func (w *fuzzWalk) at() time.Duration { return time.Duration(w.now) * time.Microsecond }

func (w *fuzzWalk) apply(c Charge) {
	before := w.s.state
	before.Log = slices.Clone(before.Log)
	o := w.s.decide(w.at(), c)
	w.bounds(c, o)
	if o.OK && c.Cost > 0 && c.Commits() {
		w.marks = append(w.marks, Charge{Cost: c.Cost, Mark: o.Mark})
		return
	}
	ahead := before.T-w.now > w.l.window
	if c.Cost >= 0 && !ahead && !sameState(before, w.s.state) {
		w.t.Fatalf("%+v at %d: %+v took nothing, but %+v became %+v", w.l.Policy, w.now, c, before, w.s.state)
	}
}

// bounds is what holds of every answer and of every state that a store is given to keep.
func (w *fuzzWalk) bounds(c Charge, o Outcome) {
	s := w.s.state
	bad := ""
	switch {
	case o.Remaining < 0 || o.Remaining > w.l.Capacity:
		bad = "remaining out of range"
	case o.OK != (o.Retry == 0) || (o.Retry < 0 || o.Next <= 0) && w.l.Algorithm != Concurrency || o.Retry < Unknown || o.Next < Unknown:
		bad = "a wait that is none"
	case o.Delay < 0 || o.Delay > 0 && (!o.OK || c.Cost <= 0 || w.l.Queue == 0):
		bad = "a delay without a slot"
	case w.l.MaxWait > 0 && o.Delay > w.l.MaxWait && !c.Force && s.T <= w.now:
		bad = "a delay beyond the longest wait"
	case !w.l.Possible(&o, c.Force):
		bad = "an answer that stores would not believe"
	case (o.Next == Never) != (o.Remaining == w.l.Capacity):
		bad = "next"
	case !o.OK && (c.Cost <= 0 || c.Force):
		bad = "refused what takes nothing or is forced"
	case o.OK && c.Cost > w.l.Capacity && !c.Force:
		bad = "admitted more than the capacity"
	case s.A < 0 || s.B < 0 || s.T < 0 || s.A > MaxExact || s.B > MaxExact || s.T > MaxExact:
		bad = "state out of range"
	case o.Mark < 0 && c.Cost > 0 || o.Mark > 3*MaxExact:
		bad = "mark out of range"
	}
	sum, moment := s.A, int64(math.MinInt64)
	for _, e := range s.Log {
		if e.Sum <= sum || e.At <= moment || e.Sum > MaxExact {
			bad = "log out of order"
		}
		sum, moment = e.Sum, e.At
	}
	if used := w.l.Used(s, w.now); used < 0 || used > MaxExact || (used == 0) != w.l.Idle(s, w.now) {
		bad = "used out of range"
	}
	if bad != "" {
		w.t.Fatalf("%s: %+v at %d: %+v answered %+v, state %+v", bad, w.l.Policy, w.now, c, o, s)
	}
}

// look asks without taking: twice the same, tight, and one more than remaining is refused.
func (w *fuzzWalk) look(cost int64) Outcome {
	cost = max(0, cost)
	probe := single{l: w.l, state: w.s.state}
	probe.decide(w.at(), Charge{}) // re-anchor first, so that all looks below see one state
	o := probe.peek(w.at(), cost)
	if again := probe.peek(w.at(), cost); again != o {
		w.t.Fatalf("%+v at %d: %+v, then %+v", w.l.Policy, w.now, o, again)
	}
	w.bounds(Charge{Cost: cost}, o)
	if o.Remaining < w.l.Capacity && probe.peek(w.at(), o.Remaining+1).OK || !probe.peek(w.at(), o.Remaining).OK {
		w.t.Fatalf("%+v at %d: remaining is not true: %+v", w.l.Policy, w.now, o)
	}
	then, more := probe, o.Remaining+1
	if w.l.Algorithm == SlidingWindow && o.Remaining > 0 { // used as early as it can be, it weighs on
		then.decide(w.at(), Charge{Cost: o.Remaining})
		more = 1
	}
	for _, wait := range []struct {
		s    *single
		d    time.Duration
		cost int64
	}{{&probe, o.Retry, cost}, {&then, o.Next, more}} {
		if wait.d == 0 || wait.d == Never || wait.d == Unknown {
			continue
		}
		if wait.s.peek(w.at()+wait.d-time.Microsecond, wait.cost).OK || !wait.s.peek(w.at()+wait.d, wait.cost).OK {
			w.t.Fatalf("%+v at %d: a wait of %v for %d is not tight: %s", w.l.Policy, w.now, wait.d, wait.cost, binary.BigEndian.AppendUint64(nil, uint64(wait.d)))
		}
	}
	return o
}
