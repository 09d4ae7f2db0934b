package sluice_test

// What operators see: placeholders, log lines, events and metrics.

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// checkMetrics reads an exposition as Prometheus does.
func checkMetrics(t testing.TB, text string) {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if families["caddy_rate_limit_requests_total"] == nil {
		t.Error("no metrics of the module")
	}
}

// An upstream and the access log are told where the client stands.
func TestPlaceholders(t *testing.T) {
	useClock(t)
	seen := make(chan http.Header, 1)
	dial := upstream(t, func(w http.ResponseWriter, r *http.Request) { seen <- r.Header.Clone() })
	s := serve(t, `
:80 {
	log
	log_append left {http.rate_limit.api.remaining}
	log_append who {http.rate_limit.exceeded.name}
	rate_limit {
		zone api 3/1h {
			algorithm token_bucket
		}
		zone idle.zone 5/1h {
			match {
				path /idle
			}
		}
	}
	reverse_proxy `+dial+` {
		header_up X-Left "{http.rate_limit.api.remaining} of {http.rate_limit.api.limit}, {http.rate_limit.api.reset}, {http.rate_limit.api.status}"
		header_up X-Not-Asked "<{http.rate_limit.idle.zone.remaining}>"
		header_up X-Not-Exceeded "<{http.rate_limit.exceeded.name}>"
	}
	handle_errors {
		header X-Zone {http.rate_limit.exceeded.name}
		header X-Policy {http.rate_limit.exceeded.policy}
		header X-Wait {http.rate_limit.exceeded.retry_after}
		respond "{http.rate_limit.api.status} {http.rate_limit.api.remaining}"
	}
}`)
	for _, want := range []string{"2 of 3, 1200, passed", "1 of 3, 1200, passed", "0 of 3, 1200, passed"} {
		s.pass(1, "/")
		h := <-seen
		if got := h.Get("X-Left"); got != want {
			t.Errorf("X-Left: %q, want %q", got, want)
		}
		if h.Get("X-Not-Asked") != "<>" || h.Get("X-Not-Exceeded") != "<>" {
			t.Error(h)
		}
	}
	a := s.refused("/")
	if a.Header.Get("X-Zone") != "api" || a.Header.Get("X-Policy") != "api" || a.Header.Get("X-Wait") != a.Header.Get("Retry-After") || a.body != "rejected 0" {
		t.Error(a.Header, a.body)
	}
	lines := logged(t, "handled request")
	if len(lines) != 4 {
		t.Fatalf("%d lines in the access log", len(lines))
	}
	for i, line := range lines {
		if fmt.Sprint(line["left"]) != fmt.Sprint(max(2-i, 0)) || line["who"] != map[bool]any{false: "", true: "api"}[i == 3] && (i == 3 || line["who"] != nil) {
			t.Errorf("line %d: left %v, who %v", i, line["left"], line["who"])
		}
	}
}

func TestPlaceholderOfNever(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone z 0/1h\n }\n handle_errors {\n respond \"<{http.rate_limit.exceeded.retry_after}>\"\n }\n}")
	if a := s.refused("/"); a.body != "<>" {
		t.Error(a.body)
	}
}

const listening = `
{
	events {
		on rate_limit_exceeded sluice_test
	}
	servers {
		trusted_proxies static 127.0.0.0/8
	}
}
`

func TestEvent(t *testing.T) {
	events()
	useClock(t)
	s := serve(t, listening+":80 {\n rate_limit {\n zone z 1/1h {\n key {header.X-Key} {path}\n }\n zone dry 0/1h {\n dry_run\n }\n log_key\n }\n respond ok\n}")
	s.pass(1, "/", "X-Key", "k")
	if n := len(events()); n != 0 {
		t.Errorf("%d events for a request that passed", n)
	}
	const refusals = 5 // every one is an event; only the log is sampled
	for range refusals {
		s.refused("/", "X-Key", "k", "X-Forwarded-For", "192.0.2.1")
	}
	got := events()
	if len(got) != refusals {
		t.Fatalf("%d events of %d", len(got), refusals)
	}
	for _, e := range got {
		wait, ok := e.Data["wait"].(time.Duration)
		if e.Name() != "rate_limit_exceeded" || e.Origin().CaddyModule().ID != "http.handlers.rate_limit" ||
			e.Data["zone"] != "z" || !ok || wait != time.Hour || e.Data["remote_ip"] != "127.0.0.1" || e.Data["key"] != `["k","/"]` {
			t.Errorf("%s %v", e.Name(), e.Data)
		}
	}
}

func TestEventHasNoKeyUnasked(t *testing.T) {
	events()
	s := serve(t, listening+":80 {\n rate_limit {header.X-Key} 1/1h\n respond ok\n}")
	s.pass(1, "/", "X-Key", "secret")
	s.refused("/", "X-Key", "secret")
	got := events()
	if len(got) != 1 {
		t.Fatalf("%d events", len(got))
	}
	if _, ok := got[0].Data["key"]; ok || strings.Contains(processLog.String(), "secret") {
		t.Error("the key is shown without log_key")
	}
}

// Ban tools depend on the line; the fields are those of the older module, and a proxied client's
// address.
func TestLogLine(t *testing.T) {
	useClock(t)
	s := serve(t, listening+":80 {\n rate_limit {\n zone z 1/90m\n log_key\n }\n respond ok\n}")
	s.pass(1, "/", "X-Forwarded-For", "192.0.2.1")
	s.refused("/", "X-Forwarded-For", "192.0.2.1")
	lines := logged(t, "rate limit exceeded")
	if len(lines) != 1 {
		t.Fatal(lines)
	}
	want := map[string]any{
		"level": "info", "logger": "http.handlers.rate_limit", "msg": "rate limit exceeded",
		"zone": "z", "wait": 5400.0, "remote_ip": "127.0.0.1", "client_ip": "192.0.2.1", "key": "192.0.2.1",
	}
	for name, value := range lines[0] {
		if name != "ts" && value != want[name] {
			t.Errorf("%s: %v, want %v", name, value, want[name])
		}
		delete(want, name)
	}
	if len(want) > 0 {
		t.Errorf("missing: %v", want)
	}
}

// A flood from one key is one line a second, and hides nobody else.
func TestLogIsSampledPerKey(t *testing.T) {
	s := serve(t, proxied+":80 {\n rate_limit {\n zone sampled 1/1h\n log_key\n }\n respond ok\n}")
	start := time.Now()
	const refusals = 100
	for i := range refusals + 1 {
		s.get("/", "X-Forwarded-For", "192.0.2.7")
		if i == refusals/2 {
			s.pass(1, "/", "X-Forwarded-For", "192.0.2.8")
			s.refused("/", "X-Forwarded-For", "192.0.2.8")
		}
	}
	most := int(time.Since(start)/time.Second) + 2 // the seconds that it took, and the one it began in
	lines := map[any]int{}
	for _, line := range logged(t, "rate limit exceeded") {
		lines[line["key"]]++
	}
	if n := lines["192.0.2.7"]; n < 1 || n > most {
		t.Errorf("the flood has %d lines, want 1 to %d", n, most)
	}
	if lines["192.0.2.8"] != 1 {
		t.Errorf("the other key has %d lines", lines["192.0.2.8"])
	}
	if n := s.metric(`caddy_rate_limit_declined_requests_total{zone="sampled"}`); n != refusals+1 {
		t.Errorf("declined_requests_total %v, want %d", n, refusals+1)
	}
}

func TestMetrics(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone seen 2/1h {\n key {header.X-Key}\n cost {header.X-Cost}\n ipv6_prefix 56\n }\n }\n respond ok\n}")
	s.pass(2, "/", "X-Key", "a", "X-Cost", "1")
	s.refused("/", "X-Key", "a", "X-Cost", "1")
	s.pass(1, "/", "X-Key", "b", "X-Cost", "many")
	text := s.metrics()
	checkMetrics(t, text)
	for series, want := range map[string]float64{
		`requests_total{zone="seen"}`:                                        4,
		`declined_requests_total{zone="seen"}`:                               1,
		`process_time_seconds_count{zone="seen"}`:                            4,
		`process_time_seconds_bucket{zone="seen",le="+Inf"}`:                 4,
		`keys_total{zone="seen"}`:                                            2,
		`evictions_total{zone="seen"}`:                                       0,
		`cost_errors_total{zone="seen"}`:                                     1,
		`decisions_total{result="passed",store="local",zone="seen"}`:         3,
		`decisions_total{result="rejected",store="local",zone="seen"}`:       1,
		`decisions_total{result="exempt",store="local",zone="seen"}`:         0,
		`decisions_total{result="passed_dry_run",store="local",zone="seen"}`: 0,
	} {
		if got := s.metric("caddy_rate_limit_" + series); got != want {
			t.Errorf("%s: %v, want %v", series, got, want)
		}
	}
	config := ""
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "caddy_rate_limit_config{") {
			config += line
		}
	}
	for _, label := range []string{`zone="seen"`, `max_events="2"`, `window="1h0m0s"`, `ipv6_prefix="56"`, `algorithm="sliding_log"`} {
		if !strings.Contains(config, label) || strings.Count(config, "\n") != 1 {
			t.Errorf("config has no label %s: %s", label, config)
		}
	}
	for _, line := range logged(t, "a cost is not a whole number of at least 0 and counts as 1; this is logged once") {
		if line["zone"] != "seen" {
			t.Error(line)
		}
	}
}

func TestMetricsDisabled(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone quiet 1/1h\n disable_metrics\n }\n respond ok\n}")
	s.pass(1, "/")
	s.refused("/")
	if text := s.metrics(); strings.Contains(text, "quiet") {
		t.Error("metrics of a zone with disable_metrics")
	}
}

// Values survive reloads, and a zone that is gone leaves no series.
func TestMetricsOverReloads(t *testing.T) {
	site := func(zone string) string {
		return ":80 {\n rate_limit {\n zone " + zone + " 2/1h\n }\n respond ok\n}"
	}
	s := serve(t, site("first"))
	s.pass(2, "/")
	for range 3 {
		s.mustLoad(site("first"))
		s.refused("/")
	}
	if n := s.metric(`caddy_rate_limit_requests_total{zone="first"}`); n != 5 {
		t.Errorf("requests_total %v, want 5", n)
	}
	s.mustLoad(site("second"))
	if text := s.metrics(); strings.Contains(text, `"first"`) || !strings.Contains(text, `"second"`) {
		t.Error("series of the zones:", text)
	}
}

// The log is one JSON object a line, whatever clients send.
func TestLogOfOddKeys(t *testing.T) {
	s := serve(t, proxied+":80 {\n rate_limit {\n zone z 0/1h {\n key {header.X-Key}\n }\n log_key\n }\n respond ok\n}")
	for _, key := range []string{"a\tb", `"}`, "\xff\xfe", strings.Repeat("k", 100_000)[:8000], "\u2028", "{env.HOME}"} {
		s.refused("/", "X-Forwarded-For", "192.0.2.66", "X-Key", key) // of a client whose log lines other tests have not used up
	}
	if !strings.Contains(processLog.String(), `"key":"\\xff\\xfe"`) {
		t.Error("a key of other bytes than UTF-8 is not shown as such")
	}
	lines := bufio.NewScanner(strings.NewReader(processLog.String()))
	keys := 0
	for lines.Scan() {
		var entry struct{ Key string }
		if err := json.Unmarshal(lines.Bytes(), &entry); err != nil {
			t.Errorf("%q: %v", lines.Text(), err)
		}
		if len(entry.Key) > 300 {
			t.Errorf("a key of %d bytes in the log", len(entry.Key))
		}
		if entry.Key != "" {
			keys++
		}
	}
	if keys != 6 {
		t.Errorf("%d keys of 6", keys)
	}
}

// A zone that was not asked has decided nothing.
func TestUnaskedZonesAreNotCounted(t *testing.T) {
	redis := redistest.Start(t)
	s := serve(t, sharing(redis.Addr, patient, "zone mine 1/1h {\n store local\n}\nzone ours 5/1h\nzone dry 5/1h {\n dry_run\n}"))
	s.pass(1, "/")
	for range 20 {
		s.refused("/")
	}
	for zone, want := range map[string][4]int{"mine": {1, 20, 0, 0}, "ours": {1, 0, 0, 0}, "dry": {0, 0, 1, 0}} {
		for i, result := range []string{"passed", "rejected", "passed_dry_run", "rejected_dry_run"} {
			if got := s.decided(zone, result); got != want[i] {
				t.Errorf("%s: %d %s, want %d", zone, got, result, want[i])
			}
		}
	}
}

// An event keeps its key when its request is over and others use the same memory.
func TestAnEventKeepsItsKey(t *testing.T) {
	events()
	s := serve(t, "{\n events {\n on rate_limit_exceeded sluice_test\n }\n}\n:80 {\n rate_limit {header.X-Key} 1/1h {\n log_key\n }\n respond ok\n}")
	s.pass(1, "/", "X-Key", "who is refused, in an event")
	s.refused("/", "X-Key", "who is refused, in an event")
	for range 200 {
		s.get("/", "X-Key", strings.Repeat("x", 27))
	}
	for _, e := range events() {
		if key := fmt.Sprint(e.Data["key"]); key != "who is refused, in an event" && key != strings.Repeat("x", 27) {
			t.Errorf("key %q", key)
		} else if key == "who is refused, in an event" {
			return
		}
	}
	t.Error("no event of the first refusal")
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
