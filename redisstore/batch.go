package redisstore

// One batch on its way: whole to one server, or in parts to several.

import (
	"context"
	"sync"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

type batch struct {
	store   *Store
	charges []algorithms.Charge
	out     []algorithms.Outcome
	digests []digest
	forgets []uint64 // see refusals.forgets
}

var scratches = sync.Pool{New: func() any { return new([]byte) }}

func (b *batch) hash() {
	scratch := scratches.Get().(*[]byte)
	for i := range b.charges {
		c := &b.charges[i]
		var d digest
		d, *scratch = b.store.names.sum(*scratch, b.store.names.clear(c.Limit.Space), c.Key)
		b.digests = append(b.digests, d)
		if b.store.refused != nil {
			b.forgets = append(b.forgets, b.store.refused.forgets(d))
		}
	}
	scratches.Put(scratch)
}

// knownRefused answers the batch if one of its charges is known to be refused. Units in flight that are only counted, as a
// dry run, somebody wants to know, unless the key is banned.
func (b *batch) knownRefused() bool {
	refused, banned, counted := false, false, false
	now := time.Now()
	for i := range b.charges {
		c := &b.charges[i]
		if c.Peek {
			return false // somebody wants to know
		}
		b.out[i] = algorithms.Unasked
		counted = counted || c.DryRun && c.Limit.Algorithm == algorithms.Concurrency
		if !refuses(c) || b.shared(i) {
			continue
		}
		if o, ok := b.store.refused.answer(b.digests[i], c, now); ok {
			b.out[i], refused, banned = o, true, banned || c.Check
		}
	}
	return refused && (banned || !counted)
}

// shared reports whether another charge of the batch is on the same counter: then they are decided on their sum.
func (b *batch) shared(i int) bool {
	for j := range b.digests {
		if j != i && b.digests[j] == b.digests[i] {
			return true
		}
	}
	return false
}

// learn remembers what was refused, and forgets what a refund has made available.
func (b *batch) learn() {
	var now time.Time
	for i := range b.charges {
		c, o := &b.charges[i], b.out[i]
		switch {
		case c.Cost < 0 && o.Remaining > 0:
			// Others know the key as refused only if it was full before.
			known := b.store.refused.forget(b.digests[i])
			if known || o.Remaining+c.Cost <= 0 {
				b.store.forgotten(b.digests[i])
			}
		case !o.OK && refuses(c) && !b.shared(i):
			if now.IsZero() {
				now = time.Now()
			}
			b.store.refused.learn(b.digests[i], c, o, now, b.forgets[i])
		}
	}
}

func (p *part) add(b *batch, i int) {
	c := &b.charges[i]
	p.charges = append(p.charges, i)
	p.names = b.store.names.append(p.names, b.store.names.clear(c.Limit.Space), b.digests[i])
	a := newAsk(c)
	a.nameEnd = len(p.names)
	p.asks = append(p.asks, a)
}

func (b *batch) applyWhole(ctx context.Context, l *lane, deadline time.Time) error {
	p := newPart()
	p.lane, p.deadline, p.slot, p.alone = l, deadline, 0, true
	for i := range b.charges {
		p.add(b, i)
	}
	wait, err := l.submit(p)
	if wait {
		var reusable bool
		if reusable, err = l.wait(ctx, p); !reusable {
			return err
		}
	}
	if err == nil {
		copy(b.out, p.out)
	}
	p.release()
	return err
}

// applyParts sends each charge to where its counter lives. Parts are decided at the same time; if one refuses or
// fails, what the others took is given back.
func (b *batch) applyParts(ctx context.Context, deadline time.Time) error {
	split := b.split(deadline)
	failed := b.send(ctx, split)
	if failed != nil || algorithms.Binding(b.charges, b.out) >= 0 {
		b.giveBack(ctx, split, deadline, failed == nil)
	}
	releaseAll(split)
	return failed
}

// applyEach applies charges that cannot be refused, in small batches that do not depend on each other: so many charges on one
// counter each. What one server does not take, the others do all the same. It returns for each batch why it was not applied.
func (s *Store) applyEach(ctx context.Context, many int, charges []algorithms.Charge, out []algorithms.Outcome) (errs []error) {
	clear(out) // what fails has none
	b := batch{store: s, charges: charges, out: out}
	b.hash()
	var split []*part
	for i, deadline := 0, time.Now().Add(s.options.Timeout); i < len(charges); i++ {
		if i%many == 0 {
			split = append(split, b.part(i, deadline))
		}
		split[i/many].add(&b, i)
	}
	_ = b.send(ctx, split)
	for _, p := range split {
		errs = append(errs, p.failed)
	}
	releaseAll(split)
	if s.refused != nil {
		b.learn()
	}
	return errs
}

// send brings the parts to their servers and waits for the answers. It returns the last failure.
func (b *batch) send(ctx context.Context, split []*part) (failed error) {
	waits := make([]bool, len(split))
	for i, p := range split {
		waits[i], p.failed = p.lane.submit(p)
	}
	for i, p := range split {
		if waits[i] {
			var reusable bool
			reusable, p.failed = p.lane.wait(ctx, p)
			p.lost = !reusable
		}
		if p.failed == nil {
			b.collect(p)
		} else {
			failed = p.failed
		}
	}
	return failed
}

func releaseAll(split []*part) {
	for _, p := range split {
		if !p.lost {
			p.release()
		}
	}
}

func (b *batch) collect(p *part) {
	for j, i := range p.charges {
		b.out[i] = p.out[j]
	}
}

// split groups the charges by server, and in a cluster by slot, which is all that one script call may touch.
func (b *batch) split(deadline time.Time) []*part {
	var split []*part
	for i := range b.charges {
		p := b.part(i, deadline)
		for _, known := range split {
			if known.lane == p.lane && known.slot == p.slot {
				p.release()
				p = known
				break
			}
		}
		if len(p.asks) == 0 {
			split = append(split, p)
		}
		p.add(b, i)
	}
	return split
}

// part begins a part for the server, and the slot, of a charge.
func (b *batch) part(i int, deadline time.Time) *part {
	p := newPart()
	p.deadline, p.slot = deadline, 0
	if b.store.cluster != nil {
		p.names = b.store.names.append(p.names, b.store.names.clear(b.charges[i].Limit.Space), b.digests[i])
		p.slot, p.names = slot(p.names), p.names[:0]
	}
	p.lane = b.store.laneFor(b.digests[i], p.slot)
	return p
}

// giveBack undoes what parts of a batch have taken that was not committed as a whole. Where somebody
// waits for the answer, the outcomes show the counters as they are afterwards.
func (b *batch) giveBack(ctx context.Context, split []*part, deadline time.Time, wait bool) {
	var back []*part
	for _, p := range split {
		if p.failed != nil {
			continue
		}
		if u := b.undo(p); u != nil {
			u.deadline = deadline
			if !wait {
				u.deadline = time.Now().Add(b.store.options.Timeout)
			}
			if queued, _ := u.lane.submit(u); queued {
				back = append(back, u)
			}
		}
	}
	if !wait {
		return
	}
	for _, u := range back {
		reusable, err := u.lane.wait(ctx, u)
		if err == nil {
			for j, i := range u.charges {
				b.out[i].Remaining, b.out[i].Next = u.out[j].Remaining, u.out[j].Next
			}
		}
		if reusable {
			u.release()
		}
	}
}

// undo makes the part that takes back what p committed, nil if that is nothing.
func (b *batch) undo(p *part) *part {
	var u *part
	for _, i := range p.charges {
		c, o := b.charges[i], &b.out[i]
		if !o.OK || c.Peek || c.Cost == 0 || o.Mark == 0 {
			continue
		}
		if u == nil {
			u = newPart()
			u.lane, u.slot, u.keep = p.lane, p.slot, true
		}
		undo := algorithms.Charge{Key: c.Key, Limit: c.Limit, Cost: -c.Cost, Mark: o.Mark, Force: c.Cost < 0}
		u.add(&batch{store: b.store, charges: []algorithms.Charge{undo}, digests: b.digests[i : i+1]}, 0)
		u.charges[len(u.charges)-1] = i
		o.Mark = 0
	}
	return u
}
