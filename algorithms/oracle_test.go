package algorithms

// A second implementation of SEMANTICS, as naive as possible: a list of events, and every number
// found by trying one microsecond after the other. It shares no formula with the kernels. All short
// histories of a small domain are compared, then long random ones.

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// event is units that were taken (or, from a bucket, given back) at a moment.
type event struct{ at, units int64 }

// naive is a counter by definition.
type naive struct {
	l      *Limit
	events []event
	stored int64 // the moment the state was last true; 0 with no events
}

// floor is the start of the tick that t is in, for the algorithms that measure in ticks.
func (n *naive) floor(t int64) int64 {
	if n.l.Algorithm == FixedWindow || n.l.Algorithm.Log() {
		return t
	}
	return t - t%n.l.tick
}

// at is the moment that counts at t, by promise 8; the counter itself is moved when it is too far
// ahead.
func (n *naive) at(t int64) int64 {
	w := n.l.window
	switch {
	case n.stored <= t:
		return t
	case n.stored-t <= w:
		return n.stored
	}
	var shift int64
	switch n.l.Algorithm {
	case FixedWindow, SlidingWindow:
		shift = t/w*w - n.stored
	case TokenBucket, LeakyBucket:
		shift = n.floor(t) - n.stored
	}
	n.events = slices.Clone(n.events)
	for i := range n.events {
		n.events[i].at = n.events[i].at + shift
		if n.l.Algorithm.Log() {
			n.events[i].at = min(n.events[i].at, t)
		}
	}
	n.stored += shift
	if n.l.Algorithm.Log() {
		n.stored = t
	}
	if n.idle(t) {
		n.events, n.stored = nil, 0
	}
	return t
}

// level is what a bucket holds at t, in units·window, replayed from the first event.
func (n *naive) level(t int64) int64 {
	var level, last int64
	t = n.floor(t)
	drain := func(to int64) {
		level = max(0, level-(to-last)*n.l.Quota)
		last = to
	}
	for _, e := range n.events {
		drain(e.at)
		level = max(0, level+e.units*n.l.window)
	}
	drain(t)
	return level
}

// count sums the events of the window that is back windows before the one of t.
func (n *naive) count(t, back int64) (sum int64) {
	for _, e := range n.events {
		if e.at/n.l.window == t/n.l.window-back {
			sum += e.units
		}
	}
	return sum
}

// admits is each algorithm's definition.
func (n *naive) admits(t, cost int64) bool {
	w, q := n.l.window, n.l.Quota
	switch n.l.Algorithm {
	case FixedWindow:
		return n.count(t, 0)+cost <= q
	case SlidingLog, Concurrency:
		for _, e := range n.events {
			if e.at > t-w {
				cost += e.units
			}
		}
		return cost <= q
	case SlidingWindow:
		return n.count(t, 1)*(w-n.floor(t)%w)+(n.count(t, 0)+cost)*w <= q*w
	default:
		longest := n.l.MaxWait.Microseconds() / n.l.tick * n.l.tick
		return n.level(t)+cost*w <= n.l.Capacity*w && (n.l.MaxWait == 0 || n.begins(t+longest))
	}
}

// begins reports whether a charge that waits may be served at t: those before it are, but for the
// ones that need not wait.
func (n *naive) begins(t int64) bool {
	return n.l.Queue == 0 || n.level(t) <= (n.l.Burst-1-n.l.Queue)*n.l.window
}

// delay tries every moment from now on.
func (n *naive) delay(now, cost int64) time.Duration {
	t := n.at(now)
	if cost <= 0 || !n.l.Algorithm.Bucket() || n.begins(t) {
		return 0
	}
	for ; !n.begins(t); t++ {
	}
	return time.Duration(t-now) * time.Microsecond
}

func (n *naive) idle(t int64) bool {
	switch n.l.Algorithm {
	case FixedWindow:
		return n.count(t, 0) == 0
	case SlidingLog, Concurrency:
		return !slices.ContainsFunc(n.events, func(e event) bool { return e.at > t-n.l.window && e.units > 0 })
	case SlidingWindow:
		return n.count(t, 0)+n.count(t, 1) == 0
	default:
		return n.level(t) == 0
	}
}

// wait tries every moment from now on.
func (n *naive) wait(now, cost int64) time.Duration {
	if cost == 0 {
		return 0
	}
	if cost > n.l.Capacity {
		return Never
	}
	for t := now; ; t++ {
		if n.admits(n.at(t), cost) {
			return time.Duration(t-now) * time.Microsecond
		}
		if n.l.Algorithm == Concurrency {
			return Unknown
		}
	}
}

// answer decides a cost at now and says what remains, as Decide does for a single charge.
func (n *naive) answer(now, cost int64) Outcome {
	o := Outcome{Retry: n.wait(now, cost), Next: Never}
	if o.OK = o.Retry == 0; o.OK {
		o.Delay = n.delay(now, cost)
	}
	for o.Remaining < n.l.Capacity && n.wait(now, o.Remaining+1) == 0 {
		o.Remaining++
	}
	if o.Remaining < n.l.Capacity {
		then, cost := *n, o.Remaining+1
		if n.l.Algorithm == SlidingWindow && o.Remaining > 0 { // what remains is used first, and weighs on
			then.events, cost = slices.Clone(n.events), 1
			then.take(now, o.Remaining)
		}
		o.Next = then.wait(now, cost)
	}
	return o
}

// after is the answer with what is left once the batch is over.
func (n *naive) after(now int64, o Outcome) Outcome {
	left := n.answer(now, 0)
	o.Remaining, o.Next = left.Remaining, left.Next
	return o
}

// live copies the events without those that have left a log's window. Whoever changes the state at
// t forgets them for good: they must not come back when a clock that was far ahead is set right.
func (n *naive) live(t int64) []event {
	return slices.DeleteFunc(slices.Clone(n.events), func(e event) bool {
		return n.l.Algorithm.Log() && e.at <= t-n.l.window
	})
}

// take adds the units and returns the mark.
func (n *naive) take(now, units int64) int64 {
	t := n.at(now)
	n.events = append(n.live(t), event{n.floor(t), units})
	switch n.l.Algorithm {
	case FixedWindow, SlidingWindow:
		n.stored = t / n.l.window * n.l.window
		return n.stored
	case SlidingLog, Concurrency:
		n.stored = t
		return t
	default:
		n.stored = n.floor(t)
		return n.emptyAt(t)
	}
}

// emptyAt tries every moment from t on.
func (n *naive) emptyAt(t int64) int64 {
	for t = n.floor(t); n.level(t) > 0; t++ {
	}
	return t
}

// giveBack takes units out of the events that the mark names; of a queue's only the last, unless it
// is forced. It returns the mark, or 0 if there was nothing to give back to.
func (n *naive) giveBack(now, units, mark int64, force bool) int64 {
	t, w := n.at(now), n.l.window
	var from func(e event) bool
	switch n.l.Algorithm {
	case FixedWindow:
		from = func(e event) bool { return e.at/w*w == mark && t/w == e.at/w }
	case SlidingWindow:
		from = func(e event) bool { return e.at/w*w == mark && t/w-e.at/w <= 1 }
	case SlidingLog, Concurrency:
		from = func(e event) bool { return e.at == mark && e.at > t-w }
	default:
		if last := n.l.Queue == 0 || force || n.emptyAt(t) == mark; last && t < mark && n.level(t) > 0 {
			n.events, n.stored = append(slices.Clone(n.events), event{n.floor(t), -units}), n.floor(t)
			n.forgetIdle(t)
			return mark
		}
		return 0
	}
	events, changed := n.live(t), false
	for i, e := range events {
		if from(e) && e.units > 0 {
			back := min(units, e.units)
			events[i].units -= back
			units -= back
			changed = true
		}
	}
	if !changed {
		return 0
	}
	n.events = events
	if !n.l.Algorithm.Log() {
		n.stored = t / w * w
	}
	n.forgetIdle(t)
	return mark
}

func (n *naive) forgetIdle(t int64) {
	if n.idle(t) {
		n.events, n.stored = nil, 0
	}
}

// pair is the same counter twice: as the kernels keep it and as the definition does.
type pair struct {
	state State
	naive naive
	now   int64
	marks []mark
	trail []op
}

type mark struct{ mark, units int64 }

// op is one thing a request can do, after the clock has moved by dt.
type op struct {
	dt    int64
	kind  string
	units int64
}

func (o op) needsMark() bool { return o.kind == "back" || o.kind == "leave" || o.kind == "renew" }

func (p pair) decide(charges ...Charge) (State, []Outcome) {
	c := Counter{State: p.state}
	c.Log = slices.Clone(c.Log)
	counters, out := make([]*Counter, len(charges), 2), make([]Outcome, len(charges), 2)
	for i := range charges {
		charges[i].Limit, counters[i] = p.naive.l, &c
	}
	if Decide(p.now, charges, counters, out) || c.Anchored {
		return c.State, out
	}
	return p.state, out
}

// do applies an op to both and compares the answers.
func (p pair) do(t *testing.T, o op) pair {
	p.now += o.dt
	p.trail = append(slices.Clip(p.trail), o)
	n := p.naive
	switch o.kind {
	case "take", "force", "dry":
		want := n.answer(p.now, o.units)
		if o.kind == "force" {
			want.OK, want.Retry, want.Delay = true, 0, n.delay(p.now, o.units)
		}
		n.at(p.now)
		if want.OK && o.units > 0 {
			want.Mark = n.take(p.now, o.units)
			p.marks = append(slices.Clone(p.marks), mark{want.Mark, o.units})
		}
		state, out := p.decide(Charge{Cost: o.units, Force: o.kind == "force", DryRun: o.kind == "dry"})
		p.state = state
		p.same(t, out[0], n.after(p.now, want))
	case "twice":
		both := n.answer(p.now, 2*o.units)
		state, out := p.decide(Charge{Cost: o.units}, Charge{Cost: o.units})
		p.state = state
		n.at(p.now)
		if both.OK {
			n.take(p.now, o.units)
			both.Mark = n.take(p.now, o.units)
			p.marks = append(slices.Clone(p.marks), mark{both.Mark, o.units})
		}
		p.same(t, out[1], n.after(p.now, both))
	case "unless": // what a ban is: taken by force, unless one unit would be refused
		one := n.answer(p.now, 1)
		want := Outcome{OK: true, Delay: n.delay(p.now, o.units)}
		n.at(p.now)
		if one.OK {
			want.Mark = n.take(p.now, o.units)
		}
		state, out := p.decide(Charge{Cost: 1, Check: true}, Charge{Cost: o.units, Force: true})
		p.state = state
		p.same(t, out[0], n.after(p.now, one))
		p.same(t, out[1], n.after(p.now, want))
	case "renew":
		m := p.marks[len(p.marks)-1]
		now := n.at(p.now) // the same for both
		n.giveBack(now, m.units, m.mark, false)
		want := Outcome{OK: true, Mark: n.take(now, m.units)}
		p.marks = append(slices.Clone(p.marks[:len(p.marks)-1]), mark{want.Mark, m.units})
		state, out := p.decide(Charge{Cost: -m.units, Mark: m.mark}, Charge{Cost: m.units, Force: true})
		p.state = state
		p.same(t, out[1], n.after(p.now, want))
	case "back", "leave":
		m := p.marks[(len(p.marks)-1)*int(1-o.units/2)] // 0 and 1: the newest, 2: the oldest
		back := max(1, m.units-o.units/2)
		if o.units == 0 { // more than was taken
			back += 5
		}
		force := o.kind == "leave"
		n.at(p.now)
		given := n.giveBack(p.now, back, m.mark, force)
		want := n.answer(p.now, 0)
		want.Mark = given
		state, out := p.decide(Charge{Cost: -back, Mark: m.mark, Force: force})
		p.state = state
		p.same(t, out[0], want)
	}
	p.naive = n
	return p
}

// look compares what both say about every cost, and about idleness.
func (p pair) look(t *testing.T) {
	for cost := int64(0); cost <= p.naive.l.Capacity+1; cost++ {
		n := p.naive
		state, out := p.decide(Charge{Cost: cost, Peek: true})
		p.same(t, out[0], n.answer(p.now, cost))
		if p.naive.stored <= p.now && !sameState(state, p.state) {
			t.Fatalf("%+v: %v: a peek changed %+v to %+v", p.naive.l.Policy, p.trail, p.state, state)
		}
	}
	n := p.naive
	if got, want := p.naive.l.Idle(p.state, p.now), n.idle(n.at(p.now)); got != want {
		t.Fatalf("%+v: %v: idle %t, want %t", p.naive.l.Policy, p.trail, got, want)
	}
}

func (p pair) same(t *testing.T, got, want Outcome) { // no t.Helper: it would take a tenth of the time
	if got != want {
		t.Fatalf("%+v tick %d, at %d after %v:\n got %+v\nwant %+v\nstate %+v\nnaive %+v",
			p.naive.l.Policy, p.naive.l.tick, p.now, p.trail, got, want, p.state, p.naive.events)
	}
}

func sameState(a, b State) bool {
	return a.T == b.T && a.A == b.A && a.B == b.B && slices.Equal(a.Log, b.Log)
}

// key identifies a pair, so that histories which lead to the same place are followed once.
func (p pair) key() string {
	b := make([]byte, 0, 64)
	put := func(v ...int64) {
		for _, x := range v {
			b = binary.AppendVarint(b, x)
		}
	}
	put(p.now, p.state.T, p.state.A, p.state.B, int64(len(p.state.Log)), p.naive.stored)
	for _, e := range p.state.Log {
		put(e.At, e.Sum)
	}
	for _, e := range p.naive.events {
		put(e.at, e.units)
	}
	put(-1)
	for _, m := range p.marks {
		put(m.mark, m.units)
	}
	return string(b)
}

// smallLimits are all algorithms with quotas and bursts up to 3 and windows of a few ticks of 1 or
// 2 µs.
func smallLimits(t *testing.T, ticks ...int64) (limits []*Limit) {
	add := func(p Policy, tick int64) {
		p.Window = time.Duration(tick) * p.Window
		l, err := Compile("z", p)
		if err != nil {
			t.Fatal(err)
		}
		limits = append(limits, coarser(l, tick))
	}
	for _, n := range ticks {
		window := time.Duration(n) * time.Microsecond
		for quota := int64(0); quota <= 3; quota++ {
			add(Policy{Algorithm: FixedWindow, Quota: quota, Window: window}, 1)
			add(Policy{Algorithm: SlidingLog, Quota: quota, Window: window}, 1)
			add(Policy{Algorithm: LeakyBucket, Quota: quota, Window: window, Burst: 2}, 1)
			for tick := range int64(2) {
				add(Policy{Algorithm: SlidingWindow, Quota: quota, Window: window}, tick+1)
				add(Policy{Algorithm: TokenBucket, Quota: quota, Window: window, Burst: 1 + 2*tick}, 2-tick)
			}
		}
		for quota := int64(1); quota <= 3; quota++ {
			add(Policy{Algorithm: LeakyBucket, Quota: quota, Window: window, Burst: 3, Queue: 2}, 1)
			add(Policy{Algorithm: LeakyBucket, Quota: quota, Window: window, Burst: 4, Queue: 2, MaxWait: 3 * time.Microsecond}, 3-min(quota, 2))
			add(Policy{Algorithm: Concurrency, Quota: quota, Window: window}, 1)
		}
	}
	return append(limits, Ban("z"))
}

// coarser gives a limit the tick that Compile would only choose for far larger numbers.
func coarser(l *Limit, tick int64) *Limit {
	l.tick, l.ticks = tick, l.window/tick
	if l.Algorithm.Bucket() && l.Quota > 0 {
		g := gcd(l.Quota, l.ticks)
		l.num, l.den = l.Quota/g, l.ticks/g
	}
	l.boundQueue()
	return l
}

func opsFor(l *Limit) (ops []op) {
	w := l.window
	steps := []int64{0, 1, w - 1, w, 2*w + 1, -1, -w, -w - 1}
	slices.Sort(steps)
	for _, dt := range slices.Compact(steps) {
		ops = append(ops, op{dt, "take", 1}, op{dt, "take", max(2, l.Capacity)}, op{dt, "twice", 1},
			op{dt, "back", 1}, op{dt, "back", 2}, op{dt, "back", 0}, op{dt, "dry", 0})
		switch {
		case l.Queue > 0:
			ops = append(ops, op{dt, "leave", 1}, op{dt, "leave", 2})
		case l.Algorithm == Concurrency:
			ops = append(ops, op{dt, "renew", 0})
		case l.Window == time.Microsecond: // bans, and what could be one
			ops = append(ops, op{dt, "unless", 3})
		}
		if l.Quota > 0 { // a debt in a bucket that never refills has no end to look for
			ops = append(ops, op{dt, "force", l.Capacity + 1})
		}
	}
	return ops
}

func TestOracleExhaustive(t *testing.T) {
	const depth = 3
	var places int
	for _, l := range smallLimits(t, 1, 2, 3) {
		ops := opsFor(l)
		level := []pair{{naive: naive{l: l}, now: 20 * l.window}}
		for d := range depth {
			seen := map[string]bool{}
			var next []pair
			for _, p := range level {
				for _, o := range ops {
					if o.needsMark() && len(p.marks) == 0 {
						continue
					}
					q := p.do(t, o)
					if k := q.key(); !seen[k] {
						seen[k] = true
						q.look(t)
						places++
						if d < depth-1 {
							next = append(next, q)
						}
					}
				}
			}
			level = next
		}
	}
	if places < 500_000 {
		t.Errorf("only %d places visited: the domain has shrunk", places)
	}
	t.Logf("%d places", places)
}

// Long histories in the same domain: what the exhaustive ones are too short to reach.
func TestOracleRandom(t *testing.T) {
	limits := smallLimits(t, 1, 2, 3, 4, 5)
	for seed := range uint64(3000) {
		r := rand.New(rand.NewPCG(seed, 1))
		l := limits[r.IntN(len(limits))]
		ops := opsFor(l)
		p := pair{naive: naive{l: l}, now: 1000 * l.window}
		for range 25 {
			o := ops[r.IntN(len(ops))]
			if r.IntN(2) == 0 {
				o.dt = r.Int64N(2)
			}
			if o.needsMark() && len(p.marks) == 0 {
				continue
			}
			p = p.do(t, o)
			p.look(t)
		}
	}
}
