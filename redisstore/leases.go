package redisstore

// Leases in Redis expire, so that those of an instance which dies vanish by themselves, and are renewed here while the
// request that holds them lives.

import (
	"slices"
	"sync"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Lease is one unit in flight that this instance holds.
type Lease struct {
	store *Store
	limit *algorithms.Limit
	key   string

	// All guarded by leases.mu.
	mark     int64
	taken    time.Time
	renewing bool // released meanwhile, it is given back when the answer is there
	released bool
}

type leases struct {
	mu      sync.Mutex
	held    map[*Lease]struct{}
	wake    chan struct{} // the first lease was taken, or a shorter one than before
	tick    time.Duration // a sixth of the shortest window held
	running bool
}

// Hold keeps a lease alive that Apply has given: one unit of the key, with the outcome's mark. It must be released.
func (s *Store) Hold(limit *algorithms.Limit, key string, mark int64) *Lease {
	l := &Lease{store: s, limit: limit, key: key, mark: mark, taken: time.Now()}
	h := &s.leases
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held[l] = struct{}{}
	if !h.running {
		h.running = true
		s.background.Go(s.keepRenewing)
	}
	if tick := limit.Window / 6; h.tick == 0 || tick < h.tick {
		h.tick = tick
		select {
		case h.wake <- struct{}{}:
		default:
		}
	}
	return l
}

// Release gives the lease back, in the background. Only the first call counts.
func (l *Lease) Release() {
	h := &l.store.leases
	h.mu.Lock()
	defer h.mu.Unlock()
	if l.released {
		return
	}
	l.released = true
	delete(h.held, l)
	if !l.renewing {
		l.giveBack()
	}
}

func (l *Lease) giveBack() {
	l.store.Settle(algorithms.Charge{Key: l.key, Limit: l.limit, Cost: -1, Mark: l.mark})
}

// keepRenewing looks after the leases at every tick, and sleeps while none is held.
func (s *Store) keepRenewing() {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		if tick := s.leases.interval(); tick > 0 {
			timer.Reset(tick)
		} else {
			timer.Stop()
		}
		select {
		case <-s.ctx.Done():
			return
		case <-s.leases.wake:
		case <-timer.C:
			for due := range slices.Chunk(s.leases.due(), settleAtOnce/2) {
				s.renew(due)
			}
		}
	}
}

// interval returns the time to the next look, 0 when no lease is held.
func (h *leases) interval() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.held) == 0 {
		h.tick = 0
	}
	return h.tick
}

// due returns the leases of which a third has passed: two more attempts fit in before one of them expires.
func (h *leases) due() (due []*Lease) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	for l := range h.held {
		if now.Sub(l.taken) >= l.limit.Window/3 {
			l.renewing = true
			due = append(due, l)
		}
	}
	return due
}

// renew gives each lease back and takes it anew in one step, by force: that its request lives is true, whatever the
// counter says. If Redis does not answer, what it knows stays until it expires, or until the next attempt.
func (s *Store) renew(due []*Lease) {
	charges := make([]algorithms.Charge, 0, 2*len(due))
	s.leases.mu.Lock()
	for _, l := range due {
		charges = append(charges,
			algorithms.Charge{Key: l.key, Limit: l.limit, Cost: -1, Mark: l.mark},
			algorithms.Charge{Key: l.key, Limit: l.limit, Cost: 1, Force: true})
	}
	s.leases.mu.Unlock()
	out, now := make([]algorithms.Outcome, len(charges)), time.Now()
	errs := s.applyEach(s.ctx, 2, charges, out)
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	for i, l := range due {
		l.renewing = false
		if errs[i] == nil {
			l.mark, l.taken = out[2*i+1].Mark, now
		}
		if l.released {
			l.giveBack()
		}
	}
}
