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
	{"8_reanchoring_is_kept_on_refusal", reanchoringIsKept},
	{"10_changed_quota_keeps_usage", changedQuota},
	{"10_changed_window_starts_afresh", changedWindow},
	{"11_no_drift", noDrift},
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
			if l.Algorithm == algorithms.SlidingWindow && o.Remaining > 0 { // used as early as it can be, it weighs on
				o.Remaining = s.take(l, "k", o.Remaining).Remaining
			}
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

// clockSteps: a step back of up to a window grants nothing twice, a larger one locks nothing for
// long.
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

// reanchoringIsKept: a refusal writes nothing, but what was too far ahead is brought back for good.
func reanchoringIsKept(s *subject) {
	for _, l := range s.five("z", 5) {
		s.take(l, "k", 5)
		s.clock.Advance(-10 * l.Window)
		o := s.refused(l, "k", 1, -1)
		s.clock.Advance(o.Retry / 2)
		if again := s.refused(l, "k", 1, -1); again.Retry > o.Retry-o.Retry/2+tick {
			s.Fatalf("%v: half of a wait of %v later %v are left", l.Policy, o.Retry, again.Retry)
		}
		s.clock.Advance(10 * l.Window)
	}
}

func changedWindow(s *subject) {
	for _, l := range s.five("z", 5) {
		s.take(l, "k", 5)
		p := l.Policy
		p.Window *= 2
		s.left(s.limit("z", p), "k", 5)
	}
	// The algorithm is part of a counter's identity too: none of the five above met what another
	// had used.
}

// noDrift: saturated, each by the wait that was promised, exactly the quota passes in every window.
func noDrift(s *subject) {
	for _, p := range []algorithms.Policy{
		{Algorithm: algorithms.FixedWindow, Quota: 7, Window: time.Second},
		{Algorithm: algorithms.SlidingLog, Quota: 7, Window: time.Second},
		{Algorithm: algorithms.SlidingWindow, Quota: 7, Window: time.Second},
		{Algorithm: algorithms.TokenBucket, Quota: 7, Window: time.Second, Burst: 2},
		{Algorithm: algorithms.LeakyBucket, Quota: 3, Window: time.Second, Burst: 2},
	} {
		const windows = 30
		l := s.limit("z", p)
		s.clock.align(p.Window)
		end, admitted := s.clock.Now()+windows*p.Window.Microseconds(), int64(0)
		for s.clock.Now() < end {
			if o := s.ask(l, "k", 1); o.OK {
				admitted++
			} else {
				s.clock.Advance(o.Retry)
			}
		}
		want := windows * p.Quota
		switch {
		case p.Algorithm.Bucket():
			want += p.Burst - 1
		case p.Algorithm == algorithms.SlidingWindow:
			want -= windows - 1
		}
		if admitted != want {
			s.Errorf("%+v: %d admitted in %d windows, want %d", p, admitted, windows, want)
		}
	}
}
