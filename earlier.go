package sluice

// Two handlers on one request: a site-wide one, say, and one of a route behind it, perhaps on the same zone. Each charges the
// request for itself, when it comes to it. So the first one's decision is no longer true when the second has made its own, and a
// wait that either tells must be long enough for both, since a retry asks both again.

import (
	"hash/maphash"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/fields"
)

// included reports whether the request was made by Caddy's templates (httpInclude) for a page of this server. It is a part of the
// request for that page, which has been charged. It comes without the client's address, so that as a request of its own all
// clients would share its counters. A client cannot pass for one: what came over a connection has a server in its context.
func included(r *http.Request) bool {
	return r.RemoteAddr == includeAddr && r.Header.Get("Caddy-Templates-Include") != "" && r.Context().Value(http.ServerContextKey) == nil
}

// includeAddr is what Caddy writes in place of the client's address. It is compared first, since it costs least.
const includeAddr = "127.0.0.1:10000"

// severalRules reports whether more than one rule of the config charges the zone, so that one request may meet it twice.
func (z *zone) severalRules() bool { return z.rules > 1 }

// toldBefore reports whether the client was told what another rule of the zone had left.
func (q *question) toldBefore(z *zone) bool {
	return z.severalRules() && q.record.tightest(z.first.Zone) != nil
}

// waitForAll lengthens the wait that a refused client is told to what the rules of earlier handlers, which have let this request
// pass, need to let the next one pass.
func (q *question) waitForAll(wait time.Duration, counters *counting.Counters) time.Duration {
	if wait <= 0 || wait == algorithms.Never { // nobody knows when, or it is of no use
		return wait
	}
	for i := range q.record.answers[:q.earlier] {
		a := &q.record.answers[i]
		if !a.enforced || !a.ok || !a.asked() || a.remaining >= a.cost || a.limit.Algorithm == algorithms.Concurrency {
			continue
		}
		if again := a.again(counters); again != algorithms.Never {
			wait = max(wait, again)
		}
	}
	return wait
}

// again is how long the rule makes a client wait that it has let pass. Of more than one unit that is missing, the store is asked.
func (a *answer) again(counters *counting.Counters) time.Duration {
	if a.cost-a.remaining > 1 && a.key != nil {
		if o, err := counters.Look(a.rule.entry.Place, a.limit, *a.key, a.cost); err == nil {
			return o.Retry
		}
	}
	return a.next
}

// retract takes back what the client was told before.
func (a *asked) retract(h http.Header, rec *record) {
	if a.again {
		fields.Retract(h, &rec.scratch, a.plan.Names...)
	}
}

// held is, for each limit that a rule is about to ask, what the request has already taken from its counter under earlier rules, and
// will take under later ones; nil if that is nothing. Earlier rules learn what the request meets behind them.
func (q *question) held(by *asked, cost int64) (units []int64) {
	if !by.rule.zone.severalRules() && by.rule.ahead.Load() == nil {
		return nil
	}
	units = make([]int64, len(by.plan.Limits))
	for i, limit := range by.plan.Limits {
		if limit.Algorithm != algorithms.Concurrency {
			units[i] = q.heldEarlier(by, limit, cost) + by.rule.aheadOf(q.r, limit)
		}
	}
	return units
}

func (q *question) heldEarlier(by *asked, limit *algorithms.Limit, cost int64) (units int64) {
	if q.record == nil {
		return 0
	}
	for i := range q.record.answers {
		a := &q.record.answers[i]
		if !a.taken || a.limit.Space != limit.Space || *a.key != by.key {
			continue
		}
		if by.enforced && !by.rule.Cost.Dynamic() {
			a.rule.learn(by.rule, limit.Space, cost, kindOf(q.r))
		}
		units += a.cost
	}
	return units
}

// ahead is what a rule of a later handler, at a fixed cost, was seen to take from the same counter on the same request. Only
// requests tell, since which handlers a request meets depends on routes. A refused request never gets to those handlers, and must
// yet be told a wait that is long enough for them too. It is known of requests of the same kind: others may go elsewhere.
type ahead struct {
	rule  *rule
	space algorithms.Space
	units int64
	kinds kinds
}

// kinds remembers for about so many kinds of requests, by method, host and path, that a request met the later rule. Each has one
// place, by its hash: what clients ask for costs no memory, and forgets only what has the same place.
type kinds [1024]atomic.Uint64

var kindSeed = maphash.MakeSeed()

// kindOf is the hash of a request's kind; never 0, which is an empty place.
func kindOf(r *http.Request) uint64 {
	return maphash.Comparable(kindSeed, [...]string{r.Method, r.Host, r.URL.Path}) | 1<<63
}

func (k *kinds) place(kind uint64) *atomic.Uint64 { return &k[kind%uint64(len(k))] }

// learn remembers what was met. Of two rules that learn at once one may be lost until the next request.
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
