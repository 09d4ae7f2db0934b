package algorithms

import "sort"

// The log kernel: every admitted moment with its units. Exact, at 16 bytes a moment. Entries carry
// running sums, so that a decision on a log of a million entries is two binary searches.

// expire drops what has left the window: an entry is live while its moment is after now−window.
// Only the opened copy is cut; the store's own log shortens when a charge is committed.
func (l *Limit) expire(c *Counter) {
	if len(c.Log) == 0 {
		return
	}
	edge := c.now - l.window
	if c.Log[0].At > edge {
		return
	}
	dead := sort.Search(len(c.Log), func(i int) bool { return c.Log[i].At > edge })
	c.A = c.Log[dead-1].Sum
	c.Log = c.Log[dead:]
	if len(c.Log) == 0 {
		c.Log, c.A = nil, 0
	}
}

// sum is the units in the live entries.
func (c *Counter) sum() int64 {
	if len(c.Log) == 0 {
		return 0
	}
	return c.Log[len(c.Log)-1].Sum - c.A
}

// logWait: the cost fits when the oldest entries that must go have gone.
func (l *Limit) logWait(c *Counter, cost int64) int64 {
	over := c.sum() - (l.Quota - cost)
	if over <= 0 {
		return 0
	}
	i := sort.Search(len(c.Log), func(i int) bool { return c.Log[i].Sum-c.A >= over })
	return c.Log[i].At + l.window - c.now
}

func (c *Counter) append(units int64) {
	used := min(c.sum()+units, MaxExact)
	if c.A+used > MaxExact {
		c.rebase()
	}
	n, sum := len(c.Log), c.A+used
	if n > 0 && c.Log[n-1].At == c.now {
		c.Log[n-1].Sum = sum
	} else {
		c.Log = append(c.Log, Entry{At: c.now, Sum: sum})
	}
	c.T = c.now
}

// rebase lets the sums begin at zero again: a key that is never idle would reach 2^52 one day.
func (c *Counter) rebase() {
	for i := range c.Log {
		c.Log[i].Sum -= c.A
	}
	c.A = 0
}

// remove gives units back to the entry of that moment, if it is still there.
func (c *Counter) remove(units, at int64) bool {
	i := sort.Search(len(c.Log), func(i int) bool { return c.Log[i].At >= at })
	if i == len(c.Log) || c.Log[i].At != at {
		return false
	}
	before := c.A
	if i > 0 {
		before = c.Log[i-1].Sum
	}
	if units = min(units, c.Log[i].Sum-before); units == 0 { // taken from a full log by force, which holds no more than it can count
		return false
	}
	for j := i; j < len(c.Log); j++ {
		c.Log[j].Sum -= units
	}
	if c.Log[i].Sum == before {
		c.Log = append(c.Log[:i], c.Log[i+1:]...)
	}
	return true
}

// pullBack moves every entry after now to now: see [Counter.Anchored].
func (c *Counter) pullBack(now int64) {
	i := sort.Search(len(c.Log), func(i int) bool { return c.Log[i].At >= now })
	if i < len(c.Log) {
		last := c.Log[len(c.Log)-1].Sum
		c.Log = append(append([]Entry(nil), c.Log[:i]...), Entry{At: now, Sum: last})
	}
	c.T = now
}
