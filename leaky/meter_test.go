package leaky

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/algorithms/storetest"
)

// meter asks a meter at moments counted in milliseconds.
type meter struct {
	t     *testing.T
	clock *storetest.Clock
	store algorithms.Store
	limit *algorithms.Limit
}

func newMeter(t *testing.T, quota int64, window time.Duration, burst int64) *meter {
	limit, err := algorithms.Compile("zone", Meter(quota, window, burst))
	if err != nil {
		t.Fatal(err)
	}
	clock := storetest.NewClock()
	return &meter{t, clock, storetest.NewReference(clock.Now), limit}
}

// ask wants a retry of the given milliseconds, rounded up; 0 wants the request admitted, below 0
// never.
func (m *meter) ask(at, cost, retry int64) {
	m.t.Helper()
	m.clock.Set(storetest.Start + at*1000)
	var out [1]algorithms.Outcome
	charges := []algorithms.Charge{{Key: "k", Limit: m.limit, Cost: cost}}
	if err := m.store.Apply(context.Background(), charges, out[:]); err != nil {
		m.t.Fatal(err)
	}
	got := int64(-1)
	if out[0].Retry != algorithms.Never {
		got = (out[0].Retry + time.Millisecond - 1).Milliseconds()
	}
	if got != retry {
		m.t.Errorf("at %d ms, cost %d: retry %d ms, want %d", at, cost, got, retry)
	}
}

// 10/s, burst 0: 0 passes; 0 refused, retry 100; 99 refused, retry 1; 100 passes.
func TestMeterWithoutBurst(t *testing.T) {
	m := newMeter(t, 10, time.Second, 0)
	m.ask(0, 1, 0)
	m.ask(0, 1, 100)
	m.ask(99, 1, 1)
	m.ask(100, 1, 0)
	m.ask(100, 2, -1)
}

// `limit 10/1s`, `burst 5` = one in service plus five above it.
func TestMeterWithBurst(t *testing.T) {
	m := newMeter(t, 10, time.Second, 5)
	for range 6 {
		m.ask(0, 1, 0)
	}
	m.ask(0, 1, 100)
	m.ask(0, 2, 200)
	m.ask(0, 7, -1)
	m.ask(99, 1, 1)
	m.ask(100, 1, 0)
	m.ask(100, 1, 100)
	m.ask(700, 6, 0)
	m.ask(700, 1, 100)
}

// Three a second has no whole interval. What is left of a millisecond is not lost: saturated for
// 100 s, the meter admits what was in the bucket and exactly three a second.
func TestMeterIsExact(t *testing.T) {
	m := newMeter(t, 3, time.Second, 1)
	admitted := 0
	for at := int64(0); at <= 100_000; at++ {
		m.clock.Set(storetest.Start + at*1000)
		var out [1]algorithms.Outcome
		if err := m.store.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: m.limit, Cost: 1}}, out[:]); err != nil {
			t.Fatal(err)
		}
		if out[0].OK {
			admitted++
			at-- // once more at the same moment
		}
	}
	if admitted != 2+300 {
		t.Errorf("%d admitted in 100 s, want 302", admitted)
	}
}

func TestMeterPolicy(t *testing.T) {
	for burst, want := range map[int64]int64{0: 1, 5: 6, math.MaxInt64: math.MaxInt64} {
		p := Meter(10, time.Second, burst)
		if p != (algorithms.Policy{Algorithm: algorithms.LeakyBucket, Quota: 10, Window: time.Second, Burst: want}) {
			t.Errorf("burst %d: %+v", burst, p)
		}
	}
	for _, burst := range []int64{-1, -7, math.MinInt64, math.MaxInt64} {
		if _, err := algorithms.Compile("zone", Meter(10, time.Second, burst)); !errors.Is(err, algorithms.ErrBurst) {
			t.Errorf("burst %d: %v, want %v", burst, err, algorithms.ErrBurst)
		}
	}
	// A quota of 0 loads and refuses everything.
	m := newMeter(t, 0, time.Second, 5)
	m.ask(0, 1, -1)
	m.ask(5000, 1, -1)
}
