package storetest

import (
	"testing"

	"github.com/caddy-sluice/sluice/algorithms"
)

func newReference(_ *testing.T, clock *Clock) algorithms.Store { return NewReference(clock.Now) }

func TestReference(t *testing.T) { Run(t, newReference) }

func TestReferenceDifferential(t *testing.T) {
	for seed := range uint64(4) {
		clock := NewClock()
		Differential(t, newReference(t, clock), clock, 25_000, seed)
	}
}
