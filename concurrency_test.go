package sluice_test

// Requests in flight: a lease for each, given back once, whatever becomes of the request.

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func (s *server) inFlight(zone string) int {
	return int(s.metric(`caddy_rate_limit_in_flight{zone="` + zone + `"}`))
}

// idle waits until no request holds a lease of the zone.
func (s *server) idle(zone string) {
	s.t.Helper()
	eventually(s.t, 10*time.Second, "no lease is held", func() bool { return s.inFlight(zone) == 0 })
}

// admits wants the next request to pass. In Redis leases are given back in the background.
func (s *server) admits(path string, header ...string) {
	s.t.Helper()
	eventually(s.t, 5*time.Second, path+" is admitted", func() bool { return s.get(path, header...).StatusCode == 200 })
}

// holding is an upstream that begins a response at once and ends it when it is told to, or when its
// client goes.
type holding struct {
	dial string
	end  chan struct{} // one for each response
	now  atomic.Int64  // responses that have begun
}

func hold(t testing.TB) *holding {
	h := &holding{end: make(chan struct{})}
	h.dial = upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/hold" {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		h.now.Add(1)
		defer h.now.Add(-1)
		fmt.Fprint(w, "data: begun\n\n")
		w.(http.Flusher).Flush()
		select {
		case <-h.end:
			fmt.Fprint(w, "data: ended\n\n")
		case <-r.Context().Done():
		}
	})
	return h
}

// begin asks for a response that does not end by itself, and returns when it has begun. In Redis
// the lease of a request that is over may not be back yet.
func (s *server) begin(header ...string) (resp *http.Response) {
	s.t.Helper()
	req, err := http.NewRequest(http.MethodGet, "http://"+s.addr()+"/hold", nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	eventually(s.t, 5*time.Second, "the response begins", func() bool {
		if resp, err = s.client.Do(req); err != nil {
			s.t.Fatal(err)
		}
		if resp.StatusCode != 200 {
			resp.Body.Close()
		}
		return resp.StatusCode == 200
	})
	s.t.Cleanup(func() { resp.Body.Close() })
	if line, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
		s.t.Fatal(line, err)
	}
	return resp
}

// A WebSocket holds its lease until it is closed, by whichever side, and gives it back once.
func TestF51WebSocketHoldsItsLease(t *testing.T) {
	for options, wait := range map[string]int{"concurrency 1": -1, "concurrency 1 retry_after 7s": 7} {
		t.Run(options, func(t *testing.T) {
			onStores(t, func(t *testing.T, st *stage) {
				s := serve(t, st.zones("zone c"+everyone+options+"\n}", echo(t)))
				for _, close := range []func(net.Conn){
					func(c net.Conn) { c.Close() },
					func(c net.Conn) { // Caddy passes a side's end on, and waits for the other's
						fmt.Fprintln(c, "bye")
						if rest, err := io.ReadAll(c); err != nil || len(rest) > 0 {
							t.Errorf("%q %v", rest, err)
						}
						c.Close()
					},
				} {
					var conn net.Conn
					var r *bufio.Reader
					var resp *http.Response
					eventually(t, 5*time.Second, "the connection is upgraded", func() bool {
						conn, r, resp = s.upgrade()
						return resp.StatusCode == 101
					})
					if got := resp.Header.Get("Ratelimit-Policy") + " " + resp.Header.Get("Ratelimit"); got != `"c";q=1;qu="concurrent-requests" "c";r=0` {
						t.Error(got)
					}
					for range 3 {
						a := s.refused("/")
						if s.wait(a) != wait || a.Header.Get("Ratelimit") != `"c";r=0` || !strings.Contains(a.body, `["c"]`) {
							t.Error(a.Header, a.body)
						}
					}
					fmt.Fprintln(conn, "still there")
					if line, err := r.ReadString('\n'); err != nil || line != "echo still there\n" {
						t.Errorf("%q %v", line, err)
					}
					if n := s.inFlight("c"); n != 1 {
						t.Errorf("%d in flight", n)
					}
					close(conn)
					s.admits("/")
					s.idle("c")
				}
			})
		})
	}
}

// So does a stream of events.
func TestF51EventStreamHoldsItsLease(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		up := hold(t)
		s := serve(t, st.zones("zone c {\n key {header.X-User}\n concurrency 1\n}", up.dial))
		ending := map[string]func(*http.Response){
			"the upstream ends": func(resp *http.Response) {
				up.end <- struct{}{}
				if rest, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(rest), "ended") {
					t.Errorf("%q %v", rest, err)
				}
			},
			"the client leaves": func(resp *http.Response) { resp.Body.Close() },
		}
		for how, end := range ending {
			resp := s.begin("X-User", how)
			if a := s.refused("/hold", "X-User", how); s.wait(a) != -1 {
				t.Error(how, a.Header)
			}
			s.pass(1, "/", "X-User", "another")
			end(resp)
			s.admits("/", "X-User", how)
			s.idle("c")
		}
	})
}

// Ten thousand requests of 64 clients: never more than the limit in flight, and in the end none, so
// that exactly as many as the limit says can be again.
func TestConcurrentLeasesReturnToNone(t *testing.T) {
	const limit, requests, clients = 20, 10_000, 64
	onStores(t, func(t *testing.T, st *stage) {
		up := hold(t)
		s := serve(t, st.config(fmt.Sprintf("route {\nrate_limit {\nzone c"+everyone+"concurrency %d\n}\n}\ninside\nreverse_proxy %s\n}", limit, up.dial)))
		insideMost.Store(0)
		s.client.Transport.(*http.Transport).MaxIdleConnsPerHost = clients
		var (
			wg                    sync.WaitGroup
			next, passed, refused atomic.Int64
		)
		start := time.Now()
		for range clients {
			wg.Go(func() {
				for next.Add(1) <= requests {
					a, err := s.try(http.MethodGet, "/")
					switch {
					case err != nil:
						t.Error(err)
						return
					case a.StatusCode == 200:
						passed.Add(1)
					case a.StatusCode == 429:
						refused.Add(1)
					default:
						t.Error(a.Status)
					}
				}
			})
		}
		wg.Wait()
		t.Logf("%d passed, %d refused, at most %d in flight, %v", passed.Load(), refused.Load(), insideMost.Load(), time.Since(start))
		if passed.Load()+refused.Load() != requests || passed.Load() < limit || insideMost.Load() > limit {
			t.Errorf("%d passed, %d refused, %d at once", passed.Load(), refused.Load(), insideMost.Load())
		}
		s.idle("c")
		if st.redis != nil { // of a counter that nothing is left of Redis keeps none
			done := time.Now()
			eventually(t, 10*time.Second, "all leases are back", func() bool { return len(st.counters()) == 0 })
			t.Log("all leases were back", time.Since(done), "after the last answer")
		}
		for i := range limit {
			if resp := s.begin(); (answer{Response: resp}).left("c") != limit-1-i {
				t.Errorf("%d of %d in flight: %v", i+1, limit, resp.Header)
			}
		}
		s.refused("/")
		if n := s.inFlight("c"); n != limit {
			t.Errorf("%d in flight, want %d", n, limit)
		}
	})
}

// Modules of these tests: one counts who is behind it at a time, one ends requests in ways that few
// applications do.
type (
	inside struct{}
	badEnd struct {
		Way string `json:"way"`
	}
)

func init() {
	caddy.RegisterModule(new(inside))
	httpcaddyfile.RegisterHandlerDirective("inside", func(httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return new(inside), nil
	})
	caddy.RegisterModule(new(badEnd))
	httpcaddyfile.RegisterHandlerDirective("bad_end", func(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		h.Next()
		h.NextArg()
		return &badEnd{Way: h.Val()}, nil
	})
}

// How many are behind a handler inside, and the most that there were.
var insideNow, insideMost atomic.Int64

func (*inside) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.inside", New: func() caddy.Module { return new(inside) }}
}

func (*inside) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	now := insideNow.Add(1)
	defer insideNow.Add(-1)
	for most := insideMost.Load(); now > most && !insideMost.CompareAndSwap(most, now); most = insideMost.Load() {
	}
	return next.ServeHTTP(w, r)
}

func (*badEnd) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.bad_end", New: func() caddy.Module { return new(badEnd) }}
}

// ServeHTTP ends requests for /bad its way.
func (b *badEnd) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if r.URL.Path != "/bad" {
		return next.ServeHTTP(w, r)
	}
	switch b.Way {
	case "panic":
		panic("told to")
	case "abort":
		panic(http.ErrAbortHandler)
	case "hijack":
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return err
		}
		fmt.Fprint(conn, "HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
		return conn.Close()
	case "late":
		fmt.Fprint(w, "all is well, so far")
		return caddyhttp.Error(http.StatusTeapot, errors.New("told to"))
	case "error":
		return caddyhttp.Error(http.StatusTeapot, errors.New("told to"))
	}
	return errors.New("told to")
}

// Every way in which a request can end gives its lease back, once.
func TestLeaseIsGivenBackWhateverHappens(t *testing.T) {
	for _, way := range []string{"panic", "abort", "hijack", "error", "plain error"} {
		for _, site := range []string{"", "handle_errors {\n respond \"an error route\" 500\n}\n"} {
			t.Run(fmt.Sprint(way, site != ""), func(t *testing.T) {
				onStores(t, func(t *testing.T, st *stage) {
					s := serve(t, st.config("route {\nrate_limit {\nzone c"+everyone+"concurrency 1\n}\n}\nbad_end \""+way+"\"\nrespond ok\n}\n"+site))
					for range 3 {
						_, _ = s.try(http.MethodGet, "/bad") // an answer, or none
						s.admits("/")
						s.idle("c")
					}
					processLog.reset() // of panics
				})
			})
		}
	}
}

// An upstream that dies while it answers, and a client that is gone while it downloads more than
// any buffer holds.
func TestLeaseOfBrokenTransfers(t *testing.T) {
	dial := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/dies":
			w.Header().Set("Content-Length", "1000000")
			fmt.Fprint(w, "the beginning")
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		case "/endless":
			chunk := make([]byte, 64<<10)
			for {
				if _, err := w.Write(chunk); err != nil {
					return
				}
			}
		}
	})
	onStores(t, func(t *testing.T, st *stage) {
		s := serve(t, st.zones("zone c"+everyone+"concurrency 1\n}", dial))
		for range 3 {
			eventually(t, 5*time.Second, "the upstream dies", func() bool {
				a, err := s.try(http.MethodGet, "/dies")
				if err == nil && a.StatusCode != 429 { // the lease of the one before may not be back yet
					t.Errorf("a response of %d bytes from an upstream that died", len(a.body))
				}
				return err != nil
			})
			s.admits("/")
			s.idle("c")
			var resp *http.Response
			eventually(t, 5*time.Second, "the download begins", func() (begun bool) {
				var err error
				if resp, err = s.client.Get("http://" + s.addr() + "/endless"); err != nil {
					t.Fatal(err)
				}
				if begun = resp.StatusCode == 200; !begun {
					resp.Body.Close()
				}
				return begun
			})
			if _, err := io.CopyN(io.Discard, resp.Body, 1<<20); err != nil {
				t.Fatal(err)
			}
			s.refused("/")
			resp.Body.Close()
			s.admits("/")
			s.idle("c")
		}
	})
}

// A limit beside: both are told, and of a request that is over only the lease comes back.
func TestConcurrencyBesideLimit(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		up := hold(t)
		s := serve(t, st.zones("zone c 3/1h {\n key everyone\n concurrency 1\n}", up.dial))
		resp := s.begin()
		policy, limit := resp.Header.Get("Ratelimit-Policy"), resp.Header.Get("Ratelimit")
		t.Log(policy, limit)
		if !strings.Contains(policy, `;q=3;w=3600`) || !strings.Contains(policy, `;q=1;qu="concurrent-requests"`) || !strings.Contains(limit, `;r=2`) || !strings.Contains(limit, `;r=0`) {
			t.Error(policy, limit)
		}
		a := s.refused("/") // for the lease: nothing is taken from the limit, and no wait is known
		if s.wait(a) != -1 || !strings.Contains(a.Header.Get("Ratelimit"), ";r=2") {
			t.Error(a.Header, a.body)
		}
		resp.Body.Close()
		s.admits("/")
		s.idle("c")
		s.admits("/")
		s.idle("c")
		if st.redis != nil { // there the lease is back a moment after its request
			eventually(t, 5*time.Second, "the lease is back", func() bool {
				return !slices.ContainsFunc(st.counters(), func(key string) bool { return strings.Contains(key, ":concurrency:") })
			})
		}
		// Of the three units none is left, of the one lease one is.
		a = s.refused("/")
		if wait := s.wait(a); wait < 3590 || wait > 3600 || !strings.Contains(a.Header.Get("Ratelimit"), ";r=0") || !strings.Contains(a.Header.Get("Ratelimit"), ";r=1") {
			t.Error(a.Header, a.body)
		}
		if n := s.inFlight("c"); n != 0 {
			t.Errorf("%d in flight", n)
		}
	})
}

// Leases in two zones of which one refuses: nothing stays in flight, whether one handler asks or
// two do.
func TestF32LeasesInTwoZones(t *testing.T) {
	const wide, narrow = "zone wide {\n key everyone\n concurrency 5\n}\n", "zone narrow {\n key everyone\n concurrency 1\n}\n"
	for name, handlers := range map[string]string{
		"one handler":  "rate_limit {\n" + wide + narrow + "}\n",
		"two handlers": "rate_limit {\n" + wide + "}\nrate_limit {\n" + narrow + "}\n",
	} {
		t.Run(name, func(t *testing.T) {
			onStores(t, func(t *testing.T, st *stage) {
				up := hold(t)
				s := serve(t, st.config("route {\n"+handlers+"reverse_proxy "+up.dial+"\n}"))
				resp := s.begin()
				for range 10 {
					s.refused("/")
				}
				eventually(t, 5*time.Second, "only the one that lives is in flight", func() bool {
					return s.inFlight("wide") == 1 && s.inFlight("narrow") == 1
				})
				resp.Body.Close()
				s.admits("/")
				s.idle("wide")
				s.idle("narrow")
				var left int
				eventually(t, 5*time.Second, "all leases are back", func() bool {
					left = s.get("/").left("wide")
					return left == 4
				})
			})
		})
	}
}

// A request that comes to its rule again, after a rewrite, an error or a retry, holds one lease and
// one unit of it.
func TestF29LeaseAndReserveOnce(t *testing.T) {
	var fails atomic.Int64
	up := hold(t)
	flaky := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if fails.Add(-1) >= 0 {
			panic(http.ErrAbortHandler)
		}
	})
	onStores(t, func(t *testing.T, st *stage) {
		s := serve(t, strings.Replace(st.config(`
			handle /retried {
				invoke limited
				reverse_proxy `+flaky+` {
					lb_retries 3
					lb_try_interval 1ms
				}
			}
			handle {
				route {
					invoke limited
					invoke limited
					reverse_proxy `+up.dial+`
				}
			}
			handle_errors {
				invoke limited
				respond "an error route"
			}`), ":80 {", "&(limited) {\n rate_limit {\n zone c 100/365d {\n key everyone\n concurrency 2\n }\n }\n}\n:80 {", 1))
		resp := s.begin()
		if n := s.inFlight("c"); n != 1 {
			t.Errorf("%d in flight", n)
		}
		resp.Body.Close()
		s.idle("c")
		fails.Store(2)
		if a := s.get("/retried"); !strings.Contains(a.Header.Get("Ratelimit"), ";r=98") || fails.Load() >= 0 {
			t.Error(a.Status, a.Header, fails.Load())
		}
		s.idle("c")
	})
}

// Reloads do not free what is in flight, and do not forget to when it is over.
func TestLeaseOverReload(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		up := hold(t)
		config := func(lease string) string {
			return st.zones("zone c"+everyone+"concurrency 1 lease "+lease+"\n}", up.dial)
		}
		s := serve(t, config("30s"))
		resp := s.begin()
		s.mustLoad(config("30s"))
		s.refused("/")
		if st.redis == nil { // a lease in this process never ends by itself, so that another length is not another counter
			s.mustLoad(config("60s"))
			s.refused("/")
		}
		if n := s.inFlight("c"); n != 1 {
			t.Errorf("%d in flight", n)
		}
		resp.Body.Close()
		s.admits("/")
		s.idle("c")
	})
}

// A dry run, and a key that is not enforced yet, count what is in flight and hold nobody.
func TestConcurrencyDryRun(t *testing.T) {
	for _, options := range []string{"dry_run", "enforce 0%"} {
		t.Run(options, func(t *testing.T) {
			onStores(t, func(t *testing.T, st *stage) {
				up := hold(t)
				s := serve(t, st.zones("zone c"+everyone+"concurrency 1\n "+options+"\n}", up.dial))
				resp := s.begin()
				s.pass(3, "/")
				if n := s.decided("c", "rejected_dry_run"); n != 3 || s.inFlight("c") != 1 {
					t.Errorf("%d would have been refused, %d in flight", n, s.inFlight("c"))
				}
				resp.Body.Close()
				s.idle("c")
				eventually(t, 5*time.Second, "one would pass", func() bool { s.pass(1, "/"); return s.decided("c", "passed_dry_run") == 2 })
			})
		})
	}
}

// F28: a wildcard site is one counter over all hosts, unless the key has the host.
func TestF28LeasesOfWildcardSite(t *testing.T) {
	for key, want := range map[string]int{"everyone": 429, "{host}": 200} {
		t.Run(key, func(t *testing.T) {
			onStores(t, func(t *testing.T, st *stage) {
				up := hold(t)
				s := serve(t, strings.Replace(st.zones("zone c {\n key "+key+"\n concurrency 1\n}", up.dial), ":80 {", "http://*.a.test:80 {", 1))
				req, err := http.NewRequest(http.MethodGet, "http://"+s.addr()+"/hold", nil)
				if err != nil {
					t.Fatal(err)
				}
				req.Host = "one.a.test"
				resp, err := s.client.Do(req)
				if err != nil || resp.StatusCode != 200 {
					t.Fatal(resp, err)
				}
				defer resp.Body.Close()
				if a := s.get("/", "Host", "two.a.test"); a.StatusCode != want {
					t.Errorf("another host: %s, want %d", a.Status, want)
				}
				s.refused("/", "Host", "one.a.test")
			})
		})
	}
}

// An instance that is killed takes its leases along: in its own memory at once, in Redis after the
// lease time.
func TestLeasesOfKilledInstance(t *testing.T) {
	const leases = 5
	onStores(t, func(t *testing.T, st *stage) {
		up := hold(t)
		start := func() (p *process, url string) {
			port := freePort(t)
			site := fmt.Sprintf("http://:%d {\n rate_limit {\n zone c"+everyone+"concurrency %d lease 3s\n }\n }\n reverse_proxy %s\n}\n", port, leases, up.dial)
			return startCaddyWith(t, st.globals(), site), fmt.Sprintf("http://127.0.0.1:%d", port)
		}
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}
		status := func(url string) int {
			resp, _ := get(t, client, url)
			return resp.StatusCode
		}
		first, url := start()
		for range leases {
			resp, err := client.Get(url + "/hold")
			if err != nil || resp.StatusCode != 200 {
				t.Fatal(resp, err)
			}
			defer resp.Body.Close()
		}
		_, other := start()
		// As long as they live they hold, also longer than a lease lasts: it is renewed.
		for begin := time.Now(); time.Since(begin) < 4*time.Second && st.redis != nil; time.Sleep(10 * time.Millisecond) {
			if a, b := status(url), status(other); a != 429 || b != 429 {
				t.Fatalf("after %v: %d and %d, want two refusals", time.Since(begin), a, b)
			}
		}
		if got := status(url); got != 429 {
			t.Error(got)
		}
		if err := first.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		killed := time.Now()
		eventually(t, 20*time.Second, "the leases of the dead are free", func() bool { return status(other) == 200 })
		t.Logf("free %v after the kill", time.Since(killed))
		if took := time.Since(killed); st.redis != nil && took > 10*time.Second {
			t.Errorf("free after %v, want about 3s", took)
		}
	})
}

// A zone that no config names is forgotten. If it comes back, what was in flight before frees
// nobody else's lease when it ends.
func TestLeaseOfForgottenZone(t *testing.T) {
	c := useClock(t)
	up := hold(t)
	with := new(stage).zones("zone c"+everyone+"concurrency 1\n}", up.dial)
	s := serve(t, with)
	old := s.begin()
	s.mustLoad(new(stage).config("reverse_proxy " + up.dial))
	s.pass(1, "/")
	c.add(time.Second)
	s.mustLoad(with)
	s.begin()
	s.refused("/")
	c.add(time.Second)
	old.Body.Close()
	eventually(t, 5*time.Second, "the old one has ended", func() bool { return up.now.Load() == 1 })
	for range 20 {
		s.refused("/")
	}
	if n := s.inFlight("c"); n != 1 {
		t.Errorf("%d in flight", n)
	}
}

// Two handlers that name one zone hold two leases of it. Where there is one only, nothing can pass,
// and the load says so; what a request costs has nothing to do with it.
func TestF33LeasesByTwoRules(t *testing.T) {
	const warning = "a request that meets all rules of this zone can never pass, because together they take more than it holds"
	for leases, want := range map[int]int{1: 429, 2: 200} {
		t.Run(fmt.Sprint(leases), func(t *testing.T) {
			onStores(t, func(t *testing.T, st *stage) {
				up := hold(t)
				rule := fmt.Sprintf("rate_limit {\nzone c 100/1h"+everyone+"cost 5\n concurrency %d\n}\n}\n", leases)
				s := serve(t, st.config("route {\n"+rule+rule+"reverse_proxy "+up.dial+"\n}"))
				if n := len(logged(t, warning)); n != 2-leases {
					t.Errorf("%d warnings at load", n)
				}
				if a := s.get("/"); a.StatusCode != want || want == 429 && s.wait(a) != -1 {
					t.Error(a.Status, a.Header)
				}
				s.idle("c")
			})
		})
	}
}

// No wait is known for a lease, and none is made up: not in placeholders, nor in the older fields.
func TestConcurrencyTellsNoWait(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		up := hold(t)
		s := serve(t, st.config("rate_limit {\nzone c"+everyone+"concurrency 1\n}\nheaders ietf draft6 x\n}\nreverse_proxy "+up.dial+
			"\nhandle_errors {\n respond <{http.rate_limit.exceeded.retry_after}|{http.rate_limit.c.reset}|{http.rate_limit.c.remaining}|{http.rate_limit.c.limit}|{http.rate_limit.c.delay}>\n}"))
		resp := s.begin()
		a := s.refused("/")
		if a.body != "<||0|1|0>" {
			t.Error(a.body)
		}
		for _, header := range []http.Header{resp.Header, a.Header} {
			for name, values := range header {
				if strings.Contains(name, "Reset") || name == "Retry-After" || strings.Contains(name, "limit") && strings.Contains(values[0], "t=") {
					t.Error("a wait is told:", name, values)
				}
			}
		}
		t.Log(a.Header)
	})
}

// A client that opens two zones' leases over HTTP/2 streams of one connection has as many as it has
// streams.
func TestConcurrencyOverHTTP2(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		up := hold(t)
		s := serve(t, st.zones("zone c {\n concurrency 2\n}", up.dial))
		s.client = h2c(t)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		for range 2 {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.addr()+"/hold", nil)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := s.client.Do(req)
			if err != nil || resp.ProtoMajor != 2 || resp.StatusCode != 200 {
				t.Fatal(resp, err)
			}
			defer resp.Body.Close()
		}
		s.refused("/")
		cancel() // resets both streams, on a connection that lives on
		s.admits("/")
		s.idle("c")
	})
}
