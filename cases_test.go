package sluice_test

// Cases from the field at the HTTP level. Each went wrong in some limiter that people run; the
// numbers are those of the project's list of them.

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Retry-After is a positive whole number of seconds, rounded up.
func TestF17RetryAfterRoundsUp(t *testing.T) {
	for window, want := range map[string]int{
		"1ms": 1, "1s": 1, "1.2s": 2, "3s": 3, "59.000001s": 60, "60s": 60, "1d": 86400,
	} {
		t.Run(window, func(t *testing.T) {
			useClock(t)
			s := serve(t, ":80 {\n rate_limit 1/"+window+"\n respond ok\n}")
			s.pass(1, "/")
			if got := s.wait(s.refused("/")); got != want {
				t.Errorf("Retry-After: %d, want %d", got, want)
			}
		})
	}
}

// A client that waits exactly Retry-After is admitted, and so nobody waits for nothing.
func TestF17RetryAfterObeyedIsAdmitted(t *testing.T) {
	for _, algorithm := range []string{"sliding_log", "sliding_window", "fixed_window", "token_bucket", "leaky_bucket"} {
		t.Run(algorithm, func(t *testing.T) {
			c := useClock(t)
			s := serve(t, ":80 {\n rate_limit 3/7s {\n algorithm "+algorithm+"\n }\n respond ok\n}")
			passed := 0
			for range 50 {
				if a := s.get("/"); a.StatusCode == 200 {
					passed++
					continue
				} else if wait := s.wait(a); wait > 0 {
					c.add(time.Duration(wait) * time.Second)
				} else {
					t.Fatal("no Retry-After")
				}
				s.pass(1, "/")
			}
			if passed == 0 {
				t.Error("no request passed")
			}
		})
	}
}

func TestF18HeadersOffStillHasRetryAfter(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit 1/1h {\n headers off\n }\n respond ok\n}")
	if a := s.get("/"); a.StatusCode != 200 || len(a.Header["Ratelimit"]) > 0 || len(a.Header["Ratelimit-Policy"]) > 0 {
		t.Error(a.Status, a.Header)
	}
	a := s.refused("/")
	if wait := s.wait(a); wait < 3590 || wait > 3600 {
		t.Errorf("Retry-After: %d", wait)
	}
	if len(a.Header["Ratelimit"]) > 0 || len(a.Header["Ratelimit-Policy"]) > 0 || a.Header.Get("Cache-Control") != "no-store" {
		t.Error(a.Header)
	}
}

func TestF19UpstreamFieldSurvives(t *testing.T) {
	s := serve(t, `
:80 {
	rate_limit {
		zone ours 5/1h
	}
	reverse_proxy 127.0.0.1:81
}
:81 {
	header RateLimit "\"theirs\";r=2;t=9"
	header RateLimit-Policy "\"theirs\";q=3;w=10"
	respond ok
}`)
	a := s.get("/")
	if a.left("ours") != 4 || a.left("theirs") != 2 {
		t.Errorf("RateLimit: %q", a.Header["Ratelimit"])
	}
	if policy := strings.Join(a.Header["Ratelimit-Policy"], ", "); !strings.Contains(policy, `"ours";q=5;w=3600`) || !strings.Contains(policy, `"theirs";q=3;w=10`) {
		t.Errorf("RateLimit-Policy: %q", policy)
	}
}

// Same key, same limit: still two counters, unless the zone has the same name.
func TestF21Scope(t *testing.T) {
	t.Run("two zones", func(t *testing.T) {
		s := serve(t, ":80 {\n rate_limit {\n zone a 5/1h\n zone b 5/1h {\n match {\n path /b\n }\n }\n }\n respond ok\n}")
		s.pass(2, "/")
		if a := s.get("/b"); a.left("a") != 2 || a.left("b") != 4 {
			t.Error(a.Header)
		}
	})
	t.Run("two routes", func(t *testing.T) {
		s := serve(t, ":80 {\n handle /a {\n rate_limit 1/1h\n respond ok\n }\n handle /b {\n rate_limit 1/1h\n respond ok\n }\n}")
		s.pass(1, "/a")
		s.pass(1, "/b")
		s.refused("/a")
		s.refused("/b")
	})
	t.Run("two sites", func(t *testing.T) {
		s := serve(t, "http://a.test {\n rate_limit 1/1h\n respond ok\n}\nhttp://b.test {\n rate_limit 1/1h\n respond ok\n}")
		s.pass(1, "/", "Host", "a.test")
		s.pass(1, "/", "Host", "b.test")
		s.refused("/", "Host", "a.test")
		s.refused("/", "Host", "b.test")
	})
	t.Run("two sites, one name", func(t *testing.T) {
		site := " {\n rate_limit {\n zone one 2/1h\n }\n respond ok\n}\n"
		s := serve(t, "http://a.test"+site+"http://b.test"+site+":81"+site)
		s.pass(1, "/", "Host", "a.test")
		s.pass(1, "/", "Host", "b.test")
		s.refused("/", "Host", "a.test")
		resp, _ := get(t, s.client, "http://"+s.address("81"))
		if resp.StatusCode != 429 {
			t.Error("the site at another port does not share the zone:", resp.Status)
		}
	})
}

// proxied is a config in which tests say who the client is, as a trusted proxy does.
const proxied = `
{
	servers {
		trusted_proxies static 127.0.0.0/8
	}
}
`

func TestF24AddressForms(t *testing.T) {
	s := serve(t, proxied+":80 {\n rate_limit 1/1h\n respond ok\n}")
	for _, same := range [][]string{
		{"1.2.3.4", "::ffff:1.2.3.4", "::ffff:102:304"},
		{"2001:db8::1", "2001:db8::2", "2001:0DB8:0:0:ffff::9", "2001:db8::1%eth0"},
		{"2001:db8:0:1::1", "2001:db8:0:1:8000::"},
		{"1.2.3.5"},
	} {
		for i, ip := range same {
			if a := s.get("/", "X-Forwarded-For", ip); (a.StatusCode == 200) != (i == 0) {
				t.Errorf("%s of %q: %d", ip, same, a.StatusCode)
			}
		}
	}
}

func TestF25WhoTheClientIs(t *testing.T) {
	const site = ":80 {\n rate_limit {\n zone z 1/1h\n log_key\n }\n respond ok\n}"
	t.Run("untrusted peer", func(t *testing.T) {
		s := serve(t, site)
		s.pass(1, "/", "X-Forwarded-For", "1.1.1.1, 2.2.2.2")
		s.refused("/", "X-Forwarded-For", "3.3.3.3")
		if lines := logged(t, "rate limit exceeded"); len(lines) != 1 || lines[0]["key"] != "127.0.0.1" {
			t.Error(lines)
		}
	})
	for globals, want := range map[string]string{
		"trusted_proxies static 127.0.0.0/8":                               "1.1.1.1",
		"trusted_proxies static 127.0.0.0/8\n trusted_proxies_strict":      "2.2.2.2",
		"trusted_proxies static 127.0.0.0/8\n client_ip_headers X-Real-Ip": "4.4.4.4",
	} {
		t.Run(want, func(t *testing.T) {
			s := serve(t, "{\n servers {\n "+globals+"\n }\n}\n"+site)
			s.pass(1, "/", "X-Forwarded-For", "1.1.1.1, 2.2.2.2", "X-Real-Ip", "4.4.4.4")
			s.refused("/", "X-Forwarded-For", "1.1.1.1, 2.2.2.2", "X-Real-Ip", "4.4.4.4")
			s.pass(1, "/", "X-Forwarded-For", "3.3.3.3", "X-Real-Ip", "3.3.3.3")
			lines := logged(t, "rate limit exceeded")
			if len(lines) != 1 || lines[0]["key"] != want || lines[0]["remote_ip"] != "127.0.0.1" || lines[0]["client_ip"] != want {
				t.Error(lines)
			}
		})
	}
}

func TestF26HeaderValues(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {header.X-API-Key} 1/1h\n respond ok\n}")
	s.pass(1, "/", "X-API-Key", "a")
	s.refused("/", "x-aPi-kEy", "a")
	s.pass(1, "/", "X-Api-Key", "A")                   // values are compared as they are
	s.refused("/", "X-Api-Key", "a", "X-Api-Key", "b") // each value is charged, whichever the backend reads
	s.pass(1, "/", "X-Api-Key", "c", "x-api-key", "b")
	s.refused("/", "X-Api-Key", "b")
	// Absent and empty are the same: both fall back to the address.
	s.pass(1, "/")
	s.refused("/", "X-Api-Key", "")
	// And no value that a client sends is another client's fallback.
	s.pass(1, "/", "X-Api-Key", "127.0.0.1")
}

func TestF27OddBytes(t *testing.T) {
	s := serve(t, `
{
	servers {
		max_header_size 1MB
	}
}
:80 {
	log
	rate_limit {
		zone path 1/1h {
			key {path} {cookie.session} {query.q} {header.X-Odd}
		}
		log_key
		headers ietf draft6 x
	}
	respond {http.rate_limit.path.remaining}
}`)
	query := "/?" + strings.Repeat("q=1&", 10_000)
	for _, request := range [][]string{
		{"/%ff"}, {"/%00"}, {"/%ff%fe", "Cookie", "session=\xff\xfe"}, {"/", "X-Odd", "\xff\x80"}, {"/?q=%ff"}, {query},
	} {
		s.pass(1, request[0], request[1:]...)
		a := s.refused(request[0], request[1:]...)
		s.wait(a)
		for name, values := range a.Header {
			for _, v := range values {
				if strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r > '~' }) {
					t.Errorf("%q: header %s: %q", request, name, v)
				}
			}
		}
	}
	if n := len(logged(t, "rate limit exceeded")); n != 6 {
		t.Errorf("%d log lines of 6", n)
	}
	checkMetrics(t, s.metrics())
}

func TestF28WildcardSite(t *testing.T) {
	s := serve(t, "http://*.example.test {\n rate_limit {\n zone all 2/1h\n zone each 1/1h {\n key {host} {client_ip}\n }\n }\n respond ok\n}")
	s.pass(1, "/", "Host", "a.example.test")
	s.pass(1, "/", "Host", "b.example.test")
	if a := s.refused("/", "Host", "c.example.test"); a.left("all") != 0 || a.left("each") != 1 {
		t.Error("one zone and key over all hosts:", a.Header)
	}
	if a := s.refused("/", "Host", "A.Example.Test"); a.left("each") != 0 {
		t.Error("a host name in other letters is another counter:", a.Header)
	}
}

// A request that goes through a handler again, or to several upstreams, is one request.
func TestF29CountedOnce(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"index.html", "error.html"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const named = "&(limited) {\n rate_limit {\n zone once 100/1h\n }\n}\n"
	const limit = "rate_limit {\n zone once 100/1h\n }\n"
	for name, config := range map[string]string{
		"rewrite":           ":80 {\n " + limit + " rewrite * /other\n handle /other {\n uri replace other again\n respond ok\n }\n}",
		"try_files":         ":80 {\n root " + dir + "\n " + limit + " try_files {path} /nothing /index.html\n file_server\n}",
		"handle_errors":     named + ":80 {\n route {\n invoke limited\n error 404\n }\n handle_errors {\n invoke limited\n rewrite * /error.html\n root " + dir + "\n file_server {\n status 200\n }\n }\n}",
		"invoke twice":      named + ":80 {\n route {\n invoke limited\n invoke limited\n invoke limited\n respond ok\n }\n}",
		"handle_response":   named + ":80 {\n route {\n invoke limited\n reverse_proxy 127.0.0.1:81 {\n @gone status 410\n handle_response @gone {\n invoke limited\n respond ok\n }\n }\n }\n}\n:81 {\n respond 410\n}",
		"intercept":         named + ":80 {\n route {\n invoke limited\n intercept {\n @gone status 410\n handle_response @gone {\n invoke limited\n respond ok 200\n }\n }\n respond 410\n }\n}",
		"retries":           ":80 {\n " + limit + " reverse_proxy 127.0.0.1:1 127.0.0.1:81 {\n lb_policy round_robin\n lb_try_duration 5s\n lb_try_interval 1ms\n }\n}\n:81 {\n respond ok\n}",
		"internal redirect": ":80 {\n " + limit + " route {\n reverse_proxy 127.0.0.1:81 {\n @accel header X-Accel-Redirect *\n handle_response @accel {\n rewrite * {rp.header.X-Accel-Redirect}\n root " + dir + "\n file_server\n }\n }\n }\n}\n:81 {\n header X-Accel-Redirect /index.html\n respond ok\n}",
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, config)
			for i := range 3 {
				a := s.get("/")
				if a.StatusCode != 200 || a.left("once") != 99-i || len(a.Header["Ratelimit"]) != 1 {
					t.Fatalf("request %d: %d, RateLimit %q", i+1, a.StatusCode, a.Header["Ratelimit"])
				}
			}
		})
	}
}

// The upstream is dead for good: the retries of one request are one request, too.
func TestF29DeadUpstream(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone once 100/1h\n }\n reverse_proxy 127.0.0.1:1 {\n lb_try_duration 60ms\n lb_try_interval 5ms\n }\n}")
	for i := range 2 {
		if a := s.get("/"); a.StatusCode != 502 || a.left("once") != 99-i {
			t.Errorf("%d %v", a.StatusCode, a.Header)
		}
	}
}

// The refused request itself comes back through the error route that answers it.
func TestF29RefusedWithinErrorRoute(t *testing.T) {
	s := serve(t, `
&(limited) {
	rate_limit {
		zone once 1/1h
	}
}
:80 {
	route {
		invoke limited
		respond ok
	}
	handle_errors {
		invoke limited
		respond "sorry: {err.status_code}"
	}
}`)
	s.pass(1, "/")
	if a := s.refused("/"); a.body != "sorry: 429" || s.wait(a) < 3500 || len(a.Header["Ratelimit"]) != 1 {
		t.Errorf("%q %v", a.body, a.Header)
	}
}

func TestF30RefusalLeavesGroupLimit(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone group 10/1h\n zone special 3/1h\n }\n respond ok\n}")
	s.pass(3, "/")
	for range 2 {
		if a := s.refused("/"); a.left("group") != 7 || a.left("special") != 0 {
			t.Error(a.Header)
		}
	}
}

// 5/s with 10/s offered for 10 s: refused requests do not count. A token bucket that was full has
// its burst of 5 on top.
func TestF31SteadyOverload(t *testing.T) {
	for algorithm, want := range map[string][2]int{
		"sliding_log": {50, 51}, "fixed_window": {50, 51}, "token_bucket": {50, 55}, "leaky_bucket": {50, 51}, "sliding_window": {39, 43},
	} {
		t.Run(algorithm, func(t *testing.T) {
			c := useClock(t)
			s := serve(t, ":80 {\n rate_limit 5/1s {\n algorithm "+algorithm+"\n }\n respond ok\n}")
			passed := 0
			for range 100 {
				if s.get("/").StatusCode == 200 {
					passed++
				}
				c.add(100 * time.Millisecond)
			}
			if passed < want[0] || passed > want[1] {
				t.Errorf("%d passed, want %d to %d", passed, want[0], want[1])
			}
		})
	}
}

func TestF32OneOfThreeRefuses(t *testing.T) {
	c := useClock(t)
	s := serve(t, ":80 {\n rate_limit {\n zone day 100/1d\n zone burst 2/10s\n zone hour 50/1h {\n algorithm token_bucket\n }\n }\n respond ok\n}")
	s.pass(2, "/")
	c.add(3 * time.Second)
	for range 3 {
		a := s.refused("/")
		if a.left("day") != 98 || a.left("burst") != 0 || a.left("hour") != 48 || s.wait(a) != 7 {
			t.Error(a.Header)
		}
		if !strings.Contains(a.body, `"violated-policies":["burst"]`) {
			t.Error(a.body)
		}
	}
}

// Two handlers that name one zone charge a request twice.
func TestF33TwoRulesOneZone(t *testing.T) {
	config := func(limit string) string {
		zone := "rate_limit {\n zone twice " + limit + "\n }\n"
		return ":80 {\n route {\n " + zone + zone + " respond ok\n }\n}"
	}
	const warning = "a request that meets all rules of this zone can never pass, because together they take more than it holds"
	t.Run("never", func(t *testing.T) {
		s := serve(t, config("1/1h"))
		if len(logged(t, warning)) != 1 {
			t.Error("no warning at load")
		}
		for range 3 {
			a := s.refused("/")
			if s.wait(a) != -1 {
				t.Errorf("Retry-After %q though it can never pass", a.Header["Retry-After"])
			}
		}
	})
	for algorithm, want := range map[string]time.Duration{
		"sliding_log": time.Hour - 10*time.Second, "token_bucket": 40*time.Minute - 10*time.Second,
	} {
		t.Run(algorithm, func(t *testing.T) {
			c := useClock(t)
			s := serve(t, config("3/1h {\n algorithm "+algorithm+"\n }"))
			if len(logged(t, warning)) != 0 {
				t.Error("a warning without need")
			}
			s.pass(1, "/")
			c.add(10 * time.Second)
			a := s.refused("/")
			if got := time.Duration(s.wait(a)) * time.Second; got != want {
				t.Fatalf("Retry-After %v, want %v, when there is room for both charges", got, want)
			}
			c.add(want)
			s.pass(1, "/")
			// Now it is the first of the two handlers that refuses, and its wait must be for both
			// as well.
			for {
				if a = s.refused("/"); s.wait(a) < 0 {
					t.Fatal("no Retry-After")
				} else if a.left("twice") == 0 {
					break
				}
			}
			c.add(time.Duration(s.wait(a)) * time.Second)
			s.pass(1, "/")
		})
	}
}

// Two handlers that name one zone with other keys share the zone, not a counter.
func TestF33TwoRulesOneZoneOtherKeys(t *testing.T) {
	s := serve(t, `:80 {
	route {
		rate_limit {
			zone twice 1/1h
		}
		rate_limit {
			zone twice 1/1h {
				key {header.X-User}
			}
		}
		respond ok
	}
}`)
	s.pass(1, "/", "X-User", "a")
	s.refused("/", "X-User", "b")
}

// An upstream outside of Caddy, to see what it is sent.
func upstream(t testing.TB, h http.HandlerFunc) (dial string) {
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://")
}

// Clients from several real addresses of this machine.
func TestClientsAreToldApart(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit 1/1h\n respond ok\n}")
	for i := 1; i <= 3; i++ {
		dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(i))}}
		client := &http.Client{Transport: &http.Transport{DialContext: dialer.DialContext, DisableKeepAlives: true}}
		for j, want := range []int{200, 429} {
			if resp, _ := get(t, client, "http://"+s.addr()); resp.StatusCode != want {
				t.Errorf("client %d, request %d: %s", i, j, resp.Status)
			}
		}
	}
}
