package redisstore

// A lane leads to one server. Callers that wait for it share script calls.
//
// The road not taken: go-redis's AutoPipeline also shares round trips, but runs one script per
// caller; one script for many callers spares Redis the per-command cost, and measured two to three
// times the decisions.

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-sluice/sluice/algorithms"
)

const (
	flights    = 2    // script calls in the air at once: while one is on the wire, Redis works on the other
	maxWaiting = 4096 // callers; more are answered with KindOverload
	maxCall    = 256  // charges in one script call, so that Redis is never busy with one for more than about a millisecond
	maxHops    = 4    // redirections followed at once for one call; for further ones it pauses
)

// part is the share of one batch that one server decides.
type part struct {
	asks  []ask
	names []byte
	out   []algorithms.Outcome
	err   error

	lane     *lane
	slot     uint16
	charges  []int // which charges of the batch
	failed   error // what its caller was told
	lost     bool  // its caller waits no more, but a flight may still write to it
	deadline time.Time
	alone    bool // its caller has no other part to send meanwhile
	state    atomic.Int32
	done     chan struct{}
}

// States of a part.
const (
	waiting   int32 = iota
	taken           // a flight has it
	answered        // err and out are its caller's to read
	unsent          // its caller left, or was told that the time is up, before a flight had it
	abandoned       // the same while a flight has it
)

var parts = sync.Pool{New: func() any { return &part{done: make(chan struct{}, 1)} }}

func newPart() *part {
	p := parts.Get().(*part)
	p.asks, p.names, p.charges, p.out = p.asks[:0], p.names[:0], p.charges[:0], p.out[:0]
	p.err, p.failed, p.lost, p.alone = nil, nil, false, false
	p.state.Store(waiting)
	return p
}

// release gives a part back for reuse. Only for parts that no flight can still write to.
func (p *part) release() {
	clear(p.asks)
	parts.Put(p)
}

type lane struct {
	store  *Store
	node   string // address, for errors
	client *redis.Client
	breaker

	mu    sync.Mutex
	queue []*part
	air   int // flights in the air
	// lonely: the last flight carried one part and left nobody behind
	lonely bool

	gone atomic.Int64 // parts that may stand in the queue although nobody waits for them
	warm atomic.Bool  // the last call was answered, so a connection is there
}

// submit brings a part to Redis, or returns why not. With wait the answer comes later: see
// [lane.wait].
func (l *lane) submit(p *part) (wait bool, err error) {
	if err := l.blocked(); err != nil {
		return false, err
	}
	l.mu.Lock()
	if len(l.queue) >= maxWaiting && l.gone.Swap(0) > 0 {
		l.queue = slices.DeleteFunc(l.queue, func(p *part) bool { return p.state.Load() == unsent })
	}
	if len(l.queue) >= maxWaiting {
		l.mu.Unlock()
		l.store.count(KindOverload)
		return false, &Error{Kind: KindOverload, Node: l.node, Unapplied: true, Err: errOverload}
	}
	// Alone, as the one before, and a connection is there: the caller flies itself, which spares
	// two switches of goroutines. In company it would fly alone while others come to the queue.
	if l.air == 0 && l.lonely && len(l.queue) == 0 && l.warm.Load() && p.alone {
		l.air++
		l.mu.Unlock()
		p.state.Store(taken)
		f := newFlight(l)
		f.parts = append(f.parts, p)
		f.fly(p.deadline)
		<-p.done
		l.land(f)
		return false, p.err
	}
	l.queue = append(l.queue, p)
	if l.air < flights {
		l.air++
		go l.run(newFlight(l))
	}
	l.mu.Unlock()
	return true, nil
}

// wait returns when the part was answered, its time is up, for which a flight watches, or the
// caller went away. An answer that is there counts, whatever else has happened. It reports whether
// the part may be reused.
func (l *lane) wait(ctx context.Context, p *part) (reusable bool, err error) {
	told := true
	select {
	case <-p.done:
	case <-ctx.Done():
		told = false
		l.abandon(p)
	}
	state := p.state.Load()
	if state == answered {
		if !told {
			<-p.done
		}
		return true, p.err
	}
	failure := &Error{Kind: KindTimeout, Node: l.node, Unapplied: state == unsent, Err: errTimeout}
	if told {
		l.store.count(KindTimeout)
	} else { // no failure of Redis
		failure.Kind, failure.Err = KindCanceled, context.Cause(ctx)
	}
	return false, failure
}

// abandon ends the wait for a part that is not answered yet, and reports whether it did.
func (l *lane) abandon(p *part) bool {
	if p.state.CompareAndSwap(waiting, unsent) {
		l.gone.Add(1)
		return true
	}
	return p.state.CompareAndSwap(taken, abandoned)
}

// land ends a flight flown by a caller: others that came meanwhile are flown by a goroutine.
func (l *lane) land(f *flight) {
	l.mu.Lock()
	if len(l.queue) > 0 {
		l.lonely = false
		go l.run(f)
	} else {
		l.air--
		f.release()
	}
	l.mu.Unlock()
}

// run flies until nobody waits.
func (l *lane) run(f *flight) {
	for {
		// Callers that are ready to run come first, so that they share the flight. It waits for
		// nobody else.
		runtime.Gosched()
		l.mu.Lock()
		n, charges := 0, 0
		for n < len(l.queue) && (n == 0 || charges+len(l.queue[n].asks) <= maxCall) {
			charges += len(l.queue[n].asks)
			n++
		}
		if n == 0 {
			l.air--
			l.mu.Unlock()
			f.release()
			return
		}
		l.lonely = n == 1 && len(l.queue) == 1 && l.air == 1
		f.parts = append(f.parts[:0], l.queue[:n]...)
		rest := copy(l.queue, l.queue[n:])
		clear(l.queue[rest:])
		l.queue = l.queue[:rest]
		l.mu.Unlock()
		f.flyWaiting()
	}
}

// until is a context with a deadline and no timer. Everything that waits with it waits for the
// network, by deadlines of its own that are taken from this one, or for a connection, for at most a
// timeout.
type until struct {
	context.Context
	deadline time.Time
}

func (u until) Deadline() (time.Time, bool) { return u.deadline, true }

func (u until) Err() error {
	if err := u.Context.Err(); err != nil || time.Now().Before(u.deadline) {
		return err
	}
	return context.DeadlineExceeded
}

// flight carries parts through one round trip.
type flight struct {
	lane  *lane
	parts []*part
	calls []call // one, or one for each slot
	open  int    // how many of them are in use
	key   []byte // one of the counters, for the probe

	mu    sync.Mutex
	air   *lane // nil when it is not in the air, or its parts have no other caller than who flies it
	timer *time.Timer
}

var flightPool = sync.Pool{New: func() any {
	f := new(flight)
	f.timer = time.AfterFunc(time.Hour, f.watch)
	f.timer.Stop()
	return f
}}

func newFlight(l *lane) *flight {
	f := flightPool.Get().(*flight)
	f.lane = l
	return f
}

func (f *flight) release() {
	clear(f.parts[:cap(f.parts)])
	f.lane, f.parts = nil, f.parts[:0]
	flightPool.Put(f)
}

// flyWaiting flies those that are still waited for.
func (f *flight) flyWaiting() {
	kept, first, last := f.parts[:0], time.Time{}, time.Time{}
	now := time.Now()
	for _, p := range f.parts {
		if !p.deadline.After(now) { // the process was paused: to ask now would only break a connection
			if f.lane.abandon(p) {
				p.done <- struct{}{}
			}
			continue
		}
		if !p.state.CompareAndSwap(waiting, taken) {
			continue
		}
		kept = append(kept, p)
		if p.deadline.After(last) {
			last = p.deadline
		}
		if first.IsZero() || p.deadline.Before(first) {
			first = p.deadline
		}
	}
	f.parts = kept
	if len(kept) == 0 {
		return
	}
	// While these waited the breaker may have opened: then nobody waits a second timeout.
	if err := f.lane.blocked(); err != nil {
		f.finish(f.parts, err)
		return
	}
	f.mu.Lock()
	f.air = f.lane
	f.timer.Reset(first.Sub(now))
	f.mu.Unlock()
	f.fly(last)
}

// watch tells the callers whose time is up, of the flight and of the queue behind it. One timer
// serves them all, because to arm and stop one for each costs a tenth of what a caller in a crowd
// costs here. Nobody in the queue is due before the first in the air.
func (f *flight) watch() {
	now := time.Now()
	f.mu.Lock() // to the end: a timer that is set after the flight has landed would be the next one's
	defer f.mu.Unlock()
	l := f.air
	if l == nil { // it has landed meanwhile
		return
	}
	next := now.Add(l.store.options.Timeout) // before any that comes later
	tell := func(p *part) {
		switch {
		case !p.deadline.After(now):
			if l.abandon(p) {
				p.done <- struct{}{}
			}
		case p.deadline.Before(next):
			next = p.deadline
		}
	}
	for _, p := range f.parts {
		tell(p)
	}
	l.mu.Lock()
	for _, p := range l.queue {
		tell(p)
	}
	l.mu.Unlock()
	f.timer.Reset(max(time.Until(next), time.Millisecond)) // those that are due at nearly the same time at once
}

// fly makes the calls and hands out the answers. A part is not touched after it was answered: its
// owner reuses it.
func (f *flight) fly(deadline time.Time) {
	l := f.lane
	ctx := until{l.store.ctx, deadline}
	f.group()
	f.key = append(f.key[:0], f.parts[0].names[:f.parts[0].asks[0].nameEnd]...)
	start := time.Now()
	f.ask(ctx)
	var failed error
	for i := range f.calls[:f.open] {
		err := f.calls[i].settle(ctx, l)
		if failure, ok := err.(*Error); ok && failure.lane != l {
			failure.lane.report(err, f.key) // where l redirected to
		} else if err != nil {
			failed = err
		}
	}
	l.store.observe(time.Since(start), len(f.parts))
	l.report(failed, f.key)
	f.mu.Lock() // a part is not watched any more once it may be reused
	f.air = nil
	f.timer.Stop()
	f.mu.Unlock()
	for i := range f.calls[:f.open] {
		c := &f.calls[i]
		f.finish(c.parts, c.err)
		clear(c.parts)
		clear(c.limits)
		c.cmd = nil
	}
}

// ask makes the calls, those of several slots in one pipeline.
func (f *flight) ask(ctx context.Context) {
	l := f.lane
	for i := range f.calls[:f.open] {
		c := &f.calls[i]
		c.cmd = redis.NewCmd(ctx, c.build(l.store.script, false, l.store.now())...)
	}
	if f.open == 1 {
		l.process(ctx, f.calls[0].cmd)
		return
	}
	cmds := make([]*redis.Cmd, f.open)
	for i := range cmds {
		cmds[i] = f.calls[i].cmd
	}
	l.process(ctx, cmds...)
}

// process sends commands, several in one pipeline; each keeps its answer. A client that cannot bear
// an answer fails the call, and not the process with all who wait for the flight.
func (l *lane) process(ctx context.Context, cmds ...*redis.Cmd) {
	defer func() {
		if p := recover(); p != nil {
			for _, cmd := range cmds {
				cmd.SetErr(fmt.Errorf("%w: %v", errReply, p))
			}
		}
	}()
	if len(cmds) == 1 {
		_ = l.client.Process(ctx, cmds[0])
		return
	}
	pipe := l.client.Pipeline()
	for _, cmd := range cmds {
		_ = pipe.Process(ctx, cmd)
	}
	_, _ = pipe.Exec(ctx)
}

// settle takes a call's answer, goes where it redirects to and tries again what executed nothing.
// It returns the failure that counts against the lane.
func (c *call) settle(ctx context.Context, l *lane) error {
	c.err = nil
	err := l.read(c, c.cmd)
	if err == nil {
		return nil
	}
	if err = l.again(ctx, c, err); l.store.cluster != nil && redis.HasErrorPrefix(err, tryAgain) && len(c.parts) > 1 {
		return l.oneByOne(ctx, c, err)
	}
	c.err = err
	return err
}

// finish gives each part its answer, which may be an error of its own, and counts what failed.
func (f *flight) finish(parts []*part, err error) {
	for _, p := range parts {
		if err != nil {
			p.err = err
		}
		failure, _ := p.err.(*Error)
		if p.state.CompareAndSwap(taken, answered) {
			if failure != nil && !failure.Open { // nobody asked
				f.lane.store.count(failure.Kind)
			}
			p.done <- struct{}{}
		}
	}
}

// group sorts the parts into calls: all in one, or one for each slot.
func (f *flight) group() {
	f.open = 0
	for _, p := range f.parts {
		c := f.callFor(p)
		c.parts = append(c.parts, p)
	}
}

func (f *flight) callFor(p *part) *call {
	for i := range f.calls[:f.open] {
		if f.calls[i].parts[0].slot == p.slot {
			return &f.calls[i]
		}
	}
	if f.open == len(f.calls) {
		f.calls = append(f.calls, call{})
	}
	c := &f.calls[f.open]
	f.open++
	c.parts = c.parts[:0]
	return c
}

func (l *lane) read(c *call, cmd *redis.Cmd) error {
	reply, err := cmd.Text()
	if err != nil {
		return err
	}
	return c.read(reply)
}

// tryAgain begins the answer of a server that has only some of a call's keys, because their slot is
// on its way to another.
const tryAgain = "TRYAGAIN"

// again handles what is no outage: a server that does not know the script, slots that moved, and
// states that pass by themselves. Nothing is repeated that may have been executed. What it returns
// is an [*Error].
func (l *lane) again(ctx context.Context, c *call, err error) error {
	at, text, asking, hops, pause := l, false, false, 0, time.Millisecond
	var cause error // what is waited for
	for err != nil {
		wasText, wasAsking := text, asking
		text, asking = false, false
		if redis.HasErrorPrefix(err, "NOSCRIPT") {
			if wasText { // it had the script itself
				return at.failure(err, err)
			}
			text, asking = true, wasAsking
		} else if addr, ok := redis.IsMovedError(err); ok && l.store.cluster != nil {
			at = l.store.cluster.moved(c.parts[0].slot, addr, at)
			hops++
		} else if addr, ok := redis.IsAskError(err); ok && l.store.cluster != nil {
			at, asking = l.store.cluster.lane(complete(addr, at)), true
			hops++
		} else if kind := classify(err); !natures[kind].passing || (kind == KindMoved && l.store.cluster == nil) {
			return at.failure(err, err)
		} else {
			if cause = err; !sleep(ctx, pause) {
				return at.failure(err, err)
			}
			pause = min(2*pause, 8*time.Millisecond)
			if redis.HasErrorPrefix(err, tryAgain) && len(c.parts) > 1 {
				return at.failure(err, err) // some keys are here, some there: each may be found alone
			}
			if l.store.cluster != nil {
				at = l.store.cluster.owner(c.parts[0].slot)
			}
		}
		if hops > maxHops { // servers disagree, as they may for a moment after a slot moved
			if cause = err; !sleep(ctx, pause) {
				return l.astray(c, err)
			}
			pause = min(2*pause, 8*time.Millisecond)
		}
		if down := at.blocked(); at != l && down != nil { // nobody waits for a server that is known to be down
			return down
		}
		if err = at.askAgain(ctx, c, text, asking); err != nil && ctx.Err() != nil {
			if cause == nil {
				cause = err
			}
			if hops > maxHops {
				return l.astray(c, cause)
			}
			return at.failure(cause, err)
		}
	}
	return nil
}

// astray is the failure of a call that was redirected until its time was up. The server that was
// asked first counts it and is asked first again: redirections to ever new servers would open no
// breaker, and each call would wait its whole time.
func (l *lane) astray(c *call, cause error) error {
	l.store.cluster.owners[c.parts[0].slot].Store(l)
	return l.failure(cause, cause)
}

func (l *lane) askAgain(ctx context.Context, c *call, text, asking bool) error {
	cmd := redis.NewCmd(ctx, c.build(l.store.script, text, l.store.now())...)
	if asking {
		l.process(ctx, redis.NewCmd(ctx, "asking"), cmd)
	} else {
		l.process(ctx, cmd)
	}
	return l.read(c, cmd)
}

// oneByOne asks for each part alone, so that each has an error of its own, until the time is up:
// what the rest was asked for before is then the cause. It returns the last failure.
func (l *lane) oneByOne(ctx context.Context, c *call, cause error) (failed error) {
	for _, p := range c.parts {
		err := cause
		if ctx.Err() == nil {
			single := call{parts: []*part{p}}
			at := l.store.cluster.owner(p.slot)
			if err = at.askAgain(ctx, &single, false, false); err != nil {
				err = at.again(ctx, &single, err)
			}
		}
		if err != nil {
			p.err, failed = err, err
		}
	}
	return failed
}

// failure names the cause of a failed call, whose last attempt may have failed otherwise.
func (l *lane) failure(cause, last error) error {
	kind := classify(cause)
	if l.store.ctx.Err() != nil {
		kind = KindClosed
	}
	return &Error{Kind: kind, Node: l.node, lane: l, Unapplied: unapplied(last), Err: cause}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}
