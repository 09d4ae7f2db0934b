package sluice_test

// What the handler does with a request, setting by setting.

import (
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

const problemBody = `{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota Exceeded","status":429,"violated-policies":["z"]}`

// Who writes the body of a refusal. Whoever does, Retry-After and the fields are there.
func TestResponse(t *testing.T) {
	const limit = "rate_limit {\n %s\n zone z 1/1h\n }\n respond ok\n"
	for name, test := range map[string]struct{ response, errors, body string }{
		"auto without error routes":       {"", "", problemBody},
		"auto with handle_errors":         {"", "handle_errors {\n respond \"route {err.status_code}\"\n }", "route 429"},
		"auto with handle_errors 429":     {"", "handle_errors 429 {\n respond \"route {err.status_code}\"\n }", "route 429"},
		"auto with handle_errors 4xx":     {"", "handle_errors 4xx {\n respond \"route {err.status_code}\"\n }", "route 429"},
		"auto with handle_errors 404":     {"", "handle_errors 404 {\n respond \"route {err.status_code}\"\n }", problemBody},
		"auto with an expression":         {"", "handle_errors {\n @e `{err.status_code} in [429, 503]`\n respond @e \"route {err.status_code}\"\n }", "route 429"},
		"auto with another expression":    {"", "handle_errors {\n @e `{err.status_code} == 404`\n respond @e \"route {err.status_code}\"\n }", problemBody},
		"problem with handle_errors":      {"response problem", "handle_errors {\n respond \"route {err.status_code}\"\n }", problemBody},
		"error without error routes":      {"response error", "", ""},
		"error with handle_errors":        {"response error", "handle_errors {\n respond \"route {err.status_code}\"\n }", "route 429"},
		"error with handle_errors of 404": {"response error", "handle_errors 404 {\n respond \"route {err.status_code}\"\n }", ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, ":80 {\n "+fmt.Sprintf(limit, test.response)+test.errors+"\n}")
			s.pass(1, "/")
			a := s.refused("/")
			if a.body != test.body {
				t.Errorf("body %q, want %q", a.body, test.body)
			}
			if wait := s.wait(a); wait < 3590 || wait > 3600 || a.left("z") != 0 || a.Header.Get("Cache-Control") != "no-store" {
				t.Error(a.Header)
			}
			if want := map[bool]string{true: "application/problem+json"}[test.body == problemBody]; want != "" && a.Header.Get("Content-Type") != want {
				t.Error(a.Header)
			}
		})
	}
}

// The error routes of another site of the same server are none of ours.
func TestResponseOfAnotherSite(t *testing.T) {
	site := " {\n rate_limit {\n zone z 1/1h\n }\n respond ok\n"
	s := serve(t, "http://a.test"+site+"}\nhttp://b.test"+site+" handle_errors {\n respond route\n }\n}\n")
	s.pass(1, "/", "Host", "a.test")
	if a := s.refused("/", "Host", "a.test"); a.body != problemBody {
		t.Error(a.body)
	}
	if a := s.refused("/", "Host", "b.test"); a.body != "route" {
		t.Error(a.body)
	}
}

// Within an error route, the limit answers itself, whatever led there.
func TestResponseWithinErrorRoute(t *testing.T) {
	for _, response := range []string{"", "response error"} {
		t.Run(response, func(t *testing.T) {
			s := serve(t, ":80 {\n error 500\n handle_errors {\n rate_limit {\n "+response+"\n zone z 1/1h\n }\n respond \"sorry\" 500\n }\n}")
			if a := s.get("/"); a.StatusCode != 500 || a.body != "sorry" {
				t.Error(a.Status, a.body)
			}
			if a := s.refused("/"); a.body != problemBody || s.wait(a) < 3590 {
				t.Error(a.body, a.Header)
			}
		})
	}
}

func TestStatus(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit 1/1h {\n status 503\n }\n respond ok\n}")
	s.pass(1, "/")
	if a := s.get("/"); a.StatusCode != 503 || s.wait(a) < 3590 || !strings.Contains(a.body, `"status":503`) {
		t.Error(a.Status, a.Header, a.body)
	}
}

func TestHeaderFamilies(t *testing.T) {
	for words, want := range map[string]map[string]string{
		"ietf":    {"Ratelimit-Policy": `"z";q=20;w=3600`, "Ratelimit": `"z";r=19;t=180`},
		"draft6":  {"Ratelimit-Policy": `20;w=3600`, "Ratelimit-Limit": "20", "Ratelimit-Remaining": "19", "Ratelimit-Reset": "180"},
		"x delta": {"X-Ratelimit-Limit": "20", "X-Ratelimit-Remaining": "19", "X-Ratelimit-Reset": "180"},
		"off":     {},
	} {
		t.Run(words, func(t *testing.T) {
			useClock(t)
			s := serve(t, ":80 {\n rate_limit {\n zone z 20/1h {\n algorithm token_bucket\n }\n headers "+words+"\n }\n respond ok\n}")
			a := s.get("/")
			for name, values := range a.Header {
				if strings.Contains(name, "Ratelimit") && (len(values) != 1 || values[0] != want[name]) {
					t.Errorf("%s: %q, want %q", name, values, want[name])
				}
				delete(want, name)
			}
			if len(want) > 0 {
				t.Errorf("missing: %v", want)
			}
		})
	}
	t.Run("x epoch", func(t *testing.T) {
		s := serve(t, ":80 {\n rate_limit 20/1h {\n headers x\n algorithm token_bucket\n }\n respond ok\n}")
		var reset int64
		fmt.Sscan(s.get("/").Header.Get("X-RateLimit-Reset"), &reset)
		if away := time.Until(time.Unix(reset, 0)); away < 170*time.Second || away > 182*time.Second {
			t.Errorf("X-RateLimit-Reset is in %v", away)
		}
	})
}

// Other handlers edit the fields of one response in place; the next response must not show it.
func TestFieldsAreOwnedByTheResponse(t *testing.T) {
	s := serve(t, ":80 {\n route {\n rate_limit {\n zone z 1000/1h\n }\n header >RateLimit-Policy \"z\" \"changed\"\n header -RateLimit\n respond ok\n }\n}")
	for range 3 {
		if a := s.get("/"); a.Header.Get("RateLimit-Policy") != `"changed";q=1000;w=3600` || a.Header.Get("RateLimit") != "" {
			t.Error(a.Header)
		}
	}
}

func TestExempt(t *testing.T) {
	s := serve(t, proxied+`
:80 {
	@health path /health
	rate_limit {
		zone z 1/1h {
			exempt {
				client_ip 192.0.2.0/24
			}
			exempt @health
		}
	}
	respond ok
}`)
	s.pass(3, "/", "X-Forwarded-For", "192.0.2.9")
	if a := s.get("/health", "X-Forwarded-For", "198.51.100.1"); a.StatusCode != 200 || a.Header.Get("RateLimit") != "" {
		t.Error(a.Status, a.Header)
	}
	s.pass(1, "/", "X-Forwarded-For", "198.51.100.1")
	s.refused("/", "X-Forwarded-For", "198.51.100.1")
	if n := s.metric(`caddy_rate_limit_decisions_total{result="exempt",store="local",zone="z"}`); n != 4 {
		t.Errorf("exempt: %v", n)
	}
}

func TestMatchIsORed(t *testing.T) {
	s := serve(t, ":80 {\n @a path /a\n rate_limit {\n zone z 1/1h {\n match @a\n match {\n path /b\n method GET\n }\n }\n }\n respond ok\n}")
	s.pass(3, "/c")
	s.pass(1, "/a")
	s.refused("/b")
}

func TestDryRun(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone dry 1/1h {\n dry_run\n }\n zone wet 3/1h\n log_key\n }\n respond {http.rate_limit.dry.status},{http.rate_limit.dry.remaining}\n}")
	for _, want := range []string{"passed_dry_run,0", "rejected_dry_run,0", "rejected_dry_run,0"} {
		a := s.get("/")
		if a.StatusCode != 200 || a.body != want || a.left("dry") != -1 || strings.Contains(a.Header.Get("RateLimit-Policy"), "dry") {
			t.Errorf("%d %q (want %q) %v", a.StatusCode, a.body, want, a.Header)
		}
	}
	if a := s.refused("/"); strings.Contains(a.body, "dry") { // refused by the other zone
		t.Error(a.body)
	}
	for result, want := range map[string]float64{"passed_dry_run": 1, "rejected_dry_run": 3, "passed": 0, "rejected": 0} {
		if got := s.metric(`caddy_rate_limit_decisions_total{result="` + result + `",store="local",zone="dry"}`); got != want {
			t.Errorf("%s: %v, want %v", result, got, want)
		}
	}
	// Ban tools read the log: a dry run must not look like a refusal there.
	for _, line := range logged(t, "rate limit exceeded") {
		if line["zone"] != "wet" {
			t.Error(line)
		}
	}
	if lines := logged(t, "request would have been refused (dry run)"); len(lines) != 1 || lines[0]["zone"] != "dry" {
		t.Error(lines)
	}
}

// When an enforced zone refuses, a dry run takes nothing either.
func TestDryRunTakesNothingFromRefused(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone dry 5/1h {\n dry_run\n }\n zone wet 1/1h\n }\n respond ok\n handle_errors {\n respond {http.rate_limit.dry.remaining}\n }\n}")
	s.pass(1, "/")
	for range 3 {
		if a := s.refused("/"); a.body != "4" {
			t.Errorf("remaining of the dry run: %s", a.body)
		}
	}
}

func TestCostFromPlaceholder(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone z 10/1h {\n cost {header.X-Cost}\n }\n }\n respond ok\n}")
	for i, step := range []struct {
		cost         string
		status, left int
	}{
		{"3", 200, 7},
		{"0", 200, 7},
		{"8", 429, 7},
		{"11", 429, 7}, // never
		{"", 200, 6},   // not a number: 1
		{"-5", 200, 5},
		{"1.5", 200, 4},
		{"99999999999999999999", 429, 4},
		{"4", 200, 0},
	} {
		a := s.get("/", "X-Cost", step.cost)
		if a.StatusCode != step.status && step.cost != "99999999999999999999" || a.StatusCode == step.status && a.left("z") != step.left {
			t.Errorf("step %d, cost %q: %d %v", i, step.cost, a.StatusCode, a.Header)
		}
		if step.cost == "11" && s.wait(a) != -1 {
			t.Error("a Retry-After for what can never pass")
		}
	}
}

func TestKeyFallback(t *testing.T) {
	s := serve(t, proxied+`
:80 {
	rate_limit {
		zone address 1/1h {
			key {header.X-Key}
		}
		zone fallen 2/1h {
			key user-{header.X-Key}
			key_fallback {header.X-Other}
		}
		zone none 1/1h {
			key {header.X-Key}
			key_fallback none
		}
	}
	respond ok
}`)
	a := s.get("/", "X-Forwarded-For", "192.0.2.1", "X-Other", "o")
	if a.left("address") != 0 || a.left("fallen") != 1 || a.left("none") != -1 {
		t.Error(a.Header)
	}
	a = s.get("/", "X-Forwarded-For", "192.0.2.2", "X-Other", "o") // another address, the same other header
	if a.StatusCode != 200 || a.left("address") != 0 || a.left("fallen") != 0 {
		t.Error(a.StatusCode, a.Header)
	}
	// Nobody can name another client's fallback.
	if a = s.get("/", "X-Key", "192.0.2.1", "X-Forwarded-For", "192.0.2.3"); a.StatusCode != 200 || a.left("address") != 0 || a.left("none") != 0 {
		t.Error(a.StatusCode, a.Header)
	}
}

// Parts cannot be moved from one to the other.
func TestCompositeKeys(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone z 1/1h {\n key {header.A} {header.B}\n }\n log_key\n }\n respond ok\n}")
	s.pass(1, "/", "A", "a", "B", "bc")
	s.pass(1, "/", "A", "ab", "B", "c")
	s.pass(1, "/", "A", "abc")
	s.pass(1, "/", "B", "abc")
	s.pass(1, "/", "A", `a","b`, "B", "c")
	s.refused("/", "A", "ab", "B", "c")
	if lines := logged(t, "rate limit exceeded"); len(lines) != 1 || lines[0]["key"] != `["ab","c"]` {
		t.Error(lines)
	}
}

func TestSeveralLimitsOfOneZone(t *testing.T) {
	c := useClock(t)
	s := serve(t, ":80 {\n rate_limit {\n zone z {\n limit 2/10s 3/1h\n }\n }\n respond \"{http.rate_limit.z.limit} {http.rate_limit.z.remaining}\"\n}")
	if a := s.get("/"); a.left("z.10s") != 1 || a.left("z.1h") != 2 || a.body != "2 1" {
		t.Error(a.Header, a.body)
	}
	s.pass(1, "/")
	if a := s.refused("/"); s.wait(a) != 10 || !strings.Contains(a.body, `["z.10s"]`) || a.left("z.1h") != 1 {
		t.Error(a.Header, a.body)
	}
	c.add(10 * time.Second)
	if a := s.get("/"); a.body != "3 0" { // the tightest
		t.Error(a.body)
	}
	if a := s.refused("/"); s.wait(a) != 3590 || !strings.Contains(a.body, `["z.1h"]`) || a.left("z.10s") != 1 {
		t.Error(a.Header, a.body)
	}
}

func TestJitterBounds(t *testing.T) {
	useClock(t)
	s := serve(t, ":80 {\n rate_limit {\n zone z 1/1000s\n zone never 0/1h {\n match {\n path /never\n }\n }\n jitter 0.2\n }\n respond ok\n}")
	s.pass(1, "/")
	least, most := 1<<30, 0
	for range 200 {
		wait := s.wait(s.refused("/"))
		least, most = min(least, wait), max(most, wait)
	}
	if least < 1000 || most > 1200 || most-least < 100 {
		t.Errorf("Retry-After between %d and %d, want 1000 to 1200", least, most)
	}
	if wait := s.wait(s.refused("/never")); wait != -1 {
		t.Errorf("never became %d", wait)
	}
}

// A flood of new keys pushes out keys, but not the one that is being limited.
func TestMaxKeys(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone z 3/1h {\n key {header.X-Key}\n }\n max_keys 100\n }\n respond ok\n}")
	s.pass(3, "/", "X-Key", "busy")
	for i := range 1000 {
		s.pass(1, "/", "X-Key", fmt.Sprint(i))
		if i%100 == 0 {
			s.refused("/", "X-Key", "busy")
		}
	}
	s.refused("/", "X-Key", "busy")
	if keys := s.metric(`caddy_rate_limit_keys_total{zone="z"}`); keys < 50 || keys > 100 {
		t.Errorf("keys_total %v, want at most 100", keys)
	}
	if evicted := s.metric(`caddy_rate_limit_evictions_total{zone="z"}`); evicted < 900 {
		t.Errorf("evictions_total %v, want at least 900", evicted)
	}
}

func TestHEAD(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone z 1/1h\n }\n respond ok\n}")
	if a := s.do("HEAD", "/"); a.StatusCode != 200 || a.left("z") != 0 {
		t.Error(a.Status, a.Header)
	}
	a := s.do("HEAD", "/")
	if a.StatusCode != 429 || a.body != "" || s.wait(a) < 3590 || a.Header.Get("Content-Type") != "application/problem+json" {
		t.Error(a.Status, a.Header, a.body)
	}
	s.refused("/") // the connection is still good
}

// A request that is let through reaches the next handler with the response writer as it was:
// nothing is wrapped.
func TestNothingIsWrapped(t *testing.T) {
	serve(t, ":80 {\n rate_limit 5/1h\n respond ok\n}")
	h, srv := handler(t, 0)
	w := httptest.NewRecorder()
	r := httptest.NewRequest("GET", "/", nil)
	r = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w, srv)
	err := h.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(got http.ResponseWriter, _ *http.Request) error {
		if got != w {
			t.Errorf("the writer is a %T", got)
		}
		return nil
	}))
	if err != nil {
		t.Error(err)
	}
}

// allocations of a request that is let through, with what is on by default: the key is the client
// address, the fields are sent and the metrics counted.
func TestAllocations(t *testing.T) {
	for _, limit := range []string{"100000/1h", "1000000/1d {\n algorithm token_bucket\n }"} {
		serve(t, ":80 {\n rate_limit "+limit+"\n respond ok\n}")
		allocations := allocations(t)
		t.Logf("%s: %v", limit, allocations)
		if allocations > 2 {
			t.Errorf("%v allocations, want at most 2", allocations)
		}
	}
}

// allocations of a request that the first handler lets through.
func allocations(t *testing.T) float64 {
	t.Helper()
	h, srv := handler(t, 0)
	const runs = 500
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
	// Requests and responses as the server hands them over, made before the measuring.
	requests, writers := make([]*http.Request, runs+1), make([]*httptest.ResponseRecorder, runs+1)
	for i := range requests {
		writers[i] = httptest.NewRecorder()
		writers[i].Header().Set("Server", "Caddy")
		r := httptest.NewRequest("GET", "/", nil)
		r.RemoteAddr = "192.0.2.1:1234"
		requests[i] = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), writers[i], srv)
	}
	i := 0
	allocations := testing.AllocsPerRun(runs, func() {
		if err := h.ServeHTTP(writers[i], requests[i], next); err != nil {
			t.Error(err)
		}
		i++
	})
	if writers[runs].Header().Get("RateLimit") == "" {
		t.Error("the handler did nothing")
	}
	return allocations
}

// With placeholders off a request allocates once, and what would be a placeholder is a text like
// any other.
func TestPlaceholdersOff(t *testing.T) {
	s := serve(t, "{\n rate_limit {\n placeholders off\n }\n}\n:80 {\n rate_limit 1/1h\n respond \"{http.rate_limit.zone_1.remaining}\"\n}")
	if a := s.get("/"); a.body != "" && !strings.HasPrefix(a.body, "{") || a.Header.Get("RateLimit") == "" {
		t.Errorf("%q %v", a.body, a.Header)
	}
	s.refused("/")
	s.mustLoad("{\n rate_limit {\n placeholders off\n }\n}\n:80 {\n rate_limit 100000/1h\n respond ok\n}")
	if n := allocations(t); n > 1 {
		t.Errorf("%v allocations, want at most 1", n)
	}
}

// The placeholders of a request that no rule limits are empty: header_up must not send braces to
// the upstream.
func TestPlaceholdersOfUnlimitedRequests(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone api 5/1m {\n match path /api*\n }\n }\n respond [{http.rate_limit.api.remaining}]\n}")
	if a := s.get("/other"); a.body != "[]" {
		t.Errorf("%q, want []", a.body)
	}
	if a := s.get("/api"); a.body != "[4]" {
		t.Errorf("%q, want [4]", a.body)
	}
}

// A dry run never refuses, not even a request whose key cannot be known yet.
func TestDryRunInEarlyData(t *testing.T) {
	serve(t, ":80 {\n rate_limit {\n zone api 5/1m {\n dry_run\n }\n }\n respond ok\n}")
	h, srv := handler(t, 0)
	passed := false
	next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { passed = true; return nil })
	err := h.ServeHTTP(httptest.NewRecorder(), early(t, srv), next)
	if err != nil || !passed {
		t.Error(err, passed)
	}
}

// Names on the wire belong to one zone, also over handlers.
func TestWireNamesCollideOverHandlers(t *testing.T) {
	s := newServer(t)
	err := s.load(":80 {\n route {\n rate_limit {\n zone a {\n limit 5/1s 50/1m\n }\n }\n rate_limit {\n zone a.1m 6/1s\n }\n }\n}")
	if err == nil || !strings.Contains(err.Error(), `"a.1m"`) {
		t.Errorf("%v, want an error about a.1m", err)
	}
}

// Two handlers on one zone tell the client once, and what is left after both.
func TestTwoHandlersTellOnce(t *testing.T) {
	s := serve(t, ":80 {\n route {\n rate_limit {\n zone z 10/1m\n }\n rate_limit {\n zone z 10/1m\n }\n respond ok\n }\n}")
	a := s.get("/")
	if got := a.Header["Ratelimit"]; len(got) != 1 || !strings.HasPrefix(got[0], `"z";r=8`) {
		t.Errorf("RateLimit %q, want one item with r=8", got)
	}
}

// Same key, same limit: still two counters, unless the zone has the same name.
func TestF21Scope(t *testing.T) {
	t.Run("two zones", func(t *testing.T) {
		s := serve(t, ":80 {\n rate_limit {\n zone a 5/1h\n zone b 5/1h {\n match {\n path /b\n }\n }\n }\n respond ok\n}")
		s.pass(2, "/")
		if a := s.get("/b"); a.left("a") != 2 || a.left("b") != 4 {
			t.Error(a.Header)
		}
	})
	t.Run("two routes", func(t *testing.T) {
		s := serve(t, ":80 {\n handle /a {\n rate_limit 1/1h\n respond ok\n }\n handle /b {\n rate_limit 1/1h\n respond ok\n }\n}")
		s.pass(1, "/a")
		s.pass(1, "/b")
		s.refused("/a")
		s.refused("/b")
	})
	t.Run("two sites", func(t *testing.T) {
		s := serve(t, "http://a.test {\n rate_limit 1/1h\n respond ok\n}\nhttp://b.test {\n rate_limit 1/1h\n respond ok\n}")
		s.pass(1, "/", "Host", "a.test")
		s.pass(1, "/", "Host", "b.test")
		s.refused("/", "Host", "a.test")
		s.refused("/", "Host", "b.test")
	})
	t.Run("two sites, one name", func(t *testing.T) {
		site := " {\n rate_limit {\n zone one 2/1h\n }\n respond ok\n}\n"
		s := serve(t, "http://a.test"+site+"http://b.test"+site+":81"+site)
		s.pass(1, "/", "Host", "a.test")
		s.pass(1, "/", "Host", "b.test")
		s.refused("/", "Host", "a.test")
		resp, _ := get(t, s.client, "http://"+s.address("81"))
		if resp.StatusCode != 429 {
			t.Error("the site at another port does not share the zone:", resp.Status)
		}
	})
}

// A request that goes through a handler again, or to several upstreams, is one request.
func TestF29CountedOnce(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"index.html", "error.html"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const named = "&(limited) {\n rate_limit {\n zone once 100/1h\n }\n}\n"
	const limit = "rate_limit {\n zone once 100/1h\n }\n"
	for name, config := range map[string]string{
		"rewrite":           ":80 {\n " + limit + " rewrite * /other\n handle /other {\n uri replace other again\n respond ok\n }\n}",
		"try_files":         ":80 {\n root " + dir + "\n " + limit + " try_files {path} /nothing /index.html\n file_server\n}",
		"handle_errors":     named + ":80 {\n route {\n invoke limited\n error 404\n }\n handle_errors {\n invoke limited\n rewrite * /error.html\n root " + dir + "\n file_server {\n status 200\n }\n }\n}",
		"invoke twice":      named + ":80 {\n route {\n invoke limited\n invoke limited\n invoke limited\n respond ok\n }\n}",
		"handle_response":   named + ":80 {\n route {\n invoke limited\n reverse_proxy 127.0.0.1:81 {\n @gone status 410\n handle_response @gone {\n invoke limited\n respond ok\n }\n }\n }\n}\n:81 {\n respond 410\n}",
		"intercept":         named + ":80 {\n route {\n invoke limited\n intercept {\n @gone status 410\n handle_response @gone {\n invoke limited\n respond ok 200\n }\n }\n respond 410\n }\n}",
		"retries":           ":80 {\n " + limit + " reverse_proxy 127.0.0.1:1 127.0.0.1:81 {\n lb_policy round_robin\n lb_try_duration 5s\n lb_try_interval 1ms\n }\n}\n:81 {\n respond ok\n}",
		"internal redirect": ":80 {\n " + limit + " route {\n reverse_proxy 127.0.0.1:81 {\n @accel header X-Accel-Redirect *\n handle_response @accel {\n rewrite * {rp.header.X-Accel-Redirect}\n root " + dir + "\n file_server\n }\n }\n }\n}\n:81 {\n header X-Accel-Redirect /index.html\n respond ok\n}",
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, config)
			for i := range 3 {
				a := s.get("/")
				if a.StatusCode != 200 || a.left("once") != 99-i || len(a.Header["Ratelimit"]) != 1 {
					t.Fatalf("request %d: %d, RateLimit %q", i+1, a.StatusCode, a.Header["Ratelimit"])
				}
			}
		})
	}
}

// The upstream is dead for good: the retries of one request are one request, too.
func TestF29DeadUpstream(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone once 100/1h\n }\n reverse_proxy 127.0.0.1:1 {\n lb_try_duration 60ms\n lb_try_interval 5ms\n }\n}")
	for i := range 2 {
		if a := s.get("/"); a.StatusCode != 502 || a.left("once") != 99-i {
			t.Errorf("%d %v", a.StatusCode, a.Header)
		}
	}
}

// An upstream outside of Caddy, to see what it is sent.
func upstream(t testing.TB, h http.HandlerFunc) (dial string) {
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://")
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
