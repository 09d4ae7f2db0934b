package sluice

// A rule: a compiled zone of a handler, with what it holds while the config lives.

import (
	"hash/maphash"
	"net/http"
	"slices"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/telemetry"
)

type rule struct {
	*caddyfile.Rule
	zone    *zone
	order   int            // in the handler's file
	entry   counting.Entry // what it asks of every request
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

// newRule joins a compiled rule to what it counts in.
func newRule(compiled *caddyfile.Rule, zone *zone, order int) *rule {
	r := &rule{Rule: compiled, zone: zone, order: order}
	if compiled.Store == caddyfile.StoreRedis {
		r.entry.Place = counting.Shared
	}
	switch compiled.OnStoreError {
	case caddyfile.OnStoreErrorAllow:
		r.entry.IfDown = counting.Allow
	case caddyfile.OnStoreErrorDeny:
		r.entry.IfDown = counting.Deny
	}
	switch {
	case compiled.Count != nil:
		r.entry.Reserves = counting.ByStatus
	case compiled.Charge != nil:
		r.entry.Reserves = counting.ByCharge
	}
	r.entry.Keeps = r.entry.Reserves != counting.ForGood
	for limit := range compiled.AllLimits() {
		if limit.Queue > 0 || limit.Algorithm == algorithms.Concurrency {
			r.entry.Keeps = true
		}
	}
	if b := compiled.Ban; b != nil {
		r.entry.Ban = &counting.Ban{
			Durations: b.Durations, Strikes: b.Strikes, Struck: zone.strikes, Ladder: b.Ladder, Bans: b.Bans, Pending: b.Pending,
		}
	}
	return r
}

// shared reports whether the rule counts in the shared store.
func (r *rule) shared() bool { return r.entry.Place == counting.Shared }

// openMetrics begins to count the rule's decisions by who makes them.
func (r *rule) openMetrics(registry *prometheus.Registry) (err error) {
	source := telemetry.Source{
		Zone: r.Zone, Store: "local", Limits: slices.Collect(r.AllLimits()), IPv4Prefix: r.IPv4Prefix, IPv6Prefix: r.IPv6Prefix,
		Keys: r.zone.counters.Keys, Evictions: r.zone.counters.Evictions,
	}
	if r.shared() {
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

// countedBy returns the metrics of the decisions that someone makes.
func (r *rule) countedBy(by counting.By) *telemetry.Zone {
	if by.StoreFailed() {
		return r.standIn
	}
	return r.metrics
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

// ahead is what a rule of a later handler, at a fixed cost, was seen to take from the same counter
// on the same request. Only requests tell, since which handlers a request meets depends on routes.
// A refused request never gets to those handlers, and must yet be told a wait that is long enough
// for them too. It is known of requests of the same kind: others may go elsewhere.
type ahead struct {
	rule  *rule
	space algorithms.Space
	units int64
	kinds kinds
}

// kinds remembers for about so many kinds of requests, by method, host and path, that a request met
// the later rule. Each has one place, by its hash: what clients ask for costs no memory, and
// forgets only what has the same place.
type kinds [1024]atomic.Uint64

var kindSeed = maphash.MakeSeed()

// kindOf is the hash of a request's kind; never 0, which is an empty place.
func kindOf(r *http.Request) uint64 {
	return maphash.Comparable(kindSeed, [...]string{r.Method, r.Host, r.URL.Path}) | 1<<63
}

func (k *kinds) place(kind uint64) *atomic.Uint64 { return &k[kind%uint64(len(k))] }

// learn remembers what was met. Of two rules that learn at once one may be lost until the next
// request.
func (r *rule) learn(by *rule, space algorithms.Space, units int64, kind uint64) {
	var known []*ahead
	if list := r.ahead.Load(); list != nil {
		known = *list
	}
	i := slices.IndexFunc(known, func(a *ahead) bool { return a.rule == by && a.space == space && a.units == units })
	if i < 0 {
		i = len(known)
		known = append(slices.Clip(known), &ahead{rule: by, space: space, units: units})
		r.ahead.Store(&known)
	}
	if place := known[i].kinds.place(kind); place.Load() != kind {
		place.Store(kind)
	}
}

// aheadOf is what later rules will take of the limit's counter from a request like this one.
func (r *rule) aheadOf(req *http.Request, limit *algorithms.Limit) (units int64) {
	list := r.ahead.Load()
	if list == nil {
		return 0
	}
	kind := kindOf(req)
	for _, a := range *list {
		if a.space != limit.Space || a.kinds.place(kind).Load() != kind {
			continue
		}
		if applies, _, err := a.rule.about(req); applies && err == nil {
			units += a.units
		}
	}
	return units
}
