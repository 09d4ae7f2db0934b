package memstore

import (
	"context"
	"runtime"
	"strconv"
	"testing"
	"time"
	"unsafe"

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

// BenchmarkFlood meets so many new keys as are asked for (-benchtime 100000000x) in a table that is
// full, and says how long a decision takes, how long the slowest 64 of them in a row did, and by
// how much memory has grown; beside it the same table without a flood.
func BenchmarkFlood(b *testing.B) {
	for _, flood := range []bool{false, true} {
		b.Run(map[bool]string{false: "known keys", true: "new keys"}[flood], func(b *testing.B) {
			s := New()
			l := limit(b, "z", algorithms.SlidingWindow, 100, 24*time.Hour)
			charges, out := []algorithms.Charge{{Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1)
			key, n := []byte("client "), 0
			ask := func() {
				charges[0].Key = unsafe.String(&key[0], len(key))
				s.Apply(context.Background(), charges, out)
			}
			next := func(of int) {
				n++
				key = strconv.AppendInt(key[:7], int64(n%of), 10)
				ask()
			}
			for range algorithms.DefaultMaxKeys {
				next(1 << 62)
			}
			of := algorithms.DefaultMaxKeys
			if flood {
				of = 1 << 62
			}
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			var slowest time.Duration
			b.ResetTimer()
			for range b.N / 64 {
				start := time.Now()
				for range 64 {
					next(of)
				}
				slowest = max(slowest, time.Since(start))
			}
			b.StopTimer()
			runtime.GC()
			runtime.ReadMemStats(&after)
			b.ReportMetric(float64(slowest.Microseconds()), "µs-slowest-64")
			b.ReportMetric(float64(int64(after.HeapAlloc)-int64(before.HeapAlloc))/1e6, "MB-grown")
			runtime.KeepAlive(s)
		})
	}
}

// BenchmarkCollection says what ten million keys add to a collection of garbage.
func BenchmarkCollection(b *testing.B) {
	for _, keys := range []int{0, 10_000_000} {
		b.Run(strconv.Itoa(keys), func(b *testing.B) {
			s := New()
			l := limit(b, "z", algorithms.SlidingWindow, 100, 24*time.Hour)
			l.MaxKeys = 1 << 30
			charges, out := []algorithms.Charge{{Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1)
			for i := range keys {
				charges[0].Key = strconv.Itoa(i)
				s.Apply(context.Background(), charges, out)
			}
			runtime.GC()
			for b.Loop() {
				runtime.GC()
			}
			runtime.KeepAlive(s)
		})
	}
}
