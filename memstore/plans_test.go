package memstore

// Keys of one table may be under different limits: plans, and configs on both sides of a reload.

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

func planned(t *testing.T, algorithm algorithms.Algorithm, quota int64, window time.Duration, maxKeys int) *algorithms.Limit {
	t.Helper()
	p := algorithms.Policy{Algorithm: algorithm, Quota: quota, Window: window}
	if algorithm == algorithms.TokenBucket {
		p.Burst = quota
	}
	l, err := algorithms.Compile("z", p)
	if err != nil {
		t.Fatal(err)
	}
	l.MaxKeys = maxKeys
	return l
}

func charge(s *Store, l *algorithms.Limit, key string, cost int64) algorithms.Outcome {
	var out [1]algorithms.Outcome
	_ = s.Apply(context.Background(), []algorithms.Charge{{Key: key, Limit: l, Cost: cost}}, out[:])
	return out[0]
}

// G31: a key that is idle by one plan's rate is not by another's, which it may be under when it
// asks next.
func TestIdleIsJudgedByTheSlowestPlan(t *testing.T) {
	now := int64(1_000_000_000_000)
	s := New(WithClock(func() int64 { return now }))
	z := s.Open("z")
	defer z.Close()
	pro, slow := planned(t, algorithms.TokenBucket, 600, time.Second, 0), planned(t, algorithms.TokenBucket, 1, time.Second, 0)
	z.Expect(slow, pro)
	if o := charge(s, pro, "k", 600); !o.OK {
		t.Fatalf("%+v", o)
	}
	now += 2_000_000
	z.Sweep()
	for i := range 3 * chunkSize { // and the hand passes
		charge(s, pro, fmt.Sprint(i), 1)
	}
	if o := charge(s, slow, "k", 1); o.OK || o.Retry != 598*time.Second {
		t.Errorf("told to wait for %v, want 598 s: %+v", o.Retry, o)
	}
}

// G32: a key at its limit stays, however many units others of a larger plan use.
func TestEvictionComparesShares(t *testing.T) {
	now := int64(1_000_000_000_000)
	s := New(WithClock(func() int64 { return now }))
	z := s.Open("z")
	defer z.Close()
	pro, free := planned(t, algorithms.SlidingWindow, 1000, time.Hour, 1000), planned(t, algorithms.SlidingWindow, 3, time.Hour, 1000)
	z.Expect(pro, free)
	charge(s, free, "k", 3)
	for i := range 3000 {
		charge(s, pro, fmt.Sprint(i), 5)
	}
	if o := charge(s, free, "k", 1); o.OK {
		t.Errorf("the client at its limit was forgotten: %+v", o)
	}
	if z.Keys() > 1002 || z.Evictions() == 0 {
		t.Errorf("%d keys, %d evictions", z.Keys(), z.Evictions())
	}
}
