package sluice

// What a response says of its request: whether it counts, and what it cost. A request that has
// nothing to wait for and nothing to give back does not come here.

import (
	"context"
	"errors"
	"io"
	"net/http"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/telemetry"
)

// due is what a request that passed still has to do.
type due struct {
	voice   *voice
	receipt *counting.Receipt
	rules   []*rule // beside each item of the receipt

	// What most requests need, allocated together.
	first   [1]*rule
	watched watcher
	wrapper caddyhttp.ResponseWriterWrapper
}

// owe notes what the request has to do; nil if that is nothing.
func owe(q *question, v *voice) *due {
	receipt := q.decision.Keep()
	if receipt == nil {
		return nil
	}
	d := &due{voice: v, receipt: receipt}
	d.rules = d.first[:0]
	for i := range receipt.Items {
		d.rules = append(d.rules, q.asked[receipt.Items[i].Entry].rule)
		d.metrics(i).InFlight(receipt.Items[i].InFlight())
	}
	return d
}

func (d *due) metrics(item int) *telemetry.Zone {
	return d.rules[item].countedBy(d.receipt.Items[item].By)
}

// serve lets the request wait for its slot and go on, and settles, whatever happens behind: an
// error, a panic, a connection that was taken over, a client that is gone.
func (d *due) serve(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) (err error) {
	returned, watched := false, (*watcher)(nil)
	defer func() { d.end(r, statusOf(r.Context(), watched, returned, err)) }()
	if err := d.wait(r.Context()); err != nil {
		return caddyhttp.Error(clientGone, err)
	}
	if d.receipt.Reserved() {
		watched = d.watch(w, r)
		w = watched
	}
	err = next.ServeHTTP(w, r)
	returned = true
	return err
}

// watch returns a writer that sees the response's status.
func (d *due) watch(w http.ResponseWriter, r *http.Request) *watcher {
	d.wrapper.ResponseWriter = w
	d.watched = watcher{ResponseWriterWrapper: &d.wrapper, due: d, request: r}
	return &d.watched
}

// clientGone is the status under which Caddy and NGINX log that nobody waits for the response.
const clientGone = 499

// wait waits for the request's slots. If the client goes away, they are given back.
func (d *due) wait(ctx context.Context) error {
	if !d.receipt.Waits() {
		return nil
	}
	for i := range d.receipt.Items {
		if delay := d.receipt.Items[i].Delay; delay > 0 {
			metrics := d.metrics(i)
			metrics.Delay(delay)
			metrics.Waiting(1)
			defer metrics.Waiting(-1)
		}
	}
	return d.receipt.Wait(ctx)
}

// count ends the reservations of rules that a response counts for, or does not, by its status, as
// soon as there is one: a long response does not hold its unit until it ends, and a failure is
// known before the client reads of it and can guess on.
func (d *due) count(r *http.Request, status int) {
	if status == 0 {
		return
	}
	for i, rule := range d.rules {
		switch {
		case !d.receipt.Open(i):
		case rule.Count.Counts(status):
			d.voice.banned(r, rule, d.receipt.Items[i].By, d.receipt.Items[i].Key, d.receipt.Count(i))
		default:
			d.receipt.Return(i)
		}
	}
}

// end settles what is not settled yet. The status is 0 if there is none: then what was reserved
// stays taken.
func (d *due) end(r *http.Request, status int) {
	d.count(r, status)
	for i, rule := range d.rules {
		if rule.Charge != nil && status != 0 {
			d.charge(r, rule, i)
		}
	}
	d.receipt.Close()
	for i := range d.rules {
		d.metrics(i).InFlight(-d.receipt.Items[i].InFlight())
	}
}

// charge corrects a reservation to what the response says that the request cost in all. Without a
// word of it the reservation stands.
func (d *due) charge(r *http.Request, rule *rule, item int) {
	total, written, ok := rule.Charge.Value(r)
	switch {
	case ok && total <= rule.MaxCharge:
		d.receipt.Correct(item, total)
	case written: // one wrong number would lock the client out
		d.voice.badCost(rule, "a charge is not a whole number from 0 to its max and is ignored: the cost stands; this is logged once")
	}
}

// watcher sees the status of a response that passes through it.
type watcher struct {
	*caddyhttp.ResponseWriterWrapper
	status  int // 0: nothing written yet
	due     *due
	request *http.Request
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

// begin notes the first status, before the client sees it; a body that comes without one has 200.
func (w *watcher) begin(status int) {
	if w.status == 0 {
		w.status = status
		w.due.count(w.request, statusOf(w.request.Context(), w, false, nil))
	}
}

// statusOf is what the response says of the request: what was written, or will be for the error or
// the lack of one. It is 0 when nobody can say, since the client left or the handler panicked.
func statusOf(ctx context.Context, w *watcher, returned bool, err error) int {
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
