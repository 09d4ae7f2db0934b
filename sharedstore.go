package sluice

// The shared store over the life of the process: kept across reloads while its settings are the
// same, and watched, so that nobody can miss that it is down.

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/redisstore"
	"github.com/caddy-sluice/sluice/telemetry"
)

// sharedStores holds the stores in use by the fingerprint of their settings.
var sharedStores = caddy.NewUsagePool()

// storeMetrics are those of the store that configs share. There is one kind of shared store.
var storeMetrics = telemetry.NewStore("redis")

// sharedStore is a Redis store that is watched.
type sharedStore struct {
	*redisstore.Store
	settings  *caddyfile.Shared
	inherited atomic.Bool // the store before it was down, and its return is not told yet
	watched   sync.Once
	changes   chan redisstore.State
	done      chan struct{}
	unlimited atomic.Int64 // requests let through because the store is down
	books     counting.Books
}

// remindEvery is how often a store that is down while requests pass unlimited is spoken of.
var remindEvery = time.Minute

// listener is a config that hears of its shared store, in its log and by its events.
type listener struct {
	store  *sharedStore
	logger *zap.Logger
	emit   func(name string, data map[string]any)
}

// running are the listeners of configs that were started and not stopped, the newest last. During a
// reload there are two; if it fails, the newer goes and the older has never ceased to run.
var running struct {
	sync.Mutex
	listeners []*listener
}

// run makes the listener the one that hears of its store, and begins to look at it.
func (l *listener) run() {
	running.Lock()
	running.listeners = append(running.listeners, l)
	running.Unlock()
	showState()
	l.store.watched.Do(func() { go l.store.watch() })
	l.store.Start()
}

// retire undoes run.
func (l *listener) retire() {
	running.Lock()
	running.listeners = slices.DeleteFunc(running.listeners, func(other *listener) bool { return other == l })
	running.Unlock()
	showState()
}

// listener is who hears of the store, nil if no config that runs uses it.
func (s *sharedStore) listener() *listener {
	running.Lock()
	defer running.Unlock()
	for _, l := range slices.Backward(running.listeners) {
		if l.store == s {
			return l
		}
	}
	return nil
}

// showState makes the metric say how the store of the newest config is.
func showState() {
	running.Lock()
	defer running.Unlock()
	if n := len(running.listeners); n > 0 {
		storeMetrics.SetUp(running.listeners[n-1].store.Up())
	}
}

// openShared returns the store of these settings, a running one if there is one. It makes no
// connection.
func openShared(settings *caddyfile.Shared) (*sharedStore, error) {
	value, _, err := sharedStores.LoadOrNew(settings.Fingerprint, func() (caddy.Destructor, error) {
		s := &sharedStore{settings: settings, changes: make(chan redisstore.State, 64), done: make(chan struct{})}
		options := settings.Options
		options.OnState = func(change redisstore.State) {
			showState()
			if change.Err != nil {
				s.inherited.Store(false) // its own return will be told
			}
			s.tell(change)
		}
		options.OnWarning = func(text string) {
			if l := s.listener(); l != nil {
				l.logger.Warn("shared store: " + text)
			}
		}
		options.OnCall = func(took time.Duration, _ int) { storeMetrics.Call(took) }
		options.OnFailure = func(kind redisstore.Kind) { storeMetrics.Failure(string(kind)) }
		options.OnUnsettled = storeMetrics.Unsettled
		var err error
		if s.Store, err = redisstore.New(options); err != nil {
			return nil, err
		}
		return s, nil
	})
	if err != nil {
		return nil, err
	}
	return value.(*sharedStore), nil
}

// lingering is how long a store outlives its last config at least. Caddy cleans up while requests
// of the old config are still under way, and they shall not be told that the store is down.
var lingering = 2 * time.Second

// What is owed to a store that no config uses is waited for, but not for ever.
const (
	givenUp = 30             // looks at a store that is down, perhaps because its password is no longer the right one
	longest = 24 * time.Hour // in all
)

// Destruct closes the store when no config uses it any more.
func (s *sharedStore) Destruct() error {
	close(s.done)
	if caddy.Exiting() {
		s.cutOff()
		return s.Store.Close()
	}
	s.Leave()
	if !s.Up() {
		s.handOver()
	}
	now := time.Now()
	s.outlive(lingering, now.Add(longest), now)
	return nil
}

// Books implements [counting.Store].
func (s *sharedStore) Books() *counting.Books { return &s.books }

// Hold implements [counting.Store].
func (s *sharedStore) Hold(limit *algorithms.Limit, key string, mark int64) counting.Lease {
	return s.Store.Hold(limit, key, mark)
}

// cutOff gives back what is held by requests that the process does not live to see the end of, as
// WebSockets and those that the grace period cuts off.
func (s *sharedStore) cutOff() {
	if n := s.books.CutOff(); n > 0 {
		caddy.Log().Named("http.handlers.rate_limit").Info("requests end with the process: what they hold in the shared store is given back",
			zap.Int("requests", n))
	}
}

// handOver leaves it to the store of the config that runs now to say that the outage is over, which
// a reload may have ended, with a new password, say. After a stop there is no such store, and one
// that is down tells its own return.
func (s *sharedStore) handOver() {
	running.Lock()
	defer running.Unlock()
	if n := len(running.listeners); n > 0 {
		if next := running.listeners[n-1].store; next != s && next.Up() {
			next.inherited.Store(true)
		}
	}
}

// Apply implements [counting.Store]. The first answer after an outage that was handed over says
// that it is over.
func (s *sharedStore) Apply(ctx context.Context, charges []algorithms.Charge, out []algorithms.Outcome) error {
	err := s.Store.Apply(ctx, charges, out)
	if err == nil && s.inherited.Load() && s.inherited.CompareAndSwap(true, false) {
		addrs := s.settings.Options.Addrs
		s.tell(redisstore.State{Server: strings.Join(addrs, " "), Of: len(addrs)})
	}
	return err
}

// tell hands a change of state to who watches. It never holds a decision up; what is lost here the
// metrics still say.
func (s *sharedStore) tell(change redisstore.State) {
	select {
	case s.changes <- change:
	default:
	}
}

// outlive closes the store once no request owes it anything and all is settled, or nothing can be
// brought to it any more. It was up at the given moment.
func (s *sharedStore) outlive(every time.Duration, end, up time.Time) {
	time.AfterFunc(every, func() {
		now := time.Now()
		if s.Up() {
			up = now
		}
		if s.books.Empty() && s.Settled() || now.Sub(up) > givenUp*every || now.After(end) {
			_ = s.Store.Close() // an error of closing connections helps nobody
			return
		}
		s.outlive(every, end, up)
	})
}

// watch reports every change of state, one line and one event each, and reminds.
func (s *sharedStore) watch() {
	remind := time.NewTicker(remindEvery)
	defer remind.Stop()
	for {
		select {
		case <-s.done:
			return
		case c := <-s.changes:
			if l := s.listener(); l != nil {
				l.storeChanged(c)
			}
		case <-remind.C:
			if l, n := s.listener(), s.unlimited.Swap(0); l != nil && n > 0 {
				l.logger.Error("requests pass unlimited, because the shared store is down and their zones have on_store_error allow",
					zap.Int64("requests", n))
			}
		}
	}
}

// storeChanged tells operators that a server of the store went down or came back.
func (l *listener) storeChanged(c redisstore.State) {
	fields := []zap.Field{zap.String("server", c.Server), zap.Int("down", c.Down), zap.Int("servers", c.Of)}
	data := map[string]any{"store": "redis", "server": c.Server, "down": c.Down, "servers": c.Of}
	if c.Err == nil {
		text := "shared store is up again"
		if c.Down > 0 {
			text = "shared store is up again in part: keys of this server are counted in it"
		}
		l.logger.Warn(text, fields...)
		l.emit("rate_limit_store_up", data)
		return
	}
	text := "shared store is down: each zone does what its on_store_error says"
	if c.Down < c.Of {
		text = "shared store is down in part: for keys of this server each zone does what its on_store_error says"
	}
	l.logger.Error(text, append(fields, zap.String("kind", string(c.Err.Kind)), zap.Error(c.Err))...)
	data["kind"], data["error"] = string(c.Err.Kind), c.Err.Error()
	l.emit("rate_limit_store_down", data)
}
