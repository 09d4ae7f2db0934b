// Rules: what a zone of a config compiles to, and what the handler asks of it.

package caddyfile

import (
	"fmt"
	"iter"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Rule is one compiled zone of a handler.
type Rule struct {
	Zone string
	// Plans are the limits to choose from: one, or with tiers one for each value in the order of the file, the default last.
	Plans  []*Plan
	Match  caddyhttp.MatcherSets // no sets: every request
	Exempt caddyhttp.MatcherSets // no sets: no request
	Key    *Key
	// Fallback is the key when Key expands to nothing; nil: the rule then does not limit the request.
	Fallback *Key
	Cost     Cost
	// Charge is the total that a request costs, known after its response, of which Cost was reserved; nil: Cost is all.
	Charge *Cost
	// Count says which responses count; nil: all.
	Count *Count
	// Ban is what refusals and counted failures earn; nil: nothing.
	Ban *Ban
	// RetryAfter is what a client is told that was refused for want of a lease, which no arithmetic knows; 0: nothing.
	RetryAfter time.Duration
	DryRun     bool
	// Store is where the rule counts, as written; see [Rule.Resolve].
	Store Store
	// OnStoreError is what is done when the shared store does not answer.
	OnStoreError OnStoreError
	// IPv4Prefix and IPv6Prefix are by how many bits addresses in the key are told apart.
	IPv4Prefix, IPv6Prefix int
	// Events: written as max_events and window, as in caddy-ratelimit.
	Events bool
	// Place is where the zone is written, such as "Caddyfile:12", or "" in JSON.
	Place string

	pending bool // at adapt time: a setting is not known before the load
}

// Plan is what the clients of one tier may have.
type Plan struct {
	Tier string // "" without tiers
	// Limits all hold; none: unlimited. Units in flight come last.
	Limits []*algorithms.Limit
	// Names on the wire, one per limit: the zone, with tiers zone.pro; with several limits zone.1m, zone.1h.
	Names []string
}

// AllLimits are those of every plan.
func (r *Rule) AllLimits() iter.Seq[*algorithms.Limit] {
	return func(yield func(*algorithms.Limit) bool) {
		for _, plan := range r.Plans {
			for _, limit := range plan.Limits {
				if !yield(limit) {
					return
				}
			}
		}
	}
}

// AllNames are those of every plan.
func (r *Rule) AllNames() iter.Seq[string] {
	return func(yield func(string) bool) {
		for _, plan := range r.Plans {
			for _, name := range plan.Names {
				if !yield(name) {
					return
				}
			}
		}
	}
}

// PlanOf returns the index of the plan that holds for the request.
func (r *Rule) PlanOf(*http.Request) int { return 0 }

// Enforces reports whether the key is one of those that the rule refuses; the others are as in a dry run. The answer is
// the same on every instance, and a key that is refused stays so when the share grows.
func (r *Rule) Enforces(string) bool { return !r.DryRun }

// Count says which responses count.
type Count struct{}

// Counts reports whether a response of that status counts.
func (c *Count) Counts(status int) bool { return true }

// Ban is what a client gets that is refused too often. Its limits are exact and count in spaces of their own.
type Ban struct {
	// Durations of the first ban and of those that follow it; the last one holds for all further.
	Durations []time.Duration
	// Strikes counts what earns a ban, on the instance that refuses: the last unit of its quota is the ban.
	Strikes *algorithms.Limit
	// Ladder counts the bans of a key for twice the longest duration; nil with one duration.
	Ladder *algorithms.Limit
	// Bans holds them, see [algorithms.Ban].
	Bans *algorithms.Limit
}

// Settings describes what every handler that uses the zone's name must agree on: rules of one zone are in conflict
// when their Settings differ.
func (r *Rule) Settings() string {
	var s strings.Builder
	for _, plan := range r.Plans {
		for _, l := range plan.Limits {
			fmt.Fprintf(&s, "%v %d/%s, ", l.Algorithm, l.Quota, shortWindow(l.Window))
			if l.Algorithm.Bucket() {
				fmt.Fprintf(&s, "burst %d, ", displayBurst(l.Policy))
			}
		}
	}
	fmt.Fprintf(&s, "max_keys %d, store %v", r.Plans[0].Limits[0].MaxKeys, r.Store)
	if r.Store != StoreLocal {
		fmt.Fprintf(&s, ", on_store_error %v", r.OnStoreError)
	}
	return s.String()
}

// name names the plan's limits for clients.
func (p *Plan) name(zone string) {
	p.Names = p.Names[:0]
	for _, l := range p.Limits {
		name := zone
		if len(p.Limits) > 1 {
			name += "." + shortWindow(l.Window)
		}
		p.Names = append(p.Names, name)
	}
}

// shortWindow writes a window with the largest unit that it is a whole number of, in characters that a policy's name may hold.
func shortWindow(w time.Duration) string {
	units := [...]struct {
		unit time.Duration
		name string
	}{{24 * time.Hour, "d"}, {time.Hour, "h"}, {time.Minute, "m"}, {time.Second, "s"}, {time.Millisecond, "ms"}}
	for _, u := range units {
		if w%u.unit == 0 {
			return strconv.FormatInt(int64(w/u.unit), 10) + u.name
		}
	}
	return strconv.FormatInt(w.Microseconds(), 10) + "us"
}

// displayBurst is the burst in the operator's words.
func displayBurst(p algorithms.Policy) int64 {
	if p.Algorithm == algorithms.LeakyBucket {
		return p.Burst - 1
	}
	return p.Burst
}
