package algorithms

// The window kernel: a count per window aligned to the Unix epoch, UTC; the sliding-window counter
// weighs the count of the window before by how much of it the sliding window still covers.

// roll moves the counter to the window that now is in.
func (l *Limit) roll(c *Counter) {
	if c.now-c.T < l.window { // most decisions, without a division
		return
	}
	start := c.now - c.now%l.window
	if start == c.T+l.window && l.kernel == Sliding {
		c.B = c.A
	} else {
		c.B = 0
	}
	c.T, c.A = start, 0
}

// fixedWait: what does not fit now fits when the next window begins.
func (l *Limit) fixedWait(c *Counter, cost int64) int64 {
	if c.A <= l.Quota-cost {
		return 0
	}
	return c.T + l.window - c.now
}

// left is the rest of the current window in ticks, from 1 to ticks.
func (l *Limit) left(c *Counter) int64 { return l.ticks - l.inTicks(c.now-c.T) }

// weigh is the previous window's share of the estimate, in units·ticks.
func (l *Limit) weigh(c *Counter) int64 { return l.previous(c) * l.left(c) }

// previous is the count of the window before.
func (l *Limit) previous(c *Counter) int64 { return l.exact(c.B) }

// exact bounds a count so that its product with a time stays exact: one that a far larger quota
// left behind could exceed it.
func (l *Limit) exact(count int64) int64 { return min(count, l.most) }

// slidingWait: prev·left + (cur+cost)·W ≤ quota·W, first in this window, else in the next, where
// cur has become prev. It is the wait after so many more units were used in this window.
func (l *Limit) slidingWait(c *Counter, more, cost int64) int64 {
	prev, cur, left := l.previous(c), l.exact(c.A+more), l.left(c)
	if room := l.Quota - cur - cost; room >= 0 {
		if prev*left <= room*l.ticks {
			return 0
		}
		return l.untilTick(c, left-room*l.ticks/prev)
	}
	return l.untilTick(c, left+l.ticks-(l.Quota-cost)*l.ticks/cur)
}

// uncount gives back to the window that the units were taken from, if it still counts.
func (l *Limit) uncount(c *Counter, units, start int64) bool {
	switch {
	case start == c.T && c.A > 0:
		c.A = max(0, c.A-units)
	case start == c.T-l.window && c.B > 0:
		c.B = max(0, c.B-units)
	default:
		return false
	}
	return true
}
