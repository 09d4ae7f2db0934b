package storetest

// Cases from the field: each went wrong in some limiter that people run.

import (
	"strings"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

var fieldCases = []testCase{
	{"F03_quota_zero_refuses", quotaZero},
	{"F14_debt_outlives_a_short_expiry", debtOutlives},
	{"F15_expired_window_starts_afresh", expiredWindow},
	{"F21_zones_do_not_share", zonesDoNotShare},
	{"F22_F23_keys_are_exact", keysAreExact},
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
	for _, l := range s.three("z", 5) {
		s.clock.align(l.Window)
		s.take(l, "k", 5)
		s.clock.Advance(2 * l.Window)
		s.left(l, "k", 5)
		s.take(l, "k", 5)
		s.refused(l, "k", 1, -1)
	}
}

func zonesDoNotShare(s *subject) {
	a, b := s.three("a", 5), s.three("b", 5)
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
	for _, l := range s.three("z", 5) {
		for i, k := range keys {
			s.take(l, k, int64(i%5)+1)
		}
		for i, k := range keys {
			s.left(l, k, 4-int64(i%5))
		}
	}
}
