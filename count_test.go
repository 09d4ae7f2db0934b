package sluice_test

// Limits on what fails only, as on a login: each request reserves a unit, and what does not count
// gives it back.

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// login is an upstream that lets the right password in. It knows how many guesses are under way or
// were wrong.
type login struct {
	dial string

	mu                  sync.Mutex
	now, wrong, mostBad int
}

func openLogin(t testing.TB) *login {
	l := new(login)
	l.dial = upstream(t, func(w http.ResponseWriter, r *http.Request) {
		l.add(1, 0)
		switch r.Header.Get("X-Password") {
		case "right":
			l.add(-1, 0)
		case "never": // nobody says whether it is
			<-r.Context().Done()
			l.add(-1, 0)
		default:
			l.add(-1, 1)
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	return l
}

func (l *login) add(now, wrong int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now += now
	l.wrong += wrong
	l.mostBad = max(l.mostBad, l.now+l.wrong)
}

const failures = "zone login 5/15m {\n key {client_ip} {header.X-User}\n count status 401\n %\n}"

// failing is the zone of a login, with more options.
func failing(options string) string { return strings.Replace(failures, "%", options, 1) }

// guess asks for the user from the address, and wants the status.
func (s *server) guess(user, address, password string, status int) answer {
	s.t.Helper()
	a := s.get("/", "X-User", user, "X-Forwarded-For", address, "X-Password", password)
	if a.StatusCode != status {
		s.t.Errorf("%s with a %s password from %s: %s %v, want %d", user, password, address, a.Status, a.Header, status)
	}
	return a
}

// enters logs in. In Redis a success before may still hold its unit.
func (s *server) enters(user, address string) {
	s.t.Helper()
	s.admits("/", "X-User", user, "X-Forwarded-For", address, "X-Password", "right")
}

// Five failures per user and address, and as many successes as one likes.
func TestLogin(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		l := openLogin(t)
		s := serve(t, st.zones(failing(""), l.dial))
		for range 3 {
			s.guess("ann", "192.0.2.1", "wrong", 401)
		}
		for range 20 {
			s.enters("ann", "192.0.2.1")
		}
		for range 2 {
			eventually(t, 5*time.Second, "a guess is let through", func() bool {
				return s.get("/", "X-User", "ann", "X-Forwarded-For", "192.0.2.1").StatusCode == 401
			})
		}
		for range 3 { // right or wrong: nobody finds out
			a := s.guess("ann", "192.0.2.1", "right", 429)
			if wait := s.wait(a); wait > 900 || wait < 880 || a.left("login") != 0 || !strings.Contains(a.body, "quota-exceeded") {
				t.Error(a.Header, a.body)
			}
		}
		if l.wrong != 5 {
			t.Errorf("%d wrong passwords reached the upstream", l.wrong)
		}
		s.enters("ann", "192.0.2.2")
		s.enters("bob", "192.0.2.1")
		if st.clock != nil {
			st.clock.add(15*time.Minute - time.Microsecond)
			s.guess("ann", "192.0.2.1", "right", 429)
			st.clock.add(time.Microsecond)
			s.enters("ann", "192.0.2.1")
		}
	})
}

// A thousand guesses at once are five, because each has reserved its unit; and right ones among
// them let no more wrong ones in.
func TestConcurrentGuesses(t *testing.T) {
	for _, every := range []int{0, 2} {
		onStores(t, func(t *testing.T, st *stage) {
			l := openLogin(t)
			s := serve(t, st.zones(failing(""), l.dial))
			s.client.Transport.(*http.Transport).MaxIdleConnsPerHost = 64
			var wg sync.WaitGroup
			var next atomic.Int64
			for range 64 {
				wg.Go(func() {
					for i := next.Add(1); i <= 1000; i = next.Add(1) {
						password := "wrong"
						if every > 0 && int(i)%every == 0 {
							password = "right"
						}
						if _, err := s.try(http.MethodGet, "/", "X-Password", password); err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			t.Logf("one in %d right: %d wrong ones came through, at most %d under way or wrong", every, l.wrong, l.mostBad)
			if l.wrong != 5 && every == 0 || l.wrong > 5 || l.mostBad > 5 {
				t.Errorf("%d wrong passwords came through, at most %d under way or wrong; want 5", l.wrong, l.mostBad)
			}
		})
	}
}

// Units that are held by requests under way are a reason to refuse, but not for longer than they
// are held.
func TestGivenBackUnitsAreFree(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		up := undecide(t)
		s := serve(t, st.zones(failing(""), up.dial))
		answer := up.await(s, 5)
		for range 3 {
			s.refused("/")
		}
		answer(200)
		s.admits("/") // they were no failures
	})
}

// Who leaves before the answer is there may have guessed: the unit stays taken.
func TestF51UnitOfWhoLeavesStaysTaken(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		l := openLogin(t)
		s := serve(t, st.config("route {\nrate_limit {\n"+failing("")+"\n}\ninside\nreverse_proxy "+l.dial+"\n}"))
		for range 5 {
			ctx, leave := context.WithCancel(context.Background())
			came := s.send(ctx, "/", "X-Password", "never")
			eventually(t, 5*time.Second, "the request is under way", func() bool { return insideNow.Load() == 1 })
			leave()
			<-came
			eventually(t, 5*time.Second, "the request is over", func() bool { return insideNow.Load() == 0 })
		}
		for range 3 {
			s.refused("/", "X-Password", "right")
		}
	})
}

// Which responses count: by what is written, and for errors by the status that the error has,
// whatever an error route writes.
func TestWhichResponsesCount(t *testing.T) {
	const (
		counts = 1
		free   = 0
	)
	for _, test := range []struct {
		name, count, site string
		want              int
	}{
		{"listed", "status 401 403", "respond 403", counts},
		{"not listed", "status 401 403", "respond 404", free},
		{"class", "status 4xx", "respond 404", counts},
		{"other class", "status 4xx", "respond 500", free},
		{"all but listed", "not_status 2xx 3xx", "respond 404", counts},
		{"all but this", "not_status 2xx 3xx", "redir * /elsewhere", free},
		{"nothing written", "status 200", "header X-Nothing else", counts},
		{"nothing written, not counted", "not_status 200", "header X-Nothing else", free},
		{"error", "status 418", "bad_end error", counts},
		{"other error", "status 401", "bad_end error", free},
		{"error without a status", "status 500", "bad_end plain", counts},
		{"error after a body", "status 200", "bad_end late", counts},
		{"error directive", "status 403", "error 403", counts},
		{"error route", "status 403", "error 403\n}\nhandle_errors {\n respond 200", counts},
		{"error route to a failure", "status 401", "error 404\n}\nhandle_errors {\n respond 401", free},
		{"nobody knows", "status 401", "bad_end panic", counts},
		{"dead upstream", "status 5xx", "reverse_proxy 127.0.0.1:1", counts},
	} {
		t.Run(test.name, func(t *testing.T) {
			onStores(t, func(t *testing.T, st *stage) {
				s := serve(t, st.config("route {\nrate_limit {\nzone m 1000/365d"+everyone+"algorithm token_bucket\ncost {header.X-Cost}\ncount "+test.count+"\n}\n}\n"+
					"@look header X-Cost 0\nrespond @look ok\n"+test.site+"\n}"))
				for i := range 3 {
					s.client.CloseIdleConnections() // on a connection that was used before, the client would ask again after a panic
					_, _ = s.try(http.MethodGet, "/bad", "X-Cost", "10")
					s.settled(1000 - 10*test.want*(i+1))
				}
				processLog.reset() // of panics
			})
		})
	}
}

// H06: a client that closes one half of its connection after asking earns its ban all the same: the
// status is known, whoever still listens.
func TestAFailureCountsWhoeverStillListens(t *testing.T) {
	s := serve(t, ":80 {\n route {\n rate_limit {\n zone login 9/15m {\n count status 401\n ban 1h after 2/1h\n }\n }\n"+
		" basic_auth {\n bob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n }\n respond ok\n }\n}")
	for range 2 {
		conn, err := net.Dial("tcp", s.addr())
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		io.WriteString(conn, "GET / HTTP/1.1\r\nHost: a.test\r\nAuthorization: Basic Ym9iOndyb25n\r\n\r\n")
		conn.(*net.TCPConn).CloseWrite()
		if reply, err := io.ReadAll(conn); err != nil || len(reply) > 0 && !strings.Contains(string(reply), " 401 ") {
			t.Errorf("%q %v", reply, err)
		}
		conn.Close()
	}
	s.refused("/")
}

// Keys that are not enforced earn no bans by what they fail at.
func TestFailuresOfUnenforcedKeysBanNobody(t *testing.T) {
	l := openLogin(t)
	s := serve(t, ":80 {\n rate_limit {\n"+failing("enforce 0%\n ban 1h after 1/1h")+"\n }\n reverse_proxy "+l.dial+"\n}")
	for range 8 {
		s.guess("u", "192.0.2.1", "wrong", http.StatusUnauthorized)
	}
	if lines := logged(t, "client banned"); len(lines) > 0 {
		t.Error(lines)
	}
}

// errs is a handler that returns an error without a status.
type errs struct{}

func init() {
	caddy.RegisterModule(new(errs))
	httpcaddyfile.RegisterHandlerDirective("errs", func(httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return new(errs), nil
	})
}

func (*errs) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.errs", New: func() caddy.Module { return new(errs) }}
}

func (*errs) ServeHTTP(http.ResponseWriter, *http.Request, caddyhttp.Handler) error {
	return errors.New("an error without a status")
}

// An error without a status is answered 500, and counts as that.
func TestAnErrorWithoutAStatusCountsAs500(t *testing.T) {
	s := serve(t, ":80 {\n route {\n rate_limit {\n zone z 2/1h {\n count status 500\n }\n }\n errs\n }\n}")
	for range 2 {
		if a := s.get("/"); a.StatusCode != http.StatusInternalServerError {
			t.Fatal(a.Status)
		}
	}
	s.refused("/")
	s = serve(t, ":80 {\n route {\n rate_limit {\n zone other 1/1h {\n count not_status 500\n }\n }\n errs\n }\n}")
	for range 3 {
		if a := s.get("/"); a.StatusCode != http.StatusInternalServerError {
			t.Fatal(a.Status)
		}
	}
}
