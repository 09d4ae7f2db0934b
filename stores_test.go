package sluice_test

// What is shown on every store: one test body, a stage for each store.

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// stage is a store, and configs that count in it.
type stage struct {
	redis *redistest.Server // nil: this process
	clock *clock            // nil: the store reads its own, since a server's cannot be set
}

// onStores runs the body on each store. In this process time stands still there, unless the body
// moves it.
func onStores(t *testing.T, body func(t *testing.T, st *stage)) {
	t.Run("local", func(t *testing.T) { body(t, &stage{clock: useClock(t)}) })
	t.Run("redis", func(t *testing.T) { body(t, &stage{redis: redistest.Start(t)}) })
}

// underWay is how many requests to sites of stages are not over, also after their config was
// stopped.
var underWay atomic.Int64

// tracked stands before everything else that may be asked about in such a site.
type tracked struct{}

func init() {
	caddy.RegisterModule(new(tracked))
	httpcaddyfile.RegisterHandlerDirective("tracked", func(httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
		return new(tracked), nil
	})
	httpcaddyfile.RegisterDirectiveOrder("tracked", httpcaddyfile.After, "tracing")
}

func (*tracked) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.tracked", New: func() caddy.Module { return new(tracked) }}
}

func (*tracked) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	underWay.Add(1)
	defer underWay.Add(-1)
	return next.ServeHTTP(w, r)
}

// counters lists the keys of counters in Redis.
func (st *stage) counters() (keys []string) {
	list, _ := st.redis.Do("keys", "*").([]any)
	for _, key := range list {
		if key := fmt.Sprint(key); !strings.Contains(key, "fleet") {
			keys = append(keys, key)
		}
	}
	return keys
}

// globals are the lines of the global options that make zones count on the stage.
func (st *stage) globals() string {
	if st.redis == nil {
		return ""
	}
	return "rate_limit {\n redis " + st.redis.Addr + " {\n " + patient + "\n }\n }\n"
}

// config is a config with a site. Proxies on this machine are trusted, so that X-Forwarded-For is
// who asks, and the subscriber listens to all that is about clients.
func (st *stage) config(site string) string {
	return "{\n events {\n on rate_limit_exceeded sluice_test\n on rate_limit_banned sluice_test\n }\n" +
		" servers {\n trusted_proxies static 127.0.0.0/8\n protocols h1 h2 h2c\n }\n " + st.globals() + "}\n:80 {\ntracked\n" + site + "\n}"
}

// zones is config for zones in front of an upstream, which is told the delay of the zone q.
func (st *stage) zones(zones, dial string) string {
	return st.config("rate_limit {\n" + zones + "\n}\nreverse_proxy " + dial + " {\n header_up X-Delay {http.rate_limit.q.delay}\n}")
}

// send asks in the background. What comes is nil if the client left, or got no answer.
func (s *server) send(ctx context.Context, path string, header ...string) <-chan *answer {
	came := make(chan *answer, 1)
	go func() {
		a, err := s.ask(ctx, http.MethodGet, path, nil, header...)
		if err != nil {
			came <- nil
		} else {
			came <- &a
		}
	}()
	return came
}

// decided is how many requests had that result in a zone.
func (s *server) decided(zone, result string) (n int) {
	for _, store := range []string{"local", "redis"} {
		if v := s.metric(`caddy_rate_limit_decisions_total{result="` + result + `",store="` + store + `",zone="` + zone + `"}`); v > 0 {
			n += int(v)
		}
	}
	return n
}
