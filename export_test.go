package sluice

import "time"

// UseClock gives configs that are loaded from now on counters of their own, which read the given
// clock (µs). Tests of hours then take no time. restore goes back to the counters of the process.
func UseClock(now func() int64) (restore func()) {
	before := clock
	clock = &now
	return func() { clock = before }
}

// RemindEvery makes stores that are started from now on remind at that interval.
func RemindEvery(d time.Duration) (restore func()) {
	before := remindEvery
	remindEvery = d
	return func() { remindEvery = before }
}

// Linger makes stores outlive their last config by that.
func Linger(d time.Duration) (restore func()) {
	before := lingering
	lingering = d
	return func() { lingering = before }
}

// Age makes the process older for the sampling of log lines, which counts over all tests.
func Age(d time.Duration) { processStart = processStart.Add(-d) }

// Unaltered is the way of a refusal to the client.
var Unaltered = unaltered
