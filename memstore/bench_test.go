package memstore

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

func BenchmarkApply(b *testing.B) {
	for _, p := range []algorithms.Policy{
		{Algorithm: algorithms.TokenBucket, Quota: 1_000_000_000, Window: time.Minute, Burst: 1_000_000_00},
		{Algorithm: algorithms.SlidingWindow, Quota: 1_000_000_000 / 100, Window: time.Minute},
		{Algorithm: algorithms.FixedWindow, Quota: 1_000_000_000, Window: time.Minute},
		{Algorithm: algorithms.SlidingWindow, Quota: 0, Window: time.Minute},
	} {
		for _, n := range []int{1, 1000, 1_000_000} {
			b.Run(fmt.Sprintf("%v/%d/keys=%d", p.Algorithm, min(p.Quota, 1), n), func(b *testing.B) {
				l, err := algorithms.Compile("z", p)
				if err != nil {
					b.Fatal(err)
				}
				keys := make([]string, n)
				for i := range keys {
					keys[i] = fmt.Sprintf("10.%d.%d.%d", i>>16&255, i>>8&255, i&255)
				}
				s := New()
				charges := []algorithms.Charge{{Limit: l, Cost: 1}}
				out := make([]algorithms.Outcome, 1)
				for _, k := range keys {
					charges[0].Key = k
					s.Apply(context.Background(), charges, out)
				}
				b.ReportAllocs()
				i := 0
				for b.Loop() {
					charges[0].Key = keys[i]
					s.Apply(context.Background(), charges, out)
					if i += 7919; i >= n {
						i %= n
					}
				}
			})
		}
	}
}
