package redisstore

// The breaker: after failures nobody waits for Redis until a probe, one at a time, has found it
// again.

import (
	"bytes"
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

const (
	failuresToOpen = 2 // in a row: one lost connection is no outage
	firstProbe     = 50 * time.Millisecond
	lastProbe      = 500 * time.Millisecond // so that Redis's return is seen within two seconds: go-redis may not dial for one of them
	relapse        = 10 * time.Second       // a failure this soon after a return continues the old backoff
)

type breaker struct {
	open atomic.Pointer[Error] // what everyone is answered; nil while closed

	mu       sync.Mutex
	failures int
	pause    time.Duration
	closedAt time.Time
	key      []byte // a counter on this server, so that the probe writes where decisions do
}

// blocked returns the answer while the breaker is open.
func (l *lane) blocked() error {
	if err := l.open.Load(); err != nil {
		return err
	}
	return nil
}

// report tells the breaker how a call went.
func (l *lane) report(err error, key []byte) {
	if err == nil {
		if !l.warm.Load() {
			l.warm.Store(true)
			l.breaker.mu.Lock()
			l.failures = 0
			l.breaker.mu.Unlock()
		}
		return
	}
	l.warm.Store(false)
	if l.store.ctx.Err() != nil {
		return
	}
	l.breaker.mu.Lock()
	defer l.breaker.mu.Unlock()
	l.failures++
	if l.failures < failuresToOpen || l.open.Load() != nil {
		return
	}
	cause := err.(*Error)
	l.open.Store(&Error{Kind: cause.Kind, Node: l.node, lane: l, Open: true, Err: cause.Err})
	l.key = append(l.key[:0], key...)
	if time.Since(l.closedAt) > relapse {
		l.pause = firstProbe
	}
	l.store.laneDown(l, cause)
	l.store.background.Go(l.probe)
}

// doubt makes sure of a server on which something other than a decision failed, so that an outage
// shows without waiting for a request. What failed may have a trouble of its own, such as a command
// that the user may not run: only what a probe fails on too counts, and what a probe fails on keeps
// the breaker open.
func (l *lane) doubt() {
	for range failuresToOpen {
		if l.blocked() != nil {
			return
		}
		err := l.alive(nil)
		if l.store.ctx.Err() != nil {
			return
		}
		if err == nil {
			l.report(nil, nil)
			return
		}
		failure := &Error{Kind: classify(err), Node: l.node, lane: l, Err: err}
		l.store.count(failure.Kind)
		l.report(failure, nil)
	}
}

// alive asks for what decisions need of a server: an answer to a write. key is a counter there.
func (l *lane) alive(key []byte) error {
	ctx, cancel := context.WithTimeout(l.store.ctx, l.store.options.Timeout)
	defer cancel()
	err := l.client.Set(ctx, probeKey(l.store.names.prefix, key), "", time.Minute).Err()
	if err != nil && l.store.cluster != nil && (classify(err) == KindMoved || l.store.cluster.retired(l)) {
		return nil // alive, or no longer asked: who owns the slots now is the cluster's to say
	}
	return err
}

// probe looks for Redis until it answers a write.
func (l *lane) probe() {
	for {
		jittered := l.pause*3/4 + rand.N(l.pause/2)
		if !sleep(l.store.ctx, jittered) {
			return
		}
		err := l.alive(l.key)
		if err == nil {
			break
		}
		// What is wrong may change while it is down: first nobody listens, then the data is
		// loading.
		l.open.Store(&Error{Kind: classify(err), Node: l.node, lane: l, Open: true, Err: err})
		l.pause = min(2*l.pause, lastProbe)
		if l.store.cluster != nil {
			l.store.cluster.refreshSoon()
		}
	}
	l.breaker.mu.Lock()
	l.failures, l.closedAt = 0, time.Now()
	l.open.Store(nil)
	l.breaker.mu.Unlock()
	l.store.laneUp(l)
}

// probeKey is a key under the prefix in the same cluster slot as the given one.
func probeKey(prefix string, key []byte) string {
	tag := key
	if i := bytes.IndexByte(key, '{'); i >= 0 {
		if j := bytes.IndexByte(key[i+1:], '}'); j > 0 {
			tag = key[i+1 : i+1+j]
		}
	}
	return prefix + ":probe:{" + string(tag) + "}"
}
