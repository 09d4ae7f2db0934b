package sluice_test

// Tests against a Caddy in this process: configs are adapted and loaded as the command does it, and
// asked over real sockets, but nothing has to be started, so a test takes milliseconds. There is
// one Caddy per process: these tests cannot run in parallel.

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	"github.com/caddy-sluice/sluice"
)

// server is the Caddy of this process while a test has it.
type server struct {
	t      testing.TB
	admin  int
	ports  map[string]int // as written in the config → real
	dir    string
	client *http.Client
}

// serve loads a Caddyfile and stops it when the test ends. Ports in it are symbols: each gets a
// free one of its own.
func serve(t testing.TB, config string) *server {
	t.Helper()
	s := newServer(t)
	if err := s.load(config); err != nil {
		t.Fatal(err)
	}
	return s
}

// newServer prepares for a first load.
func newServer(t testing.TB) *server {
	t.Helper()
	s := &server{t: t, admin: freePort(t), ports: map[string]int{}, dir: t.TempDir()}
	processLog.reset()
	sluice.Age(2 * time.Second) // another test's lines do not count
	transport := &http.Transport{}
	s.client = &http.Client{
		Transport: transport, Timeout: 20 * time.Second,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		if err := caddy.Stop(); err != nil {
			t.Error(err)
		}
		if log := processLog.String(); strings.Contains(log, "panic") || t.Failed() {
			t.Errorf("the end of the log:\n%s", log[max(0, len(log)-5000):])
		}
	})
	return s
}

// load replaces the running config, like a reload.
func (s *server) load(config string) error {
	s.t.Helper()
	adapted, err := adapt(config)
	if err != nil {
		return err
	}
	return s.loadJSON(adapted)
}

func adapt(config string) ([]byte, error) {
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(config), map[string]any{"filename": "Caddyfile"})
	return adapted, err
}

// mustLoad is load for configs that are right.
func (s *server) mustLoad(config string) {
	s.t.Helper()
	if err := s.load(config); err != nil {
		s.t.Fatal(err)
	}
}

// loadJSON is load for JSON.
func (s *server) loadJSON(config []byte) error {
	s.t.Helper()
	if err := s.swap(config); err != nil {
		return err
	}
	s.settle()
	return nil
}

// swap loads a config, of which it changes only what keeps it within this process: ports, files,
// the log and certificates.
func (s *server) swap(config []byte) error {
	s.t.Helper()
	var c map[string]any
	if err := json.Unmarshal(config, &c); err != nil {
		return err
	}
	c["admin"] = map[string]any{"listen": fmt.Sprintf("127.0.0.1:%d", s.admin), "config": map[string]any{"persist": false}}
	c["storage"] = map[string]any{"module": "file_system", "root": s.dir}
	object(c, "logging", "logs", "default")
	for name := range object(c, "logging", "logs") {
		object(c, "logging", "logs", name)["writer"] = map[string]any{"output": "sluice_test"}
	}
	app := object(c, "apps", "http")
	if app["grace_period"] == nil {
		app["grace_period"] = "3s"
	}
	for name := range object(app, "servers") {
		srv := object(app, "servers", name)
		srv["automatic_https"] = map[string]any{"disable": true}
		delete(srv, "tls_connection_policies")
		for i, addr := range srv["listen"].([]any) {
			_, port, err := net.SplitHostPort(addr.(string))
			if err != nil {
				return err
			}
			srv["listen"].([]any)[i] = s.address(port)
		}
	}
	delete(object(c, "apps"), "tls")
	s.redial(c)
	patched, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return caddy.Load(patched, true)
}

// settle waits until the listeners of the old config are closed. Caddy does that in the background,
// and what connects meanwhile may be answered by the old config, or lost.
func (s *server) settle() {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range 5000 {
		sockets, err := os.ReadFile("/proc/net/tcp")
		if err != nil {
			s.t.Fatal(err)
		}
		old := false
		for _, port := range s.ports {
			old = old || bytes.Count(sockets, fmt.Appendf(nil, ":%04X 00000000:0000 0A", port)) > 1
		}
		if !old {
			s.client.CloseIdleConnections()
			return
		}
		<-tick.C
	}
	s.t.Fatal("the old listeners are not closed")
}

// object returns the object at the path, and makes it.
func object(at map[string]any, path ...string) map[string]any {
	for _, name := range path {
		next, ok := at[name].(map[string]any)
		if !ok {
			next = map[string]any{}
			at[name] = next
		}
		at = next
	}
	return at
}

func (s *server) address(port string) string {
	if s.ports[port] == 0 {
		s.ports[port] = freePort(s.t)
	}
	return fmt.Sprintf("127.0.0.1:%d", s.ports[port])
}

// redial points upstreams that are sites of the same config to their real ports.
func (s *server) redial(node any) {
	switch node := node.(type) {
	case map[string]any:
		if dial, ok := node["dial"].(string); ok {
			if _, port, err := net.SplitHostPort(dial); err == nil && s.ports[port] != 0 {
				node["dial"] = s.address(port)
			}
		}
		for _, child := range node {
			s.redial(child)
		}
	case []any:
		for _, child := range node {
			s.redial(child)
		}
	}
}

// addr is the real address of the site that clients ask: at port 80 as written, or the only one.
func (s *server) addr() string {
	for port := range s.ports {
		if port == "80" || len(s.ports) == 1 {
			return s.address(port)
		}
	}
	s.t.Fatalf("no site at port 80: %v", s.ports)
	return ""
}

// answer is a response that was read to its end.
type answer struct {
	*http.Response
	body string
}

// get asks the site. "Host" among the headers is the host to ask for.
func (s *server) get(path string, header ...string) answer {
	s.t.Helper()
	return s.do(http.MethodGet, path, header...)
}

func (s *server) do(method, path string, header ...string) answer {
	s.t.Helper()
	a, err := s.try(method, path, header...)
	if err != nil {
		s.t.Fatal(err)
	}
	return a
}

// try is do for goroutines other than the test's.
func (s *server) try(method, path string, header ...string) (answer, error) {
	return s.ask(context.Background(), method, path, nil, header...)
}

// ask is try for clients with a body, and for those that may leave.
func (s *server) ask(ctx context.Context, method, path string, content io.Reader, header ...string) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+s.addr()+path, content)
	if err != nil {
		return answer{}, err
	}
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		} else {
			req.Header[header[i]] = append(req.Header[header[i]], header[i+1])
		}
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return answer{resp, string(body)}, err
}

// pass asks n times, and each time must be let through.
func (s *server) pass(n int, path string, header ...string) {
	s.t.Helper()
	for i := range n {
		if a := s.get(path, header...); a.StatusCode != 200 {
			s.t.Fatalf("request %d of %d to %.100s %.200q: %d %v %s", i+1, n, path, header, a.StatusCode, a.Header, a.body)
		}
	}
}

// refused asks once and must be refused.
func (s *server) refused(path string, header ...string) answer {
	s.t.Helper()
	a := s.get(path, header...)
	if a.StatusCode != http.StatusTooManyRequests {
		s.t.Fatalf("%.100s %.200q is not refused: %d %v %s", path, header, a.StatusCode, a.Header, a.body)
	}
	return a
}

var limitItem = regexp.MustCompile(`"([^"]+)";r=(\d+)(?:;t=(\d+))?`)

// left is what the RateLimit field says is left of a policy, -1 if it says nothing.
func (a answer) left(policy string) int {
	for _, item := range limitItem.FindAllStringSubmatch(strings.Join(a.Header["Ratelimit"], ", "), -1) {
		if item[1] == policy {
			n, _ := strconv.Atoi(item[2])
			return n
		}
	}
	return -1
}

// wait is Retry-After in seconds, -1 if there is none; anything but a positive whole number fails
// the test.
func (s *server) wait(a answer) int {
	s.t.Helper()
	values := a.Header["Retry-After"]
	if len(values) == 0 {
		return -1
	}
	n, err := strconv.Atoi(values[0])
	if err != nil || len(values) > 1 || n < 1 || strconv.Itoa(n) != values[0] {
		s.t.Errorf("Retry-After: %q", values)
	}
	return n
}

// metrics scrapes the admin endpoint.
func (s *server) metrics() string {
	s.t.Helper()
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", s.admin))
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 {
		s.t.Fatal(resp.Status, err)
	}
	return string(body)
}

// metric is the value of one series, written as in the exposition; -1 if there is none.
func (s *server) metric(series string) float64 {
	s.t.Helper()
	for line := range strings.Lines(s.metrics()) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), series+" "); ok {
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				s.t.Fatal(err)
			}
			return n
		}
	}
	return -1
}

// clock is a clock that tests set.
type clock struct{ micros atomic.Int64 }

// useClock makes the limits of this test run on a clock of its own. Call it before the first load.
func useClock(t testing.TB) *clock {
	c := new(clock)
	c.micros.Store(1_800_000_000_000_000)
	t.Cleanup(sluice.UseClock(c.micros.Load)) // before newServer, so that it is undone after the stop
	t.Cleanup(func() {
		eventually(t, 10*time.Second, "no request is under way", func() bool { return underWay.Load() == 0 })
	})
	return c
}

func (c *clock) add(d time.Duration) { c.micros.Add(d.Microseconds()) }

// handler finds the n-th rate_limit handler of the running config.
func handler(t testing.TB, n int) (*sluice.Handler, *caddyhttp.Server) {
	t.Helper()
	app, err := caddy.ActiveContext().App("http")
	if err != nil {
		t.Fatal(err)
	}
	for _, srv := range app.(*caddyhttp.App).Servers {
		if found := handlersIn(srv.Routes); len(found) > n {
			return found[n], srv
		}
	}
	t.Fatal("no such handler")
	return nil, nil
}

func handlersIn(routes caddyhttp.RouteList) (found []*sluice.Handler) {
	for _, route := range routes {
		for _, h := range route.Handlers {
			switch h := h.(type) {
			case *sluice.Handler:
				found = append(found, h)
			case *caddyhttp.Subroute:
				found = append(found, handlersIn(h.Routes)...)
			}
		}
	}
	return found
}

// processLog is what the Caddy of this process logged in the current test.
var processLog = new(lockedBuffer)

func (l *lockedBuffer) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.b = bytes.Buffer{}
}

// logged lists the log lines with that message.
func logged(t testing.TB, message string) (lines []map[string]any) {
	t.Helper()
	for line := range strings.Lines(processLog.String()) {
		var entry map[string]any
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Errorf("a log line that is not JSON: %q: %v", line, err)
			continue
		}
		if entry["msg"] == message {
			lines = append(lines, entry)
		}
	}
	return lines
}

// received is what the subscriber module was told in the current test.
var received struct {
	mu     sync.Mutex
	events []caddy.Event
}

func events() []caddy.Event {
	received.mu.Lock()
	defer received.mu.Unlock()
	events := received.events
	received.events = nil
	return events
}

// Modules that configs of these tests name: a log that can be read, a subscriber, an
// application that counts, and an app that fails on demand.
type (
	logWriter  struct{}
	subscriber struct{}
	reached    struct{}
	failingApp struct {
		Provisioning bool `json:"provisioning,omitempty"`
		Starting     bool `json:"starting,omitempty"`
		// Await is a line in the log that Start waits for, for a while.
		Await string `json:"await,omitempty"`
	}
)

func init() {
	caddy.RegisterModule(logWriter{})
	caddy.RegisterModule(new(subscriber))
	caddy.RegisterModule(new(failingApp))
	caddy.RegisterModule(new(reached))
	httpcaddyfile.RegisterHandlerDirective("reached", func(httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return new(reached), nil
	})
}

// reachedCount is how many requests came to a handler `reached`, which stands for an application.
var reachedCount atomic.Int64

func (*reached) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.reached", New: func() caddy.Module { return new(reached) }}
}

func (*reached) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	reachedCount.Add(1)
	return next.ServeHTTP(w, r)
}

func (logWriter) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "caddy.logging.writers.sluice_test", New: func() caddy.Module { return new(logWriter) }}
}
func (logWriter) String() string                      { return "sluice_test" }
func (logWriter) WriterKey() string                   { return "sluice_test" }
func (logWriter) OpenWriter() (io.WriteCloser, error) { return keepOpen{processLog}, nil }

type keepOpen struct{ io.Writer }

func (keepOpen) Close() error { return nil }

func (*subscriber) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.sluice_test", New: func() caddy.Module { return new(subscriber) }}
}

func (*subscriber) UnmarshalCaddyfile(*caddyfile.Dispenser) error { return nil }

func (*subscriber) Handle(_ context.Context, e caddy.Event) error {
	received.mu.Lock()
	defer received.mu.Unlock()
	received.events = append(received.events, e)
	return nil
}

// failingApp sorts behind the app http, and so fails after the servers were provisioned or started.
func (*failingApp) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "zz_sluice_test", New: func() caddy.Module { return new(failingApp) }}
}

func (a *failingApp) Provision(caddy.Context) error {
	if a.Provisioning {
		return fmt.Errorf("told to fail in Provision")
	}
	return nil
}

func (a *failingApp) Start() error {
	for start := time.Now(); a.Await != "" && time.Since(start) < 300*time.Millisecond; time.Sleep(time.Millisecond) {
		if strings.Contains(processLog.String(), a.Await) {
			break
		}
	}
	if a.Starting {
		return fmt.Errorf("told to fail in Start")
	}
	return nil
}

func (*failingApp) Stop() error { return nil }
