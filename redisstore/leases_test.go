package redisstore

// What it costs to keep leases alive, and what a renewal leaves that nobody knows the end of.

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// due makes leases due, and returns them as who renews them sees them.
func due(s *Store, all ...*Lease) []*Lease {
	s.leases.mu.Lock()
	for _, l := range all {
		l.taken = l.taken.Add(-l.limit.Window / 3)
	}
	s.leases.mu.Unlock()
	return s.leases.due()
}

// Leases of one key that were renewed together are one to renew from then on.
func TestLeasesAreRenewedTogether(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	full, wider := exports(t, 150, time.Hour), exports(t, 200, time.Hour)
	var all []*Lease
	for i := range 150 {
		limit := full
		if i%2 == 0 { // the same counter, whatever the quota
			limit = wider
		}
		all = append(all, hold(t, s, limit))
	}
	for _, most := range []int{3, 1} { // calls of so many charges; after them as many marks
		before := server.Calls("evalsha")
		for list := due(s, all...); len(list) > 0; {
			list = list[s.renew(list):]
		}
		if calls := server.Calls("evalsha") - before; calls > most {
			t.Errorf("%d calls, want at most %d", calls, most)
		}
		marks := map[int64]bool{}
		for _, lease := range all {
			marks[lease.mark] = true
		}
		if len(marks) > most {
			t.Errorf("%d marks, want at most %d", len(marks), most)
		}
		if n := left(t, s, wider, "k"); n != 50 {
			t.Fatalf("%d left of 200 while 150 are held", n)
		}
	}
	charges, took := renewal(due(s, all...))
	if len(charges) != 2 || charges[0].Cost != 150 || charges[1].Cost != -150 || len(took) != 150 {
		t.Errorf("%+v for %d leases", charges, len(took))
	}
	s.leases.mu.Lock()
	for _, lease := range all {
		lease.renewing = false
	}
	s.leases.mu.Unlock()
	for i, lease := range all {
		lease.Release()
		if i == 74 {
			waitFor(t, "half of them to be back", func() bool { return left(t, s, full, "k") == 75 })
		}
	}
	waitFor(t, "all to be back", func() bool { return left(t, s, full, "k") == 150 })
	s.pendingMu.Lock()
	defer s.pendingMu.Unlock()
	if len(s.pending) > 0 {
		t.Errorf("the others are told of %d keys, which nobody remembers as refused", len(s.pending))
	}
}

// A renewal without an answer may have been executed: then the next one, which counts it twice,
// waits. One that Redis certainly knows nothing of is made again at once.
func TestRenewalWithoutAnAnswer(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}, Timeout: 2 * time.Second})
	l := exports(t, 10, time.Hour)
	lease := hold(t, s, l)
	server.Stop()
	s.renew(due(s, lease))
	if again := s.leases.due(); len(again) != 0 {
		t.Error("a renewal that may have been executed is made again at once")
	}
	server.Continue()
	waitFor(t, "the server to be back", s.Up)
	free := jam(t, s.lanes[0])
	s.renew(due(s, lease))
	free()
	again := s.leases.due()
	if len(again) != 1 {
		t.Fatal("a renewal that was never sent must wait")
	}
	s.renew(again)
	if n := left(t, s, l, "k"); n != 9 && n != 8 {
		t.Errorf("%d left of 10: one lease and at most one that nobody knows are in flight", n)
	}
}

// Charges on one counter that are applied together are one step, so that no renewal is done by
// half.
func TestOneCounterIsOneStep(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}})
	var charges []algorithms.Charge
	for _, key := range []string{"k", "k", "k", "other"} {
		charges = append(charges, algorithms.Charge{Key: key, Limit: hourly(t, "z", 10), Cost: 1, Force: true})
	}
	out := make([]algorithms.Outcome, len(charges))
	for _, err := range s.applyEach(t.Context(), time.Now().Add(s.options.Timeout), charges, out) {
		if err != nil {
			t.Error(err)
		}
	}
	for i, want := range []int64{7, 7, 7, 9} {
		if out[i].Remaining != want {
			t.Errorf("%d: %d left, want %d", i, out[i].Remaining, want)
		}
	}
}

// A lease that is released while it is renewed is given back, also when the store closes meanwhile.
func TestCloseGivesBackWhatIsBeingRenewed(t *testing.T) {
	server := redistest.Start(t)
	var dropped atomic.Int64
	s := open(t, Options{Addrs: []string{server.Addr}, Timeout: 10 * time.Second, OnUnsettled: func(n int) { dropped.Add(int64(n)) }})
	lease := hold(t, s, exports(t, 10, time.Hour))
	server.Stop()
	s.leases.mu.Lock()
	lease.taken = lease.taken.Add(-lease.limit.Window)
	s.leases.mu.Unlock()
	go s.renewAll()
	waitFor(t, "the renewal", func() bool {
		s.leases.mu.Lock()
		defer s.leases.mu.Unlock()
		return lease.renewing
	})
	lease.Release()
	closed := make(chan error)
	go func() { closed <- s.Close() }()
	server.Continue()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if n, _ := server.Do("dbsize").(int64); n != 0 || dropped.Load() != 0 {
		t.Errorf("%d keys, %d dropped: the lease is not back", n, dropped.Load())
	}
}
