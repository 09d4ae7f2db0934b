package redisstore

// What a batch in several parts leaves behind, and what its answers teach.

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// halfRefused takes the only unit of the first limit on one server for a request that another
// server refuses, once it goes on.
func halfRefused(t *testing.T, s *Store, nodes []*redistest.Server, ctx context.Context) (on [2]*algorithms.Limit, answer chan error) {
	t.Helper()
	on = oneOnEach(s, func(zone string) *algorithms.Limit { return perHour(t, zone, 1) })
	ask1(t, s, algorithms.Charge{Key: "k", Limit: on[1], Cost: 1})
	nodes[1].Stop()
	answer = make(chan error)
	go func() {
		var out [2]algorithms.Outcome
		answer <- s.Apply(ctx, []algorithms.Charge{{Key: "k", Limit: on[0], Cost: 1}, {Key: "k", Limit: on[1], Cost: 1}}, out[:])
	}()
	waitFor(t, "the unit to be taken", func() bool { return left(t, s, on[0], "k") == 0 })
	return on, answer
}

func ring(t *testing.T, o Options) (*Store, []*redistest.Server) {
	nodes := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	o.Addrs, o.Mode = addrs(nodes), Ring
	return open(t, o), nodes
}

// A refusal that came of units that were given back at once does not outlive them.
func TestAnUndoneBatchIsNotRemembered(t *testing.T) {
	s, nodes := ring(t, Options{Timeout: 20 * time.Second})
	on, answer := halfRefused(t, s, nodes, context.Background())
	one := algorithms.Charge{Key: "k", Limit: on[0], Cost: 1}
	hits := s.Stats().Hits
	for range 2 {
		if o := ask1(t, s, one); o.OK {
			t.Fatalf("%+v while the unit is taken", o)
		}
	}
	if s.Stats().Hits != hits+1 {
		t.Fatal("the refusal is not remembered")
	}
	nodes[1].Continue()
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
	if o := ask1(t, s, one); !o.OK {
		t.Errorf("%+v after the unit came back", o)
	}
}

// What is to be given back is not lost when there is no way to send it, whether somebody waits for
// it or not.
func TestNothingTakenIsLost(t *testing.T) {
	for _, leaves := range []bool{false, true} {
		var dropped atomic.Int64
		s, nodes := ring(t, Options{Timeout: 3 * time.Second, OnUnsettled: func(n int) { dropped.Add(int64(n)) }})
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		on, answer := halfRefused(t, s, nodes, ctx)
		free := jam(t, s.lanes[0])
		if leaves {
			cancel()
		} else {
			nodes[1].Continue()
		}
		if err := <-answer; (err != nil) != leaves {
			t.Fatal(err)
		}
		free()
		waitFor(t, "the unit to come back", func() bool { return left(t, s, on[0], "k") == 1 })
		if n := dropped.Load(); n != 0 {
			t.Errorf("%d were dropped", n)
		}
	}
}

// A refund that leaves nothing available makes it available sooner, here and elsewhere.
func TestRefundOfADebtShortensTheWait(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}})
	l := compile(t, "z", algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: 10, Window: time.Hour, Burst: 10})
	owed := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 20, Force: true})
	one := algorithms.Charge{Key: "k", Limit: l, Cost: 1}
	if o := ask1(t, s, one); o.Retry < time.Hour {
		t.Fatalf("%+v", o)
	}
	if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: -9, Mark: owed.Mark}); o.Remaining != 0 {
		t.Fatalf("%+v", o)
	}
	if o := ask1(t, s, one); o.OK || o.Retry > 15*time.Minute {
		t.Errorf("%+v, want what Redis says", o)
	}
	s.pendingMu.Lock()
	defer s.pendingMu.Unlock()
	if len(s.pending) != 1 {
		t.Errorf("the others are told of %v", s.pending)
	}
}
