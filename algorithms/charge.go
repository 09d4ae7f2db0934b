package algorithms

import (
	"context"
	"math"
	"time"
)

// Never is the wait for what cannot happen. It is greater than any other wait, so that the maximum
// over several refusing charges is right.
const Never = time.Duration(math.MaxInt64)

// Unknown is the wait for what happens when somebody else gives back: no number would be true. It
// is less than any other wait, so that it contributes nothing to a maximum.
const Unknown = time.Duration(-1)

// Charge asks one limit about one key.
type Charge struct {
	// Key separates clients within the limit's space. The store does not keep it after Apply
	// returns.
	Key   string
	Limit *Limit
	// Cost in units: > 0 takes, 0 passes and takes nothing, < 0 gives back what Mark names.
	Cost int64
	// Mark is, for a charge that gives back, the Mark of the outcome that took the units.
	Mark int64
	// Held is what this same request already took from this counter in an earlier batch: a wait
	// must be long enough for both, since a retry asks for both again.
	Held int64
	// Peek: decided, never committed, never a reason to refuse the batch.
	Peek bool
	// Check: decided, never committed, but a reason to refuse the batch: it asks whether something
	// is in the way.
	Check bool
	// Force: applied without a check, even beyond the capacity (a debt).
	Force bool
	// DryRun: decided, committed if it and the batch pass, never a reason to refuse the batch.
	DryRun bool
}

// Outcome answers a charge.
type Outcome struct {
	// OK: the charge passes. In a refused batch a charge with OK was not the reason, and was not
	// committed.
	OK bool
	// Remaining units: a request of this cost would be admitted now, one unit more would not.
	Remaining int64
	// Retry is how long this charge must wait to pass if no one else uses the key: 0 with OK,
	// [Never] when its cost is above the capacity, [Unknown] for units in flight. One microsecond
	// less and it is refused.
	Retry time.Duration
	// Next is the time until one more unit than Remaining is available; [Never] when nothing more
	// can become available, [Unknown] for units in flight.
	Next time.Duration
	// Delay is how long a charge that passes must be held before it is served: its slot in a queue.
	// Charges of one batch on one counter have the same slot, that of their sum.
	Delay time.Duration
	// Mark names what a committed charge was taken from, for giving it back. Of one that gives back
	// it is the same, or 0 when nothing was left to give it back to.
	Mark int64
}

// Unasked is the outcome of a charge that nobody was asked about, because something else had
// refused its batch before. It passes, since it was not the reason, and says nothing more.
var Unasked = Outcome{OK: true, Remaining: -1}

// Asked reports whether the outcome says something.
func (o *Outcome) Asked() bool { return o.Remaining >= 0 }

// Possible reports whether the outcome can be one of the limit, so that a store which decides
// elsewhere need not be believed when its state was damaged or forged. A charge that was forced
// passes whatever the level, and so may have any slot.
func (l *Limit) Possible(o *Outcome, forced bool) bool {
	if o.Remaining < 0 || o.Remaining > l.Capacity || !l.possibleWait(o.Next) {
		return false
	}
	if !o.OK {
		return o.Delay == 0 && o.Retry != 0 && l.possibleWait(o.Retry)
	}
	var longest time.Duration
	switch {
	case l.Queue > 0 && forced:
		longest = l.drained(l.ceiling)
	case l.Queue > 0:
		longest = l.drained(l.Capacity * l.den)
	}
	return o.Retry == 0 && o.Delay >= 0 && o.Delay <= longest
}

func (l *Limit) possibleWait(wait time.Duration) bool {
	switch {
	case wait == Never:
		return true
	case wait == Unknown:
		return l.kernel == Leases
	case l.kernel == Meter:
		return wait >= 0 && wait <= l.drained(l.ceiling)
	}
	// A sliding window waits up to two windows, and one more after the clock was set back.
	return wait >= 0 && wait <= 4*l.Policy.Window
}

// drained is the longest that a meter takes to fall from a level to 0, also after the clock was set
// back.
func (l *Limit) drained(level int64) time.Duration {
	return time.Duration(ceilDiv(level, l.num)*l.tick)*time.Microsecond + 2*l.Policy.Window
}

// Commits reports whether the charge takes or gives back, if its batch passes.
func (c *Charge) Commits() bool { return !c.Peek && !c.Check }

// Undo returns the charge that gives back what this one took, or takes again what it gave back, by
// the outcome of a batch that was committed. Its cost is 0 if nothing was taken, and it looks then.
// It gives no queue's place back but the last: who moves up those behind, as package leaky does,
// forces it.
func (c *Charge) Undo(o *Outcome) Charge {
	undo := Charge{Key: c.Key, Limit: c.Limit}
	if o.OK && o.Asked() && c.Commits() && c.Cost != 0 {
		undo.Cost, undo.Mark, undo.Force = -c.Cost, o.Mark, c.Cost < 0
	}
	return undo
}

// Store applies batches atomically, on a clock of its own.
type Store interface {
	// Apply reads the store's clock once, decides every charge at that instant as [Decide] does,
	// and commits all of them, or none if any charge that is neither a dry run nor a peek is
	// refused. out[i] answers charges[i]; len(out) must be at least len(charges). The error reports
	// a failed store, never a refused charge.
	Apply(ctx context.Context, charges []Charge, out []Outcome) error
	// Close releases what the store holds. Apply must not be called after it.
	Close() error
}

// Binding returns the index of the outcome that refuses a batch: of the refused charges that are
// neither dry runs nor peeks, the one with the longest wait, the first of them on a tie. It returns
// -1 when the batch passed.
func Binding(charges []Charge, out []Outcome) int {
	binding := -1
	for i := range charges {
		if out[i].OK || charges[i].DryRun || charges[i].Peek {
			continue
		}
		if binding < 0 || out[i].Retry > out[binding].Retry {
			binding = i
		}
	}
	return binding
}
