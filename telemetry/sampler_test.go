package telemetry

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"
)

func from(address string) func() string { return func() string { return address } }

// One key, however fast, gets one line per second, and the next line tells how many had none.
func TestOneKeyOneLineASecond(t *testing.T) {
	s := newSampler()
	lines, suppressed := 0, uint32(0)
	for i := range 50_000 {
		now := time.Duration(i) * 100 * time.Microsecond // 10,000 a second for 5 s
		if n, ok := s.admit("api", "scraper", from("192.0.2.1"), now); ok {
			lines++
			suppressed += n
		}
	}
	// 5 s touch 6 fixed seconds at most
	if lines < 5 || lines > 6 {
		t.Errorf("%d lines in 5 s, want 5 or 6", lines)
	}
	rest, ok := s.admit("api", "scraper", from("192.0.2.1"), time.Hour)
	if !ok || uint32(lines)+suppressed+rest != 50_000 {
		t.Errorf("%d lines and %d+%d suppressed do not add up to 50000 (logged again: %v)", lines, suppressed, rest, ok)
	}
}

// Suppressed refusals are told once.
func TestSuppressedIsToldOnce(t *testing.T) {
	s := newSampler()
	for range 5 {
		s.admit("api", "k", from("192.0.2.1"), 0)
	}
	for i, want := range []uint32{4, 0, 0} {
		if n, ok := s.admit("api", "k", from("192.0.2.1"), time.Duration(i+1)*10*time.Second); !ok || n != want {
			t.Errorf("line %d: suppressed %d (%v), want %d", i, n, ok, want)
		}
	}
}

// The same key in two zones is two keys.
func TestZonesDoNotHideEachOther(t *testing.T) {
	s := newSampler()
	for _, zone := range []string{"a", "b"} {
		if _, ok := s.admit(zone, "k", from("192.0.2.1"), 0); !ok {
			t.Errorf("zone %s was not logged", zone)
		}
	}
}

// A client with a million keys neither floods the log nor hides others, second after second.
func TestManyKeysOfOneClientHideNobody(t *testing.T) {
	for name, address := range map[string]func(i int) string{
		"one IPv4 address": func(int) string { return "192.0.2.1" },
		"one IPv6 /64":     func(i int) string { return fmt.Sprintf("2001:db8::%x:%x", i>>16, i&0xffff) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSampler()
			for second := range 5 {
				start := time.Duration(second) * 10 * time.Second
				lines := 0
				for i := range 20_000 {
					if _, ok := s.admit("login", fmt.Sprint("user", i), from(address(i)), start); ok {
						lines++
					}
				}
				if lines == 0 || lines > perAddress {
					t.Errorf("second %d: %d lines, want 1 to %d", second, lines, perAddress)
				}
				for i := range 100 {
					victim := fmt.Sprintf("198.51.100.%d", i)
					if _, ok := s.admit("login", victim, from(victim), start); !ok {
						t.Errorf("second %d: %s is hidden", second, victim)
					}
				}
			}
		})
	}
}

// Even a botnet cannot make more lines than the table has slots, and those it hides are not always
// the same.
func TestBotnetIsBounded(t *testing.T) {
	s := newSampler()
	const clients = 40_000
	seen := make([]bool, clients)
	distinct := 0
	for second := range 8 {
		lines := 0
		for i := range clients {
			c := (i*7919 + second*104729) % clients // they come in another order each second
			address := fmt.Sprintf("10.%d.%d.%d", c>>16, c>>8&255, c&255)
			if _, ok := s.admit("api", address, from(address), time.Duration(second)*10*time.Second); ok {
				lines++
				if !seen[c] {
					seen[c], distinct = true, distinct+1
				}
			}
		}
		if lines > sets*ways || lines < sets*ways*9/10 {
			t.Errorf("second %d: %d lines, want about %d at most", second, lines, sets*ways)
		}
	}
	if distinct < 4*sets*ways {
		t.Errorf("8 seconds showed only %d clients", distinct)
	}
	if size := unsafe.Sizeof(*s); size > 68<<10 {
		t.Errorf("the sampler takes %d bytes", size)
	}
}

// A full set does not hide a key from the moment at which others become quiet.
func TestQuietSlotsAreReused(t *testing.T) {
	s := newSampler()
	for i := range 20_000 {
		address := fmt.Sprintf("10.0.%d.%d", i>>8&255, i&255)
		s.admit("api", fmt.Sprint(i), from(address), 0)
	}
	if _, ok := s.admit("api", "late", from("192.0.2.1"), 2*time.Second); !ok {
		t.Error("hidden by keys that are quiet")
	}
}

// A request that read the clock just before the edge of a second and comes after one that read it
// just behind starts no second of its own.
func TestLateClockReading(t *testing.T) {
	s := newSampler()
	s.admit("api", "k", from("192.0.2.1"), 0)
	for edge := time.Millisecond; edge < 3*time.Second; edge += time.Millisecond {
		if _, ok := s.admit("api", "k", from("192.0.2.1"), edge); !ok {
			continue
		}
		for range 10 {
			if _, ok := s.admit("api", "k", from("192.0.2.1"), edge-time.Millisecond); ok {
				t.Errorf("a second line for a reading of %v after one of %v", edge-time.Millisecond, edge)
			}
			if _, ok := s.admit("api", "k", from("192.0.2.1"), edge); ok {
				t.Errorf("a third line at %v", edge)
			}
		}
	}
}

// Racing first refusals of one key are one line, and every other one is counted.
func TestConcurrentFirstRefusal(t *testing.T) {
	s := newSampler()
	const goroutines, each = 8, 20_000
	var wg sync.WaitGroup
	var first atomic.Int64
	for range goroutines {
		wg.Go(func() {
			for range each {
				if _, ok := s.admit("api", "one moment", from("192.0.2.1"), time.Hour); ok {
					first.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if first.Load() != 1 {
		t.Errorf("%d first refusals of one key in one second", first.Load())
	}
	if rest, _ := s.admit("api", "one moment", from("192.0.2.1"), 2*time.Hour); int(rest) != goroutines*each-1 {
		t.Errorf("%d suppressed, want %d", rest, goroutines*each-1)
	}
}

// A late reading of the clock does not push out what the new second has logged.
func TestLateReadingTakesNoSlot(t *testing.T) {
	var tb table
	for tag := range uint64(ways) {
		tb.visit(tag<<(64-tagBits), time.Second)
	}
	if nth, _ := tb.visit(ways<<(64-tagBits), 500*time.Millisecond); nth != 0 {
		t.Errorf("visit %d in a full set", nth)
	}
}

func TestCounterCarryDoesNotCorrupt(t *testing.T) {
	var tb table
	tb.visit(42, 0)
	set, _, _ := tb.locate(42, 0)
	set[0].Store(set[0].Load() | uint64(1<<24-1)<<40) // 16,777,215 visits
	if !tb.again(42, 0) {
		t.Error("a full count is not recognized")
	}
	if w := set[0].Load(); tagOf(w) != 0 || secondOf(w) != 0 {
		t.Errorf("the carry changed tag or second: %x", w)
	}
}

func BenchmarkAdmit(b *testing.B) {
	s := newSampler()
	client := from("192.0.2.1")
	b.Run("hot key", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			s.admit("api", "203.0.113.77", client, 0)
		}
	})
}
