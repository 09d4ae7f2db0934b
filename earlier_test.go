package sluice_test

// Two handlers that one request meets: what clients are told by both together.

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// The families of one value show the policy that is closest to exhaustion, of whichever handler.
func TestOneValueOfTwoHandlers(t *testing.T) {
	handler := func(zone string) string { return "rate_limit {\n " + zone + "\n headers draft6 x delta\n}\n" }
	for name, test := range map[string]struct {
		first, second, capacity string
		passed, refused         string // what remains
	}{
		"the second is tighter":   {"zone site 1000/1m", "zone login 2/1m", "2", "1", "0"},
		"the first is tighter":    {"zone login 2/1m", "zone site 1000/1m", "2", "1", "0"},
		"both are of one zone":    {"zone z 4/1m", "zone z 4/1m", "4", "2", "0"},
		"the second has no units": {"zone site 2/1m", "zone c {\n concurrency 1\n}", "2", "1", "0"},
	} {
		t.Run(name, func(t *testing.T) {
			useClock(t)
			s := serve(t, ":80 {\nroute {\n"+handler(test.first)+handler(test.second)+"respond ok\n}\n}")
			told := func(a answer, status int, remaining string) {
				t.Helper()
				if a.StatusCode != status {
					t.Error(a.Status)
				}
				for _, family := range []string{"X-Ratelimit", "Ratelimit"} {
					for field, want := range map[string]string{"-Limit": test.capacity, "-Remaining": remaining, "-Reset": "60"} {
						if got := a.Header[family+field]; len(got) != 1 || got[0] != want {
							t.Errorf("%s%s: %q, want %s", family, field, got, want)
						}
					}
				}
			}
			told(s.get("/"), 200, test.passed)
			s.pass(1, "/")
			told(s.get("/"), 429, test.refused)
		})
	}
	t.Run("what others set stays", func(t *testing.T) {
		s := serve(t, ":80 {\nroute {\n"+handler("zone site 1000/1m")+"header X-RateLimit-Limit theirs\n"+handler("zone login 2/1m")+"respond ok\n}\n}")
		if a := s.get("/"); a.Header.Get("X-RateLimit-Limit") != "theirs" || a.Header.Get("X-RateLimit-Remaining") != "999" || a.Header.Get("RateLimit-Limit") != "2" {
			t.Error(a.Header)
		}
	})
}

// A wait is long enough for what stands before, which has let the refused request pass and counted
// it.
func TestWaitForEarlierHandlers(t *testing.T) {
	c := useClock(t)
	s := serve(t, ":80 {\nroute {\nrate_limit {\nzone site 4/20s\n}\nrate_limit {\nzone strict 3/3s\n}\nrespond ok\n}\n}")
	s.pass(3, "/")
	if wait := s.wait(s.refused("/")); wait != 20 {
		t.Errorf("told to wait %d s, want 20: the site-wide limit is used up", wait)
	}
	c.add(20*time.Second - time.Microsecond)
	s.refused("/")
	c.add(20 * time.Second)
	s.pass(1, "/")
}

// The same for a cost of which several units are missing.
func TestWaitForEarlierCosts(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		s := serve(t, st.config("route {\nrate_limit {\nzone site 10/200s {\nalgorithm token_bucket\nburst 10\ncost 4\n}\n}\nrate_limit {\nzone strict 1/20s\n}\nrespond ok\n}"))
		s.pass(1, "/")
		if wait := s.wait(s.refused("/")); wait > 40 || wait < 30 || st.clock != nil && wait < 40 {
			t.Errorf("told to wait %d s, want 40 until two units more are there", wait)
		}
		if st.clock == nil {
			return
		}
		st.clock.add(40*time.Second - time.Microsecond)
		s.refused("/")
		st.clock.add(time.Microsecond)
		s.pass(1, "/")
	})
}

// A wait is long enough for what comes behind, of requests that will meet it, and true for all
// others.
func TestWaitForLaterHandlers(t *testing.T) {
	const site = `route {
	rate_limit {
		zone api 10/1m {
			key {header.X-User}
		}
	}
	rate_limit {
		zone api 10/1m {
			match {
				path /export /free
			}
			exempt {
				path /free
			}
			key {header.X-User}
			cost 9
		}
	}
	respond ok
}`
	t.Run("local", func(t *testing.T) {
		c := useClock(t)
		s := serve(t, ":80 {\n"+site+"\n}")
		s.pass(1, "/export", "X-User", "ann")
		s.pass(1, "/", "X-User", "bob")
		c.add(9 * time.Second)
		s.pass(9, "/", "X-User", "bob")
		c.add(time.Second)
		for path, want := range map[string]int{"/": 50, "/free": 50, "/export": 59} {
			if got := s.wait(s.refused(path, "X-User", "bob")); got != want {
				t.Errorf("%s: Retry-After %d, want %d", path, got, want)
			}
		}
		c.add(59 * time.Second)
		s.pass(1, "/export", "X-User", "bob")
	})
	t.Run("redis", func(t *testing.T) { // and who is known to be refused costs no trip
		redis := redistest.Start(t)
		s := serve(t, sharingSite(redis.Addr, patient, site))
		s.pass(1, "/export", "X-User", "ann")
		s.pass(10, "/", "X-User", "bob")
		s.refused("/", "X-User", "bob")
		before := decisions(redis)
		for range 10 {
			s.refused("/", "X-User", "bob")
		}
		if n := decisions(redis) - before; n != 0 {
			t.Errorf("%d calls for what is known to be refused", n)
		}
	})
}

// H10: what a request teaches about later handlers holds for its like. The route around the second
// rule tells requests apart.
func TestWhatOneRequestTeachesHoldsForItsLike(t *testing.T) {
	useClock(t)
	s := serve(t, `:80 {
	route {
		rate_limit {
			zone z 4/1h {
				key {header.X-User}
			}
		}
		handle /heavy {
			rate_limit {
				zone z 4/1h {
					key {header.X-User}
					cost 4
				}
			}
			respond heavy
		}
		respond ok
	}
}`)
	s.get("/heavy", "X-User", "teaches") // which can never pass
	s.pass(4, "/", "X-User", "bob")
	if wait := s.wait(s.refused("/", "X-User", "bob")); wait != 3600 {
		t.Errorf("Retry-After %d, want 3600", wait)
	}
	if wait := s.wait(s.refused("/heavy", "X-User", "bob")); wait != -1 { // this one can never pass
		t.Errorf("/heavy: Retry-After %d, want none", wait)
	}
}

// Of two limits that refuse, the longer wait is told.
func TestTheLongerOfTwoWaitsIsTold(t *testing.T) {
	for _, limits := range []string{"1/10s 1/1h", "1/1h 1/10s"} {
		useClock(t)
		s := serve(t, ":80 {\n rate_limit {\n zone z {\n limit "+limits+"\n }\n }\n respond ok\n}")
		s.pass(1, "/")
		if wait := s.wait(s.refused("/")); wait != 3600 {
			t.Errorf("%s: Retry-After %d, want 3600", limits, wait)
		}
	}
}

// More policies than there are texts prepared for: dry runs are not among them.
func TestDryRunsAreNotDescribed(t *testing.T) {
	var zones strings.Builder
	for i := range 8 {
		fmt.Fprintf(&zones, "zone dry%d 5/1h {\n dry_run\n}\n", i)
	}
	s := serve(t, ":80 {\nrate_limit {\n"+zones.String()+"zone real 3/1h\nzone more 7/1d\n}\nrespond ok\n}")
	if a := s.get("/"); a.Header.Get("RateLimit-Policy") != `"real";q=3;w=3600, "more";q=7;w=86400` || a.left("real") != 2 || a.left("more") != 6 {
		t.Error(a.Header)
	}
}

// Who invokes for an error route what the zone protects serves the refused request: the reference
// warns of it.
func TestRefusedRequestComesBack(t *testing.T) {
	const named = "&(app) {\nroute {\nrate_limit 1/1h\nrespond served\n}\n}\n"
	s := serve(t, named+":80 {\ninvoke app\nhandle_errors {\n invoke app\n}\n}")
	s.pass(1, "/")
	if a := s.get("/"); a.body != "served" {
		t.Error(a.Status, a.body)
	}
}

// H08. What a page includes is part of the request for the page: it is not charged again, nor under
// an address that all share. Who asks for the part itself is limited, whatever it pretends.
func TestIncludedPartsAreChargedWithTheirPage(t *testing.T) {
	s := newServer(t)
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("page.html", `{{httpInclude "/part.html"}}{{httpInclude "/part.html"}}`)
	write("part.html", "part")
	if err := s.load(":80 {\n root * " + s.dir + "\n rate_limit {\n zone site 5/1h\n zone parts 3/1h {\n match path /part.html\n }\n }\n templates\n file_server\n}"); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if resp, body := get(t, s.client, "http://"+s.addr()+"/page.html"); resp.StatusCode != 200 || body != "partpart" {
			t.Errorf("a page: %s %q", resp.Status, body)
		}
	}
	if resp, _ := get(t, s.client, "http://"+s.addr()+"/page.html"); resp.StatusCode != 429 {
		t.Errorf("the page above the limit: %s", resp.Status)
	}
	// From another address, the one that Caddy writes for what templates include, and with its
	// field.
	dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	client := &http.Client{Transport: &http.Transport{DialContext: dialer.DialContext, DisableKeepAlives: true}}
	for i := range 4 {
		req, _ := http.NewRequest("GET", "http://"+s.addr()+"/part.html", nil)
		req.Header.Set("Caddy-Templates-Include", "1")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if want := 200 + i/3*229; resp.StatusCode != want {
			t.Errorf("part %d: %s, want %d", i, resp.Status, want)
		}
	}
}
