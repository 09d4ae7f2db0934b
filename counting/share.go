package counting

// What happens while the shared store does not answer.

import (
	"context"
	"sync"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// StoreBack is when a client may expect the shared store to be back: it is looked for more often
// than that.
const StoreBack = 2 * time.Second

// fallBack answers the entries that the shared store did not, as each rule chose. A dry run never
// denies.
func (d *Decision) fallBack(ctx context.Context) (denied bool) {
	d.leaveUnasked(d.local, d.both, ByShare)
	d.Fleet = d.counters.Fleet()
	for i := range d.Answers {
		e, a := &d.Entries[i], &d.Answers[i]
		switch {
		case a.By != ByShare:
		case e.IfDown == Deny:
			a.By, denied = ByDenying, denied || !e.DryRun
		case e.IfDown == UseShare:
			d.takeShare(e, a)
		default:
			a.By = ByAllowing
		}
	}
	if denied {
		for i := d.both; i < len(d.outcomes); i++ {
			d.outcomes[i] = algorithms.Unasked
		}
		return true
	}
	d.applyHere(ctx, ofShare)
	for i := range d.Answers {
		if a := &d.Answers[i]; a.By == ByShare {
			d.untilStoreIsBack(&d.Entries[i], a)
		}
	}
	return false
}

// takeShare asks again for an entry's charges, with this instance's part of each limit.
func (d *Decision) takeShare(e *Entry, a *Answer) {
	if a.pending >= 0 {
		a.pending = d.add(d.charges[a.pending])
	}
	if a.ban >= 0 {
		a.ban = d.add(d.charges[a.ban])
	}
	a.Limits = d.counters.Shares(e.Limits, d.Fleet)
	first := len(d.charges)
	for i, limit := range a.Limits {
		c := d.charges[a.first+i]
		c.Limit = limit
		d.add(c)
		d.queues[ofShare] = d.queues[ofShare] || limit.Queue > 0
	}
	a.first = first
}

// untilStoreIsBack corrects the wait for what is more than the share ever holds, but not more than
// the limit: that passes again when the shared store decides it.
func (d *Decision) untilStoreIsBack(e *Entry, a *Answer) {
	for i, limit := range e.Limits {
		c, o := &d.charges[a.first+i], &d.outcomes[a.first+i]
		if o.Retry == algorithms.Never && c.Cost <= limit.Capacity-c.Held {
			o.Retry = StoreBack
			if o.Next != algorithms.Never { // clients are told no wait that is shorter than that
				o.Retry = max(StoreBack, o.Next)
			}
		}
	}
}

// shares are the parts of limits that one of so many instances admits by itself.
type shares struct {
	fleet int
	lists sync.Map // of limits, by the first of them: *algorithms.Limit → []*algorithms.Limit
}

// Shares returns the part of each limit that one of so many instances admits by itself. The same
// limits have the same parts until that number changes.
func (c *Counters) Shares(limits []*algorithms.Limit, fleet int) []*algorithms.Limit {
	if len(limits) == 0 {
		return nil
	}
	now := c.shares.Load()
	if now == nil || now.fleet != fleet {
		now = &shares{fleet: fleet}
		c.shares.Store(now)
	}
	if parts, ok := now.lists.Load(limits[0]); ok {
		return parts.([]*algorithms.Limit)
	}
	parts := make([]*algorithms.Limit, 0, len(limits))
	for _, limit := range limits {
		parts = append(parts, share(limit, fleet))
	}
	kept, _ := now.lists.LoadOrStore(limits[0], parts)
	return kept.([]*algorithms.Limit)
}

// ShareZone is where the shares of a zone are counted. No configured name can be this one.
func ShareZone(zone string) string { return zone + " (share)" }

// share is one instance's part of a limit: at least 1, so that the sum over the fleet may reach the
// fleet's size.
func share(limit *algorithms.Limit, fleet int) *algorithms.Limit {
	part := func(n int64) int64 {
		if n == 0 {
			return 0
		}
		return max(1, n/int64(fleet))
	}
	p := limit.Policy
	p.Quota, p.Burst = part(p.Quota), part(p.Burst)
	if p.Queue = min(p.Queue, p.Burst-1); p.Queue <= 0 {
		p.Queue, p.MaxWait = 0, 0
	}
	if p.Algorithm == algorithms.Concurrency {
		p.Window = algorithms.MaxWindow // a lease in this process needs no expiry
	}
	divided, err := algorithms.Compile(ShareZone(limit.Space.Zone), p)
	if err != nil { // a slow rate that cannot be slower: then it is not divided
		p = limit.Policy
		divided, err = algorithms.Compile(ShareZone(limit.Space.Zone), p)
		if err != nil {
			return limit
		}
	}
	divided.MaxKeys = limit.MaxKeys
	return divided
}
