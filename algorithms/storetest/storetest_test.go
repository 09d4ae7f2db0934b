package storetest

import (
	"testing"

	"github.com/caddy-sluice/sluice/algorithms"
)

func newReference(_ *testing.T, clock *Clock) algorithms.Store { return NewReference(clock.Now) }

func TestReference(t *testing.T) { Run(t, newReference) }
