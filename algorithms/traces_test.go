package algorithms_test

import (
	"testing"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/algorithms/storetest"
)

// The pure decision reads the traces through the reference store, which adds a map and a mutex and
// nothing else.
func TestTraces(t *testing.T) {
	storetest.Traces(t, "../testdata/traces", func(_ *testing.T, clock *storetest.Clock) algorithms.Store {
		return storetest.NewReference(clock.Now)
	})
}
