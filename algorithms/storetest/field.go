package storetest

// Cases from the field: each went wrong in some limiter that people run.

import (
	"fmt"
	"strings"
	"time"
	"unsafe"

	"github.com/caddy-sluice/sluice/algorithms"
)

var fieldCases = []testCase{
	{"F01_exactly_an_interval", exactlyAnInterval},
	{"F03_quota_zero_refuses", quotaZero},
	{"F04_idle_for_a_year", idleForAYear},
	{"F08_remaining_after_lowering", remainingAfterLowering},
	{"F09_cost_above_the_burst", costAboveBurst},
	{"F14_debt_outlives_a_short_expiry", debtOutlives},
	{"F15_expired_window_starts_afresh", expiredWindow},
	{"F21_zones_do_not_share", zonesDoNotShare},
	{"F21_one_zone_one_counter", oneZoneOneCounter},
	{"F22_F23_keys_are_exact", keysAreExact},
	{"keys_are_not_kept", keysAreNotKept},
	{"F31_refused_do_not_count", refusedDoNotCount},
}

func quotaZero(s *subject) {
	for a := algorithms.FixedWindow; a <= algorithms.LeakyBucket; a++ {
		l := s.limit("z", algorithms.Policy{Algorithm: a, Window: time.Second})
		for range 3 {
			s.refused(l, "k", 1, algorithms.Never)
			s.take(l, "k", 0)
			s.clock.Advance(l.Window)
		}
	}
}

func debtOutlives(s *subject) {
	l := s.limit("z", algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: 1, Window: time.Second, Burst: 200})
	s.take(l, "k", 200)
	s.clock.Advance(2200 * time.Millisecond)
	s.take(l, "k", 2)
	s.refused(l, "k", 1, 800*time.Millisecond)
}

func expiredWindow(s *subject) {
	for _, l := range s.five("z", 5) {
		s.clock.align(l.Window)
		s.take(l, "k", 5)
		s.clock.Advance(2 * l.Window)
		s.left(l, "k", 5)
		s.take(l, "k", 5)
		s.refused(l, "k", 1, -1)
	}
}

func zonesDoNotShare(s *subject) {
	a, b := s.five("a", 5), s.five("b", 5)
	for i := range a {
		s.take(a[i], "k", 5)
		s.left(b[i], "k", 5)
		s.take(b[i], "k", 3)
		s.left(a[i], "k", 0)
	}
}

func keysAreExact(s *subject) {
	long := strings.Repeat("x", 100_000)
	keys := []string{
		"", "a", "A", "a:", "a_", "a|", "a\x00", "{a}", "a{", "a}", ":a", "\x00", "\xff", "ab", "é", "e\u0301",
		long, long[:len(long)-1] + "y", long + "x",
	}
	for _, l := range s.five("z", 5) {
		for i, k := range keys {
			s.take(l, k, int64(i%5)+1)
		}
		for i, k := range keys {
			s.left(l, k, 4-int64(i%5))
		}
	}
}

func exactlyAnInterval(s *subject) {
	l := s.limit("z", algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: 1, Window: time.Hour, Burst: 1})
	for range 5 {
		s.take(l, "k", 1)
		s.clock.Advance(time.Hour - tick)
		s.refused(l, "k", 1, tick)
		s.clock.Advance(tick)
	}
}

func idleForAYear(s *subject) {
	l := s.limit("z", algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: 1_000_000, Window: time.Second, Burst: 1_000_000})
	for _, idle := range []time.Duration{12 * time.Hour, 365 * 24 * time.Hour} {
		s.take(l, "k", 1_000_000)
		s.clock.Advance(idle)
		s.left(l, "k", 1_000_000)
	}
}

func remainingAfterLowering(s *subject) {
	with := func(n int64) *algorithms.Limit {
		return s.limit("z", algorithms.Policy{Algorithm: algorithms.SlidingWindow, Quota: n, Window: time.Minute})
	}
	s.take(with(100), "k", 50)
	if o := s.refused(with(10), "k", 1, -1); o.Remaining != 0 {
		s.Fatalf("%+v", o)
	}
	s.left(with(51), "k", 1)
}

func costAboveBurst(s *subject) {
	l := s.limit("z", algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: 100, Window: time.Second, Burst: 5})
	if o := s.refused(l, "k", 10, algorithms.Never); o.Remaining != 5 {
		s.Fatalf("%+v", o)
	}
}

// oneZoneOneCounter: a name, an algorithm, a window and a key make a counter; no joining of them
// makes another's.
func oneZoneOneCounter(s *subject) {
	p := algorithms.Policy{Algorithm: algorithms.FixedWindow, Quota: 5, Window: time.Second}
	pairs := []struct{ zone, key string }{{"a", "bc"}, {"ab", "c"}, {"abc", ""}, {"a.b", "c"}, {"a", "b.c"}, {"a", ":bc"}}
	for i, pair := range pairs {
		s.take(s.limit(pair.zone, p), pair.key, int64(i%5)+1)
	}
	for i, pair := range pairs {
		s.left(s.limit(pair.zone, p), pair.key, 4-int64(i%5))
	}
}

// keysAreNotKept: a caller builds keys in a buffer that it uses again.
func keysAreNotKept(s *subject) {
	buffer := []byte("client 0000")
	key := unsafe.String(&buffer[0], len(buffer))
	for _, l := range s.five("z", 5) {
		for i := range int64(5) {
			copy(buffer[7:], fmt.Sprintf("%04d", i))
			s.take(l, key, i+1)
		}
		copy(buffer[7:], "9999")
		for i := range int64(5) {
			s.left(l, fmt.Sprintf("client %04d", i), 4-i)
		}
		s.left(l, key, 5)
	}
}

func refusedDoNotCount(s *subject) {
	for a, want := range map[algorithms.Algorithm]int{algorithms.FixedWindow: 50, algorithms.SlidingLog: 50, algorithms.SlidingWindow: 41} {
		l := s.limit("z", algorithms.Policy{Algorithm: a, Quota: 5, Window: time.Second})
		s.clock.align(l.Window)
		admitted := 0
		for range 100 {
			if s.ask(l, "k", 1).OK {
				admitted++
			}
			s.clock.Advance(100 * time.Millisecond)
		}
		if admitted != want {
			s.Errorf("%v: %d of 100 admitted in ten seconds, want %d", a, admitted, want)
		}
	}
}
