package redisstore

// Leases in Redis expire, so that those of an instance which dies vanish by themselves, and are
// renewed here while the request that holds them lives.

import (
	"cmp"
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
	taken    time.Time // or when a renewal was sent that may have taken it
	renewing bool      // released meanwhile, it is given back when the answer is there
	released bool
}

type leases struct {
	renewals sync.Mutex // one round of them: Close waits for what is released meanwhile

	mu      sync.Mutex
	held    map[*Lease]struct{}
	wake    chan struct{} // the first lease was taken, or a shorter one than before
	tick    time.Duration // a sixth of the shortest window held
	running bool
}

// Hold keeps a lease alive that Apply has given: one unit of the key, with the outcome's mark. It
// must be released.
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

// releaseAll gives back the leases of requests that outlive the store, which would else be counted
// until they expire.
func (s *Store) releaseAll() {
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	for l := range s.leases.held {
		l.released = true
		l.giveBack()
	}
	clear(s.leases.held)
}

func (l *Lease) giveBack() {
	l.store.Settle(l.back())
}

// back is the charge that gives the lease back, wherever it is then.
func (l *Lease) back() algorithms.Charge {
	took := algorithms.Charge{Key: l.key, Limit: l.limit, Cost: 1}
	return took.Undo(&algorithms.Outcome{OK: true, Mark: l.mark})
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
			s.renewAll()
		}
	}
}

func (s *Store) renewAll() {
	s.leases.renewals.Lock()
	defer s.leases.renewals.Unlock()
	for due := s.leases.due(); len(due) > 0; {
		due = due[s.renew(due):]
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

// due returns the leases of which a third has passed, by counter and mark: two more attempts fit in
// before one of them expires, or one if Redis does not answer.
func (h *leases) due() (due []*Lease) {
	h.mu.Lock()
	now := time.Now()
	for l := range h.held {
		if now.Sub(l.taken) >= l.limit.Window/3 {
			l.renewing = true
			due = append(due, l)
		}
	}
	h.mu.Unlock()
	slices.SortFunc(due, func(a, b *Lease) int { // while it is renewed, nobody else changes a lease's mark
		return cmp.Or(a.compare(b), cmp.Compare(a.mark, b.mark))
	})
	return due
}

// compare orders leases by their counters.
func (l *Lease) compare(other *Lease) int {
	a, b := &l.limit.Space, &other.limit.Space
	return cmp.Or(cmp.Compare(l.key, other.key), cmp.Compare(a.Zone, b.Zone), cmp.Compare(a.Window, b.Window))
}

// renew gives back the first leases of those that are due and takes them anew in one step for each
// counter, by force: that their requests live is true, whatever the counter says. Afterwards those
// of one counter share a mark, so that to renew them again costs no more than one. It returns how
// many it renewed.
//
// If Redis does not answer, what it knows stays until it expires. It may have taken the leases all
// the same, under a mark that nobody knows, and each further attempt would count them once more:
// the next is made after another third of their time, so that such units are at most two for each
// lease.
func (s *Store) renew(due []*Lease) (n int) {
	charges, took := renewal(due)
	due = due[:len(took)]
	out, now := make([]algorithms.Outcome, len(charges)), time.Now()
	errs := s.applyEach(s.ctx, now.Add(s.options.Timeout), charges, out)
	s.leases.mu.Lock()
	defer s.leases.mu.Unlock()
	for i, l := range due {
		l.renewing = false
		err := errs[took[i]]
		if err == nil {
			l.mark = out[took[i]].Mark
		}
		if err == nil || !unapplied(err) {
			l.taken = now
		}
		if l.released {
			l.giveBack()
		}
	}
	return len(due)
}

// renewal returns the charges for the first leases of those that are due: one that takes all of a
// counter, and what is given back for each mark. took[i] is the one that takes the i-th lease.
func renewal(due []*Lease) (charges []algorithms.Charge, took []int) {
	take := 0
	for i, l := range due {
		back := l.back()
		known := i > 0 && l.compare(due[i-1]) == 0
		switch {
		case known && l.mark == due[i-1].mark:
			charges[take].Cost++
			charges[len(charges)-1].Cost--
		case len(charges) >= settleAtOnce:
			return charges, took
		case known:
			charges[take].Cost++
			charges = append(charges, back)
		default:
			take = len(charges)
			charges = append(charges, algorithms.Charge{Key: l.key, Limit: l.limit, Cost: 1, Force: true}, back)
		}
		took = append(took, take)
	}
	return charges, took
}
