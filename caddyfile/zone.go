// One zone → one rule.

package caddyfile

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/leaky"
)

type zoneCompiler struct {
	*compiler
	name    string
	z       *Zone
	maxKeys int

	out     *Rule
	pending bool // a setting is not known before the load
}

// fail makes an error about a field of the zone, or about an element of it.
func (z *zoneCompiler) fail(field string, index int, err error) error {
	place := ""
	if z.z != nil {
		place = z.z.Place
	}
	return &fieldError{zone: z.name, place: place, field: field, index: index, err: err}
}

func (z *zoneCompiler) warn(format string, args ...any) {
	where := "zone " + z.name
	if z.z.Place != "" {
		where = z.z.Place + ": " + where
	}
	z.rules.Warnings = append(z.rules.Warnings, where+": "+fmt.Sprintf(format, args...))
}

func (z *zoneCompiler) rule() (*Rule, error) {
	if !zoneName.MatchString(z.name) {
		return nil, z.fail("", -1, fmt.Errorf("name %q; want letters, digits, and any of _ . -", z.name))
	}
	if z.z == nil {
		return nil, z.fail("", -1, errors.New("null; want a zone with a limit"))
	}
	z.out = &Rule{Zone: z.name, DryRun: z.z.DryRun, Place: z.z.Place, Plans: []*Plan{{}}}
	policies, err := z.policies()
	if err != nil {
		return nil, err
	}
	if err := z.limits(policies); err != nil {
		return nil, err
	}
	if err := z.keys(); err != nil {
		return nil, err
	}
	if err := z.cost(); err != nil {
		return nil, err
	}
	if err := z.store(); err != nil {
		return nil, err
	}
	z.out.pending = z.pending
	return z.out, nil
}

// policies reads the limits in either spelling. A limit that is not known before the load is left out.
func (z *zoneCompiler) policies() ([]algorithms.Policy, error) {
	events := z.z.MaxEvents != "" || z.z.Window != 0
	z.out.Events = events
	switch {
	case events && len(z.z.Limit) > 0:
		field := "window"
		if z.z.MaxEvents != "" {
			field = "max_events"
		}
		return nil, z.fail(field, -1, errors.New("limit is written too, and means the same; want limit, or events with window"))
	case !events && len(z.z.Limit) == 0:
		return nil, z.fail("", -1, errors.New("no limit; want one such as 100/1m"))
	case events && z.z.MaxEvents == "":
		return nil, z.fail("window", -1, errors.New("events is missing beside it; want both, or limit instead of them"))
	case events && z.z.Window == 0:
		return nil, z.fail("max_events", -1, errors.New("window is missing beside it or zero; want both, such as events 100 and window 1m"))
	case events:
		return z.eventsPolicy()
	}
	return z.limitPolicies()
}

func (z *zoneCompiler) eventsPolicy() ([]algorithms.Policy, error) {
	quota, known, err := z.integer(z.z.MaxEvents, 0, algorithms.MaxExact)
	if err != nil {
		return nil, z.fail("max_events", -1, err)
	}
	if z.z.Window < 0 {
		return nil, z.fail("window", -1, fmt.Errorf("%v is negative; want a duration such as 1m", time.Duration(z.z.Window)))
	}
	p := algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: quota, Window: time.Duration(z.z.Window)}
	z.pending = z.pending || !known
	if err := z.choose(&p, known); err != nil {
		return nil, err
	}
	return []algorithms.Policy{p}, nil
}

func (z *zoneCompiler) limitPolicies() ([]algorithms.Policy, error) {
	var policies []algorithms.Policy
	for i, text := range z.z.Limit {
		text, known, err := z.expand(text)
		if err != nil {
			return nil, z.fail("limit", i, err)
		}
		p := algorithms.Policy{Algorithm: algorithms.SlidingLog}
		if known {
			if p.Quota, p.Window, err = parseLimit(text); err != nil {
				return nil, z.fail("limit", i, err)
			}
			if p.Quota > exactQuota {
				p.Algorithm = algorithms.SlidingWindow
			}
		}
		if err := z.choose(&p, known); err != nil {
			return nil, err
		}
		if !known {
			z.pending = true
			continue
		}
		policies = append(policies, p)
	}
	return policies, nil
}

// choose puts the algorithm that the zone names, if it does.
func (z *zoneCompiler) choose(p *algorithms.Policy, known bool) error {
	name := z.z.Algorithm
	if name == "" {
		return nil
	}
	algorithm, ok := algorithms.ParseAlgorithm(name)
	if !ok {
		names := algorithms.AlgorithmNames()
		return z.fail("algorithm", -1, fmt.Errorf("%q%s; want one of %s", name, didYouMean(name, names...), strings.Join(names, ", ")))
	}
	p.Algorithm = algorithm
	if known && algorithm == algorithms.SlidingWindow && p.Quota > 0 && p.Quota < exactQuota {
		z.warn("sliding_window admits only %d per window under saturation when the quota is %d; sliding_log is exact", p.Quota-1, p.Quota)
	}
	return nil
}

// limits adds the burst to the policies and compiles them.
func (z *zoneCompiler) limits(policies []algorithms.Policy) error {
	burst, known, err := z.burst()
	if err != nil {
		return err
	}
	for i, p := range policies {
		switch {
		case !known: // compiled without, to find what else is wrong
			p.Burst = p.Quota
		case p.Algorithm == algorithms.LeakyBucket:
			p = leaky.Meter(p.Quota, p.Window, burst)
		case p.Algorithm == algorithms.TokenBucket && z.z.Burst != "":
			p.Burst = burst
		}
		if p.Algorithm == algorithms.TokenBucket && z.z.Burst == "" {
			p.Burst = p.Quota
		}
		if !p.Algorithm.Bucket() {
			p.Burst = 0
		}
		l, err := algorithms.Compile(z.name, p)
		if err != nil {
			return z.limitError(i, err)
		}
		l.MaxKeys = z.maxKeys
		z.out.Plans[0].Limits = append(z.out.Plans[0].Limits, l)
	}
	return nil
}

func (z *zoneCompiler) limitError(i int, err error) error {
	switch {
	case errors.Is(err, algorithms.ErrBurst) && z.z.Burst != "":
		return z.fail("burst", -1, err)
	case !z.out.Events:
		return z.fail("limit", i, fmt.Errorf("%q: %w", z.z.Limit[i], err))
	case errors.Is(err, algorithms.ErrWindow):
		return z.fail("window", -1, err)
	}
	return z.fail("max_events", -1, err)
}

func (z *zoneCompiler) burst() (burst int64, known bool, err error) {
	if z.z.Burst == "" {
		return 0, true, nil
	}
	algorithm, _ := algorithms.ParseAlgorithm(z.z.Algorithm)
	least := int64(1)
	if algorithm == algorithms.LeakyBucket {
		least = 0
	}
	burst, known, err = z.integer(z.z.Burst, least, algorithms.MaxExact-1)
	switch {
	case err != nil:
	case !algorithm.Bucket():
		err = fmt.Errorf("%q, but only a bucket has one; want algorithm token_bucket or leaky_bucket beside it", z.z.Burst)
	case len(z.z.Limit) > 1:
		err = fmt.Errorf("%q for %d limits; want one limit beside burst", z.z.Burst, len(z.z.Limit))
	}
	if err != nil {
		return 0, false, z.fail("burst", -1, err)
	}
	z.pending = z.pending || !known
	return burst, known, nil
}

// keys compiles the key and its fallback.
func (z *zoneCompiler) keys() error {
	m, err := z.mask()
	if err != nil {
		return err
	}
	z.out.IPv4Prefix, z.out.IPv6Prefix = int(m.v4), int(m.v6)
	texts := z.z.Key
	switch {
	case len(texts) > 0:
	case z.out.Events:
		texts = Texts{""}
	default:
		texts = Texts{clientAddress}
	}
	if len(texts) == 1 && texts[0] == "" && !z.out.Events {
		return z.fail("key", 0, errors.New("\"\"; want a text, or leave key out to limit each client address"))
	}
	if z.out.Key, err = z.key("key", texts, m); err != nil {
		return err
	}
	switch texts = z.z.KeyFallback; {
	case len(texts) == 1 && texts[0] == "none":
		return nil
	case slices.Contains(texts, "none"):
		return z.fail("key_fallback", slices.Index(texts, "none"),
			errors.New("\"none\" stands alone; want it without other texts, or the texts without it"))
	case len(texts) == 0:
		texts = Texts{clientAddress}
	}
	if z.out.Fallback, err = z.key("key_fallback", texts, m); err != nil {
		return err
	}
	z.out.Fallback.fallback = true
	return nil
}

// mask reads the prefixes. In zones of the older spelling, 0 was a way to write none.
func (z *zoneCompiler) mask() (mask, error) {
	m, least := mask{v4: 32, v6: 64}, int64(1)
	if z.out.Events {
		m.v6, least = 128, 0
	}
	for _, p := range []struct {
		field string
		n     Number
		most  int64
		bits  *uint8
	}{{"ipv4_prefix", z.z.IPv4Prefix, 32, &m.v4}, {"ipv6_prefix", z.z.IPv6Prefix, 128, &m.v6}} {
		if p.n == "" {
			continue
		}
		bits, known, err := z.integer(p.n, least, p.most)
		if err != nil {
			return m, z.fail(p.field, -1, err)
		}
		if known && bits > 0 {
			*p.bits = uint8(bits)
		}
	}
	return m, nil
}

// cost compiles the cost, and refuses a fixed one that can never pass.
func (z *zoneCompiler) cost() error {
	z.out.Cost.fixed = 1
	if z.z.Cost == "" {
		return nil
	}
	text := string(z.z.Cost)
	if err := checkBraces(text); err != nil {
		return z.fail("cost", -1, fmt.Errorf("%q: %w", text, err))
	}
	if pieces := split(text); len(pieces) == 1 && pieces[0].placeholder && !isGlobal(pieces[0].text) {
		key, err := z.key("cost", Texts{text}, mask{v4: 32, v6: 128})
		if err != nil {
			return err
		}
		z.out.Cost = Cost{text: &key.parts[0]}
		return nil
	}
	cost, known, err := z.integer(z.z.Cost, 1, algorithms.MaxExact)
	if err != nil {
		return z.fail("cost", -1, fmt.Errorf("%w, or one placeholder", err))
	}
	z.out.Cost.fixed = cost
	for _, l := range z.out.Plans[0].Limits {
		if known && !z.pending && l.Quota > 0 && cost > l.Capacity {
			return z.fail("cost", -1, fmt.Errorf("%d can never pass, the limit admits at most %d at once; want 1 to %d", cost, l.Capacity, l.Capacity))
		}
	}
	return nil
}

// parseLimit reads quota/window: 100/1m, 10/s, 5/15m, 10r/s.
func parseLimit(text string) (quota int64, window time.Duration, err error) {
	count, per, ok := strings.Cut(text, "/")
	if !ok {
		return 0, 0, fmt.Errorf("%q; want quota/window, such as 100/1m or 10/s", text)
	}
	digits := strings.TrimSuffix(count, "r")
	quota, err = strconv.ParseInt(digits, 10, 64)
	if err != nil || digits == "" || digits[0] == '+' || quota < 0 || quota > algorithms.MaxExact {
		return 0, 0, fmt.Errorf("%q: the quota is %q; want a whole number from 0 to %d", text, count, algorithms.MaxExact)
	}
	switch per {
	case "us", "ms", "s", "m", "h", "d":
		per = "1" + per
	}
	window, err = caddy.ParseDuration(per)
	if err != nil || window <= 0 {
		return 0, 0, fmt.Errorf("%q: the window is %q; want a duration above zero, such as 1m", text, per)
	}
	return quota, window, nil
}
