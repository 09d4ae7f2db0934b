package sluice

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"go.uber.org/zap"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/fields"
	"github.com/caddy-sluice/sluice/memstore"
)

func init() { caddy.RegisterModule(new(App)) }

// App is what the handlers of one config share: the shared store, and which zones they name and
// how.
type App struct {
	caddyfile.Global

	ctx    caddy.Context
	logger *zap.Logger
	events *caddyevents.App
	live   chan struct{} // closed when all apps of the config have started; nil without a shared store
	redis  *sharedStore  // nil when every zone counts in this process
	hears  *listener     // of it, while the app runs
	shared *caddyfile.Shared

	counters *counting.Counters
	clock    *func() int64 // of what is counted in this process

	mu       sync.Mutex
	zones    map[string]*zone
	handlers int               // so far
	named    map[string]int    // how many handlers got a name that was made up for them
	wire     map[string]string // the zone that has a name on the wire
	sweep    time.Duration     // the shortest interval that a handler asked for
	stop     context.CancelFunc
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "rate_limit", New: func() caddy.Module { return new(App) }}
}

// Provision prepares the app for its handlers, which join it while they are provisioned. It makes
// no connection: neither validating a config nor starting needs Redis.
func (a *App) Provision(ctx caddy.Context) error {
	a.ctx, a.logger = ctx, ctx.Logger()
	a.zones = make(map[string]*zone)
	a.named, a.wire = make(map[string]int), make(map[string]string)
	here, under, err := openProcess()
	if err != nil {
		return err
	}
	a.counters, a.clock = &counting.Counters{Process: here, Fleet: a.fleet}, under
	shared, err := a.Global.Compile()
	if err != nil || shared == nil {
		return err
	}
	for _, warning := range shared.Warnings {
		a.logger.Warn(warning)
	}
	events, err := ctx.App("events")
	if err != nil {
		return err
	}
	if err := storeMetrics.Register(ctx.GetMetricsRegistry()); err != nil {
		return fmt.Errorf("registering the shared store's metrics: %w", err)
	}
	a.events, a.live = events.(*caddyevents.App), make(chan struct{})
	if err := a.events.On("started", onStarted(sync.OnceFunc(func() { close(a.live) }))); err != nil {
		return err
	}
	store, err := openShared(shared)
	if err != nil {
		return err
	}
	a.redis, a.shared, a.counters.Shared = store, shared, store
	return nil
}

// fleet is the number of instances that share the store: configured, or as last counted.
func (a *App) fleet() int {
	if a.shared.FleetSize > 0 {
		return a.shared.FleetSize
	}
	return max(1, a.redis.FleetSize())
}

// onStarted is called when a config has started.
type onStarted func()

// Handle implements caddyevents.Handler.
func (f onStarted) Handle(context.Context, caddy.Event) error { f(); return nil }

// emit tells subscribers of Caddy's events app, if there are any. Apps start in any order, and the
// events app knows no subscriber before its turn, so what happens meanwhile is told after it.
func (a *App) emit(name string, data map[string]any) {
	select {
	case <-a.live:
	case <-a.ctx.Done(): // the config has failed to start, or ended
		return
	}
	if a.events.ShouldEmit(name) {
		a.events.Emit(a.ctx, name, data)
	}
}

// name counts a handler that is about to join, and tells apart the zones of those whose config
// gives them no name: in JSON of caddy-ext's form, two handlers with the same key and rate do not
// share a counter.
func (a *App) name(c *caddyfile.Config) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.handlers++
	if name := c.Unnamed(); name != "" {
		if a.named[name]++; a.named[name] > 1 {
			c.SetName(fmt.Sprintf("%s-%d", name, a.named[name]))
		}
	}
}

// join adds a handler's rule to the config and opens its zone, or says which other rule it
// contradicts.
func (a *App) join(r *caddyfile.Rule, logger *zap.Logger) (*zone, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := r.Resolve(a.redis != nil); err != nil {
		return nil, err
	}
	if r.Place == "" { // JSON has no lines
		r.Place = fmt.Sprintf("rate_limit handler %d of the config", a.handlers)
	}
	z := a.zones[r.Zone]
	if z == nil {
		z = &zone{process: a.counters.Process, first: r, opened: make(map[string]*memstore.Zone)}
		z.counters = z.open(r.Zone)
		z.open(counting.ShareZone(r.Zone))
		a.zones[r.Zone] = z
	}
	if r.Ban != nil {
		z.openBan(r.Ban)
	}
	if was, is := z.first.Settings(), r.Settings(); was != is {
		was, is = caddyfile.Difference(was, is)
		return nil, fmt.Errorf("zone %q has %q in %s but %q in %s: handlers that share a zone must agree on its settings; "+
			"make them equal, or give one of the zones another name", r.Zone, was, z.first.Place, is, r.Place)
	}
	for name := range r.AllNames() {
		wire := fields.Name(name)
		if other, taken := a.wire[wire]; taken && other != r.Zone {
			return nil, fmt.Errorf("clients would see two limits named %q, of zone %q (%s) and of zone %q; give one of the zones another name",
				name, r.Zone, r.Place, other)
		}
		a.wire[wire] = r.Zone
	}
	a.warnShared(z.first, r, logger)
	z.rules++
	z.units += r.Cost.Least()
	for limit := range r.AllLimits() {
		units := z.units
		if limit.Algorithm == algorithms.Concurrency { // one lease a rule, whatever the cost
			units = int64(z.rules)
		}
		if z.severalRules() && units > limit.Capacity && limit.Capacity > 0 {
			logger.Warn("a request that meets all rules of this zone can never pass, because together they take more than it holds",
				zap.String("zone", r.Zone), zap.Int("rules", z.rules), zap.Int64("units", units), zap.Int64("capacity", limit.Capacity))
			break
		}
	}
	return z, nil
}

// warnShared warns of two rules that use one zone's counters and probably do not mean to.
func (a *App) warnShared(first, r *caddyfile.Rule, logger *zap.Logger) {
	fields := []zap.Field{zap.String("zone", r.Zone), zap.String("place", first.Place), zap.String("other", r.Place)}
	if !first.SameKey(r) {
		logger.Warn("one zone is used with different keys: a key of one place and a key of the other that are the same text share a counter; "+
			"give one of the zones another name, unless both name the same clients",
			append(fields, zap.String("key", first.KeyText()), zap.String("other_key", r.KeyText()))...)
	}
	if first.DryRun != r.DryRun {
		logger.Warn("one zone is a dry run in one place and refuses in another: what the dry run lets pass uses up what the other refuses by; "+
			"give the dry run another name", fields...)
	}
}

// counts is what the config's zones count, and where.
func (a *App) counts() counted {
	now := counted{a, make(map[string][]*algorithms.Limit), make(map[string]string)}
	for _, z := range a.open() {
		name := z.first.Zone
		now.limits[name], now.place[name] = slices.Collect(z.first.AllLimits()), "this process"
		if z.first.Store == caddyfile.StoreRedis {
			now.place[name] = a.shared.Place()
		}
	}
	return now
}

// sweepEvery makes the app forget idle keys at least that often.
func (a *App) sweepEvery(d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sweep == 0 || d < a.sweep {
		a.sweep = d
	}
}

// Start begins to sweep, and to look at the shared store. There is one goroutine per config, none
// per zone or key.
func (a *App) Start() error {
	startCounting(a.counts(), a.logger)
	for _, z := range a.open() {
		if z.first.Store != caddyfile.StoreRedis {
			z.counters.Expect(slices.Collect(z.first.AllLimits())...)
		}
	}
	if a.redis != nil {
		a.hears = &listener{store: a.redis, logger: a.logger, emit: a.emit}
		a.hears.run()
	}
	if a.sweep > 0 {
		var ctx context.Context
		ctx, a.stop = context.WithCancel(context.Background())
		go a.keepSweeping(ctx)
	}
	return nil
}

// keepSweeping forgets idle keys at every interval, so that a zone which nobody uses any more gives
// its memory back.
func (a *App) keepSweeping(ctx context.Context) {
	tick := time.NewTicker(a.sweep)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			for _, z := range a.open() {
				for _, counters := range z.opened {
					counters.Sweep()
				}
			}
		}
	}
}

// open lists the zones that the app holds.
func (a *App) open() []*zone {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Values(a.zones))
}

// Stop undoes Start. The connections stay until Cleanup, for requests that are under way.
func (a *App) Stop() error {
	if a.stop != nil {
		a.stop()
	}
	if a.hears != nil {
		a.hears.retire()
	}
	return nil
}

// Cleanup releases the zones. The counters stay if another config has them open, as at a reload.
func (a *App) Cleanup() error {
	endCounting(a)
	for _, z := range a.open() {
		for _, counters := range z.opened {
			counters.Close()
		}
	}
	var errs [2]error
	if a.counters != nil {
		_, errs[0] = processes.Delete(a.clock)
	}
	if a.redis != nil {
		_, errs[1] = sharedStores.Delete(a.shared.Fingerprint)
	}
	return errors.Join(errs[:]...)
}

var (
	_ caddy.App          = (*App)(nil)
	_ caddy.Provisioner  = (*App)(nil)
	_ caddy.CleanerUpper = (*App)(nil)
)
