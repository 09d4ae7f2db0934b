package sluice_test

// What the module that this one replaces got wrong, each a test of its own.

import (
	"crypto/tls"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// events is a site with one zone in the older spelling.
func eventsZone(events int, window string, more ...string) string {
	return fmt.Sprintf(":80 {\n rate_limit {\n zone z {\n events %d\n window %s\n %s\n }\n }\n respond ok\n}", events, window, strings.Join(more, "\n"))
}

func TestDefectRejectedReload(t *testing.T) {
	s := serve(t, eventsZone(3, "1h"))
	s.pass(1, "/")
	for range 3 {
		if err := s.load(eventsZone(100, "1h") + "\n:81 {\n reverse_proxy {\n transport none\n }\n}"); err == nil {
			t.Fatal("the config is not rejected")
		}
		adapted := `{"apps":{"http":{"servers":{"s":{"listen":[":80"],"routes":[{"handle":[
			{"handler":"rate_limit","rate_limits":{"z":{"max_events":100,"window":"1h"}}},{"handler":"none"}]}]}}}}}`
		if err := s.loadJSON([]byte(adapted)); err == nil {
			t.Fatal("the config is not rejected")
		}
	}
	s.pass(2, "/")
	s.refused("/")
	// The live zone is not orphaned: the next config counts on.
	s.mustLoad(eventsZone(4, "1h"))
	s.pass(1, "/")
	s.refused("/")
}

func TestDefectRaisedEventsGiveCapacity(t *testing.T) {
	s := serve(t, eventsZone(2, "1h"))
	s.pass(2, "/")
	s.refused("/")
	s.mustLoad(eventsZone(4, "1h"))
	s.pass(2, "/")
	s.refused("/")
}

func TestDefectMaxEventsZero(t *testing.T) {
	s := serve(t, eventsZone(0, "1h"))
	for range 2 {
		if a := s.refused("/"); s.wait(a) != -1 || a.left("z") != 0 {
			t.Error(a.Header)
		}
	}
	if err := s.loadJSON([]byte(`{"apps":{"http":{"servers":{"s":{"listen":[":80"],"routes":[{"handle":[
		{"handler":"rate_limit","rate_limits":{"z":{"max_events":0,"window":"1h"}}}]}]}}}}}`)); err != nil {
		t.Fatal(err)
	}
	s.refused("/")
}

func TestDefectKeyIsNotUTF8(t *testing.T) {
	s := serve(t, eventsZone(1, "1h", "key {path}"))
	s.pass(1, "/%ff")
	s.refused("/%ff")
	s.pass(1, "/%c3%bf")
	checkMetrics(t, s.metrics())
}

func TestDefectSeriesWithoutBound(t *testing.T) {
	s := serve(t, eventsZone(1, "1h", "key {header.X-Key}"))
	series := func() int { return strings.Count(s.metrics(), "\ncaddy_rate_limit_") }
	s.pass(1, "/", "X-Key", "first")
	s.refused("/", "X-Key", "first")
	before := series()
	for i := range 300 {
		s.pass(1, "/", "X-Key", fmt.Sprint(i))
	}
	if after := series(); after != before || before == 0 {
		t.Errorf("%d series became %d", before, after)
	}
	if keys := s.metric(`caddy_rate_limit_keys_total{zone="z"}`); keys != 301 {
		t.Errorf("keys_total: %v", keys)
	}
	if strings.Contains(s.metrics(), "first") {
		t.Error("a key is in the metrics")
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

func TestDefectRefusedRequestPaysOtherZones(t *testing.T) {
	for _, order := range []string{"zone wide 10/1h\n zone narrow 1/1h", "zone narrow 1/1h\n zone wide 10/1h"} {
		t.Run(order, func(t *testing.T) {
			s := serve(t, ":80 {\n rate_limit {\n "+order+"\n }\n respond ok\n}")
			s.pass(1, "/")
			for range 5 {
				if a := s.refused("/"); a.left("wide") != 9 {
					t.Error(a.Header)
				}
			}
		})
	}
}

func TestDefectEqualZonesInRandomOrder(t *testing.T) {
	useClock(t)
	zones := ""
	for _, name := range []string{"m", "a", "z", "b", "y"} {
		zones += " zone " + name + " {\n events 1\n window 1h\n }\n"
	}
	s := newServer(t)
	for i := range 20 {
		s.mustLoad(":80 {\n rate_limit {\n" + zones + " }\n respond ok\n handle_errors {\n respond {http.rate_limit.exceeded.name}\n }\n}")
		if i == 0 {
			s.pass(1, "/")
		}
		if a := s.refused("/"); a.body != "m" {
			t.Fatalf("load %d names zone %s, want the first in the file", i, a.body)
		}
	}
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

func TestDefectWithinHandleErrors(t *testing.T) {
	s := serve(t, `
:80 {
	error 404
	handle_errors {
		rate_limit {
			zone errors {
				events 2
				window 1h
			}
		}
		respond "not found" 404
	}
}`)
	for range 2 {
		if a := s.get("/"); a.StatusCode != 404 || a.body != "not found" {
			t.Fatal(a.StatusCode, a.body)
		}
	}
	a := s.refused("/")
	if s.wait(a) < 3500 || !strings.Contains(a.body, "quota-exceeded") || a.Header.Get("Content-Type") != "application/problem+json" {
		t.Error(a.Header, a.body)
	}
}

func TestDefectDuplicateZone(t *testing.T) {
	err := newServer(t).load(":80 {\n rate_limit {\n zone z {\n events 1\n window 1h\n }\n zone z {\n events 2\n window 1h\n }\n }\n}")
	if err == nil || !strings.Contains(err.Error(), "z") || !strings.Contains(err.Error(), "Caddyfile:7") {
		t.Error(err)
	}
}

func TestDefectSameZoneOtherSettings(t *testing.T) {
	site := func(port, limit string) string {
		return ":" + port + " {\n rate_limit {\n zone shared " + limit + "\n }\n respond ok\n}\n"
	}
	s := serve(t, site("80", "2/1h"))
	s.pass(1, "/")
	err := s.load(site("80", "2/1h") + site("81", "3/1h"))
	if err == nil || !strings.Contains(err.Error(), "Caddyfile:3") || !strings.Contains(err.Error(), "Caddyfile:9") {
		t.Errorf("%v; want both places", err)
	}
	// JSON has no adapter that could see it: the load does.
	two := `{"handler":"rate_limit","rate_limits":{"shared":{"max_events":2,"window":"1h"}}},
		{"handler":"rate_limit","rate_limits":{"shared":{"max_events":3,"window":"1h"}}}`
	err = s.loadJSON([]byte(`{"apps":{"http":{"servers":{"s":{"listen":[":80"],"routes":[{"handle":[` + two + `]}]}}}}}`))
	if err == nil || !strings.Contains(err.Error(), `"shared"`) || !strings.Contains(err.Error(), "2/1h") || !strings.Contains(err.Error(), "3/1h") {
		t.Errorf("%v; want both settings", err)
	}
	s.pass(1, "/")
	s.refused("/")
}

func TestDefectNegativeInterval(t *testing.T) {
	s := serve(t, eventsZone(1, "1h"))
	for _, bad := range []string{
		strings.Replace(eventsZone(1, "1h"), "rate_limit {", "rate_limit {\n sweep_interval -1s", 1),
		eventsZone(1, "-1h"),
	} {
		if err := s.load(bad); err == nil {
			t.Errorf("loads: %s", bad)
		}
	}
	for _, field := range []string{`"sweep_interval":-1`, `"sweep_interval":"-5s"`, `"distributed":{"read_interval":"-1s"}`} {
		config := `{"apps":{"http":{"servers":{"s":{"listen":[":80"],"routes":[{"handle":[
			{"handler":"rate_limit","rate_limits":{"z":{"max_events":1,"window":"1h"}},` + field + `}]}]}}}}}`
		if !json.Valid([]byte(config)) {
			t.Fatal(config)
		}
		if err := s.loadJSON([]byte(config)); err == nil {
			t.Errorf("loads: %s", field)
		}
	}
	s.pass(1, "/")
	s.refused("/")
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

func TestDefectMemoryForAllEvents(t *testing.T) {
	s := serve(t, eventsZone(1_000_000, "1h", "key {header.X-Key}"))
	s.pass(5, "/", "X-Key", "warm")
	const keys = 50
	perKey := uint64(math.MaxUint64)
	for try := range 3 { // the least, since what other tests left behind may allocate meanwhile
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for i := range keys {
			s.pass(1, "/", "X-Key", fmt.Sprint(try, i))
		}
		runtime.ReadMemStats(&after)
		perKey = min(perKey, (after.TotalAlloc-before.TotalAlloc)/keys)
	}
	if perKey > 100_000 { // the whole exchange, of both sides
		t.Errorf("%d bytes were allocated per key", perKey)
	}
}
