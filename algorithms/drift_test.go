package algorithms

// Promise 11: no drift. Under saturation exactly the quota passes per window, over as many windows
// as the range of moments holds, at most a million. The tests jump from wait to wait, so that a
// million windows take a second.

import (
	"math/rand/v2"
	"testing"
	"time"
)

type rate struct {
	quota  int64
	window time.Duration
}

var rates = []rate{
	{1, 365 * 24 * time.Hour}, {999, 365 * 24 * time.Hour}, {1, 24 * time.Hour}, {7, time.Hour}, {10, 13 * time.Second},
	{100, time.Minute}, {1, time.Second}, {3, time.Second}, {7, time.Second}, {8_000, time.Second},
	{999_983, time.Second}, {1_000_000, time.Second},
}

// windows is how many windows of this length lie within the exact moments, at most a million.
func (r rate) windows() int64 { return min(1_000_000, MaxExact/r.window.Microseconds()-3) }

// saturated asks for all that remains, a few times in every window at random moments and always at
// its end, and checks the total at each end.
func saturated(t *testing.T, p Policy, windows int64, total func(k int64) int64) {
	t.Helper()
	s, r := newSingle(t, p), rand.New(rand.NewPCG(uint64(p.Quota), 9))
	w := s.l.window
	admitted := s.ask(0, s.l.Capacity).Remaining + s.l.Capacity
	for k := int64(1); k <= windows; k++ {
		for _, at := range []int64{(k-1)*w + 1 + r.Int64N(w), k * w} {
			left := s.peek(time.Duration(at)*time.Microsecond, 0).Remaining
			if at < k*w && r.IntN(4) == 0 {
				continue
			}
			if left > 0 && !s.ask(time.Duration(at)*time.Microsecond, left).OK {
				t.Fatalf("%+v: %d remaining, and refused", p, left)
			}
			if admitted += left; at == k*w {
				break
			}
		}
		if want := total(k); admitted != want {
			t.Fatalf("%+v: %d admitted in %d windows, want %d", p, admitted, k, want)
		}
	}
}

func TestPromise11NoDrift(t *testing.T) {
	for _, r := range rates {
		// A bucket holds a window's units, so that none is lost between two looks: its full start,
		// then the quota each window.
		n := max(r.quota, 2)
		for _, a := range []Algorithm{TokenBucket, LeakyBucket} {
			saturated(t, Policy{Algorithm: a, Quota: r.quota, Window: r.window, Burst: n}, r.windows()/map[Algorithm]int64{TokenBucket: 1, LeakyBucket: 20}[a],
				func(k int64) int64 { return n + k*r.quota })
		}
		// The end of a window is the beginning of the next, whose units are there at once.
		saturated(t, Policy{Algorithm: FixedWindow, Quota: r.quota, Window: r.window}, min(r.windows(), 50_000),
			func(k int64) int64 { return (k + 1) * r.quota })
		saturated(t, Policy{Algorithm: SlidingLog, Quota: r.quota, Window: r.window}, min(r.windows(), 50_000),
			func(k int64) int64 { return (k + 1) * r.quota })
	}
}

// One at a time, each after the wait that the refusal before it promised.
func TestPromise11NoDriftOneByOne(t *testing.T) {
	for _, r := range rates {
		windows := min(r.windows(), 100_000/r.quota)
		for a := FixedWindow; a <= LeakyBucket; a++ {
			p := Policy{Algorithm: a, Quota: r.quota, Window: r.window}
			start := r.quota // what passes at once, before the first window has passed
			if a.Bucket() {
				start, p.Burst = 2, 2
			}
			s, end := newSingle(t, p), time.Duration(windows)*r.window
			admitted, now := int64(0), time.Duration(0)
			for now < end {
				if o := s.ask(now, 1); o.OK {
					admitted++
				} else {
					now += o.Retry
				}
			}
			want := windows * r.quota
			if a.Bucket() {
				want += start - 1 // the unit that is there at the very end is not asked for
			}
			if a == SlidingWindow {
				checkSliding(t, r.quota, windows, admitted)
			} else if windows > 0 && admitted != want {
				t.Errorf("%+v: %d admitted in %d windows, want %d", p, admitted, windows, want)
			}
		}
	}
}

// checkSliding: saturated the sliding-window counter gives quota−1 per window, and 1 per two
// windows for a quota of 1.
func checkSliding(t *testing.T, quota, windows, admitted int64) {
	t.Helper()
	want := quota + (windows-1)*(quota-1)
	if quota == 1 {
		want = (windows + 1) / 2
	}
	if windows > 0 && admitted != want {
		t.Errorf("sliding_window %d: %d admitted in %d windows, want %d", quota, admitted, windows, want)
	}
}

// A bucket of one unit has no room for the rest of a tick: its interval is the exact one rounded up
// to a whole microsecond, and that is the only loss.
func TestBurstOfOneRoundsTheIntervalUp(t *testing.T) {
	for _, r := range []rate{{3, time.Second}, {7, time.Second}, {10, 13 * time.Second}, {999_983, time.Second}} {
		s := newSingle(t, Policy{Algorithm: LeakyBucket, Quota: r.quota, Window: r.window, Burst: 1})
		interval := time.Duration(ceilDiv(r.window.Microseconds(), r.quota)) * time.Microsecond
		for i := range time.Duration(10_000) {
			if o := s.ask(i*interval, 1); !o.OK || o.Next != interval {
				t.Fatalf("%+v, request %d: %+v, want an interval of %v", r, i, o, interval)
			}
		}
	}
}
