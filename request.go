package sluice

// What one request carries: the question that a handler puts to the store, which lives until it is answered,
// and the record of answers, which lives as long as the request and its response.

import (
	"net/http"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/fields"
	"github.com/caddy-sluice/sluice/telemetry"
)

// question is the batch of charges that one handler makes of a request. Questions are pooled.
type question struct {
	r        *http.Request
	record   *record // nil until something is charged
	asked    []asked
	charges  []algorithms.Charge
	outcomes []algorithms.Outcome
	applied  []fields.Applied
	keys     []byte // the bytes of the charges' keys
}

// asked is a rule that applies, and where its limits' charges begin.
type asked struct {
	rule  *rule
	first int
}

var questions = sync.Pool{New: func() any { return new(question) }}

func newQuestion(r *http.Request) *question {
	q := questions.Get().(*question)
	q.r = r
	if vars, ok := r.Context().Value(caddyhttp.VarsCtxKey).(map[string]any); ok {
		q.record, _ = vars[recordVar].(*record)
	}
	return q
}

// maxPooled keeps one huge key from being held for ever.
const maxPooled = 4096

// release returns the question to the pool. Nothing that it refers to may be used after.
func (q *question) release() {
	clear(q.asked)
	clear(q.charges)
	clear(q.applied)
	keys := q.keys[:0]
	if cap(keys) > maxPooled {
		keys = nil
	}
	*q = question{asked: q.asked[:0], charges: q.charges[:0], outcomes: q.outcomes[:0], applied: q.applied[:0], keys: keys}
	questions.Put(q)
}

// key expands the rule's key, or its fallback when that expands to nothing. ok is false when the rule
// does not limit such a request. The text is valid until release.
func (q *question) key(r *rule) (key string, ok bool, err error) {
	start := len(q.keys)
	q.keys, ok, err = r.Key.Append(q.keys, q.r)
	if err == nil && !ok && r.Fallback != nil {
		// What the fallback expands to is used even if that is nothing, as for a unix socket: one counter for those.
		q.keys, _, err = r.Fallback.Append(q.keys[:start], q.r)
		ok = true
	}
	b := q.keys[start:]
	// Safe because these bytes do not change before release: a later key is appended behind them, and the store
	// keeps no key. It saves an allocation on every request.
	return unsafe.String(unsafe.SliceData(b), len(b)), ok, err
}

// charge adds the charges of a rule, one for each of its limits.
func (q *question) charge(r *rule, key string, cost int64) {
	q.asked = append(q.asked, asked{rule: r, first: len(q.charges)})
	for i, limit := range r.Limits {
		q.charges = append(q.charges, algorithms.Charge{
			Key: key, Limit: limit, Cost: cost, DryRun: r.DryRun, Held: q.record.held(r, i, key, cost) + r.ahead.Load(),
		})
		q.outcomes = append(q.outcomes, algorithms.Outcome{})
	}
}

// refusedBy returns which of the rule's limits refused, the one with the longest wait.
func (a asked) refusedBy(q *question) (limit int, refused bool) {
	for i := range a.rule.Limits {
		if o := &q.outcomes[a.first+i]; !o.OK && (!refused || o.Retry > q.outcomes[a.first+limit].Retry) {
			limit, refused = i, true
		}
	}
	return limit, refused
}

// ownerOf returns the rule that made the charge.
func (q *question) ownerOf(charge int) asked {
	i := len(q.asked) - 1
	for q.asked[i].first > charge {
		i--
	}
	return q.asked[i]
}

// remember puts the answers on the request's record, for placeholders and for later handlers.
func (q *question) remember() {
	if q.record == nil {
		q.record = newRecord(q.r)
	}
	passed := algorithms.Binding(q.charges, q.outcomes) < 0
	for _, a := range q.asked {
		for i := range a.rule.Limits {
			c := &q.charges[a.first+i]
			answer := answer{rule: a.rule, limit: i, outcome: q.outcomes[a.first+i]}
			if passed && answer.outcome.OK && a.rule.zone.shared() {
				answer.key, answer.taken = strings.Clone(c.Key), c.Cost
			}
			q.record.answers = append(q.record.answers, answer)
		}
	}
}

// recordVar is the request variable that holds the record.
const recordVar = "rate_limit"

// record is what the handlers of one request have decided about it.
type record struct {
	answers []answer
	first   [1]answer // backs answers: most requests meet one limit
	refusal refusal
	scratch fields.Scratch
}

// answer is what one limit of a rule said.
type answer struct {
	rule    *rule
	limit   int
	outcome algorithms.Outcome
	// What was taken, if the zone has other rules that may meet the same counter later on this request.
	key   string
	taken int64
}

// refusal is why a request was refused.
type refusal struct {
	zone, policy string
	wait         time.Duration
}

// newRecord makes the request's record, and its placeholders.
func newRecord(r *http.Request) *record {
	rec := new(record)
	rec.answers = rec.first[:0]
	if vars, ok := r.Context().Value(caddyhttp.VarsCtxKey).(map[string]any); ok {
		vars[recordVar] = rec
	}
	if repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer); ok {
		repl.Map(rec.placeholder)
	}
	return rec
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

// held is what the request has already taken from the counter of the rule's limit under other rules. Those learn
// what is still to come behind them.
func (rec *record) held(r *rule, limit int, key string, cost int64) (units int64) {
	if rec == nil || !r.zone.shared() {
		return 0
	}
	for i := len(rec.answers) - 1; i >= 0; i-- {
		a := &rec.answers[i]
		if a.taken == 0 || a.rule.Limits[a.limit].Space != r.Limits[limit].Space || a.key != key {
			continue
		}
		if ahead := cost + units; !r.DryRun && ahead > a.rule.ahead.Load() {
			a.rule.ahead.Store(ahead) // of two at once one may be lost until the next request
		}
		units += a.taken
	}
	return units
}

// placeholder serves {http.rate_limit.…}. What has no value is empty and not unknown: header_up sends the unknown as it is
// written, braces included.
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
	if zone == "exceeded" && rec.refusal.zone != "" {
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
		if f.wait == algorithms.Never {
			return "", true
		}
		return fields.RetryAfter(f.wait), true
	}
	return nil, false
}

// tightest returns the answer of the zone that is closest to exhaustion.
func (rec *record) tightest(zone string) (tightest *answer) {
	for i := range rec.answers {
		if a := &rec.answers[i]; a.rule.Zone == zone && (tightest == nil || a.tighter(tightest)) {
			tightest = a
		}
	}
	return tightest
}

func (a *answer) tighter(b *answer) bool {
	return fields.Tighter(a.rule.Limits[a.limit].Capacity, &a.outcome, b.rule.Limits[b.limit].Capacity, &b.outcome)
}

func (a *answer) placeholder(what string) any {
	switch what {
	case "limit":
		return a.rule.Limits[a.limit].Capacity
	case "remaining":
		return a.outcome.Remaining
	case "reset":
		if a.outcome.Next == algorithms.Never {
			return 0
		}
		return fields.RetryAfter(a.outcome.Next)
	case "status":
		return a.result().String()
	}
	return ""
}

func (a *answer) result() telemetry.Result {
	switch {
	case a.outcome.OK && !a.rule.DryRun:
		return telemetry.Passed
	case a.outcome.OK:
		return telemetry.PassedDryRun
	case a.rule.DryRun:
		return telemetry.RefusedDryRun
	}
	return telemetry.Refused
}
