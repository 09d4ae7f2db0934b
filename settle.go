package sluice

// What a request still owes once it may go on: to wait for its slot, and when its response is there, to give back or to
// pay the rest.

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/leaky"
	"github.com/caddy-sluice/sluice/redisstore"
	"github.com/caddy-sluice/sluice/telemetry"
)

// due is what one request owes to the rules that let it pass.
type due struct {
	h     *Handler
	waits []*leaky.Wait // slots in this process
	until time.Time     // the last slot in the shared store
	debts []debt
	watch bool // the response's status matters

	shared bool       // something is owed to the shared store
	mu     sync.Mutex // guards what is reserved and pending in the debts from a stop of the process
}

// debt is what one rule is owed. Its charges all give back, and are settled at most once each.
type debt struct {
	rule     *rule
	metrics  *telemetry.Zone
	shared   bool // in the shared store
	enforced bool
	key      string
	delay    time.Duration
	slots    []algorithms.Charge // in the shared store, unless the request waits until it is served
	leases   []algorithms.Charge // when the response is done
	held     []*redisstore.Lease // the same for leases that expire, which are renewed until then
	reserved []algorithms.Charge // unless the response counts, or as far as it costs less
	pending  []algorithms.Charge // together with that: then it is no longer pending
}

// owes reports whether the rule has something to do after its decision.
func (r *rule) owes() bool {
	if r.Count != nil || r.Charge != nil {
		return true
	}
	for limit := range r.AllLimits() {
		if limit.Queue > 0 || limit.Algorithm == algorithms.Concurrency {
			return true
		}
	}
	return false
}

// owe notes what the request, which passed, owes; nil if that is nothing.
func (h *Handler) owe(q *question) *due {
	var d *due
	for i := range q.asked {
		a := &q.asked[i]
		if !a.rule.later {
			continue
		}
		if d == nil {
			d = &due{h: h}
		}
		d.add(a, a.batch == &q.shared)
	}
	if d == nil {
		return nil
	}
	for _, b := range [...]*batch{&q.local, &q.share} {
		if b.wait != nil {
			d.waits = append(d.waits, b.wait)
		}
	}
	return d
}

// add notes what is owed to one rule. What a dry run would have refused has taken nothing, and what the store
// was not asked about neither.
func (d *due) add(a *asked, shared bool) {
	debt := debt{rule: a.rule, metrics: a.metrics, shared: shared, enforced: a.enforced, key: strings.Clone(a.key)}
	for i := range a.plan.Limits {
		c, o := a.charge(i), a.outcome(i)
		if !o.OK || !o.Asked() {
			continue
		}
		back := c.Undo(o)
		back.Key = debt.key // which outlives the request
		switch {
		case c.Limit.Algorithm == algorithms.Concurrency && shared:
			debt.held = append(debt.held, a.rule.redis.Hold(c.Limit, debt.key, o.Mark))
		case c.Limit.Algorithm == algorithms.Concurrency:
			debt.leases = append(debt.leases, back)
		case c.Limit.Queue > 0 && shared && o.Delay > 0:
			debt.slots = append(debt.slots, back)
		case a.rule.Count != nil || a.rule.Charge != nil:
			debt.reserved = append(debt.reserved, back)
		}
		if a.enforced {
			debt.delay = max(debt.delay, o.Delay)
		}
	}
	if shared && debt.delay > 0 {
		if at := time.Now().Add(debt.delay); at.After(d.until) {
			d.until = at
		}
	}
	if len(debt.reserved) > 0 {
		d.watch = true
	}
	if a.reserves {
		if c, o := a.charge(pending), a.outcome(pending); o.OK && o.Asked() {
			back := c.Undo(o)
			back.Key = debt.key
			debt.pending = []algorithms.Charge{back}
		}
	}
	d.shared = d.shared || shared
	debt.metrics.InFlight(debt.inFlight())
	d.debts = append(d.debts, debt)
}

func (d *debt) inFlight() int { return len(d.held) + len(d.leases) }

// serve lets the request wait for its slot and go on, and settles, whatever happens behind: an error, a panic, a connection
// that was taken over, a client that is gone.
func (d *due) serve(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) (err error) {
	returned, watched := false, (*watcher)(nil)
	if d.shared {
		d.h.redis.owe(d)
		defer d.h.redis.paid(d)
	}
	defer func() { d.end(r, status(r.Context(), watched, returned, err)) }()
	if err := d.hold(r.Context()); err != nil {
		return caddyhttp.Error(clientGone, err)
	}
	if d.watch {
		watched = &watcher{ResponseWriterWrapper: &caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, begun: func() {
			d.count(r, status(r.Context(), watched, false, nil))
		}}
		w = watched
	}
	err = next.ServeHTTP(w, r)
	returned = true
	return err
}

// clientGone is the status under which Caddy and NGINX log that nobody waits for the response.
const clientGone = 499

// hold waits for the request's slots. If the client goes away, they are given back.
func (d *due) hold(ctx context.Context) (err error) {
	if len(d.waits) == 0 && d.until.IsZero() {
		return nil
	}
	for i := range d.debts {
		if debt := &d.debts[i]; debt.delay > 0 {
			debt.metrics.Delay(debt.delay)
			debt.metrics.Waiting(1)
			defer debt.metrics.Waiting(-1)
		}
	}
	for _, w := range d.waits {
		if err != nil {
			w.Leave()
			continue
		}
		err = w.Until(ctx)
	}
	if rest := time.Until(d.until); err == nil && rest > 0 {
		timer := time.NewTimer(rest)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	if err != nil {
		for i := range d.debts {
			d.debts[i].pay(d.debts[i].slots...)
		}
	}
	return err
}

// end pays what the request still owes. The status is 0 if there is none: then what was reserved stays taken.
func (d *due) end(r *http.Request, status int) {
	d.count(r, status)
	for i := range d.debts {
		debt := &d.debts[i]
		for _, lease := range debt.held {
			lease.Release()
		}
		debt.pay(debt.leases...)
		debt.metrics.InFlight(-debt.inFlight())
		var pay []algorithms.Charge
		d.mu.Lock()
		if debt.rule.Charge != nil && status != 0 {
			pay = d.charged(r, debt)
		}
		debt.release(pay)
		d.mu.Unlock()
	}
}

// cutOff gives back what a request has reserved in the shared store that a stop of the process does not wait for: nobody will
// see its response. What a rule with charge reserved stays: the upstream may have done the work.
func (d *due) cutOff() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.debts {
		debt := &d.debts[i]
		switch {
		case !debt.shared:
		case debt.rule.Count != nil:
			debt.release(debt.reserved)
		default:
			debt.release(nil)
		}
	}
}

// count ends the reservations of rules that a response counts for, or does not, by its status, as soon as there is one: a long
// response does not hold its unit until it ends, and a failure is known before the client reads of it and can guess on.
func (d *due) count(r *http.Request, status int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.debts {
		debt := &d.debts[i]
		switch {
		case status == 0 || debt.rule.Count == nil || len(debt.reserved) == 0:
		case !debt.rule.Count.Counts(status):
			debt.release(debt.reserved)
		default:
			if debt.enforced && debt.rule.Ban != nil {
				d.h.punish(r, debt.rule, debt.key, debt.shared)
			}
			debt.release(nil)
		}
	}
}

// release ends the rule's reservation, with what there is to pay for it. Only the first call counts.
func (d *debt) release(pay []algorithms.Charge) {
	d.pay(append(pay, d.pending...)...)
	d.reserved, d.pending = nil, nil
}

// charged is what corrects a reservation to what the response says that the request cost in all. Without a word of it the
// reservation stands.
func (d *due) charged(r *http.Request, debt *debt) (pay []algorithms.Charge) {
	total, written, ok := debt.rule.Charge.Value(r)
	if !ok || total > debt.rule.MaxCharge { // one wrong number would lock the client out
		if written {
			d.h.badCost(debt.rule, "a charge is not a whole number from 0 to its max and is ignored: the cost stands; this is logged once")
		}
		return nil
	}
	for _, c := range debt.reserved {
		if more := total + c.Cost; more > 0 {
			pay = append(pay, algorithms.Charge{Key: c.Key, Limit: c.Limit, Cost: more, Force: true})
		} else if more < 0 {
			c.Cost = more
			pay = append(pay, c)
		}
	}
	return pay
}

// pay applies charges that cannot be refused: in this process at once, in the shared store in the background.
func (d *debt) pay(charges ...algorithms.Charge) {
	switch {
	case len(charges) == 0:
	case d.shared:
		d.rule.redis.Settle(charges...)
	default:
		_ = local.Apply(context.Background(), charges, make([]algorithms.Outcome, len(charges)))
	}
}

// watcher sees the status of a response that passes through it.
type watcher struct {
	*caddyhttp.ResponseWriterWrapper
	status int    // 0: nothing written yet
	begun  func() // called when there is one, before the client sees it
}

// WriteHeader implements http.ResponseWriter.
func (w *watcher) WriteHeader(status int) {
	if final := status >= 200 || status == http.StatusSwitchingProtocols; final {
		w.begin(status)
	}
	w.ResponseWriterWrapper.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *watcher) Write(b []byte) (int, error) {
	w.begin(http.StatusOK)
	return w.ResponseWriterWrapper.Write(b)
}

// ReadFrom implements io.ReaderFrom.
func (w *watcher) ReadFrom(r io.Reader) (int64, error) {
	w.begin(http.StatusOK)
	return w.ResponseWriterWrapper.ReadFrom(r)
}

// begin notes the first status; a body that comes without one has 200.
func (w *watcher) begin(status int) {
	if w.status == 0 {
		w.status = status
		w.begun()
	}
}

// status is what the response says of the request: what was written, or will be for the error or the lack of one. It is 0 when
// nobody can say, since the client left or the handler panicked.
func status(ctx context.Context, w *watcher, returned bool, err error) int {
	var failure caddyhttp.HandlerError
	switch {
	case w == nil || w.status == 0 && !returned:
		return 0
	case w.status != 0 && w.status != clientGone: // reverse_proxy writes that one to nobody
		return w.status
	case errors.As(err, &failure) && failure.StatusCode != 0 && failure.StatusCode != clientGone:
		return failure.StatusCode // also if the client listens no more: a half-closed connection would hide its failures
	case ctx.Err() != nil:
		return 0
	case w.status != 0:
		return w.status
	case errors.As(err, &failure) && failure.StatusCode != 0:
		return failure.StatusCode
	case err != nil:
		return http.StatusInternalServerError
	}
	return http.StatusOK
}
