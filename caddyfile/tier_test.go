package caddyfile

import (
	"net/http"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/algorithms"
)

func tiers(by string) *Tiers {
	return &Tiers{By: by, Values: []TierValue{
		{"free", Tier{Limit: Texts{"100/1h"}}}, {"pro", Tier{Limit: Texts{"1000/1h"}}}, {"staff", Tier{Unlimited: true}},
	}, Default: &Tier{Limit: Texts{"5/1h"}}}
}

// The value counts to the letter, wherever it comes from; all others are the default.
func TestPlanOf(t *testing.T) {
	for by, set := range map[string]func(r *http.Request, value string){
		"{header.X-Plan}": func(r *http.Request, value string) { r.Header["X-Plan"] = []string{value} },
		"{vars.plan}":     func(r *http.Request, value string) { caddyhttp.SetVar(r.Context(), "plan", value) },
		"{map.plan}": func(r *http.Request, value string) {
			r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer).Set("map.plan", value)
		},
	} {
		rule := rule(t, Zone{Tier: tiers(by)})
		for value, want := range map[string]int{
			"free": 0, "pro": 1, "staff": 2, "default": 3, "": 3, "gold": 3, "Pro": 3, "p ro": 3, "pro,free": 3, "\xff": 3, "prop": 3,
		} {
			r := prepare("/", nil)
			set(r, value)
			if got := rule.PlanOf(r); got != want {
				t.Errorf("%s with %q: plan %d, want %d", by, value, got, want)
			}
			if n := testing.AllocsPerRun(100, func() { rule.PlanOf(r) }); n > 0 {
				t.Errorf("%s with %q allocates %g times", by, value, n)
			}
		}
		if got := rule.PlanOf(prepare("/", nil)); got != 3 {
			t.Errorf("%s without a value: plan %d, want the default", by, got)
		}
	}
	blanks := prepare("/", func(r *http.Request) { r.Header["X-Plan"] = []string{" pro "} }) // as HTTP/2 carries them, and the next proxy does not
	if got := rule(t, Zone{Tier: tiers("{header.X-Plan}")}).PlanOf(blanks); got != 1 {
		t.Errorf("blanks around a header: plan %d", got)
	}
	if got := rule(t, Zone{}).PlanOf(prepare("/", nil)); got != 0 {
		t.Errorf("without tiers: plan %d", got)
	}
}

// A user who changes plan keeps the usage: the counters of a window are the same ones in every
// plan.
func TestTiersShareCounters(t *testing.T) {
	spaces := map[algorithms.Space]bool{}
	r := rule(t, Zone{Tier: tiers("{vars.plan}")})
	for limit := range r.AllLimits() {
		spaces[limit.Space] = true
	}
	if len(spaces) != 1 {
		t.Errorf("spaces %v", spaces)
	}
	if staff := r.Plans[2]; len(staff.Limits) != 0 || len(staff.Names) != 0 {
		t.Errorf("unlimited is %+v", staff)
	}
}
