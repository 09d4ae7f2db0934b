package leaky

import (
	"context"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Queue is the policy of NGINX's limit_req with a queue: quota units per window leave evenly
// spaced, and of the units above the one in service queue may wait, the first delay of them no time
// at all. What would wait longer than maxWait is refused like what finds the queue full; a maxWait
// of 0 leaves it to the queue. Where maxWait leaves less room than queue, the policy has that room
// only, so that no client is told of more.
//
// Quota and window are as in [Meter]; queue is 1 or more, delay 0 to queue−1: if none of them had
// to wait it would be a meter. [algorithms.Compile] says what is out of range.
//
// Source: the module reference of ngx_http_limit_req_module.
func Queue(quota int64, window time.Duration, queue, delay int64, maxWait time.Duration) algorithms.Policy {
	if hi, lo := bits.Mul64(uint64(max(maxWait, 0)), uint64(max(quota, 0))); hi|lo > 0 && hi < uint64(max(window, 1)) {
		slots, rest := bits.Div64(hi, lo, uint64(max(window, 1))) // that begin within maxWait
		if rest > 0 {
			slots++
		}
		if slots < uint64(max(queue-delay, 0)) {
			queue = delay + int64(slots)
		}
	}
	p := Meter(quota, window, queue)
	p.Queue, p.MaxWait = queue-delay, maxWait
	return p
}

// Room is where the requests of this process wait for the slots that a store in this process gave
// them, a line for each counter. It has no goroutine and no timer: each request waits by itself. A
// request that goes away leaves its slot to the one behind it, that one's to the next, and so on;
// the last slot goes back to the counter.
type Room struct {
	store algorithms.Store
	now   func() time.Time

	mu    sync.Mutex // makes a decision and its place in the line one step
	lines map[place][]*ticket
}

// NewRoom returns an empty room in front of a store whose decisions take no longer than a lock may
// be held. The clock's seconds must be those of timers, as [time.Now]'s are.
func NewRoom(store algorithms.Store, now func() time.Time) *Room {
	return &Room{store: store, now: now, lines: map[place][]*ticket{}}
}

// place is a counter.
type place struct {
	space algorithms.Space
	key   string
}

// ticket is one charge in a line.
type ticket struct {
	wait  *Wait
	place place
	limit *algorithms.Limit
	cost  int64
	back  algorithms.Charge // gives it back
	first time.Time         // the slot that the store gave
	gone  int64             // units before it in the line that went away since
}

// slot is when the charge is served. All that went away counts at once, so that an interval which
// is no whole number of ticks is rounded only once.
func (t *ticket) slot() time.Time { return t.first.Add(-t.limit.Interval(t.gone)) }

// Wait is a request's time in the room. One goroutine may use it.
type Wait struct {
	room    *Room
	tickets []*ticket     // none once the request has left
	moved   chan struct{} // a slot of ours is earlier now
}

// Apply decides a batch as the store does, and puts each charge that is delayed in its line, but
// for dry runs. The Wait is nil when the batch was refused or none was delayed; else the request
// must leave the room, by [Wait.Until] or [Wait.Leave].
func (r *Room) Apply(ctx context.Context, charges []algorithms.Charge, out []algorithms.Outcome) (*Wait, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.store.Apply(ctx, charges, out); err != nil || algorithms.Binding(charges, out) >= 0 {
		return nil, err
	}
	var w *Wait
	now := r.now() // after the decision: a slot may be late by that much, never early
	for i := range charges {
		c := &charges[i]
		if out[i].Delay <= 0 || c.DryRun || !c.Commits() {
			continue
		}
		if w == nil {
			w = &Wait{room: r, moved: make(chan struct{}, 1)}
		}
		t := &ticket{
			wait: w, place: place{c.Limit.Space, strings.Clone(c.Key)}, limit: c.Limit, cost: c.Cost,
			back: c.Undo(&out[i]), first: now.Add(out[i].Delay),
		}
		t.back.Key, t.back.Force = t.place.key, true // those behind it move up
		w.tickets = append(w.tickets, t)
		r.enter(t)
	}
	return w, nil
}

// enter puts a ticket in its line, which is ordered by slot: under a rate that a reload raised, a
// newcomer's may be earlier than those that were given before.
func (r *Room) enter(t *ticket) {
	line := r.lines[t.place]
	i := len(line)
	for i > 0 && line[i-1].slot().After(t.first) {
		i--
	}
	r.lines[t.place] = slices.Insert(line, i, t)
}

// Until waits for the last of the request's slots and leaves the room. When ctx ends first the
// request leaves as in [Wait.Leave], and the error is the context's.
func (w *Wait) Until(ctx context.Context) error {
	rest := w.rest()
	timer := time.NewTimer(rest)
	defer timer.Stop()
	for rest > 0 {
		select {
		case <-timer.C:
		case <-w.moved:
		case <-ctx.Done():
			w.Leave()
			return context.Cause(ctx)
		}
		rest = w.rest()
		timer.Reset(rest)
	}
	return nil
}

// rest is the time to the last slot. Once that has come the request is no longer in the room.
func (w *Wait) rest() time.Duration {
	w.room.mu.Lock()
	defer w.room.mu.Unlock()
	var last time.Time
	for _, t := range w.tickets {
		if slot := t.slot(); slot.After(last) {
			last = slot
		}
	}
	rest := last.Sub(w.room.now())
	if rest <= 0 {
		w.clear(func(*ticket, []*ticket) {})
	}
	return rest
}

// Leave gives up the request's slots: those that are still to come are given back. Who has left
// before leaves nothing.
func (w *Wait) Leave() {
	w.room.mu.Lock()
	defer w.room.mu.Unlock()
	now := w.room.now()
	w.clear(func(t *ticket, behind []*ticket) {
		if t.slot().After(now) { // else it is used up, like that of a request which is being served
			w.room.giveBack(t, behind)
		}
	})
}

// clear takes the request out of its lines, and tells who stood behind it in each.
func (w *Wait) clear(left func(t *ticket, behind []*ticket)) {
	for _, t := range w.tickets {
		line := w.room.lines[t.place]
		i := slices.Index(line, t)
		if line = slices.Delete(line, i, i+1); len(line) > 0 {
			w.room.lines[t.place] = line
		} else {
			delete(w.room.lines, t.place)
		}
		left(t, line[i:])
	}
	w.tickets = nil
}

// GiveBack undoes a batch that Apply passed, for a request that will not be served: back has what
// undoes each of its charges that does not stand in line as w, and out answers them. Unlike a
// client's that went away, a slot that has come is given back too, and so is what had none; who
// came later moves up.
func (r *Room) GiveBack(w *Wait, back []algorithms.Charge, out []algorithms.Outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if w != nil {
		w.clear(r.giveBack)
	}
	for i := range back {
		back[i].Force = true // those behind a place move up
	}
	_ = r.store.Apply(context.Background(), back, out) // a store in this process does not fail
	for i := range back {
		c := &back[i]
		if c.Cost >= 0 || out[i].Mark == 0 {
			continue
		}
		for _, t := range r.lines[place{c.Limit.Space, c.Key}] {
			if t.back.Mark > c.Mark {
				t.moveUp(-c.Cost)
			}
		}
	}
}

// giveBack returns a ticket's units and moves those behind it up: by force, since it is not the
// last slot that becomes free, but after the move the last one is. Units that are used up already
// move nobody.
func (r *Room) giveBack(t *ticket, behind []*ticket) {
	back := [1]algorithms.Charge{t.back}
	var out [1]algorithms.Outcome
	_ = r.store.Apply(context.Background(), back[:], out[:])
	for _, b := range behind {
		if b.wait != t.wait && out[0].Mark != 0 { // ours have the same slot, and are about to leave too
			b.moveUp(t.cost)
		}
	}
}

func (t *ticket) moveUp(units int64) {
	t.gone += units
	select {
	case t.wait.moved <- struct{}{}:
	default: // it will look anyway
	}
}
