package redisstore

// One batch on its way: whole to one server, or in parts to several.

import (
	"context"
	"encoding/binary"
	"slices"
	"strings"
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

// knownRefused answers the batch as Redis did a moment ago, if all that refused it then is known to
// refuse still. A ban answers whatever stands beside it, with what else is known to refuse. Units
// in flight that are only counted, as a dry run, somebody wants to know, unless the key is banned.
func (b *batch) knownRefused() bool {
	found, want, banned, counted, fingerprint := 0, 0, false, false, uint64(0)
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
		known, ok := b.store.refused.find(b.digests[i], c, now, func() bool { return b.down(i) })
		if !ok {
			continue
		}
		if fingerprint == 0 {
			fingerprint = b.fingerprint()
		}
		b.out[i], banned = known.outcome(now), banned || known.ban
		if known.batch.fingerprint == fingerprint {
			found, want = found+1, max(want, known.batch.refusals)
		}
	}
	return banned || found > 0 && found == want && !counted
}

// down reports whether the server of a charge's counter is known to be down.
func (b *batch) down(i int) bool {
	d, at := b.digests[i], uint16(0)
	if b.store.cluster != nil {
		at = slot(b.store.names.append(nil, b.store.names.clear(b.charges[i].Limit.Space), d))
	}
	return b.store.laneFor(d, at).blocked() != nil
}

// alone is the fingerprint of a batch of one charge, whose digest says all.
const alone = 1

// fingerprint tells batches apart that ask for other units, or under other limits.
func (b *batch) fingerprint() uint64 {
	if len(b.charges) == 1 {
		return alone
	}
	const prime = 1099511628211 // of FNV-1a
	hash := uint64(14695981039346656037)
	for i := range b.charges {
		c, flags := &b.charges[i], uint64(0)
		for n, set := range [...]bool{c.Peek, c.Check, c.Force, c.DryRun} {
			if set {
				flags |= 1 << n
			}
		}
		for _, n := range [...]uint64{
			binary.LittleEndian.Uint64(b.digests[i][:8]), uint64(c.Cost), uint64(c.Held), uint64(c.Limit.Capacity), flags,
		} {
			hash = (hash ^ n) * prime
			hash ^= hash >> 32
		}
	}
	return hash
}

// shared reports whether another charge of the batch is on the same counter: then they are decided
// on their sum.
func (b *batch) shared(i int) bool {
	for j := range b.digests {
		if j != i && b.digests[j] == b.digests[i] {
			return true
		}
	}
	return false
}

// learn remembers what was refused, and forgets what a refund has made available, or sooner so.
func (b *batch) learn() {
	var now time.Time
	var of batchOf
	for i := range b.charges {
		c, o := &b.charges[i], b.out[i]
		switch {
		case c.Limit.Algorithm == algorithms.Concurrency: // nobody knows when units in flight come back, so nothing is remembered
		case c.Cost < 0:
			// Others know the key as refused only if it was full before.
			known := b.store.refused.forget(b.digests[i])
			if known || o.Remaining+c.Cost <= 0 {
				b.store.forgotten(b.digests[i])
			}
		case !o.OK && refuses(c) && !b.shared(i):
			if now.IsZero() {
				now = time.Now()
				of = batchOf{b.fingerprint(), b.refusals()}
			}
			b.store.refused.learn(b.digests[i], c, o, of, now, b.forgets[i])
		}
	}
}

// refusals is how many charges refused the batch. One that cannot be remembered is among them, so
// that none of them answers for it.
func (b *batch) refusals() (n int) {
	for i := range b.charges {
		if c := &b.charges[i]; !b.out[i].OK && !c.DryRun && !c.Peek && b.out[i].Retry != algorithms.Unknown {
			n++
		}
	}
	return n
}

// add puts a charge to a part.
func (p *part) add(b *batch, i int) {
	c := &b.charges[i]
	p.charges = append(p.charges, i)
	p.names = b.store.names.append(p.names, b.store.names.clear(c.Limit.Space), b.digests[i])
	a := newAsk(c)
	a.nameEnd = len(p.names)
	p.asks = append(p.asks, a)
}

// join puts the charges of another part of the same batch to a part.
func (p *part) join(other *part) {
	p.charges = append(p.charges, other.charges...)
	for _, a := range other.asks {
		a.nameEnd += len(p.names)
		p.asks = append(p.asks, a)
	}
	p.names = append(p.names, other.names...)
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

// applyParts sends each charge to where its counter lives. Parts are decided at the same time; if
// one refuses or fails, what the others took is given back.
func (b *batch) applyParts(ctx context.Context, deadline time.Time) error {
	split := b.split(deadline)
	failed := b.send(ctx, split)
	if failed != nil || algorithms.Binding(b.charges, b.out) >= 0 {
		b.giveBack(split, deadline, failed == nil)
	}
	releaseAll(split)
	return failed
}

// applyEach applies charges that cannot be refused, in small batches that do not depend on each
// other: those that follow one another on the same counter are one, if they have one scale. What
// one server does not take, the others do all the same. It returns for each charge why it was not
// applied.
func (s *Store) applyEach(ctx context.Context, deadline time.Time, charges []algorithms.Charge, out []algorithms.Outcome) []error {
	clear(out) // what fails has none
	b := batch{store: s, charges: charges, out: out}
	b.hash()
	var split []*part
	for i := range charges {
		if i > 0 && b.digests[i] == b.digests[i-1] && sameScale(charges[i].Limit, charges[i-1].Limit) {
			split[len(split)-1].add(&b, i)
		} else {
			split = append(split, b.part(i, deadline))
		}
	}
	_ = b.send(ctx, split)
	errs := make([]error, len(charges))
	for _, p := range split {
		for _, i := range p.charges {
			errs[i] = p.failed
		}
	}
	releaseAll(split)
	if s.refused != nil {
		b.learn()
	}
	return errs
}

// sameScale reports whether two limits of one counter may stand in one batch. Meters of different
// rates count in levels of different scale; such meet when a client has changed its plan, or a
// reload the limit, between what is settled together.
func sameScale(a, b *algorithms.Limit) bool {
	return a == b || !a.Algorithm.Bucket() || a.Params() == b.Params()
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

// split groups the charges by server, and in a cluster by slot, which is all that one script call
// may touch.
func (b *batch) split(deadline time.Time) []*part {
	var split []*part
	for i := range b.charges {
		p := b.part(i, deadline)
		same := func(known *part) bool { return known.lane == p.lane && known.slot == p.slot }
		if at := slices.IndexFunc(split, same); at >= 0 {
			split[at].join(p)
			p.release()
		} else {
			split = append(split, p)
		}
	}
	return split
}

// part begins a part with a charge, for its server and slot.
func (b *batch) part(i int, deadline time.Time) *part {
	p := newPart()
	p.add(b, i)
	p.deadline, p.slot = deadline, 0
	if b.store.cluster != nil {
		p.slot = slot(p.names)
	}
	p.lane = b.store.laneFor(b.digests[i], p.slot)
	return p
}

// giveBack undoes what parts of a batch have taken that was not committed as a whole. Where
// somebody waits for the answer, the outcomes show the counters as they are afterwards.
func (b *batch) giveBack(split []*part, deadline time.Time, wait bool) {
	undo, of := b.undo(split)
	if !wait {
		b.store.Settle(undo...)
		return
	}
	out := make([]algorithms.Outcome, len(undo))
	for i, err := range b.store.applyEach(b.store.ctx, deadline, undo, out) { // also when the client leaves
		if err == nil {
			b.out[of[i]].Remaining, b.out[of[i]].Next = out[i].Remaining, out[i].Next
		} else if unapplied(err) {
			b.store.Settle(undo[i])
		} else {
			b.store.dropped(1)
		}
	}
}

// undo returns charges that take back what parts have committed, and which charges of the batch
// these are of.
func (b *batch) undo(split []*part) (undo []algorithms.Charge, of []int) {
	for _, p := range split {
		if p.failed != nil {
			continue
		}
		for _, i := range p.charges {
			c, o := b.charges[i], &b.out[i]
			if !o.OK || c.Peek || c.Cost == 0 || o.Mark == 0 {
				continue
			}
			back := c.Undo(o)
			back.Key = strings.Clone(c.Key)
			undo = append(undo, back)
			of = append(of, i)
			o.Mark = 0
		}
	}
	return undo, of
}
