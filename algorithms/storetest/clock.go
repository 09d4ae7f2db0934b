// Package storetest proves that a store keeps the promises of [algorithms.Store]. It is shipped, so
// that a store written elsewhere is held to the same tests: [Run] is the conformance suite,
// [Traces] replays the readable traces of testdata/traces, [Differential] compares with a
// [Reference] on random batches, [Bench] measures.
//
// A store under test takes its time from a [Clock], because every promise is about exact moments.
package storetest

import (
	"sync/atomic"
	"time"
)

// Start is where a new Clock stands: 2026-01-01 00:00:00 UTC in microseconds. It is a whole number
// of days, so that windows which divide a day begin here.
const Start int64 = 1_767_225_600_000_000

// Clock is a settable clock in microseconds since the Unix epoch. Its method Now is the func()
// int64 that a store takes. It may be read from many goroutines.
type Clock struct{ now atomic.Int64 }

// NewClock returns a clock that stands at [Start].
func NewClock() *Clock {
	c := new(Clock)
	c.Set(Start)
	return c
}

// Now returns the moment in microseconds.
func (c *Clock) Now() int64 { return c.now.Load() }

// Set moves the clock to a moment in microseconds, also backwards.
func (c *Clock) Set(now int64) { c.now.Store(now) }

// Advance moves the clock by d, a whole number of microseconds; a negative d steps back.
func (c *Clock) Advance(d time.Duration) { c.now.Add(d.Microseconds()) }

// align moves the clock forward to the next moment at which a window of this length begins.
func (c *Clock) align(window time.Duration) {
	w := window.Microseconds()
	now := c.Now() + w - 1
	c.Set(now - now%w)
}
