package telemetry

import (
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/leaky"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// scrape gathers the rate limiter's metrics as `name{label="value",…}` → value; of a histogram
// the count, the sum and the cumulative buckets.
func scrape(t *testing.T, g prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := make(map[string]float64)
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "caddy_rate_limit_") {
			continue
		}
		for _, m := range f.Metric {
			switch {
			case m.Counter != nil:
				values[nameOf(f, m, "")] = m.Counter.GetValue()
			case m.Gauge != nil:
				values[nameOf(f, m, "")] = m.Gauge.GetValue()
			case m.Histogram != nil:
				values[nameOf(f, m, "_count")] = float64(m.Histogram.GetSampleCount())
				values[nameOf(f, m, "_sum")] = m.Histogram.GetSampleSum()
				for _, b := range m.Histogram.Bucket {
					le := time.Duration(math.Round(b.GetUpperBound() * 1e9)).String()
					values[nameOf(f, m, "_le_"+le)] = float64(b.GetCumulativeCount())
				}
			}
		}
	}
	return values
}

func nameOf(f *dto.MetricFamily, m *dto.Metric, suffix string) string {
	var labels []string
	for _, l := range m.Label {
		labels = append(labels, l.GetName()+`="`+l.GetValue()+`"`)
	}
	return strings.TrimPrefix(f.GetName(), "caddy_rate_limit_") + suffix + "{" + strings.Join(labels, ",") + "}"
}

func expect(t *testing.T, got map[string]float64, want map[string]float64) {
	t.Helper()
	for name, v := range want {
		if g, ok := got[name]; !ok || math.Abs(g-v) > 1e-12 {
			t.Errorf("%s = %v (present: %v), want %v", name, g, ok, v)
		}
	}
}

func openZone(t *testing.T, c *collector, r prometheus.Registerer, s Source) *Zone {
	t.Helper()
	z, err := c.open(r, s)
	if err != nil {
		t.Fatal(err)
	}
	return z
}

func compiled(t *testing.T, quota int64, window time.Duration) *algorithms.Limit {
	t.Helper()
	return compile(t, algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: quota, Window: window})
}

func compile(t *testing.T, p algorithms.Policy) *algorithms.Limit {
	t.Helper()
	l, err := algorithms.Compile("zone", p)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// The names and labels that dashboards made for caddy-ratelimit ask for, and the finer ones.
func TestMetrics(t *testing.T) {
	c, r := newCollector(), prometheus.NewPedanticRegistry()
	z := openZone(t, c, r, Source{
		Zone: "api", Store: "local", Limits: []*algorithms.Limit{compiled(t, 100, time.Minute), compiled(t, 1000, time.Hour)},
		IPv4Prefix: 32, IPv6Prefix: 64, Keys: func() int { return 7 }, Evictions: func() int64 { return 3 },
	})
	z.Count(Passed, 2*time.Microsecond)
	z.Count(Passed, 10*time.Microsecond) // le is inclusive
	z.Count(Refused, 3*time.Millisecond)
	z.Count(PassedDryRun, time.Microsecond)
	z.Count(RefusedDryRun, 2*time.Second) // above all bounds
	z.Count(Delayed, 4*time.Microsecond)
	z.Count(DelayedDryRun, 4*time.Microsecond)
	z.Count(Exempt, 0)
	z.CountBan()
	got := scrape(t, r)
	expect(t, got, map[string]float64{
		`requests_total{zone="api"}`:                                          7,
		`declined_requests_total{zone="api"}`:                                 1,
		`keys_total{zone="api"}`:                                              7,
		`evictions_total{zone="api"}`:                                         3,
		`decisions_total{result="passed",store="local",zone="api"}`:           2,
		`decisions_total{result="rejected",store="local",zone="api"}`:         1,
		`decisions_total{result="passed_dry_run",store="local",zone="api"}`:   1,
		`decisions_total{result="rejected_dry_run",store="local",zone="api"}`: 1,
		`decisions_total{result="delayed",store="local",zone="api"}`:          1,
		`decisions_total{result="delayed_dry_run",store="local",zone="api"}`:  1,
		`decisions_total{result="exempt",store="local",zone="api"}`:           1,
		`bans_total{zone="api"}`:                                              1,
		`process_time_seconds_count{zone="api"}`:                              7,
		`process_time_seconds_sum{zone="api"}`:                                2.003021,
		`process_time_seconds_le_10µs{zone="api"}`:                            5,
		`process_time_seconds_le_1ms{zone="api"}`:                             5,
		`process_time_seconds_le_5ms{zone="api"}`:                             6,
		`process_time_seconds_le_1s{zone="api"}`:                              6,
		`config{algorithm="sliding_log",burst="0",ipv4_prefix="32",ipv6_prefix="64",max_events="100",window="1m0s",zone="api"}`:    1,
		`config{algorithm="sliding_log",burst="0",ipv4_prefix="32",ipv6_prefix="64",max_events="1000",window="1h0m0s",zone="api"}`: 1,
	})
	for _, le := range []string{"1ms", "5ms", "10ms", "25ms", "50ms", "100ms", "250ms", "500ms", "1s"} {
		if _, ok := got[`process_time_seconds_le_`+le+`{zone="api"}`]; !ok {
			t.Errorf("the drop-in bucket %s is missing", le)
		}
	}
	for name := range got {
		if strings.HasPrefix(name, "delay_") || strings.HasPrefix(name, "waiting") || strings.HasPrefix(name, "in_flight") {
			t.Errorf("%s of a zone without a queue or leases", name)
		}
	}
}

// queued and leased are the limits that requests wait for or hold.
func queued(t *testing.T) *algorithms.Limit {
	return compile(t, leaky.Queue(10, time.Second, 5, 0, 0))
}

func leased(t *testing.T) *algorithms.Limit {
	return compile(t, algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: 2, Window: time.Minute})
}

// What waits and what is in flight, with the labels of the drop-in for its limits.
func TestQueueAndLeases(t *testing.T) {
	c, r := newCollector(), prometheus.NewPedanticRegistry()
	z := openZone(t, c, r, Source{Zone: "api", Store: "redis", Limits: []*algorithms.Limit{queued(t), leased(t)}})
	for _, d := range []time.Duration{time.Millisecond, time.Millisecond + 1, 100 * time.Millisecond, time.Minute, time.Hour, -time.Second} {
		z.Delay(d)
	}
	z.Waiting(1)
	z.Waiting(1)
	z.Waiting(-1)
	z.InFlight(1)
	z.CountBan()
	z.CountBan()
	got := scrape(t, r)
	expect(t, got, map[string]float64{
		`waiting{zone="api"}`:                 1,
		`in_flight{zone="api"}`:               1,
		`bans_total{zone="api"}`:              2,
		`delay_seconds_count{zone="api"}`:     6,
		`delay_seconds_sum{zone="api"}`:       3660.102000001,
		`delay_seconds_le_1ms{zone="api"}`:    2, // le is inclusive
		`delay_seconds_le_5ms{zone="api"}`:    3,
		`delay_seconds_le_10ms{zone="api"}`:   3,
		`delay_seconds_le_25ms{zone="api"}`:   3,
		`delay_seconds_le_50ms{zone="api"}`:   3,
		`delay_seconds_le_100ms{zone="api"}`:  4,
		`delay_seconds_le_250ms{zone="api"}`:  4,
		`delay_seconds_le_500ms{zone="api"}`:  4,
		`delay_seconds_le_1s{zone="api"}`:     4,
		`delay_seconds_le_2.5s{zone="api"}`:   4,
		`delay_seconds_le_5s{zone="api"}`:     4,
		`delay_seconds_le_10s{zone="api"}`:    4,
		`delay_seconds_le_30s{zone="api"}`:    4,
		`delay_seconds_le_1m0s{zone="api"}`:   5,
		`requests_total{zone="api"}`:          0,
		`declined_requests_total{zone="api"}`: 0,
		`config{algorithm="leaky_bucket",burst="6",ipv4_prefix="0",ipv6_prefix="0",max_events="10",window="1s",zone="api"}`: 1,
		`config{algorithm="concurrency",burst="0",ipv4_prefix="0",ipv6_prefix="0",max_events="2",window="1m0s",zone="api"}`: 1,
	})
	if len(delayBounds) != 14 {
		t.Errorf("%d buckets", len(delayBounds))
	}
}

// Requests outlive their config: the gauges of a zone go on through a reload, also into a config
// without queue and leases, and go back to 0 when the requests of the old one end.
func TestGaugesSurviveReload(t *testing.T) {
	c := newCollector()
	r := prometheus.NewPedanticRegistry()
	old := openZone(t, c, r, Source{Zone: "api", Store: "local", Limits: []*algorithms.Limit{queued(t), leased(t)}})
	old.Waiting(1)
	old.InFlight(2)
	old.Delay(time.Second)
	old.CountBan()

	r = prometheus.NewPedanticRegistry()
	next := openZone(t, c, r, Source{Zone: "api", Store: "redis"})
	old.Close()
	next.InFlight(1)
	want := map[string]float64{
		`waiting{zone="api"}`: 1, `in_flight{zone="api"}`: 3, `delay_seconds_count{zone="api"}`: 1, `bans_total{zone="api"}`: 1,
	}
	expect(t, scrape(t, r), want)

	old.Waiting(-1)
	old.InFlight(-1)
	old.InFlight(-1)
	old.CountBan() // a failure that is counted when the old request ends
	next.InFlight(-1)
	expect(t, scrape(t, r), map[string]float64{`waiting{zone="api"}`: 0, `in_flight{zone="api"}`: 0, `bans_total{zone="api"}`: 2})

	next.InFlight(1)
	next.Close()
	r = prometheus.NewPedanticRegistry()
	again := openZone(t, c, r, Source{Zone: "api", Store: "local", Limits: []*algorithms.Limit{leased(t)}})
	next.InFlight(-1) // of a zone that was gone meanwhile, and began anew
	got := scrape(t, r)
	expect(t, got, map[string]float64{`in_flight{zone="api"}`: 0, `bans_total{zone="api"}`: 0})
	if _, queue := got[`waiting{zone="api"}`]; queue {
		t.Error("the new zone has the queue of the one that is gone")
	}
	again.Close()
}

// A reload: the new config opens before the old one closes, in a registry of its own. Values
// continue, the closed zone's callbacks are not called, zones that are gone leave no series.
func TestReloadKeepsValues(t *testing.T) {
	c := newCollector()
	old, next := prometheus.NewPedanticRegistry(), prometheus.NewPedanticRegistry()
	closed := false
	api := openZone(t, c, old, Source{Zone: "api", Store: "local", Limits: []*algorithms.Limit{compiled(t, 5, time.Minute)},
		Keys: func() int {
			if closed {
				t.Error("a closed zone was asked for its keys")
			}
			return 1
		}})
	login := openZone(t, c, old, Source{Zone: "login", Store: "local"})
	api.Count(Passed, 0)
	login.Count(Passed, 0)
	expect(t, scrape(t, old), map[string]float64{`keys_total{zone="api"}`: 1})

	again := openZone(t, c, next, Source{Zone: "api", Store: "local", Limits: []*algorithms.Limit{compiled(t, 10, time.Minute)}, Keys: func() int { return 2 }})
	api.Count(Passed, 0) // both configs serve
	again.Count(Refused, 0)
	expect(t, scrape(t, next), map[string]float64{`keys_total{zone="api"}`: 2}) // the newer one is asked
	api.Close()
	login.Close()
	closed = true
	api.Count(Passed, 0) // a request that is still in flight
	got := scrape(t, next)
	expect(t, got, map[string]float64{
		`requests_total{zone="api"}`:          4,
		`declined_requests_total{zone="api"}`: 1,
		`keys_total{zone="api"}`:              2,
		`config{algorithm="sliding_log",burst="0",ipv4_prefix="0",ipv6_prefix="0",max_events="10",window="1m0s",zone="api"}`: 1,
	})
	for name := range got {
		if strings.Contains(name, "login") || strings.Contains(name, `max_events="5"`) {
			t.Errorf("%s is still there", name)
		}
	}
	again.Close()
	again.Close() // twice does no harm
	if left := scrape(t, next); len(left) > 0 || len(c.zones) > 0 {
		t.Errorf("left after everything closed: %v", left)
	}
}

// Two handlers share a zone; a rejected config opens and closes without a trace.
func TestSharedZoneAndRejectedReload(t *testing.T) {
	c, r := newCollector(), prometheus.NewPedanticRegistry()
	one := openZone(t, c, r, Source{Zone: "api", Store: "local", Limits: []*algorithms.Limit{compiled(t, 5, time.Minute)}})
	two := openZone(t, c, r, Source{Zone: "api", Store: "local", Limits: []*algorithms.Limit{compiled(t, 5, time.Minute)}})
	rejected := openZone(t, c, prometheus.NewPedanticRegistry(), Source{Zone: "api", Store: "redis"})
	other := openZone(t, c, prometheus.NewPedanticRegistry(), Source{Zone: "other", Store: "local"})
	one.Count(Passed, 0)
	two.Count(Passed, 0)
	rejected.Count(Passed, 0)
	rejected.Close()
	other.Close()
	got := scrape(t, r)
	expect(t, got, map[string]float64{
		// The drop-in sums over stores, so that a zone that moves to another store is one series.
		`requests_total{zone="api"}`:                                3,
		`decisions_total{result="passed",store="local",zone="api"}`: 2,
		`decisions_total{result="passed",store="redis",zone="api"}`: 1,
	})
	configs := 0
	for name := range got {
		if strings.HasPrefix(name, "config{") {
			configs++
		}
		if strings.Contains(name, "other") {
			t.Errorf("%s is left of a rejected config", name)
		}
	}
	if configs != 1 {
		t.Errorf("%d config series of one limit", configs)
	}
}

func TestRegistryTrouble(t *testing.T) {
	c, r := newCollector(), prometheus.NewPedanticRegistry()
	r.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "caddy_rate_limit_requests_total", Help: "someone else's"}))
	if _, err := c.open(r, Source{Zone: "api"}); err == nil || len(c.zones) != 0 {
		t.Errorf("a name that is taken: %v, %d zones", err, len(c.zones))
	}
	if _, err := c.open(prometheus.NewPedanticRegistry(), Source{Zone: "\xff"}); err == nil || !strings.Contains(err.Error(), "UTF-8") {
		t.Errorf("a zone name that is not UTF-8: %v", err)
	}
}

func TestDisabledMetrics(t *testing.T) {
	var z *Zone
	z.Count(Passed, time.Second)
	z.CountBan()
	z.CountBadCost()
	z.CountFallback("local")
	z.Delay(time.Second)
	z.Waiting(1)
	z.InFlight(1)
	z.Close()
}

// Counting from many goroutines while scraping loses nothing and never goes back.
func TestConcurrentCounts(t *testing.T) {
	c, r := newCollector(), prometheus.NewPedanticRegistry()
	z := openZone(t, c, r, Source{Zone: "api", Store: "local", Limits: []*algorithms.Limit{queued(t), leased(t)}})
	const goroutines, each = 8, 1000 * results
	var wg sync.WaitGroup
	for range goroutines {
		wg.Go(func() {
			for i := range each {
				z.InFlight(1)
				z.Count(Result(i%results), time.Duration(i)*time.Microsecond)
				z.Delay(time.Duration(i) * time.Millisecond)
				z.InFlight(-1)
			}
		})
	}
	var counts []float64
	for range 20 {
		counts = append(counts, scrape(t, r)[`requests_total{zone="api"}`])
	}
	wg.Wait()
	got := scrape(t, r)
	expect(t, got, map[string]float64{`in_flight{zone="api"}`: 0, `delay_seconds_count{zone="api"}`: goroutines * each})
	counts = append(counts, got[`requests_total{zone="api"}`])
	if !slices.IsSorted(counts) || counts[len(counts)-1] != goroutines*each*(results-1)/results {
		t.Errorf("counts %v", counts)
	}
}

func TestCountDoesNotAllocate(t *testing.T) {
	z := openZone(t, newCollector(), prometheus.NewPedanticRegistry(), Source{Zone: "api"})
	if n := testing.AllocsPerRun(100, func() {
		z.Waiting(1)
		z.Delay(time.Second)
		z.Waiting(-1)
		z.InFlight(1)
		z.Count(Delayed, time.Microsecond)
		z.InFlight(-1)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// The shared store's series, in the registries of two configs.
func TestStoreMetrics(t *testing.T) {
	s := NewStore("redis")
	s.Failure("timeout")
	s.Failure("timeout")
	s.Unsettled(3)
	s.Unsettled(0)
	s.Unsettled(-1) // nothing was dropped: a counter does not go back
	s.SetUp(true)
	s.Call(2 * time.Millisecond)
	for range 2 {
		r := prometheus.NewPedanticRegistry()
		for range 2 { // each config's handlers register it
			if err := s.Register(r); err != nil {
				t.Fatal(err)
			}
		}
		expect(t, scrape(t, r), map[string]float64{
			`store_up{store="redis"}`:                          1,
			`store_errors_total{kind="timeout",store="redis"}`: 2,
			`unsettled_total{store="redis"}`:                   3,
			`store_duration_seconds_count{store="redis"}`:      1,
			`store_duration_seconds_sum{store="redis"}`:        0.002,
			`store_duration_seconds_le_1ms{store="redis"}`:     0,
			`store_duration_seconds_le_2.5ms{store="redis"}`:   1,
		})
	}
	s.SetUp(false)
	r := prometheus.NewPedanticRegistry()
	if err := s.Register(r); err != nil {
		t.Fatal(err)
	}
	expect(t, scrape(t, r), map[string]float64{`store_up{store="redis"}`: 0})
}

// What the house counters cost beside client_golang's, and what the two clock reads cost.
func BenchmarkCount(b *testing.B) {
	b.Run("stripes", func(b *testing.B) {
		z, _ := newCollector().open(prometheus.NewPedanticRegistry(), Source{Zone: "api"})
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				z.Count(Passed, 300*time.Nanosecond)
			}
		})
	})
	b.Run("client_golang", func(b *testing.B) {
		requests := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "a"}, []string{"zone"}).WithLabelValues("api")
		decisions := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "b"}, []string{"zone"}).WithLabelValues("api")
		seconds := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "c"}, []string{"zone"}).WithLabelValues("api")
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				requests.Inc()
				decisions.Inc()
				seconds.Observe((300 * time.Nanosecond).Seconds())
			}
		})
	})
	b.Run("two monotonic clock reads", func(b *testing.B) {
		base := time.Now()
		for b.Loop() {
			start := time.Since(base)
			_ = time.Since(base) - start
		}
	})
}
