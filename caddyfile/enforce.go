// Which keys a rule refuses, while it is rolled out.

package caddyfile

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Enforces reports whether the key is one of those that the rule refuses; the others are as in a
// dry run. The answer is the same on every instance, and a key that is refused stays so when the
// share grows.
func (r *Rule) Enforces(key string) bool {
	return !r.DryRun && (r.share == nil || r.share.has(key))
}

// EnforcesNone reports whether the rule refuses nobody, whatever the key.
func (r *Rule) EnforcesNone() bool { return r.DryRun || r.share != nil && r.share.below == 0 }

// share is a part of a zone's keys: those whose hash is below a bound. It depends on the zone too,
// so that it is not the same clients who are refused first everywhere.
type share struct {
	zone  uint64 // the hash of the zone's name
	below uint64
}

func newShare(zone string, percent float64) *share {
	return &share{zone: hash(hash(fnvOffset, zone), "\x00"), below: uint64(percent / 100 * (1 << 64))}
}

func (s *share) has(key string) bool { return mix(hash(s.zone, key)) < s.below }

// FNV-1a. It must stay what it is: instances of different versions have to agree.
const (
	fnvOffset = 14695981039346656037
	fnvPrime  = 1099511628211
)

func hash(h uint64, text string) uint64 {
	for i := range len(text) {
		h = (h ^ uint64(text[i])) * fnvPrime
	}
	return h
}

// mix spreads the differences of short keys over all bits, with MurmurHash3's last step: FNV leaves
// them in the low ones.
func mix(h uint64) uint64 {
	h = (h ^ h>>33) * 0xff51afd7ed558ccd
	h = (h ^ h>>33) * 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// enforce compiles the share of keys that are refused.
func (z *zoneCompiler) enforce() error {
	if z.z.Enforce == "" {
		return nil
	}
	if z.z.DryRun {
		return z.fail("enforce", -1, errors.New("dry_run is written too, and refuses nobody; want one of the two"))
	}
	text, known, err := z.expand(string(z.z.Enforce))
	if err != nil {
		return z.fail("enforce", -1, err)
	}
	number, isPercent := strings.CutSuffix(text, "%")
	percent, err := strconv.ParseFloat(number, 64)
	switch {
	case !known:
	// A bare 0.1 may be meant as a fraction, as in jitter: 100 times as many clients.
	case err == nil && !isPercent && percent > 0 && percent < 1:
		return z.fail("enforce", -1, fmt.Errorf("%q; want %s%% for that percentage, or %s%% if it is meant as a fraction",
			text, number, strconv.FormatFloat(percent*100, 'g', 12, 64)))
	case err == nil && !isPercent && percent >= 0 && percent <= 100:
		return z.fail("enforce", -1, fmt.Errorf("%q; want it with a percent sign, %s%%", text, number))
	case err != nil || !(percent >= 0 && percent <= 100):
		return z.fail("enforce", -1, fmt.Errorf("%q; want a percentage from 0 to 100, such as 10%%", text))
	case percent < 100:
		z.out.share = newShare(z.name, percent)
	}
	return nil
}
