package redisstore

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

func addrs(nodes []*redistest.Server) (all []string) {
	for _, n := range nodes {
		all = append(all, n.Addr)
	}
	return all
}

func TestSlotNumbers(t *testing.T) {
	server := redistest.StartCluster(t, 1)[0]
	for _, key := range []string{"", "a", "123456789", "{a}b", "x{a}b", "{}a", "{a", "a}b{c}", "rate_limit:z:sliding_log:3600000000:abc"} {
		if got, want := int64(slot([]byte(key))), server.Do("cluster", "keyslot", key); got != want {
			t.Errorf("%q: slot %d, want %d", key, got, want)
		}
	}
	for _, key := range []string{"rate_limit:z:sliding_log:3600000000:abc", "{limits}:z:sliding_log:1:x"} {
		if a, b := slot([]byte(key)), slot([]byte(probeKey("p", []byte(key)))); a != b {
			t.Errorf("%q: probe key in slot %d, want %d", key, b, a)
		}
	}
}

// Limits hold in a cluster while a slot moves from node to node under load.
func TestClusterSlotMoves(t *testing.T) {
	nodes := redistest.StartCluster(t, 3)
	s := open(t, Options{Addrs: addrs(nodes[:1]), Mode: Cluster, RefusedKeys: -1})
	l := perHour(t, "z", 1500)
	readable := s.names.clear(l.Space)
	d, _ := s.names.sum(nil, readable, "k")
	at := int(slot(s.names.append(nil, readable, d)))

	var admitted, refused, asked atomic.Int64
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				var out [1]algorithms.Outcome
				if err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, out[:]); err != nil {
					t.Error(err)
					return
				}
				asked.Add(1)
				if out[0].OK {
					admitted.Add(1)
				} else {
					refused.Add(1)
				}
				time.Sleep(time.Millisecond)
			}
		})
	}
	owner := at * 3 / 16384
	for owner < 2 && at >= 16384*(owner+1)/3 {
		owner++
	}
	for i := range 6 {
		waitFor(t, "load", func() bool { return asked.Load() > int64(100*i) || t.Failed() })
		to := (owner + 1) % 3
		redistest.MoveSlot(at, nodes[owner], nodes[to])
		owner = to
	}
	waitFor(t, "refusals", func() bool { return refused.Load() > 100 || t.Failed() })
	close(stop)
	wg.Wait()
	if admitted.Load() != 1500 {
		t.Errorf("%d admitted, want 1500", admitted.Load())
	}
}

// Zones of one request live on several nodes: all or none, and what was taken is given back.
func TestPartsAreAllOrNone(t *testing.T) {
	ring := []*redistest.Server{redistest.Start(t), redistest.Start(t), redistest.Start(t)}
	cluster := redistest.StartCluster(t, 3)
	for _, c := range []struct {
		mode  Mode
		nodes []*redistest.Server
	}{{Ring, ring}, {Cluster, cluster}} {
		t.Run(string(c.mode), func(t *testing.T) {
			s := open(t, Options{Addrs: addrs(c.nodes), Mode: c.mode, RefusedKeys: -1})
			var charges []algorithms.Charge
			for i := range 8 {
				a := algorithms.Algorithm(1 + i%5)
				p := algorithms.Policy{Algorithm: a, Quota: 10, Window: time.Hour}
				if a.Bucket() {
					p.Burst = 10
				}
				charges = append(charges, algorithms.Charge{Key: "k", Limit: compile(t, "zone"+strconv.Itoa(i), p), Cost: 1})
			}
			narrow := perHour(t, "narrow", 3)
			charges = append(charges, algorithms.Charge{Key: "k", Limit: narrow, Cost: 1})
			for i := range int64(6) {
				out := make([]algorithms.Outcome, len(charges))
				if err := s.Apply(context.Background(), charges, out); err != nil {
					t.Fatal(err)
				}
				if passed := algorithms.Binding(charges, out) < 0; passed != (i < 3) {
					t.Fatalf("request %d: %+v", i, out)
				}
				for j := range 8 {
					if want := 10 - min(i+1, 3); out[j].Remaining != want || !out[j].OK {
						t.Errorf("request %d, %v: %+v, want %d remaining", i, charges[j].Limit.Policy, out[j], want)
					}
				}
			}
			spread := 0
			for _, n := range c.nodes {
				if n.Do("dbsize") != int64(0) {
					spread++
				}
			}
			if spread < 2 {
				t.Errorf("all counters on %d node", spread)
			}
		})
	}
}

// One node of three is gone: the others decide on, and only its keys fail.
func TestRingOneNodeDown(t *testing.T) {
	nodes := []*redistest.Server{redistest.Start(t), redistest.Start(t), redistest.Start(t)}
	s := open(t, Options{Addrs: addrs(nodes), Mode: Ring})
	l := perHour(t, "z", 10)
	nodes[1].Kill()
	failed := 0
	for i := range 300 {
		if err := s.Apply(context.Background(), []algorithms.Charge{{Key: fmt.Sprint(i), Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1)); err != nil {
			failed++
		}
	}
	if failed < 50 || failed > 150 {
		t.Errorf("%d of 300 failed, want a third", failed)
	}
}

// Each server's outage and return is told, and how many of all are down.
func TestEachServerIsTold(t *testing.T) {
	nodes := []*redistest.Server{redistest.Start(t), redistest.Start(t), redistest.Start(t)}
	told := make(chan State, 10)
	s := open(t, Options{Addrs: addrs(nodes), Mode: Ring, OnState: func(change State) { told <- change }})
	l := perHour(t, "z", 1_000_000)
	want := func(up bool, n *redistest.Server, down int) {
		t.Helper()
		if up {
			n.Restart()
		} else {
			n.Kill()
		}
		for range 2 {
			failures(s, l)
		}
		select {
		case got := <-told:
			if got.Server != n.Addr || (got.Err == nil) != up || got.Down != down || got.Of != 3 || s.Stats().Down != down || s.Up() != (down == 0) {
				t.Errorf("told %+v, want that %s is up: %v, %d of 3 down", got, n.Addr, up, down)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("no word of %s", n.Addr)
		}
	}
	want(false, nodes[1], 1)
	want(false, nodes[2], 2)
	want(true, nodes[1], 1)
	want(false, nodes[0], 2)
	want(true, nodes[2], 1)
	want(true, nodes[0], 0)
	if len(told) != 0 {
		t.Errorf("and %+v", <-told)
	}
}

// oneOnEach returns for each of two servers a limit whose counter of "k" lives there.
func oneOnEach(s *Store, limit func(zone string) *algorithms.Limit) (on [2]*algorithms.Limit) {
	for i := 0; on[0] == nil || on[1] == nil; i++ {
		l := limit("zone" + strconv.Itoa(i))
		d, _ := s.names.sum(nil, s.names.clear(l.Space), "k")
		for n := range s.lanes {
			if s.laneFor(d, 0) == s.lanes[n] {
				on[n] = l
			}
		}
	}
	return on
}

// While one server is away, leases of the others are renewed as ever and given back, and what they
// settle is settled once.
func TestDeadServerHoldsUpNoOther(t *testing.T) {
	nodes := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	s := open(t, Options{Addrs: addrs(nodes), Mode: Ring, Timeout: time.Second})
	leases := oneOnEach(s, func(zone string) *algorithms.Limit {
		return compile(t, zone, algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: 5, Window: 3 * time.Second})
	})
	units := oneOnEach(s, func(zone string) *algorithms.Limit { return perHour(t, zone, 5) })
	unit := ask1(t, s, algorithms.Charge{Key: "k", Limit: units[0], Cost: 1}).Mark
	alive, dead := hold(t, s, leases[0]), hold(t, s, leases[1])
	nodes[1].Kill()
	for end := time.Now().Add(leases[0].Window * 3 / 2); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if n := left(t, s, leases[0], "k"); n != 4 {
			t.Fatalf("%d left of 5 while one lease is held", n)
		}
	}
	dead.Release()
	alive.Release()
	s.Settle(algorithms.Charge{Key: "k", Limit: units[1], Cost: 1, Force: true})
	s.Settle(algorithms.Charge{Key: "k", Limit: units[0], Cost: -1, Mark: unit})
	waitFor(t, "the unit and the lease to come back", func() bool {
		return left(t, s, leases[0], "k") == 5 && left(t, s, units[0], "k") == 5
	})
	if keys := nodes[0].Do("dbsize"); keys != int64(0) { // a lease that only expired leaves one
		t.Errorf("%v keys are left", keys)
	}
	for end := time.Now().Add(3 * settlePause); time.Now().Before(end); {
		if n, m := left(t, s, leases[0], "k"), left(t, s, units[0], "k"); n != 5 || m != 5 {
			t.Fatalf("%d leases and %d units left of 5 after all came back", n, m)
		}
	}
}

// When one node fails, what another has taken for the same request is given back.
func TestFailedPartGivesBack(t *testing.T) {
	nodes := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	s := open(t, Options{Addrs: addrs(nodes), Mode: Ring, Timeout: 2 * time.Second})
	on := oneOnEach(s, func(zone string) *algorithms.Limit { return perHour(t, zone, 5) })
	nodes[1].Kill()
	for range 20 {
		err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: on[0], Cost: 1}, {Key: "k", Limit: on[1], Cost: 1}}, make([]algorithms.Outcome, 2))
		if kindOf(err) != KindRefused {
			t.Fatal(err)
		}
		waitFor(t, "the unit to come back", func() bool {
			return ask1(t, s, algorithms.Charge{Key: "k", Limit: on[0], Cost: 1, Peek: true}).Remaining == 5
		})
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{
		{}, {Addrs: []string{"a:1", "b:1"}}, {Addrs: []string{"http://x"}}, {Addrs: []string{"a:1"}, Mode: "none"},
		{Addrs: []string{"a:1"}, Mode: Sentinel}, {Addrs: []string{"redis://a:1/7"}, Mode: Cluster},
	} {
		if s, err := New(o); err == nil {
			s.Close()
			t.Errorf("%+v was accepted", o)
		}
	}
	_, err := New(Options{Addrs: []string{"redis://user:secret@[broken"}})
	if err == nil || len(err.Error()) == 0 || strings.Contains(err.Error(), "secret") {
		t.Errorf("%v", err)
	}
}
