package counting

// What a request that passed still has to do: to wait for its slots, and when its response is
// there, to give back or to pay the rest.

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/leaky"
)

// Receipt is what one request holds. Of its kept entries each has an item.
type Receipt struct {
	Items []Item

	first    [1]Item // backs Items: most requests keep one
	counters *Counters
	waits    []*leaky.Wait // slots in this process
	until    time.Time     // the last slot in the shared store
	shared   bool          // something is held in the shared store
	mu       sync.Mutex    // guards what is reserved and pending in the items from a stop of the process
}

// Item is what a request holds under one entry. Its charges all give back, and are settled at most
// once each.
type Item struct {
	Entry int // its index among the decision's
	Key   string
	Delay time.Duration // how long the request is held for it
	By    By

	ban      *Ban
	place    Place
	byStatus bool
	slots    []algorithms.Charge // in the shared store, unless the request waits until it is served
	leases   []algorithms.Charge // when the response is done
	held     []Lease             // the same for leases that expire, which are renewed until then
	reserved []algorithms.Charge // unless the response counts, or as far as it costs less
	pending  []algorithms.Charge // together with that: then it is no longer pending

	room [2]algorithms.Charge // backs what most items hold
	used int
}

// hold adds a charge to one of the item's lists, in its own room if that is the list's first and there is some.
func (i *Item) hold(list []algorithms.Charge, c algorithms.Charge) []algorithms.Charge {
	if list == nil && i.used < len(i.room) {
		list = i.room[i.used : i.used : i.used+1]
		i.used++
	}
	return append(list, c)
}

// InFlight is how many units in flight the request holds.
func (i *Item) InFlight() int { return len(i.held) + len(i.leases) }

// Keep returns what the request, which passed, holds; nil if that is nothing. It must be closed.
func (d *Decision) Keep() *Receipt {
	var r *Receipt
	for i := range d.Entries {
		if !d.Entries[i].Keeps {
			continue
		}
		if r == nil {
			r = &Receipt{counters: d.counters}
			r.Items = r.first[:0]
		}
		r.keep(d, i)
	}
	if r == nil {
		return nil
	}
	for _, w := range d.waits {
		if w != nil {
			r.waits = append(r.waits, w)
		}
	}
	if r.shared {
		r.counters.Shared.Books().open(r)
	}
	return r
}

// keep notes what is held under one entry. What a dry run would have refused has taken nothing, and
// what no store was asked about neither.
func (r *Receipt) keep(d *Decision, i int) {
	e, a := &d.Entries[i], &d.Answers[i]
	r.Items = append(r.Items, Item{Entry: i, By: a.By, Key: strings.Clone(e.Key), place: e.Place, byStatus: e.Reserves == ByStatus})
	item := &r.Items[len(r.Items)-1]
	if !e.DryRun {
		item.ban, item.Delay = e.Ban, a.Delay()
	}
	for j := range a.Outcomes {
		r.take(item, &d.charges[a.first+j], &a.Outcomes[j], e.Reserves)
	}
	if a.By == ByShared {
		r.shared = true
		if at := time.Now().Add(item.Delay); item.Delay > 0 && at.After(r.until) {
			r.until = at
		}
	}
	if a.pending >= 0 {
		if o := &d.outcomes[a.pending]; o.OK && o.Asked() {
			item.pending = item.hold(nil, item.undo(&d.charges[a.pending], o))
		}
	}
}

// take notes what is held under one limit.
func (r *Receipt) take(item *Item, c *algorithms.Charge, o *algorithms.Outcome, reserves Reserves) {
	if !o.OK || !o.Asked() {
		return
	}
	switch shared := item.By == ByShared; {
	case c.Limit.Algorithm == algorithms.Concurrency && shared:
		item.held = append(item.held, r.counters.Shared.Hold(c.Limit, item.Key, o.Mark))
	case c.Limit.Algorithm == algorithms.Concurrency:
		item.leases = item.hold(item.leases, item.undo(c, o))
	case c.Limit.Queue > 0 && shared && o.Delay > 0:
		item.slots = append(item.slots, item.undo(c, o))
	case reserves != ForGood:
		item.reserved = item.hold(item.reserved, item.undo(c, o))
	}
}

// undo is the charge that gives back what c took, with a key that outlives the request.
func (i *Item) undo(c *algorithms.Charge, o *algorithms.Outcome) algorithms.Charge {
	back := c.Undo(o)
	back.Key = i.Key
	return back
}

// Reserved reports whether a response decides what becomes of something that the request took.
func (r *Receipt) Reserved() bool {
	for i := range r.Items {
		if len(r.Items[i].reserved) > 0 {
			return true
		}
	}
	return false
}

// Waits reports whether the request must wait for a slot.
func (r *Receipt) Waits() bool { return len(r.waits) > 0 || !r.until.IsZero() }

// Wait waits for the request's slots. If ctx ends first they are given back, and the error is its
// cause.
func (r *Receipt) Wait(ctx context.Context) (err error) {
	for _, w := range r.waits {
		if err != nil {
			w.Leave()
			continue
		}
		err = w.Until(ctx)
	}
	if rest := time.Until(r.until); err == nil && rest > 0 {
		timer := time.NewTimer(rest)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	if err != nil {
		for i := range r.Items {
			r.pay(&r.Items[i], r.Items[i].slots...)
		}
	}
	return err
}

// Open reports whether it is still to be decided what becomes of an item's reservation by the
// response's status.
func (r *Receipt) Open(item int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.Items[item].byStatus && len(r.Items[item].reserved) > 0
}

// Return gives an item's reservation back: the response does not count.
func (r *Receipt) Return(item int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := &r.Items[item]
	r.end(i, i.reserved)
}

// Count lets an item's reservation stand, because the response counts, and as a strike if the key
// can be banned.
func (r *Receipt) Count(item int) (ban Banned) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := &r.Items[item]
	ban = NoBan
	if i.ban != nil && len(i.reserved) > 0 {
		ban = r.counters.Strike(i.ban, i.place, i.By, i.Key)
	}
	r.end(i, nil)
	return ban
}

// Correct settles an item's reservation to what the request cost in all.
func (r *Receipt) Correct(item int, total int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	i := &r.Items[item]
	var pay []algorithms.Charge
	for _, c := range i.reserved {
		if more := total + c.Cost; more > 0 {
			pay = append(pay, algorithms.Charge{Key: c.Key, Limit: c.Limit, Cost: more, Force: true})
		} else if more < 0 {
			c.Cost = more
			pay = append(pay, c)
		}
	}
	r.end(i, pay)
}

// Close ends the request: what it held in flight is given back, and what it still reserves stays
// taken.
func (r *Receipt) Close() {
	for i := range r.Items {
		item := &r.Items[i]
		for _, lease := range item.held {
			lease.Release()
		}
		r.pay(item, item.leases...)
		r.mu.Lock()
		r.end(item, nil)
		r.mu.Unlock()
	}
	if r.shared {
		r.counters.Shared.Books().close(r)
	}
}

// end settles an item's reservation, with what there is to pay for it. Only the first call counts.
func (r *Receipt) end(i *Item, pay []algorithms.Charge) {
	if len(pay) > 0 && len(i.pending) > 0 {
		pay = append(slices.Clip(pay), i.pending...)
	} else if len(pay) == 0 {
		pay = i.pending
	}
	r.pay(i, pay...)
	i.reserved, i.pending = nil, nil
}

// pay applies charges that cannot be refused: in this process at once, in the shared store in the
// background.
func (r *Receipt) pay(i *Item, charges ...algorithms.Charge) {
	switch {
	case len(charges) == 0:
	case i.By == ByShared:
		r.counters.Shared.Settle(charges...)
	case len(charges) <= few:
		var out [few]algorithms.Outcome
		_ = r.counters.Process.Apply(context.Background(), charges, out[:])
	default:
		_ = r.counters.Process.Apply(context.Background(), charges, make([]algorithms.Outcome, len(charges)))
	}
}

// few charges need no memory for their outcomes.
const few = 4

// cutOff gives back what a request has reserved in the shared store that a stop of the process does
// not wait for: nobody will see its response. What waits for a charge stays: the upstream may have
// done the work.
func (r *Receipt) cutOff() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.Items {
		switch item := &r.Items[i]; {
		case item.By != ByShared:
		case item.byStatus:
			r.end(item, item.reserved)
		default:
			r.end(item, nil)
		}
	}
}

// Books are the receipts of requests under way that hold something of a shared store's.
type Books struct{ receipts sync.Map }

func (b *Books) open(r *Receipt)  { b.receipts.Store(r, nil) }
func (b *Books) close(r *Receipt) { b.receipts.Delete(r) }

// Empty reports whether no request holds anything.
func (b *Books) Empty() bool {
	empty := true
	b.receipts.Range(func(_, _ any) bool { empty = false; return false })
	return empty
}

// CutOff gives back what is held by requests that the process does not live to see the end of, and
// returns how many those are. What they hold in flight the store gives back when it closes.
func (b *Books) CutOff() (requests int) {
	b.receipts.Range(func(r, _ any) bool {
		requests++
		r.(*Receipt).cutOff()
		return true
	})
	return requests
}
