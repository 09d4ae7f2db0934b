package sluice

// Two handlers on one request: a site-wide one, say, and one of a route behind it, perhaps on the
// same zone. Each charges the request for itself, when it comes to it. So the first one's decision
// is no longer true when the second has made its own, and a wait that either tells must be long
// enough for both, since a retry asks both again.

import (
	"net/http"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/counting"
)

// included reports whether the request was made by Caddy's templates (httpInclude) for a page of
// this server. It is a part of the request for that page, which has been charged. It comes without
// the client's address, so that as a request of its own all clients would share its counters. A
// client cannot pass for one: what came over a connection has a server in its context.
func included(r *http.Request) bool {
	return r.RemoteAddr == includeAddr && r.Header.Get("Caddy-Templates-Include") != "" && r.Context().Value(http.ServerContextKey) == nil
}

// includeAddr is what Caddy writes in place of the client's address. It is compared first, since it
// costs least.
const includeAddr = "127.0.0.1:10000"

// toldBefore reports whether the client was told what another rule of the zone had left.
func (rec *record) toldBefore(z *zone) bool {
	return z.severalRules() && rec.tightest(z.first.Zone) != nil
}

// again is how long the rule makes a client wait that it has let pass. Of more than one unit that
// is missing, the store is asked.
func (a *answer) again(counters *counting.Counters) time.Duration {
	if a.cost-a.remaining > 1 && a.key != nil {
		if o, err := counters.Look(a.rule.entry.Place, a.limit, *a.key, a.cost); err == nil {
			return o.Retry
		}
	}
	return a.next
}

// waitForAll lengthens the wait that a refused client is told to what the rules of earlier
// handlers, which gave the first so many answers and have let this request pass, need to let the
// next one pass.
func (rec *record) waitForAll(wait time.Duration, earlier int, counters *counting.Counters) time.Duration {
	if wait <= 0 || wait == algorithms.Never { // nobody knows when, or it is of no use
		return wait
	}
	for i := range rec.answers[:earlier] {
		a := &rec.answers[i]
		if !a.enforced || !a.ok || !a.asked() || a.remaining >= a.cost || a.limit.Algorithm == algorithms.Concurrency {
			continue
		}
		if again := a.again(counters); again != algorithms.Never {
			wait = max(wait, again)
		}
	}
	return wait
}

// meeting is a rule that a request is about to be asked about: under which key, by which limits and
// at what cost.
type meeting struct {
	rule     *rule
	limits   []*algorithms.Limit
	key      string
	cost     int64
	enforced bool
}

// held is, for each limit that a rule is about to ask, what the request has already taken from its
// counter under earlier rules, and will take under later ones; nil if that is nothing. Earlier
// rules learn what the request meets behind them.
func (rec *record) held(req *http.Request, by *meeting) (units []int64) {
	if !by.rule.zone.severalRules() && by.rule.ahead.Load() == nil {
		return nil
	}
	units = make([]int64, len(by.limits))
	for i, limit := range by.limits {
		if limit.Algorithm != algorithms.Concurrency {
			units[i] = rec.heldOf(req, by, limit) + by.rule.aheadOf(req, limit)
		}
	}
	return units
}

func (rec *record) heldOf(req *http.Request, by *meeting, limit *algorithms.Limit) (units int64) {
	if rec == nil {
		return 0
	}
	for i := range rec.answers {
		a := &rec.answers[i]
		if !a.taken || a.limit.Space != limit.Space || *a.key != by.key {
			continue
		}
		if by.enforced && !by.rule.Cost.Dynamic() {
			a.rule.learn(by.rule, limit.Space, by.cost, kindOf(req))
		}
		units += a.cost
	}
	return units
}
