package caddyfile

import (
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// In this process leases are endless, in Redis they last as written; what is beside them stays as
// it is.
func TestLeases(t *testing.T) {
	for _, tc := range []struct {
		store string
		redis bool
		want  time.Duration
	}{
		{"", false, algorithms.MaxWindow}, {"local", false, algorithms.MaxWindow}, {"local", true, algorithms.MaxWindow},
		{"", true, time.Minute}, {"redis", true, time.Minute},
	} {
		r := rule(t, Zone{Tier: tiers("{vars.plan}"), Store: tc.store, Concurrency: &Concurrency{Max: "3", Lease: 6e10}})
		for range 2 { // whoever resolves it again finds it as it is
			if err := r.Resolve(tc.redis); err != nil {
				t.Fatal(err)
			}
		}
		for i, plan := range r.Plans {
			switch {
			case plan.Tier == "staff" && len(plan.Limits) == 0:
			case len(plan.Limits) != 2:
				t.Fatalf("plan %d: %v", i, plan.Limits)
			default:
				lease := plan.Limits[1]
				if lease.Algorithm != algorithms.Concurrency || lease.Window != tc.want || lease.Quota != 3 || lease.MaxKeys != algorithms.DefaultMaxKeys {
					t.Errorf("store %q: %+v", tc.store, lease)
				}
				if plan.Limits[0].Window != time.Hour || plan.Names[1] != "z."+plan.Tier+".concurrent" {
					t.Errorf("store %q: %+v, %v", tc.store, plan.Limits[0], plan.Names)
				}
			}
		}
	}
}
