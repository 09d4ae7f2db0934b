package sluice_test

// Requests that wait for their turn, in front of a real upstream. In this process the store's clock
// stands still while they wait on the real one, so that every delay that is told can be foreseen to
// the microsecond; when requests reach the upstream is measured, and only reported.

import (
	"cmp"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// arrivals are the requests that an upstream got, in order.
type arrivals struct {
	mu   sync.Mutex
	list []arrival
}

type arrival struct {
	name  string // X-Name
	delay time.Duration
	at    time.Time
}

// watchArrivals starts an upstream that answers with the SHA-256 of the body it got.
func watchArrivals(t testing.TB) (*arrivals, string) {
	a := new(arrivals)
	return a, upstream(t, func(w http.ResponseWriter, r *http.Request) {
		at := time.Now()
		seconds, err := strconv.ParseFloat(r.Header.Get("X-Delay"), 64)
		if err != nil {
			t.Errorf("X-Delay: %v", err)
		}
		delay := time.Duration(math.Round(seconds*1e6)) * time.Microsecond
		a.mu.Lock()
		a.list = append(a.list, arrival{r.Header.Get("X-Name"), delay, at})
		a.mu.Unlock()
		sum := sha256.New()
		n, err := io.Copy(sum, r.Body)
		fmt.Fprintf(w, "%d %x %v", n, sum.Sum(nil), err)
	})
}

func (a *arrivals) all() []arrival {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.list)
}

func (a *arrivals) names() (names []string) {
	for _, arrival := range a.all() {
		names = append(names, arrival.name)
	}
	return names
}

// check wants the requests to have arrived with these delays in order, none before its slot. The
// store's clock may have moved by late between the first decision and the last one.
func (a *arrivals) check(t *testing.T, start time.Time, late time.Duration, want ...time.Duration) {
	t.Helper()
	list := a.all()
	if len(list) != len(want) {
		t.Fatalf("%d requests arrived, want %d: %v", len(list), len(want), list)
	}
	for i, got := range list {
		// A machine that is busy for longer than a slot lasts may let one overtake another on the
		// way, which is no fault of the queue.
		if late := got.at.Sub(start) - got.delay; i > 0 && got.delay < list[i-1].delay && late < 90*time.Millisecond {
			t.Errorf("arrival %d, of delay %v, came behind one of %v", i, got.delay, list[i-1].delay)
		}
	}
	slices.SortStableFunc(list, func(a, b arrival) int { return cmp.Compare(a.delay, b.delay) })
	for i, got := range list {
		if got.delay > want[i] || got.delay < want[i]-late {
			t.Errorf("arrival %d was told to wait %v, want %v (less up to %v)", i, got.delay, want[i], late)
		}
		after := got.at.Sub(start)
		if after < got.delay || after > got.delay+5*time.Second {
			t.Errorf("arrival %d, of delay %v, came after %v", i, got.delay, after)
		}
		t.Logf("delay %v: %v after the first", got.delay, got.at.Sub(list[0].at).Round(10*time.Microsecond))
	}
}

// queued sends requests with these names one after the other, each decided before the next, all but
// those that go at once being delayed.
func (s *server) queued(ctx context.Context, names ...string) (came []<-chan *answer) {
	s.t.Helper()
	decided := func() int { return s.decided("q", "passed") + s.decided("q", "delayed") }
	for _, name := range names {
		before := decided()
		came = append(came, s.send(ctx, "/", "X-Name", name))
		eventually(s.t, 10*time.Second, name+" is decided", func() bool { return decided() > before })
	}
	return came
}

func (s *server) waiting() int { return s.waitingIn("q") }

func (s *server) waitingIn(zone string) int {
	return int(s.metric(`caddy_rate_limit_waiting{zone="` + zone + `"}`))
}

// waits sends a request that must wait, so that n do. In Redis the slot or the lease of who was
// there before may not be back yet, and who finds none is refused and takes nothing.
func (s *server) waits(ctx context.Context, zone string, n int, header ...string) (came <-chan *answer) {
	s.t.Helper()
	eventually(s.t, 10*time.Second, "the next one waits", func() bool {
		if came == nil {
			came = s.send(ctx, "/", header...)
		}
		select {
		case a := <-came:
			if a == nil || a.StatusCode != 429 {
				s.t.Fatal(a)
			}
			came = nil
		default:
		}
		return s.waitingIn(zone) == n
	})
	return came
}

// everyone begins a zone with one counter for all.
const everyone = " {\n key everyone\n "

func TestQueueVectors(t *testing.T) {
	for options, slots := range map[string][]time.Duration{
		"queue 5":                    {0, 1, 2, 3, 4, 5},
		"queue 5 delay 3":            {0, 0, 0, 0, 1, 2},
		"queue 5 max_wait 2.5 slots": {0, 1, 2},
	} {
		t.Run(options, func(t *testing.T) {
			onStores(t, func(t *testing.T, st *stage) {
				rate := time.Duration(10)
				if st.redis != nil { // its clock goes on while the seven are decided
					rate = 2
				}
				slot := time.Second / rate
				zone := fmt.Sprintf("zone q %d/1s", rate) + everyone + strings.Replace(options, "2.5 slots", (5*slot/2).String(), 1) + "\n}"
				var want []time.Duration
				for _, n := range slots {
					want = append(want, n*slot)
				}
				for try := 1; !sevenAtOnce(t, st, zone, slot/2, want); try++ {
					if try == 10 {
						t.Fatal("the machine is too busy")
					}
				}
			})
		})
	}
}

// sevenAtOnce wants those that pass delayed so, and the others refused. It reports false, and
// forgets them, if they were not all decided within most of the store's time.
func sevenAtOnce(t *testing.T, st *stage, zone string, most time.Duration, want []time.Duration) bool {
	seen, dial := watchArrivals(t)
	s := serve(t, st.zones(zone, dial))
	const n = 7
	var came [n]<-chan *answer
	start := time.Now()
	for i := range came {
		came[i] = s.send(context.Background(), "/")
	}
	eventually(t, 10*time.Second, "all are decided", func() bool { return s.metric(`caddy_rate_limit_requests_total{zone="q"}`) == n })
	late := time.Duration(0)
	if st.redis != nil {
		late = time.Since(start)
	}
	if late > most {
		t.Log("all are decided after", late)
		for _, a := range came {
			<-a
		}
		if err := caddy.Stop(); err != nil {
			t.Fatal(err)
		}
		st.redis.Do("flushall")
		return false
	}
	passed := 0
	for i := range came {
		switch a := <-came[i]; {
		case a != nil && a.StatusCode == 200:
			passed++
		case a == nil || a.StatusCode != 429 || s.wait(*a) != 1 || a.Header.Get("Ratelimit") != `"q";r=0;t=1`:
			t.Errorf("request %d: %+v", i, a)
		}
	}
	if passed != len(want) {
		t.Errorf("%d passed, want %d", passed, len(want))
	}
	seen.check(t, start, late, want...)
	delayed := 0
	for _, delay := range want {
		if delay > 0 {
			delayed++
		}
	}
	if got := s.decided("q", "delayed"); got != delayed || s.decided("q", "passed") != len(want)-delayed || s.decided("q", "rejected") != n-len(want) {
		t.Errorf("%d delayed, want %d:\n%s", got, delayed, s.metrics())
	}
	if got := s.metric(`caddy_rate_limit_delay_seconds_count{zone="q"}`); int(got) != delayed || s.waiting() != 0 {
		t.Errorf("%v delays are counted, want %d; %d wait", got, delayed, s.waiting())
	}
	return true
}

// What a refused client is told is true to the microsecond: an interval later there is a slot, and
// not before.
func TestQueueRetryIsTight(t *testing.T) {
	c := useClock(t)
	seen, dial := watchArrivals(t)
	s := serve(t, new(stage).zones("zone q 10/1s"+everyone+"queue 2\n}", dial))
	came := s.queued(context.Background(), "0", "1", "2")
	s.refused("/")
	c.add(100*time.Millisecond - time.Microsecond)
	s.refused("/")
	c.add(time.Microsecond)
	came = append(came, s.send(context.Background(), "/", "X-Name", "3"))
	for _, a := range came {
		if a := <-a; a == nil || a.StatusCode != 200 {
			t.Error(a)
		}
	}
	if list := seen.all(); len(list) != 4 || !slices.ContainsFunc(list, func(a arrival) bool { return a.name == "3" && a.delay == 200*time.Millisecond }) {
		t.Errorf("%+v, want the last one to have the last slot", list)
	}
}

func TestQueuePolicyOnTheWire(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		_, dial := watchArrivals(t)
		s := serve(t, st.zones("zone q 10/1s"+everyone+"queue 5\n}", dial))
		a := s.get("/")
		if a.Header.Get("Ratelimit-Policy") != `"q";q=6;w=1` || a.left("q") != 5 {
			t.Error(a.Header)
		}
	})
}

// One key's line is no other's.
func TestQueueOfEachKey(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		seen, dial := watchArrivals(t)
		s := serve(t, st.zones("zone q 5/1s {\n key {header.X-Name}\n queue 1\n}", dial))
		start := time.Now()
		var came []<-chan *answer
		for i := range 16 {
			came = append(came, s.send(context.Background(), "/", "X-Name", fmt.Sprint(i%8)))
		}
		for _, a := range came {
			if a := <-a; a == nil || a.StatusCode != 200 {
				t.Fatal(a)
			}
		}
		late := time.Since(start)
		if st.redis == nil {
			late = 0
		}
		delays := map[string][]time.Duration{}
		for _, a := range seen.all() {
			delays[a.name] = append(delays[a.name], a.delay)
		}
		for key, d := range delays {
			slices.Sort(d)
			if len(d) != 2 || d[0] != 0 || d[1] > 200*time.Millisecond || d[1] < 200*time.Millisecond-late {
				t.Errorf("key %s: delays %v, want 0 and 200ms", key, d)
			}
		}
	})
}

// SEMANTICS's leaver, at a rate that a busy machine keeps up with: A 0, B 2 s, C 4 s, D 6 s; B
// leaves: C goes at 2 s, D at 4 s, and a newcomer gets 6 s.
func TestF51WhoLeavesTheQueueFreesItsPlace(t *testing.T) {
	useClock(t)
	seen, dial := watchArrivals(t)
	s := serve(t, new(stage).zones("zone q 1/2s"+everyone+"queue 5\n}", dial))
	sent := map[string]time.Time{}
	var came []<-chan *answer
	enter := func(ctx context.Context, name string) <-chan *answer {
		sent[name] = time.Now()
		return s.queued(ctx, name)[0]
	}
	ctx, leave := context.WithCancel(context.Background())
	came = append(came, enter(context.Background(), "A"))
	b := enter(ctx, "B")
	came = append(came, enter(context.Background(), "C"), enter(context.Background(), "D"))
	leave()
	if a := <-b; a != nil {
		t.Error("B got an answer:", a)
	}
	eventually(t, 10*time.Second, "B has left", func() bool { return s.waiting() <= 2 })
	came = append(came, enter(context.Background(), "newcomer"))
	for _, a := range came {
		if a := <-a; a == nil || a.StatusCode != 200 {
			t.Error(a)
		}
	}
	if names := seen.names(); !slices.Equal(names, []string{"A", "C", "D", "newcomer"}) {
		t.Fatal(names)
	}
	// What was told at the decision, and the slot in the end.
	told := []time.Duration{0, 4, 6, 6}
	slot := []time.Duration{0, 2, 4, 6}
	for i, a := range seen.all() {
		after, told, slot := a.at.Sub(sent[a.name]), told[i]*time.Second, slot[i]*time.Second
		if a.delay != told || after < slot || slot < told && after >= told {
			t.Errorf("%s was told %v, came after %v; want %v and at least %v, less than was told to who moved up", a.name, a.delay, after, told, slot)
		}
		t.Logf("%s: slot %v, came after %v", a.name, slot, after.Round(100*time.Microsecond))
	}
}

// On every store the last slot is free again when its owner leaves.
func TestF51LastSlotIsGivenBack(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		_, dial := watchArrivals(t)
		s := serve(t, st.zones("zone q 1/1h"+everyone+"queue 2\n}", dial))
		ctx, end := context.WithCancel(context.Background())
		came := s.queued(ctx, "A", "B")
		leaving, leave := context.WithCancel(ctx)
		last := s.queued(leaving, "C")
		s.refused("/")
		leave()
		<-last[0]
		eventually(t, 10*time.Second, "C has left", func() bool { return s.waiting() == 1 })
		came = append(came, s.waits(ctx, "q", 2, "X-Name", "newcomer"))
		s.refused("/")
		end()
		for _, a := range came {
			<-a
		}
	})
}

// Who leaves while it waits holds no lease either.
func TestF51LeaseOfWhoLeavesTheQueue(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		_, dial := watchArrivals(t)
		s := serve(t, st.zones("zone q 1/1h"+everyone+"queue 5\n}\nzone c"+everyone+"concurrency 1\n}", dial))
		s.pass(1, "/")
		eventually(t, 5*time.Second, "the lease of the first is back", func() bool { return s.metric(`caddy_rate_limit_in_flight{zone="c"}`) == 0 })
		for range 3 { // each would find the lease taken, and after an hour's wait nobody would know
			ctx, leave := context.WithCancel(context.Background())
			came := s.waits(ctx, "q", 1)
			if a := s.refused("/"); a.left("c") != 0 {
				t.Error("while one waits:", a.Header)
			}
			leave()
			<-came
			eventually(t, 5*time.Second, "nobody waits", func() bool {
				return s.waiting() == 0 && s.metric(`caddy_rate_limit_in_flight{zone="c"}`) == 0
			})
		}
	})
}

// h2c is a client that speaks HTTP/2 without encryption.
func h2c(t testing.TB) *http.Client {
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 20 * time.Second}
}

// A body that comes with a request which must wait arrives whole, whatever its size and however it
// comes.
func TestF52BodyOfDelayedRequest(t *testing.T) {
	content := strings.Repeat("0123456789abcdef", 1<<16)
	want := fmt.Sprintf("%d %x <nil>", len(content), sha256.Sum256([]byte(content)))
	onStores(t, func(t *testing.T, st *stage) {
		seen, dial := watchArrivals(t)
		s := serve(t, st.zones("zone q 10/1s {\n key {header.X-Name}\n queue 5\n}", dial))
		http1 := &http.Client{Transport: &http.Transport{ExpectContinueTimeout: 20 * time.Second}, Timeout: 20 * time.Second}
		defer http1.CloseIdleConnections()
		for _, how := range []struct {
			name   string
			client *http.Client
			expect string
			body   func() io.Reader
		}{
			{"HTTP/2", h2c(t), "", func() io.Reader { return strings.NewReader(content) }},
			{"HTTP/2 of unknown length", h2c(t), "", func() io.Reader { return io.MultiReader(strings.NewReader(content)) }},
			{"HTTP/1.1", http1, "", func() io.Reader { return strings.NewReader(content) }},
			{"HTTP/1.1 that asks first", http1, "100-continue", func() io.Reader { return strings.NewReader(content) }},
			{"HTTP/1.1 chunked", http1, "", func() io.Reader { return io.MultiReader(strings.NewReader(content)) }},
		} {
			var delays []time.Duration
			for range 2 {
				req, err := http.NewRequest(http.MethodPost, "http://"+s.addr(), how.body())
				if err != nil {
					t.Fatal(err)
				}
				req.Header.Set("X-Name", how.name)
				if how.expect != "" {
					req.Header.Set("Expect", how.expect)
				}
				resp, err := how.client.Do(req)
				if err != nil {
					t.Fatal(how.name, err)
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil || resp.StatusCode != 200 || string(body) != want || !strings.HasPrefix(how.name, fmt.Sprintf("HTTP/%d", resp.ProtoMajor)) {
					t.Errorf("%s: %s %s %.100s %v", how.name, resp.Proto, resp.Status, body, err)
				}
				list := seen.all()
				delays = append(delays, list[len(list)-1].delay)
			}
			if st.clock != nil && !slices.Equal(delays, []time.Duration{0, 100 * time.Millisecond}) {
				t.Errorf("%s: delays %v", how.name, delays)
			}
		}
	})
}

// Requests that wait through a reload keep their slots, and newcomers stand behind them.
func TestQueueOverReload(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		seen, dial := watchArrivals(t)
		const slot, early = 500 * time.Millisecond, 8
		config := st.zones("zone q 2/1s"+everyone+"queue 20\n}", dial)
		s := serve(t, config)
		adapted, err := adapt(strings.Replace(config, "queue 20", "queue 30", 1))
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		var came []<-chan *answer
		for range early {
			came = append(came, s.send(context.Background(), "/", "X-Name", "early"))
		}
		eventually(t, 10*time.Second, "all are decided", func() bool { return s.decided("q", "passed")+s.decided("q", "delayed") == early })
		if err := s.loadJSON(adapted); err != nil {
			t.Fatal(err)
		}
		if s.waiting() == 0 {
			t.Fatal("nobody waits any more after the reload")
		}
		came = append(came, s.queued(context.Background(), "newcomer", "last")...)
		for i, a := range came {
			if a := <-a; a == nil || a.StatusCode != 200 {
				t.Errorf("request %d: %+v", i, a)
			}
		}
		list := seen.all()
		if len(list) != early+2 {
			t.Fatalf("%+v", list)
		}
		for i, a := range list {
			n := time.Duration(i)
			switch a.name { // a machine that is busy for longer than a slot lasts may let one overtake another on the way
			case "newcomer":
				n = early
			case "last":
				n = early + 1
			}
			if after := a.at.Sub(start); after < n*slot-time.Millisecond { // Redis's clock is another one
				t.Errorf("%s came after %v, want %v at least", a.name, after, n*slot)
			}
		}
		// Each is told the time from its own decision; only where the clock stands still those are
		// the slots.
		slices.SortFunc(list, func(a, b arrival) int { return cmp.Compare(a.delay, b.delay) })
		for i, a := range list {
			if want := time.Duration(i) * slot; st.redis == nil && a.delay != want || a.delay > want {
				t.Errorf("%s was told %v, want %v", a.name, a.delay, want)
			}
		}
	})
}

// At a shutdown those that wait are served, if the grace period lasts that long.
func TestQueueAtShutdown(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		seen, dial := watchArrivals(t)
		s := serve(t, strings.Replace(st.zones("zone q 4/1s"+everyone+"queue 5\n}", dial), "{\n", "{\ngrace_period 10s\n", 1))
		came := s.queued(context.Background(), "0", "1", "2")
		if err := caddy.Stop(); err != nil {
			t.Fatal(err)
		}
		for i, c := range came {
			if a := <-c; a == nil || a.StatusCode != 200 {
				t.Errorf("request %d: %+v", i, a)
			}
		}
		if names := slices.Sorted(slices.Values(seen.names())); !slices.Equal(names, []string{"0", "1", "2"}) {
			t.Error(names)
		}
	})
}

// Nobody's hour of waiting keeps a process from ending when its grace period is over.
func TestQueueDoesNotHoldUpShutdown(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	site := fmt.Sprintf("http://:%d {\n log\n rate_limit {\n zone q 1/1h {\n queue 5\n }\n }\n respond ok\n}\n", port)
	p := startCaddyWith(t, "\tgrace_period 300ms\n", site)
	url := fmt.Sprintf("http://127.0.0.1:%d/", port)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 20 * time.Second}
	if resp, _ := get(t, client, url); resp.StatusCode != 200 {
		t.Fatal(resp.Status)
	}
	ended := make(chan error, 1)
	go func() {
		resp, err := client.Get(url)
		if err == nil {
			resp.Body.Close()
		}
		ended <- err
	}()
	eventually(t, 10*time.Second, "one waits", func() bool {
		resp, body := get(t, client, p.admin+"/metrics")
		return resp.StatusCode == 200 && strings.Contains(body, `caddy_rate_limit_waiting{zone="q"} 1`)
	})
	start := time.Now()
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil || time.Since(start) > 5*time.Second {
		t.Errorf("the one that waits: %v after %v", err, time.Since(start))
	}
}

// A dry run, and a key that is not enforced yet, say who would have waited or been refused, and
// hold nobody.
func TestQueueDryRun(t *testing.T) {
	for _, options := range []string{"dry_run", "enforce 0%"} {
		t.Run(options, func(t *testing.T) {
			onStores(t, func(t *testing.T, st *stage) {
				seen, dial := watchArrivals(t)
				s := serve(t, st.zones("zone q 1/1h"+everyone+"queue 2\n "+options+"\n}", dial))
				for range 5 {
					if a := s.get("/"); a.StatusCode != 200 || a.Header["Ratelimit"] != nil {
						t.Error(a.Status, a.Header)
					}
				}
				if p, d, r := s.decided("q", "passed_dry_run"), s.decided("q", "delayed_dry_run"), s.decided("q", "rejected_dry_run"); p != 1 || d != 2 || r != 2 {
					t.Errorf("%d passed, %d delayed, %d rejected", p, d, r)
				}
				if len(seen.all()) != 5 || s.metric(`caddy_rate_limit_delay_seconds_count{zone="q"}`) != 0 || s.waiting() != 0 {
					t.Error("someone waited:", s.metrics())
				}
			})
		})
	}
}

// What another zone refuses takes no slot, whether it stands beside the queue or behind it.
func TestQueueBesideRefusingZone(t *testing.T) {
	const narrow = "zone narrow 1/1h {\n match {\n path /both\n }\n}"
	onStores(t, func(t *testing.T, st *stage) {
		seen, dial := watchArrivals(t)
		s := serve(t, st.zones("zone q 4/1s"+everyone+"queue 5\n}\n"+narrow, dial))
		s.pass(1, "/both")
		start := time.Now()
		for range 5 {
			// Once it is known that narrow refuses, Redis is not asked about q.
			if a := s.refused("/both"); a.left("q") < 5 && (st.redis == nil || a.left("q") >= 0) || !strings.Contains(a.body, `["narrow"]`) {
				t.Error(a.Header, a.body)
			}
		}
		s.pass(1, "/") // the one slot behind the first request
		list := seen.all()
		late := time.Since(start)
		if st.redis == nil {
			late = 0
		}
		if len(list) != 2 || list[1].delay > 250*time.Millisecond || list[1].delay < 250*time.Millisecond-late {
			t.Errorf("%+v", list)
		}
		if n := s.waiting(); n != 0 {
			t.Errorf("%d wait", n)
		}
	})
}

// Requests that are in a local queue while Redis decides, and are refused there, give back what
// they took: those that were to be served at once as well as those that have a slot, in whatever
// order they are answered.
func TestLocalQueueBesideRefusingRedis(t *testing.T) {
	redis := redistest.Start(t)
	s := serve(t, sharing(redis.Addr, patient, `
		zone q 1/1h {
			key everyone
			algorithm leaky_bucket
			queue 5 delay 3
			cost {header.X-Cost}
			store local
		}
		zone ours 1/1d {
			key everyone
		}`))
	left := func() int { return s.refused("/", "X-Cost", "6").left("q") } // refused by q, which asks nobody else
	s.pass(1, "/")
	redis.Stop()
	var came []<-chan *answer
	for range 5 {
		came = append(came, s.send(context.Background(), "/"))
	}
	eventually(t, 20*time.Second, "all to be in the queue", func() bool { return left() == 0 })
	redis.Continue()
	for _, c := range came {
		if a := <-c; a == nil || a.StatusCode != 429 || !strings.Contains(a.body, `["ours"]`) {
			t.Errorf("%+v", a)
		}
	}
	if n := left(); n != 5 {
		t.Errorf("%d left of the queue, want 5: only one was served", n)
	}
}

// A dry run's slot, beside one that the request would have waited for, is given back too when Redis
// refuses the request.
func TestDryRunsSlotBesideRefusingRedis(t *testing.T) {
	s := serve(t, sharing(redistest.Start(t).Addr, patient, `
		zone q 1/1h {
			key everyone
			algorithm leaky_bucket
			queue 1
			store local
			dry_run
		}
		zone enforced 4/1s {
			key everyone
			algorithm leaky_bucket
			queue 9
			store local
		}
		zone ours 1/1d {
			key {header.X-User}
		}`))
	s.pass(1, "/", "X-User", "ann") // is in service
	for range 3 {
		s.refused("/", "X-User", "ann") // had the slot
	}
	s.pass(1, "/", "X-User", "bob")
	if n := s.decided("q", "rejected_dry_run"); n != 0 {
		t.Errorf("the dry run would have refused %d, want none: the slot was free each time", n)
	}
	s.pass(1, "/", "X-User", "cid")
	if n := s.decided("q", "rejected_dry_run"); n != 1 {
		t.Errorf("the dry run would have refused %d, want one: bob has the slot", n)
	}
}

// Two rules that name one zone with a queue take two slots, and the request waits for the second of
// them.
func TestF33QueueByTwoRules(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		seen, dial := watchArrivals(t)
		rule := "rate_limit {\nzone q 1/1s" + everyone + "queue 5\n}\n}\n"
		s := serve(t, st.config("route {\n"+rule+rule+"reverse_proxy "+dial+" {\n header_up X-Delay {http.rate_limit.q.delay}\n}\n}"))
		start := time.Now()
		s.pass(1, "/")
		if list := seen.all(); list[0].at.Sub(start) < 990*time.Millisecond {
			t.Errorf("%+v came after %v", list, list[0].at.Sub(start))
		}
		if p, d := s.decided("q", "passed"), s.decided("q", "delayed"); p != 1 || d != 1 {
			t.Errorf("%d passed, %d delayed; want one of each", p, d)
		}
	})
}

// A request with slots in two queues of the shared store waits for the later one, whichever stands
// first.
func TestTwoSharedQueuesWaitForTheLater(t *testing.T) {
	const slow, fast = "zone slow {\n limit 2/1s\n algorithm leaky_bucket\n queue 9\n}\n", "zone fast {\n limit 20/1s\n algorithm leaky_bucket\n queue 9\n}\n"
	for _, zones := range []string{slow + fast, fast + slow} {
		s := serve(t, sharing(redistest.Start(t).Addr, patient, zones))
		start := time.Now()
		s.pass(2, "/") // one after the other, the second half a second later
		if took := time.Since(start); took < 450*time.Millisecond {
			t.Errorf("%v for two requests at 2 a second", took)
		}
	}
}
