package sluice_test

// Reloads beside a shared store: connections are kept while its settings are the same, and what
// fails changes nothing.

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// kept wants the first connections to be there, and no more of them in all than one store has: two
// flights and what announces the instance, each of which may come later.
func kept(t *testing.T, r *redistest.Server, first []string) {
	t.Helper()
	now := connections(r)
	if slices.ContainsFunc(first, func(id string) bool { return !slices.Contains(now, id) }) || len(now) > 3 {
		t.Errorf("connections %v, at first %v", now, first)
	}
}

func TestReloadKeepsConnections(t *testing.T) {
	const linger = 50 * time.Millisecond
	t.Cleanup(sluice.Linger(linger))
	r := redistest.Start(t)
	zones := "zone z 100/1h"
	s := serve(t, sharing(r.Addr, patient, zones))
	s.pass(3, "/")
	first := connections(r)
	if len(first) == 0 {
		t.Fatal("no connection")
	}
	for i := range 3 {
		s.mustLoad(sharing(r.Addr, patient, zones+fmt.Sprintf("\nzone more%d 100/1h", i)))
		s.pass(2, "/")
	}
	for end := time.Now().Add(10 * linger); time.Now().Before(end) && !t.Failed(); { // a store that is given up goes after a while
		kept(t, r, first)
	}

	s.mustLoad(sharing(r.Addr, patient+"\nprefix other", zones))
	if left := s.get("/").left("z"); left != 99 {
		t.Errorf("%d left under another prefix", left)
	}
	closed := func() bool {
		return !slices.ContainsFunc(connections(r), func(id string) bool { return slices.Contains(first, id) })
	}
	eventually(t, 10*time.Second, "the old connections are closed", closed)
	if len(connections(r)) == 0 {
		t.Error("no new connection")
	}

	s.mustLoad(":80 {\n rate_limit {\n zone z 100/1h\n}\n respond ok\n}")
	eventually(t, 10*time.Second, "all connections are closed", func() bool { return len(connections(r)) == 0 })
	if left := s.get("/").left("z"); left != 99 {
		t.Errorf("%d left in this process", left)
	}
}

// unsettled is how many charges did not reach Redis, in all tests.
func (s *server) unsettled() float64 {
	return s.metric(`caddy_rate_limit_unsettled_total{store="redis"}`)
}

// Requests that are under way when another store takes over keep their leases, and what they owe is
// settled when they end.
func TestReloadWaitsForWhatIsOwed(t *testing.T) {
	t.Cleanup(sluice.Linger(20 * time.Millisecond))
	r := redistest.Start(t)
	h := hold(t)
	config := func(settings string) string {
		return sharingSite(r.Addr, settings, `rate_limit {
			zone c {
				key everyone
				concurrency 1 lease 6s
			}
			zone n 10/1h {
				key everyone
				match {
					path /hold
				}
				count status 500
			}
		}
		reverse_proxy `+h.dial)
	}
	s := serve(t, config(patient))
	before := s.unsettled()
	s.begin()
	first := connections(r)
	s.mustLoad(config(patient + "\npool_size 5"))
	lease := func() any {
		keys, _ := r.Do("keys", "rate_limit:c:*").([]any)
		if len(keys) != 1 {
			t.Fatal("keys of the lease:", keys)
		}
		return r.Do("get", keys[0])
	}
	taken := lease()
	eventually(t, 20*time.Second, "the lease is renewed", func() bool { return lease() != taken })
	s.refused("/")
	h.end <- struct{}{}
	s.admits("/")
	eventually(t, 5*time.Second, "the old connections are closed", func() bool {
		return !slices.ContainsFunc(connections(r), func(id string) bool { return slices.Contains(first, id) })
	})
	if left := (answer{Response: s.begin()}).left("n"); left != 9 {
		t.Errorf("%d left after the next request, want 9: the first one's unit came back", left)
	}
	if n := s.unsettled() - before; n != 0 {
		t.Errorf("%v charges did not reach Redis", n)
	}
}

// G34: what waits to be charged while Redis is away is charged when it is back, also if a reload
// has opened another store meanwhile.
func TestReloadKeepsAWaitingCharge(t *testing.T) {
	t.Cleanup(sluice.Linger(200 * time.Millisecond))
	r := redistest.Start(t)
	arrived, gate := make(chan struct{}), make(chan struct{})
	dial := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			arrived <- struct{}{}
			<-gate
			w.Header().Set("X-Cost", "4")
		}
	})
	config := func(settings string) string {
		return sharingSite(r.Addr, settings, "rate_limit {\n zone z 10/1h {\n key everyone\n algorithm token_bucket\n cost {header.X-Cost}\n charge {http.response.header.X-Cost}\n}\n}\nreverse_proxy "+dial)
	}
	s := serve(t, config("timeout 2s"))
	before := s.unsettled()
	answered := make(chan int)
	go func() { answered <- s.get("/slow", "X-Cost", "1").StatusCode }()
	<-arrived
	r.Kill()
	close(gate)
	if status := <-answered; status != 200 {
		t.Fatal(status)
	}
	s.mustLoad(config("timeout 2001ms"))
	time.Sleep(1500 * time.Millisecond) // the outage outlasts what an orderly close waits for
	r.Launch()
	// What the Redis of before had counted is lost; the rest of 3 is charged to the new one.
	eventually(t, 20*time.Second, "the charge", func() bool { return s.get("/", "X-Cost", "0").left("z") == 7 })
	if n := s.unsettled() - before; n != 0 {
		t.Errorf("%v charges did not reach Redis", n)
	}
}

// An outage that a reload ends is over for who waits for word of it; one that it does not end is
// not.
func TestReloadEndsAnOutage(t *testing.T) {
	t.Cleanup(sluice.Linger(20 * time.Millisecond))
	events()
	r := redistest.StartWith(t, redis.Options{Password: "right"}, "--requirepass", "right")
	config := func(password string) string {
		return sharing(r.Addr, "timeout 1s\npassword "+password, "zone z 1000/1h")
	}
	s := serve(t, config("wrong"))
	eventually(t, 10*time.Second, "the outage", func() bool { s.get("/"); return len(logged(t, downLine)) == 1 })
	s.mustLoad(config("guess"))
	eventually(t, 10*time.Second, "the next outage", func() bool { s.get("/"); return len(logged(t, downLine)) == 2 })
	s.mustLoad(config("right"))
	eventually(t, 20*time.Second, "the return", func() bool { s.get("/"); return len(logged(t, upLine)) == 1 })
	var got []string
	eventually(t, 10*time.Second, "the events", func() bool {
		for _, e := range events() {
			got = append(got, e.Name())
		}
		return len(got) == 3
	})
	if got[2] != "rate_limit_store_up" || s.metric(`caddy_rate_limit_store_up{store="redis"}`) != 1 {
		t.Error(got)
	}
}

// What a dead store leaves is no word about another: a store that was never down does not say that
// it is up again.
func TestAStoreThatWasNeverDownDoesNotReturn(t *testing.T) {
	t.Cleanup(sluice.Linger(20 * time.Millisecond))
	s := serve(t, sharing("127.0.0.1:"+redistest.FreePort(t), "timeout 1s", "zone z 1000/1h"))
	eventually(t, 10*time.Second, "the outage", func() bool { s.get("/"); return len(logged(t, downLine)) == 1 })
	if err := caddy.Stop(); err != nil {
		t.Fatal(err)
	}
	s.mustLoad(sharing(redistest.Start(t).Addr, "timeout 1s", "zone z 1000/1h"))
	for range 10 {
		s.pass(1, "/")
	}
	if lines := logged(t, upLine); len(lines) > 0 {
		t.Error(lines)
	}
}

// A store that no config uses any more and that is gone is not waited for.
func TestReloadGivesUpADeadStore(t *testing.T) {
	t.Cleanup(sluice.Linger(20 * time.Millisecond))
	old, r := redistest.Start(t), redistest.Start(t)
	h := hold(t)
	config := func(addr string) string {
		return sharingSite(addr, "timeout 1s", "rate_limit {\nzone c {\nkey everyone\nconcurrency 10\n}\n}\nreverse_proxy "+h.dial)
	}
	s := serve(t, config(old.Addr))
	before := s.unsettled()
	s.begin()
	s.begin()
	old.Kill()
	s.mustLoad(config(r.Addr))
	h.end <- struct{}{} // its lease cannot be given back
	eventually(t, 20*time.Second, "the old store is closed", func() bool { return s.unsettled() > before })
	if n := s.inFlight("c"); n != 1 {
		t.Errorf("%d in flight", n)
	}
}

// A reload that is rejected leaves the store, and who hears of it, as they were.
func TestRejectedReloadLeavesTheStore(t *testing.T) {
	events()
	r := redistest.Start(t)
	site := func(settings, more string) string {
		return sharing(r.Addr, settings, "zone z 100/1h {\n on_store_error allow\n}\n"+more)
	}
	const settings = "timeout 2s"
	s := serve(t, site(settings, ""))
	s.pass(1, "/")
	first := connections(r)
	failing := func(config, how string) error {
		adapted, err := adapt(config)
		if err != nil {
			return err
		}
		var c map[string]any
		if err := json.Unmarshal(adapted, &c); err != nil {
			t.Fatal(err)
		}
		object(c, "apps", "zz_sluice_test")[how] = true
		object(c, "apps", "events")["subscriptions"] = []any{} // who would listen to this config's events hears nothing
		if adapted, err = json.Marshal(c); err != nil {
			t.Fatal(err)
		}
		return s.loadJSON(adapted)
	}
	for name, err := range map[string]error{
		"fails to provision":                 failing(site(settings, ""), "provisioning"),
		"fails to start":                     failing(site(settings, ""), "starting"),
		"other settings, fails to provision": failing(site(settings+"\nprefix other", ""), "provisioning"),
		"other settings, fails to start":     failing(site(settings+"\nprefix other", ""), "starting"),
		"no such database":                   s.load(site(settings+"\ndb x", "")),
		"no such mode":                       s.load(site(settings+"\nmode many", "")),
		"contradicting zones":                s.load(site(settings, "") + "\n:81 {\n rate_limit {\n zone z 5/1h\n}\n}"),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	s.pass(1, "/")
	eventually(t, 10*time.Second, "the connections of one store only", func() bool { return len(connections(r)) <= 3 })
	kept(t, r, first)

	r.Kill()
	s.pass(4, "/")
	eventually(t, 10*time.Second, "a line that it is down", func() bool { return len(logged(t, downLine)) > 0 })
	// A config that fails while the store is down does not make it look well.
	_ = failing(site(settings+"\nprefix other", ""), "provisioning")
	_ = failing(site(settings+"\nprefix other", ""), "starting")
	if up := s.metric(`caddy_rate_limit_store_up{store="redis"}`); up != 0 {
		t.Error("store_up is", up)
	}
	kind, _ := logged(t, downLine)[0]["kind"].(string)
	r.Restart()
	eventually(t, 10*time.Second, "the store's return", func() bool { return len(logged(t, upLine)) > 0 })
	checkEvents(t, kind, true)
}

// Raising a limit lets refused clients in at once, on every instance that reloads.
func TestRaisedLimitForgetsRefusals(t *testing.T) {
	r := redistest.Start(t)
	s := serve(t, sharing(r.Addr, patient, "zone z 2/1h"))
	s.pass(2, "/")
	for range 3 {
		s.refused("/")
	}
	s.mustLoad(sharing(r.Addr, patient, "zone z 4/1h"))
	s.pass(2, "/")
	s.refused("/")
	s.mustLoad(sharing(r.Addr, patient, "zone z 3/1h"))
	if a := s.refused("/"); a.left("z") != 0 {
		t.Error(a.Header)
	}
}

// Through 200 reloads under load, every tenth of which opens another store, no request goes
// uncounted and nothing is left behind.
func TestReloadsUnderLoadLeaveNothing(t *testing.T) {
	const quota = 10_000_000
	r := redistest.Start(t)
	var configs [3][]byte
	for i, settings := range []string{patient, patient, patient + "\nprefix other"} {
		config := sharing(r.Addr, settings, fmt.Sprintf("zone z %d/365d {\n key everyone\n}\nzone %s 5/1h {\n key {header.X-Nobody}\n key_fallback none\n}",
			quota, []string{"even", "odd", "third"}[i]))
		var err error
		if configs[i], err = adapt(config); err != nil {
			t.Fatal(err)
		}
	}
	reachedCount.Store(0)
	s := newServer(t)
	if err := s.loadJSON(configs[0]); err != nil {
		t.Fatal(err)
	}
	run := func(reloads int) {
		underLoad(s, func() {
			for i := range reloads {
				next := configs[i%2]
				if i%10 == 9 {
					next = configs[2]
				}
				if err := s.swap(next); err != nil {
					t.Error(err)
				}
			}
			if err := s.swap(configs[0]); err != nil {
				t.Error(err)
			}
		})
		s.settle()
	}
	used := func() (used, int) {
		// One store has up to three connections: two flights and what announces the instance.
		eventually(t, 20*time.Second, "other stores than the last one are closed", func() bool { return len(connections(r)) <= 3 })
		return usage(t), len(connections(r))
	}
	run(20) // what is made once is made
	before, connected := used()
	run(200)
	after, stillConnected := used()

	counted := quota - s.get("/").left("z")
	s.mustLoad(strings.Replace(sharing(r.Addr, patient+"\nprefix other", fmt.Sprintf("zone z %d/365d {\n key everyone\n}", quota)), "reached", "", 1))
	counted += quota - s.get("/").left("z") - 1
	if passed := int(reachedCount.Load()); counted != passed || passed < 100 {
		t.Errorf("%d requests counted of %d", counted, passed)
	}
	t.Logf("%d requests; before %+v, %d connections, after %+v, %d connections", counted, before, connected, after, stillConnected)
	if after.goroutines > before.goroutines+10 || after.files > before.files+5 || after.heap > before.heap+4<<20 || stillConnected > 3 {
		t.Errorf("before %+v and %d connections, after %+v and %d", before, connected, after, stillConnected)
	}
	if lines := logged(t, downLine); len(lines) != 0 {
		t.Error(lines)
	}
}
