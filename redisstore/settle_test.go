package redisstore

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

func hourly(t testing.TB, zone string, n int64) *algorithms.Limit {
	return compile(t, zone, algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: n, Window: 1000 * time.Hour, Burst: n})
}

// left is what a key has left.
func left(t testing.TB, s *Store, l *algorithms.Limit, key string) int64 {
	t.Helper()
	return ask1(t, s, algorithms.Charge{Key: key, Limit: l, Cost: 1, Peek: true}).Remaining
}

func TestSettlementsAreMergedAndExact(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	l, window := hourly(t, "z", 1_000_000), perHour(t, "w", 1000)
	var marks []int64
	for range 100 {
		marks = append(marks, ask1(t, s, algorithms.Charge{Key: "k", Limit: window, Cost: 1}).Mark)
	}
	before := server.Calls("evalsha")
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			for n := range 1000 {
				s.Settle(algorithms.Charge{Key: fmt.Sprint("k", n%3), Limit: l, Cost: 1, Force: true})
			}
			for _, mark := range marks[10*i : 10*i+10] {
				s.Settle(algorithms.Charge{Key: "k", Limit: window, Cost: -1, Mark: mark})
			}
		})
	}
	wg.Wait()
	looks := 0
	waitFor(t, "all is settled", func() bool {
		looks++
		return left(t, s, window, "k") == 1000 && left(t, s, l, "k0")+left(t, s, l, "k1")+left(t, s, l, "k2") == 3_000_000-10_000
	})
	if calls := server.Calls("evalsha") - before; calls > 2000+4*looks {
		t.Errorf("%d calls for 10,100 settlements: they are not merged", calls)
	}
}

// Nothing to settle costs nothing.
func TestSettlingRests(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}})
	l := hourly(t, "z", 100)
	s.Settle(algorithms.Charge{Key: "k", Limit: l, Cost: 1, Force: true})
	waitFor(t, "it is settled", func() bool { return left(t, s, l, "k") == 99 })
	rests := func() bool {
		if !s.unsettled.applying.TryLock() {
			return false
		}
		s.unsettled.applying.Unlock()
		return true
	}
	waitFor(t, "who settled it is done", rests)
	for range 10_000 {
		if !rests() {
			t.Fatal("somebody settles")
		}
		runtime.Gosched()
	}
}

// Who waits for a settlement hears of it once, whether it was merged with others, has several counters, or is dropped.
func TestSettlementsTellThatTheyAreDone(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	a, b := hourly(t, "a", 100), hourly(t, "b", 100)
	var done atomic.Int64
	then := func() {
		if n := done.Add(1); n > 50 {
			t.Error("done", n, "times")
		}
	}
	for range 40 {
		s.SettleThen(then, algorithms.Charge{Key: "k", Limit: a, Cost: 1, Force: true}, algorithms.Charge{Key: "k", Limit: b, Cost: 1, Force: true})
	}
	waitFor(t, "all are done", func() bool { return done.Load() == 40 })
	if left(t, s, a, "k") != 60 || left(t, s, b, "k") != 60 {
		t.Error("done before it is settled")
	}
	server.Kill()
	for range 9 {
		s.SettleThen(then, algorithms.Charge{Key: "k", Limit: a, Cost: 1, Force: true})
	}
	s.Close()
	s.SettleThen(then, algorithms.Charge{Key: "k", Limit: a, Cost: 1, Force: true})
	if n := done.Load(); n != 50 {
		t.Errorf("%d of 50 are done when the store is closed", n)
	}
}

func TestSettlementsWaitForRedis(t *testing.T) {
	server := redistest.Start(t)
	var dropped atomic.Int64
	o := Options{Addrs: []string{server.Addr}, Timeout: 2 * time.Second, OnUnsettled: func(n int) { dropped.Add(int64(n)) }}
	s := open(t, o)
	l := hourly(t, "z", 100)
	left(t, s, l, "k")
	server.Kill()
	waitFor(t, "the store is down", func() bool {
		var out [1]algorithms.Outcome
		return s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, out[:]) != nil
	})
	for range 30 {
		s.Settle(algorithms.Charge{Key: "k", Limit: l, Cost: 1, Force: true})
	}
	server.Launch()
	waitFor(t, "what waited is settled", func() bool {
		var out [1]algorithms.Outcome
		err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1, Peek: true}}, out[:])
		return err == nil && out[0].Remaining == 70
	})
	if n := dropped.Load(); n != 0 {
		t.Errorf("%d were dropped", n)
	}
}

// An orderly end settles what waits; what Redis does not take is counted.
func TestCloseSettles(t *testing.T) {
	server := redistest.Start(t)
	var dropped atomic.Int64
	o := Options{Addrs: []string{server.Addr}, Prefix: "close", Timeout: 2 * time.Second, OnUnsettled: func(n int) { dropped.Add(int64(n)) }}
	l := hourly(t, "z", 100)
	s := open(t, o)
	for range 40 {
		s.Settle(algorithms.Charge{Key: "k", Limit: l, Cost: 1, Force: true})
	}
	s.Close()
	if n := left(t, open(t, o), l, "k"); n != 60 || dropped.Load() != 0 {
		t.Errorf("%d left and %d dropped, want 60 and none", n, dropped.Load())
	}

	s = open(t, o)
	left(t, s, l, "k")
	server.Kill()
	s.Settle(
		algorithms.Charge{Key: "k", Limit: l, Cost: 1, Force: true}, algorithms.Charge{Key: "k", Limit: l, Cost: 1, Force: true},
		algorithms.Charge{Key: "j", Limit: l, Cost: 1, Force: true})
	start := time.Now()
	s.Close()
	if n := dropped.Load(); n != 2 {
		t.Errorf("%d dropped, want the 2 counters", n)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("closing took %v", took)
	}
	s.Settle(algorithms.Charge{Key: "k", Limit: l, Cost: 1, Force: true})
	if n := dropped.Load(); n != 3 {
		t.Errorf("%d dropped, want what comes after the end too", n)
	}
}

// There is room for so many counters and no more.
func TestSettlementsAreBounded(t *testing.T) {
	var dropped atomic.Int64
	s := open(t, Options{
		Addrs: []string{"127.0.0.1:" + redistest.FreePort(t)}, Timeout: 2 * time.Second,
		OnUnsettled: func(n int) { dropped.Add(int64(n)) },
	})
	l := hourly(t, "z", 100)
	for i := range maxUnsettled + 1000 {
		s.Settle(algorithms.Charge{Key: fmt.Sprint(i), Limit: l, Cost: 1, Force: true})
	}
	if n := dropped.Load(); n < 1000-settleAtOnce || n > 1000+settleAtOnce {
		t.Errorf("%d dropped, want about 1000", n)
	}
}

func exports(t testing.TB, n int64, lease time.Duration) *algorithms.Limit {
	return compile(t, "exports", algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: n, Window: lease})
}

// hold takes a lease, which must be free.
func hold(t testing.TB, s *Store, l *algorithms.Limit) *Lease {
	t.Helper()
	o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	if !o.OK {
		t.Fatalf("no lease: %+v", o)
	}
	return s.Hold(l, "k", o.Mark)
}

// A lease lasts as long as it is held, however short its expiry, and is free after its release, once.
func TestLeaseIsRenewedAndReleased(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	l := exports(t, 2, 3*time.Second)
	first, second := hold(t, s, l), hold(t, s, l)
	for end := time.Now().Add(l.Window * 3 / 2); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); o.OK || o.Retry != algorithms.Unknown || o.Remaining != 0 {
			t.Fatalf("with both leases held: %+v", o)
		}
	}
	first.Release()
	first.Release()
	waitFor(t, "one is free", func() bool { return left(t, s, l, "k") == 1 })
	second.Release()
	waitFor(t, "both are free", func() bool { return left(t, s, l, "k") == 2 })
	waitFor(t, "no key is left", func() bool { return server.Do("dbsize") == int64(0) })
}

// The leases of an instance that dies vanish by themselves, and not before their time.
func TestLeasesOfTheDeadExpire(t *testing.T) {
	server := redistest.Start(t)
	o := Options{Addrs: []string{server.Addr}, Prefix: "dead"}
	l := exports(t, 5, 400*time.Millisecond)
	dying, other := open(t, o), open(t, o)
	start := time.Now()
	for range 5 {
		ask1(t, dying, algorithms.Charge{Key: "k", Limit: l, Cost: 1}) // and nobody renews
	}
	waitFor(t, "all are free", func() bool { return left(t, other, l, "k") == 5 })
	if took := time.Since(start); took < l.Window {
		t.Errorf("free after %v, want no less than %v", took, l.Window)
	}
}

// Many come and go, some while their lease is being renewed: in the end none is in flight, long before any expires.
func TestLeasesConcurrent(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	l := exports(t, 1<<30, time.Hour)
	var held sync.WaitGroup
	for range 32 {
		held.Go(func() {
			for range 100 {
				s.Hold(l, "k", ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}).Mark).Release()
			}
			late := s.Hold(l, "k", ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}).Mark)
			for range 100 {
				ask1(t, s, algorithms.Charge{Key: "other", Limit: l, Cost: 1, Peek: true})
			}
			late.Release()
		})
	}
	done := make(chan struct{})
	renewed := 0
	var renewing sync.WaitGroup
	renewing.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			s.leases.mu.Lock()
			for lease := range s.leases.held {
				lease.taken = time.Time{} // as if its time had come
			}
			s.leases.mu.Unlock()
			due := s.leases.due()
			s.renew(due)
			renewed += len(due)
		}
	})
	held.Wait()
	close(done)
	renewing.Wait()
	if renewed == 0 {
		t.Error("no lease was renewed")
	}
	waitFor(t, "none is in flight", func() bool { return left(t, s, l, "k") == 1<<30 })
	waitFor(t, "no key is left", func() bool { return server.Do("dbsize") == int64(0) })
}
