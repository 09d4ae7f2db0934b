package telemetry

// What a scrape costs: the process-level collector. Caddy makes a fresh registry for every config,
// so the numbers cannot live in one. This collector outlives them and is registered with each.

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Source describes a zone of a handler to the metrics.
type Source struct {
	// Zone is its name. Names come from the config, never from clients.
	Zone string
	// Store is where it counts: local.
	Store string
	// Limits are shown by the metric config, with the prefix lengths that addresses are grouped by.
	Limits                 []*algorithms.Limit
	IPv4Prefix, IPv6Prefix int
	// Keys and Evictions are called at every scrape, until Close returns: how many keys the zone
	// holds, and how many were forgotten for want of room since the process started. They must not
	// call into this package. Either may be nil.
	Keys      func() int
	Evictions func() int64
}

// Zone counts for one zone of one handler. Handlers with the same zone name add to the same series.
// A nil *Zone counts nothing: that is `disable_metrics`.
type Zone struct {
	Source
	counters counters
	series   *series
	owner    *collector
}

// Open begins to count a zone and makes its series visible in the registry, which is that of the
// caddy.Context. Series live as long as any Zone of that name is open, so they survive reloads and
// end with the zone.
func Open(registry prometheus.Registerer, source Source) (*Zone, error) {
	return process.open(registry, source)
}

// process is the collector that all configs share.
var process = newCollector()

// Count counts a request of the zone and how long the handler took to decide it, which
// is the same duration for all zones of a request.
func (z *Zone) Count(r Result, took time.Duration) {
	if z != nil {
		z.counters.add(r, took)
	}
}

// CountBadCost counts a request whose cost was not a whole number of at least 0.
func (z *Zone) CountBadCost() {
	if z != nil {
		z.series.badCosts.Add(1)
	}
}

// Delay counts how long a request had to wait for its slot in a queue. It is not called for those
// that had not.
func (z *Zone) Delay(d time.Duration) {
	if z != nil {
		z.series.delays.add(d)
	}
}

// Waiting says that a request began (1) or ended (-1) to wait for its slot. Both may come after
// Close.
func (z *Zone) Waiting(delta int) {
	if z != nil {
		z.series.waiting.Add(int64(delta))
	}
}

// InFlight says that a request took a lease (1) or gave it back (-1). Both may come after Close.
func (z *Zone) InFlight(delta int) {
	if z != nil {
		z.series.inFlight.Add(int64(delta))
	}
}

// CountBan counts a ban that a client earned.
func (z *Zone) CountBan() {
	if z != nil {
		z.series.bans.Add(1)
	}
}

// CountFallback counts a request that the shared store did not decide, by what the zone's
// on_store_error made of it.
func (z *Zone) CountFallback(mode string) {
	if z == nil {
		return
	}
	if n := z.series.fallbacks[mode]; n != nil {
		n.Add(1)
	}
}

// Close ends the counting. The last Zone of a name takes its series with it.
func (z *Zone) Close() {
	if z != nil {
		z.owner.close(z)
	}
}

type collector struct {
	mu    sync.Mutex
	zones map[string]*series
}

// series is what is known of one zone.
type series struct {
	open   []*Zone             // in order of opening
	stores map[string]counters // by store
	// What follows is shared by the handlers, as the counters are.
	badCosts, bans atomic.Int64
	// fallbacks by mode; the keys never change.
	fallbacks map[string]*atomic.Int64
	// queue and leases: there was such a limit since the series began. Without it the zone does not
	// show these.
	queue, leases     bool
	delays            delays
	waiting, inFlight atomic.Int64
}

func newCollector() *collector { return &collector{zones: make(map[string]*series)} }

func (c *collector) open(registry prometheus.Registerer, source Source) (*Zone, error) {
	if !utf8.ValidString(source.Zone) || !utf8.ValidString(source.Store) {
		return nil, fmt.Errorf("metrics of zone %q, store %q: want UTF-8", source.Zone, source.Store)
	}
	if err := registry.Register(c); err != nil {
		var registered prometheus.AlreadyRegisteredError
		if !errors.As(err, &registered) || registered.ExistingCollector != prometheus.Collector(c) {
			return nil, fmt.Errorf("registering the metrics: %w", err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.zones[source.Zone]
	if s == nil {
		s = &series{stores: make(map[string]counters), fallbacks: make(map[string]*atomic.Int64)}
		for _, mode := range fallbackModes {
			s.fallbacks[mode] = new(atomic.Int64)
		}
		c.zones[source.Zone] = s
	}
	if s.stores[source.Store] == nil {
		s.stores[source.Store] = newCounters()
	}
	for _, l := range source.Limits {
		s.queue = s.queue || l.Queue > 0
		s.leases = s.leases || l.Algorithm == algorithms.Concurrency
	}
	z := &Zone{Source: source, counters: s.stores[source.Store], series: s, owner: c}
	s.open = append(s.open, z)
	return z, nil
}

func (c *collector) close(z *Zone) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.zones[z.Zone]
	if s == nil {
		return
	}
	s.open = slices.DeleteFunc(s.open, func(o *Zone) bool { return o == z })
	if len(s.open) == 0 {
		delete(c.zones, z.Zone)
	}
}

// fallbackModes are the values of on_store_error.
var fallbackModes = []string{"local", "allow", "deny"}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("caddy_rate_limit_"+name, help, labels, nil)
}

var (
	requestsDesc  = desc("requests_total", "Requests that the zone was asked about.", "zone")
	declinedDesc  = desc("declined_requests_total", "Requests that the zone refused.", "zone")
	timeDesc      = desc("process_time_seconds", "How long deciding a request took, all its zones together.", "zone")
	keysDesc      = desc("keys_total", "Keys that the zone holds on this instance.", "zone")
	evictionsDesc = desc("evictions_total", "Keys forgotten for want of room (max_keys).", "zone")
	decisionsDesc = desc("decisions_total", "Requests by what became of them in the zone.", "zone", "result", "store")
	costsDesc     = desc("cost_errors_total", "Costs that were no whole number of at least 0, and counted as 1.", "zone")
	bansDesc      = desc("bans_total", "Bans that clients of the zone earned on this instance.", "zone")
	delayDesc     = desc("delay_seconds", "How long delayed requests had to wait for their slots in the zone's queue.", "zone")
	waitingDesc   = desc("waiting", "Requests that wait for their slots in the zone's queue on this instance.", "zone")
	inFlightDesc  = desc("in_flight", "Requests that hold a lease of the zone on this instance.", "zone")
	fallbackDesc  = desc("fallback_requests_total", "Requests that the shared store did not decide, by what was done with them.", "zone", "mode")
	configDesc    = desc("config", "Limits in use; always 1.",
		"zone", "max_events", "window", "ipv4_prefix", "ipv6_prefix", "algorithm", "burst")
)

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		requestsDesc, declinedDesc, timeDesc, keysDesc, evictionsDesc, decisionsDesc, costsDesc, bansDesc,
		delayDesc, waitingDesc, inFlightDesc, fallbackDesc, configDesc,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It holds the lock throughout, so that no zone is asked
// after its Close; the metrics are gathered first and sent later, so that a slow reader of the
// channel cannot hold up a reload.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	for _, m := range c.gather() {
		ch <- m
	}
}

func (c *collector) gather() (out []prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for zone, s := range c.zones {
		out = s.counts(out, zone)
		out = s.presence(out, zone)
		out = s.sizes(out, zone)
		out = s.config(out, zone)
	}
	return out
}

// counts appends what requests added up to. The drop-in metrics sum over stores.
func (s *series) counts(out []prometheus.Metric, zone string) []prometheus.Metric {
	var sum totals
	for store, c := range s.stores {
		var t totals
		c.total(&t)
		c.total(&sum)
		for r := range Result(results) {
			out = append(out, counter(decisionsDesc, t.of(r), zone, r.String(), store))
		}
	}
	for mode, n := range s.fallbacks {
		out = append(out, counter(fallbackDesc, n.Load(), zone, mode))
	}
	buckets, all := sum.asked()
	return append(out,
		counter(requestsDesc, all, zone),
		counter(declinedDesc, sum.of(Refused), zone),
		counter(costsDesc, s.badCosts.Load(), zone),
		counter(bansDesc, s.bans.Load(), zone),
		histogram(timeDesc, bounds[:], buckets[:], sum.nanos, zone),
	)
}

// presence appends what requests that wait or hold a lease add up to, for zones that have such.
func (s *series) presence(out []prometheus.Metric, zone string) []prometheus.Metric {
	if s.queue {
		var buckets [len(delayBounds) + 1]int64
		for i := range buckets {
			buckets[i] = s.delays.count[i].Load()
		}
		out = append(out,
			histogram(delayDesc, delayBounds[:], buckets[:], s.delays.nanos.Load(), zone),
			gauge(waitingDesc, s.waiting.Load(), zone))
	}
	if s.leases {
		out = append(out, gauge(inFlightDesc, s.inFlight.Load(), zone))
	}
	return out
}

// sizes appends what only the store knows, asked through the zone opened last: older ones are about
// to close.
func (s *series) sizes(out []prometheus.Metric, zone string) []prometheus.Metric {
	newest := s.open[len(s.open)-1]
	if newest.Keys != nil {
		out = append(out, gauge(keysDesc, int64(newest.Keys()), zone))
	}
	if newest.Evictions != nil {
		out = append(out, counter(evictionsDesc, newest.Evictions(), zone))
	}
	return out
}

// config appends each limit in use once. During a reload both configs' limits are in use.
func (s *series) config(out []prometheus.Metric, zone string) []prometheus.Metric {
	var seen [][]string
	for _, z := range s.open {
		for _, l := range z.Limits {
			labels := []string{zone, strconv.FormatInt(l.Quota, 10), l.Window.String(),
				strconv.Itoa(z.IPv4Prefix), strconv.Itoa(z.IPv6Prefix), l.Algorithm.String(), strconv.FormatInt(l.Burst, 10)}
			if slices.ContainsFunc(seen, func(o []string) bool { return slices.Equal(o, labels) }) {
				continue
			}
			seen = append(seen, labels)
			out = append(out, gauge(configDesc, 1, labels...))
		}
	}
	return out
}

func counter(d *prometheus.Desc, n int64, labels ...string) prometheus.Metric {
	return metric(prometheus.NewConstMetric(d, prometheus.CounterValue, float64(n), labels...))
}

func gauge(d *prometheus.Desc, n int64, labels ...string) prometheus.Metric {
	return metric(prometheus.NewConstMetric(d, prometheus.GaugeValue, float64(n), labels...))
}

// histogram is made of the counts of the buckets, of which the last has no bound.
func histogram(d *prometheus.Desc, bounds []time.Duration, buckets []int64, nanos int64, zone string) prometheus.Metric {
	cumulative, all := make(map[float64]uint64, len(bounds)), uint64(0)
	for i, n := range buckets {
		all += uint64(n)
		if i < len(bounds) {
			cumulative[bounds[i].Seconds()] = all
		}
	}
	return metric(prometheus.NewConstHistogram(d, all, time.Duration(nanos).Seconds(), cumulative, zone))
}

// metric lets the scrape report what cannot happen (a wrong number of labels) instead of ending the
// process.
func metric(m prometheus.Metric, err error) prometheus.Metric {
	if err != nil {
		return prometheus.NewInvalidMetric(prometheus.NewInvalidDesc(err), err)
	}
	return m
}
