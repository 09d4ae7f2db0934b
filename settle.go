package sluice

// What a request still owes once it may go on: to wait for its slot, and when its response is there, to give back or to
// pay the rest.

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
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

	shared bool // something is owed to the shared store
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
	decided  func()              // ends what [rule.reserve] began; nil where that does not matter
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
		back := algorithms.Charge{Key: debt.key, Limit: c.Limit, Cost: -c.Cost, Mark: o.Mark}
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
		if a.enforced && a.rule.Ban != nil && a.rule.Ban.Pending != nil {
			debt.decided = a.rule.reserve(debt.key)
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
		debtors := &d.h.redis.debtors
		debtors.Add(1)
		defer debtors.Add(-1)
	}
	defer func() { d.settle(r, status(r.Context(), watched, returned, err)) }()
	if err := d.hold(r.Context()); err != nil {
		return caddyhttp.Error(clientGone, err)
	}
	if d.watch {
		watched = &watcher{ResponseWriterWrapper: &caddyhttp.ResponseWriterWrapper{ResponseWriter: w}}
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
			d.debts[i].settle(d.debts[i].slots, nil)
		}
	}
	return err
}

// settle ends what the request owes. The status is 0 if there is none: then what was reserved stays taken.
func (d *due) settle(r *http.Request, status int) {
	for i := range d.debts {
		debt := &d.debts[i]
		for _, lease := range debt.held {
			lease.Release()
		}
		debt.settle(debt.leases, nil)
		debt.metrics.InFlight(-debt.inFlight())
		switch {
		case len(debt.reserved) == 0:
		case debt.rule.Charge != nil:
			if status != 0 {
				d.charge(r, debt)
			}
		case status != 0 && !debt.rule.Count.Counts(status):
			debt.settle(debt.reserved, debt.decided)
		case debt.decided != nil:
			if status != 0 {
				// In Redis too before the client reads the rest of its answer: or it could guess on meanwhile.
				d.h.punish(r, debt.rule, debt.key, debt.shared)
			}
			debt.decided()
		}
	}
}

// charge settles a reservation with what the response says that the request cost in all. Without a word of it the reservation stands.
func (d *due) charge(r *http.Request, debt *debt) {
	total, written, ok := debt.rule.Charge.Value(r)
	if !ok || total > algorithms.MaxExact { // one wrong number would lock the client out for years
		if written {
			d.h.badCost(debt.rule, "a charge is not a whole number from 0 to 2^52 and is ignored: the cost stands; this is logged once")
		}
		return
	}
	for _, c := range debt.reserved {
		if more := total + c.Cost; more > 0 {
			debt.settle([]algorithms.Charge{{Key: c.Key, Limit: c.Limit, Cost: more, Force: true}}, nil)
		} else if more < 0 {
			c.Cost = more
			debt.settle([]algorithms.Charge{c}, nil)
		}
	}
}

// settle applies charges that cannot be refused, at once in this process, in the background in the shared store, and then
// calls done, which may be nil.
func (d *debt) settle(charges []algorithms.Charge, done func()) {
	switch {
	case len(charges) == 0:
	case d.shared && done != nil:
		d.rule.redis.SettleThen(done, charges...)
	case d.shared:
		d.rule.redis.Settle(charges...)
	default:
		_ = local.Apply(context.Background(), charges, make([]algorithms.Outcome, len(charges)))
		if done != nil {
			done()
		}
	}
}

// watcher sees the status of a response that passes through it.
type watcher struct {
	*caddyhttp.ResponseWriterWrapper
	status int // 0: nothing written yet
}

// WriteHeader implements http.ResponseWriter.
func (w *watcher) WriteHeader(status int) {
	if final := status >= 200 || status == http.StatusSwitchingProtocols; final && w.status == 0 {
		w.status = status
	}
	w.ResponseWriterWrapper.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *watcher) Write(b []byte) (int, error) {
	w.begin()
	return w.ResponseWriterWrapper.Write(b)
}

// ReadFrom implements io.ReaderFrom.
func (w *watcher) ReadFrom(r io.Reader) (int64, error) {
	w.begin()
	return w.ResponseWriterWrapper.ReadFrom(r)
}

// begin notes the status of a body that comes without one.
func (w *watcher) begin() {
	if w.status == 0 {
		w.status = http.StatusOK
	}
}

// status is what the response says of the request: what was written, or will be for the error or the lack of one. It is 0 when
// nobody can say, since the client left or the handler panicked.
func status(ctx context.Context, w *watcher, returned bool, err error) int {
	var failure caddyhttp.HandlerError
	switch {
	case w == nil || w.status == 0 && !returned:
		return 0
	case ctx.Err() != nil && (w.status == 0 || w.status == clientGone): // reverse_proxy writes that to nobody
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
