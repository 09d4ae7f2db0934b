package memstore

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/algorithms/storetest"
)

// The comparison with other limiters is in bench/.
func BenchmarkStore(b *testing.B) {
	storetest.Bench(b, func(*testing.B) algorithms.Store { return New() })
}

// What a new key costs: while there is room, and in a full table, where another one has to go.
func BenchmarkNewKey(b *testing.B) {
	for name, bound := range map[string]int{"room": 1 << 30, "full": 1_000_000} {
		b.Run(name, func(b *testing.B) {
			s := New()
			l := limit(b, "z", algorithms.SlidingWindow, 100, 24*time.Hour)
			l.MaxKeys = bound
			charges, out := []algorithms.Charge{{Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1)
			key := []byte("client ")
			n := 0
			next := func() {
				n++
				charges[0].Key = string(strconv.AppendInt(key, int64(n), 10))
				s.Apply(context.Background(), charges, out)
			}
			for range 1_000_000 {
				next()
			}
			b.ReportAllocs()
			for b.Loop() {
				next()
			}
		})
	}
}
