package sluice

// A rule: a compiled zone of a handler, with what it holds while the config lives.

import (
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
