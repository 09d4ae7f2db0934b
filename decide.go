package sluice

// Where the charges of a request are decided: in this process, in the shared store, or when that fails as
// each zone chose.

import (
	"context"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/fields"
)

// decide answers the question: each store at one instant, and taking all or nothing over both. What the local zones
// refuse never reaches the shared store; what they gave is given back when the shared store refuses.
// denied is true when the shared store failed and a zone wants such requests refused.
func (h *Handler) decide(ctx context.Context, q *question) (denied bool) {
	q.local.apply(ctx)
	if len(q.shared.charges) == 0 {
		return false
	}
	if q.local.refused() {
		q.shared.leaveUnasked()
		return false
	}
	others := &q.shared
	// Not ctx: Redis may have counted what a client asked that leaves now, so it is waited for, for the timeout at most.
	// Falling back instead would let those pass that ask and leave at once, and be no failure of the store.
	if err := h.redis.Apply(context.Background(), q.shared.charges, q.shared.outcomes); err != nil {
		denied = h.fallBack(ctx, q)
		others = &q.share
	}
	if denied || others.refused() {
		q.local.giveBack(ctx)
	}
	return denied
}

// apply asks this process, which cannot fail.
func (b *batch) apply(ctx context.Context) {
	switch {
	case b.queued:
		b.wait, _ = room.Apply(ctx, b.charges, b.outcomes)
	case len(b.charges) > 0:
		_ = local.Apply(ctx, b.charges, b.outcomes)
	}
}

// leaveUnasked answers charges that nobody was asked about: they pass as far as they are concerned.
func (b *batch) leaveUnasked() {
	for i := range b.outcomes {
		b.outcomes[i] = algorithms.Unasked
	}
}

// giveBack undoes what a committed batch took. The outcomes keep saying what was asked, with the units back.
func (b *batch) giveBack(ctx context.Context) {
	if len(b.charges) == 0 {
		return
	}
	marks := make([]algorithms.Outcome, len(b.outcomes))
	back := make([]algorithms.Charge, 0, len(b.charges))
	for i := range b.charges {
		c, o := &b.charges[i], b.outcomes[i]
		if o.OK && b.wait != nil && o.Delay > 0 && !c.DryRun {
			o.OK = false // it leaves the room, which gives its slot back
		}
		back = append(back, c.Undo(&o))
	}
	if b.queued {
		room.GiveBack(b.wait, back, marks)
	} else {
		_ = local.Apply(ctx, back, marks)
	}
	for i := range marks {
		b.outcomes[i].Remaining, b.outcomes[i].Next = marks[i].Remaining, marks[i].Next
	}
}

// fallBack answers the charges that the shared store did not, as each zone chose. A dry run never denies.
func (h *Handler) fallBack(ctx context.Context, q *question) (denied bool) {
	q.shared.leaveUnasked()
	shares := h.currentShares()
	for i := range q.asked {
		a := &q.asked[i]
		if a.batch != &q.shared {
			continue
		}
		a.metrics = a.rule.standIn
		a.metrics.CountFallback(a.rule.OnStoreError.String())
		switch a.rule.OnStoreError {
		case caddyfile.OnStoreErrorDeny:
			a.denied = a.enforced
			denied = denied || a.denied
		case caddyfile.OnStoreErrorAllow:
			a.allowed = true
			h.app.redis.unlimited.Add(1)
		default:
			a.takeShare(&q.share, shares.limits[a.plan])
		}
	}
	if denied {
		q.share.leaveUnasked()
		return true
	}
	q.fields = shares.fields
	q.share.apply(ctx)
	for i := range q.asked {
		if a := &q.asked[i]; a.batch == &q.share {
			a.untilStoreIsBack()
		}
	}
	return false
}

// untilStoreIsBack corrects the wait for what is more than the share ever holds, but not more than the limit: that passes again
// when the shared store decides it.
func (a *asked) untilStoreIsBack() {
	for i, limit := range a.plan.Limits {
		c, o := a.charge(i), a.outcome(i)
		if o.Retry == algorithms.Never && c.Cost <= limit.Capacity-c.Held {
			o.Retry = storeBack
			if o.Next != algorithms.Never { // clients are told no wait that is shorter than that
				o.Retry = max(storeBack, o.Next)
			}
		}
	}
}

// takeShare moves a rule's charges to the batch of shares, with this instance's part of each limit.
func (a *asked) takeShare(to *batch, limits []*algorithms.Limit) {
	if a.reserves {
		to.add(*a.charge(pending))
	}
	if a.asksBan {
		to.add(*a.charge(ban))
	}
	first := len(to.charges)
	for i, limit := range limits {
		c := *a.charge(i)
		c.Limit = limit
		to.add(c)
	}
	a.batch, a.first = to, first
}

// shares is what this instance admits by itself while the shared store is down, and how clients are told.
type shares struct {
	fleet  int
	limits map[*plan][]*algorithms.Limit
	fields *fields.Set
}

// currentShares divides the limits by the number of instances last known. They are made again when that changes.
func (h *Handler) currentShares() *shares {
	fleet := h.app.fleet()
	if s := h.shares.Load(); s != nil && s.fleet == fleet {
		return s
	}
	s := &shares{fleet: fleet, limits: make(map[*plan][]*algorithms.Limit)}
	for _, r := range h.rules {
		for _, p := range r.plans {
			s.limits[p] = p.Limits
			if r.redis != nil && r.OnStoreError == caddyfile.OnStoreErrorLocal {
				s.limits[p] = shareAll(p.Limits, fleet)
			}
		}
	}
	s.fields = h.describe(func(p *plan) []*algorithms.Limit { return s.limits[p] })
	h.shares.Store(s)
	return s
}

// shareZone is where the shares of a zone are counted. No configured name can be this one.
func shareZone(zone string) string { return zone + " (share)" }

func shareAll(limits []*algorithms.Limit, fleet int) (parts []*algorithms.Limit) {
	for _, limit := range limits {
		parts = append(parts, share(limit, fleet))
	}
	return parts
}

// share is one instance's part of a limit: at least 1, so that the sum over the fleet may reach the fleet's size.
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
	divided, err := algorithms.Compile(shareZone(limit.Space.Zone), p)
	if err != nil { // a slow rate that cannot be slower: then it is not divided
		p = limit.Policy
		divided, err = algorithms.Compile(shareZone(limit.Space.Zone), p)
		if err != nil {
			return limit
		}
	}
	divided.MaxKeys = limit.MaxKeys
	return divided
}
