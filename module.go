// Package sluice is a rate limiter for Caddy: the HTTP handler module http.handlers.rate_limit.
//
// This file is the way of one request from top to bottom: which rules apply, what the store says,
// what the client is told, and whether the request goes on. How counting works is in package
// algorithms, what the configuration means in package caddyfile.
package sluice

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/fields"
	"github.com/caddy-sluice/sluice/telemetry"
)

func init() {
	caddy.RegisterModule(new(Handler))
	caddyfile.Register(func(c *caddyfile.Config) caddyhttp.MiddlewareHandler { return &Handler{Config: *c} })
	httpcaddyfile.RegisterGlobalOption("rate_limit", caddyfile.ParseGlobal)
	httpcaddyfile.RegisterDirectiveOrder("rate_limit", httpcaddyfile.Before, "basic_auth")
}

// Handler limits the rate of requests: all of its zones that match a request are decided at one
// instant and charged together, or not at all, before the request goes on to the handlers behind
// it.
//
// A refused request is answered with status 429, a Retry-After that is true, and a problem+json
// body or the site's error routes. Every response that a zone applied to says what is left in the
// fields RateLimit and RateLimit-Policy.
type Handler struct {
	caddyfile.Config

	voice
	rules    []*rule // those that count in this process first, as they are asked
	fields   *fields.Set
	shares   atomic.Pointer[shareFields]
	app      *App
	counters *counting.Counters
	took     atomic.Int64 // nanoseconds of the decision measured last
	shared   bool         // a rule counts in the shared store
	keeps    bool         // a rule has something to do after its decision
	bans     bool         // a rule bans
	// placeholders: something may read {http.rate_limit.…}.
	placeholders bool
}

// CaddyModule returns the Caddy module information.
func (*Handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.rate_limit", New: func() caddy.Module { return new(Handler) }}
}

// Provision compiles the config and opens its zones. It changes nothing that a running config uses.
func (h *Handler) Provision(ctx caddy.Context) error {
	h.logger = ctx.Logger()
	loaded, err := ctx.App("rate_limit")
	if err != nil {
		return err
	}
	app := loaded.(*App)
	app.name(&h.Config)
	settings, err := caddyfile.Compile(ctx, &h.Config)
	if err != nil {
		return err
	}
	for _, warning := range settings.Warnings {
		h.logger.Warn(warning)
	}
	if h.reporter, err = telemetry.NewReporter(ctx, settings.LogKey); err != nil {
		return err
	}
	h.settings, h.app = settings, app
	app.sweepEvery(settings.SweepInterval)
	return h.open(ctx, app)
}

// open joins the rules to the config and opens their metrics. Those are in h.rules, so that Cleanup
// closes them and no more.
func (h *Handler) open(ctx caddy.Context, app *App) error {
	policies := 0
	for i, compiled := range h.settings.Rules {
		zone, err := app.join(compiled, h.logger)
		if err != nil {
			return err
		}
		r := newRule(compiled, zone, i)
		h.shared, h.keeps, h.bans = h.shared || r.shared(), h.keeps || r.entry.Keeps, h.bans || r.Ban != nil
		for _, p := range compiled.Plans {
			r.plans = append(r.plans, &plan{Plan: p, policy: policies})
			if !r.DryRun {
				policies += len(p.Limits)
			}
		}
		h.rules = append(h.rules, r)
		if h.settings.DisableMetrics {
			continue
		}
		if err := r.openMetrics(ctx.GetMetricsRegistry()); err != nil {
			return fmt.Errorf("registering metrics of zone %s: %w", r.Zone, err)
		}
	}
	h.counters, h.placeholders = app.counters, app.Placeholders != "off"
	h.fields = h.describe(func(_ *rule, p *plan) []*algorithms.Limit { return p.Limits })
	slices.SortStableFunc(h.rules, func(a, b *rule) int { return cmp.Compare(a.entry.Place, b.entry.Place) })
	return nil
}

// describe prepares what clients are told of each plan, by the limits that hold for it. Of dry runs
// they are told nothing. The rules are in the order of the file.
func (h *Handler) describe(limits func(*rule, *plan) []*algorithms.Limit) *fields.Set {
	policies := map[int]fields.Policy{}
	for _, r := range h.rules {
		if r.DryRun {
			continue
		}
		for _, p := range r.plans {
			for i, limit := range limits(r, p) {
				policies[p.policy+i] = fields.NewPolicy(p.Names[i], limit)
			}
		}
	}
	list := make([]fields.Policy, len(policies))
	for i, p := range policies {
		list[i] = p
	}
	return fields.NewSet(h.settings.Headers, h.settings.Status, list...)
}

// shareFields is what clients are told by this instance's shares of the limits.
type shareFields struct {
	fleet  int
	fields *fields.Set
}

// tellShares returns what clients are told while the shared store is down. It is made again when
// the number of instances changes.
func (h *Handler) tellShares(fleet int) *fields.Set {
	if s := h.shares.Load(); s != nil && s.fleet == fleet {
		return s.fields
	}
	set := h.describe(func(r *rule, p *plan) []*algorithms.Limit {
		if r.shared() && r.entry.IfDown == counting.UseShare {
			return h.counters.Shares(p.Limits, fleet)
		}
		return p.Limits
	})
	h.shares.Store(&shareFields{fleet, set})
	return set
}

// Cleanup ends the rules' metrics; the zones are the app's to release.
func (h *Handler) Cleanup() error {
	for _, r := range h.rules {
		r.metrics.Close()
		r.standIn.Close()
	}
	return nil
}

// ServeHTTP lets the request go on, or answers it.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if included(r) {
		return next.ServeHTTP(w, r)
	}
	owed, refused, err := h.limit(w, r)
	switch {
	case refused || err != nil:
		return err
	case owed != nil:
		return owed.serve(w, r, next)
	}
	return next.ServeHTTP(w, r)
}

// limit decides about the request. It tells the client in w's header, or if the request is refused
// in the whole response. What the request still has to do when it passes is nil for most.
func (h *Handler) limit(w http.ResponseWriter, r *http.Request) (owed *due, refused bool, err error) {
	var start time.Duration
	timed := h.timed()
	if timed {
		start = monotonic()
	}
	q := newQuestion(r, h.counters)
	defer q.release()
	if err := h.ask(q); err != nil {
		q.openRecord(true, h.placeholders)
		return nil, true, h.turnAway(w, q, err)
	}
	if len(q.asked) == 0 {
		q.openRecord(false, h.placeholders)
		return nil, false, nil
	}
	denied := h.decide(q)
	by, why := q.binding()
	if why.refused && h.bans {
		h.strikeRefused(q)
		by, why = q.binding()
	}
	passed := !denied && !why.refused
	q.openRecord(!passed, h.placeholders)
	q.remember(passed)
	h.tell(w, q)
	if timed {
		h.took.Store(int64(monotonic() - start))
	}
	h.count(q, passed, time.Duration(h.took.Load()))
	switch {
	case denied:
		return nil, true, h.deny(w, q)
	case why.refused:
		return nil, true, h.refuse(w, q, by, why, h.counters)
	case h.keeps:
		return owe(q, &h.voice), false, nil
	}
	return nil, false, nil
}

// decide lets the places where the rules count answer, and chooses what clients are told of their
// limits.
func (h *Handler) decide(q *question) (denied bool) {
	denied = q.decision.Decide(q.r.Context())
	q.fields = h.fields
	for i := range q.asked {
		a := &q.asked[i]
		a.Answer = &q.decision.Answers[i]
		if a.By.StoreFailed() && !denied {
			q.fields = h.tellShares(q.decision.Fleet)
		}
	}
	return denied
}

// timed reports whether this decision is measured. Reading the clock twice costs as much as
// deciding in this process does, so of such decisions one in eight is measured and stands for those
// until the next. A round trip to Redis is always measured.
func (h *Handler) timed() bool { return h.shared || rand.Uint32()%8 == 0 }

// ask finds the rules that apply to the request and asks under each of its keys.
func (h *Handler) ask(q *question) error {
	for _, rule := range h.rules {
		if q.record.knows(rule) {
			continue // a re-entry: a rule charges a request at most once
		}
		var met keys
		plan, err := q.meets(rule, &met)
		if err != nil {
			if rule.EnforcesNone() {
				continue // a dry run never refuses, not even for want of a key
			}
			return err
		}
		if met.n == 0 {
			continue
		}
		cost := h.cost(rule, q.r)
		for i, key := range met.list[:met.n] {
			q.ask(rule, plan, key, cost, i > 0)
		}
	}
	return nil
}

// cost is what the request takes from the rule's counters.
func (h *Handler) cost(rule *rule, r *http.Request) int64 {
	units, ok := rule.Cost.Units(r)
	if !ok {
		h.badCost(rule, "a cost is not a whole number of at least 0 and counts as 1; this is logged once")
	}
	return units
}

// tell writes the response fields of the enforced rules that applied.
func (h *Handler) tell(w http.ResponseWriter, q *question) {
	for n := range q.asked {
		a := &q.asked[n]
		if !a.enforced {
			continue
		}
		a.retract(w.Header(), q.record)
		for i, limit := range a.Limits {
			told := fields.Applied{Policy: a.plan.policy + i}
			if o := a.told(i); o.Asked() {
				told.Outcome = o
			}
			if !a.also || !q.tighten(told, limit) {
				q.applied = append(q.applied, told)
			}
		}
	}
	q.sortApplied()
	var now time.Time
	if q.fields.NeedsNow() {
		now = time.Now()
	}
	q.fields.Write(w.Header(), &q.record.scratch, q.applied, now)
}

// count adds the decision to the metrics of the rules that were asked, and reports what dry runs
// would have refused.
func (h *Handler) count(q *question, passed bool, took time.Duration) {
	for n := range q.asked {
		if q.asked[n].also {
			continue // counted with the rule's first key
		}
		a, v := q.worst(n)
		metrics := a.rule.countedBy(a.By)
		if a.By.StoreFailed() {
			metrics.CountFallback(a.rule.OnStoreError.String())
		}
		if a.By == counting.ByAllowing {
			h.app.redis.unlimited.Add(1)
		}
		refused := v.refused || a.By == counting.ByDenying && a.enforced
		if !refused && !a.Outcomes[0].Asked() && a.By != counting.ByAllowing {
			continue // nobody knows what it would have said
		}
		result := resultOf(!refused, passed && a.Delay() > 0, a.enforced)
		metrics.Count(result, took)
		if result == telemetry.RefusedDryRun {
			h.report(q, a, v.wait)
		}
	}
}

var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
