package memstore

import (
	"fmt"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/algorithms/storetest"
)

func TestZonesShareByName(t *testing.T) {
	s := New()
	old, other := s.Open("api"), s.Open("other")
	l := limit(t, "api", algorithms.FixedWindow, 5, time.Hour)
	ask(t, s, l, "k", 3)
	reloaded := s.Open("api")
	old.Close()
	old.Close() // releases nothing of what others hold
	if got := ask(t, s, l, "k", 0).Remaining; got != 2 {
		t.Fatalf("%d remaining after the older of two closed, want 2", got)
	}
	ask(t, s, limit(t, "other", algorithms.FixedWindow, 5, time.Hour), "k", 1)
	reloaded.Close()
	if got := ask(t, s, l, "k", 0).Remaining; got != 5 {
		t.Errorf("%d remaining after the last one closed, want 5", got)
	}
	if other.Keys() != 1 {
		t.Errorf("closing one zone left %d keys in another", other.Keys())
	}
}

func TestZoneSpaces(t *testing.T) {
	s := New()
	z := s.Open("z")
	if got := z.Spaces(); len(got) != 0 {
		t.Fatal(got)
	}
	for _, l := range []*algorithms.Limit{
		limit(t, "z", algorithms.TokenBucket, 5, time.Minute), limit(t, "z", algorithms.FixedWindow, 5, time.Hour),
		limit(t, "z", algorithms.FixedWindow, 5, time.Minute), limit(t, "z", algorithms.FixedWindow, 9, time.Minute),
		limit(t, "y", algorithms.FixedWindow, 5, time.Minute),
	} {
		ask(t, s, l, "k", 1)
	}
	got := fmt.Sprint(z.Spaces())
	if want := "[{z fixed_window 1m0s} {z fixed_window 1h0m0s} {z token_bucket 1m0s}]"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if z.Keys() != 3 {
		t.Errorf("%d keys, want 3", z.Keys())
	}
	z.Forget("k")
	if z.Keys() != 0 || s.Open("y").Keys() != 1 {
		t.Error("Forget must reach every space of its zone and no other")
	}
}

// A process reloads for years: what belongs to a config must go with it.
func TestReloadsLeaveNothing(t *testing.T) {
	s := New()
	z := s.Open("z")
	for range 1000 {
		next := s.Open("z")
		ask(t, s, limit(t, "z", algorithms.SlidingWindow, 100, time.Minute), "k", 0)
		z.Close()
		z = next
	}
	if n := len(*s.bound.Load()); n > 1 {
		t.Errorf("%d limits of earlier configs in memory", n)
	}
	z.Close()
	if len(s.spaces) != 0 || len(s.opened) != 0 || len(*s.bound.Load()) != 0 {
		t.Errorf("left after the last close: %v %v", s.spaces, s.opened)
	}
	for range 3 * boundLimits {
		ask(t, s, limit(t, "z", algorithms.SlidingWindow, 100, time.Minute), "k", 1)
	}
	if n := len(*s.bound.Load()); n > boundLimits {
		t.Errorf("a limit for each request: %d of them in memory", n)
	}
}

// What is given back after the last one closed makes no table, for nobody would free it.
func TestGivingBackToAClosedZoneLeavesNothing(t *testing.T) {
	s := New()
	z := s.Open("z")
	for _, a := range everyAlgorithm {
		l := limit(t, "z", a, 5, time.Minute)
		mark := ask(t, s, l, "k", 2).Mark
		z.Close()
		back := []algorithms.Charge{{Key: "k", Limit: l, Cost: -1, Mark: mark}, {Key: "k", Limit: l, Cost: -1, Mark: mark}}
		for n := range back {
			out := make([]algorithms.Outcome, 2)
			if err := s.Apply(t.Context(), back[n:], out); err != nil || out[0].Remaining != 5 || out[0].Mark != 0 {
				t.Errorf("%v: %+v %v", a, out, err)
			}
		}
		if len(s.spaces) != 0 || len(*s.bound.Load()) != 0 {
			t.Errorf("%v: left after the last close: %v", a, s.spaces)
		}
		z = s.Open("z")
	}
}

func TestCloseDropsEverything(t *testing.T) {
	s := New()
	z := s.Open("z")
	ask(t, s, limit(t, "z", algorithms.FixedWindow, 5, time.Hour), "k", 1)
	if err := s.Close(); err != nil || z.Keys() != 0 {
		t.Errorf("%v, %d keys", err, z.Keys())
	}
}

func TestSweepFreesIdleKeysAndTheirMemory(t *testing.T) {
	for _, a := range everyAlgorithm {
		clock := storetest.NewClock()
		s := New(WithClock(clock.Now))
		z := s.Open("z")
		l := limit(t, "z", a, 10, time.Minute)
		before := heap()
		for i := range 50_000 {
			ask(t, s, l, fmt.Sprint("old ", i), 1)
		}
		clock.Advance(time.Hour)
		for i := range 100 {
			ask(t, s, l, fmt.Sprint("new ", i), 9)
		}
		full := heap() - before
		z.Sweep()
		if z.Keys() != 100 || z.Evictions() != 0 {
			t.Errorf("%v: %d keys, %d evictions, want 100 and 0", a, z.Keys(), z.Evictions())
		}
		if left := heap() - before; left > full/4 {
			t.Errorf("%v: %d of %d bytes left", a, left, full)
		}
		for i := range 100 {
			if got := ask(t, s, l, fmt.Sprint("new ", i), 0).Remaining; got != 1 {
				t.Fatalf("%v: a key in use has %d remaining after a sweep, want 1", a, got)
			}
		}
		clock.Advance(time.Hour)
		z.Sweep()
		if z.Keys() != 0 {
			t.Errorf("%v: %d keys", a, z.Keys())
		}
	}
}

// Idle keys go with new ones coming, though nobody calls Sweep.
func TestNewKeysPushIdleOnesOut(t *testing.T) {
	clock := storetest.NewClock()
	s := New(WithClock(clock.Now))
	z := s.Open("z")
	l := limit(t, "z", algorithms.FixedWindow, 10, time.Second)
	for minute := range 60 {
		for i := range 2000 {
			ask(t, s, l, fmt.Sprint(minute, i), 1)
		}
		clock.Advance(time.Minute)
	}
	if z.Keys() > 2000+maxShards*chunkSize || z.Evictions() != 0 {
		t.Errorf("%d keys, %d evictions", z.Keys(), z.Evictions())
	}
}
