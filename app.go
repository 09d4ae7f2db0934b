package sluice

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/memstore"
)

func init() { caddy.RegisterModule(new(App)) }

// local holds the counters of every zone of the process. It outlives configs: a reload opens its zones
// before the old config closes them, so counts are kept and shared by name.
var local = memstore.New()

// App is what the handlers of one config share: which zones they name and how. It needs no configuration.
type App struct {
	mu    sync.Mutex
	zones map[string]*zone
	sweep time.Duration // the shortest interval that a handler asked for
	stop  context.CancelFunc
}

// zone is what one config says of a zone name, over all its handlers.
type zone struct {
	first *caddyfile.Rule
	rules int
	units int64 // what the rules take together from a request that meets all of them
}

// shared reports whether more than one rule of the config charges the zone, so that one request may meet it twice.
func (z *zone) shared() bool { return z.rules > 1 }

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rate_limit", New: func() caddy.Module { return new(App) }}
}

// Provision prepares the app for its handlers, which join it while they are provisioned.
func (a *App) Provision(caddy.Context) error {
	a.zones = make(map[string]*zone)
	return nil
}

// join adds a handler's rule to the config, or says which other rule it contradicts.
func (a *App) join(r *caddyfile.Rule) (*zone, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	z := a.zones[r.Zone]
	if z == nil {
		z = &zone{first: r}
		a.zones[r.Zone] = z
	}
	if was, is := z.first.Settings(), r.Settings(); was != is {
		return nil, fmt.Errorf("zone %q (%s) is %s, but %s makes it %s: handlers that share a zone must agree; use one of the two settings or another name",
			r.Zone, r.Place, is, z.first.Place, was)
	}
	z.rules++
	z.units += r.Cost.Least()
	return z, nil
}

// sweepEvery makes the app forget idle keys at least that often.
func (a *App) sweepEvery(d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sweep == 0 || d < a.sweep {
		a.sweep = d
	}
}

// Start begins to sweep. There is one goroutine per config, none per zone or key.
func (a *App) Start() error {
	if a.sweep <= 0 {
		return nil
	}
	ctx, stop := context.WithCancel(context.Background())
	a.stop = stop
	go sweep(ctx, a.sweep)
	return nil
}

func sweep(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			local.Sweep()
		}
	}
}

// Stop ends the sweeping; the counters stay for the config that comes next.
func (a *App) Stop() error {
	if a.stop != nil {
		a.stop()
	}
	return nil
}

var (
	_ caddy.App         = (*App)(nil)
	_ caddy.Provisioner = (*App)(nil)
)
