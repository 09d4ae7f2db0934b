package sluice_test

// Costs that are known only after the response, as of a model gateway whose upstream says how many
// tokens it used.

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// gateway is an upstream whose responses say, in a header or a trailer, that they cost what the
// request's X-Use says. /hold ends when it is told to, /silent never begins.
func gateway(t testing.TB) *holding {
	h := &holding{end: make(chan struct{})}
	h.dial = upstream(t, func(w http.ResponseWriter, r *http.Request) {
		used := r.Header.Get("X-Use")
		switch r.URL.Path {
		case "/trailer":
			w.Header().Set("Trailer", "X-Tokens-Used")
			defer w.Header().Set("X-Tokens-Used", used)
		case "/silent":
			<-r.Context().Done()
			return
		default:
			if used != "" {
				w.Header().Set("X-Tokens-Used", used)
			}
		}
		fmt.Fprintln(w, "some tokens")
		w.(http.Flusher).Flush()
		if r.URL.Path == "/hold" {
			select {
			case <-h.end:
			case <-r.Context().Done():
			}
		}
		fmt.Fprintln(w, "and the last")
	})
	return h
}

// metered is a zone m that charges what the response says. X-Cost is what is reserved before.
func metered(limit, charge string) string {
	return "zone m " + limit + everyone + "algorithm token_bucket\n cost {header.X-Cost}\n charge " + charge + "\n}"
}

const tokensUsed = "{http.response.header.X-Tokens-Used}"

// look asks what is left, at no cost.
func (s *server) look(path string) int {
	s.t.Helper()
	a := s.get(path, "X-Cost", "0")
	if a.StatusCode != 200 {
		s.t.Fatal(a.Status, a.Header, a.body)
	}
	return a.left("m")
}

// settled waits until so many units are left.
func (s *server) settled(want int) {
	s.t.Helper()
	var left int
	defer func() {
		if left != want {
			s.t.Errorf("%d units are left, want %d", left, want)
		}
	}()
	eventually(s.t, 5*time.Second, fmt.Sprint(want, " units are left"), func() bool { left = s.look("/"); return left == want })
}

// Over an hour the average is the quota, within what one request costs, whatever the responses
// cost; a refused client that waits as long as it is told is admitted.
func TestModelGatewayOverAnHour(t *testing.T) {
	const quota, burst, reserve, most = 36_000, 1000, 100, 1500
	c := useClock(t)
	up := gateway(t)
	s := serve(t, ":80 {\nrate_limit {\n"+strings.Replace(metered(fmt.Sprintf("%d/1h", quota), tokensUsed), "cost ", fmt.Sprintf("burst %d\n cost ", burst), 1)+"\n}\nreverse_proxy "+up.dial+"\n}")
	random := rand.New(rand.NewPCG(4, 2))
	start, used, passed, refused, waited := c.micros.Load(), 0, 0, 0, false
	for c.micros.Load()-start < time.Hour.Microseconds() {
		use := random.IntN(most + 1)
		a := s.get("/", "X-Cost", strconv.Itoa(reserve), "X-Use", strconv.Itoa(use))
		if a.StatusCode == 200 {
			used += use
			passed++
			waited = false
			c.add(time.Duration(random.IntN(2000)) * time.Millisecond)
			continue
		}
		wait := s.wait(a)
		if a.StatusCode != 429 || wait < 1 || waited {
			t.Fatal("refused after the wait that it was told:", a.Status, a.Header)
		}
		refused++
		waited = true
		c.add(time.Duration(wait) * time.Second)
	}
	fair := burst + int((c.micros.Load()-start)*quota/time.Hour.Microseconds())
	t.Logf("%d requests used %d tokens where the quota and the burst gave %d; %d refusals", passed, used, fair, refused)
	if used > fair+most || used < fair-most || refused < 10 {
		t.Errorf("%d tokens used, want %d within %d", used, fair, most)
	}
}

// A response that costs more than there is leaves a debt, which is paid back before the next one
// passes.
func TestDebtIsPaidBack(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		up := gateway(t)
		s := serve(t, st.zones(strings.Replace(metered("3600/1h", tokensUsed), "cost ", "burst 10\n cost ", 1), up.dial))
		s.pass(1, "/", "X-Cost", "1", "X-Use", "100")
		s.settled(0)
		a := s.refused("/", "X-Cost", "1")
		// 100 used of 10, and one more: 91 s, less what has passed since.
		if wait := s.wait(a); wait > 91 || wait < 88 || st.clock != nil && wait != 91 {
			t.Error(a.Header)
		}
		if a.Header.Get("Ratelimit") != fmt.Sprintf(`"m";r=0;t=%d`, s.wait(a)) {
			t.Error(a.Header)
		}
		if st.clock == nil {
			return
		}
		st.clock.add(91*time.Second - time.Microsecond)
		if a := s.refused("/", "X-Cost", "1"); s.wait(a) != 1 {
			t.Error(a.Header)
		}
		st.clock.add(time.Microsecond)
		s.pass(1, "/", "X-Cost", "1")
	})
}

// What responses say is settled: more is taken, less is given back, and what is missing or no
// number leaves the reservation.
func TestChargeSettles(t *testing.T) {
	const warning = "a charge is not a whole number from 0 to its max and is ignored: the cost stands; this is logged once"
	onStores(t, func(t *testing.T, st *stage) {
		up := gateway(t)
		s := serve(t, st.zones(metered("1000/365d", tokensUsed), up.dial))
		left := 1000
		for _, step := range []struct {
			use   string
			costs int
		}{{"", 10}, {"25", 25}, {"10", 10}, {"4", 4}, {"0", 0}, {"-5", 10}, {"many", 10}, {"1e3", 10}, {strings.Repeat("9", 30), 10}, {fmt.Sprint(algorithms.MaxExact), 10}, {"100001", 10}, {"+7", 7}} {
			left -= step.costs
			s.pass(1, "/", "X-Cost", "10", "X-Use", step.use)
			s.settled(left)
		}
		if n := s.metric(`caddy_rate_limit_cost_errors_total{zone="m"}`); n != 6 {
			t.Errorf("%v cost errors are counted, want 6", n)
		}
		if lines := logged(t, warning); len(lines) != 1 || lines[0]["zone"] != "m" {
			t.Errorf("%v", lines)
		}
		// The greatest number that is believed is a debt: H12, 100 times what the zone admits at
		// once.
		s.pass(1, "/", "X-Cost", "10", "X-Use", "100000")
		s.settled(0)
		if a := s.refused("/", "X-Cost", "1"); s.wait(a) < 365*86400 {
			t.Error(a.Header)
		}
	})
}

// Where the cost can be read from: also from what the client does not get to see.
func TestChargeSources(t *testing.T) {
	for _, source := range []struct{ name, charge, path, proxy string }{
		{"header", tokensUsed, "/", ""},
		{"trailer", tokensUsed, "/trailer", ""},
		{"of the upstream only", "{http.reverse_proxy.header.X-Tokens-Used}", "/", "header_down -X-Tokens-Used"},
	} {
		t.Run(source.name, func(t *testing.T) {
			onStores(t, func(t *testing.T, st *stage) {
				up := gateway(t)
				s := serve(t, st.config("rate_limit {\n"+metered("1000/365d", source.charge)+"\n}\nreverse_proxy "+up.dial+" {\n "+source.proxy+"\n}"))
				for i := range 3 {
					a := s.get(source.path, "X-Cost", "10", "X-Use", "25")
					if a.StatusCode != 200 || !strings.HasSuffix(a.body, "and the last\n") {
						t.Error(a.Status, a.body)
					}
					if shown := a.Header.Get("X-Tokens-Used") + a.Trailer.Get("X-Tokens-Used"); (shown == "") != (source.proxy != "") {
						t.Errorf("the client sees %q", shown)
					}
					s.settled(1000 - 25*(i+1))
				}
			})
		})
	}
}

// A response is settled when it is over: until then it is the reservation that is taken. So is one
// that the client does not wait for, since it has been made; and who leaves before it begins has
// paid the reservation.
func TestChargeIsSettledAfterTheBody(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		up := gateway(t)
		s := serve(t, st.config("route {\nrate_limit {\n"+metered("1000/365d", tokensUsed)+"\n}\ninside\nreverse_proxy "+up.dial+"\n}"))
		resp := s.begin("X-Cost", "10", "X-Use", "100")
		if left := s.look("/"); left != 990 {
			t.Errorf("%d units are left while the response is under way, want 990", left)
		}
		up.end <- struct{}{}
		if rest, err := io.ReadAll(resp.Body); err != nil || !strings.HasSuffix(string(rest), "last\n") {
			t.Errorf("%q %v", rest, err)
		}
		s.settled(900)
		resp = s.begin("X-Cost", "10", "X-Use", "100")
		resp.Body.Close()
		s.settled(800)
		ctx, leave := context.WithCancel(context.Background())
		came := s.send(ctx, "/silent", "X-Cost", "10", "X-Use", "100")
		eventually(t, 5*time.Second, "the request is under way", func() bool { return insideNow.Load() == 1 })
		leave()
		<-came
		eventually(t, 5*time.Second, "the request is over", func() bool { return insideNow.Load() == 0 })
		s.settled(790)
	})
}

// While Redis does not answer a response that was begun comes to its end; it is settled when Redis
// is back.
func TestSettlingDelaysNoResponse(t *testing.T) {
	redis := redistest.Start(t)
	up := gateway(t)
	s := serve(t, (&stage{redis: redis}).zones(metered("1000/365d", tokensUsed), up.dial))
	resp := s.begin("X-Cost", "10", "X-Use", "100")
	body := bufio.NewReader(resp.Body)
	redis.Stop()
	defer redis.Continue()
	up.end <- struct{}{}
	if rest, err := io.ReadAll(body); err != nil || !strings.HasSuffix(string(rest), "last\n") {
		t.Errorf("%q %v", rest, err)
	}
	redis.Continue()
	s.settled(900)
}
