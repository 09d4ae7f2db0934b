package sluice

// What a request pays for the handler: `go test -run '^$' -bench Handler .`
// The comparison with other limiters is in bench/.

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	config "github.com/caddy-sluice/sluice/caddyfile"
)

type nowhere struct{ h http.Header }

func (w *nowhere) Header() http.Header         { return w.h }
func (w *nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (w *nowhere) WriteHeader(int)             {}

// provisioned returns the handlers of a Caddyfile's directives, one behind the other.
func provisioned(tb testing.TB, directives ...string) (list []*Handler) {
	tb.Helper()
	ctx, err := caddy.ProvisionContext(&caddy.Config{})
	if err != nil {
		tb.Fatal(err)
	}
	for _, text := range directives {
		c, err := config.Parse(httpcaddyfile.Helper{Dispenser: caddyfile.NewTestDispenser(text), State: map[string]any{}})
		if err != nil {
			tb.Fatal(err)
		}
		h := &Handler{Config: *c}
		if err := h.Provision(ctx); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { _ = h.Cleanup() })
		list = append(list, h)
	}
	return list
}

func zones(n int, block string) string {
	text := "rate_limit {\n"
	for i := range n {
		text += fmt.Sprintf("zone z%d 1000000000/1m {\n%s\n}\n", i, fmt.Sprintf(block, i))
	}
	return text + "}"
}

func BenchmarkHandler(b *testing.B) {
	zone := func(block string) []string {
		return []string{"rate_limit {\nzone z 1000000000/1m {\n" + block + "\n}\n}"}
	}
	for _, bench := range []struct {
		name       string
		keys       int
		directives []string
	}{
		{"pass", 1, zone("")},
		{"pass, 1k keys", 1000, zone("")},
		{"refuse", 1, []string{"rate_limit 1/1d"}},
		{"two handlers", 1, []string{zone("")[0], "rate_limit 100000000/1h"}},
		{"count", 1, zone("count status 500")},
		{"tier", 1, []string{"rate_limit {\nzone z {\ntier {header.X-Plan} {\npro 1000000000/1m\ndefault 100000000/1m\n}\n}\n}"}},
		{"concurrency", 1, zone("concurrency 1000")},
		{"queue", 1, []string{"rate_limit {\nzone z 1000000/1s {\nqueue 1000 delay 999\n}\n}"}},
		{"4 zones", 1, []string{zones(4, "#%d")}},
		{"16 zones", 1, []string{zones(16, "#%d")}},
		{"64 zones", 1, []string{zones(64, "#%d")}},
		{"64 zones, one matches", 1, []string{zones(64, "match {\nheader X-Match %d\n}")}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			handlers := provisioned(b, bench.directives...)
			last := caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error { return nil })
			next := caddyhttp.Handler(last)
			for _, h := range slices.Backward(handlers[1:]) {
				behind := next
				next = caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error { return h.ServeHTTP(w, r, behind) })
			}
			w := &nowhere{h: make(http.Header)}
			var batches []time.Duration
			prepared := make([]*http.Request, 32) // as the server prepares them, outside the measured time
			b.ReportAllocs()
			for n := 0; n < b.N; n += len(prepared) {
				for i := range prepared {
					prepared[i] = request((n + i) % bench.keys)
				}
				start := time.Now()
				for _, r := range prepared {
					clear(w.h)
					if err := handlers[0].ServeHTTP(w, r, next); err != nil {
						b.Fatal(err)
					}
				}
				batches = append(batches, time.Since(start))
			}
			slices.Sort(batches)
			b.ReportMetric(float64(batches[len(batches)/2])/float64(len(prepared)), "ns/request")
		})
	}
}

// request is one of client n, prepared as the server does it.
func request(n int) *http.Request {
	r := httptest.NewRequest("GET", "/", nil)
	r.RemoteAddr = "10.0." + strconv.Itoa(n/250) + "." + strconv.Itoa(n%250+1) + ":1234"
	r.Header.Set("X-Match", "1")
	return caddyhttp.PrepareRequest(r, caddy.NewReplacer(), nil, &caddyhttp.Server{})
}
