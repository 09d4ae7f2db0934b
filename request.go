package sluice

// What one request carries: the question that a handler puts to the store, which lives until it is answered,
// and the record of answers, which lives as long as the request and its response.

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/fields"
	"github.com/caddy-sluice/sluice/leaky"
	"github.com/caddy-sluice/sluice/telemetry"
)

// question is what one handler asks about a request. Questions are pooled.
type question struct {
	r      *http.Request
	vars   map[string]any // the request's; finding them takes a walk through its context
	record *record        // nil until something is charged
	asked  []asked        // in the order of the file
	// earlier is how many answers the record has from handlers before this one.
	earlier int
	// The charges by who decides them: this process, the shared store, or this process in the shared store's place.
	local, shared, share batch
	fields               *fields.Set // what the limits that decided look like to clients
	applied              []fields.Applied
	bytes                []byte // of the charges' keys
}

// batch is the charges that one store decides at one instant.
type batch struct {
	charges  []algorithms.Charge
	outcomes []algorithms.Outcome
	queued   bool        // a charge may be told to wait
	wait     *leaky.Wait // its place in the room
}

// asked is a rule that applies, and where its limits' charges are.
type asked struct {
	rule    *rule
	plan    *plan
	metrics *telemetry.Zone
	batch   *batch
	first   int
	key     string // valid until release
	// also: the request has several keys under the rule, and this is not the first.
	also bool
	// again: another rule of the zone was asked before, and told the client what is left.
	again bool
	// enforced: it may refuse the request; else it is a dry run.
	enforced bool
	// asksBan: the charge at [ban] asks whether the key is banned.
	asksBan bool
	// reserves: what it takes may be given back, and the charge at [pending] counts that it is not known yet.
	reserves bool
	// denied, allowed: the shared store failed, and the rule refuses what it cannot count, or lets it pass.
	denied, allowed bool
}

func (a *asked) charge(limit int) *algorithms.Charge   { return &a.batch.charges[a.first+limit] }
func (a *asked) outcome(limit int) *algorithms.Outcome { return &a.batch.outcomes[a.first+limit] }

var questions = sync.Pool{New: func() any { return new(question) }}

func newQuestion(r *http.Request) *question {
	q := questions.Get().(*question)
	q.r = r
	q.vars, _ = r.Context().Value(caddyhttp.VarsCtxKey).(map[string]any)
	q.record, _ = q.vars[recordVar].(*record)
	return q
}

// maxPooled keeps one huge key from being held for ever.
const maxPooled = 4096

// release returns the question to the pool. Nothing that it refers to may be used after.
func (q *question) release() {
	clear(q.asked)
	clear(q.applied)
	q.r, q.vars, q.record, q.fields, q.asked, q.applied, q.bytes = nil, nil, nil, nil, q.asked[:0], q.applied[:0], q.bytes[:0]
	if cap(q.bytes) > maxPooled {
		q.bytes = nil
	}
	q.local.reset()
	q.shared.reset()
	q.share.reset()
	questions.Put(q)
}

func (b *batch) reset() {
	clear(b.charges)
	b.charges, b.outcomes, b.queued, b.wait = b.charges[:0], b.outcomes[:0], false, nil
}

func (b *batch) add(c algorithms.Charge) {
	b.charges = append(b.charges, c)
	b.outcomes = append(b.outcomes, algorithms.Outcome{})
	b.queued = b.queued || c.Limit.Queue > 0
}

// refused reports whether the batch was refused, so that nothing was taken.
func (b *batch) refused() bool { return algorithms.Binding(b.charges, b.outcomes) >= 0 }

// keys are those of one request under one rule. All but few requests have one, see [caddyfile.MaxKeys].
type keys struct {
	list [caddyfile.MaxKeys]string // valid until release
	n    int
}

// add notes a key unless it is known, and reports whether there was room for it.
func (k *keys) add(key string) bool {
	switch {
	case k.n > 0 && slices.Contains(k.list[:k.n], key):
		return true
	case k.n == len(k.list):
		return false
	}
	k.list[k.n] = key
	k.n++
	return true
}

// expand adds the keys of the request, in place of those that expand to nothing the fallback's; none when the rule does not limit
// such a request. The error is an HTTP status.
func (q *question) expand(k, fallback *caddyfile.Key, to *keys) error {
	for nth, of := 0, 1; nth < of; nth++ {
		start, ok, err := len(q.bytes), false, error(nil)
		q.bytes, ok, of, err = k.Append(q.bytes, q.r, nth)
		switch {
		case err != nil:
		case ok:
			b := q.bytes[start:]
			// Safe because these bytes do not change before release: a later key is appended behind them, and the store
			// keeps no key. It saves an allocation on every request.
			if !to.add(unsafe.String(unsafe.SliceData(b), len(b))) || of > caddyfile.MaxKeys {
				return caddyhttp.Error(http.StatusBadRequest, errManyValues)
			}
		case fallback != nil:
			q.bytes = q.bytes[:start]
			err = q.expand(fallback, nil, to)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

var errManyValues = fmt.Errorf("a header, cookie or query parameter that the rate limit's key reads has more than %d values", caddyfile.MaxKeys)

// charge adds the charges of a rule under a key, one for each of the plan's limits, behind those that a ban needs.
func (q *question) charge(r *rule, p *plan, key string, cost int64, also bool) {
	enforced := r.Enforces(key)
	asksBan := r.Ban != nil && enforced
	b := &q.local
	if r.redis != nil && !(asksBan && r.bannedHere(key)) {
		b = &q.shared
	}
	a := asked{
		rule: r, plan: p, metrics: r.metrics, batch: b, key: key, also: also, enforced: enforced, asksBan: asksBan,
		reserves: asksBan && r.Ban.Pending != nil,
		again:    q.toldBefore(r.zone),
	}
	if a.reserves {
		b.add(algorithms.Charge{Key: key, Limit: r.Ban.Pending, Cost: 1, DryRun: true}) // it refuses nobody
	}
	if asksBan {
		b.add(algorithms.Ask(r.Ban.Bans, key))
	}
	a.first = len(b.charges)
	q.asked = append(q.asked, a)
	for _, limit := range p.Limits {
		c := algorithms.Charge{Key: key, Limit: limit, Cost: cost, DryRun: !a.enforced}
		if limit.Algorithm == algorithms.Concurrency {
			c.Cost = 1
		} else {
			c.Held = q.record.held(q.r, &a, limit, cost) + r.aheadOf(q.r, limit)
		}
		b.add(c)
	}
}

// banned reports whether the rule refuses because the key is banned.
func (a *asked) banned() bool { return a.asksBan && !a.outcome(ban).OK }

// told is what a client is told of a limit: while it is banned that.
func (a *asked) told(limit int) *algorithms.Outcome {
	if a.banned() {
		limit = ban
	}
	return a.outcome(limit)
}

// delay is how long the rule holds the request.
func (a *asked) delay() (longest time.Duration) {
	for i := range a.plan.Limits {
		longest = max(longest, a.outcome(i).Delay)
	}
	return longest
}

// refusedBy returns which of the rule's limits refused, the one with the longest wait, or that it is a ban.
func (a *asked) refusedBy() (limit int, refused bool) {
	if a.banned() {
		return ban, true
	}
	for i := range a.plan.Limits {
		if o := a.outcome(i); !o.OK && (!refused || o.Retry > a.outcome(limit).Retry) {
			limit, refused = i, true
		}
	}
	return limit, refused
}

// binding returns the rule and limit that refuse the request: of those that refuse and are no dry run, the one
// with the longest wait, the first in the file on a tie.
func (q *question) binding() (by *asked, limit int, refused bool) {
	for n := range q.asked {
		a := &q.asked[n]
		i, no := a.refusedBy()
		if no && a.enforced && (!refused || a.outcome(i).Retry > by.outcome(limit).Retry) {
			by, limit, refused = a, i, true
		}
	}
	return by, limit, refused
}

// worst returns, of the keys that a request has under the rule that was asked nth, the one that says what becomes of it there:
// that refuses, or else delays it for longest.
func (q *question) worst(nth int) (worst *asked, limit int, refused bool) {
	worst = &q.asked[nth]
	limit, refused = worst.refusedBy()
	for i := nth + 1; i < len(q.asked) && q.asked[i].also; i++ {
		a := &q.asked[i]
		l, no := a.refusedBy()
		switch {
		case no && !refused,
			no && a.enforced && !worst.enforced,
			no && a.enforced == worst.enforced && a.outcome(l).Retry > worst.outcome(limit).Retry,
			!no && !refused && a.delay() > worst.delay():
			worst, limit, refused = a, l, no
		}
	}
	return worst, limit, refused
}

// tighten replaces what is told of a limit, if what is told of it under another key of the request is tighter. It reports whether
// anything is told of it yet.
func (q *question) tighten(told fields.Applied, limit *algorithms.Limit) bool {
	i := slices.IndexFunc(q.applied, func(a fields.Applied) bool { return a.Policy == told.Policy })
	if i < 0 {
		return false
	}
	was := &q.applied[i]
	if told.Outcome != nil && (was.Outcome == nil || fields.Tighter(limit.Capacity, told.Outcome, limit.Capacity, was.Outcome)) {
		was.Outcome = told.Outcome
	}
	return true
}

// openRecord makes the request's record if it is the first handler that it meets. Also a request that no rule limits
// has one: its placeholders are empty then, and not the braces that an unknown placeholder leaves.
func (q *question) openRecord() {
	if q.record == nil {
		q.record = newRecord(q.r, q.vars)
	}
}

// remember puts the answers on the request's record, for placeholders and for later handlers.
func (q *question) remember(passed bool) {
	q.earlier = len(q.record.answers)
	for n := range q.asked {
		a := &q.asked[n]
		for i, limit := range a.plan.Limits {
			answer := answer{rule: a.rule, limit: limit, cost: a.charge(i).Cost, outcome: *a.told(i), enforced: a.enforced}
			if passed {
				answer.taken = a.taken(i)
			}
			if answer.cost > 1 {
				answer.key = strings.Clone(a.key)
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
	refusal *refusal  // nil: not refused
	scratch fields.Scratch
}

// answer is what one limit of a rule said.
type answer struct {
	rule     *rule
	limit    *algorithms.Limit
	cost     int64
	key      string // if one unit more may not be enough, see [question.waitForAll]
	outcome  algorithms.Outcome
	enforced bool
	// taken is kept if the zone has other rules, which may meet the same counter later on this request.
	taken *taken
}

// refusal is why a request was refused.
type refusal struct {
	zone, policy string
	wait         time.Duration
}

// newRecord makes the request's record, and its placeholders.
func newRecord(r *http.Request, vars map[string]any) *record {
	rec := new(record)
	rec.answers = rec.first[:0]
	if vars != nil { // a request that did not come through Caddy's server has none
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
		if a := &rec.answers[i]; a.rule.Zone == zone && a.outcome.Asked() && (tightest == nil || a.tighter(tightest)) {
			tightest = a
		}
	}
	return tightest
}

func (a *answer) tighter(b *answer) bool {
	return fields.Tighter(a.limit.Capacity, &a.outcome, b.limit.Capacity, &b.outcome)
}

func (a *answer) placeholder(what string) any {
	switch what {
	case "limit":
		return a.limit.Capacity
	case "remaining":
		return a.outcome.Remaining
	case "reset":
		switch a.outcome.Next {
		case algorithms.Never:
			return 0
		case algorithms.Unknown:
			return ""
		}
		return fields.RetryAfter(a.outcome.Next)
	case "delay":
		return strconv.FormatFloat(a.outcome.Delay.Seconds(), 'f', -1, 64)
	case "status":
		return resultOf(a.outcome.OK, a.outcome.Delay > 0, a.enforced).String()
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
