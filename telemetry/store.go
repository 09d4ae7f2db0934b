package telemetry

// The shared store as operators see it: is it up, how long does it take, what goes wrong.

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Store counts what happens between this instance and the shared store. Its numbers live as long as
// the process, because connections outlive configs.
type Store struct {
	up        prometheus.Gauge
	failures  *prometheus.CounterVec
	duration  prometheus.Histogram
	unsettled prometheus.Counter
}

// NewStore makes the metrics of the store with that label. They show once they are registered.
func NewStore(name string) *Store {
	labels := prometheus.Labels{"store": name}
	return &Store{
		up: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "caddy_rate_limit_store_up", ConstLabels: labels,
			Help: "1 while the shared store answers, 0 while decisions fall back.",
		}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "caddy_rate_limit_store_errors_total", ConstLabels: labels,
			Help: "Decisions, settlements and looks at a server of the shared store that failed, by cause.",
		}, []string{"kind"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "caddy_rate_limit_store_duration_seconds", ConstLabels: labels,
			Help:    "Round trips to the shared store, each for one or many requests.",
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25},
		}),
		unsettled: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "caddy_rate_limit_unsettled_total", ConstLabels: labels,
			Help: "Refunds, later charges and leases given back that did not reach the shared store.",
		}),
	}
}

// Register makes the metrics visible in the registry of a config.
func (s *Store) Register(registry prometheus.Registerer) error {
	for _, c := range []prometheus.Collector{s.up, s.failures, s.duration, s.unsettled} {
		var registered prometheus.AlreadyRegisteredError
		if err := registry.Register(c); err != nil && !errors.As(err, &registered) {
			return err
		}
	}
	return nil
}

// SetUp says whether the store answers.
func (s *Store) SetUp(up bool) {
	if up {
		s.up.Set(1)
	} else {
		s.up.Set(0)
	}
}

// Call counts a round trip.
func (s *Store) Call(took time.Duration) { s.duration.Observe(took.Seconds()) }

// Failure counts what failed. The kinds are few and known; nothing a client sends is among them.
func (s *Store) Failure(kind string) { s.failures.WithLabelValues(kind).Inc() }

// Unsettled counts settlements that were dropped.
func (s *Store) Unsettled(n int) { s.unsettled.Add(float64(max(n, 0))) }
