package memstore

import (
	"testing"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/algorithms/storetest"
)

// The comparison with other limiters is in bench/.
func BenchmarkStore(b *testing.B) {
	storetest.Bench(b, func(*testing.B) algorithms.Store { return New() })
}
