package redisstore

// What a lane tells the callers that wait at it: always, once, and what happened.

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// newTestPart is a part with one charge, as a caller hands it to a lane.
func newTestPart(s *Store, c algorithms.Charge, timeout time.Duration) *part {
	b := batch{store: s, charges: []algorithms.Charge{c}}
	b.hash()
	return b.part(0, time.Now().Add(timeout))
}

// jam lets nothing fly on a lane, as when each round trip takes long, until free is called.
func jam(t *testing.T, l *lane) (free func()) {
	t.Helper()
	waitFor(t, "nothing to be in the air", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.air > 0 {
			return false
		}
		l.air = flights
		return true
	})
	f := newFlight(l)
	f.mu.Lock()
	f.air = l
	f.timer.Reset(time.Millisecond)
	f.mu.Unlock()
	return func() {
		f.mu.Lock()
		f.air = nil
		f.mu.Unlock()
		l.mu.Lock()
		l.air = 0
		l.mu.Unlock()
	}
}

// An answer that is there counts, even if its caller has just left.
func TestAnAnswerComesFirst(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for range 100 {
		p := newTestPart(s, algorithms.Charge{Key: "k", Limit: perHour(t, "z", 5), Cost: 1}, time.Minute)
		p.state.Store(taken)
		f := &flight{lane: s.lanes[0]}
		f.finish([]*part{p}, nil)
		if reusable, err := s.lanes[0].wait(ctx, p); !reusable || err != nil {
			t.Fatal(reusable, err)
		}
		p.release() // with nothing left in it that its next owner would take for an answer
	}
}

// Whoever still waits when his time is up was not asked about, and nobody's connection suffers for
// it.
func TestNoFlightBeginsTooLate(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	charge := algorithms.Charge{Key: "k", Limit: perHour(t, "z", 5), Cost: 1}
	ask1(t, s, charge)
	l, dials, calls := s.lanes[0], s.Stats().Dials, server.Calls("evalsha")
	for range 2 * failuresToOpen {
		p := newTestPart(s, charge, -time.Microsecond)
		f := newFlight(l)
		f.parts = append(f.parts, p)
		f.flyWaiting()
		reusable, err := l.wait(context.Background(), p)
		if reusable || kindOf(err) != KindTimeout || !unapplied(err) {
			t.Fatal(reusable, err)
		}
	}
	if !l.warm.Load() || l.blocked() != nil {
		t.Error("it counts as a failure of the server")
	}
	if o := ask1(t, s, charge); o.Remaining != 3 || s.Stats().Dials != dials || server.Calls("evalsha") != calls+1 {
		t.Errorf("%+v, %d dials, %d calls", o, s.Stats().Dials-dials, server.Calls("evalsha")-calls)
	}
}

// A watch that comes when its flight has just landed does not put off the next one's.
func TestLateWatchLeavesTheNextFlightAlone(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}, Timeout: time.Minute})
	l, f := s.lanes[0], newFlight(s.lanes[0])
	carry := func(timeout time.Duration) *part {
		p := newTestPart(s, algorithms.Charge{Key: "k", Limit: perHour(t, "z", 5), Cost: 1}, timeout)
		p.state.Store(taken)
		f.mu.Lock()
		defer f.mu.Unlock()
		f.parts, f.air = append(f.parts[:0], p), l
		return p
	}
	first := carry(-time.Microsecond)
	l.mu.Lock()
	go f.watch()
	<-first.done // and now it wants to look at the queue
	next := make(chan *part, 1)
	go func() {
		f.mu.Lock()
		f.air = nil
		f.timer.Stop()
		f.mu.Unlock()
		p := carry(100 * time.Millisecond)
		f.mu.Lock()
		f.timer.Reset(time.Until(p.deadline))
		f.mu.Unlock()
		next <- p
	}()
	var p *part
	select {
	case p = <-next:
		l.mu.Unlock()
	case <-time.After(50 * time.Millisecond): // it waits for the watch
		l.mu.Unlock()
		p = <-next
	}
	select {
	case <-p.done:
	case <-time.After(20 * time.Second):
		t.Error("the next one was not told that its time is up")
	}
	f.mu.Lock()
	f.air = nil
	f.mu.Unlock()
}

// Nobody waits for ever, whatever the crowd, the server and the callers do, and who was told
// nothing was sent is not counted.
func TestEverybodyIsTold(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}, Timeout: 300 * time.Millisecond})
	limit := perHour(t, "z", 1<<40)
	var passed, unknown atomic.Int64
	var over atomic.Bool
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			for n := 0; !over.Load(); n++ {
				ctx, cancel := context.WithCancel(context.Background())
				if (i+n)%5 == 0 {
					time.AfterFunc(time.Duration(n%100)*time.Millisecond, cancel)
				}
				err := s.Apply(ctx, []algorithms.Charge{{Key: "k", Limit: limit, Cost: 1}}, make([]algorithms.Outcome, 1))
				cancel()
				if err == nil {
					passed.Add(1)
					continue
				}
				if !unapplied(err) {
					unknown.Add(1)
				}
				runtime.Gosched()
			}
		})
	}
	for range 3 {
		waitFor(t, "the server to answer", s.Up)
		before := s.Stats().Errors[KindTimeout]
		server.Stop()
		waitFor(t, "somebody's time to be up", func() bool { return s.Stats().Errors[KindTimeout] > before })
		server.Continue()
	}
	over.Store(true)
	wg.Wait()
	waitFor(t, "an answer", func() bool {
		var out [1]algorithms.Outcome
		err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: limit, Cost: 1, Peek: true}}, out[:])
		used := 1<<40 - out[0].Remaining
		if err == nil && (used < passed.Load() || used > passed.Load()+unknown.Load()) {
			t.Fatalf("%d used, %d passed, of %d it is not known", used, passed.Load(), unknown.Load())
		}
		return err == nil
	})
}

// What was never sent is no settlement that may have been executed: it is tried again.
func TestUnsentSettlementsAreTriedAgain(t *testing.T) {
	var dropped atomic.Int64
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}, Timeout: 2 * time.Second, OnUnsettled: func(n int) { dropped.Add(int64(n)) }})
	limit := hourly(t, "z", 100)
	free := jam(t, s.lanes[0])
	for i := range 10 {
		s.Settle(algorithms.Charge{Key: string(rune('a' + i)), Limit: limit, Cost: 1, Force: true})
	}
	waitFor(t, "their time to be up", func() bool { return s.Stats().Errors[KindTimeout] >= 10 })
	free()
	for i := range 10 {
		waitFor(t, "all is settled", func() bool { return hasLeft(s, limit, string(rune('a'+i)), 99) })
	}
	if n := dropped.Load(); n != 0 {
		t.Errorf("%d were dropped", n)
	}
}

// Every failure is counted once, and what the counts and the callback say is the same.
func TestFailuresAreCounted(t *testing.T) {
	server := redistest.Start(t)
	var mu sync.Mutex
	told := map[Kind]int64{}
	s := open(t, Options{Addrs: []string{server.Addr}, Timeout: 3 * time.Second, OnFailure: func(k Kind) {
		mu.Lock()
		told[k]++
		mu.Unlock()
	}})
	limit, foreign := perHour(t, "z", 1000), perHour(t, "foreign", 1000)
	d, _ := s.names.sum(nil, s.names.clear(foreign.Space), "k")
	server.Do("set", string(s.names.append(nil, s.names.clear(foreign.Space), d)), "not a counter")
	want := map[Kind]int64{}
	fail := func(l *algorithms.Limit) {
		err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1))
		mu.Lock()
		defer mu.Unlock()
		if e, ok := err.(*Error); ok && !e.Open {
			want[e.Kind]++
		}
	}
	for range 3 {
		fail(foreign)
	}
	server.Stop()
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() { fail(limit) })
	}
	wg.Wait()
	server.Continue()
	mu.Lock()
	defer mu.Unlock()
	for _, k := range []Kind{KindFormat, KindTimeout} {
		if want[k] == 0 || told[k] != want[k] || s.Stats().Errors[k] != want[k] {
			t.Errorf("%s: %d failed, %d told, %d counted", k, want[k], told[k], s.Stats().Errors[k])
		}
	}
}

// Parts of a call that a server has only some keys for, because their slot is on its way, are asked
// for one by one: each has its own answer, and a failure is one.
func TestOneByOne(t *testing.T) {
	nodes := redistest.StartCluster(t, 2)
	s := open(t, Options{Addrs: addrs(nodes[:1]), Mode: Cluster, Prefix: "{limits}", Timeout: 3 * time.Second})
	limit := perHour(t, "z", 10)
	charge := func(key string) algorithms.Charge { return algorithms.Charge{Key: key, Limit: limit, Cost: 1} }
	for _, key := range []string{"here", "there", "after"} {
		ask1(t, s, charge(key))
	}
	d, _ := s.names.sum(nil, s.names.clear(limit.Space), "there")
	name := string(s.names.append(nil, s.names.clear(limit.Space), d))
	at := slot([]byte(name))
	from, to := nodes[0], nodes[1]
	if at >= slots/2 {
		from, to = to, from
	}
	to.Do("cluster", "setslot", at, "importing", from.Do("cluster", "myid"))
	from.Do("cluster", "setslot", at, "migrating", to.Do("cluster", "myid"))
	from.Do("migrate", "127.0.0.1", to.Port, name, 0, 5000)
	fly := func() (all []*part) {
		f := newFlight(s.cluster.owner(at))
		for _, key := range []string{"here", "there", "after"} {
			all = append(all, newTestPart(s, charge(key), 3*time.Second))
		}
		for _, p := range all {
			p.state.Store(taken)
		}
		f.parts = append(f.parts, all...)
		f.fly(all[0].deadline)
		return all
	}
	for _, p := range fly() {
		if p.err != nil || p.out[0].Remaining != 8 {
			t.Errorf("%+v %v", p.out, p.err)
		}
	}
	before := s.Stats().Errors
	to.Stop()
	all := fly()
	if p := all[0]; p.err != nil || p.out[0].Remaining != 7 {
		t.Errorf("here: %+v %v", p.out, p.err)
	}
	if p := all[1]; kindOf(p.err) != KindTimeout || unapplied(p.err) {
		t.Errorf("there: %v", p.err)
	}
	if p := all[2]; kindOf(p.err) != KindMoved || !unapplied(p.err) {
		t.Errorf("after: %v", p.err)
	}
	if l := s.cluster.owner(at); l.warm.Load() {
		t.Error("it counts as a success")
	}
	to.Continue()
	if after := s.Stats().Errors; after[KindMoved] != before[KindMoved]+1 || after[KindTimeout] != before[KindTimeout]+1 {
		t.Errorf("%v, then %v", before, after)
	}
}
