package telemetry

// What a request costs: counters of one zone, found once at load and then only added to. They are
// not client_golang's, whose counters and histogram cost four to five contended atomic operations
// and a float loop per request and zone; these cost two additions to memory that processors rarely
// share.

import (
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"
)

// Result is what became of a request in a zone.
type Result uint8

// The results, named in the metric's label result by their [Result.String].
const (
	Passed Result = iota
	// Delayed requests passed after they waited for their slots in a queue.
	Delayed
	Refused
	// PassedDryRun, DelayedDryRun and RefusedDryRun are what a dry-run rule would have done.
	PassedDryRun
	DelayedDryRun
	RefusedDryRun
	// Exempt requests were not asked about: they are counted, but not as requests of the zone, and
	// not timed.
	Exempt

	results = iota
)

var resultNames = [results]string{"passed", "delayed", "rejected", "passed_dry_run", "delayed_dry_run", "rejected_dry_run", "exempt"}

// String returns the value of the label result.
func (r Result) String() string { return resultNames[r] }

// bounds are the upper bounds of the process time's buckets: those of caddy-ratelimit, so that its
// dashboards keep working, and two below, where the local store's decisions lie.
var bounds = [...]time.Duration{
	10 * time.Microsecond, 100 * time.Microsecond, time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond,
	25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second,
}

// bucket is the index of the first bound that the time does not exceed.
func bucket(bounds []time.Duration, d time.Duration) int {
	i := 0
	for i < len(bounds) && d > bounds[i] {
		i++
	}
	return i
}

// cells are the counts of a zone in one store, by result and bucket: one addition counts both.
type cells struct {
	count [results][len(bounds) + 1]atomic.Int64
	nanos atomic.Int64
}

// stripe is cells that share no cache line with the next ones. Which of its stripes a zone adds to
// is random, so that two processors seldom fight over one line.
type stripe struct {
	cells
	_ [128 - unsafe.Sizeof(cells{})%128]byte
}

// stripes is a power of two, twice the processors, at most 16 (12 kB a zone).
var stripes = func() uint32 {
	n := uint32(1)
	for n < uint32(2*runtime.GOMAXPROCS(0)) && n < 16 {
		n *= 2
	}
	return n
}()

// counters are the counts of a zone in one store.
type counters []stripe

func newCounters() counters { return make(counters, stripes) }

func (c counters) add(r Result, took time.Duration) {
	s := &c[rand.Uint32()&uint32(len(c)-1)]
	s.count[r][bucket(bounds[:], took)].Add(1)
	if took > 0 {
		s.nanos.Add(int64(took))
	}
}

// total adds the stripes up. It is not a snapshot: additions that happen meanwhile are in it or
// not, each number by itself never goes back.
func (c counters) total(t *totals) {
	for i := range c {
		for r := range t.count {
			for b := range t.count[r] {
				t.count[r][b] += c[i].count[r][b].Load()
			}
		}
		t.nanos += c[i].nanos.Load()
	}
}

// totals are counts at the moment of a scrape.
type totals struct {
	count [results][len(bounds) + 1]int64
	nanos int64
}

// of sums one result.
func (t *totals) of(r Result) (n int64) {
	for _, c := range t.count[r] {
		n += c
	}
	return n
}

// asked counts the requests that the zone was asked about, by bucket.
func (t *totals) asked() (buckets [len(bounds) + 1]int64, all int64) {
	for r := range t.count {
		if Result(r) == Exempt {
			continue
		}
		for b, n := range t.count[r] {
			buckets[b] += n
			all += n
		}
	}
	return buckets, all
}

// delayBounds are the upper bounds of the delays' buckets: the slots of fast queues are
// milliseconds apart, and few clients wait longer than a minute.
var delayBounds = [...]time.Duration{
	time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2500 * time.Millisecond,
	5 * time.Second, 10 * time.Second, 30 * time.Second, time.Minute,
}

// delays are the counts of requests that waited. They have no stripes: who waits for a slot does
// not notice a cache line.
type delays struct {
	count [len(delayBounds) + 1]atomic.Int64
	nanos atomic.Int64
}

func (c *delays) add(d time.Duration) {
	c.count[bucket(delayBounds[:], d)].Add(1)
	c.nanos.Add(int64(max(d, 0)))
}
