package sluice

// What the handlers of one request have decided about it, as long as the request and its response
// live: for placeholders, and for later handlers.

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/fields"
	"github.com/caddy-sluice/sluice/telemetry"
)

// recordVar is the request variable that holds the record.
const recordVar = "rate_limit"

// record is what the handlers of one request have decided about it.
type record struct {
	answers []answer
	first   [1]answer // backs answers: most requests meet one limit
	refusal *refusal  // nil: not refused
	scratch fields.Scratch
}

// answer is what one limit of a rule said. A record is allocated for each request, so it holds no
// more of the outcome than is asked for.
type answer struct {
	rule        *rule
	limit       *algorithms.Limit
	key         *string // nil if nobody will ask about it again
	cost        int64
	remaining   int64 // −1: the limit was not asked
	next, delay time.Duration
	ok          bool
	enforced    bool
	// taken: what it cost is still taken, and the zone has other rules, which may meet the same
	// counter later on this request.
	taken bool
}

func (a *answer) asked() bool { return a.remaining >= 0 }

// refusal is why a request was refused.
type refusal struct {
	zone, policy string
	wait         time.Duration
}

// refusedRecord is the record of a request that is refused by the first handler that it meets, with
// all that the response needs.
type refusedRecord struct {
	record
	refusal refusal
	values  fields.Values
}

// newRecord makes the request's record, and its placeholders; with room for all that the response
// needs if it is known to be refused. It has no placeholders where the config says that nothing
// reads them.
func newRecord(r *http.Request, vars map[string]any, refused, placeholders bool) (rec *record, room *refusal) {
	if refused {
		all := new(refusedRecord)
		all.scratch.Lend(&all.values)
		rec, room = &all.record, &all.refusal
	} else {
		rec = new(record)
	}
	rec.answers = rec.first[:0]
	if vars != nil { // a request that did not come through Caddy's server has none
		vars[recordVar] = rec
	}
	if !placeholders {
		return rec, room
	}
	if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Map(rec.placeholder)
	}
	return rec, room
}

// knows reports whether the rule has decided about the request before.
func (rec *record) knows(r *rule) bool {
	if rec == nil {
		return false
	}
	for i := range rec.answers {
		if rec.answers[i].rule == r {
			return true
		}
	}
	return false
}

// placeholder serves {http.rate_limit.…}. What has no value is empty and not unknown: header_up
// sends the unknown as it is written, braces included.
func (rec *record) placeholder(name string) (any, bool) {
	name, ok := strings.CutPrefix(name, "http.rate_limit.")
	if !ok {
		return nil, false
	}
	dot := strings.LastIndexByte(name, '.')
	if dot < 0 {
		return "", true
	}
	zone, what := name[:dot], name[dot+1:]
	if zone == "exceeded" && rec.refusal != nil {
		if value, ok := rec.refusal.placeholder(what); ok {
			return value, true
		}
	}
	if a := rec.tightest(zone); a != nil {
		return a.placeholder(what), true
	}
	return "", true
}

func (f *refusal) placeholder(what string) (any, bool) {
	switch what {
	case "name":
		return f.zone, true
	case "policy":
		return f.policy, true
	case "retry_after":
		if f.wait == algorithms.Never || f.wait == algorithms.Unknown {
			return "", true
		}
		return fields.RetryAfter(f.wait), true
	}
	return nil, false
}

// tightest returns the answer of the zone that is closest to exhaustion.
func (rec *record) tightest(zone string) (tightest *answer) {
	if rec == nil {
		return nil
	}
	for i := range rec.answers {
		if a := &rec.answers[i]; a.rule.Zone == zone && a.asked() && (tightest == nil || a.tighter(tightest)) {
			tightest = a
		}
	}
	return tightest
}

func (a *answer) tighter(b *answer) bool {
	x, y := algorithms.Outcome{Remaining: a.remaining, Next: a.next}, algorithms.Outcome{Remaining: b.remaining, Next: b.next}
	return fields.Tighter(a.limit.Capacity, &x, b.limit.Capacity, &y)
}

func (a *answer) placeholder(what string) any {
	switch what {
	case "limit":
		return a.limit.Capacity
	case "remaining":
		return a.remaining
	case "reset":
		switch a.next {
		case algorithms.Never:
			return 0
		case algorithms.Unknown:
			return ""
		}
		return fields.RetryAfter(a.next)
	case "delay":
		return strconv.FormatFloat(a.delay.Seconds(), 'f', -1, 64)
	case "status":
		return resultOf(a.ok, a.delay > 0, a.enforced).String()
	}
	return ""
}

// resultOf is what becomes of a request in a rule, or would if the rule were enforced.
func resultOf(ok, delayed, enforced bool) telemetry.Result {
	switch {
	case !ok && enforced:
		return telemetry.Refused
	case !ok:
		return telemetry.RefusedDryRun
	case delayed && enforced:
		return telemetry.Delayed
	case delayed:
		return telemetry.DelayedDryRun
	case enforced:
		return telemetry.Passed
	}
	return telemetry.PassedDryRun
}
