package sluice

// The shared store over the life of the process: kept across reloads while its settings are the same, and
// watched, so that nobody can miss that it is down.

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/redisstore"
	"github.com/caddy-sluice/sluice/telemetry"
)

// sharedStores holds the stores in use by the fingerprint of their settings.
var sharedStores = caddy.NewUsagePool()

// storeMetrics are those of the store that configs share. There is one kind of shared store.
var storeMetrics = telemetry.NewStore("redis")

// sharedStore is a Redis store with whoever listens to its state.
type sharedStore struct {
	*redisstore.Store
	// listener is the app that was started last: it has the logger and the events of the running config.
	listener  atomic.Pointer[App]
	changes   chan change
	done      chan struct{}
	unlimited atomic.Int64 // requests let through because the store is down
}

// change is a change of the store's state.
type change struct {
	up   bool
	kind redisstore.Kind
	err  error
}

// remindEvery is how often a store that is down while requests pass unlimited is spoken of.
const remindEvery = time.Minute

// openShared returns the store of these settings, a running one if there is one. It makes no connection.
func openShared(settings *caddyfile.Shared) (*sharedStore, error) {
	value, _, err := sharedStores.LoadOrNew(settings.Fingerprint, func() (caddy.Destructor, error) {
		s := &sharedStore{changes: make(chan change, 16), done: make(chan struct{})}
		options := settings.Options
		options.OnState = func(up bool, kind redisstore.Kind, err error) {
			storeMetrics.SetUp(up)
			select { // never hold a decision up; what is lost here the metrics still say
			case s.changes <- change{up, kind, err}:
			default:
			}
		}
		options.OnWarning = func(text string) {
			if a := s.listener.Load(); a != nil {
				a.logger.Warn("shared store: " + text)
			}
		}
		options.OnCall = func(took time.Duration, _ int, err error) {
			storeMetrics.Call(took)
			var failure *redisstore.Error
			if errors.As(err, &failure) {
				storeMetrics.Failure(string(failure.Kind))
			}
		}
		var err error
		if s.Store, err = redisstore.New(options); err != nil {
			return nil, err
		}
		storeMetrics.SetUp(true)
		go s.watch()
		return s, nil
	})
	if err != nil {
		return nil, err
	}
	return value.(*sharedStore), nil
}

// Destruct closes the store when no config uses it any more.
func (s *sharedStore) Destruct() error {
	close(s.done)
	return s.Store.Close()
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
			if a := s.listener.Load(); a != nil {
				a.storeChanged(c)
			}
		case <-remind.C:
			if a, n := s.listener.Load(), s.unlimited.Swap(0); a != nil && n > 0 {
				a.logger.Error("requests pass unlimited, because the shared store is down and their zones have on_store_error allow",
					zap.Int64("requests", n))
			}
		}
	}
}

// storeChanged tells operators that the store went down or came back.
func (a *App) storeChanged(c change) {
	if c.up {
		a.logger.Warn("shared store is up again")
		a.emit("rate_limit_store_up", map[string]any{"store": "redis"})
		return
	}
	a.logger.Error("shared store is down: each zone does what its on_store_error says",
		zap.String("kind", string(c.kind)), zap.Error(c.err))
	a.emit("rate_limit_store_down", map[string]any{"store": "redis", "kind": string(c.kind), "error": c.err.Error()})
}
