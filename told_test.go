package sluice_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// What clients are told, and when it is true.

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

// To be seen by the race detector, and to be right without it.
func TestDefectJitterRace(t *testing.T) {
	useClock(t)
	s := serve(t, strings.Replace(eventsZone(1, "1000s"), "rate_limit {", "rate_limit {\n jitter 0.5", 1))
	s.pass(1, "/")
	var wg sync.WaitGroup
	waits := make(chan int, 400)
	for range 8 {
		wg.Go(func() {
			for range 50 {
				if a, err := s.try(http.MethodGet, "/"); err != nil || a.StatusCode != 429 {
					t.Error(err, a.Response)
				} else {
					waits <- s.wait(a)
				}
			}
		})
	}
	wg.Wait()
	close(waits)
	seen := map[int]bool{}
	for wait := range waits {
		if wait < 1000 || wait > 1500 {
			t.Errorf("Retry-After: %d, want 1000 to 1500", wait)
		}
		seen[wait] = true
	}
	if len(seen) < 100 {
		t.Errorf("only %d different waits", len(seen))
	}
}

func TestDefectRetryAfterOneSecondTooMany(t *testing.T) {
	for _, seconds := range []int{1, 3} {
		t.Run(fmt.Sprint(seconds), func(t *testing.T) {
			useClock(t)
			s := serve(t, eventsZone(1, fmt.Sprintf("%ds", seconds)))
			s.pass(1, "/")
			if got := s.wait(s.refused("/")); got != seconds {
				t.Errorf("Retry-After: %d, want %d", got, seconds)
			}
		})
	}
}

func TestDefectExactBoundaryIsCounted(t *testing.T) {
	c := useClock(t)
	s := serve(t, eventsZone(2, "10s"))
	for range 5 {
		s.pass(2, "/")
		s.refused("/")
		c.add(10 * time.Second)
	}
}
