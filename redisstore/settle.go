package redisstore

// Charges that nobody waits for: what a response cost in the end, what a login that succeeded gives back, leases that
// ended. They are merged per counter while a call is under way, and dropped, counted, only when Redis does not take them.

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

const (
	maxUnsettled  = 1 << 16 // counters with something to settle; more is dropped
	settleAtOnce  = 64      // charges sent together
	settlePause   = 100 * time.Millisecond
	settleAtClose = time.Second // how long Close tries
)

// settlement names what may be merged: charges that take are one sum, those that give back are one for each mark.
type settlement struct {
	space algorithms.Space
	key   string
	mark  int64
	force bool
}

// owed is a sum of charges, and what to call when it is settled or dropped.
type owed struct {
	algorithms.Charge
	then []func()
}

func (o owed) done() {
	for _, then := range o.then {
		then()
	}
}

type settlements struct {
	applying sync.Mutex // one call after the other, so that what waits is merged, and Close waits for the last
	mu       sync.Mutex
	pending  map[settlement]owed
	wake     chan struct{}
	running  bool
	closed   bool
}

// Settle applies charges in the background; each must be one that cannot be refused: below zero, or forced. Keys are kept
// until then. What cannot be applied is reported to [Options.OnUnsettled].
func (s *Store) Settle(charges ...algorithms.Charge) {
	list := make([]owed, len(charges))
	for i, c := range charges {
		list[i].Charge = c
	}
	s.settle(list)
}

// SettleThen is Settle for one charge or several, that calls done once all of them are settled or dropped.
func (s *Store) SettleThen(done func(), charges ...algorithms.Charge) {
	left := new(atomic.Int64)
	left.Store(int64(len(charges)))
	then := []func(){func() {
		if left.Add(-1) == 0 {
			done()
		}
	}}
	list := make([]owed, len(charges))
	for i, c := range charges {
		list[i] = owed{Charge: c, then: then}
	}
	s.settle(list)
}

func (s *Store) settle(list []owed) {
	if len(list) == 0 { // nothing to wake up for
		return
	}
	var dropped []owed
	s.unsettled.mu.Lock()
	for _, o := range list {
		if !s.unsettled.add(o) {
			dropped = append(dropped, o)
		}
	}
	if !s.unsettled.running {
		s.unsettled.running = true
		s.background.Go(s.keepSettling)
	}
	s.unsettled.mu.Unlock()
	s.dropped(dropped...)
	select {
	case s.unsettled.wake <- struct{}{}:
	default: // it is awake
	}
}

// add merges a charge into those that wait, and reports whether there was room.
func (u *settlements) add(o owed) bool {
	id := settlement{space: o.Limit.Space, key: o.Key, mark: o.Mark, force: o.Force}
	if waiting, ok := u.pending[id]; ok {
		o.Cost += waiting.Cost // of opposite signs or far below any bound
		o.then = append(waiting.then, o.then...)
	} else if u.closed || len(u.pending) >= maxUnsettled {
		return false
	}
	u.pending[id] = o
	return true
}

// take removes some of what waits.
func (u *settlements) take(into []owed) []owed {
	u.mu.Lock()
	defer u.mu.Unlock()
	for id, o := range u.pending {
		into = append(into, o)
		delete(u.pending, id)
		if len(into) == settleAtOnce {
			break
		}
	}
	return into
}

// keepSettling is the one goroutine that settles. While Redis is down what waits is merged further.
func (s *Store) keepSettling() {
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-s.unsettled.wake:
		}
		for !s.settleAll(s.ctx) {
			if !sleep(s.ctx, settlePause) {
				return
			}
		}
	}
}

// settleAll applies what waits, and reports whether nothing is left that may be tried again. What one server does not take
// holds up nothing of the others.
func (s *Store) settleAll(ctx context.Context) bool {
	s.unsettled.applying.Lock()
	defer s.unsettled.applying.Unlock()
	var list, again []owed
	var charges [settleAtOnce]algorithms.Charge
	var out [settleAtOnce]algorithms.Outcome
	for len(again) == 0 || int(s.down.Load()) < len(s.allLanes()) && len(again) < maxUnsettled {
		list = s.unsettled.take(list[:0])
		if len(list) == 0 {
			break
		}
		for i, o := range list {
			charges[i] = o.Charge
		}
		deadline := time.Now().Add(s.options.Timeout)
		for i, err := range s.applyEach(ctx, deadline, charges[:len(list)], out[:len(list)]) {
			switch {
			case err == nil:
				list[i].done()
			case unapplied(err):
				again = append(again, list[i])
			default: // Redis may have taken it: to try again could count it twice
				s.dropped(list[i])
			}
		}
	}
	s.settle(again)
	return len(again) == 0
}

// settleRest is the last attempt of a store that closes.
func (s *Store) settleRest() {
	ctx, cancel := context.WithTimeout(s.ctx, settleAtClose)
	defer cancel()
	for !s.settleAll(ctx) && sleep(ctx, settlePause) {
	}
}

// closeSettling drops, counted, what is left and all that still comes.
func (s *Store) closeSettling() {
	s.unsettled.mu.Lock()
	s.unsettled.closed = true
	left := slices.Collect(maps.Values(s.unsettled.pending))
	clear(s.unsettled.pending)
	s.unsettled.mu.Unlock()
	s.dropped(left...)
}

func (s *Store) dropped(list ...owed) {
	if len(list) > 0 && s.options.OnUnsettled != nil {
		s.options.OnUnsettled(len(list))
	}
	for _, o := range list {
		o.done()
	}
}
