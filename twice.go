package sluice

// Two handlers on one request: a site-wide one, say, and one of a route behind it, perhaps on the same zone. Each charges the
// request for itself, when it comes to it. So the first one's decision is no longer true when the second has made its own, and a
// wait that either tells must be long enough for both, since a retry asks both again.

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/fields"
)

// severalRules reports whether more than one rule of the config charges the zone, so that one request may meet it twice.
func (z *zone) severalRules() bool { return z.rules > 1 }

// toldBefore reports whether the client was told what another rule of the zone had left.
func (q *question) toldBefore(z *zone) bool {
	return z.severalRules() && q.record.tightest(z.first.Zone) != nil
}

// waitForAll lengthens the wait that a refused client is told to what the rules of earlier handlers, which have let this request
// pass, need to let the next one pass.
func (q *question) waitForAll(wait time.Duration) time.Duration {
	if wait <= 0 || wait == algorithms.Never { // nobody knows when, or it is of no use
		return wait
	}
	for i := range q.record.answers[:q.earlier] {
		a := &q.record.answers[i]
		if o := &a.outcome; !a.enforced || !o.OK || !o.Asked() || o.Remaining >= a.cost || a.limit.Algorithm == algorithms.Concurrency {
			continue
		}
		if again := a.again(); again != algorithms.Never {
			wait = max(wait, again)
		}
	}
	return wait
}

// again is how long the rule makes a client wait that it has let pass. Of more than one unit that is missing, the store is asked.
func (a *answer) again() time.Duration {
	if a.cost-a.outcome.Remaining > 1 {
		store := algorithms.Store(local)
		if a.rule.redis != nil {
			store = a.rule.redis
		}
		var out [1]algorithms.Outcome
		look := [1]algorithms.Charge{{Key: a.key, Limit: a.limit, Cost: a.cost, Peek: true}}
		if err := store.Apply(context.Background(), look[:], out[:]); err == nil {
			return out[0].Retry
		}
	}
	return a.outcome.Next
}

// retract takes back what the client was told before.
func (a *asked) retract(h http.Header, rec *record) {
	if a.again {
		fields.Retract(h, &rec.scratch, a.plan.Names...)
	}
}

// taken is what a rule took from a counter.
type taken struct {
	key   string
	units int64
}

// taken is what later rules of the zone need to know of a charge that was committed; nil if there are none.
func (a *asked) taken(limit int) *taken {
	if !a.rule.zone.severalRules() || !a.outcome(limit).OK {
		return nil
	}
	return &taken{key: strings.Clone(a.key), units: a.charge(limit).Cost}
}

// held is what the request has already taken, under earlier rules, from the counter that a rule is about to charge. Those rules
// learn what the request meets behind them.
func (rec *record) held(req *http.Request, by *asked, limit *algorithms.Limit, cost int64) (units int64) {
	if rec == nil || !by.rule.zone.severalRules() {
		return 0
	}
	for i := range rec.answers {
		a := &rec.answers[i]
		if a.taken == nil || a.limit.Space != limit.Space || a.taken.key != by.key {
			continue
		}
		if by.enforced && !by.rule.Cost.Dynamic() {
			a.rule.learn(ahead{rule: by.rule, space: limit.Space, units: cost, on: kindOf(req)})
		}
		units += a.taken.units
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
	on    kind
}

// kind is what routes tell most requests apart by.
type kind struct{ method, host, path string }

func kindOf(r *http.Request) kind { return kind{r.Method, r.Host, r.URL.Path} }

// maxAhead bounds what clients can teach a rule by asking for ever other paths.
const maxAhead = 64

// learn remembers it. Of two rules that learn at once one may be lost until the next request.
func (r *rule) learn(a ahead) {
	var known []ahead
	if list := r.ahead.Load(); list != nil {
		known = *list
	}
	if !slices.Contains(known, a) {
		if len(known) >= maxAhead {
			known = known[1:] // the oldest
		}
		known = append(slices.Clip(known), a)
		r.ahead.Store(&known)
	}
}

// aheadOf is what later rules will take of the limit's counter from a request like this one.
func (r *rule) aheadOf(req *http.Request, limit *algorithms.Limit) (units int64) {
	list := r.ahead.Load()
	if list == nil {
		return 0
	}
	for _, a := range *list {
		if a.space != limit.Space || a.on != kindOf(req) {
			continue
		}
		if applies, _, err := a.rule.about(req); applies && err == nil {
			units += a.units
		}
	}
	return units
}
