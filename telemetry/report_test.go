package telemetry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/logging" // the file writer
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

func init() { caddy.RegisterModule(new(limiter)) }

// limiter stands where the handler will: an app with its module ID's last part, zones, and a
// reporter.
type limiter struct {
	Zones  []string `json:"zones,omitempty"`
	LogKey bool     `json:"log_key,omitempty"`
	Listen bool     `json:"listen,omitempty"`
	Fail   bool     `json:"fail,omitempty"`

	ctx      caddy.Context
	open     map[string]*Zone
	reporter *Reporter
	events   []caddy.Event
}

// running is the limiter of the config that runs.
var running *limiter

func (*limiter) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "telemetry_test", New: func() caddy.Module { return new(limiter) }}
}

func (l *limiter) Provision(ctx caddy.Context) error {
	l.ctx, l.open = ctx, make(map[string]*Zone)
	var err error
	if l.reporter, err = NewReporter(ctx, l.LogKey); err != nil {
		return err
	}
	for _, zone := range l.Zones {
		if l.open[zone], err = Open(ctx.GetMetricsRegistry(), Source{Zone: zone, Store: "local"}); err != nil {
			return err
		}
	}
	if l.Listen {
		app, err := ctx.App("events")
		if err != nil {
			return err
		}
		for _, name := range []string{"rate_limit_exceeded", "rate_limit_exceeded_dry_run", "rate_limit_banned"} {
			if err := app.(*caddyevents.App).On(name, l); err != nil {
				return err
			}
		}
	}
	if l.Fail {
		return errors.New("rejected on purpose")
	}
	return nil
}

func (l *limiter) Handle(_ context.Context, e caddy.Event) error {
	l.events = append(l.events, e)
	return nil
}

func (l *limiter) Start() error { running = l; return nil }
func (l *limiter) Stop() error  { return nil }

func (l *limiter) Cleanup() error {
	for _, z := range l.open {
		z.Close()
	}
	return nil
}

// run loads a config as Caddy does on a reload, and returns the limiter of it.
func run(t *testing.T, l *limiter, logging string) *limiter {
	t.Helper()
	app, err := json.Marshal(l)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &caddy.Config{
		Admin:   &caddy.AdminConfig{Disabled: true, Config: &caddy.ConfigSettings{Persist: new(bool)}},
		AppsRaw: caddy.ModuleMap{"telemetry_test": app},
	}
	if logging != "" {
		if err := json.Unmarshal([]byte(logging), &cfg.Logging); err != nil {
			t.Fatal(err)
		}
	}
	err = caddy.Run(cfg)
	if l.Fail {
		if err == nil {
			t.Fatal("the config was not rejected")
		}
		return running
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { caddy.Stop() })
	return running
}

// quiet keeps Caddy's own log out of the test's output.
const quiet = `{"logs":{"default":{"level":"ERROR","writer":{"output":"discard"}}}}`

// observe replaces the logger of a fresh reporter by one that is read back, and its sampler by an
// empty one.
func observe(r *Reporter, level zapcore.Level) *observer.ObservedLogs {
	core, logs := observer.New(level)
	r.logger, r.sampler, r.bans = zap.New(core), newSampler(), newSampler()
	return logs
}

// Through real reloads of a real Caddy: values continue, gone zones go, a rejected config leaves no
// trace.
func TestMetricsSurviveReload(t *testing.T) {
	first := run(t, &limiter{Zones: []string{"reload-api", "reload-login"}}, quiet)
	first.open["reload-api"].Count(Passed, time.Millisecond)
	first.open["reload-login"].Count(Refused, time.Millisecond)

	second := run(t, &limiter{Zones: []string{"reload-api"}}, quiet)
	if second == first {
		t.Fatal("nothing was reloaded")
	}
	second.open["reload-api"].Count(Refused, time.Millisecond)
	if after := run(t, &limiter{Zones: []string{"reload-api", "reload-rejected"}, Fail: true}, quiet); after != second {
		t.Fatal("the rejected config runs")
	}
	got := scrape(t, second.ctx.GetMetricsRegistry())
	expect(t, got, map[string]float64{
		`requests_total{zone="reload-api"}`:             2,
		`declined_requests_total{zone="reload-api"}`:    1,
		`process_time_seconds_sum{zone="reload-api"}`:   0.002,
		`process_time_seconds_count{zone="reload-api"}`: 2,
	})
	for name := range got {
		if strings.Contains(name, "reload-login") || strings.Contains(name, "reload-rejected") {
			t.Errorf("%s is still there", name)
		}
	}
}

// The line that ban tools read: logger, level, message and fields, as Caddy writes it to a file.
func TestLogLineAsWritten(t *testing.T) {
	file := filepath.Join(t.TempDir(), "log.json")
	l := run(t, &limiter{}, `{"logs":{"default":{"writer":{"output":"file","filename":"`+file+`"},"encoder":{"format":"json"},"include":["telemetry_test"]}}}`)
	r := httptest.NewRequest("GET", "/", nil)
	r.RemoteAddr = "[2001:db8::1]:1234"
	l.reporter.sampler, l.reporter.bans = newSampler(), newSampler()
	l.reporter.Refused(r, Refusal{Zone: "api", Key: "secret", Wait: 1500 * time.Millisecond})
	l.reporter.Banned(r, Ban{Zone: "login", Key: "secret", Duration: 10 * time.Minute, Step: 2})
	caddy.Stop()

	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines := json.NewDecoder(bytes.NewReader(text))
	for _, want := range []map[string]any{
		{"level": "info", "logger": "telemetry_test", "msg": "rate limit exceeded", "zone": "api", "wait": 1.5, "remote_ip": "2001:db8::1"},
		{"level": "warn", "logger": "telemetry_test", "msg": "client banned", "zone": "login", "ban": 600.0, "step": 2.0, "remote_ip": "2001:db8::1"},
	} {
		var line map[string]any
		if err := lines.Decode(&line); err != nil {
			t.Fatalf("%v in %s", err, text)
		}
		if delete(line, "ts"); !maps.Equal(line, want) {
			t.Errorf("line %v, want %v", line, want)
		}
	}
	if lines.More() {
		t.Errorf("more lines: %s", text)
	}
}

func TestLogFields(t *testing.T) {
	l := run(t, &limiter{LogKey: true}, quiet)
	logs := observe(l.reporter, zapcore.InfoLevel)
	r := httptest.NewRequest("GET", "/", nil)
	r.RemoteAddr = "192.0.2.9:1234"
	behindProxy := r.WithContext(context.WithValue(r.Context(), caddyhttp.VarsCtxKey, map[string]any{caddyhttp.ClientIPVarKey: "203.0.113.5"}))
	direct := r.WithContext(context.WithValue(r.Context(), caddyhttp.VarsCtxKey, map[string]any{caddyhttp.ClientIPVarKey: "192.0.2.9"}))

	for range 3 {
		l.reporter.Refused(behindProxy, Refusal{Zone: "api", Key: "k", Wait: time.Second})
	}
	l.reporter.Refused(behindProxy, Refusal{Zone: "api", Key: "k", Wait: 2 * time.Second, Now: 10 * time.Second})
	l.reporter.Refused(direct, Refusal{Zone: "dry", Key: "k", Wait: algorithms.Never, DryRun: true})
	l.reporter.Refused(direct, Refusal{Zone: "exports", Key: "k", Wait: algorithms.Unknown})
	l.reporter.Refused(r, Refusal{Zone: "text", Key: "\x01a\x01b", Text: func(k string) string { return `["a","b"]` }})

	want := []struct {
		message string
		fields  map[string]any
	}{
		{"rate limit exceeded", map[string]any{"zone": "api", "wait": time.Second, "remote_ip": "192.0.2.9", "client_ip": "203.0.113.5", "key": "k"}},
		{"rate limit exceeded", map[string]any{"zone": "api", "wait": 2 * time.Second, "remote_ip": "192.0.2.9", "client_ip": "203.0.113.5", "key": "k", "suppressed": uint32(2)}},
		{"request would have been refused (dry run)", map[string]any{"zone": "dry", "remote_ip": "192.0.2.9", "key": "k"}},
		{"rate limit exceeded", map[string]any{"zone": "exports", "remote_ip": "192.0.2.9", "key": "k"}},
		{"rate limit exceeded", map[string]any{"zone": "text", "wait": time.Duration(0), "remote_ip": "192.0.2.9", "key": `["a","b"]`}},
	}
	entries := logs.All()
	if len(entries) != len(want) {
		t.Fatalf("%d lines, want %d: %v", len(entries), len(want), entries)
	}
	for i, e := range entries {
		got := e.ContextMap()
		if e.Level != zapcore.InfoLevel || e.Message != want[i].message || len(got) != len(want[i].fields) {
			t.Errorf("line %d: %v %q %v, want %q %v", i, e.Level, e.Message, got, want[i].message, want[i].fields)
		}
		for k, v := range want[i].fields {
			if got[k] != v {
				t.Errorf("line %d: %s = %#v, want %#v", i, k, got[k], v)
			}
		}
	}
	if strings.Contains(exceededDryRun, exceeded) {
		t.Error("a ban tool that looks for the message would ban on a dry run")
	}
}

func TestLevelAboveInfoLogsNothing(t *testing.T) {
	l := run(t, &limiter{}, quiet)
	logs := observe(l.reporter, zapcore.WarnLevel)
	l.reporter.Refused(httptest.NewRequest("GET", "/", nil), Refusal{Zone: "api", Key: "k"})
	if logs.Len() != 0 {
		t.Errorf("%d lines", logs.Len())
	}
	l.reporter.Banned(httptest.NewRequest("GET", "/", nil), Ban{Zone: "api", Key: "k"})
	if logs.Len() != 1 {
		t.Errorf("%d lines, want the ban's", logs.Len())
	}
	logs = observe(l.reporter, zapcore.ErrorLevel)
	l.reporter.Banned(httptest.NewRequest("GET", "/", nil), Ban{Zone: "api", Key: "k"})
	if logs.Len() != 0 {
		t.Errorf("%d lines at level ERROR", logs.Len())
	}
}

// F27: any bytes in a key are safe in the log, different keys stay different, and a long one is
// cut.
func TestF27KeysInLogs(t *testing.T) {
	seen := make(map[string]string)
	for _, key := range []string{"/%ff", "/\xff", "/\xfe", "é", "a\nb", "a\x00b", `a\nb`, strings.Repeat("x", 100_000), strings.Repeat("é", 200), ""} {
		text := readable(key, nil)
		if !utf8.ValidString(text) || len(text) > 4*maxText+8 {
			t.Errorf("%.20q is shown as %.40q (%d bytes)", key, text, len(text))
		}
		if other, twice := seen[text]; twice {
			t.Errorf("%.20q and %.20q are both shown as %.40q", key, other, text)
		}
		seen[text] = key
	}
	if got := readable("/\xff", nil); got != `/\xff` {
		t.Errorf("got %q", got)
	}
	// Cut between two bytes of a letter: still readable text.
	if got := readable("x"+strings.Repeat("é", 200), nil); strings.Contains(got, `\x`) || !strings.HasSuffix(got, "é…") {
		t.Errorf("cut inside a letter: %q", got)
	}
}

// Every refusal is an event when someone listens, with the key only if log_key is on; a dry run's
// has another name.
func TestEvent(t *testing.T) {
	for _, logKey := range []bool{false, true} {
		l := run(t, &limiter{Listen: true, LogKey: logKey}, quiet)
		r := httptest.NewRequest("GET", "/", nil)
		r.RemoteAddr = "192.0.2.9:1234"
		for range 3 {
			l.reporter.Refused(r, Refusal{Zone: "api", Key: "k\xff", Wait: time.Second})
		}
		l.reporter.Refused(r, Refusal{Zone: "api", Key: "k", Wait: time.Second, DryRun: true})
		if len(l.events) != 4 || l.events[3].Name() != "rate_limit_exceeded_dry_run" {
			t.Fatalf("%d events, want 3 and a dry run's: %v", len(l.events), l.events)
		}
		want := map[string]any{"zone": "api", "wait": time.Second, "remote_ip": "192.0.2.9"}
		if logKey {
			want["key"] = `k\xff`
		}
		for _, e := range l.events[:3] {
			if e.Name() != "rate_limit_exceeded" || e.Origin() == nil || e.Origin().CaddyModule().ID != "telemetry_test" || len(e.Data) != len(want) {
				t.Errorf("event %s from %v with %v, want %v", e.Name(), e.Origin(), e.Data, want)
			}
			for k, v := range want {
				if e.Data[k] != v {
					t.Errorf("%s = %#v, want %#v", k, e.Data[k], v)
				}
			}
		}
	}
}

// A wait that nobody knows is not in the event: no number would be true. One that never ends is, as
// caddy-ratelimit's subscribers expect a wait.
func TestEventWithoutWait(t *testing.T) {
	l := run(t, &limiter{Listen: true}, quiet)
	r := httptest.NewRequest("GET", "/", nil)
	l.reporter.Refused(r, Refusal{Zone: "exports", Wait: algorithms.Unknown})
	l.reporter.Refused(r, Refusal{Zone: "api", Wait: algorithms.Never})
	if len(l.events) != 2 {
		t.Fatalf("%d events, want 2", len(l.events))
	}
	if wait, has := l.events[0].Data["wait"]; has {
		t.Errorf("unknown: wait %v", wait)
	}
	if wait := l.events[1].Data["wait"]; wait != algorithms.Never {
		t.Errorf("never: wait %v", wait)
	}
}

// clock is a logger's clock that the test sets.
type clock struct{ now time.Time }

func (c *clock) Now() time.Time                       { return c.now }
func (c *clock) NewTicker(time.Duration) *time.Ticker { return nil }

// A ban is told once, as a line and as an event, with the key only if log_key is on, also when the
// request has ended.
func TestBan(t *testing.T) {
	for _, logKey := range []bool{false, true} {
		l := run(t, &limiter{Listen: true, LogKey: logKey}, quiet)
		if l.reporter.bans == l.reporter.sampler {
			t.Error("bans and refusals share a sampler")
		}
		logs := observe(l.reporter, zapcore.WarnLevel)
		r := httptest.NewRequest("GET", "/", nil)
		r.RemoteAddr = "192.0.2.9:1234"
		ctx, leave := context.WithCancel(context.WithValue(r.Context(), caddyhttp.VarsCtxKey, map[string]any{caddyhttp.ClientIPVarKey: "203.0.113.5"}))
		leave()
		l.reporter.Banned(r, Ban{Zone: "login", Key: "k\xff", Duration: time.Minute, Step: 1})
		l.reporter.Banned(r.WithContext(ctx), Ban{Zone: "api", Key: "\x01a\x01b", Text: func(string) string { return `["a","b"]` }, Duration: time.Hour, Step: 3})

		line := []map[string]any{
			{"zone": "login", "remote_ip": "192.0.2.9", "ban": time.Minute, "step": int64(1)},
			{"zone": "api", "remote_ip": "192.0.2.9", "client_ip": "203.0.113.5", "ban": time.Hour, "step": int64(3)},
		}
		event := []map[string]any{
			{"zone": "login", "remote_ip": "192.0.2.9", "duration": time.Minute, "step": 1},
			{"zone": "api", "remote_ip": "192.0.2.9", "duration": time.Hour, "step": 3},
		}
		if logKey {
			for _, want := range [][]map[string]any{line, event} {
				want[0]["key"], want[1]["key"] = `k\xff`, `["a","b"]`
			}
		}
		entries := logs.All()
		if len(entries) != 2 || len(l.events) != 2 {
			t.Fatalf("%d lines, %d events, want 2 each", len(entries), len(l.events))
		}
		for i, e := range entries {
			if e.Level != zapcore.WarnLevel || e.Message != "client banned" || !maps.Equal(e.ContextMap(), line[i]) {
				t.Errorf("line %v %q %v, want %v", e.Level, e.Message, e.ContextMap(), line[i])
			}
		}
		for i, e := range l.events {
			if e.Name() != "rate_limit_banned" || !maps.Equal(e.Data, event[i]) {
				t.Errorf("event %s with %v, want %v", e.Name(), e.Data, event[i])
			}
		}
	}
}

// Nobody's ban goes unlogged because of others, unless they make up keys: those are bounded, for
// each client and in all.
func TestBansAreLogged(t *testing.T) {
	core, logs := observer.New(zapcore.InfoLevel)
	now := &clock{time.Unix(1_796_000_000, 0)}
	nobody := new(silent)
	r := &Reporter{events: nobody, sampler: newSampler(), bans: newSampler(), logger: zap.New(core, zap.WithClock(now))}
	ban := func(address, key string) {
		request := httptest.NewRequest("GET", "/", nil)
		request.RemoteAddr = address + ":1234"
		r.Banned(request, Ban{Zone: "login", Key: key, Duration: time.Minute, Step: 1})
	}
	lines := func() int { return logs.FilterMessage("client banned").Len() }
	for i := range 100 { // what the first client was refused in the same second
		request := httptest.NewRequest("GET", "/", nil)
		request.RemoteAddr = "198.51.100.0:1234"
		r.Refused(request, Refusal{Zone: "login", Key: fmt.Sprint("user", i), Now: time.Duration(now.now.UnixNano())})
	}
	for i := range 20 {
		ban(fmt.Sprintf("198.51.100.%d", i), fmt.Sprint("user", i))
	}
	if got := lines(); got != 20 {
		t.Errorf("%d lines of 20 clients", got)
	}
	for step := range 3 { // the same client earns one ban after the other
		now.now = now.now.Add(2 * time.Minute)
		if ban("198.51.100.7", "user7"); lines() != 21+step {
			t.Errorf("ban %d was not logged", step+1)
		}
	}
	before := lines()
	for i := range 10_000 {
		ban("192.0.2.1", fmt.Sprint("made up ", i))
	}
	if got := lines() - before; got != perAddress {
		t.Errorf("%d lines of one client with many keys, want %d", got, perAddress)
	}
	before = lines()
	if ban("198.51.100.8", "user8"); lines() != before+1 {
		t.Error("hidden by a client with many keys")
	}
	before = lines()
	for i := range 20_000 {
		ban(fmt.Sprintf("10.0.%d.%d", i>>8, i&255), fmt.Sprint(i))
	}
	if got := lines() - before; got > sets*ways {
		t.Errorf("%d lines in one second", got)
	}
	if nobody.emitted.Load() != 0 {
		t.Error("an event was made for nobody")
	}
}

// silent is an events app nobody listens to, and counts what it is asked to emit.
type silent struct{ emitted atomic.Int64 }

func (*silent) ShouldEmit(string) bool { return false }
func (s *silent) Emit(caddy.Context, string, map[string]any) caddy.Event {
	s.emitted.Add(1)
	return caddy.Event{}
}

// A flood of refusals that is neither logged nor listened to must cost next to nothing.
func TestFloodDoesNotAllocate(t *testing.T) {
	nobody := new(silent)
	r := &Reporter{events: nobody}
	observe(r, zapcore.InfoLevel)
	request := httptest.NewRequest("GET", "/", nil)
	f := Refusal{Zone: "api", Key: "203.0.113.77", Wait: time.Second}
	r.Refused(request, f)
	if n := testing.AllocsPerRun(100, func() { r.Refused(request, f) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if nobody.emitted.Load() != 0 {
		t.Error("an event was made for nobody")
	}
}

// A scraper with one key does not hide the others, whose lines stand between its own.
func TestFloodHidesNobody(t *testing.T) {
	r := &Reporter{events: new(silent)}
	logs := observe(r, zapcore.InfoLevel)
	request := httptest.NewRequest("GET", "/", nil)
	for i := range 100_000 {
		r.Refused(request, Refusal{Zone: "api", Key: "scraper"})
		if i%10_000 == 0 {
			r.Refused(request, Refusal{Zone: "api", Key: string(rune('a' + i/10_000))})
		}
	}
	if logs.Len() != 11 {
		t.Errorf("%d lines, want the scraper's and ten others", logs.Len())
	}
}

func TestResultNames(t *testing.T) {
	var names []string
	for r := range Result(results) {
		names = append(names, r.String())
	}
	if !slices.Equal(names, []string{"passed", "delayed", "rejected", "passed_dry_run", "delayed_dry_run", "rejected_dry_run", "exempt"}) {
		t.Errorf("results %v", names)
	}
}

func BenchmarkRefusedFlood(b *testing.B) {
	r := &Reporter{events: new(silent)}
	observe(r, zapcore.InfoLevel)
	request := httptest.NewRequest("GET", "/", nil)
	b.ReportAllocs()
	for b.Loop() {
		r.Refused(request, Refusal{Zone: "api", Key: "203.0.113.77", Wait: time.Second})
	}
}
