package sluice

// What a request pays for the handler: `go test -bench Handler -benchmem .`
// The comparison with other limiters is in bench/.

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/caddyfile"
)

type nowhere struct{ h http.Header }

func (w *nowhere) Header() http.Header         { return w.h }
func (w *nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (w *nowhere) WriteHeader(int)             {}

func provisioned(tb testing.TB, c caddyfile.Config) *Handler {
	tb.Helper()
	ctx, err := caddy.ProvisionContext(&caddy.Config{})
	if err != nil {
		tb.Fatal(err)
	}
	h := &Handler{Config: c}
	if err := h.Provision(ctx); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = h.Cleanup() })
	return h
}

func BenchmarkHandler(b *testing.B) {
	for _, bench := range []struct {
		name, limit string
		keys        int
	}{{"pass/hot", "1000000000/1m", 1}, {"pass/1k", "1000000000/1m", 1000}, {"refuse/hot", "1/1d", 1}} {
		b.Run(bench.name, func(b *testing.B) {
			h := provisioned(b, caddyfile.Config{Zones: map[string]*caddyfile.Zone{
				"z": {Limit: caddyfile.Texts{bench.limit}}}})
			next := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
			w := &nowhere{h: make(http.Header)}
			prepared := make([]*http.Request, 32) // as the server prepares them, outside the measured time
			b.ReportAllocs()
			for i := 0; i < b.N; i++ {
				slot := i % len(prepared)
				if slot == 0 {
					b.StopTimer()
					for j := range prepared {
						prepared[j] = request((i + j) % bench.keys)
					}
					b.StartTimer()
				}
				clear(w.h)
				if err := h.ServeHTTP(w, prepared[slot], next); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// request is one of client n, prepared as the server does it.
func request(n int) *http.Request {
	r := httptest.NewRequest("GET", "/", nil)
	r.RemoteAddr = "10.0." + strconv.Itoa(n/250) + "." + strconv.Itoa(n%250+1) + ":1234"
	return caddyhttp.PrepareRequest(r, caddy.NewReplacer(), nil, &caddyhttp.Server{})
}
