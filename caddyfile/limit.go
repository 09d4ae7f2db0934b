// How much: limits as they are written → the limits of each plan.

package caddyfile

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/leaky"
)

// draft is a plan whose limits are not compiled yet.
type draft struct {
	tier      string
	unlimited bool
	limits    []written
}

// written is a limit as it is written, and where.
type written struct {
	field string
	index int
	text  string
	known bool // before the load
	algorithms.Policy
}

// plans compiles what clients may have.
func (z *zoneCompiler) plans() error {
	drafts, err := z.drafts()
	if err != nil {
		return err
	}
	if err := z.choose(drafts); err != nil {
		return err
	}
	bucket, err := z.bucket(drafts)
	if err != nil {
		return err
	}
	lease, err := z.concurrency()
	if err != nil {
		return err
	}
	for _, d := range drafts {
		plan := &Plan{Tier: d.tier}
		for _, w := range d.limits {
			if !w.known {
				continue
			}
			l, err := algorithms.Compile(z.name, bucket.shape(w.Policy))
			if err != nil {
				return z.limitError(w, err)
			}
			l.MaxKeys = z.maxKeys
			plan.Limits = append(plan.Limits, l)
		}
		if lease != nil && !d.unlimited {
			plan.Limits = append(plan.Limits, lease)
		}
		plan.name(z.name)
		z.out.Plans = append(z.out.Plans, plan)
	}
	return nil
}

// drafts reads the limits in any of their spellings.
func (z *zoneCompiler) drafts() ([]draft, error) {
	events, limit := z.z.MaxEvents != "" || z.z.Window != 0, len(z.z.Limit) > 0
	z.out.Events = events
	switch {
	case z.z.Tier != nil && (events || limit):
		return nil, z.fail("tier", -1, errors.New("a limit is written outside of it too; want limits in its lines only, or a limit without tier"))
	case z.z.Tier != nil:
		return z.tiers()
	case events && limit:
		field := "window"
		if z.z.MaxEvents != "" {
			field = "max_events"
		}
		return nil, z.fail(field, -1, errors.New("limit is written too, and means the same; want limit, or events with window"))
	case events && z.z.MaxEvents == "" && z.z.Place == "": // in JSON, what is left out was 0 there
		z.warn("max_events is left out and counts as 0, so that every request is refused; want a number beside window")
		z.z.MaxEvents = "0"
		w, err := z.eventsLimit()
		return []draft{{limits: []written{w}}}, err
	case events && z.z.MaxEvents == "":
		return nil, z.fail("window", -1, errors.New("events is missing beside it; want both, or limit instead of them"))
	case events && z.z.Window == 0:
		return nil, z.fail("max_events", -1, errors.New("window is missing beside it or zero; want both, such as events 100 and window 1m"))
	case events:
		w, err := z.eventsLimit()
		return []draft{{limits: []written{w}}}, err
	case limit:
		limits, err := z.limits("limit", z.z.Limit)
		return []draft{{limits: limits}}, err
	case z.z.Concurrency != nil:
		return []draft{{}}, z.leasesOnly()
	}
	if _, _, err := parseLimit(z.name); err == nil {
		return nil, z.fail("", -1, fmt.Errorf("no limit, since %q stands for the zone's name; want zone <name> %s", z.name, z.name))
	}
	return nil, z.fail("", -1, errors.New("no limit; want one such as 100/1m"))
}

func (z *zoneCompiler) eventsLimit() (written, error) {
	quota, known, err := z.integer(z.z.MaxEvents, 0, algorithms.MaxExact)
	if err != nil {
		return written{}, z.fail("max_events", -1, err)
	}
	window := time.Duration(z.z.Window)
	switch {
	case window < 0:
		return written{}, z.fail("window", -1, fmt.Errorf("%v; want a duration above zero, such as 1m", window))
	case window < time.Millisecond:
		z.warn("window: %v is hardly a limit; want one such as 1m%s", window, nanoseconds(window))
	}
	if part := window % time.Microsecond; part > 0 { // time is counted in microseconds
		window += time.Microsecond - part
	}
	z.pending = z.pending || !known
	return written{known: known, Policy: algorithms.Policy{Quota: quota, Window: window}}, nil
}

// limits reads limits that all hold.
func (z *zoneCompiler) limits(field string, texts Texts) ([]written, error) {
	var list []written
	for i, text := range texts {
		if name, found := notGlobal(text); found && field == "limit" {
			return nil, z.fail(field, i, fmt.Errorf("{%s} has no value at load; want a number, a global placeholder such as {env.LIMIT}, "+
				"or tier {%s} { … } with a limit for each of its values", name, name))
		}
		value, known, err := z.expand(text)
		if err != nil {
			return nil, z.fail(field, i, err)
		}
		w := written{field: field, index: i, text: text, known: known}
		if known {
			if w.Quota, w.Window, err = parseLimit(value); err != nil {
				return nil, z.fail(field, i, err)
			}
			for _, other := range list {
				if w.Window == other.Window {
					return nil, z.fail(field, i, fmt.Errorf("two limits over %s; want one limit for each window", shortWindow(w.Window)))
				}
			}
		}
		z.pending = z.pending || !known
		list = append(list, w)
	}
	return list, nil
}

// choose gives the limits their algorithm: what is written, or the default. The limits of tiers
// over the same window have one default in common, since a client whose plan changes keeps its
// usage only under the same algorithm.
func (z *zoneCompiler) choose(drafts []draft) error {
	algorithm, err := z.algorithm()
	if err != nil {
		return err
	}
	largest := map[time.Duration]int64{} // quota over a window
	for _, d := range drafts {
		for _, w := range d.limits {
			largest[w.Window] = max(largest[w.Window], w.Quota)
		}
	}
	for _, d := range drafts {
		for i := range d.limits {
			p := &d.limits[i].Policy
			switch {
			case algorithm != 0:
				p.Algorithm = algorithm
			case z.out.Events || largest[p.Window] <= exactQuota:
				p.Algorithm = algorithms.SlidingLog
			default:
				p.Algorithm = algorithms.SlidingWindow
			}
			if p.Algorithm == algorithms.SlidingWindow && p.Quota > 0 && p.Quota < exactQuota {
				saturated := fmt.Sprintf("%d per window", p.Quota-1)
				if p.Quota == 1 {
					saturated = "1 per two windows"
				}
				z.warn("sliding_window admits only %s under saturation when the quota is %d; sliding_log is exact", saturated, p.Quota)
			}
		}
	}
	return nil
}

// algorithm is the one that the zone names, or 0.
func (z *zoneCompiler) algorithm() (algorithms.Algorithm, error) {
	name := z.z.Algorithm
	if name == "" && z.z.Queue != nil {
		return algorithms.LeakyBucket, nil
	}
	algorithm, ok := algorithms.ParseAlgorithm(name)
	if !ok && name != "" {
		names := algorithms.AlgorithmNames()
		return 0, z.fail("algorithm", -1, fmt.Errorf("%q%s; want one of %s", name, didYouMean(name, names...), strings.Join(names, ", ")))
	}
	return algorithm, nil
}

// limitError blames the word that made a policy impossible.
func (z *zoneCompiler) limitError(w written, err error) error {
	switch {
	case errors.Is(err, algorithms.ErrBurst) && z.z.Burst != "":
		return z.fail("burst", -1, err)
	case errors.Is(err, algorithms.ErrBurst) && z.z.Queue != nil:
		return z.fail("queue.size", -1, err)
	case errors.Is(err, algorithms.ErrQueue):
		return z.fail("queue.max_wait", -1, err)
	case !z.out.Events:
		return z.fail(w.field, w.index, fmt.Errorf("%q: %w", w.text, err))
	case errors.Is(err, algorithms.ErrWindow):
		return z.fail("window", -1, err)
	}
	return z.fail("max_events", -1, err)
}

// bucket is what a zone says of its buckets, as far as it is known.
type bucket struct {
	burst *int64       // nil: the default
	queue *queueBounds // nil: none
}

// shape adds it to a policy.
func (b *bucket) shape(p algorithms.Policy) algorithms.Policy {
	switch {
	case p.Algorithm == algorithms.TokenBucket && b.burst != nil:
		p.Burst = *b.burst
	case p.Algorithm == algorithms.TokenBucket:
		p.Burst = p.Quota
	case p.Algorithm != algorithms.LeakyBucket:
	case b.queue != nil:
		p = leaky.Queue(p.Quota, p.Window, b.queue.size, b.queue.delay, b.queue.maxWait)
	case b.burst != nil:
		p = leaky.Meter(p.Quota, p.Window, *b.burst)
	default:
		p = leaky.Meter(p.Quota, p.Window, 0)
	}
	return p
}

func (z *zoneCompiler) bucket(drafts []draft) (b bucket, err error) {
	most := 0
	for _, d := range drafts {
		most = max(most, len(d.limits))
	}
	if b.burst, err = z.burst(most); err != nil {
		return b, z.fail("burst", -1, err)
	}
	b.queue, err = z.queue(most)
	return b, err
}

// burst reads the burst for plans of at most so many limits.
func (z *zoneCompiler) burst(limits int) (*int64, error) {
	if z.z.Burst == "" {
		return nil, nil
	}
	algorithm, _ := algorithms.ParseAlgorithm(z.z.Algorithm)
	least := int64(1)
	if algorithm == algorithms.LeakyBucket {
		least = 0
	}
	burst, known, err := z.integer(z.z.Burst, least, algorithms.MaxExact-1)
	z.pending = z.pending || !known
	switch {
	case err != nil:
		return nil, err
	case z.z.Queue != nil:
		return nil, fmt.Errorf("%q, but queue is written too, and says how many may be above the one in service; want one of the two", z.z.Burst)
	case !algorithm.Bucket():
		return nil, fmt.Errorf("%q, but only a bucket has one; want algorithm token_bucket or leaky_bucket beside it", z.z.Burst)
	case limits > 1:
		return nil, fmt.Errorf("%q for %d limits; want one limit beside burst", z.z.Burst, limits)
	case !known:
		return nil, nil
	}
	return &burst, nil
}

// parseLimit reads quota/window: 100/1m, 10/s, 5/15m, 10r/s.
func parseLimit(text string) (quota int64, window time.Duration, err error) {
	count, per, ok := strings.Cut(text, "/")
	if !ok {
		return 0, 0, fmt.Errorf("%q; want quota/window, such as 100/1m or 10/s", text)
	}
	digits := strings.TrimSuffix(count, "r")
	quota, err = strconv.ParseInt(digits, 10, 64)
	if err != nil || digits == "" || digits[0] == '+' || quota < 0 || quota > algorithms.MaxExact {
		if name, number, ok := strings.Cut(count, "="); ok && name != "" && number != "" { // as NGINX writes it
			return 0, 0, fmt.Errorf("%q; want %s/%s", text, number, per)
		}
		longer := ""
		if _, err := strconv.ParseFloat(digits, 64); err == nil && strings.Contains(digits, ".") {
			longer = ", over a longer window, as 1/2s for 0.5/1s"
		}
		return 0, 0, fmt.Errorf("%q: the quota is %q; want a whole number from 0 to %d%s", text, count, algorithms.MaxExact, longer)
	}
	switch per {
	case "us", "ms", "s", "m", "h", "d":
		per = "1" + per
	}
	window, err = caddy.ParseDuration(per)
	if err != nil || window <= 0 {
		return 0, 0, fmt.Errorf("%q: the window is %q; want a duration above zero, such as %s", text, per, meantWindow(per))
	}
	return quota, window, nil
}

// meantWindow is the duration that a window in another spelling means, or an example.
func meantWindow(text string) string {
	word := strings.TrimLeft(text, "0123456789")
	number := text[:len(text)-len(word)]
	if number == "" {
		number = "1"
	}
	switch strings.TrimSuffix(strings.ToLower(strings.TrimSpace(word)), "s") {
	case "sec", "second":
		return number + "s"
	case "m", "min", "minute":
		return number + "m"
	case "h", "hr", "hour":
		return number + "h"
	case "d", "day":
		return number + "d"
	case "w", "week":
		return "7d"
	case "month":
		return "30d"
	case "y", "year":
		return "365d"
	}
	return "1m"
}
