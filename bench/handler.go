package main

// The whole handler as Caddy calls it: key client IP, fields of the IETF draft, metrics on, the log
// written to a file.

import (
	"net/http"
	"net/url"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/filestorage"
	_ "github.com/caddyserver/caddy/v2/modules/logging"

	module "github.com/caddy-sluice/sluice"
	"github.com/caddy-sluice/sluice/caddyfile"
)

type handler struct{ *module.Handler }

func newHandler(q quota) limiter {
	// Caddy's writer `discard` would hide what a log line costs.
	ctx, err := caddy.ProvisionContext(&caddy.Config{Logging: &caddy.Logging{Logs: map[string]*caddy.CustomLog{
		"default": {BaseLog: caddy.BaseLog{WriterRaw: []byte(`{"output":"file","filename":"/dev/null","roll":false}`)}},
	}}})
	check(err)
	h := &module.Handler{Config: caddyfile.Config{Zones: map[string]*caddyfile.Zone{
		"bench": {Limit: caddyfile.Texts{q.String()}, Algorithm: "sliding_window"},
	}}}
	check(h.Provision(ctx))
	return handler{h}
}

func (h handler) worker() worker {
	return &requests{handler: h.Handler, writer: nowhere{http.Header{}}}
}

// requests is a worker that asks with requests as the server prepares them.
type requests struct {
	handler  *module.Handler
	writer   nowhere
	server   caddyhttp.Server
	plain    [handlerBatch]http.Request
	prepared [handlerBatch]*http.Request
	passed   bool
}

// handlerBatch requests are 100 KB.
const handlerBatch = 32

func (w *requests) batch() int { return handlerBatch }

func (w *requests) prepare(slot int, key string) {
	r := &w.plain[slot]
	*r = http.Request{Method: "GET", URL: &url.URL{Path: "/"}, Host: "example.com", RemoteAddr: key + ":1234"}
	// Without a server there would be no client IP.
	w.prepared[slot] = caddyhttp.PrepareRequest(r, caddy.NewReplacer(), w.writer, &w.server)
}

func (w *requests) decide(slot int) bool {
	clear(w.writer.header)
	w.passed = false
	check(w.handler.ServeHTTP(w.writer, w.prepared[slot], w))
	return w.passed
}

// ServeHTTP is what comes after the limiter.
func (w *requests) ServeHTTP(http.ResponseWriter, *http.Request) error {
	w.passed = true
	return nil
}

// nowhere is a response that goes nowhere.
type nowhere struct{ header http.Header }

func (w nowhere) Header() http.Header         { return w.header }
func (w nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (w nowhere) WriteHeader(int)             {}
