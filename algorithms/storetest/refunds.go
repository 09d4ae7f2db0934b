package storetest

// Promise 12: units go back only to where they came from.

import (
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

var refundCases = []testCase{
	{"gives_back", givesBack},
	{"F16_after_the_window_is_void", afterTheWindow},
	{"of_an_unknown_key", ofAnUnknownKey},
	{"never_above_the_quota", neverAboveQuota},
}

func (s *subject) refund(l *algorithms.Limit, key string, units, mark int64) algorithms.Outcome {
	s.Helper()
	return s.apply(algorithms.Charge{Key: key, Limit: l, Cost: -units, Mark: mark, Force: true})[0]
}

func givesBack(s *subject) {
	for _, l := range s.five("z", 5) {
		o := s.take(l, "k", 4)
		if got := s.refund(l, "k", 3, o.Mark); !got.OK || got.Remaining != 4 {
			s.Fatalf("%v: %+v, want 4 remaining", l.Policy, got)
		}
		s.take(l, "k", 4)
		s.refused(l, "k", 1, -1)
	}
}

func afterTheWindow(s *subject) {
	for _, l := range s.five("z", 5) {
		s.clock.align(l.Window)
		o := s.take(l, "k", 2)
		s.clock.Advance(2 * l.Window)
		s.take(l, "k", 3)
		if got := s.refund(l, "k", 2, o.Mark); got.Remaining != 2 {
			s.Fatalf("%v: %+v, want 2 remaining", l.Policy, got)
		}
		s.clock.Advance(2 * l.Window)
		s.refund(l, "k", 2, o.Mark)
		s.left(l, "k", 5)
		s.take(l, "k", 5)
		s.refused(l, "k", 1, -1)
	}
}

func ofAnUnknownKey(s *subject) {
	for _, l := range s.five("z", 5) {
		if got := s.refund(l, "k", 3, s.clock.Now()+time.Second.Microseconds()); got.Remaining != 5 {
			s.Fatalf("%v: %+v", l.Policy, got)
		}
		s.take(l, "k", 5)
		s.refused(l, "k", 1, -1)
	}
}

func neverAboveQuota(s *subject) {
	for _, l := range s.five("z", 5) {
		o := s.take(l, "k", 2)
		if got := s.refund(l, "k", 100, o.Mark); got.Remaining != 5 {
			s.Fatalf("%v: %+v", l.Policy, got)
		}
		s.take(l, "k", 5)
		s.refused(l, "k", 1, -1)
	}
}
