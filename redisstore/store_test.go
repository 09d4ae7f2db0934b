package redisstore

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/algorithms/storetest"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

var prefixes atomic.Int64

// open makes a store in a prefix of its own. Its timeout is long, because the machine of a test may
// be busy.
func open(t testing.TB, o Options) *Store {
	t.Helper()
	if o.Prefix == "" {
		o.Prefix = fmt.Sprintf("t%d", prefixes.Add(1))
	}
	if o.Timeout == 0 {
		o.Timeout = 10 * time.Second
	}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// given makes stores for the conformance suite, on the suite's clock and without memory of
// refusals, which runs on the real one.
func given(addr string) func(*testing.T, *storetest.Clock) algorithms.Store {
	return func(t *testing.T, clock *storetest.Clock) algorithms.Store {
		s, err := New(Options{
			Addrs: []string{addr}, Prefix: fmt.Sprintf("g%d", prefixes.Add(1)), Timeout: 5 * time.Second, RefusedKeys: -1, clock: clock.Now,
		})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
}

func TestConformance(t *testing.T) { storetest.Run(t, given(redistest.Start(t).Addr)) }

func TestTraces(t *testing.T) {
	storetest.Traces(t, "../testdata/traces", given(redistest.Start(t).Addr))
}

func TestDifferential(t *testing.T) {
	clock := storetest.NewClock()
	store := given(redistest.Start(t).Addr)(t, clock)
	defer store.Close()
	storetest.Differential(t, store, clock, 20_000, uint64(time.Now().UnixNano()))
}

func compile(t testing.TB, zone string, p algorithms.Policy) *algorithms.Limit {
	t.Helper()
	l, err := algorithms.Compile(zone, p)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// perHour is an exact limit.
func perHour(t testing.TB, zone string, n int64) *algorithms.Limit {
	return compile(t, zone, algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: n, Window: time.Hour})
}

func ask1(t testing.TB, s *Store, c algorithms.Charge) algorithms.Outcome {
	t.Helper()
	var out [1]algorithms.Outcome
	if err := s.Apply(context.Background(), []algorithms.Charge{c}, out[:]); err != nil {
		t.Fatal(err)
	}
	return out[0]
}
