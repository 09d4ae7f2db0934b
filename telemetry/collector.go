package telemetry

// What a scrape costs: the process-level collector. Caddy makes a fresh registry for every config, so the numbers
// cannot live in one. This collector outlives them and is registered with each.

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
	// Keys and Evictions are called at every scrape, until Close returns: how many keys the zone holds, and how many were
	// forgotten for want of room since the process started. They must not call into this package. Either may be nil.
	Keys      func() int
	Evictions func() int64
}

// Zone counts for one zone of one handler. Handlers with the same zone name add to the same series.
// A nil *Zone counts nothing: that is `disable_metrics`.
type Zone struct {
	Source
	counters counters
	badCosts *atomic.Int64
	owner    *collector
}

// Open begins to count a zone and makes its series visible in the registry, which is that of the caddy.Context.
// Series live as long as any Zone of that name is open, so they survive reloads and end with the zone.
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
		z.badCosts.Add(1)
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
	// badCosts is shared by the handlers, as the counters are.
	badCosts atomic.Int64
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
		s = &series{stores: make(map[string]counters)}
		c.zones[source.Zone] = s
	}
	if s.stores[source.Store] == nil {
		s.stores[source.Store] = newCounters()
	}
	z := &Zone{Source: source, counters: s.stores[source.Store], badCosts: &s.badCosts, owner: c}
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
	configDesc    = desc("config", "Limits in use; always 1.",
		"zone", "max_events", "window", "ipv4_prefix", "ipv6_prefix", "algorithm", "burst")
)

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{requestsDesc, declinedDesc, timeDesc, keysDesc, evictionsDesc, decisionsDesc, costsDesc, configDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector. It holds the lock throughout, so that no zone is asked after its Close;
// the metrics are gathered first and sent later, so that a slow reader of the channel cannot hold up a reload.
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
	buckets, all := sum.asked()
	cumulative, upTo := make(map[float64]uint64, len(bounds)), int64(0)
	for i, bound := range bounds {
		upTo += buckets[i]
		cumulative[bound.Seconds()] = uint64(upTo)
	}
	return append(out,
		counter(requestsDesc, all, zone),
		counter(declinedDesc, sum.of(Refused), zone),
		counter(costsDesc, s.badCosts.Load(), zone),
		metric(prometheus.NewConstHistogram(timeDesc, uint64(all), time.Duration(sum.nanos).Seconds(), cumulative, zone)),
	)
}

// sizes appends what only the store knows, asked through the zone opened last: older ones are about to close.
func (s *series) sizes(out []prometheus.Metric, zone string) []prometheus.Metric {
	newest := s.open[len(s.open)-1]
	if newest.Keys != nil {
		out = append(out, metric(prometheus.NewConstMetric(keysDesc, prometheus.GaugeValue, float64(newest.Keys()), zone)))
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
			out = append(out, metric(prometheus.NewConstMetric(configDesc, prometheus.GaugeValue, 1, labels...)))
		}
	}
	return out
}

func counter(d *prometheus.Desc, n int64, labels ...string) prometheus.Metric {
	return metric(prometheus.NewConstMetric(d, prometheus.CounterValue, float64(n), labels...))
}

// metric lets the scrape report what cannot happen (a wrong number of labels) instead of ending the process.
func metric(m prometheus.Metric, err error) prometheus.Metric {
	if err != nil {
		return prometheus.NewInvalidMetric(prometheus.NewInvalidDesc(err), err)
	}
	return m
}
