package main

// The limiters that are compared, each with a quota that is never used up, one that is used up by
// the first request for a day, and one with which memory is measured.

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	peer "github.com/sethvargo/go-limiter"
	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/memstore"
	"golang.org/x/time/rate"

	"github.com/caddy-sluice/sluice/algorithms"
	sluice "github.com/caddy-sluice/sluice/memstore"
)

// quota is in units per window.
type quota struct {
	units  int64
	window time.Duration
}

func (q quota) String() string { return fmt.Sprintf("%d/%v", q.units, q.window) }

var (
	endless = quota{1_000_000_000, time.Minute}
	usedUp  = quota{1, 24 * time.Hour}
	usual   = quota{100, time.Hour} // an hour, so that no key is full again, and forgotten, before the last is there
)

type subject struct {
	name string
	make func(quota) limiter
}

func (s subject) limiter(refuse bool) limiter {
	if refuse {
		return s.make(usedUp)
	}
	return s.make(endless)
}

func (s subject) hundred() limiter { return s.make(usual) }

// baseline is what the ratios are to.
const baseline = "go-limiter"

var subjects = []subject{
	{"sluice memstore, sliding_window", func(q quota) limiter { return newStore(algorithms.SlidingWindow, q) }},
	{"sluice memstore, token_bucket", func(q quota) limiter { return newStore(algorithms.TokenBucket, q) }},
	{"sluice handler", newHandler},
	{baseline, newGoLimiter},
	{"throttled", newThrottled},
	{"x/time/rate in a sync.Map", func(q quota) limiter { return &perKey{quota: q} }},
}

func find(name string) subject {
	i := slices.IndexFunc(subjects, func(s subject) bool { return s.name == name })
	if i < 0 {
		check(fmt.Errorf("no subject %q; the table's first column has their names", name))
	}
	return subjects[i]
}

// byKey is a worker for a limiter that is asked about a text.
type byKey struct {
	keys [maxBatch]string
	ask  func(key string) bool
	sum  byte
}

func (w *byKey) batch() int { return maxBatch }

func (w *byKey) prepare(slot int, key string) {
	w.keys[slot] = key
	w.sum += key[len(key)-1] // the bytes of a request's key were just read
}

func (w *byKey) decide(slot int) bool { return w.ask(w.keys[slot]) }

type store struct {
	store *sluice.Store
	limit *algorithms.Limit
}

func newStore(a algorithms.Algorithm, q quota) limiter {
	p := algorithms.Policy{Algorithm: a, Quota: q.units, Window: q.window}
	switch {
	case a == algorithms.TokenBucket && q == endless:
		// Refilled as fast as that, a bucket would be full again, and forgotten, before its next
		// request.
		p.Quota, p.Window, p.Burst = 100_000, 24*time.Hour, 100_000_000
	case a == algorithms.TokenBucket:
		p.Burst = q.units
	}
	l, err := algorithms.Compile("bench", p)
	check(err)
	return store{sluice.New(), l}
}

func (s store) worker() worker {
	// One batch for many requests, as the handler has them in a pool.
	charges := []algorithms.Charge{{Limit: s.limit, Cost: 1}}
	out := make([]algorithms.Outcome, 1, 8) // so long that two workers do not share a cache line
	ctx := context.Background()
	return &byKey{ask: func(key string) bool {
		charges[0].Key = key
		_ = s.store.Apply(ctx, charges, out)
		return out[0].OK
	}}
}

type goLimiter struct{ store peer.Store }

func newGoLimiter(q quota) limiter {
	s, err := memorystore.New(&memorystore.Config{Tokens: uint64(q.units), Interval: q.window})
	check(err)
	return goLimiter{s}
}

func (l goLimiter) worker() worker {
	ctx := context.Background()
	return &byKey{ask: func(key string) bool {
		_, _, _, ok, _ := l.store.Take(ctx, key)
		return ok
	}}
}

type throttle struct{ limiter *throttled.GCRARateLimiterCtx }

func newThrottled(q quota) limiter {
	s, err := memstore.NewCtx(0) // unbounded
	check(err)
	l, err := throttled.NewGCRARateLimiterCtx(s, throttled.RateQuota{
		MaxRate: throttled.PerDuration(int(q.units), q.window), MaxBurst: int(q.units) - 1,
	})
	check(err)
	return throttle{l}
}

func (l throttle) worker() worker {
	ctx := context.Background()
	return &byKey{ask: func(key string) bool {
		refused, _, _ := l.limiter.RateLimitCtx(ctx, key, 1)
		return !refused
	}}
}

// perKey is what programs write around x/time/rate.
type perKey struct {
	quota
	limiters sync.Map
}

func (l *perKey) worker() worker {
	every := rate.Every(l.window / time.Duration(l.units))
	if l.units > int64(l.window) {
		every = rate.Inf
	}
	return &byKey{ask: func(key string) bool {
		v, ok := l.limiters.Load(key)
		if !ok {
			v, _ = l.limiters.LoadOrStore(key, rate.NewLimiter(every, int(l.units)))
		}
		return v.(*rate.Limiter).Allow()
	}}
}
