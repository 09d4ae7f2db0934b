package sluice_test

// H02: a header, cookie or query parameter that comes with several values. Backends read different
// ones, and whichever they read, no choice of the others gets more than the limit of that one.

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// readers are the ways in which backends read a key that a request holds several times: Go's, the
// last value, as the standard library of Python has it for cookies, and joined, as Node has it for
// headers and WSGI for all of them.
var readers = map[string]func(r *http.Request) string{
	"first header":     func(r *http.Request) string { return r.Header.Get("X-Key") },
	"last header":      func(r *http.Request) string { return last(r.Header["X-Key"]) },
	"joined header":    func(r *http.Request) string { return strings.Join(r.Header["X-Key"], ", ") },
	"first parameter":  func(r *http.Request) string { return r.URL.Query().Get("key") },
	"last parameter":   func(r *http.Request) string { return last(r.URL.Query()["key"]) },
	"joined parameter": func(r *http.Request) string { return strings.Join(r.URL.Query()["key"], ",") },
	"parameter of a list": func(r *http.Request) string {
		return last(append(r.URL.Query()["key"], r.URL.Query()["key[]"]...))
	},
	"parameter after a semicolon": func(r *http.Request) string {
		q, _ := url.ParseQuery(strings.ReplaceAll(r.URL.RawQuery, ";", "&"))
		return last(q["key"])
	},
	"first cookie": func(r *http.Request) string { return cookie(r, 0) },
	"last cookie":  func(r *http.Request) string { return cookie(r, -1) },
	"decoded cookie": func(r *http.Request) string {
		value, _ := url.PathUnescape(cookie(r, -1))
		return value
	},
	"cookie after a blank": func(r *http.Request) string {
		_, value, _ := strings.Cut(strings.Join(r.Header["Cookie"], "; "), " KEY=")
		return strings.TrimRight(value, "; ")
	},
}

func last(values []string) string {
	if len(values) == 0 {
		return ""
	}
	return values[len(values)-1]
}

func cookie(r *http.Request, n int) string {
	all := r.CookiesNamed("KEY")
	if len(all) == 0 {
		return ""
	}
	return all[(n+len(all))%len(all)].Value
}

func TestH02NoChoiceOfValuesGetsMore(t *testing.T) {
	const quota = 3
	for source, attacks := range map[string][]func(n int) (path string, header []string){
		"{header.X-Key}": {
			func(n int) (string, []string) { return "/", []string{"X-Key", "good", "X-Key", fmt.Sprint(n)} },
			func(n int) (string, []string) { return "/", []string{"X-Key", fmt.Sprint(n), "X-Key", "good"} },
			func(n int) (string, []string) {
				return "/", []string{"X-Key", "a", "X-Key", "good", "X-Key", fmt.Sprint(n)}
			},
			func(n int) (string, []string) { return "/", []string{"X-Key", "", "X-Key", "good"} },
		},
		"{query.key}": {
			func(n int) (string, []string) { return fmt.Sprintf("/?key=good&key=x%d", n), nil },
			func(n int) (string, []string) { return fmt.Sprintf("/?key=x%d&%%6bey=g%%6fod", n), nil },
			func(n int) (string, []string) { return fmt.Sprintf("/?key=x%d&key[]=good", n), nil },
			func(n int) (string, []string) { return fmt.Sprintf("/?key=x%d;key=good", n), nil },
			func(n int) (string, []string) { return fmt.Sprintf("/?key=%%zz%d&key=good", n), nil },
		},
		"{cookie.KEY}": {
			func(n int) (string, []string) { return "/", []string{"Cookie", fmt.Sprintf("key=x%d; KEY=good", n)} },
			func(n int) (string, []string) { return "/", []string{"Cookie", fmt.Sprintf("KEY=x%d; KEY=good", n)} },
			func(n int) (string, []string) { return "/", []string{"Cookie", fmt.Sprintf("KEY=good; KEY=x%d", n)} },
			func(n int) (string, []string) {
				return "/", []string{"Cookie", "KEY=good", "Cookie", fmt.Sprintf("KEY=x%d", n)}
			},
			func(n int) (string, []string) { return "/", []string{"Cookie", fmt.Sprintf("KEY=x%d KEY=good", n)} },
			func(n int) (string, []string) {
				return "/", []string{"Cookie", "KEY=" + []string{"good", "%67ood", "g%6fod", "go%6Fd", `"good"`}[n%5]}
			},
		},
	} {
		for i, attack := range attacks {
			t.Run(fmt.Sprintf("%s %d", source, i), func(t *testing.T) {
				var mu sync.Mutex
				served := map[string]map[string]int{}
				backend := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
					mu.Lock()
					defer mu.Unlock()
					for name, read := range readers {
						if served[name] == nil {
							served[name] = map[string]int{}
						}
						served[name][read(r)]++
					}
				}))
				defer backend.Close()
				s := serve(t, fmt.Sprintf(":80 {\n rate_limit %s %d/1h\n reverse_proxy %s\n}", source, quota, backend.Listener.Addr()))
				passed := 0
				for n := range 12 {
					path, header := attack(n)
					if s.get(path, header...).StatusCode == 200 {
						passed++
					}
				}
				if passed != quota {
					t.Errorf("%d passed, want %d", passed, quota)
				}
				for name, values := range served {
					if values["good"] > quota {
						t.Errorf("%s: %d requests for %q", name, values["good"], "good")
					}
				}
			})
		}
	}
}

// More than four values are no honest request.
func TestH02ManyValues(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone z {header.X-Key} 2/1h\n }\n respond ok\n}")
	many := []string{"X-Key", "a", "X-Key", "b", "X-Key", "c", "X-Key", "d", "X-Key", "e"}
	for range 5 {
		if a := s.get("/", many...); a.StatusCode != http.StatusBadRequest || !strings.Contains(a.body, "more than 4 values") {
			t.Fatal(a.Status, a.body)
		}
	}
	s.pass(2, "/", many[:8]...) // and the five have taken nothing
	s.refused("/", "X-Key", "d")
	s.pass(2, "/", "X-Key", "e")

	s.mustLoad(":80 {\n rate_limit {\n zone dry {header.X-Key} 2/1h {\n dry_run\n }\n }\n respond ok\n}")
	s.pass(3, "/", many...)

	// A share of the keys is refused; a value of the others in front of them frees none of those.
	s.mustLoad(":80 {\n rate_limit {\n zone some {header.X-Key} 2/1h {\n enforce 50%\n }\n }\n respond ok\n}")
	for _, first := range "abcdefgh" {
		many[1] = string(first) + "0"
		if a := s.get("/", many...); a.StatusCode != http.StatusBadRequest {
			t.Errorf("%s first: %s", many[1], a.Status)
		}
	}
	s.mustLoad(":80 {\n rate_limit {\n zone none {header.X-Key} 2/1h {\n enforce 0%\n }\n }\n respond ok\n}")
	s.pass(3, "/", many...)
}

// What clients and operators see of a request with several values is what they see of others: each
// policy once, with the least that is left, and one request in the metrics.
func TestH02SeveralValuesAreOneRequest(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone z {\n key {header.X-Key}\n limit 5/1h 9/1d\n }\n zone dry {header.X-Key} 3/1h {\n dry_run\n }\n }\n respond ok\n}")
	s.pass(2, "/", "X-Key", "used")
	a := s.get("/", "X-Key", "new", "X-Key", "used")
	if a.StatusCode != 200 || len(a.Header["Ratelimit"]) != 1 || strings.Count(a.Header.Get("Ratelimit"), ";r=") != 2 || strings.Count(a.Header.Get("Ratelimit-Policy"), ";q=") != 2 ||
		a.left("z.1h") != 2 || a.left("z.1d") != 6 {
		t.Error(a.StatusCode, a.Header)
	}
	s.pass(1, "/", "X-Key", "used", "X-Key", "new")
	s.pass(1, "/", "X-Key", "new", "X-Key", "used")
	a = s.refused("/", "X-Key", "fresh", "X-Key", "used")
	if a.left("z.1h") != 0 || s.wait(a) < 3500 || a.body != strings.ReplaceAll(problemBody, `"z"`, `"z.1h"`) {
		t.Error(a.Header, a.body)
	}
	if left := s.get("/", "X-Key", "fresh").left("z.1h"); left != 4 {
		t.Errorf("fresh has %d left: a refused request took something", left)
	}
	for series, want := range map[string]float64{
		`caddy_rate_limit_decisions_total{result="passed",store="local",zone="z"}`:             6,
		`caddy_rate_limit_decisions_total{result="rejected",store="local",zone="z"}`:           1,
		`caddy_rate_limit_decisions_total{result="passed_dry_run",store="local",zone="dry"}`:   4,
		`caddy_rate_limit_decisions_total{result="rejected_dry_run",store="local",zone="dry"}`: 3,
	} {
		if got := s.metric(series); got != want {
			t.Errorf("%s is %g, want %g", series, got, want)
		}
	}
}

// What is taken for each value is given back for each: a success beside count, a place in flight, a
// reservation.
func TestH02SeveralValuesSettle(t *testing.T) {
	both := []string{"X-Key", "a", "X-Key", "b"}
	t.Run("count", func(t *testing.T) {
		s := serve(t, ":80 {\n rate_limit {\n zone z {header.X-Key} 2/1h {\n count status 401\n ban 1h after 3/1h\n }\n }\n respond /fail 401\n respond ok\n}")
		s.pass(5, "/", both...)
		for range 2 {
			if a := s.get("/fail", both...); a.StatusCode != 401 {
				t.Fatal(a.Status)
			}
		}
		for _, key := range []string{"a", "b"} {
			s.refused("/", "X-Key", key) // the third strike
			if a := s.refused("/", "X-Key", key); !strings.Contains(a.body, "abnormal-usage-detected") {
				t.Error(key, a.body)
			}
		}
		s.pass(1, "/", "X-Key", "c")
		s.refused("/", "X-Key", "c", "X-Key", "b")
	})
	t.Run("concurrency", func(t *testing.T) {
		held, release := make(chan bool), make(chan bool)
		backend := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { held <- true; <-release }))
		defer backend.Close()
		s := serve(t, ":80 {\n rate_limit {\n zone z {\n key {header.X-Key}\n concurrency 1\n }\n }\n reverse_proxy "+backend.Listener.Addr().String()+"\n}")
		done := make(chan error)
		go func() { _, err := s.ask(context.Background(), "GET", "/", nil, both...); done <- err }()
		<-held
		s.refused("/", "X-Key", "a")
		s.refused("/", "X-Key", "b")
		release <- true
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		for _, key := range []string{"a", "b"} {
			go func() { _, err := s.ask(context.Background(), "GET", "/", nil, "X-Key", key); done <- err }()
			<-held
			release <- true
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
	t.Run("charge", func(t *testing.T) {
		s := serve(t, ":80 {\n rate_limit {\n zone z {header.X-Key} 100/1d {\n algorithm token_bucket\n cost 50\n charge {http.response.header.X-Used}\n }\n }\n header X-Used 10\n respond ok\n}")
		s.pass(1, "/", both...)
		for _, key := range []string{"a", "b"} {
			if left := s.get("/", "X-Key", key).left("z"); left != 40 {
				t.Errorf("%s has %d left, want 40", key, left)
			}
		}
	})
}

// In Redis too each value is charged, in one decision, and all or none.
func TestH02SeveralValuesInRedis(t *testing.T) {
	redis := redistest.Start(t)
	s := serve(t, sharing(redis.Addr, patient, "zone z {header.X-Key} 3/1h {\n count status 401\n }"))
	s.pass(3, "/", "X-Key", "a", "X-Key", "b")
	eventually(t, 10*time.Second, "what did not count is given back", func() bool { return s.get("/", "X-Key", "a").left("z") == 2 })
	s.mustLoad(sharing(redis.Addr, patient, "zone z {header.X-Key} 3/1h"))
	s.pass(3, "/", "X-Key", "used")
	s.refused("/", "X-Key", "fresh", "X-Key", "used")
	if left := s.get("/", "X-Key", "fresh").left("z"); left != 2 {
		t.Errorf("fresh has %d left, want 2", left)
	}
}

// H05: other spellings of a path are no other counters.
func TestH05OnePathOneCounter(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {path} 3/1h\n respond ok\n}")
	for _, path := range []string{"/big.txt", "//big.txt", "/./big.txt"} {
		s.pass(1, path)
	}
	s.refused("/x/../big.txt")
	s.refused("/%62ig.txt")
	s.mustLoad(":80 {\n rate_limit {path} 3/1h {\n raw_path\n }\n respond ok\n}")
	s.pass(1, "/x/../big.txt")
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

func TestDefectKeyIsNotUTF8(t *testing.T) {
	s := serve(t, eventsZone(1, "1h", "key {path}"))
	s.pass(1, "/%ff")
	s.refused("/%ff")
	s.pass(1, "/%c3%bf")
	checkMetrics(t, s.metrics())
}

func TestDefectUnknownPlaceholder(t *testing.T) {
	t.Run("nobody sets it", func(t *testing.T) {
		s := serve(t, proxied+eventsZone(1, "1h", "key {vars.set_by_nobody}"))
		s.pass(1, "/", "X-Forwarded-For", "192.0.2.1") // not one counter for everyone
		s.pass(1, "/", "X-Forwarded-For", "192.0.2.2")
		s.refused("/", "X-Forwarded-For", "192.0.2.1")
	})
	// In the older spelling a config with a wrong name must load: it is taken for what was meant,
	// with a warning.
	t.Run("mistaken name", func(t *testing.T) {
		s := serve(t, strings.Replace(eventsZone(1, "1h", "key {http.request.remote_host}"), "rate_limit {", "rate_limit {\n log_key", 1))
		s.pass(1, "/")
		s.refused("/")
		if lines := logged(t, "rate limit exceeded"); len(lines) != 1 || lines[0]["key"] != "127.0.0.1" {
			t.Error(lines)
		}
		if !strings.Contains(processLog.String(), "placeholder {http.request.remote_host} is not one of Caddy's") {
			t.Error("no warning at load")
		}
	})
	for _, key := range []string{"{http.request.remote_host}", "{client_pi}", "{http.request.headr.X-Key}"} {
		if _, err := adapt(":80 {\n rate_limit {\n zone z 1/1h {\n key " + key + "\n }\n }\n}"); err == nil || !strings.Contains(err.Error(), "Caddyfile:4") {
			t.Errorf("%s: %v", key, err)
		}
	}
}

// early is a request in HTTP/3 early data: the handshake is not complete, so nobody knows yet who
// sends it.
func early(t testing.TB, srv *caddyhttp.Server, header ...string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "https://a.test/", nil)
	r.RemoteAddr, r.TLS = "192.0.2.1:1234", &tls.ConnectionState{Version: tls.VersionTLS13}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return caddyhttp.PrepareRequest(r, caddy.NewReplacer(), httptest.NewRecorder(), srv)
}

func TestDefectEarlyDataSharesOneBucket(t *testing.T) {
	for _, test := range []struct {
		key    string
		header []string
		want   int
	}{
		{"{client_ip}", nil, 425},
		{"{remote_host}", nil, 425},
		{"{http.request.remote}", nil, 425},
		{"{host} {client_ip}", nil, 425},
		{"{header.X-Key}", []string{"X-Key", "a"}, 425}, // H03: a copy would charge the client once more
		{"{header.X-Key}", nil, 425},                    // falls back to the address
		{"everyone", nil, 425},
	} {
		t.Run(test.key+strings.Join(test.header, ""), func(t *testing.T) {
			serve(t, ":80 {\n rate_limit {\n zone z 1/1h {\n key "+test.key+"\n }\n }\n respond ok\n}")
			h, srv := handler(t, 0)
			reached := false
			next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { reached = true; return nil })
			w := httptest.NewRecorder()
			err := h.ServeHTTP(w, early(t, srv, test.header...), next)
			if err != nil || w.Code != test.want || reached {
				t.Errorf("reached %v, error %v, status %d, want %d", reached, err, w.Code, test.want)
			}
			if w.Header().Get("RateLimit") != "" || w.Header().Get("Retry-After") != "" || w.Header().Get("Cache-Control") != "no-store" {
				t.Errorf("%v", w.Header())
			}
		})
	}
}

func TestDefectPrefixWithinLongerKey(t *testing.T) {
	s := serve(t, proxied+eventsZone(1, "1h", "key {client_ip}_{host}", "ipv6_prefix 64", "ipv4_prefix 24"))
	s.pass(1, "/", "X-Forwarded-For", "2001:db8::1")
	s.refused("/", "X-Forwarded-For", "2001:db8::2")
	s.pass(1, "/", "X-Forwarded-For", "2001:db8:0:1::1")
	s.pass(1, "/", "X-Forwarded-For", "2001:db8::2", "Host", "other.test")
	s.pass(1, "/", "X-Forwarded-For", "192.0.2.1")
	s.refused("/", "X-Forwarded-For", "192.0.2.255")
	s.pass(1, "/", "X-Forwarded-For", "192.0.3.1")
}

// Without a prefix, this spelling does not group addresses.
func TestDefectNoPrefixNoGrouping(t *testing.T) {
	s := serve(t, proxied+eventsZone(1, "1h", "key {client_ip}"))
	s.pass(1, "/", "X-Forwarded-For", "2001:db8::1")
	s.pass(1, "/", "X-Forwarded-For", "2001:db8::2")
	s.refused("/", "X-Forwarded-For", "2001:db8::2")
}
