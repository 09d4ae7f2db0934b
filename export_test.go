package sluice

import "github.com/caddy-sluice/sluice/memstore"

// UseClock gives configs that are loaded from now on counters of their own, which read the given clock (µs). Tests
// of hours then take no time. restore goes back to the counters of the process.
func UseClock(now func() int64) (restore func()) {
	before := local
	local = memstore.New(memstore.WithClock(now))
	return func() { local = before }
}
