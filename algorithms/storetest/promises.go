package storetest

// The numbered promises of one charge at a time.

import (
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

const tick = time.Microsecond

var promiseCases = []testCase{
	{"1_retry_is_tight", retryIsTight},
	{"2_remaining_is_true", remainingIsTrue},
	{"3_next_is_tight", nextIsTight},
	{"4_refusal_changes_nothing", refusalChangesNothing},
	{"5_above_capacity_never", aboveCapacityNever},
	{"6_peek_changes_nothing", peekChangesNothing},
	{"6_cost_zero_takes_nothing", costZeroTakesNothing},
	{"8_clock_steps", clockSteps},
	{"10_changed_quota_keeps_usage", changedQuota},
}

func retryIsTight(s *subject) {
	s.each(func(s *subject, l *algorithms.Limit) {
		for cost := int64(1); cost <= l.Capacity; cost += max(1, l.Capacity/3) {
			s.take(l, "k", s.peek(l, "k", 1).Remaining)
			o := s.refused(l, "k", cost, -1)
			s.clock.Advance(o.Retry - tick)
			s.refused(l, "k", cost, tick)
			s.clock.Advance(tick)
			s.take(l, "k", cost)
		}
	})
}

func remainingIsTrue(s *subject) {
	s.each(func(s *subject, l *algorithms.Limit) {
		for range 20 {
			left := s.peek(l, "k", 1).Remaining
			if left < l.Capacity && s.peek(l, "k", left+1).OK {
				s.Fatalf("%d remaining, but %d pass", left, left+1)
			}
			if o := s.take(l, "k", left); left > 0 && o.Remaining != 0 {
				s.Fatalf("took all %d, but %d remain", left, o.Remaining)
			}
			s.clock.Advance((l.Refill() / 9).Truncate(tick))
		}
	})
}

func nextIsTight(s *subject) {
	s.each(func(s *subject, l *algorithms.Limit) {
		o := s.take(l, "k", l.Capacity)
		for range min(l.Capacity, 20) {
			s.clock.Advance(o.Next - tick)
			if left := s.peek(l, "k", 0).Remaining; left != o.Remaining {
				s.Fatalf("%d remaining one tick before next, want %d", left, o.Remaining)
			}
			s.clock.Advance(tick)
			now := s.peek(l, "k", 0)
			if now.Remaining <= o.Remaining {
				s.Fatalf("%d remaining at next, want more than %d", now.Remaining, o.Remaining)
			}
			if o = now; o.Next == algorithms.Never {
				break
			}
		}
	})
}

func refusalChangesNothing(s *subject) {
	s.each(func(s *subject, l *algorithms.Limit) {
		s.take(l, "k", l.Capacity)
		first := s.peek(l, "k", l.Capacity)
		step := (first.Retry / 100).Truncate(tick)
		for i := range 50 {
			o := s.refused(l, "k", l.Capacity, first.Retry-time.Duration(i)*step)
			if o.Mark != 0 {
				s.Fatalf("a refused charge has the mark %d", o.Mark)
			}
			s.clock.Advance(step)
		}
	})
}

func aboveCapacityNever(s *subject) {
	s.each(func(s *subject, l *algorithms.Limit) {
		if o := s.refused(l, "k", l.Capacity+1, algorithms.Never); o.Remaining != l.Capacity {
			s.Fatalf("%d remaining, want the capacity %d", o.Remaining, l.Capacity)
		}
		s.take(l, "k", l.Capacity)
		s.refused(l, "k", l.Capacity+1, algorithms.Never)
	})
}

func peekChangesNothing(s *subject) {
	s.each(func(s *subject, l *algorithms.Limit) {
		s.take(l, "k", 1)
		for range 3 {
			a, b := s.peek(l, "k", l.Capacity), s.peek(l, "k", l.Capacity)
			if a != b || a.Mark != 0 {
				s.Fatalf("two peeks at one moment: %+v and %+v", a, b)
			}
			s.clock.Advance((l.Refill() / 10).Truncate(tick))
		}
		if left := s.peek(l, "other", 1).Remaining; left != l.Capacity {
			s.Fatalf("a key that was only looked at has %d remaining", left)
		}
	})
}

func costZeroTakesNothing(s *subject) {
	s.each(func(s *subject, l *algorithms.Limit) {
		for range 3 {
			if o := s.take(l, "k", 0); o.Remaining != l.Capacity {
				s.Fatalf("%+v", o)
			}
		}
		s.take(l, "k", l.Capacity)
		if o := s.take(l, "k", 0); o.Remaining != 0 || o.Mark != 0 {
			s.Fatalf("%+v", o)
		}
	})
}

// clockSteps: a step back of up to a window grants nothing twice, a larger one locks nothing for long.
func clockSteps(s *subject) {
	s.each(func(s *subject, l *algorithms.Limit) {
		s.take(l, "k", l.Capacity)
		for _, step := range []time.Duration{-l.Window / 2, l.Window / 2, -l.Window / 2} {
			s.clock.Advance(step)
			s.refused(l, "k", 1, -1)
		}
		s.clock.Advance(l.Window / 2)
		s.clock.Advance(-5 * l.Window)
		o := s.refused(l, "k", 1, -1)
		if o.Retry > 2*l.Window {
			s.Fatalf("locked for %v, more than two windows of %v", o.Retry, l.Window)
		}
		s.clock.Advance(o.Retry - tick)
		s.refused(l, "k", 1, tick)
		s.clock.Advance(tick)
		s.take(l, "k", 1)
	})
}

func changedQuota(s *subject) {
	for _, p := range []algorithms.Policy{
		{Algorithm: algorithms.FixedWindow, Quota: 100, Window: time.Minute},
		{Algorithm: algorithms.SlidingLog, Quota: 100, Window: time.Minute},
		{Algorithm: algorithms.SlidingWindow, Quota: 100, Window: time.Minute},
		{Algorithm: algorithms.TokenBucket, Quota: 100, Window: time.Minute, Burst: 100},
		{Algorithm: algorithms.LeakyBucket, Quota: 100, Window: time.Minute, Burst: 100},
	} {
		zone := p.Algorithm.String()
		with := func(n int64) *algorithms.Limit {
			q := p
			if q.Quota = n; q.Algorithm.Bucket() {
				q.Burst = n
			}
			return s.limit(zone, q)
		}
		s.take(with(100), "k", 50)
		s.left(with(10), "k", 0)
		s.refused(with(10), "k", 1, -1)
		s.left(with(70), "k", 20)
		s.left(with(1000), "k", 950)
		s.take(with(1000), "k", 950)
		s.left(with(1000), "k", 0)
	}
}
