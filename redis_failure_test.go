package sluice_test

// Redis that is gone, stopped, slow, locked, full, read-only or not what it was taken for: what
// clients are told, what operators are told, and that it ends by itself.

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/redis/go-redis/v9"

	"github.com/caddy-sluice/sluice"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

const (
	downLine = "shared store is down: each zone does what its on_store_error says"
	upLine   = "shared store is up again"

	partDownLine = "shared store is down in part: for keys of this server each zone does what its on_store_error says"
	partUpLine   = "shared store is up again in part: keys of this server are counted in it"
	remindLine   = "requests pass unlimited, because the shared store is down and their zones have on_store_error allow"
)

// threeWays are zones that do each thing there is to do while the store is down.
const threeWays = `
		zone l 10/1h {
			match {
				path /l
			}
		}
		zone a 10/1h {
			match {
				path /a
			}
			on_store_error allow
		}
		zone d 10/1h {
			match {
				path /d
			}
			on_store_error deny
		}`

// withFleet is a config of three ways in a fleet of four.
func withFleet(addr, settings string) string {
	return strings.Replace(sharing(addr, settings, threeWays), "\trate_limit {\n", "\trate_limit {\n\t\tfleet_size 4\n", 1)
}

// trouble is a way to fail, and what operators must be told about it.
type trouble struct {
	kinds    []string // any of them: a connection may break before nobody listens
	settings string
	start    func(t *testing.T) (r *redistest.Server, addr string)
	fail     func(r *redistest.Server) // nil: it fails from the start
	heal     func(r *redistest.Server) // nil: only another config can
}

func plain(t *testing.T) (*redistest.Server, string) {
	r := redistest.Start(t)
	return r, r.Addr
}

func troubles(t *testing.T) map[string]trouble {
	cert, key, pool := redistest.Certificate(t, "redis.example")
	var way *slowWay
	return map[string]trouble{
		"F42 never there": {
			kinds: []string{"refused"},
			start: func(t *testing.T) (*redistest.Server, string) {
				r, addr := plain(t)
				r.Kill()
				return r, addr
			},
			heal: (*redistest.Server).Restart,
		},
		"killed":  {kinds: []string{"refused", "reset"}, start: plain, fail: (*redistest.Server).Kill, heal: (*redistest.Server).Restart},
		"stopped": {kinds: []string{"timeout"}, start: plain, fail: (*redistest.Server).Stop, heal: (*redistest.Server).Continue},
		"slowed": {
			kinds: []string{"timeout"},
			start: func(t *testing.T) (*redistest.Server, string) {
				r := redistest.Start(t)
				way = slowDown(t, r.Addr)
				return r, way.addr
			},
			fail: func(*redistest.Server) { way.delay.Store(int64(time.Hour)) },
			heal: func(*redistest.Server) { way.delay.Store(0) },
		},
		"F44 wrong password": {
			kinds: []string{"wrongpass"}, settings: "password guess",
			start: func(t *testing.T) (*redistest.Server, string) {
				r := redistest.StartWith(t, redis.Options{Password: "right"}, "--requirepass", "right")
				return r, r.Addr
			},
			heal: func(r *redistest.Server) { r.Do("acl", "setuser", "default", ">guess") },
		},
		"F44 no password": {
			kinds: []string{"noauth"},
			start: func(t *testing.T) (*redistest.Server, string) {
				r := redistest.StartWith(t, redis.Options{Password: "right"}, "--requirepass", "right")
				return r, r.Addr
			},
			heal: func(r *redistest.Server) { r.Do("acl", "setuser", "default", "nopass") },
		},
		"F44 db out of range": {kinds: []string{"db"}, settings: "db 99", start: plain},
		"F44 TLS name mismatch": {
			kinds: []string{"tls"}, settings: "tls {\n ca " + cert + "\n}",
			start: func(t *testing.T) (*redistest.Server, string) {
				r := redistest.StartWith(t, redis.Options{TLSConfig: trusting(pool)}, "--port", "0", "--tls-port", "{port}",
					"--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients", "no")
				return r, r.Addr
			},
		},
		"read-only": {
			kinds: []string{"readonly"}, start: plain,
			fail: func(r *redistest.Server) { r.Do("replicaof", "127.0.0.1", redistest.FreePort(t)) },
			heal: func(r *redistest.Server) { r.Do("replicaof", "no", "one") },
		},
		"full": {
			kinds: []string{"oom"}, start: plain,
			fail: func(r *redistest.Server) { r.Do("config", "set", "maxmemory", "1") },
			heal: func(r *redistest.Server) { r.Do("config", "set", "maxmemory", "0") },
		},
	}
}

// Whatever fails: clients are told what each zone chose, operators are told the cause once, and the
// return once.
func TestStoreFailures(t *testing.T) {
	for name, trouble := range troubles(t) {
		t.Run(name, func(t *testing.T) {
			events()
			r, addr := trouble.start(t)
			s := serve(t, withFleet(addr, "timeout 2s\n"+trouble.settings))
			asked := 0
			if trouble.fail != nil {
				if a := s.get("/l"); a.StatusCode != 200 || a.left("l") != 9 {
					t.Fatal(a.Status, a.Header)
				}
				trouble.fail(r)
				for ; len(logged(t, downLine)) == 0 && asked < 10; asked++ {
					s.pass(1, "/a")
				}
			}
			eventually(t, 10*time.Second, "a line that it is down", func() bool { return len(logged(t, downLine)) > 0 })
			kind := s.checkDown(trouble.kinds, asked)
			if trouble.heal != nil {
				trouble.heal(r)
				s.checkUp()
			}
			checkEvents(t, kind, trouble.heal != nil)
		})
	}
}

// checkDown asks each zone while the store is down. Zone a has been asked before.
func (s *server) checkDown(kinds []string, asked int) (kind string) {
	s.t.Helper()
	lines := logged(s.t, downLine)
	kind, _ = lines[0]["kind"].(string)
	if len(lines) != 1 || lines[0]["level"] != "error" || !slices.Contains(kinds, kind) || lines[0]["error"] == "" {
		s.t.Errorf("log of an outage, want one of the kinds %q: %v", kinds, lines)
	}
	for i := range 3 { // a share of 10 in a fleet of 4 is 2
		a := s.get("/l")
		if want := map[bool]int{true: 200, false: 429}[i < 2]; a.StatusCode != want || a.Header.Get("Ratelimit-Policy") != `"l";q=2;w=3600` || a.left("l") != max(1-i, 0) {
			s.t.Errorf("local, request %d: %s %v", i, a.Status, a.Header)
		}
		if a.StatusCode == 429 && (s.wait(a) < 3000 || !strings.Contains(a.body, `"l"`)) {
			s.t.Error(a.Header, a.body)
		}
		if a := s.get("/a"); a.StatusCode != 200 || a.left("a") != -1 || a.Header.Get("Ratelimit-Policy") != `"a";q=10;w=3600` {
			s.t.Errorf("allow: %s %v", a.Status, a.Header)
		}
		if a := s.get("/d"); a.StatusCode != 503 || s.wait(a) != 2 || a.Header.Get("Content-Type") != "application/problem+json" ||
			a.Header.Get("Cache-Control") != "no-store" || !strings.Contains(a.body, "#temporary-reduced-capacity") || a.left("d") != -1 {
			s.t.Errorf("deny: %s %v %s", a.Status, a.Header, a.body)
		}
	}
	for _, line := range logged(s.t, "rate limit exceeded") {
		if line["zone"] != "l" {
			s.t.Errorf("ban tools hear of a client that was turned away for want of Redis: %v", line)
		}
	}
	for series, want := range map[string]int{
		`caddy_rate_limit_store_up{store="redis"}`:                                   0,
		`caddy_rate_limit_fallback_requests_total{mode="local",zone="l"}`:            3,
		`caddy_rate_limit_fallback_requests_total{mode="allow",zone="a"}`:            3 + asked,
		`caddy_rate_limit_fallback_requests_total{mode="deny",zone="d"}`:             3,
		`caddy_rate_limit_decisions_total{result="passed",store="local",zone="l"}`:   2,
		`caddy_rate_limit_decisions_total{result="rejected",store="local",zone="l"}`: 1,
		`caddy_rate_limit_decisions_total{result="passed",store="none",zone="a"}`:    3 + asked,
		`caddy_rate_limit_decisions_total{result="rejected",store="none",zone="d"}`:  3,
		`caddy_rate_limit_decisions_total{result="rejected",store="redis",zone="l"}`: 0,
		`caddy_rate_limit_declined_requests_total{zone="d"}`:                         3,
	} {
		if got := s.metric(series); int(got) != want && !(got == -1 && want == 0) {
			s.t.Errorf("%s = %v, want %d", series, got, want)
		}
	}
	if s.metric(`caddy_rate_limit_store_errors_total{kind="`+kind+`",store="redis"}`) < 1 {
		s.t.Errorf("no error of kind %q is counted", kind)
	}
	return kind
}

// checkUp waits for the store, which has just come back.
func (s *server) checkUp() {
	s.t.Helper()
	eventually(s.t, 10*time.Second, "the store's return", func() bool { return len(logged(s.t, upLine)) > 0 })
	if got := s.metric(`caddy_rate_limit_store_up{store="redis"}`); got != 1 {
		s.t.Error("store_up is", got)
	}
	// Redis has not heard of what was asked while it was known to be down; zone a was asked before,
	// and what timed out may have been counted.
	for zone, left := range map[string]int{"l": 8, "a": 0, "d": 9} {
		if a := s.get("/" + zone); a.StatusCode != 200 || a.left(zone) < left || a.Header.Get("Ratelimit-Policy") != `"`+zone+`";q=10;w=3600` {
			s.t.Errorf("after the return: %s %v", a.Status, a.Header)
		}
	}
	if down, up := logged(s.t, downLine), logged(s.t, upLine); len(down) != 1 || len(up) != 1 {
		s.t.Errorf("%d lines that it went down, %d that it came back, want one each", len(down), len(up))
	}
}

// checkEvents wants one event for each change.
func checkEvents(t *testing.T, kind string, back bool) {
	t.Helper()
	want := []string{"rate_limit_store_down"}
	if back {
		want = append(want, "rate_limit_store_up")
	}
	var got []string
	eventually(t, 10*time.Second, "the events, which follow the lines in the log", func() bool {
		for _, e := range events() {
			got = append(got, e.Name())
			if e.Data["store"] != "redis" || e.Name() == "rate_limit_store_down" && e.Data["kind"] != kind {
				t.Errorf("event %s: %v", e.Name(), e.Data)
			}
		}
		return len(got) >= len(want)
	})
	if !slices.Equal(got, want) {
		t.Errorf("events %q, want %q", got, want)
	}
}

// What is down when Caddy starts is told too, in whichever order its apps start: the events app
// knows no subscriber before it did.
func TestOutageAtStartIsTold(t *testing.T) {
	for range 12 {
		t.Run("", func(t *testing.T) {
			events()
			config, err := adapt(sharing("127.0.0.1:"+redistest.FreePort(t), "", "zone z 2/1h"))
			if err != nil {
				t.Fatal(err)
			}
			config = bytes.Replace(config, []byte(`"apps":{`), []byte(`"apps":{"zz_sluice_test":{"await":"`+downLine+`"},`), 1)
			if err := newServer(t).loadJSON(config); err != nil {
				t.Fatal(err)
			}
			eventually(t, 10*time.Second, "the event", func() bool { return len(events()) == 1 })
		})
	}
}

// F45: what is done without on_store_error is local, never allow. The JSON that the Caddyfile
// becomes leaves it out too.
func TestF45OnStoreErrorLeftOut(t *testing.T) {
	config := sharing("127.0.0.1:"+redistest.FreePort(t), "timeout 300ms", "zone z 2/1h")
	if adapted, err := adapt(config); err != nil || strings.Contains(string(adapted), "on_store_error") {
		t.Fatal(string(adapted), err)
	}
	s := serve(t, config)
	s.pass(2, "/")
	s.refused("/")
}

// Of several servers each one's outage and return is told, with how many are down.
func TestEachServerIsTold(t *testing.T) {
	events()
	a, b := redistest.Start(t), redistest.Start(t)
	s := serve(t, sharing(a.Addr+" "+b.Addr, "mode ring\n"+patient, "zone z 1000000/1h {\n key {header.X-Key}\n on_store_error allow\n}"))
	steps := []struct {
		change func()
		line   string
		server *redistest.Server
		down   int
	}{
		{a.Kill, partDownLine, a, 1}, {b.Kill, downLine, b, 2}, {b.Restart, partUpLine, b, 1}, {a.Restart, upLine, a, 0},
	}
	for _, step := range steps {
		step.change()
		for i := range 40 {
			s.pass(1, "/", "X-Key", fmt.Sprint(i))
		}
		eventually(t, 10*time.Second, step.line, func() bool { return len(logged(t, step.line)) > 0 })
		lines := logged(t, step.line)
		if got := lines[0]; len(lines) != 1 || got["server"] != step.server.Addr || got["down"] != float64(step.down) || got["servers"] != 2. {
			t.Errorf("want one line of %s, %d of 2 down: %v", step.server.Addr, step.down, lines)
		}
		if up := s.metric(`caddy_rate_limit_store_up{store="redis"}`); up != float64(max(0, 1-step.down)) {
			t.Errorf("store_up is %v while %d are down", up, step.down)
		}
	}
	var told []caddy.Event
	eventually(t, 5*time.Second, "the events", func() bool { told = append(told, events()...); return len(told) >= len(steps) })
	for i, e := range told {
		name := map[bool]string{true: "rate_limit_store_down", false: "rate_limit_store_up"}[i < 2]
		if e.Name() != name || e.Data["server"] != steps[i].server.Addr || e.Data["down"] != steps[i].down || e.Data["servers"] != 2 {
			t.Errorf("event %d: %s %v", i, e.Name(), e.Data)
		}
	}
}

// What local zones took is given back when the shared store is down and a zone denies.
func TestDenyGivesBackWhatLocalZonesTook(t *testing.T) {
	r := redistest.Start(t)
	s := serve(t, sharing(r.Addr, "timeout 2s", `
		zone mine 5/1h {
			store local
		}
		zone ours 100/1h {
			on_store_error deny
		}`))
	s.pass(2, "/")
	r.Kill()
	for range 6 {
		if a := s.get("/"); a.StatusCode != 503 || a.left("mine") != 3 {
			t.Error(a.Status, a.Header)
		}
	}
	r.Restart()
	eventually(t, 10*time.Second, "the store's return", func() bool { return len(logged(t, upLine)) > 0 })
	if left := s.get("/").left("mine"); left != 2 {
		t.Errorf("%d left, want 2", left)
	}
}

// A dry run is never the reason to deny.
func TestDryRunNeverDenies(t *testing.T) {
	s := serve(t, sharing("127.0.0.1:"+redistest.FreePort(t), "timeout 2s", "zone z 1/1h {\n dry_run\n on_store_error deny\n}"))
	s.pass(5, "/")
}

// F38, F39: nobody waits for a Redis that hangs, after the first few, and nothing piles up.
func TestF38_F39_HangingRedis(t *testing.T) {
	const timeout = time.Second
	r := redistest.Start(t)
	s := serve(t, sharing(r.Addr, "timeout 1s", "zone a 1000000/1h {\n on_store_error allow\n}"))
	s.pass(1, "/")
	before := runtime.NumGoroutine()
	r.Stop()
	var (
		wg            sync.WaitGroup
		slow, slowest atomic.Int64
	)
	for range 50 {
		wg.Go(func() {
			for range 40 {
				start := time.Now()
				if a, err := s.try(http.MethodGet, "/"); err != nil || a.StatusCode != 200 {
					t.Error(a.Response, err)
					return
				}
				took := time.Since(start)
				if took > timeout*3/4 {
					slow.Add(1)
				}
				for old := slowest.Load(); int64(took) > old && !slowest.CompareAndSwap(old, int64(took)); old = slowest.Load() {
				}
			}
		})
	}
	wg.Wait()
	if n := slow.Load(); n > 2*50 {
		t.Errorf("%d of 2,000 requests were slow, want only those before the breaker opened", n)
	}
	if late := time.Duration(slowest.Load()) - timeout; late > 5*time.Second { // a busy machine's slack
		t.Errorf("a request took %v, the timeout is %v", time.Duration(slowest.Load()), timeout)
	}
	if n := runtime.NumGoroutine(); n > before+150 { // a client's connection has two, a server's two
		t.Errorf("%d goroutines, %d before", n, before)
	}
	r.Continue()
	eventually(t, 10*time.Second, "the store's return", func() bool { return len(logged(t, upLine)) > 0 })
}

// F40: when Redis comes back under load, a few connections are made, not one for each request.
func TestF40_NoStormOnReturn(t *testing.T) {
	r := redistest.Start(t)
	s := serve(t, sharing(r.Addr, "timeout 2s", "zone a 1000000/1h {\n on_store_error allow\n}"))
	s.pass(1, "/")
	r.Kill()
	underLoad(s, func() {
		eventually(t, 10*time.Second, "a line that it is down", func() bool { return len(logged(t, downLine)) > 0 })
		r.Restart()
		eventually(t, 10*time.Second, "the store's return", func() bool { return len(logged(t, upLine)) > 0 })
		before := decisions(r)
		eventually(t, 10*time.Second, "decisions by Redis", func() bool { return decisions(r) > before+50 })
	})
	if n := len(connections(r)); n > 8 {
		t.Errorf("%d connections, want at most a pool of them", n)
	}
	if down, up := logged(t, downLine), logged(t, upLine); len(down) != 1 || len(up) != 1 {
		t.Errorf("%d lines that it went down, %d that it came back, want one each", len(down), len(up))
	}
}

// F41: a primary that is a replica for a moment is waited for.
func TestF41_ReadOnlyForAMoment(t *testing.T) {
	r := redistest.Start(t)
	s := serve(t, sharing(r.Addr, patient, "zone z 10/1h"))
	s.pass(1, "/")
	r.Do("replicaof", "127.0.0.1", redistest.FreePort(t))
	answered := make(chan answer)
	go func() {
		a, _ := s.try(http.MethodGet, "/")
		answered <- a
	}()
	eventually(t, 5*time.Second, "a refused write", func() bool { return strings.Contains(r.Do("info", "errorstats").(string), "errorstat_READONLY") })
	r.Do("replicaof", "no", "one")
	if a := <-answered; a.Response == nil || a.StatusCode != 200 || a.left("z") != 8 {
		t.Error(a)
	}
	if lines := logged(t, downLine); len(lines) != 0 {
		t.Error(lines)
	}
}

// F42: no Redis is needed to validate a config.
func TestF42_ValidateNeedsNoRedis(t *testing.T) {
	bin, err := caddyBinary()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "Caddyfile")
	config := "{\n skip_install_trust\n rate_limit {\n redis 127.0.0.1:" + redistest.FreePort(t) + "\n}\n}\n:0 {\n rate_limit 1/1s\n}\n"
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "validate", "--config", file, "--adapter", "caddyfile")
	cmd.Env = append(os.Environ(), "XDG_DATA_HOME="+t.TempDir(), "XDG_CONFIG_HOME="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "Valid configuration") || strings.Contains(string(out), "shared store") {
		t.Errorf("%v\n%s", err, out)
	}
}

// The rights that docs/redis.md names are enough for all that zones do (for the rest see package
// redisstore), for announcements and looks at the server.
func TestDocumentedRightsAreEnough(t *testing.T) {
	r := redistest.Start(t, "--maxmemory-policy", "allkeys-lru") // a warning shows that the settings were read
	r.Do(redistest.DocumentedUser(t, "docs/redis.md", "every server")...)
	s := serve(t, sharing(r.Addr, patient+"\nusername limiter\npassword word", "zone z 2/1h {\nban 1h 2h after 1/1h\n}\nzone q 10/s {\nqueue 5\n}\nzone c {\nconcurrency 2\n}"))
	s.pass(2, "/")
	s.refused("/")
	if a := s.refused("/"); !strings.Contains(a.body, "abnormal-usage") {
		t.Errorf("not banned: %s", a.body)
	}
	eventually(t, 10*time.Second, "a warning", func() bool { return strings.Contains(processLog.String(), "allkeys-lru") })
	eventually(t, 10*time.Second, "an announcement", func() bool { return r.Do("exists", "rate_limit:{fleet}:instances") == int64(1) })
	redistest.Denied(t, r)
}

// F43: a Redis that may forget counters is warned about at start, once.
func TestF43_EvictionIsWarnedAbout(t *testing.T) {
	r := redistest.Start(t, "--maxmemory-policy", "allkeys-lru")
	s := serve(t, sharing(r.Addr, patient, "zone z 10/1h"))
	warnings := func() (n int) {
		for line := range strings.Lines(processLog.String()) {
			if strings.Contains(line, "allkeys-lru") && strings.Contains(line, `"level":"warn"`) {
				n++
			}
		}
		return n
	}
	eventually(t, 10*time.Second, "a warning", func() bool { return warnings() > 0 })
	s.pass(3, "/")
	if n := warnings(); n != 1 {
		t.Errorf("%d warnings", n)
	}
}

// Operators are reminded while requests pass unlimited, and of how many.
func TestReminder(t *testing.T) {
	t.Cleanup(sluice.RemindEvery(20 * time.Millisecond))
	s := serve(t, sharing("127.0.0.1:"+redistest.FreePort(t), "timeout 2s", threeWays))
	const unlimited = 7
	s.pass(unlimited, "/a")
	s.pass(1, "/l")
	s.get("/d")
	sum := func() (n float64) {
		for _, line := range logged(t, remindLine) {
			if line["level"] != "error" || line["requests"].(float64) < 1 {
				t.Fatal(line)
			}
			n += line["requests"].(float64)
		}
		return n
	}
	eventually(t, 10*time.Second, "reminders of all requests", func() bool { return sum() == unlimited })
	s.pass(1, "/a")
	eventually(t, 10*time.Second, "another reminder", func() bool { return sum() == unlimited+1 })
}

// Clients that leave while Redis is asked have asked all the same: they are counted there, and are
// no failure.
func TestClientsThatLeaveAreCounted(t *testing.T) {
	const clients = 5
	r := redistest.Start(t)
	way := slowDown(t, r.Addr)
	reachedCount.Store(0)
	s := serve(t, sharingSite(way.addr, patient, "route {\n reached\n rate_limit {\n zone a 10/1h {\n on_store_error allow\n}\n}\n respond ok\n}"))
	s.pass(1, "/")
	way.delay.Store(int64(100 * time.Millisecond))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range clients {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.addr()+"/", nil)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			if resp, err := s.client.Do(req); err == nil {
				resp.Body.Close()
			}
		})
	}
	eventually(t, 5*time.Second, "the requests", func() bool { return reachedCount.Load() == 1+clients })
	cancel()
	wg.Wait()
	series := `caddy_rate_limit_decisions_total{result="passed",store="redis",zone="a"}`
	eventually(t, 5*time.Second, "the decisions", func() bool { return s.metric(series) == 1+clients })
	if n := s.metric(`caddy_rate_limit_fallback_requests_total{mode="allow",zone="a"}`); n > 0 {
		t.Errorf("%v requests fell back", n)
	}
	way.delay.Store(0)
	if left := s.get("/").left("a"); left != 10-2-clients {
		t.Errorf("%d left, want %d", left, 10-2-clients)
	}
}

// secretOf is what must not be shown.
const secretOf = "hunter2-is-secret"

// No log line and no error shows a secret, whatever goes wrong.
func TestSecretsAreNotShown(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte(secretOf), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SLUICE_TEST_SECRET", secretOf)
	r := redistest.StartWith(t, redis.Options{Password: "right"}, "--requirepass", "right")
	for name, c := range map[string]struct{ addr, settings string }{
		"environment": {r.Addr, "password {env.SLUICE_TEST_SECRET}"},
		"file":        {r.Addr, "password {file." + file + "}"},
		"user":        {r.Addr, "username nobody\npassword {env.SLUICE_TEST_SECRET}"},
		"url":         {"redis://:{env.SLUICE_TEST_SECRET}@" + r.Addr, ""},
		"plain":       {"redis://nobody:" + secretOf + "@" + r.Addr + "/3", ""},
		"nobody":      {"redis://:" + secretOf + "@127.0.0.1:" + redistest.FreePort(t), ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, sharing(c.addr, c.settings, "zone z 10/1h"))
			eventually(t, 5*time.Second, "a line that it is down", func() bool { return len(logged(t, downLine)) > 0 })
			s.pass(1, "/")
			for line := range strings.Lines(processLog.String()) {
				if strings.Contains(line, secretOf) {
					t.Error(line)
				}
			}
			if strings.Contains(s.metrics(), secretOf) {
				t.Error("a metric shows it")
			}
		})
	}
	for name, c := range map[string]struct{ addr, settings string }{
		"database":   {"redis://:" + secretOf + "@localhost/x", ""},
		"two places": {"redis://:" + secretOf + "@localhost", "password {env.SLUICE_TEST_SECRET}"},
		"sentinel":   {"redis://:" + secretOf + "@localhost", "mode sentinel\nmaster_name m"},
		"not a URL":  {"redis://:" + secretOf + "@%zz", ""},
		"port":       {"redis://:" + secretOf + "@localhost:port", ""},
		"db":         {"localhost", "db {env.SLUICE_TEST_SECRET}"},
	} {
		err := newServer(t).load(sharing(c.addr, c.settings, "zone z 10/1h"))
		if err == nil || strings.Contains(err.Error(), secretOf) && name != "db" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A cost that is within the limit and above the share passes again when the store is back, and not
// never.
func TestCostAboveTheShare(t *testing.T) {
	site := "zone z 10/1m {\n cost {header.X-Cost}\n}"
	s := serve(t, strings.Replace(sharing("127.0.0.1:"+redistest.FreePort(t), "timeout 300ms", site), "\trate_limit {\n", "\trate_limit {\n\t\tfleet_size 4\n", 1))
	for cost, want := range map[string]int{"5": 2, "10": 2, "11": -1} {
		if a := s.refused("/", "X-Cost", cost); s.wait(a) != want || a.left("z") != 2 {
			t.Errorf("cost %s: want Retry-After %d: %v", cost, want, a.Header)
		}
	}
	s.pass(1, "/", "X-Cost", "1")
	if a := s.refused("/", "X-Cost", "5"); s.wait(a) < 50 { // never earlier than t
		t.Error(a.Header)
	}
}

// While Redis is down a client that it refused before is answered as its zone chose, but for a ban;
// and if it comes back empty the limit begins afresh.
func TestRefusedClientsInAnOutage(t *testing.T) {
	r := redistest.Start(t)
	zone := func(mode string) string {
		return "zone " + mode + " 1/1h {\nkey {header.X-Key}\nmatch {\npath /" + mode + "\n}\non_store_error " + mode + "\n}\n"
	}
	banned := "zone banned 1/1h {\nkey {header.X-Key}\nmatch {\npath /banned\n}\non_store_error allow\nban 2h after 1/1h\n}\n"
	s := serve(t, sharing(r.Addr, patient, zone("allow")+zone("deny")+zone("local")+banned))
	paths := []string{"/allow", "/deny", "/local", "/banned"}
	for _, path := range paths {
		s.pass(1, path, "X-Key", "k")
		s.refused(path, "X-Key", "k")
		s.refused(path, "X-Key", "k")
	}
	r.Kill()
	eventually(t, 10*time.Second, "word of the outage", func() bool {
		s.get("/allow", "X-Key", "other")
		return s.metric(`caddy_rate_limit_store_up{store="redis"}`) == 0
	})
	for i, want := range []int{200, 503, 200, 429} {
		if a := s.get(paths[i], "X-Key", "k"); a.StatusCode != want {
			t.Errorf("%s while Redis is down: %s, want %d", paths[i], a.Status, want)
		}
	}
	r.Restart()
	eventually(t, 10*time.Second, "its return", func() bool {
		s.get("/allow", "X-Key", "other")
		return s.metric(`caddy_rate_limit_store_up{store="redis"}`) == 1
	})
	for _, path := range paths[:3] {
		if a := s.get(path, "X-Key", "k"); a.StatusCode != 200 {
			t.Errorf("%s after a restart of Redis: %s", path, a.Status)
		}
	}
}
