package algorithms

import "time"

// State is what a store keeps of one counter. The zero State is a counter that was never charged.
// All moments in it are microseconds, so that a reader with another tick needs no conversion.
type State struct {
	// T is the state's moment: when a meter's level was true, the start of the current window,
	// or when the newest entry of a log was admitted.
	T int64
	// A is a meter's level (used capacity), the units used in the current window,
	// or the units in all entries that a log has dropped.
	A int64
	// B is the meter's scale (level per unit), or the units used in the previous window.
	B int64
	// Log holds the entries of a sliding log, oldest first; nil for the other kernels.
	Log []Entry
}

// Entry is one moment at which a sliding log admitted units.
type Entry struct {
	At int64
	// Sum counts the units admitted up to and including this entry, so that a binary search finds
	// any amount.
	Sum int64
}

// Counter is a State opened for one decision: a copy that the store loads, hands to [Decide], and
// writes back when Decide committed or when Anchored is set; otherwise it is dropped. Decide leaves
// the State as it was loaded unless a charge changed it, and makes it the zero State when nothing
// in it is in use any more: whether a store writes back too often, or keeps idle counters or
// forgets them, no later answer can tell.
type Counter struct {
	State
	// Anchored: the state stood more than a window ahead of the clock and was brought back to it.
	// That is kept even when the batch is refused, or the key would stay locked.
	Anchored bool

	now     int64 // the moment that counts: the store's, or the state's if that is a little ahead
	loaded  State
	changed bool
	charges int // of the batch, that are on it
}

// Decide answers every charge at the moment now and reports whether the batch was committed to the
// counters: it is, unless a charge that is neither a dry run nor a peek is refused. counters[i]
// belongs to charges[i]; charges on the same counter must share one pointer, have equal limits, and
// are decided on their sum.
func Decide(now int64, charges []Charge, counters []*Counter, out []Outcome) bool {
	commit := true
	for _, c := range counters[:len(charges)] {
		c.loaded, c.changed, c.Anchored, c.charges = c.State, false, false, 0
	}
	for i := range charges {
		counters[i].charges++
		charges[i].Limit.open(counters[i], now)
		out[i] = Outcome{}
	}
	for i := range charges {
		c, asked := &charges[i], sum(charges, counters, i)
		wait := c.Limit.wait(counters[i], now, asked)
		if wait != 0 {
			if c.Held > 0 {
				wait = c.Limit.wait(counters[i], now, asked+min(c.Held, MaxExact))
			}
			commit = commit && (c.DryRun || c.Peek)
		} else {
			out[i].Delay = c.Limit.delay(counters[i], now, c.Cost)
		}
		out[i].OK, out[i].Retry = wait == 0, wait
	}
	for i := range charges {
		if c := &charges[i]; commit && out[i].OK && c.Commits() {
			out[i].Mark = c.Limit.take(counters[i], c)
		}
	}
	for i := range charges {
		l, counter := charges[i].Limit, counters[i]
		out[i].Remaining = l.remaining(counter)
		out[i].Next = l.next(counter, now, out[i].Remaining)
	}
	for i := range charges {
		charges[i].Limit.settle(counters[i])
	}
	return commit
}

// sum is what charge i asks of its counter together with the other charges of the batch that would
// be committed to it. A dry run counts the enforced charges, never the other way round.
func sum(charges []Charge, counters []*Counter, i int) int64 {
	const above = MaxExact + 1 // any capacity
	c := &charges[i]
	if c.Force || c.Cost <= 0 {
		return 0
	}
	total := min(c.Cost, above)
	if !c.Commits() || counters[i].charges == 1 {
		return total
	}
	for j := range charges {
		d := &charges[j]
		if j == i || counters[j] != counters[i] || !d.Commits() || d.Cost <= 0 || (d.DryRun && !c.DryRun) {
			continue
		}
		total = min(total+min(d.Cost, above), above)
	}
	return total
}

// settle leaves in the counter what a store is to keep. Opening it for a look must not count as a
// change: were the drained level kept, a clock that had jumped ahead and came back would have given
// that credit away.
func (l *Limit) settle(c *Counter) {
	switch {
	case !c.changed && !c.Anchored:
		c.State = c.loaded
	case l.idle(c):
		c.State = State{}
	}
}

// Idle reports whether the state at the moment now is no different from a key that was never seen.
func (l *Limit) Idle(s State, now int64) bool {
	c := Counter{State: s}
	l.open(&c, now)
	return l.idle(&c)
}

// idle reports whether nothing is in use, which is cheaper to say than how much is.
func (l *Limit) idle(c *Counter) bool {
	switch l.kernel {
	case Meter, Fixed:
		return c.A == 0
	case Sliding:
		return c.A == 0 && c.B == 0
	case Log, Leases:
		return c.sum() == 0
	}
	panic(l.kernel.unknown())
}

// Used returns the units in use at the moment now, rounded up; it may exceed the capacity after a
// quota was lowered. A store that must forget a key forgets the one that uses the smallest share of
// its capacity.
func (l *Limit) Used(s State, now int64) int64 {
	c := Counter{State: s}
	l.open(&c, now)
	return l.used(&c)
}

// open brings the counter to the moment that counts. Time that steps back by at most a window is
// treated as standing still, so that no credit is granted twice; a larger step re-anchors, so that
// no key stays locked.
func (l *Limit) open(c *Counter, now int64) {
	c.now = now
	if c.T > now {
		if c.T-now <= l.window {
			c.now = c.T
		} else {
			l.anchor(c, now)
		}
	}
	switch l.kernel {
	case Meter:
		l.drain(c)
	case Fixed, Sliding:
		l.roll(c)
	case Log, Leases:
		l.expire(c)
	default:
		panic(l.kernel.unknown())
	}
}

func (l *Limit) anchor(c *Counter, now int64) {
	c.Anchored = true
	switch l.kernel {
	case Fixed, Sliding:
		c.T = now - now%l.window
	case Log, Leases:
		c.pullBack(now)
	case Meter:
		c.T = now - now%l.tick
	default:
		panic(l.kernel.unknown())
	}
}

// wait is how long a cost must wait to pass, from the store's now.
func (l *Limit) wait(c *Counter, now, cost int64) time.Duration {
	if cost <= 0 {
		return 0
	}
	if cost > l.Capacity {
		return Never
	}
	var wait int64
	switch l.kernel {
	case Meter:
		wait = l.meterWait(c, cost)
	case Fixed:
		wait = l.fixedWait(c, cost)
	case Sliding:
		wait = l.slidingWait(c, 0, cost)
	case Leases:
		if c.sum() > l.Quota-cost {
			return Unknown
		}
	case Log:
		wait = l.logWait(c, cost)
	default:
		panic(l.kernel.unknown())
	}
	return c.from(now, wait)
}

// from is a wait in µs from the counter's now, as it is from the store's.
func (c *Counter) from(now, wait int64) time.Duration {
	if wait <= 0 {
		return 0
	}
	return time.Duration(wait+c.now-now) * time.Microsecond
}

// next is the wait for a unit beyond remaining by a client that uses those as early as it can.
// Units that are used weigh on in the sliding-window counter; elsewhere it is the wait for one unit
// more.
func (l *Limit) next(c *Counter, now, remaining int64) time.Duration {
	switch {
	case remaining >= l.Capacity:
		return Never
	case l.kernel == Sliding:
		return c.from(now, l.slidingWait(c, remaining, 1))
	}
	return l.wait(c, now, remaining+1)
}

func (l *Limit) remaining(c *Counter) int64 {
	if c.A > l.latest { // not even one unit may begin to wait
		return 0
	}
	return max(0, l.Capacity-l.used(c))
}

// delay is how long a cost that passes must be held, from the store's now: until what is before it
// in the queue has left.
func (l *Limit) delay(c *Counter, now, cost int64) time.Duration {
	if cost <= 0 || c.A <= l.slack {
		return 0
	}
	return time.Duration(l.untilTick(c, ceilDiv(c.A-l.slack, l.num))+c.now-now) * time.Microsecond
}

// used counts the units in use, rounded up.
func (l *Limit) used(c *Counter) int64 {
	switch l.kernel {
	case Meter:
		return ceilDiv(c.A, l.den)
	case Fixed:
		return c.A
	case Sliding:
		if c.B == 0 {
			return c.A
		}
		return c.A + ceilDiv(l.weigh(c), l.ticks)
	case Log, Leases:
		return c.sum()
	}
	panic(l.kernel.unknown())
}

// take commits a charge, or gives back if its cost is negative, and returns the mark for giving
// back.
func (l *Limit) take(c *Counter, charge *Charge) int64 {
	switch {
	case charge.Cost == 0:
		return 0
	case charge.Cost < 0:
		if !l.giveBack(c, charge) {
			return 0
		}
		c.changed = true
		return charge.Mark
	}
	c.changed = true
	units := min(charge.Cost, MaxExact)
	switch l.kernel {
	case Meter:
		return l.fill(c, units)
	case Fixed, Sliding:
		c.A = min(c.A+units, MaxExact)
		return c.T
	case Log, Leases:
		c.append(units)
		return c.now
	}
	panic(l.kernel.unknown())
}

// giveBack returns units only to what they were taken from, as far as it still stands; false if it
// does not.
func (l *Limit) giveBack(c *Counter, charge *Charge) bool {
	units := -max(charge.Cost, -MaxExact)
	switch l.kernel {
	case Meter:
		return l.unfill(c, units, charge.Mark, charge.Force)
	case Fixed, Sliding:
		return l.uncount(c, units, charge.Mark)
	case Log, Leases:
		return c.remove(units, charge.Mark)
	}
	panic(l.kernel.unknown())
}
