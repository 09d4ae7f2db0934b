package redisstore

// Charges that nobody waits for: what a response cost in the end, what a login that succeeded gives
// back, leases that ended. They are merged per counter while a call is under way, and dropped,
// counted, only when Redis does not take them.

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

const (
	maxUnsettled  = 1 << 16 // counters with something to settle; more is dropped
	settleAtOnce  = 64      // charges sent together
	settlePause   = 100 * time.Millisecond
	settleAtClose = time.Second // how long Close tries
)

// settlement names what may be merged: charges that take are one sum, those that give back are one
// for each mark.
type settlement struct {
	space algorithms.Space
	key   string
	mark  int64
	force bool
}

type settlements struct {
	applying sync.Mutex // one call after the other, so that what waits is merged, and Close waits for the last
	mu       sync.Mutex
	pending  map[settlement]algorithms.Charge
	taken    int // how many are being settled, and may come back
	wake     chan struct{}
	running  bool
	closed   bool
}

// Settle applies charges in the background; each must be one that cannot be refused: below zero, or
// forced. Keys are kept until then. Units in flight come last: who sees none of a key in flight
// sees what was settled together with them. What cannot be applied is reported to
// [Options.OnUnsettled].
func (s *Store) Settle(charges ...algorithms.Charge) {
	if len(charges) == 0 { // nothing to wake up for
		return
	}
	dropped := 0
	s.unsettled.mu.Lock()
	for _, c := range charges {
		if !s.unsettled.add(c) {
			dropped++
		}
	}
	if !s.unsettled.running {
		s.unsettled.running = true
		s.background.Go(s.keepSettling)
	}
	s.unsettled.mu.Unlock()
	s.dropped(dropped)
	select {
	case s.unsettled.wake <- struct{}{}:
	default: // it is awake
	}
}

// add merges a charge into those that wait, and reports whether there was room.
func (u *settlements) add(c algorithms.Charge) bool {
	id := settlement{space: c.Limit.Space, key: c.Key, mark: c.Mark, force: c.Force}
	if waiting, ok := u.pending[id]; ok {
		c.Cost += waiting.Cost // of opposite signs or far below any bound
	} else if u.closed || len(u.pending)+u.taken >= maxUnsettled {
		return false
	}
	u.pending[id] = c
	return true
}

// take removes what waits: units in flight, and all else. All of it, so that what is in flight
// waits for what came with it and not for what keeps coming.
func (u *settlements) take() (others, inFlight []algorithms.Charge) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.taken = len(u.pending)
	for _, c := range u.pending {
		if c.Limit.Algorithm == algorithms.Concurrency {
			inFlight = append(inFlight, c)
		} else {
			others = append(others, c)
		}
	}
	clear(u.pending)
	return others, inFlight
}

// Settled reports whether nothing waits to be settled, nor is under way.
func (s *Store) Settled() bool {
	s.unsettled.mu.Lock()
	defer s.unsettled.mu.Unlock()
	return len(s.unsettled.pending) == 0 && s.unsettled.taken == 0
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

// settleAll applies what waits, and reports whether nothing is left that may be tried again.
func (s *Store) settleAll(ctx context.Context) bool {
	s.unsettled.applying.Lock()
	defer s.unsettled.applying.Unlock()
	others, inFlight := s.unsettled.take()
	again := s.settle(ctx, others)
	again = append(again, s.settle(ctx, inFlight)...)
	s.unsettled.mu.Lock()
	s.unsettled.taken = 0
	s.unsettled.mu.Unlock()
	s.Settle(again...)
	return len(again) == 0
}

// settle applies charges, some at a time, and returns those that may be tried again. What one
// server does not take holds up nothing of the others.
func (s *Store) settle(ctx context.Context, charges []algorithms.Charge) (again []algorithms.Charge) {
	var out [settleAtOnce]algorithms.Outcome
	for some := range slices.Chunk(charges, settleAtOnce) {
		if len(again) > 0 && int(s.down.Load()) == len(s.allLanes()) {
			again = append(again, some...)
			continue
		}
		lost, deadline := 0, time.Now().Add(s.options.Timeout)
		for i, err := range s.applyEach(ctx, deadline, some, out[:len(some)]) {
			switch {
			case err == nil:
			case unapplied(err):
				again = append(again, some[i])
			default: // Redis may have taken it: to try again could count it twice
				lost++
			}
		}
		s.dropped(lost)
	}
	return again
}

// settleRest is the last attempt of a store that closes.
func (s *Store) settleRest() {
	ctx, cancel := context.WithTimeout(s.ctx, settleAtClose)
	defer cancel()
	for !(s.settleAll(ctx) && s.Settled()) && sleep(ctx, settlePause) {
	}
}

// closeSettling drops, counted, what is left and all that still comes.
func (s *Store) closeSettling() {
	s.unsettled.mu.Lock()
	s.unsettled.closed = true
	left := len(s.unsettled.pending)
	clear(s.unsettled.pending)
	s.unsettled.mu.Unlock()
	s.dropped(left)
}

func (s *Store) dropped(n int) {
	if n > 0 && s.options.OnUnsettled != nil {
		s.options.OnUnsettled(n)
	}
}
