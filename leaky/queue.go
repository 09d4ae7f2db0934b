package leaky

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Queue is the policy of NGINX's limit_req with a queue: quota units per window leave evenly spaced, and of the units above
// the one in service queue may wait, the first delay of them no time at all. What would wait longer than maxWait
// is refused like what finds the queue full; a maxWait of 0 leaves it to the queue.
//
// Quota and window are as in [Meter]; queue is 1 or more, delay 0 to queue−1. [algorithms.Compile] says what is out of range.
//
// Source: the module reference of ngx_http_limit_req_module.
func Queue(quota int64, window time.Duration, queue, delay int64, maxWait time.Duration) algorithms.Policy {
	p := Meter(quota, window, queue)
	p.Queue, p.MaxWait = queue-delay, maxWait
	return p
}

// Room is where the requests of this process wait for the slots that a store in this process gave them, a line for each counter.
// It has no goroutine and no timer: each request waits by itself. A request that goes away leaves its slot to the one
// behind it, that one's to the next, and so on; the last slot goes back to the counter.
type Room struct {
	store algorithms.Store

	mu    sync.Mutex // also makes a decision and its place in the line one step
	lines map[place][]*ticket
}

// NewRoom returns an empty room in front of a store whose decisions take no longer than a lock may be held.
func NewRoom(store algorithms.Store) *Room {
	return &Room{store: store, lines: map[place][]*ticket{}}
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
	slot  time.Time
	limit *algorithms.Limit
	cost  int64
	mark  int64
}

// Wait is a request's time in the room.
type Wait struct {
	room    *Room
	tickets []*ticket
	moved   chan struct{} // a slot of ours is earlier now
}

// Apply decides a batch as the store does, and puts each charge that is delayed in its line, but for dry runs. The Wait is nil
// when the batch was refused or none was delayed; else the caller must call [Wait.Until] or [Wait.Leave].
func (r *Room) Apply(ctx context.Context, charges []algorithms.Charge, out []algorithms.Outcome) (*Wait, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.store.Apply(ctx, charges, out); err != nil || algorithms.Binding(charges, out) >= 0 {
		return nil, err
	}
	var w *Wait
	now := time.Now() // after the decision: a slot may be late by that much, never early
	for i := range charges {
		c := &charges[i]
		if out[i].Delay <= 0 || c.DryRun || c.Peek || c.Check {
			continue
		}
		if w == nil {
			w = &Wait{room: r, moved: make(chan struct{}, 1)}
		}
		t := &ticket{
			wait: w, place: place{c.Limit.Space, strings.Clone(c.Key)}, slot: now.Add(out[i].Delay),
			limit: c.Limit, cost: c.Cost, mark: out[i].Mark,
		}
		w.tickets = append(w.tickets, t)
		r.enter(t)
	}
	return w, nil
}

// enter puts a ticket in its line, which is ordered by slot.
func (r *Room) enter(t *ticket) {
	line := r.lines[t.place]
	i := len(line)
	for i > 0 && line[i-1].slot.After(t.slot) {
		i--
	}
	r.lines[t.place] = slices.Insert(line, i, t)
}

// Until waits for the last of the request's slots and leaves the room. When ctx ends first the request leaves as
// in [Wait.Leave], and the error is the context's.
func (w *Wait) Until(ctx context.Context) error {
	timer := time.NewTimer(w.rest())
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-w.moved:
		case <-ctx.Done():
			w.Leave()
			return context.Cause(ctx)
		}
		rest := w.rest()
		if rest <= 0 {
			w.room.mu.Lock()
			defer w.room.mu.Unlock()
			for _, t := range w.tickets {
				w.room.remove(t)
			}
			return nil
		}
		timer.Reset(rest)
	}
}

// rest is the time to the last slot.
func (w *Wait) rest() time.Duration {
	w.room.mu.Lock()
	defer w.room.mu.Unlock()
	var last time.Time
	for _, t := range w.tickets {
		if t.slot.After(last) {
			last = t.slot
		}
	}
	return time.Until(last)
}

// Leave gives up the request's slots: those that are still to come are given back. It may be called once, instead of Until.
func (w *Wait) Leave() {
	r, now := w.room, time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range w.tickets {
		behind := r.remove(t)
		if !t.slot.After(now) {
			continue // it is used up, like that of a request which is being served
		}
		for _, b := range behind {
			b.slot = b.slot.Add(-t.limit.Interval(t.cost))
			b.wait.wake()
		}
		// By force, since the slots behind it have moved up.
		back := [1]algorithms.Charge{{Key: t.place.key, Limit: t.limit, Cost: -t.cost, Mark: t.mark, Force: true}}
		var out [1]algorithms.Outcome
		_ = r.store.Apply(context.Background(), back[:], out[:]) // a store in this process does not fail
	}
}

// remove takes a ticket out of its line and returns those behind it.
func (r *Room) remove(t *ticket) (behind []*ticket) {
	line := r.lines[t.place]
	i := slices.Index(line, t)
	if line = slices.Delete(line, i, i+1); len(line) == 0 {
		delete(r.lines, t.place)
	} else {
		r.lines[t.place] = line
	}
	return line[i:]
}

// wake makes the request look at its slots again.
func (w *Wait) wake() {
	select {
	case w.moved <- struct{}{}:
	default: // it will look anyway
	}
}
