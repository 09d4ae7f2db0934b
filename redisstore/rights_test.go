package redisstore

// The rights that docs/redis.md names are those that the store needs, in each mode, and no others.

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

const guide = "../docs/redis.md"

// everyCommand does what makes the store send every command: each algorithm, small and large logs,
// giving back to nothing, leases and their renewal, and settling.
func everyCommand(t *testing.T, s *Store) {
	t.Helper()
	s.Start()
	for a := algorithms.Algorithm(1); a.Kernel() != 0; a++ {
		p := algorithms.Policy{Algorithm: a, Quota: 1000, Window: time.Hour}
		if a.Bucket() {
			p.Burst = 1000
		}
		l := compile(t, "z", p)
		for _, key := range []string{"a", "b", "c"} {
			for range 200 {
				ask1(t, s, algorithms.Charge{Key: key, Limit: l, Cost: 1})
			}
		}
		one := ask1(t, s, algorithms.Charge{Key: "once", Limit: l, Cost: 1})
		ask1(t, s, algorithms.Charge{Key: "once", Limit: l, Cost: -1, Mark: one.Mark, Force: true})
		both := []algorithms.Charge{{Key: "a", Limit: l, Cost: 1}, {Key: "b", Limit: l, Cost: 1}}
		if err := s.Apply(context.Background(), both, make([]algorithms.Outcome, 2)); err != nil {
			t.Error(err)
		}
	}
	lease := hold(t, s, exports(t, 10, time.Hour))
	s.renew(due(s, lease))
	lease.Release()
	s.Settle(algorithms.Charge{Key: "a", Limit: perHour(t, "z", 1000), Cost: 1, Force: true})
	waitFor(t, "all to be settled", s.Settled)
}

// forbidden is what would harm others on the server, on a sentinel other things.
var forbidden = []string{
	"flushall", "flushdb", "swapdb 0 1", "migrate host 1 rate_limit:k 0 1", "keys *", "scan 0", "config get *", "debug segfault", "shutdown",
	"rename rate_limit:a rate_limit:b", "restore rate_limit:a 0 x", "replicaof no one", "acl list", "function flush", "script flush", "get other",
	"cluster reset", "monitor", "publish a b", "subscribe a", "client kill a",
}

// narrow makes the documented user on the servers, and checks at the end that it was denied
// nothing, and may do nothing else.
func narrow(t *testing.T, servers []*redistest.Server, forbidden []string, places ...string) {
	for _, server := range servers {
		server.Do(redistest.DocumentedUser(t, guide, places...)...)
	}
	t.Cleanup(func() {
		for _, server := range servers {
			redistest.Denied(t, server, forbidden...)
		}
	})
}

func as(o Options) Options {
	o.Username, o.Password, o.Prefix, o.RefusedKeys = "limiter", "word", "rate_limit", -1
	return o
}

func TestRights(t *testing.T) {
	server := redistest.Start(t)
	narrow(t, []*redistest.Server{server}, forbidden, "every server")
	everyCommand(t, open(t, as(Options{Addrs: []string{server.Addr}})))
}

func TestRightsWithDB(t *testing.T) {
	server := redistest.Start(t)
	narrow(t, []*redistest.Server{server}, forbidden, "every server", "with `db`")
	everyCommand(t, open(t, as(Options{Addrs: []string{server.Addr}, DB: 1})))
}

func TestRightsInACluster(t *testing.T) {
	nodes := redistest.StartCluster(t, 3)
	narrow(t, nodes, forbidden, "every server", "in a cluster")
	s := open(t, as(Options{Addrs: addrs(nodes[:1]), Mode: Cluster}))
	everyCommand(t, s)
	// A key that is new is asked for on the server that its slot moves to.
	l := perHour(t, "moves", 10)
	readable := s.names.clear(l.Space)
	d, _ := s.names.sum(nil, readable, "k")
	at := int(slot(s.names.append(nil, readable, d)))
	from := nodes[0]
	for i, n := range nodes {
		if at >= 16384*i/3 {
			from = n
		}
	}
	to := nodes[0]
	if from == to {
		to = nodes[1]
	}
	to.Do("cluster", "setslot", at, "importing", from.Do("cluster", "myid"))
	from.Do("cluster", "setslot", at, "migrating", to.Do("cluster", "myid"))
	if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); !o.OK || to.Calls("asking") == 0 {
		t.Errorf("%+v after %d ASKING", o, to.Calls("asking"))
	}
}

func TestRightsWithSentinel(t *testing.T) {
	master := redistest.Start(t)
	sentinel := redistest.StartSentinel(t, "main", master)
	narrow(t, []*redistest.Server{master}, forbidden, "every server")
	narrow(t, []*redistest.Server{sentinel}, []string{"sentinel failover main", "sentinel remove main", "sentinel set main quorum 9", "acl list", "shutdown", "subscribe other"}, "on the sentinels")
	s := open(t, as(Options{Addrs: []string{sentinel.Addr}, Mode: Sentinel, MasterName: "main", SentinelUsername: "limiter", SentinelPassword: "word"}))
	everyCommand(t, s)
	waitFor(t, "word of failovers to be asked for", func() bool {
		clients, _ := sentinel.Do("client", "list").(string)
		return strings.Contains(clients, "user=limiter") && strings.Contains(clients, "cmd=subscribe")
	})
}
