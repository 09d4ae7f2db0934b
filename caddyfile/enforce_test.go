package caddyfile

import (
	"fmt"
	"math"
	"testing"
)

// The share of keys is the share that is asked for, whatever the keys look like, and for each byte
// in which they differ.
func TestEnforcesItsShare(t *testing.T) {
	const keys = 100_000
	for form, key := range map[string]func(i int) string{
		"numbers":   func(i int) string { return fmt.Sprint(i) },
		"addresses": func(i int) string { return fmt.Sprintf("10.%d.%d.%d", i>>16, i>>8&255, i&255) },
		"networks":  func(i int) string { return fmt.Sprintf("2001:db8:%x::/64", i) },
		"prefixes":  func(i int) string { return fmt.Sprintf("%d-the-same-for-all", i) },
		"bytes":     func(i int) string { return string([]byte{byte(i), byte(i >> 8), byte(i >> 16)}) },
	} {
		for _, percent := range []float64{0.5, 1, 10, 50, 90, 99.9} {
			r := rule(t, Zone{Enforce: Number(fmt.Sprintf("%g%%", percent))})
			enforced := 0.0
			for i := range keys {
				if r.Enforces(key(i)) {
					enforced++
				}
			}
			share := percent / 100
			if deviation := math.Abs(enforced-share*keys) / math.Sqrt(keys*share*(1-share)); deviation > 4 {
				t.Errorf("%s: %g of %d keys at %g%%, %.1f standard deviations off", form, enforced, keys, percent, deviation)
			}
		}
	}
}

// Who is refused at a percentage is refused at every greater one, so that a rollout only ever adds
// keys.
func TestEnforcesMoreAsItGrows(t *testing.T) {
	var steps []*Rule
	for _, percent := range []Number{"0%", "0.001%", "1%", "5%", "10%", "33.3%", "50%", "99.999999%", "100%"} {
		steps = append(steps, rule(t, Zone{Enforce: percent}))
	}
	for i := range 20_000 {
		key, before := fmt.Sprint("client-", i), false
		for step, r := range steps {
			now := r.Enforces(key)
			if before && !now || step == 0 && now || step == len(steps)-1 && !now {
				t.Fatalf("%s at step %d: %t after %t", key, step, now, before)
			}
			before = now
		}
	}
}

// Instances of other versions, on other machines, must agree on these.
func TestEnforcesTheSameEverywhere(t *testing.T) {
	half := rule(t, Zone{Enforce: "50%"})
	got := ""
	for i := range 32 {
		got += map[bool]string{true: "x", false: "."}[half.Enforces(fmt.Sprint(i))]
	}
	if want := ".x.x.x.xxx.x.x.x..x.xx.xx.x..xx."; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if h := mix(hash(fnvOffset, "")); h != 0xefd01f60ba992926 {
		t.Errorf("the hash of nothing is %#x", h)
	}
}

// The keys that are refused first in one zone are not those of another.
func TestEnforcesByZone(t *testing.T) {
	const keys = 10_000
	a, b := newShare("a", 10), newShare("b", 10)
	both := 0
	for i := range keys {
		if key := fmt.Sprint(i); a.has(key) && b.has(key) {
			both++
		}
	}
	if both < keys/200 || both > keys/50 {
		t.Errorf("%d of %d keys are in both shares, want about 100", both, keys)
	}
}

func TestEnforcesCheaply(t *testing.T) {
	r := rule(t, Zone{Enforce: "50%"})
	if n := testing.AllocsPerRun(100, func() { r.Enforces("192.0.2.7") }); n > 0 {
		t.Errorf("allocates %g times", n)
	}
	if rule(t, Zone{Enforce: "100%"}).share != nil || rule(t, Zone{}).share != nil {
		t.Error("all keys are asked for their hash")
	}
	if dry := rule(t, Zone{DryRun: true}); dry.Enforces("192.0.2.7") {
		t.Error("a dry run refuses")
	}
}
