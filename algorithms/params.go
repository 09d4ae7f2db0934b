package algorithms

// Params are the integers of a compiled limit: what a kernel that is not written in Go needs to
// decide as this package does. All are whole numbers from 0 to [MaxExact].
type Params struct {
	Kernel Kernel
	// Capacity is the largest cost that can ever pass; Quota the units per window.
	Capacity, Quota int64
	// Window in microseconds; Tick in microseconds; Ticks is the window in ticks.
	Window, Tick, Ticks int64
	// A meter's level falls by Num per tick, and one unit is Den of level.
	Num, Den int64
	// Ceiling is the most that a meter's level can be, debts included.
	Ceiling int64
	// Up to level Slack a meter serves at once, above it with a delay, above Latest not at all.
	// Without a queue both are MaxExact, which no level exceeds.
	Slack, Latest int64
}

// Params returns the limit's integers, for a store that decides elsewhere.
func (l *Limit) Params() Params {
	return Params{
		Kernel: l.kernel, Capacity: l.Capacity, Quota: l.Quota,
		Window: l.window, Tick: l.tick, Ticks: l.ticks, Num: l.num, Den: l.den, Ceiling: l.ceiling,
		Slack: l.slack, Latest: l.latest,
	}
}
