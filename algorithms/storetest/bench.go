package storetest

import (
	"context"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Bench measures one decision through a store: on one key, a thousand and a million, passing and
// refused, by every algorithm on one key and by the fixed-size ones on many, from as many
// goroutines as there are processors. newStore must return an empty store on a clock of its own;
// Bench closes what it returns.
func Bench(b *testing.B, newStore func(b *testing.B) algorithms.Store) {
	for _, keys := range []int{1, 1_000, 1_000_000} {
		for _, p := range benchPolicies {
			if keys > 1 && p.Algorithm == algorithms.SlidingLog {
				continue // its memory is the quota in use, not the store's doing
			}
			for _, quota := range []int64{1_000_000, 0} {
				name := fmt.Sprintf("%v/keys=%d/%s", p.Algorithm, keys, map[bool]string{true: "pass", false: "refuse"}[quota > 0])
				b.Run(name, func(b *testing.B) { benchOne(b, newStore, keys, p, quota) })
			}
		}
	}
}

var benchPolicies = []algorithms.Policy{
	{Algorithm: algorithms.FixedWindow, Window: time.Second},
	{Algorithm: algorithms.SlidingLog, Window: 100 * time.Microsecond},
	{Algorithm: algorithms.SlidingWindow, Window: time.Second},
	{Algorithm: algorithms.TokenBucket, Window: 10 * time.Millisecond, Burst: 1_000_000},
}

func benchOne(b *testing.B, newStore func(b *testing.B) algorithms.Store, keys int, p algorithms.Policy, quota int64) {
	if p.Quota = quota; quota == 0 {
		// A quota of 1 that is used up for longer than the benchmark lasts: a counter is read and
		// refuses.
		p.Quota, p.Window, p.Burst = 1, 24*time.Hour, min(p.Burst, 1)
	}
	l, err := algorithms.Compile("bench", p)
	if err != nil {
		b.Fatal(err)
	}
	l.MaxKeys = 2 * keys
	store := newStore(b)
	defer func() {
		if err := store.Close(); err != nil {
			b.Error(err)
		}
	}()
	names := make([]string, keys)
	var out [1]algorithms.Outcome
	for i := range names {
		names[i] = "client " + strconv.Itoa(i)
		if err := store.Apply(context.Background(), []algorithms.Charge{{Key: names[i], Limit: l, Cost: 1}}, out[:]); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		charges, out := []algorithms.Charge{{Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1)
		for i := 0; pb.Next(); i++ {
			// A stride that is coprime to the counts above: neighbours in time are not neighbours
			// in memory.
			charges[0].Key = names[i*7919%keys]
			if err := store.Apply(context.Background(), charges, out); err != nil {
				b.Error(err)
				return
			}
		}
	})
}
