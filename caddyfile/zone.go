// One zone → one rule.

package caddyfile

import (
	"errors"
	"fmt"
	"slices"
	"strings"
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
	if err := checkName(z.name); err != nil {
		return nil, z.fail("", -1, fmt.Errorf("name %q; %w", z.name, err))
	}
	if z.z == nil {
		return nil, z.fail("", -1, errors.New("null; want a zone with a limit"))
	}
	for _, set := range z.z.MatchRaw {
		if len(set) == 0 {
			z.warn("match without a matcher is every request; want matchers in it, or leave it out")
		}
	}
	for i, set := range z.z.ExemptRaw {
		if len(set) == 0 {
			return nil, z.fail("exempt", i, errors.New("no matcher, so that every request would be exempt; want one such as client_ip"))
		}
	}
	z.out = &Rule{Zone: z.name, DryRun: z.z.DryRun, Place: z.z.Place, maxKeys: z.maxKeys}
	for _, step := range []func() error{z.plans, z.matchers, z.keys, z.cost, z.charge, z.count, z.ban, z.enforce, z.store} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	z.out.pending = z.pending
	return z.out, nil
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
	z.out.keyText = strings.Join(texts, " ")
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
