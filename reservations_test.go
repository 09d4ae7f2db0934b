package sluice_test

// Units that are reserved until the response tells what a request costs: what is given back when,
// and that nobody is banned for want of an answer.

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// undecided is an upstream that answers /wait when it is told with which status, and all else at
// once.
type undecided struct {
	dial   string
	status chan int
	now    atomic.Int64 // requests that wait
}

func undecide(t testing.TB) *undecided {
	u := &undecided{status: make(chan int)}
	u.dial = upstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Tokens-Used", "1")
		if r.URL.Path != "/wait" {
			return
		}
		u.now.Add(1)
		defer u.now.Add(-1)
		select {
		case status := <-u.status:
			w.WriteHeader(status)
		case <-r.Context().Done():
		}
	})
	return u
}

// await asks n times, and returns when all of them wait, and how to let them all be answered.
func (u *undecided) await(s *server, n int, header ...string) (answer func(status int)) {
	s.t.Helper()
	came := make(chan int, n)
	for range n {
		go func() {
			for { // in Redis the units of those before may not be back yet
				a, err := s.try(http.MethodGet, "/wait", header...)
				if err != nil || a.StatusCode != 429 {
					came <- 0
					return
				}
			}
		}()
	}
	eventually(s.t, 10*time.Second, fmt.Sprint(n, " requests wait"), func() bool { return u.now.Load() == int64(n) })
	return func(status int) {
		for range n {
			u.status <- status
		}
		for range n {
			<-came
		}
	}
}

// A page with many parts is loaded with the right password: what is refused while others are under
// way may not have been refused once they are answered, and is no strike.
func TestNoBanWhileAnswersAreAwaited(t *testing.T) {
	events()
	for zone, n := range map[string]int{
		failing("ban 1h after 1/15m"): 5,
		strings.Replace(metered("100/1h", tokensUsed), "cost ", "ban 1h after 1/15m\ncost ", 1): 2,
	} {
		onStores(t, func(t *testing.T, st *stage) {
			up := undecide(t)
			s := serve(t, st.zones(zone, up.dial))
			ann := []string{"X-User", "ann", "X-Cost", "40"}
			for range 4 {
				answer := up.await(s, n, ann...)
				s.refusedOnly(20, "/", ann...)
				answer(200)
				s.admits("/", ann...)
			}
			if n := len(bans()); n != 0 {
				t.Errorf("%d bans for right passwords", n)
			}
		})
	}
}

// Many such pages at once: their requests share calls to Redis, in which those that are refused may
// come first.
func TestNoBanOfPagesLoadedAtOnce(t *testing.T) {
	events()
	onStores(t, func(t *testing.T, st *stage) {
		l := openLogin(t)
		s := serve(t, st.zones(failing("ban 1h after 1/15m"), l.dial))
		s.client.Transport.(*http.Transport).MaxIdleConnsPerHost = 800
		var wg sync.WaitGroup
		var refused atomic.Int64
		start := make(chan struct{})
		for page := range 40 {
			for range 20 {
				wg.Go(func() {
					<-start
					a, err := s.try(http.MethodGet, "/", "X-User", fmt.Sprint("user", page), "X-Password", "right")
					if err != nil {
						t.Error(err)
					} else if a.StatusCode == 429 {
						refused.Add(1)
					}
				})
			}
		}
		close(start)
		wg.Wait()
		if n := len(bans()); n != 0 {
			t.Errorf("%d bans for right passwords, of %d refusals", n, refused.Load())
		}
	})
}

// Whoever refuses knows what is pending elsewhere.
func TestNoBanWhileAnotherInstanceAwaitsAnswers(t *testing.T) {
	events()
	st := &stage{redis: redistest.Start(t)}
	up := undecide(t)
	zone := "rate_limit {\n" + failing("ban 1h after 2/15m") + "\n}\nreverse_proxy " + up.dial
	port := freePort(t)
	startCaddyWith(t, st.globals(), fmt.Sprintf("http://:%d {\n%s\n}\n", port, zone))
	there := func(path string) int {
		resp, _ := get(t, http.DefaultClient, fmt.Sprintf("http://127.0.0.1:%d%s", port, path), "X-User", "ann")
		return resp.StatusCode
	}
	s := serve(t, st.config(zone))
	came := make(chan int, 5)
	for range cap(came) {
		go func() { came <- there("/wait") }()
	}
	eventually(t, 10*time.Second, "requests wait there", func() bool { return up.now.Load() == 5 })
	s.refusedOnly(20, "/", "X-User", "ann")
	for range cap(came) {
		up.status <- 401
		<-came
	}
	if len(bans()) != 0 {
		t.Error("a ban while nobody knew")
	}
	eventually(t, 10*time.Second, "refusals are strikes again", func() bool {
		return strings.Contains(s.refused("/", "X-User", "ann").body, "abnormal-usage-detected")
	})
}

// A response that does not count gives its unit back when its status is known, and once, however
// long it goes on; one that counts is a strike from then on.
func TestCountsByTheStatusNotByTheEnd(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		up := hold(t)
		s := serve(t, st.zones(failing(""), up.dial))
		for range 12 {
			s.begin()
		}
		s.admits("/")
		for range 12 {
			up.end <- struct{}{}
		}
		eventually(t, 5*time.Second, "all units are back", func() bool { return s.get("/").left("login") == 4 })
	})
	onStores(t, func(t *testing.T, st *stage) {
		events()
		end := make(chan struct{})
		dial := upstream(t, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusUnauthorized)
			w.(http.Flusher).Flush()
			select {
			case <-end:
			case <-r.Context().Done():
			}
		})
		s := serve(t, st.zones(failing("ban 1h after 3/15m"), dial))
		for range 3 {
			ctx, leave := context.WithCancel(context.Background())
			defer leave()
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.addr(), nil)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := s.client.Do(req)
			if err != nil || resp.StatusCode != 401 {
				t.Fatal(resp, err)
			}
			defer resp.Body.Close()
		}
		if a := s.refused("/"); !strings.Contains(a.body, "abnormal-usage-detected") || len(bans()) != 1 {
			t.Error(a.Header, a.body)
		}
		close(end)
	})
}
