// What the adapter knows and the load does not: the lines, and the other directives of the file.

package caddyfile

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
)

// adaptation is what the rate_limit directives of one Caddyfile know of each other.
type adaptation struct {
	count int // unnamed zones
	zones map[string]seenZone
}

type seenZone struct {
	settings string // "" when they are not known before the load
	place    string
	unnamed  bool
}

// adaptationOf finds the adaptation in the state that Caddy keeps while it adapts a file.
func adaptationOf(state map[string]any) *adaptation {
	const key = "github.com/caddy-sluice/sluice/caddyfile"
	a, ok := state[key].(*adaptation)
	if !ok {
		a = &adaptation{zones: map[string]seenZone{}}
		state[key] = a
	}
	return a
}

// unnamed makes a name for the next unnamed zone.
func (a *adaptation) unnamed(prefix string) string {
	for {
		a.count++
		name := prefix + strconv.Itoa(a.count)
		if _, taken := a.zones[name]; !taken {
			a.zones[name] = seenZone{unnamed: true}
			return name
		}
	}
}

// check compiles the config for its errors, and compares its zones with those of other directives.
func (p *parser) check() error {
	rules, err := compile(p.config, nil, nil)
	if err != nil {
		return p.locate(err)
	}
	for _, rule := range rules.Rules {
		if p.inFile {
			if err := rule.Resolve(p.redis); err != nil {
				return p.locate(err)
			}
		}
		if err := p.agree(rule); err != nil {
			return errorAt(p.written[spot{rule.Zone, "", -1}], err)
		}
	}
	return nil
}

func (p *parser) agree(rule *Rule) error {
	now := seenZone{place: rule.Place}
	if !rule.pending {
		now.settings = rule.Settings()
	}
	before, ok := p.file.zones[rule.Zone]
	switch {
	case !ok:
	case before.unnamed && before.place == "": // this is it
		now.unnamed = true
	case before.unnamed:
		return fmt.Errorf("zone %q has the name that the unnamed zone at %s got; want another name", rule.Zone, before.place)
	case before.settings != "" && now.settings != "" && before.settings != now.settings:
		here, there := Difference(now.settings, before.settings)
		return fmt.Errorf("zone %q has %s here, but %s at %s; want the same settings wherever a name is used, or another name",
			rule.Zone, here, there, before.place)
	case before.settings != "":
		return nil
	}
	p.file.zones[rule.Zone] = now
	return nil
}

// locate replaces the JSON path in an error by the word and line of the Caddyfile.
func (p *parser) locate(err error) error {
	var e *fieldError
	if !errors.As(err, &e) {
		return err
	}
	for _, s := range []spot{{e.zone, e.field, e.index}, {e.zone, e.field, -1}, {e.zone, "", -1}, {"", "", -1}} {
		if at, ok := p.written[s]; ok {
			if e.field == "" {
				return errorAt(at, fmt.Errorf("zone %s: %w", e.zone, e.err))
			}
			return errorAt(at, fmt.Errorf("%s: %w", word(e.field), e.err))
		}
	}
	return err
}

// errorAt adds the token's file and line, and the chain of imports it came by.
func errorAt(t caddyfile.Token, err error) error {
	d := caddyfile.NewDispenser([]caddyfile.Token{t})
	d.Next()
	return d.WrapErr(err)
}

func placeOf(t caddyfile.Token) string { return fmt.Sprintf("%s:%d", t.File, t.Line) }
