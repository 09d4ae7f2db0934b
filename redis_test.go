package sluice_test

// Zones in a shared Redis, through a real Caddy with a real server: how much passes, how often
// Redis is asked, and how local zones stand beside shared ones.

import (
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// sharing is a config with a shared store, and zones at a site.
func sharing(addr, settings, zones string) string {
	return sharingSite(addr, settings, "rate_limit {\n"+zones+"\n}\nroute {\nreached\nrespond ok\n}")
}

// sharingSite is a config with a shared store, to whose events the subscriber listens, and a site.
// settings are further lines of the global option.
func sharingSite(addr, settings, site string) string {
	return fmt.Sprintf(`
{
	events {
		on rate_limit_store_down sluice_test
		on rate_limit_store_up sluice_test
	}
	rate_limit {
		redis %s {
			%s
		}
	}
}
:80 {
	%s
}`, addr, settings, site)
}

// patient: a busy machine is no outage.
const patient = "timeout 10s"

// decisions is how many script calls for decisions Redis has executed, by its own count: all but
// the announcements, which alone use ZCARD.
func decisions(r *redistest.Server) int {
	info, _ := r.Do("info", "commandstats").(string)
	calls := func(command string) (n int) {
		if _, rest, found := strings.Cut(info, "cmdstat_"+command+":calls="); found {
			fmt.Sscanf(rest, "%d,", &n)
		}
		return n
	}
	return calls("evalsha") + calls("eval") - calls("zcard")
}

// eventually polls until cond holds.
func eventually(t testing.TB, within time.Duration, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for start := time.Now(); !cond(); <-tick.C {
		if time.Since(start) > within {
			t.Fatalf("not within %v: %s", within, what)
		}
	}
}

// connections lists the ids of the clients that Redis has, but for the one that asks.
func connections(r *redistest.Server) (ids []string) {
	list, _ := r.Do("client", "list").(string)
	for line := range strings.Lines(list) {
		if fields := strings.Fields(line); len(fields) > 0 && !strings.Contains(line, " cmd=client") {
			ids = append(ids, fields[0])
		}
	}
	slices.Sort(ids)
	return ids
}

// slowWay is a way to a server on which answers take longer. It counts the connections that were
// made.
type slowWay struct {
	addr  string
	delay atomic.Int64 // of answers
	dials atomic.Int64
	conns sync.WaitGroup
}

func slowDown(t testing.TB, target string) *slowWay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &slowWay{addr: l.Addr().String()}
	done := make(chan struct{})
	w.conns.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			w.dials.Add(1)
			w.conns.Go(func() { w.carry(from, target, done) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		close(done)
		w.conns.Wait()
	})
	return w
}

func (w *slowWay) carry(from net.Conn, target string, done chan struct{}) {
	defer from.Close()
	to, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer to.Close()
	over := make(chan struct{}, 2)
	forward := func(to, from net.Conn, delay *atomic.Int64) {
		defer func() { over <- struct{}{} }()
		buf := make([]byte, 64<<10)
		for {
			n, err := from.Read(buf)
			if err != nil {
				return
			}
			if delay != nil {
				select {
				case <-done:
					return
				case <-time.After(time.Duration(delay.Load())):
				}
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
	}
	go forward(to, from, nil)
	go forward(from, to, &w.delay)
	select {
	case <-over:
	case <-done:
	}
}

// F34, over instances: two Caddy processes admit together what one limit allows, and not one more.
func TestTwoInstancesOneLimit(t *testing.T) {
	t.Parallel()
	const quota, requests, clients = 367, 2000, 100
	redis := redistest.Start(t)
	options := "\trate_limit {\n redis " + redis.Addr + " {\n" + patient + "\n}\n}\n"
	var urls [2]string
	for i := range urls {
		port := freePort(t)
		urls[i] = fmt.Sprintf("http://127.0.0.1:%d/", port)
		startCaddyWith(t, options, fmt.Sprintf("http://:%d {\n rate_limit {\n zone all %d/1h {\n key everyone\n algorithm sliding_log\n}\n}\n respond ok\n}\n", port, quota))
	}
	transport := &http.Transport{MaxIdleConnsPerHost: clients}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 30 * time.Second}
	var (
		wg              sync.WaitGroup
		next            atomic.Int64
		passed, refused [2]atomic.Int64
	)
	for range clients {
		wg.Go(func() {
			for i := next.Add(1); i <= requests; i = next.Add(1) {
				resp, err := client.Get(urls[i%2])
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
				switch resp.StatusCode {
				case 200:
					passed[i%2].Add(1)
				case 429:
					refused[i%2].Add(1)
				default:
					t.Error(resp.Status)
				}
			}
		})
	}
	wg.Wait()
	if total := passed[0].Load() + passed[1].Load(); total != quota {
		t.Errorf("%d passed, want %d", total, quota)
	}
	if passed[0].Load() == 0 || passed[1].Load() == 0 || refused[0].Load()+refused[1].Load() != requests-quota {
		t.Errorf("%d and %d passed, %d and %d refused", passed[0].Load(), passed[1].Load(), refused[0].Load(), refused[1].Load())
	}
}

// zonesByPath are eight zones, of which a request to /n meets n.
func zonesByPath() string {
	var zones strings.Builder
	for k := 1; k <= 8; k++ {
		fmt.Fprintf(&zones, "zone z%d 1000/1h {\n match {\n path", k)
		for n := k; n <= 8; n++ {
			fmt.Fprintf(&zones, " /%d", n)
		}
		fmt.Fprint(&zones, "\n}\n}\n")
	}
	return zones.String()
}

// Redis is asked once for each request, whatever its zones; requests that come together share
// calls.
func TestOneDecisionCallPerRequest(t *testing.T) {
	redis := redistest.Start(t)
	way := slowDown(t, redis.Addr)
	s := serve(t, sharing(way.addr, patient, zonesByPath()))
	s.pass(1, "/8") // Redis learns the script
	const each = 10
	for n := 1; n <= 8; n++ {
		before := decisions(redis)
		s.pass(each, fmt.Sprintf("/%d", n))
		if calls := decisions(redis) - before; calls != each {
			t.Errorf("%d zones: %d calls for %d requests", n, calls, each)
		}
		if left := s.get(fmt.Sprintf("/%d", n)).left(fmt.Sprintf("z%d", n)); left < 0 {
			t.Errorf("%d zones: the last one is not told", n)
		}
	}
	way.delay.Store(int64(20 * time.Millisecond)) // so that others come meanwhile, on a busy machine too
	const together = 400
	before := decisions(redis)
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			for range together / 40 {
				if a, err := s.try(http.MethodGet, "/3"); err != nil || a.StatusCode != 200 {
					t.Error(a.Response, err)
				}
			}
		})
	}
	wg.Wait()
	if calls := decisions(redis) - before; calls < 1 || calls > together/2 {
		t.Errorf("%d calls for %d requests that came together, want fewer", calls, together)
	}
}

// A client that hammers while it is refused costs Redis one call for each retry period, and is told
// a countdown that is true to the end.
func TestHammeringCostsOneCall(t *testing.T) {
	redis := redistest.Start(t)
	s := serve(t, sharing(redis.Addr, patient, "zone z 2/2s {\n algorithm sliding_log\n}"))
	start := time.Now() // the first unit is back 2 s after it was taken, which is later than this
	s.pass(2, "/")
	before := decisions(redis)
	var waits []int
	for {
		a := s.get("/")
		left := 2*time.Second - time.Since(start)
		if a.StatusCode == 200 {
			if left > 0 {
				t.Errorf("admitted %v early", left)
			}
			break
		}
		wait := s.wait(a)
		if a.StatusCode != 429 || wait < 1 || a.Header.Get("Ratelimit") != fmt.Sprintf(`"z";r=0;t=%d`, wait) || a.Header.Get("Ratelimit-Policy") != `"z";q=2;w=2` {
			t.Fatal(a.Status, a.Header)
		}
		if time.Duration(wait)*time.Second < left {
			t.Errorf("Retry-After: %d, but it takes %v", wait, left)
		}
		if len(waits) == 0 || waits[len(waits)-1] != wait {
			waits = append(waits, wait)
		}
		if left < -8*time.Second {
			t.Fatal("never admitted again")
		}
	}
	// A machine that is busy for a second may miss one of them, or all.
	if !slices.Equal(waits, []int{2, 1}) && len(waits) > 1 || slices.Max(append(waits, 0)) > 2 {
		t.Errorf("Retry-After counted %v, want 2 and 1", waits)
	}
	if calls := decisions(redis) - before; calls != min(1+len(waits), 2) {
		t.Errorf("%d calls, want one for the first refusal and one for the admission", calls)
	}
}

// A refusal by a local zone never reaches Redis, and what local zones gave is given back when the
// shared store refuses.
func TestLocalZonesBesideShared(t *testing.T) {
	redis := redistest.Start(t)
	s := serve(t, sharing(redis.Addr, patient, `
		zone mine 3/1h {
			key {header.X-A}
			store local
		}
		zone ours 4/1d {
			key {header.X-B}
		}`))
	s.pass(3, "/", "X-A", "a", "X-B", "b")
	before := decisions(redis)
	for range 5 {
		a := s.refused("/", "X-A", "a", "X-B", "b")
		if wait := s.wait(a); wait > 3600 || wait < 3500 || a.left("mine") != 0 || a.left("ours") != -1 {
			t.Error("refused by the local zone:", a.Header)
		}
		if !strings.Contains(a.body, `["mine"]`) || a.Header.Get("Ratelimit-Policy") != `"mine";q=3;w=3600, "ours";q=4;w=86400` {
			t.Error(a.Header, a.body)
		}
	}
	if calls := decisions(redis) - before; calls != 0 {
		t.Errorf("%d calls for requests that a local zone refused", calls)
	}
	if left := s.get("/", "X-A", "other", "X-B", "b").left("ours"); left != 0 {
		t.Errorf("%d left of the shared zone: what the local one refused was counted", left)
	}
	for range 5 { // the shared zone is exhausted: the first of these asks Redis, the others do not
		a := s.refused("/", "X-A", "other", "X-B", "b")
		if wait := s.wait(a); wait > 86400 || wait < 86000 || a.left("mine") != 2 || a.left("ours") != 0 || !strings.Contains(a.body, `["ours"]`) {
			t.Error("refused by the shared zone:", a.Header, a.body)
		}
	}
	if left := s.get("/", "X-A", "other", "X-B", "fresh").left("mine"); left != 1 {
		t.Errorf("%d left of the local zone, want 1: nothing was taken for refused requests", left)
	}
}

// Of several zones that refuse, the longest wait is told, wherever they count.
func TestLongestWaitNamesTheZone(t *testing.T) {
	redis := redistest.Start(t)
	s := serve(t, sharing(redis.Addr, patient, `
		zone minute 1/1m
		zone hour 1/1h
		zone local_day 2/1d {
			store local
		}`))
	s.pass(1, "/")
	for range 3 {
		a := s.refused("/")
		if wait := s.wait(a); wait < 3500 || wait > 3600 || !strings.Contains(a.body, `"hour"`) || a.left("local_day") != 1 {
			t.Error(a.Header, a.body)
		}
	}
}
