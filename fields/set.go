package fields

// All policies of a handler, and the one function that a response goes through.

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// The canonical keys: see the package documentation.
const (
	keyPolicy     = "Ratelimit-Policy"
	keyLimit      = "Ratelimit"
	keyRetryAfter = "Retry-After"
	keyCache      = "Cache-Control"
)

// oneValue names the fields of a family that shows one rule only.
type oneValue struct{ limit, remaining, reset string }

// The families of one value, by their index in [shown].
const (
	draft6Family = iota
	xFamily
)

var oneValues = [...]oneValue{
	draft6Family: {"Ratelimit-Limit", "Ratelimit-Remaining", "Ratelimit-Reset"},
	xFamily:      {"X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset"},
}

// Applied says that a policy of the set applied to the request, and what its limit answered.
type Applied struct {
	// Policy is the index of the policy in the slice given to [NewSet].
	Policy int
	// Outcome is nil when the limit was not asked because another one had refused before: the
	// policy is then sent, its state is not.
	Outcome *algorithms.Outcome
}

// Set is what a handler needs to speak to clients about its policies. It is immutable and safe for
// concurrent use.
type Set struct {
	families Families
	policies []Policy
	// policyTexts holds the policy list for every combination of rules, by bit mask; nil with too
	// many rules.
	policyTexts []string
	exceeded    problem
	abnormal    problem
}

// maxMasked is up to how many policies every combination is written at load: 64 short texts.
const maxMasked = 6

// NewSet prepares the policies of a handler, each with a name of its own, in the order of its
// rules. Those of dry-run rules are left out: clients are not told of them. Status is that of a
// refusal, for the problem body.
func NewSet(families Families, status int, policies ...Policy) *Set {
	s := &Set{families: families, policies: policies}
	if len(policies) <= maxMasked {
		s.policyTexts = make([]string, 1<<len(policies))
		for mask := range s.policyTexts {
			s.policyTexts[mask] = string(s.appendPolicies(nil, unmask(mask)))
		}
	}
	s.exceeded = newProblem(QuotaExceeded, "Quota Exceeded", status, policies)
	s.abnormal = newProblem(AbnormalUsageDetected, "Abnormal Usage Detected", status, policies)
	return s
}

// NeedsNow reports whether Write reads its argument now, so that the others need not read a clock.
func (s *Set) NeedsNow() bool { return s.families.X && !s.families.XDelta }

// Write adds the fields for the policies that applied, in the order of the rules. Nothing applied:
// no fields. Lists that something else already set are kept, and ours are added as further items;
// the one-value families cannot hold a second value, so what something else set there stays, and of
// two handlers the policy that is closer to exhaustion.
//
// now is the wall clock, read after the decision; it matters only if [Set.NeedsNow].
func (s *Set) Write(h http.Header, sc *Scratch, applied []Applied, now time.Time) {
	if len(applied) == 0 || s.families == (Families{}) {
		return
	}
	if s.families.IETF || s.families.Draft6 {
		sc.add(h, keyPolicy, s.policyText(sc, applied))
	}
	if s.families.IETF {
		sc.add(h, keyLimit, s.limitText(sc, applied))
	}
	if s.families.Draft6 || s.families.X {
		s.writeTightest(h, sc, applied, now)
	}
}

// Retract takes out what another handler of the same request has written of policies, because what
// was true then is not any more.
func Retract(h http.Header, sc *Scratch, names ...string) {
	begins := make([]string, len(names))
	for i, name := range names {
		begins[i] = quote(Name(name)) + ";"
	}
	for family := range oneValues {
		if was := sc.shown(h, family); was != nil && slices.Contains(begins, quote(was.name)+";") {
			oneValues[family].remove(h)
		}
	}
	for _, key := range []string{keyPolicy, keyLimit} {
		var kept []string
		for _, line := range h[key] {
			items := slices.DeleteFunc(splitItems(line), func(item string) bool {
				return slices.ContainsFunc(begins, func(begin string) bool { return strings.HasPrefix(item, begin) })
			})
			if len(items) > 0 {
				kept = append(kept, strings.Join(items, ", "))
			}
		}
		if delete(h, key); kept != nil {
			h[key] = kept
		}
	}
}

// splitItems splits a list at its commas, those within strings left alone.
func splitItems(line string) (items []string) {
	start, quoted := 0, false
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case c == '"':
			quoted = !quoted
		case c == '\\' && quoted:
			i++
		case c == ',' && !quoted:
			items = append(items, strings.TrimSpace(line[start:i]))
			start = i + 1
		}
	}
	return append(items, strings.TrimSpace(line[start:]))
}

// tighter compares as the function of that name does; what was not asked is looser than everything.
func (s *Set) tighter(a, b Applied) bool {
	if a.Outcome == nil || b.Outcome == nil {
		return a.Outcome != nil
	}
	return Tighter(s.policies[a.Policy].capacity, a.Outcome, s.policies[b.Policy].capacity, b.Outcome)
}

// policyText is a text written at load, or with very many rules one written now.
func (s *Set) policyText(sc *Scratch, applied []Applied) string {
	if s.policyTexts == nil {
		return sc.finish(s.appendPolicies(sc.start(), applied))
	}
	mask := 0
	for i := range applied {
		mask |= 1 << applied[i].Policy
	}
	return s.policyTexts[mask]
}

func (s *Set) appendPolicies(dst []byte, applied []Applied) []byte {
	start := len(dst)
	for i := range applied {
		p := &s.policies[applied[i].Policy]
		item := p.item
		if !s.families.IETF {
			item = p.draft6
		}
		if item == "" {
			continue
		}
		if len(dst) > start {
			dst = append(dst, ", "...)
		}
		dst = append(dst, item...)
	}
	return dst
}

// limitText writes the list of RateLimit: one item for each policy that was asked.
func (s *Set) limitText(sc *Scratch, applied []Applied) string {
	text := sc.start()
	for i := range applied {
		if applied[i].Outcome == nil {
			continue
		}
		if len(text) > 0 {
			text = append(text, ", "...)
		}
		text = s.policies[applied[i].Policy].appendLimit(text, applied[i].Outcome)
	}
	return sc.finish(text)
}

// writeTightest sends the families that have room for one rule: the one closest to exhaustion.
// Units in flight are left out, because whoever reads these families takes the numbers for those of
// a window.
func (s *Set) writeTightest(h http.Header, sc *Scratch, applied []Applied, now time.Time) {
	var shown Applied
	for _, a := range applied {
		if !s.policies[a.Policy].inFlight && s.tighter(a, shown) {
			shown = a
		}
	}
	if shown.Outcome == nil {
		return // none was asked, so there is nothing true to say
	}
	next := shown.Outcome.Next
	if s.families.Draft6 {
		s.writeOne(h, sc, draft6Family, shown, seconds(next))
	}
	if s.families.X && s.families.XDelta {
		s.writeOne(h, sc, xFamily, shown, seconds(next))
	} else if s.families.X {
		at := now.Add(min(next, maxNext))
		epoch := at.Unix()
		if at.Nanosecond() > 0 {
			epoch++
		}
		s.writeOne(h, sc, xFamily, shown, epoch)
	}
}

// maxNext keeps a moment within what time.Time adds without overflow. No window is as long.
const maxNext = 200 * 365 * 24 * time.Hour

func (s *Set) writeOne(h http.Header, sc *Scratch, family int, a Applied, reset int64) {
	p, keys := &s.policies[a.Policy], &oneValues[family]
	if keys.in(h) {
		was := sc.shown(h, family)
		if was == nil || !Tighter(p.capacity, a.Outcome, was.capacity, &was.outcome) {
			return
		}
		keys.remove(h)
	}
	now := shown{name: p.name, capacity: p.capacity, outcome: *a.Outcome, limit: sc.number(p.capacity), remaining: sc.number(a.Outcome.Remaining)}
	sc.add(h, keys.limit, now.limit)
	sc.add(h, keys.remaining, now.remaining)
	if known(a.Outcome.Next) {
		sc.add(h, keys.reset, sc.number(reset))
	}
	sc.show(family, now)
}

func (k *oneValue) in(h http.Header) bool {
	return len(h[k.limit]) > 0 || len(h[k.remaining]) > 0 || len(h[k.reset]) > 0
}

func (k *oneValue) remove(h http.Header) {
	delete(h, k.limit)
	delete(h, k.remaining)
	delete(h, k.reset)
}

// ofAnother are the fields by which handlers before said what body a response has: not this one's.
var ofAnother = []string{"Content-Length", "Content-Encoding", "Etag", "Last-Modified", "Content-Range", "Accept-Ranges", "Trailer"}

// Caching reports whether a field, by its canonical name, says how long a response may be kept.
// Those that end in Cache-Control speak to some caches only (RFC 9213), which obey them before that
// one.
func Caching(name string) bool {
	switch name {
	case "Expires", "Surrogate-Control", "Edge-Control", "X-Accel-Expires":
		return true
	}
	return strings.HasSuffix(name, keyCache)
}

// WriteRefusal adds what every refusal carries, and takes out what was said of another response: it
// must not be cached, and Retry-After says when to come back: whole seconds, rounded up, at least
// 1. With [algorithms.Never] there is no such moment, with [algorithms.Unknown] nobody knows it,
// and there is no field. A later Retry-After that is already there (an error route inside a limited
// route) is kept.
func WriteRefusal(h http.Header, sc *Scratch, retry time.Duration) {
	for _, key := range ofAnother {
		delete(h, key)
	}
	for key := range h {
		if Caching(key) {
			delete(h, key)
		}
	}
	sc.add(h, keyCache, "no-store")
	if !known(retry) {
		return
	}
	wait := RetryAfter(retry)
	if old := h[keyRetryAfter]; len(old) > 0 {
		if n, err := strconv.ParseInt(old[0], 10, 64); err == nil && n >= wait {
			return
		}
		delete(h, keyRetryAfter)
	}
	sc.add(h, keyRetryAfter, sc.number(wait))
}

// RetryAfter is a wait in whole seconds as Retry-After gives it: rounded up, at least 1.
func RetryAfter(retry time.Duration) int64 { return clamp(max(seconds(retry), 1)) }

// unmask lists the policies of a bit mask as if none of them had been asked.
func unmask(mask int) (applied []Applied) {
	for i := 0; mask>>i > 0; i++ {
		if mask>>i&1 == 1 {
			applied = append(applied, Applied{Policy: i})
		}
	}
	return applied
}
