// Package sluice is a rate limiter for Caddy: the HTTP handler module http.handlers.rate_limit.
//
// This file is the way of one request from top to bottom: which rules apply, what the store says, what the client
// is told, and whether the request goes on. How counting works is in package algorithms, what the configuration
// means in package caddyfile.
package sluice

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/fields"
	"github.com/caddy-sluice/sluice/telemetry"
)

func init() {
	caddy.RegisterModule(new(Handler))
	caddyfile.Register(func(c *caddyfile.Config) caddyhttp.MiddlewareHandler { return &Handler{Config: *c} })
	httpcaddyfile.RegisterGlobalOption("rate_limit", caddyfile.ParseGlobal)
	httpcaddyfile.RegisterDirectiveOrder("rate_limit", httpcaddyfile.Before, "basic_auth")
}

// Handler limits the rate of requests: all of its zones that match a request are decided at one instant and charged
// together, or not at all, before the request goes on to the handlers behind it.
//
// A refused request is answered with status 429, a Retry-After that is true, and a problem+json body or the site's error
// routes. Every response that a zone applied to says what is left in the fields RateLimit and RateLimit-Policy.
type Handler struct {
	caddyfile.Config

	settings *caddyfile.Rules
	rules    []*rule
	fields   *fields.Set
	app      *App
	redis    *sharedStore // nil when no zone is shared
	shares   atomic.Pointer[shares]
	took     atomic.Int64 // nanoseconds of the decision measured last
	reporter *telemetry.Reporter
	logger   *zap.Logger
	later    bool // a rule has something to do after its decision
	bans     bool // a rule bans
}

// rule is a compiled rule with what it holds while the config lives.
type rule struct {
	*caddyfile.Rule
	zone    *zone
	redis   *sharedStore // counts in it; nil: in this process
	later   bool         // has something to do after its decision
	metrics *telemetry.Zone
	standIn *telemetry.Zone // counts what happens while the shared store is down
	plans   []*plan
	badCost atomic.Bool // a cost that is no number was logged
	ahead   atomic.Pointer[[]*ahead]
}

// plan is a compiled plan with what clients are told of it.
type plan struct {
	*caddyfile.Plan
	policy int // index in the handler's fields of the first limit's policy
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

// open joins the rules to the config and opens their metrics. Those are in h.rules, so that Cleanup closes them and no more.
func (h *Handler) open(ctx caddy.Context, app *App) error {
	policies := 0
	for _, compiled := range h.settings.Rules {
		zone, err := app.join(compiled, h.logger)
		if err != nil {
			return err
		}
		r := &rule{Rule: compiled, zone: zone}
		if compiled.Store == caddyfile.StoreRedis {
			r.redis, h.redis = app.redis, app.redis
		}
		r.later = r.owes()
		h.later, h.bans = h.later || r.later, h.bans || r.Ban != nil
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
	h.fields = h.describe(func(p *plan) []*algorithms.Limit { return p.Limits })
	return nil
}

// openMetrics begins to count the rule's decisions by the store that makes them.
func (r *rule) openMetrics(registry *prometheus.Registry) (err error) {
	source := telemetry.Source{
		Zone: r.Zone, Store: "local", Limits: slices.Collect(r.AllLimits()), IPv4Prefix: r.IPv4Prefix, IPv6Prefix: r.IPv6Prefix,
		Keys: r.zone.counters.Keys, Evictions: r.zone.counters.Evictions,
	}
	if r.redis != nil {
		if r.OnStoreError != caddyfile.OnStoreErrorLocal {
			source.Store = "none"
		}
		if r.standIn, err = telemetry.Open(registry, source); err != nil {
			return err
		}
		source.Store = "redis"
	}
	r.metrics, err = telemetry.Open(registry, source)
	return err
}

// describe prepares what clients are told of each plan, by the limits that hold for it. Of dry runs they are told nothing.
func (h *Handler) describe(limits func(*plan) []*algorithms.Limit) *fields.Set {
	var policies []fields.Policy
	for _, r := range h.rules {
		if r.DryRun {
			continue
		}
		for _, p := range r.plans {
			for i, limit := range limits(p) {
				policies = append(policies, fields.NewPolicy(p.Names[i], limit))
			}
		}
	}
	return fields.NewSet(h.settings.Headers, h.settings.Status, policies...)
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

// limit decides about the request. It tells the client in w's header, or if the request is refused in the whole response.
// What the request owes when it passes is nil for most.
func (h *Handler) limit(w http.ResponseWriter, r *http.Request) (owed *due, refused bool, err error) {
	var start time.Duration
	timed := h.timed()
	if timed {
		start = monotonic()
	}
	q := newQuestion(r)
	defer q.release()
	q.fields = h.fields
	q.openRecord()
	if err := h.ask(q); err != nil {
		return nil, true, h.turnAway(w, q, err)
	}
	if len(q.asked) == 0 {
		return nil, false, nil
	}
	denied := h.decide(r.Context(), q)
	by, limit, refused := q.binding()
	if refused && h.bans {
		h.punishRefusals(q)
		by, limit, _ = q.binding()
	}
	passed := !denied && !refused
	q.remember(passed)
	h.tell(w, q)
	if timed {
		h.took.Store(int64(monotonic() - start))
	}
	h.count(q, passed, time.Duration(h.took.Load()))
	switch {
	case denied:
		return nil, true, h.deny(w, q)
	case refused:
		return nil, true, h.refuse(w, q, by, limit)
	case h.later:
		return h.owe(q), false, nil
	}
	return nil, false, nil
}

// timed reports whether this decision is measured. Reading the clock twice costs as much as deciding in this process does, so of
// such decisions one in eight is measured and stands for those until the next. A round trip to Redis is always measured.
func (h *Handler) timed() bool { return h.redis != nil || rand.Uint32()%8 == 0 }

// ask finds the rules that apply to the request and makes their charges.
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
			q.charge(rule, plan, key, cost, i > 0)
		}
	}
	return nil
}

// meets returns the plan, and the keys under which the request meets the rule; none if the rule does not limit it.
func (q *question) meets(r *rule, met *keys) (*plan, error) {
	limits, exempt, err := r.about(q.r)
	if exempt {
		r.metrics.Count(telemetry.Exempt, 0)
	}
	if !limits || err != nil {
		return nil, err
	}
	p := r.plans[r.PlanOf(q.r)]
	if len(p.Limits) == 0 { // unlimited
		r.metrics.Count(telemetry.Exempt, 0)
		return nil, nil
	}
	return p, q.expand(r.Key, r.Fallback, met)
}

// about reports whether the rule limits the request, or would if it were not exempt.
func (r *rule) about(req *http.Request) (limits, exempt bool, err error) {
	matches, err := r.Match.AnyMatchWithError(req)
	if err != nil || !matches || len(r.Exempt) == 0 {
		return matches, false, err
	}
	exempt, err = r.Exempt.AnyMatchWithError(req)
	return !exempt, exempt, err
}

// cost is what the request takes from the rule's counters.
func (h *Handler) cost(rule *rule, r *http.Request) int64 {
	units, ok := rule.Cost.Units(r)
	if !ok {
		h.badCost(rule, "a cost is not a whole number of at least 0 and counts as 1; this is logged once")
	}
	return units
}

func (h *Handler) badCost(rule *rule, warning string) {
	rule.metrics.CountBadCost()
	if !rule.badCost.Swap(true) {
		h.logger.Warn(warning, zap.String("zone", rule.Zone))
	}
}

// tell writes the response fields of the enforced rules that applied.
func (h *Handler) tell(w http.ResponseWriter, q *question) {
	for n := range q.asked {
		a := &q.asked[n]
		if !a.enforced {
			continue
		}
		a.retract(w.Header(), q.record)
		for i, limit := range a.plan.Limits {
			told := fields.Applied{Policy: a.plan.policy + i}
			if o := a.told(i); o.Asked() {
				told.Outcome = o
			}
			if !a.also || !q.tighten(told, limit) {
				q.applied = append(q.applied, told)
			}
		}
	}
	var now time.Time
	if q.fields.NeedsNow() {
		now = time.Now()
	}
	q.fields.Write(w.Header(), &q.record.scratch, q.applied, now)
}

// count adds the decision to the metrics of the rules that were asked, and reports what dry runs would have refused.
func (h *Handler) count(q *question, passed bool, took time.Duration) {
	for n := range q.asked {
		if q.asked[n].also {
			continue // counted with the rule's first key
		}
		a, limit, refused := q.worst(n)
		refused = refused || a.denied
		if !refused && !a.outcome(0).Asked() && !a.allowed {
			continue // nobody knows what it would have said
		}
		result := resultOf(!refused, passed && a.delay() > 0, a.enforced)
		a.metrics.Count(result, took)
		if result == telemetry.RefusedDryRun {
			h.report(q, a, a.outcome(limit).Retry)
		}
	}
}

// refuse answers the client, with the wait of the rule's limit that binds.
func (h *Handler) refuse(w http.ResponseWriter, q *question, by *asked, limit int) error {
	wait := by.outcome(limit).Retry
	if wait == algorithms.Unknown && by.rule.RetryAfter > 0 {
		wait = by.rule.RetryAfter
	}
	wait = h.jitter(q.waitForAll(wait))
	q.record.refusal = &refusal{zone: by.rule.Zone, policy: by.plan.Names[max(limit, 0)], wait: wait}
	h.report(q, by, wait)
	reason, problem := "rate limit exceeded", q.fields.Problem
	if by.banned() {
		reason, problem = "banned for exceeding a rate limit", q.fields.AbnormalUsage
	}
	return h.answer(w, q, wait, h.settings.Status, reason, problem(q.applied))
}

// storeBack is when a client may expect the shared store to be back: it is looked for more often than that.
const storeBack = 2 * time.Second

// deny answers a client whose request cannot be counted. It has done nothing wrong, so ban tools hear nothing of it.
func (h *Handler) deny(w http.ResponseWriter, q *question) error {
	const status = http.StatusServiceUnavailable
	return h.answer(w, q, h.jitter(storeBack), status, "rate limit cannot be counted: the shared store is down", fields.ReducedCapacity(status))
}

// turnAway answers a request that cannot be counted as it is. A matcher that failed is the site's to answer, as for every other handler.
func (h *Handler) turnAway(w http.ResponseWriter, q *question, err error) error {
	var why caddyhttp.HandlerError
	if !errors.As(err, &why) || !errors.Is(err, errManyValues) && !errors.Is(err, caddyfile.ErrEarlyData) {
		fields.WriteRefusal(w.Header(), &q.record.scratch, algorithms.Unknown)
		return err
	}
	return h.answer(w, q, algorithms.Unknown, why.StatusCode, why.Err.Error(), fields.Malformed(why.StatusCode, why.Err.Error()))
}

// answer writes the response, or returns the error that lets an error route write it.
func (h *Handler) answer(w http.ResponseWriter, q *question, wait time.Duration, status int, reason string, problem []byte) error {
	fields.WriteRefusal(w.Header(), &q.record.scratch, wait)
	if err := h.asError(q.r, status, reason); err != nil {
		return err
	}
	fields.WriteProblem(w.Header(), &q.record.scratch)
	w = unaltered(w)
	w.WriteHeader(status)
	_, err := w.Write(problem)
	return err
}

// jitter lengthens a wait by a random share, so that the refused do not all return at once. What is no number stays so.
func (h *Handler) jitter(wait time.Duration) time.Duration {
	if h.settings.Jitter == 0 || wait == algorithms.Never || wait < 0 {
		return wait
	}
	more := rand.Float64() * h.settings.Jitter * float64(wait)
	return wait + time.Duration(min(more, float64(algorithms.MaxWindow)))
}

func (h *Handler) report(q *question, a *asked, wait time.Duration) {
	key := a.key
	if h.settings.LogKey {
		key = strings.Clone(key) // subscribers may keep it
	}
	h.reporter.Refused(q.r, telemetry.Refusal{
		Zone: a.rule.Zone, Key: key, Text: caddyfile.Text, Wait: wait, DryRun: !a.enforced, Now: monotonic(),
	})
}

// asError returns the error that lets an error route answer, or nil when this handler is to answer itself: always
// within an error route, where a returned error would lose to the one that led there.
func (h *Handler) asError(r *http.Request, status int, reason string) error {
	if _, within := r.Context().Value(caddyhttp.ErrorCtxKey).(error); within || h.settings.Response == caddyfile.ResponseProblem {
		return nil
	}
	server, _ := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if h.settings.Response == caddyfile.ResponseAuto && (server == nil || server.Errors == nil) {
		return nil // before making the error, which costs more than the decision
	}
	err := caddyhttp.Error(status, errors.New(reason))
	if h.settings.Response == caddyfile.ResponseError || answered(server.Errors.Routes, server.Errors.WithError(r, err)) {
		return err
	}
	return nil
}

// answered reports whether one of the error routes is about the request and its error. It looks into subroutes, because that is
// where `handle_errors 404` keeps its status; a matcher that fails is left to fail in the route.
func answered(routes caddyhttp.RouteList, r *http.Request) bool {
	for _, route := range routes {
		if matches, err := route.MatcherSets.AnyMatchWithError(r); !matches && err == nil {
			continue
		}
		for _, handler := range route.Handlers {
			sub, ok := handler.(*caddyhttp.Subroute)
			if !ok || answered(sub.Routes, r) {
				return true
			}
		}
	}
	return false
}

var processStart = time.Now()

// monotonic is the time since the process started; it never steps.
func monotonic() time.Duration { return time.Since(processStart) }

var (
	_ caddy.Provisioner           = (*Handler)(nil)
	_ caddy.CleanerUpper          = (*Handler)(nil)
	_ caddyhttp.MiddlewareHandler = (*Handler)(nil)
)
