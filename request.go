package sluice

// What one handler asks about a request: which rules it meets, under which keys, and what they were
// answered.

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/fields"
	"github.com/caddy-sluice/sluice/telemetry"
)

// question is what one handler asks about a request. Questions are pooled.
type question struct {
	r        *http.Request
	vars     map[string]any // the request's; finding them takes a walk through its context
	record   *record        // nil until this handler or one before has decided
	refusal  *refusal       // room for it, beside the record
	decision counting.Decision
	asked    []asked // beside each entry of the decision
	// earlier is how many answers the record has from handlers before this one.
	earlier int
	fields  *fields.Set // what the limits that decided look like to clients
	applied []fields.Applied
	bytes   []byte // of the keys
}

// asked is a rule that applies, and what it was answered.
type asked struct {
	*counting.Answer // nil before the decision
	rule             *rule
	plan             *plan
	key              string // valid until release
	// also: the request has several keys under the rule, and this is not the first.
	also bool
	// again: another rule of the zone was asked before, and told the client what is left.
	again bool
	// enforced: it may refuse the request; else it is a dry run.
	enforced bool
}

var questions = sync.Pool{New: func() any { return new(question) }}

func newQuestion(r *http.Request, counters *counting.Counters) *question {
	q := questions.Get().(*question)
	q.r = r
	q.vars, _ = r.Context().Value(caddyhttp.VarsCtxKey).(map[string]any)
	q.record, _ = q.vars[recordVar].(*record)
	q.decision.Begin(counters)
	return q
}

// maxPooled keeps one huge key from being held for ever.
const maxPooled = 4096

// release returns the question to the pool. Nothing that it refers to may be used after. The lists
// are not cleared, which would cost more than they hold: rules and limits of a config, until the
// collector empties the pool.
func (q *question) release() {
	q.r, q.vars, q.record, q.refusal, q.fields = nil, nil, nil, nil, nil
	q.asked, q.applied, q.bytes = q.asked[:0], q.applied[:0], q.bytes[:0]
	if cap(q.bytes) > maxPooled {
		q.asked, q.bytes = nil, nil // their keys are these bytes
		q.decision = counting.Decision{}
	}
	questions.Put(q)
}

// keys are those of one request under one rule. All but few requests have one, see
// [caddyfile.MaxKeys].
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

// meets returns the plan, and the keys under which the request meets the rule; none if the rule
// does not limit it.
func (q *question) meets(r *rule, met *keys) (*plan, error) {
	limits, exempt, err := r.about(q.r)
	if exempt {
		r.metrics.Count(telemetry.Exempt, 0)
	}
	if !limits || err != nil {
		return nil, err
	}
	p := r.plans[r.PlanOf(q.r)]
	if len(p.Limits) == 0 { // unlimited
		r.metrics.Count(telemetry.Exempt, 0)
		return nil, nil
	}
	return p, q.expand(r.Key, r.Fallback, met)
}

// expand adds the keys of the request, in place of those that expand to nothing the fallback's;
// none when the rule does not limit such a request. The error is an HTTP status.
func (q *question) expand(k, fallback *caddyfile.Key, to *keys) error {
	for nth, of := 0, 1; nth < of; nth++ {
		start, ok, err := len(q.bytes), false, error(nil)
		q.bytes, ok, of, err = k.Append(q.bytes, q.r, q.vars, nth)
		switch {
		case err != nil:
		case ok:
			b := q.bytes[start:]
			// Safe because these bytes do not change before release: a later key is appended behind
			// them, and the store keeps no key. It saves an allocation on every request.
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

// ask adds what the rule asks about a key of the request.
func (q *question) ask(r *rule, p *plan, key string, cost int64, also bool) {
	a := asked{rule: r, plan: p, key: key, also: also, enforced: r.Enforces(key), again: q.record.toldBefore(r.zone)}
	e := q.decision.Add(&r.entry)
	e.Key, e.Limits, e.Cost, e.DryRun, e.Held = key, p.Limits, cost, !a.enforced, q.record.held(q.r, &meeting{r, p.Limits, key, cost, a.enforced})
	if !a.enforced {
		e.Ban = nil
	}
	q.decision.Ask(e)
	q.asked = append(q.asked, a)
}

// told is what a client is told of a limit: while it is banned that.
func (a *asked) told(limit int) *algorithms.Outcome {
	if a.Banned() {
		return a.Ban
	}
	return &a.Outcomes[limit]
}

// verdict is what a rule says of the request under one key: whether it refuses it, by which limit,
// and for how long.
type verdict struct {
	refused bool
	limit   int // 0 for a ban
	wait    time.Duration
}

// refusedBy returns which of the rule's limits refused, the one with the longest wait, or that it
// is a ban.
func (a *asked) refusedBy() (v verdict) {
	if a.Banned() {
		return verdict{true, 0, a.Ban.Retry}
	}
	for i := range a.Outcomes {
		if o := &a.Outcomes[i]; !o.OK && (!v.refused || o.Retry > v.wait) {
			v = verdict{true, i, o.Retry}
		}
	}
	return v
}

// binding returns the rule that refuses the request: of those that refuse and are no dry run, the
// one with the longest wait, the first in the file on a tie.
func (q *question) binding() (by *asked, most verdict) {
	for n := range q.asked {
		a := &q.asked[n]
		v := a.refusedBy()
		if v.refused && a.enforced && (by == nil || v.wait > most.wait || v.wait == most.wait && a.rule.order < by.rule.order) {
			by, most = a, v
		}
	}
	return by, most
}

// worst returns, of the keys that a request has under the rule that was asked nth, the one that
// says what becomes of it there: that refuses, or else delays it for longest.
func (q *question) worst(nth int) (worst *asked, v verdict) {
	worst = &q.asked[nth]
	v = worst.refusedBy()
	for i := nth + 1; i < len(q.asked) && q.asked[i].also; i++ {
		a := &q.asked[i]
		other := a.refusedBy()
		switch {
		case other.refused && !v.refused,
			other.refused && a.enforced && !worst.enforced,
			other.refused && a.enforced == worst.enforced && other.wait > v.wait,
			!other.refused && !v.refused && a.Delay() > worst.Delay():
			worst, v = a, other
		}
	}
	return worst, v
}

// remember puts the answers on the request's record, for placeholders and for later handlers.
func (q *question) remember(passed bool) {
	q.earlier = len(q.record.answers)
	if len(q.asked) > 1 {
		q.record.answers = slices.Grow(q.record.answers, len(q.asked))
	}
	for n := range q.asked {
		a := &q.asked[n]
		several := a.rule.zone.severalRules()
		var key *string // all limits' alike
		for i, limit := range a.plan.Limits {
			o := a.told(i)
			answer := answer{
				rule: a.rule, limit: limit, cost: q.decision.Cost(a.Answer, i), remaining: o.Remaining, next: o.Next, delay: o.Delay,
				ok: o.OK, enforced: a.enforced, taken: passed && several && a.Outcomes[i].OK,
			}
			if answer.cost > 1 || answer.taken {
				if key == nil {
					text := strings.Clone(a.key)
					key = &text
				}
				answer.key = key
			}
			q.record.answers = append(q.record.answers, answer)
		}
	}
}

// sortApplied puts what clients are told into the order of the file: rules are asked by the place
// where they count.
func (q *question) sortApplied() {
	byPolicy := func(a, b fields.Applied) int { return cmp.Compare(a.Policy, b.Policy) }
	if !slices.IsSortedFunc(q.applied, byPolicy) {
		slices.SortFunc(q.applied, byPolicy)
	}
}

// tighten replaces what is told of a limit, if what is told of it under another key of the request
// is tighter. It reports whether anything is told of it yet.
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

// openRecord makes the request's record if this is the first handler that it meets. Also a request
// that no rule limits has one: its placeholders are empty then, and not the braces that an unknown
// placeholder leaves.
func (q *question) openRecord(refused, placeholders bool) {
	if q.record == nil {
		q.record, q.refusal = newRecord(q.r, q.vars, refused, placeholders)
	}
}

// refuse notes why the request is refused.
func (q *question) refuse(why refusal) {
	if q.refusal == nil {
		q.refusal = new(refusal)
	}
	*q.refusal = why
	q.record.refusal = q.refusal
}

// retract takes back what the client was told before.
func (a *asked) retract(h http.Header, rec *record) {
	if a.again {
		fields.Retract(h, &rec.scratch, a.plan.Names...)
	}
}
