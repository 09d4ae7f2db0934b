package redisstore

// The store: batches in, outcomes out.

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Store applies batches in Redis. It is safe for use by many goroutines.
type Store struct {
	options  Options
	names    namer
	script   script
	announce script
	refused  *refusals

	lanes   []*lane  // modes single, sentinel, ring
	cluster *cluster // mode cluster

	ctx        context.Context
	cancel     context.CancelFunc
	background tasks
	started    sync.Once

	stateMu sync.Mutex     // one change is told after the other
	downs   map[*lane]bool // lanes in use that are down
	down    atomic.Int64   // how many they are

	fleet
	calls, dials, hits atomic.Int64
	unsettled          settlements
	leases             leases
	errorsMu           sync.Mutex
	errors             map[Kind]int64
}

var _ algorithms.Store = (*Store)(nil)

// New returns a store. It checks the options but needs no Redis: connections are made when they are
// needed.
func New(o Options) (*Store, error) {
	o.setDefaults()
	all, err := o.endpoints()
	if err != nil {
		return nil, err
	}
	prologue := redisTime
	if o.clock != nil {
		prologue = givenTime
	}
	s := &Store{
		options: o, names: namer{prefix: o.Prefix}, script: newScript(prologue + body), announce: newScript(fleetScript),
		refused: newRefusals(o.RefusedKeys), errors: map[Kind]int64{}, downs: map[*lane]bool{},
		unsettled: settlements{pending: map[settlement]algorithms.Charge{}, wake: make(chan struct{}, 1)},
		leases:    leases{held: map[*Lease]struct{}{}, wake: make(chan struct{}, 1)},
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.there, s.leave = context.WithCancel(s.ctx)
	s.fleet.init(o.Prefix)
	if err := s.open(all); err != nil {
		s.cancel()
		return nil, err
	}
	return s, nil
}

// Start announces the instance to the others and looks at the servers' settings, in the background.
// A store that is not started decides as well, but has a fleet size of 1.
func (s *Store) Start() {
	s.started.Do(func() { s.background.Go(s.keepAnnouncing) })
}

// Leave ends what Start began: the fleet does not count the instance any more. The store works on,
// for what is still owed to it.
func (s *Store) Leave() { s.leave() }

// Close gives back the leases that are held and settles what is left to settle, for a second at
// most, gives up what waits, says goodbye to the fleet and closes the connections.
func (s *Store) Close() error {
	s.leases.renewals.Lock() // what is released while it is renewed comes after
	s.releaseAll()
	s.settleRest()
	s.cancel()
	s.leases.renewals.Unlock()
	s.background.Wait()
	s.closeSettling()
	var errs []error
	for _, l := range s.allLanes() {
		errs = append(errs, l.client.Close())
	}
	if s.cluster != nil {
		s.cluster.close(0)
	}
	return errors.Join(errs...)
}

// Apply implements [algorithms.Store]. Every error is an [*Error]. A batch with a charge that is
// known to be refused is answered without Redis; its other outcomes are then [algorithms.Unasked].
func (s *Store) Apply(ctx context.Context, charges []algorithms.Charge, out []algorithms.Outcome) error {
	if len(charges) == 0 {
		return nil
	}
	var digests [8]digest
	var forgets [8]uint64
	b := batch{store: s, charges: charges, out: out, digests: digests[:0], forgets: forgets[:0]}
	b.hash()
	if s.refused != nil && b.knownRefused() {
		s.hits.Add(1)
		return nil
	}
	deadline := time.Now().Add(s.options.Timeout)
	if s.cluster == nil && len(s.lanes) == 1 {
		if err := b.applyWhole(ctx, s.lanes[0], deadline); err != nil {
			return err
		}
	} else if err := b.applyParts(ctx, deadline); err != nil {
		return err
	}
	if s.refused != nil {
		b.learn()
	}
	return nil
}

// Forget makes every instance forget what a key has used in the given spaces: at once in Redis and
// here, elsewhere within [Options.Announce].
func (s *Store) Forget(ctx context.Context, key string, spaces ...algorithms.Space) error {
	ctx, cancel := context.WithTimeout(ctx, max(s.options.Timeout, time.Second))
	defer cancel()
	for _, space := range spaces {
		readable := s.names.clear(space)
		d, _ := s.names.sum(nil, readable, key)
		name := s.names.append(nil, readable, d)
		if err := s.del(ctx, d, name); err != nil {
			return &Error{Kind: classify(err), Err: err}
		}
		if s.refused != nil {
			s.refused.forget(d)
		}
		s.forgotten(d)
	}
	return nil
}

func (s *Store) del(ctx context.Context, d digest, name []byte) error {
	l := s.laneFor(d, slot(name))
	for hops := 0; ; hops++ {
		err := l.client.Del(ctx, string(name)).Err()
		if err == nil || s.cluster == nil || classify(err) != KindMoved || hops == maxHops {
			return err
		}
		l = s.cluster.follow(l, slot(name), err)
	}
}

// laneFor is where a counter lives.
func (s *Store) laneFor(d digest, slot uint16) *lane {
	switch {
	case s.cluster != nil:
		return s.cluster.owner(slot)
	case len(s.lanes) == 1:
		return s.lanes[0]
	}
	return s.rendezvous(d)
}

// now is the given time of tests as text, empty in production.
func (s *Store) now() string {
	if s.options.clock == nil {
		return ""
	}
	return strconv.FormatInt(s.options.clock(), 10)
}

// Stats are counts since the store was made.
type Stats struct {
	Calls  int64          // round trips for decisions
	Dials  int64          // connections attempted
	Hits   int64          // batches answered by the memory of refusals
	Errors map[Kind]int64 // see [Options.OnFailure]
	Down   int            // servers that are down now
}

// Stats returns the counts.
func (s *Store) Stats() Stats {
	st := Stats{Calls: s.calls.Load(), Dials: s.dials.Load(), Hits: s.hits.Load(), Errors: map[Kind]int64{}}
	s.errorsMu.Lock()
	for k, n := range s.errors {
		st.Errors[k] = n
	}
	s.errorsMu.Unlock()
	st.Down = int(s.down.Load())
	return st
}

// count notes a failure. All pass here, so that the option's callback and [Stats] tell the same.
func (s *Store) count(k Kind) {
	s.errorsMu.Lock()
	s.errors[k]++
	s.errorsMu.Unlock()
	if s.options.OnFailure != nil {
		s.options.OnFailure(k)
	}
}

func (s *Store) observe(took time.Duration, batches int) {
	s.calls.Add(1)
	if s.options.OnCall != nil {
		s.options.OnCall(took, batches)
	}
}

// Up reports whether all servers answer.
func (s *Store) Up() bool { return s.down.Load() == 0 }

// laneDown notes that a server fails. One that owns nothing is missed by nobody.
func (s *Store) laneDown(l *lane, cause *Error) {
	s.stateMu.Lock()
	defer s.stateMu.Unlock()
	if s.cluster != nil && s.cluster.retired(l) {
		return
	}
	s.downs[l] = true
	s.refused.forgetCounters()
	s.tell(l, cause)
}

// laneUp notes that a server answers again, or that its part went to another.
func (s *Store) laneUp(l *lane) {
	s.stateMu.Lock()
	defer s.stateMu.Unlock()
	if !s.downs[l] {
		return
	}
	delete(s.downs, l)
	s.tell(l, nil)
}

func (s *Store) tell(l *lane, cause *Error) {
	s.down.Store(int64(len(s.downs)))
	if s.options.OnState != nil {
		s.options.OnState(State{Server: l.node, Err: cause, Down: len(s.downs), Of: len(s.allLanes())})
	}
}

// tasks are goroutines that end with the store.
type tasks struct {
	mu     sync.Mutex
	closed bool
	wg     sync.WaitGroup
}

// Go starts f unless the store is closed.
func (t *tasks) Go(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.wg.Go(f)
	}
}

// Wait waits for all and lets none start any more.
func (t *tasks) Wait() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.wg.Wait()
}
