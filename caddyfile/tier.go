// Tiers: which of a zone's plans holds for a request.

package caddyfile

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
)

const (
	tierBy      = "tier.by"
	tierDefault = "default"
)

// PlanOf returns the index of the plan that holds for the request: the one of the value to the
// letter, or the default.
func (r *Rule) PlanOf(req *http.Request) int {
	last := len(r.Plans) - 1
	if r.tier == nil {
		return last
	}
	var buf [64]byte
	value, _ := r.tier.append(buf[:0], req, nil)
	for i, plan := range r.Plans[:last] {
		if plan.Tier == string(value) {
			return i
		}
	}
	return last
}

// tiers reads the plans in the order of the file, the default last.
func (z *zoneCompiler) tiers() (drafts []draft, err error) {
	t := z.z.Tier
	if z.out.tier, err = z.placeholder(tierBy, t.By); err != nil {
		return nil, err
	}
	switch {
	case z.out.tier == nil:
		return nil, z.fail(tierBy, -1, fmt.Errorf("%q; want one placeholder with a value for each request, such as {http.auth.user.plan}", t.By))
	case len(t.Values) == 0:
		return nil, z.fail("tier", -1, errors.New("no value; want lines such as pro 1000/1h, or a limit without tier"))
	case t.Default == nil:
		return nil, z.fail("tier", -1, errors.New("no default; want a line such as default 10/1m, for clients whose value is empty or another"))
	}
	for i, v := range t.Values {
		field := tierField(i)
		switch {
		case checkName(v.Value) != nil:
			return nil, z.fail(field, -1, fmt.Errorf("value %q; %w", v.Value, checkName(v.Value)))
		case v.Value == tierDefault:
			return nil, z.fail(field, -1, fmt.Errorf("value %q is how clients see the plan of all others; want another", v.Value))
		case slices.ContainsFunc(drafts, func(d draft) bool { return d.tier == v.Value }):
			return nil, z.fail(field, -1, fmt.Errorf("value %q is written twice; want it once, with all its limits", v.Value))
		}
		d, err := z.tierDraft(field, v.Value, v.Tier)
		if err != nil {
			return nil, err
		}
		drafts = append(drafts, d)
	}
	d, err := z.tierDraft("tier.default", tierDefault, *t.Default)
	if err != nil {
		return nil, err
	}
	drafts = append(drafts, d)
	if !slices.ContainsFunc(drafts, func(d draft) bool { return !d.unlimited }) {
		return nil, z.fail("tier", -1, errors.New("every line is unlimited; want a limit in one of them"))
	}
	return drafts, nil
}

func (z *zoneCompiler) tierDraft(field, name string, t Tier) (d draft, err error) {
	switch {
	case t.Unlimited && len(t.Limit) > 0:
		return d, z.fail(field, -1, fmt.Errorf("%s has limits and is unlimited; want one of the two", name))
	case !t.Unlimited && len(t.Limit) == 0:
		return d, z.fail(field, -1, fmt.Errorf("%s has no limit; want one such as 100/1m, or unlimited", name))
	}
	d = draft{tier: name, unlimited: t.Unlimited}
	d.limits, err = z.limits(field+".limit", t.Limit)
	return d, err
}
