package algorithms

// The meter kernel: a level that falls by num per tick and rises by den per unit.
//
// It stores the used level and not GCRA's theoretical arrival time with an emission interval: 3 per
// second has no whole interval, and a truncated one drifts. Used, not left, so that a changed burst
// keeps the usage. A missing key is an empty meter, that is a full bucket.
//
// Source: GCRA, ITU-T I.371 annex A, restated in whole numbers.

// drain lets the level fall for the time since it was true.
func (l *Limit) drain(c *Counter) {
	if c.B != l.den && c.A > 0 {
		c.A = rescale(c.A, c.B, l.den)
	}
	c.A, c.B = min(c.A, l.ceiling), l.den // also when another quota has the same scale
	// A moment that another tick stored is rounded up: later means less drained, never credit for
	// nothing.
	if late := l.sinceTick(c.T); late > 0 {
		c.T += l.tick - late
	}
	c.now = max(c.now, c.T)
	elapsed := l.inTicks(c.now - c.T)
	if elapsed >= ceilDiv(c.A, l.num) {
		c.A = 0
	} else if elapsed > 0 {
		c.A -= elapsed * l.num
	}
	c.T = c.now - l.sinceTick(c.now)
}

// meterWait: the cost fits once level + cost·den ≤ capacity·den, and in a queue the level is low
// enough to begin to wait.
func (l *Limit) meterWait(c *Counter, cost int64) int64 {
	over := max(c.A-(l.Capacity-cost)*l.den, c.A-l.latest)
	if over <= 0 {
		return 0
	}
	return l.untilTick(c, ceilDiv(over, l.num))
}

// untilTick is the time until the given number of ticks have begun after the current one.
func (l *Limit) untilTick(c *Counter, ticks int64) int64 {
	return ticks*l.tick - l.sinceTick(c.now)
}

// inTicks is the number of whole ticks in a time. Nearly every limit has a tick of 1 µs, and a
// division costs as much as ten additions.
func (l *Limit) inTicks(time int64) int64 {
	if l.tick == 1 {
		return time
	}
	return time / l.tick
}

// sinceTick is the time from the last tick to the moment.
func (l *Limit) sinceTick(moment int64) int64 {
	if l.tick == 1 {
		return 0
	}
	return moment % l.tick
}

// fill takes units and returns the moment at which the meter is empty again: a refund after that is
// void.
func (l *Limit) fill(c *Counter, units int64) int64 {
	c.A = min(c.A+min(units, MaxExact/l.den)*l.den, l.ceiling)
	return l.emptyAt(c)
}

// emptyAt is the moment at which the meter is empty if nobody charges it. A charge moves it, time
// does not.
func (l *Limit) emptyAt(c *Counter) int64 { return c.now + l.untilTick(c, ceilDiv(c.A, l.num)) }

// unfill gives back to a meter that was not to be empty until now. It may have been, if other units
// that were given back emptied it sooner, and then what was taken since is given back, never more
// than is in use: to know since when a meter is not empty would take 8 bytes of each key in every
// store. Of a queue only the last slot can be given back, since those behind any other keep theirs,
// and a newcomer would be told one of them; who moves them up forces it.
func (l *Limit) unfill(c *Counter, units, emptyAt int64, force bool) bool {
	if c.now >= emptyAt || c.A == 0 {
		return false
	}
	if l.slack < MaxExact && !force && emptyAt != l.emptyAt(c) {
		return false
	}
	c.A = max(0, c.A-min(units, MaxExact/l.den)*l.den)
	return true
}

// rescale converts a level from one scale to another, rounded up. Where the product would not be
// exact, it rounds the fraction up to a whole unit: the script in redisstore cannot do better, and
// must agree.
func rescale(level, from, to int64) int64 {
	if from <= 0 {
		return level
	}
	units, rest := level/from, level%from
	if units > (MaxExact-to)/to {
		return MaxExact
	}
	if rest > MaxExact/to {
		return (units + 1) * to
	}
	return units*to + ceilDiv(rest*to, from)
}
