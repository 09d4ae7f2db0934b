package memstore

import (
	"testing"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/algorithms/storetest"
)

func TestConformance(t *testing.T) {
	storetest.Run(t, func(_ *testing.T, clock *storetest.Clock) algorithms.Store {
		return New(WithClock(clock.Now))
	})
}
