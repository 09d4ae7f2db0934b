package counting

// One decision: the charges of all entries in one slice, those of this process first, then the
// shared store's, and behind them those of the shares that stand in for the latter.

import (
	"context"
	"slices"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/leaky"
)

// Decision is what one request asks, and what it is told. It is made to be used again: see
// [Decision.Begin].
type Decision struct {
	Entries []Entry // in the order in which they were asked
	Answers []Answer
	// Fleet is among how many instances limits were divided, if the shared store failed. It is read
	// once, so that what clients are told is what decided.
	Fleet int

	counters    *Counters
	charges     []algorithms.Charge
	outcomes    []algorithms.Outcome
	local, both int // the ends of the local charges, and of the shared ones behind them
	queues      [2]bool
	waits       [2]*leaky.Wait // places in the room: of the local charges, of the shares
}

// The parts of a decision that this process decides, by their index in queues and waits.
const (
	ofLocal = iota
	ofShare
)

// Begin begins a decision, which ends an earlier one: its entries and answers are no longer valid.
func (d *Decision) Begin(c *Counters) {
	d.Entries, d.Answers, d.charges, d.outcomes = d.Entries[:0], d.Answers[:0], d.charges[:0], d.outcomes[:0]
	d.counters, d.local, d.both = c, 0, 0
	d.queues, d.waits = [2]bool{}, [2]*leaky.Wait{}
}

// Add adds a copy of an entry, to be completed and then asked.
func (d *Decision) Add(e *Entry) *Entry {
	d.Entries = append(d.Entries, *e)
	return &d.Entries[len(d.Entries)-1]
}

// Ask asks the entry that was added last. Those that count in this process come before those of the
// shared store.
func (d *Decision) Ask(e *Entry) {
	d.Answers = append(d.Answers, Answer{Limits: e.Limits, By: ByLocal, ban: -1, pending: -1})
	a := &d.Answers[len(d.Answers)-1]
	if e.Place == Shared {
		a.By = ByShared
		if e.Ban != nil && d.counters.bannedHere(e.Ban, e.Key) {
			d.askHere(a, algorithms.Ask(e.Ban.Bans, e.Key))
		}
	}
	if e.Ban != nil && a.ban < 0 {
		if e.Ban.Pending != nil {
			a.pending = d.add(algorithms.Charge{Key: e.Key, Limit: e.Ban.Pending, Cost: 1, DryRun: true}) // it refuses nobody
		}
		a.ban = d.add(algorithms.Ask(e.Ban.Bans, e.Key))
	}
	a.first = len(d.charges)
	for i, limit := range e.Limits {
		c := algorithms.Charge{Key: e.Key, Limit: limit, Cost: e.Cost, DryRun: e.DryRun}
		if limit.Algorithm == algorithms.Concurrency {
			c.Cost = 1
		} else if e.Held != nil {
			c.Held = e.Held[i]
		}
		d.add(c)
		if limit.Queue > 0 && e.Place == Local {
			d.queues[ofLocal] = true
		}
	}
	if d.both = len(d.charges); e.Place == Local {
		d.local = d.both
	}
}

func (d *Decision) add(c algorithms.Charge) (at int) {
	d.charges = append(d.charges, c)
	d.outcomes = append(d.outcomes, algorithms.Outcome{})
	return len(d.charges) - 1
}

// askHere lets a ban that only this process knows answer for a rule of the shared store. It is a
// local charge, so those of the shared store move.
func (d *Decision) askHere(a *Answer, c algorithms.Charge) {
	d.charges = slices.Insert(d.charges, d.local, c)
	d.outcomes = append(d.outcomes, algorithms.Outcome{})
	for i := range d.Answers {
		other := &d.Answers[i]
		for _, at := range [...]*int{&other.first, &other.ban, &other.pending} {
			if *at >= d.local {
				*at++
			}
		}
	}
	a.ban = d.local
	d.local++
}

// Decide answers the entries: each place at one instant, and taking all or nothing over all of
// them. What this process refuses never reaches the shared store; what it gave is given back when
// the shared store refuses. It reports whether the request is denied, because the shared store
// failed and a rule wants such requests refused.
func (d *Decision) Decide(ctx context.Context) (denied bool) {
	d.applyHere(ctx, ofLocal)
	switch {
	case d.both == d.local:
	case refused(d.charges[:d.local], d.outcomes):
		d.leaveUnasked(d.local, d.both, Nobody)
	default:
		denied = d.decideShared(ctx)
	}
	for i := range d.Answers {
		d.fill(&d.Answers[i])
	}
	return denied
}

func (d *Decision) decideShared(ctx context.Context) (denied bool) {
	others := d.charges[d.local:d.both]
	outcomes := d.outcomes[d.local:d.both]
	// Not ctx: the store may have counted what a client asked that leaves now, so it is waited for,
	// for the timeout at most. Falling back instead would let those pass that ask and leave at
	// once, and be no failure of the store.
	if err := d.counters.Shared.Apply(context.Background(), others, outcomes); err != nil {
		denied = d.fallBack(ctx)
		others, outcomes = d.charges[d.both:], d.outcomes[d.both:]
	}
	if denied || refused(others, outcomes) {
		d.giveBack(ctx)
	}
	return denied
}

func refused(charges []algorithms.Charge, outcomes []algorithms.Outcome) bool {
	return algorithms.Binding(charges, outcomes[:len(charges)]) >= 0
}

// here returns what a part of the decision asks this process.
func (d *Decision) here(part int) ([]algorithms.Charge, []algorithms.Outcome) {
	if part == ofShare {
		return d.charges[d.both:], d.outcomes[d.both:]
	}
	return d.charges[:d.local], d.outcomes[:d.local]
}

// applyHere asks this process, which cannot fail.
func (d *Decision) applyHere(ctx context.Context, part int) {
	charges, outcomes := d.here(part)
	switch {
	case len(charges) == 0:
	case d.queues[part]:
		d.waits[part], _ = d.counters.room.Apply(ctx, charges, outcomes)
	default:
		_ = d.counters.Process.Apply(ctx, charges, outcomes)
	}
}

// leaveUnasked answers for a store that was not asked: the request passes as far as it is
// concerned.
func (d *Decision) leaveUnasked(from, to int, by By) {
	for i := from; i < to; i++ {
		d.outcomes[i] = algorithms.Unasked
	}
	for i := range d.Answers {
		if d.Answers[i].By == ByShared {
			d.Answers[i].By = by
		}
	}
}

// giveBack undoes what the local charges took. The outcomes keep saying what was asked, with the
// units back.
func (d *Decision) giveBack(ctx context.Context) {
	charges, outcomes := d.here(ofLocal)
	if len(charges) == 0 {
		return
	}
	wait := d.waits[ofLocal]
	marks, back := make([]algorithms.Outcome, len(charges)), make([]algorithms.Charge, 0, len(charges))
	for i := range charges {
		c, o := &charges[i], outcomes[i]
		if o.OK && wait != nil && o.Delay > 0 && !c.DryRun {
			o.OK = false // it leaves the room, which gives its slot back
		}
		back = append(back, c.Undo(&o))
	}
	if d.queues[ofLocal] {
		d.counters.room.GiveBack(wait, back, marks)
	} else {
		_ = d.counters.Process.Apply(ctx, back, marks)
	}
	for i := range marks {
		outcomes[i].Remaining, outcomes[i].Next = marks[i].Remaining, marks[i].Next
	}
}

// fill shows an answer its outcomes.
func (d *Decision) fill(a *Answer) {
	a.Outcomes = d.outcomes[a.first : a.first+len(a.Limits)]
	if a.ban >= 0 {
		a.Ban = &d.outcomes[a.ban]
	}
	if a.pending >= 0 {
		a.Pending = d.charges[a.pending].Limit.Quota - d.outcomes[a.pending].Remaining
	}
}

// Cost is what an answer's limit was asked for.
func (d *Decision) Cost(a *Answer, limit int) int64 { return d.charges[a.first+limit].Cost }
