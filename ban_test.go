package sluice_test

// Bans: what refusals and failures earn.

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// bans lists the events of bans so far.
func bans() (list []caddy.Event) {
	for _, e := range events() {
		if e.Name() == "rate_limit_banned" {
			list = append(list, e)
		}
	}
	return list
}

// banned asks once, and must be told of a ban that lasts so many seconds more.
func (s *server) banned(zone string, seconds int, path string, header ...string) {
	s.t.Helper()
	a := s.refused(path, header...)
	if wait := s.wait(a); wait != seconds || a.Header.Get("Ratelimit") != fmt.Sprintf(`"%s";r=0;t=%d`, zone, seconds) || !strings.Contains(a.body, "abnormal-usage-detected") {
		s.t.Errorf("want a ban for %d s: %v %s", seconds, a.Header, a.body)
	}
}

// refusedOnly asks n times, and must be refused without a ban.
func (s *server) refusedOnly(n int, path string, header ...string) {
	s.t.Helper()
	for i := range n {
		if a := s.refused(path, header...); !strings.Contains(a.body, "quota-exceeded") {
			s.t.Errorf("refusal %d: %v %s", i, a.Header, a.body)
		}
	}
}

// Bans get longer, end to the microsecond, and are not made longer by who asks meanwhile; after
// twice the longest it begins anew.
func TestBanEscalates(t *testing.T) {
	events()
	c := useClock(t)
	s := serve(t, new(stage).config("rate_limit {\nzone b 1/1s {\n key {header.X-User}\n ban 1m 10m 1h after 3/10m\n}\n}\nrespond ok"))
	// Nobody else is called so: a key that was banned in another test within this second would get
	// no line.
	ann := []string{"X-User", "ann, who escalates", "X-Forwarded-For", "192.0.2.77"}
	for i, seconds := range []int{60, 600, 3600, 3600} {
		s.pass(1, "/", ann...)
		s.refusedOnly(2, "/", ann...)
		s.banned("b", seconds, "/", ann...) // the response that earns the ban tells it already
		for range 10 {
			s.banned("b", seconds, "/", ann...)
		}
		s.pass(1, "/", "X-User", fmt.Sprint("other", i))
		length := time.Duration(seconds) * time.Second
		c.add(length / 2)
		s.banned("b", seconds/2, "/", ann...)
		c.add(length/2 - time.Microsecond)
		s.banned("b", 1, "/", ann...)
		c.add(time.Microsecond)
		got := bans()
		if len(got) != 1 || got[0].Data["zone"] != "b" || got[0].Data["duration"] != length || got[0].Data["step"] != min(i+1, 3) || got[0].Data["key"] != nil {
			t.Errorf("events of ban %d: %v", i+1, got)
		}
	}
	c.add(2 * time.Hour)
	s.pass(1, "/", ann...)
	s.refusedOnly(2, "/", ann...)
	s.banned("b", 60, "/", ann...)
	if n := s.metric(`caddy_rate_limit_bans_total{zone="b"}`); n != 5 {
		t.Errorf("%v bans are counted, want 5", n)
	}
	lines := logged(t, "client banned")
	if len(lines) == 0 {
		t.Fatal("no log line")
	}
	for key, want := range map[string]any{"zone": "b", "step": 1.0, "remote_ip": "127.0.0.1", "client_ip": "192.0.2.77", "level": "warn"} {
		if got := lines[0][key]; got != want {
			t.Errorf("the log line says %s %v, want %v: %v", key, got, want, lines[0])
		}
	}
}

// Strikes are counted over their window only.
func TestBanStrikesPass(t *testing.T) {
	c := useClock(t)
	s := serve(t, ":80 {\nrate_limit {\nzone b 1/365d"+everyone+"ban 1m after 3/10m\n}\n}\nrespond ok\n}")
	s.pass(1, "/")
	for range 5 {
		s.refusedOnly(2, "/")
		c.add(10 * time.Minute)
	}
	s.refusedOnly(2, "/")
	s.banned("b", 60, "/")
}

// One key of one zone is banned, and nothing else: no other key, and no other zone, whose limits
// are then not asked.
func TestBanTouchesNothingElse(t *testing.T) {
	events()
	onStores(t, func(t *testing.T, st *stage) {
		site := func(limit string) string {
			return st.config(`
rate_limit {
	zone b ` + limit + `/1h {
		match {
			path /b /both
		}
		key {header.X-User}
		algorithm sliding_log
		ban 10m after 2/10m
	}
	zone other 100/1h {
		match {
			path /other /both
		}
		key {header.X-User}
	}
}
respond ok
handle_errors {
	header X-Told "{http.rate_limit.exceeded.name} {http.rate_limit.exceeded.policy} {http.rate_limit.exceeded.retry_after} {http.rate_limit.b.status} {http.rate_limit.b.remaining}"
	respond "an error route"
}`)
		}
		s := serve(t, site("1"))
		s.pass(1, "/both", "X-User", "ann")
		s.refused("/both", "X-User", "ann")
		isBan := func(a answer) {
			t.Helper()
			if wait := s.wait(a); wait > 600 || wait < 590 || a.Header.Get("X-Told") != fmt.Sprintf("b b %d rejected 0", wait) {
				t.Errorf("no ban is told: %v %s", a.Header, a.body)
			}
		}
		isBan(s.refused("/both", "X-User", "ann"))
		if len(bans()) != 1 {
			t.Error("no event, or several")
		}
		if st.redis != nil { // and a banned client costs no trip
			before := decisions(st.redis)
			for range 10 {
				isBan(s.refused("/b", "X-User", "ann"))
			}
			if calls := decisions(st.redis) - before; calls > 1 {
				t.Errorf("%d calls for a banned client", calls)
			}
		}
		isBan(s.refused("/both", "X-User", "ann"))
		if a := s.get("/other", "X-User", "ann"); a.StatusCode != 200 || a.left("other") != 98 {
			t.Error("another zone:", a.Status, a.Header)
		}
		s.pass(1, "/both", "X-User", "bob")
		// A reload keeps the ban, even one that gives the limit more.
		s.mustLoad(site("100"))
		isBan(s.refused("/b", "X-User", "ann"))
		if a := s.get("/b", "X-User", "bob"); a.StatusCode != 200 || a.left("b") != 98 {
			t.Error(a.Status, a.Header)
		}
		if len(bans()) != 0 || s.metric(`caddy_rate_limit_bans_total{zone="b"}`) != 1 {
			t.Error("banned again")
		}
	})
}

// Refusals are counted where they happen; the ban holds on every instance that shares the store.
func TestBanOfOneInstanceHoldsOnAll(t *testing.T) {
	st := &stage{redis: redistest.Start(t)}
	const site = "rate_limit {\nzone b 1/1h {\n key {header.X-User}\n ban 10m 1h after 2/10m\n}\n}\nrespond ok"
	port := freePort(t)
	startCaddyWith(t, st.globals(), fmt.Sprintf("http://:%d {\n%s\n}\n", port, site))
	there := func(user string) (status int, body string) {
		resp, body := get(t, http.DefaultClient, fmt.Sprintf("http://127.0.0.1:%d/", port), "X-User", user, "Connection", "close")
		return resp.StatusCode, body
	}
	s := serve(t, st.config(site))
	s.pass(1, "/", "X-User", "ann")
	if status, body := there("ann"); status != 429 || !strings.Contains(body, "quota-exceeded") {
		t.Error(status, body)
	}
	s.refusedOnly(1, "/", "X-User", "ann")
	s.refused("/", "X-User", "ann")
	if status, body := there("ann"); status != 429 || !strings.Contains(body, "abnormal-usage-detected") {
		t.Error(status, body)
	}
	if status, body := there("bob"); status != 200 {
		t.Error(status, body)
	}
}

// Counted failures earn a ban, successes do not; who is banned is not let in with the right
// password either.
func TestBanOfFailedLogins(t *testing.T) {
	events()
	onStores(t, func(t *testing.T, st *stage) {
		l := openLogin(t)
		s := serve(t, st.zones(failing("ban 1h after 5/15m"), l.dial))
		for range 20 {
			s.enters("ann", "192.0.2.1")
		}
		for range 5 {
			eventually(t, 5*time.Second, "a guess is let through", func() bool {
				return s.get("/", "X-User", "ann", "X-Forwarded-For", "192.0.2.1", "X-Password", "wrong").StatusCode == 401
			})
		}
		eventually(t, 5*time.Second, "the ban is known", func() bool {
			a := s.guess("ann", "192.0.2.1", "right", 429)
			return strings.Contains(a.body, "abnormal-usage-detected") && s.wait(a) <= 3600 && s.wait(a) > 3590
		})
		s.enters("ann", "192.0.2.2")
		s.enters("bob", "192.0.2.1")
		if l.wrong != 5 || len(bans()) != 1 {
			t.Errorf("%d wrong passwords came through", l.wrong)
		}
		if st.clock == nil {
			return
		}
		ann := []string{"X-User", "ann", "X-Forwarded-For", "192.0.2.1", "X-Password", "right"}
		st.clock.add(time.Hour - time.Microsecond)
		s.banned("login", 1, "/", ann...)
		st.clock.add(time.Microsecond)
		s.pass(10, "/", ann...)
	})
}

// A thousand guesses at once earn one ban.
func TestConcurrentGuessesEarnOneBan(t *testing.T) {
	events()
	onStores(t, func(t *testing.T, st *stage) {
		l := openLogin(t)
		s := serve(t, st.zones(failing("ban 1m 1h after 5/15m"), l.dial))
		came := make(chan struct{}, 1000)
		for range cap(came) {
			go func() {
				_, _ = s.try("GET", "/")
				came <- struct{}{}
			}()
		}
		for range cap(came) {
			<-came
		}
		got := bans()
		if len(got) != 1 || got[0].Data["step"] != 1 || l.wrong != 5 {
			t.Errorf("%d bans, %d wrong passwords: %v", len(got), l.wrong, got)
		}
	})
}

// Whom a rule does not refuse it does not ban.
func TestNoBanWithoutRefusal(t *testing.T) {
	for _, options := range []string{"dry_run", "enforce 0%"} {
		t.Run(options, func(t *testing.T) {
			onStores(t, func(t *testing.T, st *stage) {
				events()
				s := serve(t, st.config("rate_limit {\nzone b 1/365d"+everyone+"ban 1h after 2/10m\n "+options+"\n}\n}\nrespond ok"))
				s.pass(20, "/")
				if n := s.metric(`caddy_rate_limit_bans_total{zone="b"}`); n != 0 || len(events()) != 0 || len(logged(t, "client banned")) != 0 {
					t.Errorf("%v bans", n)
				}
				if n := s.decided("b", "rejected_dry_run"); n != 19 {
					t.Errorf("%d would have been refused", n)
				}
				// Nor does it later for what was not refused then.
				s.mustLoad(st.config("rate_limit {\nzone b 1/365d" + everyone + "ban 1h after 2/10m\n}\n}\nrespond ok"))
				s.refusedOnly(1, "/")
			})
		})
	}
}

// The key in an event stays what it was: subscribers may keep it.
func TestBanEventKeepsItsKey(t *testing.T) {
	events()
	s := serve(t, new(stage).config("rate_limit {\nlog_key\nzone b 1/1h {\n key {header.X-User}\n ban 1m after 1/10m\n}\n}\nrespond ok"))
	s.pass(1, "/", "X-User", "ann who is banned")
	s.refused("/", "X-User", "ann who is banned")
	for range 100 {
		s.get("/", "X-User", "bob who is nobody")
	}
	got := bans()
	if len(got) != 2 || got[0].Data["key"] != "ann who is banned" || got[1].Data["key"] != "bob who is nobody" {
		t.Error(got)
	}
}

// What only a later rule of the zone needs for its bans lives as long as the zone, and no longer.
func TestBansOfTwoRulesOneZone(t *testing.T) {
	c := useClock(t)
	site := func(path, bans string) string {
		return "rate_limit {\nzone b 1/1s {\n match {\n path " + path + "\n }\n key everyone\n ban " + bans + " after 1/10m\n}\n}\n"
	}
	config := ":80 {\nroute {\n" + site("/first", "1m") + site("/second", "1m 10m") + "respond ok\n}\n}"
	s := serve(t, config)
	for _, seconds := range []int{60, 600} {
		s.pass(1, "/second")
		s.banned("b", seconds, "/second")
		c.add(time.Duration(seconds) * time.Second)
	}
	s.mustLoad(":80 {\nrespond ok\n}")
	s.mustLoad(config)
	s.pass(1, "/second")
	s.banned("b", 60, "/second")
}

// H15. A ban was earned: clients without end push out what others have used, but no ban.
func TestBansOutliveMaxKeys(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone z 1/1h {\n key {header.X-Key}\n ban 2h after 1/1h\n }\n max_keys 50\n }\n respond ok\n}")
	for i := range 200 {
		s.pass(1, "/", "X-Key", fmt.Sprint(i))
		s.refused("/", "X-Key", fmt.Sprint(i))
	}
	for i := range 200 {
		if a := s.do("GET", "/", "X-Key", fmt.Sprint(i)); a.StatusCode != 429 || s.wait(a) < 7000 {
			t.Fatalf("client %d is no longer banned: %s, Retry-After %s", i, a.Status, a.Header.Get("Retry-After"))
		}
	}
}

// A ban that was earned while Redis was away holds on its instance when Redis is back, as the
// client and the log were told, over a reload too. Others are decided in Redis as ever.
func TestBanOfAnOutageOutlivesIt(t *testing.T) {
	r := redistest.Start(t)
	config := sharing(r.Addr, "timeout 2s", "zone outage 10/1h {\n key {header.X-User}\n ban 1h after 2/10m\n}")
	s := serve(t, config)
	banned := func() float64 { return s.metric(`caddy_rate_limit_bans_total{zone="outage"}`) }
	s.pass(1, "/", "X-User", "ann")
	r.Kill()
	eventually(t, 10*time.Second, "the store to go down", func() bool { s.get("/", "X-User", "bob"); return len(logged(t, downLine)) > 0 })
	eventually(t, 10*time.Second, "a ban", func() bool { s.get("/", "X-User", "ann"); return banned() == 1 })
	r.Launch()
	eventually(t, 10*time.Second, "the store's return", func() bool { return len(logged(t, upLine)) > 0 })
	for range 3 {
		if a := s.refused("/", "X-User", "ann"); s.wait(a) < 3500 {
			t.Error(a.Header, a.body)
		}
	}
	s.mustLoad(config)
	s.refused("/", "X-User", "ann")
	s.mustLoad(strings.Replace(config, "timeout 2s", "timeout 2001ms", 1)) // G34: another store, for the same Redis
	s.refused("/", "X-User", "ann")
	s.pass(1, "/", "X-User", "cid")
	if n := banned(); n != 1 {
		t.Errorf("%v bans are counted, want 1", n)
	}
}
