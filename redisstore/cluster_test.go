package redisstore

// A cluster whose servers go, come and change their parts.

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// inPart makes the nodes of a cluster serve what they have when others are gone.
func inPart(nodes []*redistest.Server) []*redistest.Server {
	for _, n := range nodes {
		n.Do("config", "set", "cluster-require-full-coverage", "no")
	}
	return nodes
}

// addReplica gives a master of a cluster a replica that has all of its data.
func addReplica(t *testing.T, nodes []*redistest.Server, master *redistest.Server) *redistest.Server {
	t.Helper()
	r := redistest.Start(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", redistest.FreePort(t),
		"--cluster-require-full-coverage", "no")
	id, _ := master.Do("cluster", "myid").(string)
	mine, _ := master.Do("cluster", "nodes").(string)
	_, bus, _ := strings.Cut(mine[strings.Index(mine, "127.0.0.1:"+master.Port):], "@")
	bus, _, _ = strings.Cut(strings.Fields(bus)[0], ",")
	r.Do("cluster", "meet", "127.0.0.1", master.Port, bus)
	waitFor(t, "the replica to know its master", func() bool {
		known, _ := r.Do("cluster", "nodes").(string)
		return strings.Contains(known, id)
	})
	r.Do("cluster", "replicate", id)
	for _, n := range append(nodes, r) {
		waitFor(t, "all to know the replica", func() bool {
			known, _ := n.Do("cluster", "nodes").(string)
			return strings.Contains(known, "slave "+id)
		})
	}
	waitFor(t, "the replica to follow", func() bool {
		info, _ := r.Do("info", "replication").(string)
		return strings.Contains(info, "master_link_status:up")
	})
	return r
}

// failures asks about many keys, that live on all nodes, and returns why some were not decided.
func failures(s *Store, l *algorithms.Limit) (errs []error) {
	for i := range 100 {
		if err := s.Apply(context.Background(), []algorithms.Charge{{Key: fmt.Sprint(i), Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1)); err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// An address that is given, but leads to nobody, is no failure as long as the slots are served, and
// hides none.
func TestClusterWithoutOneAddress(t *testing.T) {
	nodes, seen := inPart(redistest.StartCluster(t, 3)), newChanges()
	s := open(t, Options{Addrs: append([]string{"127.0.0.1:" + redistest.FreePort(t)}, addrs(nodes)...), Mode: Cluster,
		OnState: seen.note, OnWarning: func(string) {}})
	s.Start()
	waitFor(t, "the first announcement", func() bool { return nodes[0].Calls("zadd")+nodes[1].Calls("zadd")+nodes[2].Calls("zadd") > 0 })
	l := perHour(t, "z", 1000)
	if errs := failures(s, l); len(errs) != 0 || !s.Up() || len(seen.list()) != 0 {
		t.Errorf("up %v, changes %q, failures %v", s.Up(), seen.list(), errs)
	}
	nodes[2].Kill()
	waitFor(t, "word of the outage", func() bool { failures(s, l); return len(seen.list()) > 0 })
	if s.Up() || s.Stats().Down != 1 {
		t.Errorf("up %v, %d down", s.Up(), s.Stats().Down)
	}
}

// When a replica takes over, the master that is gone is no longer missed, whether its address was
// given or not, and the next outage is told.
func TestClusterFailover(t *testing.T) {
	nodes, seen := inPart(redistest.StartCluster(t, 3)), newChanges()
	addReplica(t, nodes, nodes[1])
	s := open(t, Options{Addrs: addrs(nodes), Mode: Cluster, OnState: seen.note})
	l := perHour(t, "z", 1_000_000)
	if errs := failures(s, l); len(errs) != 0 {
		t.Fatal(errs)
	}
	outage := func(n *redistest.Server) {
		t.Helper()
		before := len(seen.list())
		n.Kill()
		waitFor(t, "word of the outage", func() bool { failures(s, l); return len(seen.list()) > before })
	}
	outage(nodes[1])
	waitFor(t, "the replica", func() bool { return s.Up() && len(failures(s, l)) == 0 })
	outage(nodes[2])
	if last := seen.latest(); last.Server != nodes[2].Addr || last.Down != 1 || last.Of != 3 {
		t.Errorf("told %+v, want that %s is down, one of 3", last, nodes[2].Addr)
	}
}

// Who redirects to a server that is down has answered: the outage is the other's.
func TestRedirectToDeadServer(t *testing.T) {
	nodes, seen := inPart(redistest.StartCluster(t, 2)), newChanges()
	s := open(t, Options{Addrs: addrs(nodes), Mode: Cluster, OnState: seen.note, RefusedKeys: -1})
	l := perHour(t, "z", 1_000_000)
	d, _ := s.names.sum(nil, s.names.clear(l.Space), "7")
	at := slot(s.names.append(nil, s.names.clear(l.Space), d))
	if errs := failures(s, l); len(errs) != 0 {
		t.Fatal(errs)
	}
	from, to := nodes[0], nodes[1]
	if s.cluster.owner(at).node != from.Addr {
		from, to = to, from
	}
	redistest.MoveSlot(int(at), from, to)
	to.Kill()
	for range 2 * failuresToOpen {
		var failure *Error
		err := s.Apply(context.Background(), []algorithms.Charge{{Key: "7", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1))
		if !errors.As(err, &failure) || failure.Node != to.Addr {
			t.Errorf("%v, want that %s failed", err, to.Addr)
		}
	}
	if s.Stats().Down != 1 || seen.latest().Server != to.Addr {
		t.Errorf("%d down, changes %q", s.Stats().Down, seen.list())
	}
	if errs := failures(s, l); len(errs) > 75 { // those of the other half
		t.Errorf("%d of 100 failed: %v", len(errs), errs[0])
	}
}

// Slots that nobody owns fail, as long as nobody does; all others are decided.
func TestClusterSlotWithoutMaster(t *testing.T) {
	nodes, seen := inPart(redistest.StartCluster(t, 2)), newChanges()
	s := open(t, Options{Addrs: addrs(nodes), Mode: Cluster, OnState: seen.note, RefusedKeys: -1})
	l := perHour(t, "z", 1_000_000)
	d, _ := s.names.sum(nil, s.names.clear(l.Space), "7")
	at := int(slot(s.names.append(nil, s.names.clear(l.Space), d)))
	if errs := failures(s, l); len(errs) != 0 {
		t.Fatal(errs)
	}
	for _, n := range nodes {
		n.Do("cluster", "delslots", at)
	}
	s.cluster.refresh()
	for range 3 {
		errs := failures(s, l)
		for _, err := range errs {
			if kindOf(err) != KindClusterDown {
				t.Error(err)
			}
		}
		if len(errs) != 1 {
			t.Errorf("%d of 100 failed, want one", len(errs))
		}
	}
	if s.Stats().Down != 1 || len(seen.list()) != 1 {
		t.Errorf("%d down, changes %q", s.Stats().Down, seen.list())
	}
	nodes[0].Do("cluster", "addslots", at)
	waitFor(t, "all to be decided", func() bool { return len(failures(s, l)) == 0 && s.Up() })
}

// When nobody that is known answers any more, the addresses that were given are asked again, as
// when a cluster was replaced.
func TestClusterReplaced(t *testing.T) {
	nodes := []*redistest.Server{redistest.StartCluster(t, 1)[0], redistest.StartCluster(t, 1)[0]}
	s := open(t, Options{Addrs: addrs(nodes), Mode: Cluster, OnWarning: func(string) {}})
	l := perHour(t, "z", 1_000_000)
	s.checkServers()
	s.cluster.refresh()
	for _, n := range nodes {
		if n.Addr == s.cluster.owner(0).node {
			n.Kill()
		}
	}
	waitFor(t, "the other cluster", func() bool { return len(failures(s, l)) == 0 && s.Up() })
	if s.checkServers(); len(s.checked) != 1 {
		t.Errorf("%d servers are kept in mind, want the one in use", len(s.checked))
	}
}

// A server that owns nothing any more is still asked by those who found it before, for as long as
// they may wait.
func TestRetiredLaneServesWhoWaits(t *testing.T) {
	nodes := []*redistest.Server{redistest.StartCluster(t, 1)[0], redistest.Start(t)}
	s := open(t, Options{Addrs: addrs(nodes), Mode: Cluster, Timeout: time.Minute})
	s.cluster.refresh()
	l := s.cluster.seeds[1]
	for _, ago := range []time.Duration{0, 100 * time.Second, 130 * time.Second} {
		s.cluster.old[l] = time.Now().Add(-ago)
		s.cluster.refresh()
		if err := l.client.Ping(context.Background()).Err(); (err != nil) != (ago > 2*time.Minute) {
			t.Errorf("retired %v ago: %v", ago, err)
		}
	}
}
