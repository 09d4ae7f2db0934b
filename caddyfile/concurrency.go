// Requests in flight: a lease for each.

package caddyfile

import (
	"errors"
	"fmt"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice/algorithms"
)

const defaultLease = 30 * time.Second

// concurrency compiles the limit of requests in flight, or returns nil.
func (z *zoneCompiler) concurrency() (*algorithms.Limit, error) {
	c := z.z.Concurrency
	if c == nil {
		return nil, nil
	}
	most, known, err := z.integer(c.Max, 0, algorithms.MaxExact)
	if err != nil {
		return nil, z.fail("concurrency.max", -1, err)
	}
	lease, err := z.upToADay("concurrency.lease", c.Lease)
	if err != nil {
		return nil, err
	}
	if z.out.RetryAfter, err = z.upToADay("concurrency.retry_after", c.RetryAfter); err != nil {
		return nil, err
	}
	if !known {
		z.pending = true
		return nil, nil
	}
	if lease == 0 {
		lease = defaultLease
	}
	l, err := algorithms.Compile(z.name, algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: most, Window: lease})
	if err != nil {
		return nil, z.fail("concurrency.lease", -1, err)
	}
	l.MaxKeys = z.maxKeys
	return l, nil
}

// upToADay reads a duration that may be left out.
func (z *zoneCompiler) upToADay(field string, value caddy.Duration) (time.Duration, error) {
	d := time.Duration(value)
	if d != 0 && (d < time.Second || d > 24*time.Hour) {
		return 0, z.fail(field, -1, fmt.Errorf("%v; want 1s to 24h%s", d, nanoseconds(d)))
	}
	return d, nil
}

// leasesOnly refuses what is about units in a zone that has none.
func (z *zoneCompiler) leasesOnly() error {
	for _, word := range []struct {
		field   string
		written bool
	}{
		{"algorithm", z.z.Algorithm != ""}, {"burst", z.z.Burst != ""}, {"queue", z.z.Queue != nil},
		{"cost", z.z.Cost != ""}, {"charge", z.z.Charge != ""}, {"count", z.z.Count != nil},
	} {
		if word.written {
			return z.fail(word.field, -1, errors.New("there is no limit that it could be about, and in concurrency each request is one; "+
				"want a limit beside it, or leave it out"))
		}
	}
	return nil
}

// keepLeases makes leases endless: what counts in this process dies with it, so that they need no
// expiry, and without one a changed lease does not start the count afresh.
func (r *Rule) keepLeases() (err error) {
	for _, plan := range r.Plans {
		for i, l := range plan.Limits {
			if l.Algorithm == algorithms.Concurrency && err == nil {
				plan.Limits[i], err = endless(l)
			}
		}
	}
	if r.Ban != nil && r.Ban.Pending != nil && err == nil {
		r.Ban.Pending, err = endless(r.Ban.Pending)
	}
	return err
}

func endless(l *algorithms.Limit) (*algorithms.Limit, error) {
	policy := l.Policy
	policy.Window = algorithms.MaxWindow
	e, err := algorithms.Compile(l.Space.Zone, policy)
	if err != nil {
		return nil, err
	}
	e.MaxKeys = l.MaxKeys
	return e, nil
}
