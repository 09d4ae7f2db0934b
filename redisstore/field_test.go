package redisstore

// Cases from the field that concern a shared store, by their numbers.

import (
	"context"
	"encoding/binary"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/algorithms/storetest"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// Two instances, whatever their clocks say, admit what one would: no clock but Redis's decides.
func TestF11_TwoInstancesOneLimit(t *testing.T) {
	addr := redistest.Start(t).Addr
	a := open(t, Options{Addrs: []string{addr}, RefusedKeys: -1})
	b := open(t, Options{Addrs: []string{addr}, RefusedKeys: -1, Prefix: a.options.Prefix})
	l := compile(t, "z", algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: 10, Window: time.Second, Burst: 10})
	start, admitted := time.Now(), int64(0)
	for i := range 200 {
		s := a
		if i%2 == 1 {
			s = b
		}
		if ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}).OK {
			admitted++
		}
	}
	if most := 10 + time.Since(start).Milliseconds()/100 + 1; admitted < 10 || admitted > most {
		t.Errorf("%d admitted, want 10 to %d", admitted, most)
	}
}

// ttls returns the time that every key has left; -1 is for ever.
func ttls(t testing.TB, s *Store) map[string]time.Duration {
	t.Helper()
	ctx, all := context.Background(), map[string]time.Duration{}
	c := s.lanes[0].client
	for _, k := range c.Keys(ctx, s.options.Prefix+":*").Val() {
		all[k] = c.PTTL(ctx, k).Val()
	}
	return all
}

func TestF13_EveryKeyExpires(t *testing.T) {
	clock := storetest.NewClock()
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}, RefusedKeys: -1, clock: clock.Now})
	limits := []*algorithms.Limit{algorithms.Ban("z")}
	for a := algorithms.FixedWindow; a <= algorithms.Concurrency; a++ {
		p := algorithms.Policy{Algorithm: a, Quota: 100, Window: time.Minute}
		if a.Bucket() {
			p.Burst = 100
		}
		limits = append(limits, compile(t, "z", p))
	}
	for _, l := range limits {
		ban := l.Capacity == 1
		for _, c := range []algorithms.Charge{
			{Key: "three first", Cost: 3}, {Key: "refused first", Cost: 101}, {Key: "one", Cost: 1}, {Key: "zero", Cost: 0},
			{Key: "forced", Cost: 1000, Force: true}, {Key: "peek", Cost: 1, Peek: true}, {Key: "refund of nothing", Cost: -1, Mark: clock.Now()},
		} {
			c.Limit = l
			c.Force = c.Force || ban && !c.Peek // see Banish
			o := ask1(t, s, c)
			if c.Cost == 3 { // the key is written again by a refund, and by what follows
				ask1(t, s, algorithms.Charge{Key: c.Key, Limit: l, Cost: -1, Mark: o.Mark})
				for range 80 {
					clock.Advance(time.Microsecond)
					ask1(t, s, algorithms.Charge{Key: c.Key, Limit: l, Cost: 1})
				}
			}
		}
	}
	all := ttls(t, s)
	if len(all) != 3*6+4 {
		t.Errorf("%d keys, want those of three first, one and forced for six algorithms, and four bans: %v", len(all), all)
	}
	for k, left := range all {
		if left < time.Minute {
			t.Errorf("%s lives for %v, want at least the padding of a minute", k, left)
		}
	}
}

// A write leaves the TTL as it is while that is long enough, and what is long enough stands in the
// state's last five bytes.
func TestF13_ATTLThatIsKeptIsLongEnough(t *testing.T) {
	clock := storetest.NewClock()
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}, RefusedKeys: -1, clock: clock.Now})
	c := s.lanes[0].client
	for _, a := range []algorithms.Algorithm{algorithms.FixedWindow, algorithms.SlidingWindow, algorithms.TokenBucket} {
		p := algorithms.Policy{Algorithm: a, Quota: 100, Window: time.Minute}
		if a.Bucket() {
			p.Burst = 100
		}
		l := compile(t, "z", p)
		charge := algorithms.Charge{Key: "k", Limit: l, Cost: 10}
		d, _ := s.names.sum(nil, s.names.clear(l.Space), charge.Key)
		name := string(s.names.append(nil, s.names.clear(l.Space), d))
		set, last := 0, int64(0)
		for range 100 {
			clock.Advance(7 * time.Second)
			o := ask1(t, s, charge)
			if !o.OK {
				continue
			}
			state := c.Get(t.Context(), name).Val()
			end := int64(binary.BigEndian.Uint64(append(make([]byte, 3), state[len(state)-5:]...)))
			idle := o.Mark // a bucket is empty again, or a window began
			switch a {
			case algorithms.FixedWindow:
				idle += l.Window.Microseconds()
			case algorithms.SlidingWindow:
				idle += 2 * l.Window.Microseconds()
			}
			if end*1_000_000 < idle+60_000_000 {
				t.Fatalf("%v: ends at %d s, which is not a minute after it says nothing more, at %d µs", a, end, idle)
			}
			if end == last {
				continue
			}
			set, last = set+1, end
			want := time.Duration(end*1000-clock.Now()/1000) * time.Millisecond
			if left := c.PTTL(t.Context(), name).Val(); left > want || left < want-10*time.Second {
				t.Errorf("%v: TTL %v, want %v as the state says", a, left, want)
			}
		}
		if set < 5 || set > 40 {
			t.Errorf("%v: the TTL was set %d times in 700 seconds", a, set)
		}
	}
}

// G30: who tells a wait makes sure that the key lives so long, whichever plan, or limit before a
// reload, has written it.
func TestAKeyLivesAsLongAsTheWaitThatIsTold(t *testing.T) {
	for _, a := range []algorithms.Algorithm{algorithms.TokenBucket, algorithms.LeakyBucket} {
		for name, look := range map[string]algorithms.Charge{"refused": {Cost: 1}, "peek": {Cost: 1, Peek: true}, "dry run": {Cost: 1, DryRun: true}} {
			clock := storetest.NewClock()
			s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}, RefusedKeys: -1, clock: clock.Now})
			fast := compile(t, "z", algorithms.Policy{Algorithm: a, Quota: 600, Window: time.Second, Burst: 600})
			slow := compile(t, "z", algorithms.Policy{Algorithm: a, Quota: 1, Window: time.Second, Burst: 1})
			ask1(t, s, algorithms.Charge{Key: "k", Limit: fast, Cost: 600})
			look.Key, look.Limit = "k", slow
			o := ask1(t, s, look)
			if o.OK || o.Retry < 590*time.Second {
				t.Fatalf("%v, %s: %+v", a, name, o)
			}
			for k, left := range ttls(t, s) {
				if left < o.Retry+time.Minute-time.Second {
					t.Errorf("%v, %s: %s lives for %v, and the wait is %v", a, name, k, left, o.Retry)
				}
			}
			if again := ask1(t, s, look); again != o { // nothing but the end has changed
				t.Errorf("%v, %s: %+v, then %+v", a, name, o, again)
			}
		}
	}
}

func TestF14_NoDebtIsForgotten(t *testing.T) {
	clock := storetest.NewClock()
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}, RefusedKeys: -1, clock: clock.Now})
	l := compile(t, "z", algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: 1, Window: time.Second, Burst: 200})
	if !ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 200}).OK {
		t.Fatal("a full bucket refused")
	}
	for k, left := range ttls(t, s) {
		if left < 289*time.Second || left > 291*time.Second {
			t.Errorf("%s lives for %v, want the 200 s of its refill and a minute and a half", k, left)
		}
	}
	clock.Advance(2200 * time.Millisecond)
	admitted := 0
	for range 200 {
		if ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}).OK {
			admitted++
		}
	}
	if admitted != 2 {
		t.Errorf("%d admitted, want 2", admitted)
	}
}

func TestF15_F16_ExpiredWindows(t *testing.T) {
	clock := storetest.NewClock()
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}, RefusedKeys: -1, clock: clock.Now})
	for a := algorithms.FixedWindow; a <= algorithms.LeakyBucket; a++ {
		p := algorithms.Policy{Algorithm: a, Quota: 5, Window: time.Minute}
		if a.Bucket() {
			p.Burst = 5
		}
		l := compile(t, "z", p)
		took := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 5})
		clock.Advance(3 * time.Minute)
		if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); o.Remaining != 4 {
			t.Errorf("%v: %d remaining in a new window, want 4", a, o.Remaining)
		}
		if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: -5, Mark: took.Mark}); o.Remaining != 4 {
			t.Errorf("%v: %d remaining after a late refund, want 4", a, o.Remaining)
		}
		ask1(t, s, algorithms.Charge{Key: "gone", Limit: l, Cost: -5, Mark: took.Mark})
		clock.Advance(3 * time.Minute)
	}
	all := ttls(t, s)
	for k, left := range all {
		if left <= 0 {
			t.Errorf("%s never expires", k)
		}
	}
	if len(all) != 5 {
		t.Errorf("a refund revived a key: %v", all)
	}
}

func TestF22_F23_KeysCannotMeet(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}})
	giant := strings.Repeat("x", 100_000)
	spaces := []algorithms.Space{
		{Zone: "a", Algorithm: algorithms.SlidingLog, Window: time.Hour}, {Zone: "a", Algorithm: algorithms.SlidingWindow, Window: time.Hour},
		{Zone: "a", Algorithm: algorithms.SlidingLog, Window: time.Minute}, {Zone: "a:b", Algorithm: algorithms.SlidingLog, Window: time.Hour},
		{Zone: "b", Algorithm: algorithms.SlidingLog, Window: time.Hour}, {Zone: "a%3Ab", Algorithm: algorithms.SlidingLog, Window: time.Hour},
	}
	seen := map[string]string{}
	for _, space := range spaces {
		for _, key := range []string{"", "a", "abc", "a:bc", "ab:c", "a_b|c\x00", "{a}", "}a{", giant + "1", giant + "2"} {
			readable := s.names.clear(space)
			d, _ := s.names.sum(nil, readable, key)
			name := string(s.names.append(nil, readable, d))
			if len(name) != len(readable)+22 {
				t.Errorf("%d bytes for a key of %d", len(name), len(key))
			}
			if other, ok := seen[name]; ok {
				t.Errorf("%v %.10q has the name of %s", space, key, other)
			}
			seen[name] = key
		}
	}
	l := perHour(t, "z", 1)
	ask1(t, s, algorithms.Charge{Key: giant + "1", Limit: l, Cost: 1})
	if !ask1(t, s, algorithms.Charge{Key: giant + "2", Limit: l, Cost: 1}).OK {
		t.Error("two giant keys that differ in the last byte share a counter")
	}
}

// storm sends n requests from 100 goroutines over the stores and counts what passes.
func storm(t *testing.T, n int, l *algorithms.Limit, stores ...*Store) int64 {
	var admitted, next atomic.Int64
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(n); i = next.Add(1) {
				var out [1]algorithms.Outcome
				err := stores[i%int64(len(stores))].Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, out[:])
				if err != nil {
					t.Error(err)
				} else if out[0].OK {
					admitted.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return admitted.Load()
}

func TestF34_ExactlyTheLimit(t *testing.T) {
	addr := redistest.Start(t).Addr
	a := open(t, Options{Addrs: []string{addr}})
	b := open(t, Options{Addrs: []string{addr}, Prefix: a.options.Prefix})
	if got := storm(t, 2000, perHour(t, "z", 367), a, b); got != 367 {
		t.Errorf("%d admitted, want 367", got)
	}
}

func TestF35_FirstHits(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}})
	for i := range 20 {
		l := perHour(t, strings.Repeat("z", i+1), 7)
		if got := storm(t, 64, l, s); got != 7 {
			t.Fatalf("%d admitted, want 7", got)
		}
	}
}

func TestF36_NeverMoreThanTheBound(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}, RefusedKeys: -1})
	l := compile(t, "z", algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: 5, Window: 200 * time.Millisecond})
	start := time.Now()
	got := storm(t, 6000, l, s)
	if most := 5 * (time.Since(start).Milliseconds()/200 + 1); got > most || got < 5 {
		t.Errorf("%d admitted in %v, want at most %d", got, time.Since(start), most)
	}
}

// changes records the changes of state.
type changes struct {
	mu  sync.Mutex
	all []Kind // "" for up
	ch  chan Kind

	last State
}

func newChanges() *changes { return &changes{ch: make(chan Kind, 100)} }

func (c *changes) note(change State) {
	var k Kind
	if change.Err != nil {
		k = change.Err.Kind
	}
	c.mu.Lock()
	c.all, c.last = append(c.all, k), change
	c.mu.Unlock()
	c.ch <- k
}

func (c *changes) wait(t *testing.T, want Kind, within time.Duration) {
	t.Helper()
	select {
	case got := <-c.ch:
		if got != want {
			t.Fatalf("state changed by %q, want %q", got, want)
		}
	case <-time.After(within):
		t.Fatalf("no change to %q within %v", want, within)
	}
}

func (c *changes) latest() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last
}

func (c *changes) list() []Kind {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]Kind(nil), c.all...)
}

func TestF37_NoScriptIsNoOutage(t *testing.T) {
	server, seen := redistest.Start(t), newChanges()
	s := open(t, Options{Addrs: []string{server.Addr}, OnState: seen.note})
	l := perHour(t, "z", 10)
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	server.Do("script", "flush")
	if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); o.Remaining != 8 {
		t.Errorf("after SCRIPT FLUSH: %+v", o)
	}
	server.Kill()
	server.Restart()
	if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); !o.OK {
		t.Errorf("after a restart: %+v", o)
	}
	if st := s.Stats(); len(st.Errors) != 0 || len(seen.list()) != 0 {
		t.Errorf("errors %v, changes %v, want none", st.Errors, seen.list())
	}
}

func kindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return ""
}

func TestF38_F42_Unreachable(t *testing.T) {
	seen := newChanges()
	s := open(t, Options{Addrs: []string{"127.0.0.1:" + redistest.FreePort(t)}, Timeout: 2 * time.Second, OnState: seen.note})
	l := perHour(t, "z", 10)
	var out [1]algorithms.Outcome
	charges := []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}
	for range 5 {
		if err := s.Apply(context.Background(), charges, out[:]); kindOf(err) != KindRefused {
			t.Fatalf("%v, want %q", err, KindRefused)
		}
	}
	seen.wait(t, KindRefused, 10*time.Second)
	before, start := s.Stats().Dials, time.Now()
	for range 10_000 {
		if err := s.Apply(context.Background(), charges, out[:]); kindOf(err) != KindRefused {
			t.Fatal(err)
		}
	}
	took := time.Since(start)
	if took > 5*time.Second {
		t.Errorf("10,000 decisions without Redis took %v, want far less than 1 ms each", took)
	}
	if dials := s.Stats().Dials - before; dials > 2+int64(took/(30*time.Millisecond)) {
		t.Errorf("%d dials in %v", dials, took)
	}
}

func TestF43_EvictionPolicyIsWarnedAbout(t *testing.T) {
	warned := make(chan string, 10)
	s := open(t, Options{Addrs: []string{redistest.Start(t, "--maxmemory-policy", "allkeys-lru").Addr}, OnWarning: func(text string) { warned <- text }})
	s.Start()
	select {
	case text := <-warned:
		if !strings.Contains(text, "allkeys-lru") {
			t.Error(text)
		}
	case <-time.After(20 * time.Second):
		t.Error("no warning")
	}
	for info, want := range map[string]int{
		"# Server\r\nredis_version:4.0.14\r\n": 1, "# Server\r\nredis_version:7.0.15\r\nmaxmemory_policy:noeviction\r\n": 0,
		"x\r\nredis_version:3.2.1\r\nmaxmemory_policy:volatile-ttl\r\n": 2,
	} {
		if got := warnings("n", info); len(got) != want {
			t.Errorf("%q: %q, want %d", info, got, want)
		}
	}
}
