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

// hasLeft reports whether Redis answers that so much is left.
func hasLeft(s *Store, l *algorithms.Limit, key string, want int64) bool {
	var out [1]algorithms.Outcome
	err := s.Apply(context.Background(), []algorithms.Charge{{Key: key, Limit: l, Cost: 1, Peek: true}}, out[:])
	return err == nil && out[0].Remaining == want
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

// Units in flight are given back after what was settled together with them: who sees none of a key
// in flight sees the rest.
func TestUnitsInFlightAreSettledLast(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}})
	units := hourly(t, "u", 1_000_000)
	flight := compile(t, "f", algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: 1000, Window: time.Hour})
	key := func(i int) string { return fmt.Sprint("k", i) }
	const keys = 200
	var back [][]algorithms.Charge
	for i := range keys {
		var out [2]algorithms.Outcome
		take := []algorithms.Charge{{Key: key(i), Limit: flight, Cost: 1, DryRun: true}, {Key: key(i), Limit: units, Cost: 1}}
		if err := s.Apply(context.Background(), take, out[:]); err != nil {
			t.Fatal(err)
		}
		back = append(back, []algorithms.Charge{
			{Key: key(i), Limit: flight, Cost: -1, Mark: out[0].Mark}, {Key: key(i), Limit: units, Cost: -1, Mark: out[1].Mark},
		})
	}
	for _, charges := range back {
		s.Settle(charges...)
	}
	for i := 0; i < keys; {
		var out [2]algorithms.Outcome
		look := []algorithms.Charge{{Key: key(i), Limit: flight, Peek: true}, {Key: key(i), Limit: units, Peek: true}}
		if err := s.Apply(context.Background(), look, out[:]); err != nil {
			t.Fatal(err)
		}
		if out[0].Remaining == 1000 {
			if out[1].Remaining != 1_000_000 {
				t.Fatalf("none of %s is in flight, but its unit is not back", key(i))
			}
			i++
		}
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
	waitFor(t, "what waited is settled", func() bool { return hasLeft(s, l, "k", 70) })
	if n := dropped.Load(); n != 0 {
		t.Errorf("%d were dropped", n)
	}
}

// What is settled together for one counter by limits of different rates, as after a change of plan
// or a reload, is what each says, and the key lives as long as the wait that is then told.
func TestRatesThatAreSettledTogether(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}, RefusedKeys: -1})
	limit := func(n int64) *algorithms.Limit {
		return compile(t, "z", algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: n, Window: 100 * time.Second, Burst: 600})
	}
	fast, slow := limit(60), limit(7)
	for name, order := range map[string][2]*algorithms.Limit{"fast first": {fast, slow}, "slow first": {slow, fast}} {
		var charges []algorithms.Charge
		for i, l := range order {
			charges = append(charges, algorithms.Charge{Key: name, Limit: l, Cost: int64(300 - i), Force: true})
		}
		for _, err := range s.applyEach(t.Context(), time.Now().Add(s.options.Timeout), charges, make([]algorithms.Outcome, 2)) {
			if err != nil {
				t.Fatal(err)
			}
		}
		o := ask1(t, s, algorithms.Charge{Key: name, Limit: slow, Cost: 600, Peek: true})
		if o.Remaining < 1 || o.Remaining > 10 || o.Retry < 8300*time.Second {
			t.Errorf("%s: %+v, want 599 of 600 in use, but for what has drained", name, o)
		}
		for key, left := range ttls(t, s) {
			if left < o.Retry+50*time.Second {
				t.Errorf("%s: %s lives for %v, and the wait is %v", name, key, left, o.Retry)
			}
		}
		if err := s.Forget(t.Context(), name, slow.Space); err != nil {
			t.Fatal(err)
		}
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

// A lease lasts as long as it is held, however short its expiry, and is free after its release,
// once.
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

// Many come and go, some while their lease is being renewed: in the end none is in flight, long
// before any expires.
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

// What comes while a store closes is settled or counted, whenever it comes.
func TestNothingIsLostWhileClosing(t *testing.T) {
	nodes := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	var dropped atomic.Int64
	s := open(t, Options{Addrs: addrs(nodes), Mode: Ring, Timeout: time.Second, OnUnsettled: func(n int) { dropped.Add(int64(n)) }})
	on := oneOnEach(s, func(zone string) *algorithms.Limit { return hourly(t, zone, 100) })
	alive, dead := 0, 1 // to the one that is alive the store says goodbye
	if s.fleetLane() == s.lanes[1] {
		alive, dead = 1, 0
	}
	left(t, s, on[alive], "k")
	nodes[dead].Kill()
	nodes[alive].Stop()
	closed := make(chan error)
	go func() { closed <- s.Close() }()
	total := int64(0)
	for done := false; !done; {
		s.Settle(algorithms.Charge{Key: "k", Limit: on[dead], Cost: 1, Mark: total, Force: true})
		total++
		select {
		case <-closed:
			done = true
		case <-time.After(time.Millisecond):
		}
	}
	if n := dropped.Load(); n != total {
		t.Errorf("%d of %d are counted as dropped", n, total)
	}
}
