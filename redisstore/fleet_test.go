package redisstore

// How instances know of each other when Redis restarts, was cut off, or does not let them.

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// fleetOf opens instances that know each other and announce themselves when the test says so.
func fleetOf(t *testing.T, n int, o Options) (all []*Store) {
	t.Helper()
	for range n {
		all = append(all, open(t, o))
	}
	waitFor(t, "all to know each other", func() bool {
		announce(all)
		return !slices.ContainsFunc(all, func(s *Store) bool { return s.FleetSize() != n })
	})
	return all
}

func announce(all []*Store) {
	for _, s := range all {
		s.announceOnce()
	}
}

// Redis forgets the instances when it restarts, and drops them when it cannot be reached for long.
// Whoever comes back first does not take itself for the only one; who really stays away is missed
// later.
func TestFleetComesBackOneByOne(t *testing.T) {
	server := redistest.Start(t)
	for name, o := range map[string]struct {
		announce time.Duration
		cut      func(all []*Store)
	}{
		"restart": {250 * time.Millisecond, func([]*Store) { server.Kill(); server.Restart() }},
		"cut off": {50 * time.Millisecond, func(all []*Store) {
			waitFor(t, "all to be gone", func() bool { return time.Since(all[3].answered) > goneAfter*50*time.Millisecond })
		}},
	} {
		t.Run(name, func(t *testing.T) {
			all := fleetOf(t, 4, Options{Addrs: []string{server.Addr}, Prefix: name, Announce: o.announce})
			o.cut(all)
			for i, s := range all[:2] {
				waitFor(t, "an answer", func() bool {
					before := s.answered
					s.announceOnce()
					return s.answered != before
				})
				if s.FleetSize() != 4 {
					t.Errorf("number %d to come back takes the fleet's size for %d, want 4", i+1, s.FleetSize())
				}
			}
			waitFor(t, "the other two to be missed", func() bool {
				announce(all[:2])
				return all[0].FleetSize() == 2 && all[1].FleetSize() == 2
			})
		})
	}
}

// Who leaves is missed at once, without a decision before, wherever the list of instances lives.
func TestLeavingIsHeardAtOnce(t *testing.T) {
	ring := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	cluster := redistest.StartCluster(t, 2)
	for _, o := range []Options{
		{Addrs: addrs(ring[:1]), Prefix: "s"}, {Addrs: addrs(ring), Mode: Ring, Prefix: "r"}, {Addrs: addrs(cluster[:1]), Mode: Cluster, Prefix: "c"},
	} {
		t.Run(string(o.Mode), func(t *testing.T) {
			o.Announce = 5 * time.Second
			for name, leave := range map[string]func(*Store){"leave": (*Store).Leave, "close": func(s *Store) { s.Close() }} {
				o.Prefix += name
				stays, goes := open(t, o), open(t, o)
				goes.Start()
				waitFor(t, "both", func() bool { stays.announceOnce(); return stays.FleetSize() == 2 })
				left := time.Now()
				leave(goes)
				waitFor(t, "one to be gone", func() bool { stays.announceOnce(); return stays.FleetSize() == 1 })
				if late := time.Since(left); late > goneAfter*o.Announce/2 {
					t.Errorf("%s: missed after %v", name, late)
				}
				if name == "leave" {
					ask1(t, goes, algorithms.Charge{Key: "k", Limit: perHour(t, "z", 10), Cost: 1})
				}
			}
		})
	}
}

// What a user may not do is said once for each server, and once for the fleet; decisions go on.
func TestMissingRightsAreTold(t *testing.T) {
	server := redistest.Start(t)
	server.Do("acl", "setuser", "narrow", "on", ">word", "~*", "+@all", "-info", "-zadd")
	var warned []string
	s := open(t, Options{Addrs: []string{server.Addr}, Username: "narrow", Password: "word", OnWarning: func(text string) { warned = append(warned, text) }})
	for range 3 * goneAfter {
		s.checkServers()
		s.announceOnce()
	}
	if len(warned) != 2 || !strings.Contains(warned[0], "INFO") || !strings.Contains(warned[1], "announce") {
		t.Errorf("warnings %q, want one of INFO and one of announcing", warned)
	}
	ask1(t, s, algorithms.Charge{Key: "k", Limit: perHour(t, "z", 10), Cost: 1})
	if !s.Up() {
		t.Error("it is taken for down")
	}
}

// H14: an instance that showed itself while Redis's clock was ahead, and died, is missed all the
// same.
func TestInstancesOfAClockAheadAreMissed(t *testing.T) {
	server := redistest.Start(t)
	all := fleetOf(t, 2, Options{Addrs: []string{server.Addr}, Prefix: "ahead", Announce: 50 * time.Millisecond})
	ahead := float64(time.Now().Add(24 * time.Hour).UnixMicro())
	if err := all[0].lanes[0].client.ZAdd(t.Context(), all[0].instances, redis.Z{Score: ahead, Member: "dead"}).Err(); err != nil {
		t.Fatal(err)
	}
	announce(all)
	if n := all[0].FleetSize(); n != 3 {
		t.Fatalf("%d instances, want 3 at first", n)
	}
	waitFor(t, "the dead one to be missed", func() bool {
		announce(all)
		return all[0].FleetSize() == 2
	})
}
