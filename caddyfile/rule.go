// Rules: what a zone of a config compiles to, and what the handler asks of it.

package caddyfile

import (
	"fmt"
	"iter"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Rule is one compiled zone of a handler.
type Rule struct {
	Zone string
	// Plans are the limits to choose from: one, or with tiers one for each value in the order of
	// the file, the default last.
	Plans  []*Plan
	Match  caddyhttp.MatcherSets // no sets: every request
	Exempt caddyhttp.MatcherSets // no sets: no request
	Key    *Key
	// Fallback is the key when Key expands to nothing; nil: the rule then does not limit the
	// request.
	Fallback *Key
	Cost     Cost
	// Charge is the total that a request costs, known after its response, of which Cost was
	// reserved; nil: Cost is all.
	Charge *Cost
	// MaxCharge is the most that Charge may say; more is a mistake that would lock the client out.
	MaxCharge int64
	// Count says which responses count; nil: all.
	Count *Count
	// Ban is what refusals and counted failures earn; nil: nothing.
	Ban *Ban
	// RetryAfter is what a client is told that was refused for want of a lease, which no arithmetic
	// knows; 0: nothing.
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

	maxKeys int
	keyText string // as written
	tier    *part  // names the plan; nil without tiers
	share   *share // of the keys that are refused; nil: all
	pending bool   // at adapt time: a setting is not known before the load
}

// Plan is what the clients of one tier may have.
type Plan struct {
	Tier string // "" without tiers
	// Limits all hold; none: unlimited. Units in flight come last.
	Limits []*algorithms.Limit
	// Names on the wire, one per limit: the zone, with tiers zone.pro; with several limits zone.1m,
	// zone.1h, zone.concurrent.
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

// Settings describes what every handler that uses the zone's name must agree on: rules of one zone
// are in conflict when their Settings differ. What names a plan is each rule's own, as the key is.
func (r *Rule) Settings() string {
	var s strings.Builder
	for _, plan := range r.Plans {
		if plan.Tier != "" {
			fmt.Fprintf(&s, "tier %s ", plan.Tier)
		}
		if len(plan.Limits) == 0 {
			s.WriteString("unlimited, ")
		}
		for _, l := range plan.Limits {
			s.WriteString(DescribeLimit(l.Policy) + ", ")
		}
	}
	fmt.Fprintf(&s, "max_keys %d, store %v", r.maxKeys, r.Store)
	if r.Store != StoreLocal {
		fmt.Fprintf(&s, ", on_store_error %v", r.OnStoreError)
	}
	return s.String()
}

// Difference returns what two rules' [Rule.Settings] do not have in common.
func Difference(a, b string) (onlyA, onlyB string) {
	x, y := strings.Split(a, ", "), strings.Split(b, ", ")
	only := func(list, other []string) string {
		list = slices.DeleteFunc(slices.Clone(list), func(s string) bool { return slices.Contains(other, s) })
		if len(list) == 0 {
			return "no more"
		}
		return strings.Join(list, ", ")
	}
	onlyA, onlyB = only(x, y), only(y, x)
	if onlyA == onlyB { // the same in another order
		return a, b
	}
	return onlyA, onlyB
}

// KeyText is the key as it is written.
func (r *Rule) KeyText() string { return r.keyText }

// SameKey reports whether two rules tell clients apart by the same.
func (r *Rule) SameKey(other *Rule) bool { return reflect.DeepEqual(r.Key, other.Key) }

// DescribeLimit is the limit in the operator's words.
func DescribeLimit(p algorithms.Policy) string {
	text := fmt.Sprintf("%v %d/%s", p.Algorithm, p.Quota, shortWindow(p.Window))
	switch {
	case p.Algorithm == algorithms.Concurrency && p.Window == algorithms.MaxWindow:
		return fmt.Sprintf("concurrency %d", p.Quota)
	case p.Algorithm == algorithms.Concurrency:
		return fmt.Sprintf("concurrency %d lease %s", p.Quota, shortWindow(p.Window))
	case p.MaxWait > 0:
		return fmt.Sprintf("%s, queue %d delay %d max_wait %v", text, p.Burst-1, p.Burst-1-p.Queue, p.MaxWait)
	case p.Queue > 0:
		return fmt.Sprintf("%s, queue %d delay %d", text, p.Burst-1, p.Burst-1-p.Queue)
	case p.Algorithm == algorithms.LeakyBucket:
		return fmt.Sprintf("%s, burst %d", text, p.Burst-1)
	case p.Algorithm == algorithms.TokenBucket:
		return fmt.Sprintf("%s, burst %d", text, p.Burst)
	}
	return text
}

// name names the plan's limits for clients.
func (p *Plan) name(zone string) {
	if p.Tier != "" {
		zone += "." + p.Tier
	}
	for _, l := range p.Limits {
		name := zone
		switch {
		case len(p.Limits) == 1:
		case l.Algorithm == algorithms.Concurrency:
			name += ".concurrent"
		default:
			name += "." + shortWindow(l.Window)
		}
		p.Names = append(p.Names, name)
	}
}

// shortWindow writes a window with the largest unit that it is a whole number of, in characters
// that a policy's name may hold.
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
