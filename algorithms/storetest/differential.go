package storetest

// Random batches, decided by a store and by the reference, with the moments chosen where errors
// live: at a wait's end and one microsecond beside it, at window edges, and after steps of the
// clock.

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Differential applies n random batches to store and to a [Reference] on the same clock and fails
// on the first answer that differs. The store must be empty. A failure names the seed that repeats
// it.
func Differential(t testing.TB, store algorithms.Store, clock *Clock, n int, seed uint64) {
	t.Helper()
	w := newWalk(t, clock, seed)
	reference := NewReference(clock.Now)
	for i := range n {
		batch := w.batch()
		want, got := make([]algorithms.Outcome, len(batch)), make([]algorithms.Outcome, len(batch))
		if err := reference.Apply(context.Background(), batch, want); err != nil {
			t.Fatal(err)
		}
		if err := store.Apply(context.Background(), batch, got); err != nil {
			t.Fatalf("seed %d, batch %d at %d: %v", seed, i, clock.Now(), err)
		}
		for j := range batch {
			if err := plausible(&batch[j], want[j]); err != "" {
				t.Fatalf("seed %d, batch %d: reference: %s: %s", seed, i, err, describe(batch[j], want[j]))
			}
			if got[j] != want[j] {
				t.Fatalf("seed %d, batch %d at %d, charge %d of %d: %s, want %+v\nbatch: %+v",
					seed, i, clock.Now(), j, len(batch), describe(batch[j], got[j]), want[j], batch)
			}
		}
		w.step(batch, want)
	}
}

func describe(c algorithms.Charge, o algorithms.Outcome) string {
	return fmt.Sprintf("%+v key %q cost %d mark %d held %d peek %t check %t force %t dry %t answered %+v",
		c.Limit.Policy, c.Key, c.Cost, c.Mark, c.Held, c.Peek, c.Check, c.Force, c.DryRun, o)
}

// walk is a random walk through requests and moments.
type walk struct {
	*rand.Rand
	clock *Clock
	// limits[g] are the limits of configuration g: the same zones with other quotas, as before and
	// after a reload.
	limits [2][]*algorithms.Limit
	config int
	round  int
	marks  []algorithms.Charge // what was taken and can be given back
}

func newWalk(t testing.TB, clock *Clock, seed uint64) *walk {
	w := &walk{Rand: rand.New(rand.NewPCG(seed, 0)), clock: clock}
	for g := range w.limits {
		for i, p := range walkPolicies {
			if g == 1 {
				p = reloaded(p)
			}
			l, err := algorithms.Compile(fmt.Sprint("zone", i), p)
			if err != nil {
				t.Fatalf("compile %+v: %v", p, err)
			}
			w.limits[g] = append(w.limits[g], l)
		}
	}
	return w
}

const (
	day  = 24 * time.Hour
	year = 365 * day
)

var walkPolicies = []algorithms.Policy{
	{Algorithm: algorithms.FixedWindow, Quota: 5, Window: time.Minute},
	{Algorithm: algorithms.FixedWindow, Quota: 1, Window: time.Millisecond},
	{Algorithm: algorithms.SlidingLog, Quota: 3, Window: 10 * time.Second},
	{Algorithm: algorithms.SlidingLog, Quota: 20, Window: 7 * time.Millisecond},
	{Algorithm: algorithms.SlidingLog, Quota: 4, Window: year},
	{Algorithm: algorithms.SlidingWindow, Quota: 10, Window: time.Minute},
	{Algorithm: algorithms.SlidingWindow, Quota: 1, Window: 13 * time.Second},
	{Algorithm: algorithms.SlidingWindow, Quota: 1000, Window: year},
	{Algorithm: algorithms.SlidingWindow, Quota: 40_000_000, Window: day / 1000},
	{Algorithm: algorithms.TokenBucket, Quota: 3, Window: time.Second, Burst: 3},
	{Algorithm: algorithms.TokenBucket, Quota: 7, Window: time.Second, Burst: 20},
	{Algorithm: algorithms.TokenBucket, Quota: 10, Window: 13 * time.Second, Burst: 1},
	{Algorithm: algorithms.TokenBucket, Quota: 100_000_000, Window: time.Second, Burst: 100_000_000},
	{Algorithm: algorithms.TokenBucket, Quota: 1, Window: year, Burst: 1},
	{Algorithm: algorithms.TokenBucket, Quota: 999, Window: year, Burst: 999},
	{Algorithm: algorithms.LeakyBucket, Quota: 10, Window: time.Second, Burst: 1},
	{Algorithm: algorithms.LeakyBucket, Quota: 1_000_000, Window: time.Second, Burst: 6},
	{Algorithm: algorithms.FixedWindow, Quota: 0, Window: time.Second},
	{Algorithm: algorithms.TokenBucket, Quota: 0, Window: time.Second},
	// Beyond counting; the last one's counters are bans.
	{Algorithm: algorithms.LeakyBucket, Quota: 10, Window: time.Second, Burst: 6, Queue: 5},
	{Algorithm: algorithms.LeakyBucket, Quota: 7, Window: 13 * time.Second, Burst: 12, Queue: 5, MaxWait: 6 * time.Second},
	{Algorithm: algorithms.Concurrency, Quota: 4, Window: time.Minute},
	{Algorithm: algorithms.LeakyBucket, Quota: 999, Window: year, Burst: 999, Queue: 900, MaxWait: 100 * day},
	{Algorithm: algorithms.LeakyBucket, Quota: 1_000_000, Window: time.Second, Burst: 20, Queue: 3},
	{Algorithm: algorithms.Concurrency, Quota: 1, Window: 3 * time.Millisecond},
	{Algorithm: algorithms.TokenBucket, Quota: 1, Window: time.Microsecond, Burst: 1},
}

// reloaded is the same policy after a reload that changed its quota.
func reloaded(p algorithms.Policy) algorithms.Policy {
	switch {
	case p.Quota == 0:
		p.Quota = 2
	case p.Quota == 4 || p.Quota == 7:
		p.Quota = 0
	case p.Quota > 1000:
		p.Quota /= 3
	default:
		p.Quota = p.Quota*3/2 + 1
	}
	if p.Algorithm.Bucket() {
		p.Burst = p.Burst*5/4 + 1
	}
	return p
}

// batch is one request: one to four charges, some of them on the same counter.
func (w *walk) batch() []algorithms.Charge {
	if w.round++; w.IntN(200) == 0 {
		w.config = 1 - w.config
	}
	// Few zones at a time, so that charges meet what others left.
	limits := w.limits[w.config]
	first, zones := w.round/500%len(limits), 4
	batch := make([]algorithms.Charge, 1+max(0, w.IntN(7)-3))
	for i := range batch {
		batch[i] = w.charge(limits[(first+w.IntN(zones))%len(limits)])
	}
	if l := limits[first]; w.IntN(4) == 0 {
		batch = append(batch, w.pair(l)...)
	}
	return batch
}

// pair is two charges that belong together: a lease renewed, or a key banned unless it is.
func (w *walk) pair(l *algorithms.Limit) []algorithms.Charge {
	c := w.charge(l)
	again := algorithms.Charge{Key: c.Key, Limit: l, Cost: max(1, -c.Cost), Force: true}
	if c.Cost >= 0 {
		c = algorithms.Ask(l, c.Key)
		again.Cost = 1 + w.Int64N(10_000_000)
	}
	return []algorithms.Charge{c, again}
}

func (w *walk) charge(l *algorithms.Limit) algorithms.Charge {
	c := algorithms.Charge{Key: fmt.Sprint("key", w.round/5000, w.IntN(2)), Limit: l, Cost: 1}
	switch w.IntN(14) {
	case 0:
		c.Cost = 0
	case 1, 2, 3:
		c.Cost = 1 + w.Int64N(l.Capacity+1)
	case 4, 5, 10:
		if r, ok := w.taken(l); ok {
			return r
		}
	case 6:
		c.Peek = true
	case 7:
		c.DryRun = true
	case 8:
		c.Held = w.Int64N(l.Capacity + 1)
	case 9:
		if c.Force = w.IntN(4) == 0; c.Force {
			c.Cost = 1 + w.Int64N(2*l.Capacity+1)
		}
	case 12:
		c.Check = true
	case 11, 13: // from the end of a queue only; taken gives back by force
		if r, ok := w.taken(l); ok {
			r.Force = false
			return r
		}
	}
	return c
}

// taken is a refund of what an earlier request took from this limit's space, more likely one that
// still stands.
func (w *walk) taken(l *algorithms.Limit) (algorithms.Charge, bool) {
	for _, c := range slices.Backward(w.marks) {
		if c.Limit.Space == l.Space && w.IntN(3) > 0 {
			c.Limit, c.Cost, c.Force = l, -1-w.Int64N(c.Cost), true
			return c, true
		}
	}
	return algorithms.Charge{}, false
}

// step remembers what can be given back and moves the clock.
func (w *walk) step(batch []algorithms.Charge, out []algorithms.Outcome) {
	for i := range batch {
		if out[i].Mark != 0 && batch[i].Cost > 0 {
			c := algorithms.Charge{Key: batch[i].Key, Limit: batch[i].Limit, Cost: batch[i].Cost, Mark: out[i].Mark}
			if w.marks = append(w.marks, c); len(w.marks) > 16 {
				w.marks = w.marks[1:]
			}
		}
	}
	i := w.IntN(len(batch))
	window, micro := batch[i].Limit.Window, time.Duration(w.IntN(3)-1)*time.Microsecond
	switch k := w.IntN(40); {
	case k < 14: // the same moment
	case k < 22:
		w.advance(out[i].Retry, micro)
	case k < 25:
		w.advance(out[i].Next, micro)
	case k < 27:
		w.advance(max(out[i].Delay, out[i].Next), micro)
	case k < 32:
		w.clock.align(window)
		w.clock.Advance(micro)
	case k < 36:
		w.advance(time.Duration(w.Int64N(int64(window)/2+1)), 0)
	case k < 37:
		w.advance(time.Duration(w.Int64N(int64(3*window))), 0)
	case k < 39:
		w.clock.Advance(-time.Duration(w.Int64N(int64(window) + 1)))
	default:
		w.clock.Advance(-time.Duration(w.Int64N(int64(3*window) + 1)))
	}
	// Stay within the moments that are exact, on both sides.
	if now := w.clock.Now(); now > 2*Start || now < Start/4 {
		w.clock.Set(Start)
	}
}

func (w *walk) advance(d, more time.Duration) {
	if d != algorithms.Never && d > 0 {
		w.clock.Advance(d.Truncate(time.Microsecond) + more)
	}
}
