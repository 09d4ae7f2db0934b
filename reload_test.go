package sluice_test

// Reloads: what is counted stays counted, what fails leaves no trace, and nothing piles up.

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// Under load, through a thousand reloads, no admitted request goes uncounted, and nothing grows.
func TestF48ThousandReloads(t *testing.T) {
	const quota = 10_000_000
	config := func(n int) string {
		return fmt.Sprintf(`
:80 {
	rate_limit {
		zone fixed %d/365d {
			key everyone
			algorithm fixed_window
		}
		zone sliding %d/365d {
			key everyone
		}
		zone %s 5/1h {
			key {header.X-Nobody}
			key_fallback none
		}
	}
	route {
		reached
		respond "config %d"
	}
}`, quota, quota, []string{"even", "odd"}[n%2], n)
	}
	var configs [2][]byte
	for i := range configs {
		var err error
		if configs[i], err = adapt(config(i)); err != nil {
			t.Fatal(err)
		}
	}
	reachedCount.Store(0)
	s := serve(t, config(0))
	run := func(reloads int) {
		underLoad(s, func() {
			for i := range reloads {
				if err := s.swap(configs[i%2]); err != nil {
					t.Error(err)
				}
			}
		})
	}
	run(100) // what is made once is made
	s.settle()
	before := usage(t)
	metric := s.metric(`caddy_rate_limit_requests_total{zone="fixed"}`)
	run(900)
	s.settle()
	after := usage(t)

	a := s.get("/")
	passed := int(reachedCount.Load())
	for _, zone := range []string{"fixed", "sliding"} {
		if counted := quota - a.left(zone); counted != passed {
			t.Errorf("zone %s counted %d requests of %d", zone, counted, passed)
		}
		if got := s.metric(`caddy_rate_limit_requests_total{zone="` + zone + `"}`); int(got) != passed || got <= metric {
			t.Errorf("metric of zone %s: %v, want %d (was %v)", zone, got, passed, metric)
		}
	}
	t.Logf("%d requests; before %+v, after %+v", passed, before, after)
	if after.goroutines > before.goroutines+10 {
		t.Errorf("goroutines grew from %d to %d", before.goroutines, after.goroutines)
	}
	if after.files > before.files+5 {
		t.Errorf("open files grew from %d to %d", before.files, after.files)
	}
	if after.heap > before.heap+4<<20 {
		t.Errorf("the heap grew from %d to %d bytes", before.heap, after.heap)
	}
}

// underLoad runs f while clients ask all the time. Some get no answer: a connection that waits to
// be accepted when Caddy closes the old listener is lost, before anyone could count it.
func underLoad(s *server, f func()) {
	var (
		wg   sync.WaitGroup
		done atomic.Bool
	)
	for range 4 {
		wg.Go(func() {
			for !done.Load() {
				if a, err := s.try(http.MethodGet, "/"); err == nil && a.StatusCode != 200 {
					s.t.Error(a.Status, a.Header)
					return
				}
			}
		})
	}
	f()
	done.Store(true)
	wg.Wait()
	s.client.CloseIdleConnections()
}

type used struct {
	goroutines, files int
	heap              uint64
}

// usage waits until goroutines and files do not become fewer any more, and then says what the
// process uses.
func usage(t testing.TB) (u used) {
	t.Helper()
	processLog.reset()
	u = used{1 << 30, 1 << 30, 1 << 60}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for calm := 0; calm < 10; calm++ {
		<-tick.C
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		files, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		now := used{runtime.NumGoroutine(), len(files), m.HeapAlloc}
		if now.goroutines < u.goroutines || now.files < u.files || now.heap < u.heap-64<<10 {
			calm = 0
		}
		u = used{min(u.goroutines, now.goroutines), min(u.files, now.files), min(u.heap, now.heap)}
	}
	return u
}

// A reload that fails, wherever it fails, leaves the running limits as they were.
func TestF49FailedReload(t *testing.T) {
	const site = `
:80 {
	rate_limit {
		zone live %s/1h
	}
	respond ok
}`
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	adapted, err := adapt(fmt.Sprintf(site, "1000"))
	if err != nil {
		t.Fatal(err)
	}
	// failing is the config with a higher limit and one thing wrong.
	failing := func(change func(config map[string]any)) []byte {
		var c map[string]any
		if err := json.Unmarshal(adapted, &c); err != nil {
			t.Fatal(err)
		}
		change(c)
		b, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	appendHandler := func(handler map[string]any) func(map[string]any) {
		return func(c map[string]any) {
			srv := object(c, "apps", "http", "servers", "srv0")
			srv["routes"] = append(srv["routes"].([]any), map[string]any{"handle": []any{handler}})
		}
	}
	zones := func(zones map[string]any) map[string]any {
		return map[string]any{"handler": "rate_limit", "rate_limits": zones}
	}
	for name, config := range map[string][]byte{
		"unknown handler": failing(appendHandler(map[string]any{"handler": "no_such_handler"})),
		"bad upstream":    failing(appendHandler(map[string]any{"handler": "reverse_proxy", "upstreams": []any{map[string]any{"dial": "a:b:c"}}, "transport": map[string]any{"protocol": "none"}})),
		"bad zone": failing(appendHandler(zones(map[string]any{
			"live": map[string]any{"limit": "1000/1h"}, "other": map[string]any{"max_events": 5, "window": "-1s"},
		}))),
		"conflicting zone": failing(appendHandler(zones(map[string]any{
			"another": map[string]any{"limit": "3/1h"}, "live": map[string]any{"limit": "2000/1h"},
		}))),
		"app fails to provision": failing(func(c map[string]any) {
			object(c, "apps")["zz_sluice_test"] = map[string]any{"provisioning": true}
		}),
		"app fails to start": failing(func(c map[string]any) {
			object(c, "apps")["zz_sluice_test"] = map[string]any{"starting": true}
		}),
		"listener in use": failing(func(c map[string]any) {
			object(c, "apps", "http", "servers", "srv1")["listen"] = []any{":81"}
		}),
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, fmt.Sprintf(site, "5"))
			s.ports["81"] = taken.Addr().(*net.TCPAddr).Port
			s.pass(2, "/")
			for range 3 { // apps are provisioned and started in random order
				if err := s.loadJSON(config); err == nil {
					t.Fatal("the config is not rejected")
				}
			}
			if a := s.get("/"); a.StatusCode != 200 || a.left("live") != 2 {
				t.Fatalf("%d %v", a.StatusCode, a.Header)
			}
			s.pass(2, "/")
			s.refused("/")
			// The next good config finds the counters, and the last one to stop takes them away: a
			// rejected config that kept hold of the zone would keep them alive.
			s.mustLoad(fmt.Sprintf(site, "7"))
			if a := s.get("/"); a.left("live") != 1 {
				t.Errorf("after a good reload: %v", a.Header)
			}
			// Not before: Caddy's own admin endpoint is that of the rejected config until then.
			if got := s.metric(`caddy_rate_limit_declined_requests_total{zone="live"}`); got != 1 {
				t.Errorf("declined_requests_total: %v", got)
			}
			s.client.CloseIdleConnections()
			if err := caddy.Stop(); err != nil {
				t.Fatal(err)
			}
			s.mustLoad(fmt.Sprintf(site, "7"))
			if a := s.get("/"); a.left("live") != 6 {
				t.Errorf("after a stop: %v", a.Header)
			}
		})
	}
}

func TestF50ChangedZones(t *testing.T) {
	for _, algorithm := range []string{"sliding_log", "sliding_window", "fixed_window", "token_bucket"} {
		t.Run(algorithm, func(t *testing.T) {
			useClock(t)
			config := func(zone, limit string) string {
				return fmt.Sprintf(":80 {\n rate_limit {\n zone %s %s {\n algorithm %s\n }\n }\n respond ok\n}", zone, limit, algorithm)
			}
			s := serve(t, config("z", "5/1h"))
			s.pass(5, "/")
			s.refused("/")

			s.mustLoad(config("z", "10/1h")) // raised: 5 more now
			s.pass(5, "/")
			s.refused("/")

			s.mustLoad(config("z", "3/1h")) // lowered: nothing left, and nothing negative
			if a := s.refused("/"); a.left("z") != 0 || s.wait(a) < 1 {
				t.Error(a.Header)
			}
			s.mustLoad(config("z", "11/1h"))
			if a := s.get("/"); a.StatusCode != 200 || a.left("z") != 0 {
				t.Error("what was used is forgotten:", a.StatusCode, a.Header)
			}

			s.mustLoad(config("renamed", "5/1h")) // another name is another zone
			s.pass(5, "/")
			s.refused("/")

			s.mustLoad(config("z", "5/1h")) // it was gone: a zone that nobody names is forgotten
			s.pass(5, "/")
			s.refused("/")
		})
	}
}

// A changed window or algorithm starts afresh, and the log says so.
func TestF50ChangedWindowStartsAfresh(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone z 2/1h\n }\n respond ok\n}")
	s.pass(2, "/")
	s.mustLoad(":80 {\n rate_limit {\n zone z 2/2h\n }\n respond ok\n}")
	s.pass(2, "/")
	s.refused("/")
	lines := logged(t, "a limit with another window or algorithm starts afresh")
	if len(lines) != 1 {
		t.Fatalf("%d log lines", len(lines))
	}
	// G26: old and new, and nothing of the default algorithm, which is the same.
	if text := fmt.Sprintln(lines[0]["before"], lines[0]["now"], lines[0]["hint"]); text != "[sliding_log 2/1h] sliding_log 2/2h <nil>\n" {
		t.Error(text)
	}
}

// Nor does a config that fails to start lose what the running one has: the next one is compared
// with that.
func TestFreshStartAfterAFailedStart(t *testing.T) {
	config := func(window string) string { return ":80 {\nrate_limit {\nzone z 5/" + window + "\n}\nrespond ok\n}" }
	s := serve(t, config("1h"))
	for range 10 { // apps are started in random order
		adapted, err := adapt(config("1m"))
		if err != nil {
			t.Fatal(err)
		}
		var c map[string]any
		if err := json.Unmarshal(adapted, &c); err != nil {
			t.Fatal(err)
		}
		object(c, "apps")["zz_sluice_test"] = map[string]any{"starting": true}
		if adapted, err = json.Marshal(c); err != nil {
			t.Fatal(err)
		}
		if err := s.swap(adapted); err == nil {
			t.Fatal("it starts")
		}
	}
	for _, want := range []int{1, 0} { // when the window changes, and not again
		processLog.reset()
		s.mustLoad(config("2h"))
		if n := len(logged(t, "a limit with another window or algorithm starts afresh")); n != want {
			t.Errorf("%d warnings, want %d", n, want)
		}
	}
}

// G36. A zone that counts in another place starts afresh, which the log says once, and says of no
// other change of settings.
func TestChangedPlaceStartsAfresh(t *testing.T) {
	server := redistest.Start(t)
	config := func(redis, zone string) string {
		return "{\n rate_limit {\n redis " + server.Addr + redis + "\n }\n}\n:80 {\n rate_limit {\n zone moves 5/1h {\n" + zone + "\n }\n }\n respond ok\n}"
	}
	s := newServer(t)
	for _, step := range []struct{ redis, zone, before, now string }{
		{"", "", "", ""},
		{" {\n timeout 60ms\n }", "", "", ""},
		{"", "store local", "prefix rate_limit", "this process"},
		{"", "store local\n ipv4_prefix 24", "", ""},
		{" {\n prefix other\n }", "", "this process", "prefix other"},
		{" {\n prefix third\n }", "", "prefix other", "prefix third"},
	} {
		processLog.reset()
		s.mustLoad(config(step.redis, step.zone))
		lines := logged(t, "a zone that counts elsewhere starts afresh, bans included")
		switch {
		case step.now == "" && len(lines) == 0:
		case len(lines) != 1 || !strings.Contains(fmt.Sprint(lines[0]["before"]), step.before) || !strings.Contains(fmt.Sprint(lines[0]["now"]), step.now):
			t.Errorf("%q %q: %v", step.redis, step.zone, lines)
		}
	}
}

// events is a site with one zone in the older spelling.
func eventsZone(events int, window string, more ...string) string {
	return fmt.Sprintf(":80 {\n rate_limit {\n zone z {\n events %d\n window %s\n %s\n }\n }\n respond ok\n}", events, window, strings.Join(more, "\n"))
}

func TestDefectRejectedReload(t *testing.T) {
	s := serve(t, eventsZone(3, "1h"))
	s.pass(1, "/")
	for range 3 {
		if err := s.load(eventsZone(100, "1h") + "\n:81 {\n reverse_proxy {\n transport none\n }\n}"); err == nil {
			t.Fatal("the config is not rejected")
		}
		adapted := `{"apps":{"http":{"servers":{"s":{"listen":[":80"],"routes":[{"handle":[
			{"handler":"rate_limit","rate_limits":{"z":{"max_events":100,"window":"1h"}}},{"handler":"none"}]}]}}}}}`
		if err := s.loadJSON([]byte(adapted)); err == nil {
			t.Fatal("the config is not rejected")
		}
	}
	s.pass(2, "/")
	s.refused("/")
	// The live zone is not orphaned: the next config counts on.
	s.mustLoad(eventsZone(4, "1h"))
	s.pass(1, "/")
	s.refused("/")
}

func TestDefectRaisedEventsGiveCapacity(t *testing.T) {
	s := serve(t, eventsZone(2, "1h"))
	s.pass(2, "/")
	s.refused("/")
	s.mustLoad(eventsZone(4, "1h"))
	s.pass(2, "/")
	s.refused("/")
}

func TestDefectNegativeInterval(t *testing.T) {
	s := serve(t, eventsZone(1, "1h"))
	for _, bad := range []string{
		strings.Replace(eventsZone(1, "1h"), "rate_limit {", "rate_limit {\n sweep_interval -1s", 1),
		eventsZone(1, "-1h"),
	} {
		if err := s.load(bad); err == nil {
			t.Errorf("loads: %s", bad)
		}
	}
	for _, field := range []string{`"sweep_interval":-1`, `"sweep_interval":"-5s"`, `"distributed":{"read_interval":"-1s"}`} {
		config := `{"apps":{"http":{"servers":{"s":{"listen":[":80"],"routes":[{"handle":[
			{"handler":"rate_limit","rate_limits":{"z":{"max_events":1,"window":"1h"}},` + field + `}]}]}}}}}`
		if !json.Valid([]byte(config)) {
			t.Fatal(config)
		}
		if err := s.loadJSON([]byte(config)); err == nil {
			t.Errorf("loads: %s", field)
		}
	}
	s.pass(1, "/")
	s.refused("/")
}
