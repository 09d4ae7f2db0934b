package redisstore

// What callers and instances share: calls, refusals, and the knowledge of each other.

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// One call decides a request, whatever its zones; callers that come together share calls.
func TestCallsAreShared(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	var charges []algorithms.Charge
	for zones := 1; zones <= 8; zones++ {
		charges = append(charges, algorithms.Charge{Key: "k", Limit: perHour(t, "z"+strconv.Itoa(zones), 1_000_000), Cost: 1})
		if err := s.Apply(context.Background(), charges, make([]algorithms.Outcome, zones)); err != nil {
			t.Fatal(err)
		}
		before := server.Calls("evalsha") + server.Calls("eval")
		for range 10 {
			if err := s.Apply(context.Background(), charges, make([]algorithms.Outcome, zones)); err != nil {
				t.Fatal(err)
			}
		}
		if calls := server.Calls("evalsha") + server.Calls("eval") - before; calls != 10 {
			t.Errorf("%d zones: %d calls for 10 requests", zones, calls)
		}
	}
	before := server.Calls("evalsha")
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			for range 50 {
				if err := s.Apply(context.Background(), charges[:1], make([]algorithms.Outcome, 1)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if calls := server.Calls("evalsha") - before; calls > 64*50/4 {
		t.Errorf("%d calls for %d requests of 64 callers, want them shared", calls, 64*50)
	}
}

func TestRefusedKeysNeedNoRedis(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	charges := []algorithms.Charge{{Key: "k", Limit: perHour(t, "wide", 1000), Cost: 1}, {Key: "k", Limit: perHour(t, "z", 1), Cost: 1}}
	var out [2]algorithms.Outcome
	apply := func() {
		t.Helper()
		if err := s.Apply(context.Background(), charges, out[:]); err != nil {
			t.Fatal(err)
		}
	}
	apply()
	before, last := server.Calls("evalsha"), time.Duration(1<<62)
	for range 200 {
		apply()
		if out[1].OK || !out[0].OK || out[1].Retry > last || out[1].Retry <= 0 || out[1].Next != out[1].Retry || out[1].Remaining != 0 {
			t.Fatalf("%+v after a wait of %v", out, last)
		}
		last = out[1].Retry
	}
	if out[0].Asked() {
		t.Errorf("%+v, want the other zone not asked", out[0])
	}
	if calls := server.Calls("evalsha") - before; calls != 1 {
		t.Errorf("%d calls for a client that hammers while refused, want 1", calls)
	}
}

// Who was refused is admitted as soon as its time has passed, at the cost of one more call, and
// what it was refused took nothing.
func TestRememberedRefusalsEnd(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	l := compile(t, "z", algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: 1, Window: 700 * time.Millisecond})
	charges := []algorithms.Charge{{Key: "k", Limit: perHour(t, "wide", 1000), Cost: 1}, {Key: "k", Limit: l, Cost: 1}}
	start := time.Now()
	ask1(t, s, charges[0])
	ask1(t, s, charges[1])
	before := server.Calls("evalsha")
	var out [2]algorithms.Outcome
	waitFor(t, "the refusal to end", func() bool {
		if err := s.Apply(context.Background(), charges, out[:]); err != nil {
			t.Fatal(err)
		}
		return out[1].OK
	})
	if took := time.Since(start); took < l.Window || out[0].Remaining != 998 {
		t.Errorf("admitted after %v: %+v", took, out)
	}
	if calls := server.Calls("evalsha") - before; calls > 2 {
		t.Errorf("%d calls, want one for the refusal and one for the admission", calls)
	}
}

// A remembered refusal answers only for the question that was asked.
func TestRefusalsAnswerOnlyTheSame(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	ten, twelve := perHour(t, "z", 10), perHour(t, "z", 12)
	ask1(t, s, algorithms.Charge{Key: "k", Limit: ten, Cost: 9})
	first := ask1(t, s, algorithms.Charge{Key: "k", Limit: ten, Cost: 1})
	fresh := func(want bool, c algorithms.Charge) algorithms.Outcome {
		t.Helper()
		before := s.Stats().Hits
		o := ask1(t, s, c)
		if got := s.Stats().Hits == before; got != want {
			t.Errorf("%+v: asked Redis %v, want %v", c, got, want)
		}
		return o
	}
	one := algorithms.Charge{Key: "k", Limit: ten, Cost: 1}
	fresh(true, one)
	for _, other := range []algorithms.Charge{
		{Key: "k", Limit: ten, Cost: 1, Peek: true}, {Key: "k", Limit: ten, Cost: 1, Held: 1}, {Key: "k", Limit: ten, Cost: 1, DryRun: true},
		{Key: "k", Limit: ten, Cost: 0}, {Key: "other", Limit: ten, Cost: 1}, {Key: "k", Limit: ten, Cost: 2},
	} {
		fresh(false, one)
		fresh(true, other)
	}
	// A raised limit has something left at once.
	if o := fresh(true, algorithms.Charge{Key: "k", Limit: twelve, Cost: 1}); !o.OK || o.Remaining != 1 {
		t.Errorf("raised: %+v", o)
	}
	ask1(t, s, algorithms.Charge{Key: "k", Limit: twelve, Cost: 1})
	ask1(t, s, algorithms.Charge{Key: "k", Limit: ten, Cost: 1})
	// A refund seen here is known here.
	ask1(t, s, algorithms.Charge{Key: "k", Limit: ten, Cost: -1, Mark: first.Mark})
	ask1(t, s, algorithms.Charge{Key: "k", Limit: twelve, Cost: 1})
	ask1(t, s, algorithms.Charge{Key: "k", Limit: twelve, Cost: 1})
	// What never passes is not remembered, because nothing ends it.
	ask1(t, s, algorithms.Charge{Key: "k", Limit: ten, Cost: 11})
	fresh(true, algorithms.Charge{Key: "k", Limit: ten, Cost: 11})
}

func TestRefundOpensARefusedKey(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}})
	l := perHour(t, "z", 2)
	took := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 2})
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: -1, Mark: took.Mark})
	if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); !o.OK {
		t.Errorf("%+v after a refund", o)
	}
}

// A remembered refusal is the answer of the whole batch: it does not stand for other charges beside
// it, nor for a part of what refused.
func TestARefusalAnswersForItsBatchOnly(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	of := func(window time.Duration) algorithms.Charge {
		return algorithms.Charge{Key: "k", Limit: compile(t, "z", algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: 1, Window: window}), Cost: 1}
	}
	minute, hour, day := of(time.Minute), of(time.Hour), of(24*time.Hour)
	ask := func(charges ...algorithms.Charge) (wait time.Duration) {
		t.Helper()
		out := make([]algorithms.Outcome, len(charges))
		if err := s.Apply(context.Background(), charges, out); err != nil {
			t.Fatal(err)
		}
		for _, o := range out {
			wait = max(wait, o.Retry)
		}
		return wait
	}
	ask(minute, hour)
	ask(day)
	for _, tc := range []struct {
		charges []algorithms.Charge
		window  time.Duration
	}{
		{[]algorithms.Charge{minute}, time.Minute},
		{[]algorithms.Charge{minute, hour}, time.Hour},
		{[]algorithms.Charge{minute, day}, 24 * time.Hour},
		{[]algorithms.Charge{minute, hour, day}, 24 * time.Hour},
		{[]algorithms.Charge{minute, hour}, time.Hour},
		{[]algorithms.Charge{minute}, time.Minute},
	} {
		for range 3 {
			if wait := ask(tc.charges...); wait > tc.window || wait < tc.window-30*time.Second {
				t.Errorf("%d charges: a wait of %v, want nearly %v", len(tc.charges), wait, tc.window)
			}
		}
	}
}

// Who is banned is told the longer wait of another limit too, if it is known, whatever batch it was
// learned of.
func TestABanDoesNotHideALongerWait(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}})
	hour, ban := perHour(t, "z", 1), algorithms.Ban("z (bans)")
	one, ask := algorithms.Charge{Key: "k", Limit: hour, Cost: 1}, algorithms.Ask(ban, "k")
	ask1(t, s, one)
	ask1(t, s, one)
	ask1(t, s, algorithms.Banish(ban, "k", time.Minute))
	ask1(t, s, ask)
	hits, out := s.Stats().Hits, make([]algorithms.Outcome, 2)
	if err := s.Apply(context.Background(), []algorithms.Charge{ask, one}, out); err != nil || s.Stats().Hits != hits+1 {
		t.Fatal(err, "or Redis was asked about a ban that is known")
	}
	if out[0].OK || out[0].Retry > time.Minute || out[1].OK || out[1].Retry < time.Minute {
		t.Errorf("%+v", out)
	}
}

// However long a wait is, Redis is asked again about it: what stands there may have been changed by
// hand.
func TestRefusalsAreAskedAboutAgain(t *testing.T) {
	r, now := newRefusals(64), time.Now()
	c := algorithms.Charge{Limit: perHour(t, "z", 1), Cost: 1}
	ban := algorithms.Ask(algorithms.Ban("z"), "k")
	up, down := func() bool { return false }, func() bool { return true }
	for i, tc := range []struct {
		what   string
		charge algorithms.Charge
		of     batchOf
		after  time.Duration
		down   func() bool
		want   bool
	}{
		{"alone", c, batchOf{alone, 1}, aloneFor - 1, up, true},
		{"alone, late", c, batchOf{alone, 1}, aloneFor, up, false},
		{"alone, late, in an outage", c, batchOf{alone, 1}, aloneFor, down, false},
		{"beside others", c, batchOf{7, 1}, besideFor - 1, up, true},
		{"beside others, late", c, batchOf{7, 1}, besideFor, up, false},
		{"a ban, late", ban, batchOf{7, 1}, besideFor, up, false},
		{"a ban, late, in an outage", ban, batchOf{7, 1}, besideFor, down, true},
		{"a ban that is over, in an outage", ban, batchOf{7, 1}, time.Hour, down, false},
	} {
		d := digest{byte(i)}
		r.learn(d, &tc.charge, algorithms.Outcome{Retry: time.Hour, Next: time.Hour}, tc.of, now, r.forgets(d))
		known, ok := r.find(d, &tc.charge, now.Add(tc.after), tc.down)
		if ok != tc.want {
			t.Errorf("%s: known %t, want %t", tc.what, ok, tc.want)
		}
		if o := known.outcome(now.Add(tc.after)); ok && (o.OK || o.Retry != ceilMicro(time.Hour-tc.after) || o.Next != o.Retry) {
			t.Errorf("%s: %+v", tc.what, o)
		}
	}
}

func TestRefusalsAreBounded(t *testing.T) {
	r := newRefusals(64)
	l := perHour(t, "z", 1)
	now := time.Now()
	c := algorithms.Charge{Limit: l, Cost: 1}
	hour := algorithms.Outcome{Retry: time.Hour, Next: time.Hour}
	up := func() bool { return false }
	var d digest
	for i := range 10_000 {
		d = digest{byte(i), byte(i >> 8)}
		r.learn(d, &c, hour, batchOf{alone, 1}, now, 0)
	}
	held := 0
	for i := range r.shards {
		held += len(r.shards[i].keys)
	}
	if held > 64 {
		t.Errorf("%d keys remembered, want at most 64", held)
	}
	if _, ok := r.find(d, &c, now, up); !ok {
		t.Error("the last one is not known")
	}
	r.learn(d, &c, algorithms.Outcome{Retry: time.Second, Next: time.Second}, batchOf{alone, 1}, now, 0)
	if _, ok := r.find(d, &c, now.Add(time.Second), up); ok {
		t.Error("still refused at the very moment that the client was told to come")
	}
	before := r.forgets(d)
	r.forget(d)
	r.learn(d, &c, hour, batchOf{alone, 1}, now, before)
	if _, ok := r.find(d, &c, now, up); ok {
		t.Error("a refusal from before the key was forgotten is remembered")
	}
}

func TestFleet(t *testing.T) {
	server := redistest.Start(t)
	o := Options{Addrs: []string{server.Addr}, Prefix: "fleet", Timeout: 10 * time.Second, Announce: 500 * time.Millisecond} // gone after four times that
	a, b := open(t, o), open(t, o)
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if a.FleetSize() != 1 {
		t.Errorf("%d before it is known", a.FleetSize())
	}
	for _, s := range []*Store{a, b, c} {
		s.Start()
	}
	l := perHour(t, "z", 1)
	ask1(t, c, algorithms.Charge{Key: "x", Limit: l, Cost: 1})
	waitFor(t, "three instances", func() bool { return a.FleetSize() == 3 && b.FleetSize() == 3 })

	k := algorithms.Charge{Key: "k", Limit: l, Cost: 1}
	took := ask1(t, a, k)
	known := func(s *Store) bool {
		before := s.Stats().Hits
		ask1(t, s, k)
		return s.Stats().Hits > before
	}
	known(b)
	if !known(b) {
		t.Fatal("a refusal was not remembered")
	}
	if err := a.Forget(context.Background(), "k", l.Space); err != nil {
		t.Fatal(err)
	}
	waitFor(t, "b to forget", func() bool { return ask1(t, b, k).OK })

	took = ask1(t, a, algorithms.Charge{Key: "y", Limit: l, Cost: 1})
	k.Key = "y"
	known(b)
	ask1(t, a, algorithms.Charge{Key: "y", Limit: l, Cost: -1, Mark: took.Mark})
	waitFor(t, "b to hear of the refund", func() bool { return ask1(t, b, k).OK })

	if err := c.Close(); err != nil {
		t.Error(err)
	}
	waitFor(t, "one to leave", func() bool { return a.FleetSize() == 2 })
	server.Kill()
	waitFor(t, "an announcement to fail", func() bool { return !a.Up() })
	if a.FleetSize() != 2 {
		t.Errorf("%d, want what was last known", a.FleetSize())
	}
	for i := range 2 * maxForgotten {
		a.forgotten(digest{byte(i), byte(i >> 8)})
	}
	if len(a.pending) > maxForgotten {
		t.Errorf("%d pending", len(a.pending))
	}
}

// Decisions on a long log read a few entries, not all.
func TestLongLog(t *testing.T) {
	server := redistest.Start(t)
	clock := time.Now().UnixMicro()
	s := open(t, Options{Addrs: []string{server.Addr}, RefusedKeys: -1, clock: func() int64 { return clock }})
	const n = 20_000
	l := compile(t, "z", algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: n, Window: time.Hour})
	charge := []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}
	var out [1]algorithms.Outcome
	for i := range n {
		clock++
		if err := s.Apply(context.Background(), charge, out[:]); err != nil || !out[0].OK {
			t.Fatal(i, out, err)
		}
	}
	reads := server.Calls("getrange")
	for i := range 100 {
		clock += int64(i)
		charge[0].Cost = int64(1 + i*100)
		if o := ask1(t, s, charge[0]); o.OK {
			t.Fatalf("%+v", o)
		}
	}
	if each := (server.Calls("getrange") - reads) / 100; each > 60 {
		t.Errorf("%d reads for a refusal in a log of %d entries, want about 2·log n", each, n)
	}
	clock += time.Hour.Microseconds() - n/2
	if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); !o.OK {
		t.Errorf("%+v", o)
	}
	for k, left := range ttls(t, s) {
		size, _ := server.Do("strlen", k).(int64)
		if left <= time.Hour || size > 16*n {
			t.Errorf("%s: %d bytes for %v", k, size, left)
		}
	}
}

// A caller that goes away, and more callers than may wait.
func TestCallersGoAway(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}, Timeout: time.Minute})
	l := perHour(t, "z", 1_000_000)
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	server.Stop()
	kinds := map[Kind]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	for range maxWaiting + 3*maxCall { // more than wait and are in the air
		wg.Go(func() {
			err := s.Apply(ctx, []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1))
			mu.Lock()
			kinds[kindOf(err)]++
			mu.Unlock()
		})
	}
	waitFor(t, "overload", func() bool { mu.Lock(); defer mu.Unlock(); return kinds[KindOverload] > 0 })
	cancel()
	waitFor(t, "callers to leave", func() bool { mu.Lock(); defer mu.Unlock(); return kinds[KindCanceled] > 3000 })
	server.Continue()
	wg.Wait()
	// Those who left before they were sent were not counted.
	o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	if used := 1_000_000 - o.Remaining; used > 2+3*maxCall {
		t.Errorf("%d counted", used)
	}
	if kinds[KindTimeout] > 0 {
		t.Error(fmt.Sprint(kinds))
	}
	// To leave is no failure of the store, to find it full is one.
	if st := s.Stats(); st.Errors[KindOverload] != int64(kinds[KindOverload]) || st.Errors[KindCanceled] > 0 {
		t.Errorf("counted %v, told %v", st.Errors, kinds)
	}
}
