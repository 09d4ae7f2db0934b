package leaky

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/memstore"
)

func ms(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

func compile(t *testing.T, zone string, p algorithms.Policy) *algorithms.Limit {
	t.Helper()
	l, err := algorithms.Compile(zone, p)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// house is a room in a bubble of time that begins at its start, and what was seen of it.
type house struct {
	*Room
	t     *testing.T
	start time.Time
	all   sync.WaitGroup

	mu   sync.Mutex
	left map[string]time.Duration // who was served, and when
	gone map[string]error         // who went away
}

// inBubble runs body where time passes when everyone waits. When it ends everyone has left, and the
// room must be empty; a goroutine that remained would fail the test.
func inBubble(t *testing.T, body func(t *testing.T, h *house)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		h := &house{
			Room: NewRoom(memstore.New(), time.Now), t: t, start: time.Now(), left: map[string]time.Duration{}, gone: map[string]error{},
		}
		body(t, h)
		h.all.Wait()
		if len(h.lines) != 0 {
			t.Errorf("%d lines are left in an empty room", len(h.lines))
		}
	})
}

// at sleeps to a moment after the start.
func (h *house) at(d time.Duration) { time.Sleep(time.Until(h.start.Add(d))) }

func (h *house) ask(charges ...algorithms.Charge) (*Wait, []algorithms.Outcome) {
	h.t.Helper()
	out := make([]algorithms.Outcome, len(charges))
	w, err := h.Apply(context.Background(), charges, out)
	if err != nil {
		h.t.Fatal(err)
	}
	return w, out
}

// enter is a request on a goroutine of its own; it wants the delay that it is told.
func (h *house) enter(ctx context.Context, name string, delay time.Duration, charges ...algorithms.Charge) {
	h.t.Helper()
	w, out := h.ask(charges...)
	var got time.Duration
	for _, o := range out {
		if got = max(got, o.Delay); !o.OK {
			h.t.Fatalf("%s is refused: %+v", name, out)
		}
	}
	if got != delay || (w == nil) != (delay == 0) {
		h.t.Errorf("%s is told to wait %v, want %v", name, got, delay)
	}
	h.all.Go(func() {
		var err error
		if w != nil {
			err = w.Until(ctx)
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		if err != nil {
			h.gone[name] = err
		} else {
			h.left[name] = time.Since(h.start)
		}
	})
}

// served wants each to have been served at its moment, and no one else.
func (h *house) served(want map[string]time.Duration) {
	h.t.Helper()
	h.all.Wait()
	for name, at := range want {
		if got, ok := h.left[name]; got != at || !ok {
			h.t.Errorf("%s is served at %v (%t), want %v", name, got, ok, at)
		}
	}
	if len(h.left) != len(want) {
		h.t.Errorf("served %v, want %v", h.left, want)
	}
}

func TestQueuePolicy(t *testing.T) {
	want := algorithms.Policy{
		Algorithm: algorithms.LeakyBucket, Quota: 10, Window: time.Second, Burst: 6, Queue: 2, MaxWait: time.Minute,
	}
	if p := Queue(10, time.Second, 5, 3, time.Minute); p != want {
		t.Errorf("%+v, want %+v", p, want)
	}
	for _, c := range []struct {
		queue, delay   int64
		maxWait        time.Duration
		burst, waiting int64
	}{
		{50, 0, 0, 51, 50}, {50, 0, 3 * time.Second, 31, 30}, {50, 0, 2950 * time.Millisecond, 31, 30}, {50, 5, 3 * time.Second, 36, 30},
		{50, 0, time.Microsecond, 2, 1}, {50, 0, 5 * time.Second, 51, 50}, {50, 0, time.Hour, 51, 50}, {30, 0, 3 * time.Second, 31, 30},
	} {
		if p := Queue(10, time.Second, c.queue, c.delay, c.maxWait); p.Burst != c.burst || p.Queue != c.waiting {
			t.Errorf("%+v: %+v", c, p)
		}
	}
	for _, p := range []algorithms.Policy{
		Queue(10, time.Second, 5, 6, 0), Queue(10, time.Second, 5, -1, 0), Queue(10, time.Second, 5, 5, time.Second),
		Queue(10, time.Second, 5, math.MinInt64, 0), Queue(10, time.Second, 5, math.MaxInt64, 0), Queue(10, time.Second, 5, 0, -1),
	} {
		if _, err := algorithms.Compile("zone", p); !errors.Is(err, algorithms.ErrQueue) {
			t.Errorf("%+v: %v, want %v", p, err, algorithms.ErrQueue)
		}
	}
	for _, queue := range []int64{-1, math.MinInt64, math.MaxInt64} {
		if _, err := algorithms.Compile("zone", Queue(10, time.Second, queue, 0, 0)); !errors.Is(err, algorithms.ErrBurst) {
			t.Errorf("queue %d: %v, want %v", queue, err, algorithms.ErrBurst)
		}
	}
}

// 10/s, queue 5, seven at once: 0, 100, 200, 300, 400, 500, refused; with delay 3: 0, 0, 0, 0, 100,
// 200, refused.
func TestRoomServesInOrder(t *testing.T) {
	for delay, want := range map[int64][]int64{0: {0, 100, 200, 300, 400, 500}, 3: {0, 0, 0, 0, 100, 200}} {
		inBubble(t, func(t *testing.T, h *house) {
			c := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(10, time.Second, 5, delay, 0)), Cost: 1}
			served := map[string]time.Duration{}
			for i, at := range want {
				name := fmt.Sprint("request ", i)
				h.enter(context.Background(), name, ms(at), c)
				served[name] = ms(at)
			}
			if w, out := h.ask(c); w != nil || out[0].OK || out[0].Retry != ms(100) {
				t.Errorf("the seventh: %+v", out[0])
			}
			h.served(served)
		})
	}
}

// A 0, B 100, C 200, D 300; B leaves at 10: C goes at 100, D at 200, and a newcomer gets 300.
func TestF51WhoGoesAwayFreesItsPlace(t *testing.T) {
	inBubble(t, func(t *testing.T, h *house) {
		c := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(10, time.Second, 5, 0, 0)), Cost: 1}
		gone := errors.New("the client is gone")
		ctx, leave := context.WithCancelCause(context.Background())
		h.enter(context.Background(), "A", 0, c)
		h.enter(ctx, "B", ms(100), c)
		h.enter(context.Background(), "C", ms(200), c)
		h.enter(context.Background(), "D", ms(300), c)
		h.at(ms(10))
		leave(gone)
		synctest.Wait()
		h.enter(context.Background(), "newcomer", ms(290), c)
		h.served(map[string]time.Duration{"A": 0, "C": ms(100), "D": ms(200), "newcomer": ms(300)})
		if h.gone["B"] != gone {
			t.Errorf("B: %v, want %v", h.gone["B"], gone)
		}
	})
}

// Whoever leaves, whenever: those before stay, those behind move up one slot each, a newcomer gets
// the last slot; and a slot that has passed is used up.
func TestRoomLeaverInEveryPosition(t *testing.T) {
	const n = 5
	for i := 1; i <= n; i++ {
		for _, when := range []time.Duration{0, ms(5), ms(100*int64(i)) - 1, ms(100*int64(i) + 1)} {
			inBubble(t, func(t *testing.T, h *house) {
				c := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(10, time.Second, 10, 0, 0)), Cost: 1}
				h.enter(context.Background(), "0", 0, c)
				leaver, want := (*Wait)(nil), map[string]time.Duration{"0": 0}
				early := when < ms(100*int64(i))
				for j := 1; j <= n; j++ {
					slot := ms(100 * int64(j))
					if j == i {
						leaver, _ = h.ask(c)
						continue
					}
					h.enter(context.Background(), fmt.Sprint(j), slot, c)
					if want[fmt.Sprint(j)] = slot; j > i && early {
						want[fmt.Sprint(j)] -= ms(100)
					}
				}
				h.at(when)
				synctest.Wait()
				leaver.Leave()
				last := ms(100 * n)
				if !early {
					last += ms(100)
				}
				want["newcomer"] = last
				// The store counts in microseconds, and rounds up from the middle of one.
				h.enter(context.Background(), "newcomer", last-when.Truncate(time.Microsecond), c)
				h.all.Wait()
				if got := h.left["newcomer"]; got < last || got > last+time.Microsecond {
					t.Errorf("%d leaves after %v: the newcomer is served at %v, want %v", i, when, got, last)
				}
				h.left["newcomer"] = last
				h.served(want)
			})
		}
	}
}

// A request under two limits waits for the later slot; when it goes away it frees its place in both
// lines.
func TestRoomSeveralLines(t *testing.T) {
	inBubble(t, func(t *testing.T, h *house) {
		fast := algorithms.Charge{Key: "k", Limit: compile(t, "fast", Queue(10, time.Second, 10, 0, 0)), Cost: 1}
		slow := algorithms.Charge{Key: "k", Limit: compile(t, "slow", Queue(1, time.Second, 10, 0, 0)), Cost: 1}
		other := slow
		other.Key = "other"
		ctx, leave := context.WithCancel(context.Background())
		h.enter(context.Background(), "first", 0, fast, slow)
		h.enter(ctx, "leaver", time.Second, slow, fast)
		h.enter(context.Background(), "both", 2*time.Second, fast, slow)
		h.enter(context.Background(), "fast", ms(300), fast)
		h.enter(context.Background(), "slow", 3*time.Second, slow)
		h.enter(context.Background(), "other", 0, other)
		h.at(ms(50))
		leave()
		synctest.Wait()
		h.served(map[string]time.Duration{
			"first": 0, "both": time.Second, "fast": ms(200), "slow": 2 * time.Second, "other": 0,
		})
	})
	// Of a request whose slot in one line has passed only the other is given back.
	inBubble(t, func(t *testing.T, h *house) {
		fast := algorithms.Charge{Key: "k", Limit: compile(t, "fast", Queue(10, time.Second, 10, 0, 0)), Cost: 1}
		slow := algorithms.Charge{Key: "k", Limit: compile(t, "slow", Queue(1, time.Second, 10, 0, 0)), Cost: 1}
		h.enter(context.Background(), "first", 0, fast, slow)
		leaver, _ := h.ask(fast, slow)
		h.enter(context.Background(), "fast", ms(200), fast)
		h.enter(context.Background(), "slow", 2*time.Second, slow)
		h.at(ms(150))
		leaver.Leave()
		h.served(map[string]time.Duration{"first": 0, "fast": ms(200), "slow": time.Second})
	})
}

// Two charges on one counter are one place that is as large as both.
func TestRoomTwiceInOneLine(t *testing.T) {
	inBubble(t, func(t *testing.T, h *house) {
		c := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(10, time.Second, 10, 0, 0)), Cost: 1}
		h.enter(context.Background(), "first", 0, c)
		leaver, out := h.ask(c, c)
		if out[0].Delay != ms(100) || out[1].Delay != ms(100) {
			t.Errorf("%+v, want one slot", out)
		}
		h.enter(context.Background(), "behind", ms(300), c, c)
		h.enter(context.Background(), "last", ms(500), c)
		h.at(ms(10))
		leaver.Leave()
		h.enter(context.Background(), "newcomer", ms(390), c)
		h.served(map[string]time.Duration{"first": 0, "behind": ms(100), "last": ms(300), "newcomer": ms(400)})
	})
}

// What is not served here has no place: a refused batch, a dry run, a look.
func TestRoomWhoHasNoPlace(t *testing.T) {
	inBubble(t, func(t *testing.T, h *house) {
		c := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(10, time.Second, 3, 0, 0)), Cost: 1}
		never := algorithms.Charge{Key: "k", Limit: compile(t, "z", algorithms.Policy{Algorithm: algorithms.FixedWindow, Window: time.Hour}), Cost: 1}
		dry, peek, check := c, c, c
		dry.DryRun, peek.Peek, check.Check = true, true, true
		h.ask(c)
		for _, charges := range [][]algorithms.Charge{{c, never}, {peek}, {check}, {{Key: "k", Limit: c.Limit}}, {dry}} {
			if w, _ := h.ask(charges...); w != nil || len(h.lines) != 0 {
				t.Errorf("%+v has a place", charges)
			}
		}
		// Of all these only the dry run took a slot, as it would were it none.
		h.enter(context.Background(), "next", ms(200), c)
		// A dry run beside it does not wait either.
		h.enter(context.Background(), "with a dry run", ms(300), c, algorithms.Charge{Key: "dry", Limit: c.Limit, Cost: 1, DryRun: true})
		h.served(map[string]time.Duration{"next": ms(200), "with a dry run": ms(300)})
	})
}

// The context ends at the moment of the slot: served or not, the slot is used up.
func TestRoomContextEndsWithTheSlot(t *testing.T) {
	for range 20 { // the choice between the two is random
		inBubble(t, func(t *testing.T, h *house) {
			c := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(10, time.Second, 5, 0, 0)), Cost: 1}
			ctx, cancel := context.WithDeadline(context.Background(), h.start.Add(ms(100)))
			defer cancel()
			h.enter(context.Background(), "A", 0, c)
			h.enter(ctx, "B", ms(100), c)
			h.enter(context.Background(), "C", ms(200), c)
			h.at(ms(100))
			synctest.Wait()
			h.enter(context.Background(), "newcomer", ms(200), c)
			h.all.Wait()
			if at, served := h.left["B"]; served && at != ms(100) || !served && !errors.Is(h.gone["B"], context.DeadlineExceeded) {
				t.Errorf("B: served %t at %v, gone %v", served, at, h.gone["B"])
			}
			delete(h.left, "B")
			h.served(map[string]time.Duration{"A": 0, "C": ms(200), "newcomer": ms(300)})
		})
	}
}

// Leaving twice, leaving without having waited, and leaving after being served are all the same:
// once.
func TestRoomLeavesOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, h *house) {
		c := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(10, time.Second, 5, 0, 0)), Cost: 1}
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		h.ask(c)
		for range 3 {
			w, out := h.ask(c)
			if out[0].Delay != ms(100) {
				t.Fatalf("%+v: a leaver left more or less than its slot", out[0])
			}
			w.Leave()
			w.Leave()
			if err := w.Until(ended); err != nil || time.Since(h.start) > 0 {
				t.Errorf("waiting after leaving: %v after %v", err, time.Since(h.start))
			}
		}
		w, _ := h.ask(c)
		if err := w.Until(ended); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		w, _ = h.ask(c)
		if err := w.Until(context.Background()); err != nil || time.Since(h.start) != ms(100) {
			t.Errorf("%v after %v", err, time.Since(h.start))
		}
		w.Leave()
		if _, out := h.ask(algorithms.Charge{Key: "k", Limit: c.Limit, Cost: 1, Peek: true}); out[0].Delay != ms(100) {
			t.Errorf("%+v: one that was served gave its slot back", out[0])
		}
	})
}

// Three a second, 200 ahead of the last one, who all leave: it has lost less than a microsecond by
// rounding.
func TestRoomDoesNotDrift(t *testing.T) {
	inBubble(t, func(t *testing.T, h *house) {
		c := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(3, time.Second, 300, 0, 0)), Cost: 1}
		h.ask(c)
		var ahead []*Wait
		for range 200 {
			w, _ := h.ask(c)
			ahead = append(ahead, w)
		}
		last, _ := h.ask(c)
		for i := range ahead {
			ahead[(i*7)%len(ahead)].Leave()
		}
		if err := last.Until(context.Background()); err != nil {
			t.Error(err)
		}
		if got := time.Since(h.start); got < 333_333_334 || got > 333_334_334 {
			t.Errorf("served after %v, want 333.334ms", got)
		}
	})
}

// Under a rate that a reload raised a newcomer does not wait for the slots of the old one; under a
// lowered one it does.
func TestRoomReload(t *testing.T) {
	inBubble(t, func(t *testing.T, h *house) {
		old := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(1, time.Second, 10, 0, 0)), Cost: 1}
		raised := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(10, time.Second, 10, 0, 0)), Cost: 1}
		ctx, leave := context.WithCancel(context.Background())
		h.enter(context.Background(), "A", 0, old)
		h.enter(ctx, "B", time.Second, old)
		h.enter(context.Background(), "C", 2*time.Second, old)
		h.enter(context.Background(), "D", ms(300), raised) // three before it, at the new rate
		h.enter(context.Background(), "E", ms(400), raised)
		h.at(ms(50))
		leave()
		synctest.Wait()
		// B left under the old limit, so the first 50 ms count at the old rate: F is behind E by
		// less than a slot more.
		h.enter(context.Background(), "F", ms(395), raised)
		h.served(map[string]time.Duration{"A": 0, "C": time.Second, "D": ms(300), "E": ms(400), "F": ms(445)})
	})
}

// A thousand wait in ten lines, half of them go away at random moments; the others are served in
// order, never closer than the rate, and none later than it was told.
func TestRoomThousandWaiters(t *testing.T) {
	inBubble(t, func(t *testing.T, h *house) {
		limit := compile(t, "z", Queue(1000, time.Second, 1000, 0, 0))
		r := rand.New(rand.NewPCG(1, 2))
		var served [10][100]time.Duration // by line, in the order of entering; 0 is who went away
		for i := range 1000 {
			line, patience := i%10, time.Hour
			if r.IntN(2) == 0 {
				patience = time.Duration(r.IntN(80_000)) * time.Microsecond
			}
			h.all.Go(func() {
				h.at(time.Duration(i) * 10 * time.Microsecond)
				w, out := h.ask(algorithms.Charge{Key: fmt.Sprint("line ", line), Limit: limit, Cost: 1})
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				defer cancel()
				told := time.Since(h.start) + out[0].Delay
				if w != nil && w.Until(ctx) != nil {
					return
				}
				if at := time.Since(h.start); at > told {
					t.Errorf("served at %v, told %v", at, told)
				} else {
					served[line][i/10] = at
				}
			})
		}
		h.all.Wait()
		for line, times := range served {
			times := slices.DeleteFunc(times[1:], func(at time.Duration) bool { return at == 0 })
			for i, at := range times {
				if i > 0 && at-times[i-1] < time.Millisecond {
					t.Fatalf("line %d: %v after %v", line, at, times[i-1])
				}
			}
			if len(times) < 40 || len(times) > 90 {
				t.Errorf("line %d: %d served of 99", line, len(times))
			}
		}
	})
}

// broken is a store that fails.
type broken struct{ algorithms.Store }

var errBroken = errors.New("the store is broken")

func (broken) Apply(context.Context, []algorithms.Charge, []algorithms.Outcome) error {
	return errBroken
}

func TestRoomOfABrokenStore(t *testing.T) {
	r := NewRoom(broken{}, time.Now)
	w, err := r.Apply(context.Background(), make([]algorithms.Charge, 1), make([]algorithms.Outcome, 1))
	if w != nil || err != errBroken || len(r.lines) != 0 {
		t.Errorf("%v, %v", w, err)
	}
}

// back is what undoes a batch: a charge below zero for each that has no place in line.
func back(charges []algorithms.Charge, out []algorithms.Outcome) []algorithms.Charge {
	var all []algorithms.Charge
	for i, c := range charges {
		if out[i].Delay == 0 || c.DryRun {
			all = append(all, algorithms.Charge{Key: c.Key, Limit: c.Limit, Cost: -c.Cost, Mark: out[i].Mark, Force: true})
		}
	}
	return all
}

// undo is the request refused elsewhere after it passed here.
func (h *house) undo(w *Wait, out []algorithms.Outcome, charges ...algorithms.Charge) {
	b := back(charges, out)
	h.GiveBack(w, b, make([]algorithms.Outcome, len(b)))
}

// All that were served at once are given back, in whatever order: not only the one that came last.
func TestRoomGivesBackWhatHadNoSlot(t *testing.T) {
	inBubble(t, func(t *testing.T, h *house) {
		c := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(1, time.Second, 5, 3, 0)), Cost: 1}
		var taken [4][]algorithms.Outcome
		for i := range taken {
			var w *Wait
			if w, taken[i] = h.ask(c); w != nil {
				t.Fatalf("request %d waits: %+v", i, taken[i])
			}
		}
		for i, out := range taken {
			h.undo(nil, out, c)
			look := c
			look.Cost = 0
			if _, now := h.ask(look); now[0].Remaining != int64(3+i) {
				t.Errorf("%d given back: %+v", i+1, now)
			}
		}
	})
}

// Who came later moves up: behind one that was to be served at once, and behind one whose slot has
// come meanwhile.
func TestRoomGivesBackBehindOthers(t *testing.T) {
	type at = map[string]time.Duration
	for name, undo := range map[string]struct {
		when time.Duration
		who  int // of those that are not on their own
		next time.Duration
		want at
	}{
		"at once":           {ms(10), 0, ms(290), at{"C": ms(100), "D": ms(200), "newcomer": ms(300)}},
		"its slot has come": {ms(150), 1, ms(150), at{"C": ms(150), "D": ms(200), "newcomer": ms(300)}},
		"its slot is over":  {ms(190), 0, ms(210), at{"C": ms(200), "D": ms(300), "newcomer": ms(400)}},
		"dry run":           {ms(10), 2, ms(390), at{"C": ms(200), "D": ms(300), "newcomer": ms(400)}},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, h *house) {
				c := algorithms.Charge{Key: "k", Limit: compile(t, "z", Queue(10, time.Second, 9, 0, 0)), Cost: 1}
				dry := c
				dry.DryRun = true
				all := []algorithms.Charge{c, c, dry}
				waits, outs := make([]*Wait, 3), make([][]algorithms.Outcome, 3)
				for i := range 2 {
					waits[i], outs[i] = h.ask(all[i])
				}
				h.enter(context.Background(), "C", ms(200), c)
				h.enter(context.Background(), "D", ms(300), c)
				if undo.who == 2 {
					waits[2], outs[2] = h.ask(dry)
				}
				h.at(undo.when)
				synctest.Wait()
				h.undo(waits[undo.who], outs[undo.who], all[undo.who])
				if undo.who != 1 {
					h.all.Go(func() { _ = waits[1].Until(context.Background()) })
				}
				h.enter(context.Background(), "newcomer", undo.next, c)
				h.served(undo.want)
			})
		})
	}
}
