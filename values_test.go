package sluice_test

// H02: a header, cookie or query parameter that comes with several values. Backends read different
// ones, and whichever they read, no choice of the others gets more than the limit of that one.

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

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
