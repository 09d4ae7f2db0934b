package redisstore

// A server that is stopped, killed, slow, full, read-only, locked or someone else's.

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// offer sends requests at a steady rate until stop is closed, each from a goroutine of its own.
func offer(s *Store, l *algorithms.Limit, every time.Duration, stop chan struct{}, done func(took time.Duration, err error)) *sync.WaitGroup {
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			wg.Go(func() {
				var out [1]algorithms.Outcome
				start := time.Now()
				err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, out[:])
				done(time.Since(start), err)
			})
		}
	})
	return &wg
}

// A stopped process takes connections and never answers.
func TestF39_F40_StoppedAndBack(t *testing.T) {
	server, seen := redistest.Start(t), newChanges()
	const timeout = time.Second
	s := open(t, Options{Addrs: []string{server.Addr}, Timeout: timeout, OnState: seen.note})
	l := perHour(t, "z", 1_000_000)
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})

	before := runtime.NumGoroutine()
	server.Stop()
	var slowest, failed, slow atomic.Int64
	stop := make(chan struct{})
	wg := offer(s, l, time.Millisecond, stop, func(took time.Duration, err error) {
		if err != nil {
			failed.Add(1)
		}
		if took > timeout/2 {
			slow.Add(1)
		}
		for old := slowest.Load(); int64(took) > old && !slowest.CompareAndSwap(old, int64(took)); old = slowest.Load() {
		}
	})
	seen.wait(t, KindTimeout, 10*time.Second)
	waitFor(t, "those who came before to have waited their time", func() bool { return runtime.NumGoroutine() < before+60 })
	most, slowOnes, dials := 0, slow.Load(), s.Stats().Dials
	for end := time.Now().Add(3 * timeout); time.Now().Before(end); time.Sleep(20 * time.Millisecond) { // nobody waits any more
		most = max(most, runtime.NumGoroutine())
	}
	if more := slow.Load() - slowOnes; more > 60 { // nearly 2000 if they waited
		t.Errorf("%d slow requests while the breaker was open", more)
	}
	if more := s.Stats().Dials - dials; more > 10 {
		t.Errorf("%d dials, want only those of the probe", more)
	}
	if most > before+300 { // 1000 if they waited
		t.Errorf("%d goroutines, %d before", most, before)
	}
	server.Continue()
	start := time.Now()
	seen.wait(t, "", 10*time.Second)
	close(stop)
	wg.Wait()
	t.Logf("back after %v; slowest %v; %d failed", time.Since(start), time.Duration(slowest.Load()), failed.Load())
	if late := time.Duration(slowest.Load()) - timeout; late > 2*time.Second { // a busy machine's slack
		t.Errorf("a decision took %v, the timeout is %v", time.Duration(slowest.Load()), timeout)
	}
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	if got := seen.list(); len(got) != 2 {
		t.Errorf("changes %q, want one down and one up", got)
	}
}

func TestF40_KilledAndBack(t *testing.T) {
	server, seen := redistest.Start(t), newChanges()
	s := open(t, Options{Addrs: []string{server.Addr}, Timeout: time.Second, OnState: seen.note})
	l := perHour(t, "z", 1_000_000)
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	stop := make(chan struct{})
	var answers atomic.Int64
	wg := offer(s, l, time.Millisecond, stop, func(_ time.Duration, err error) {
		if err == nil {
			answers.Add(1)
		}
	})
	server.Kill()
	select {
	case k := <-seen.ch:
		if k != KindRefused && k != KindReset {
			t.Errorf("down by %q", k)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("not down")
	}
	// That a return is seen soon shows in how often it is looked for: with a backoff without bound
	// the tenth probe is after 50 s.
	last, probes, start := s.lanes[0].open.Load(), 0, time.Now()
	waitFor(t, "ten probes", func() bool {
		if now := s.lanes[0].open.Load(); now != last { // each leaves what it failed on
			last, probes = now, probes+1
		}
		return probes == 10
	})
	t.Logf("ten probes in %v", time.Since(start))
	server.Launch()
	dials, start := s.Stats().Dials, time.Now()
	seen.wait(t, "", 20*time.Second)
	t.Logf("back after %v", time.Since(start))
	before := answers.Load()
	waitFor(t, "Redis to decide", func() bool { return answers.Load() > before+100 })
	if more, most := s.Stats().Dials-dials, 10+3*int64(time.Since(start)/time.Second); more > most {
		t.Errorf("%d dials on the way back, want at most %d", more, most)
	}
	close(stop)
	wg.Wait()
	if got := seen.list(); len(got) != 2 {
		t.Errorf("changes %q, want one down and one up", got)
	}
}

// While a primary is a replica it answers READONLY; that is waited out, not an outage.
func TestF41_ReadOnlyIsWaitedOut(t *testing.T) {
	server, seen := redistest.Start(t), newChanges()
	s := open(t, Options{Addrs: []string{server.Addr}, OnState: seen.note})
	l := perHour(t, "z", 10)
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	server.Do("replicaof", "127.0.0.1", redistest.FreePort(t))
	go func() {
		time.Sleep(50 * time.Millisecond)
		server.Do("replicaof", "no", "one")
	}()
	if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); o.Remaining != 8 {
		t.Errorf("%+v", o)
	}
	if len(seen.list()) != 0 {
		t.Errorf("changes %q", seen.list())
	}
	server.Do("replicaof", "127.0.0.1", redistest.FreePort(t))
	short := open(t, Options{Addrs: []string{server.Addr}, Timeout: 500 * time.Millisecond, OnState: seen.note})
	for range 3 {
		_ = short.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1))
	}
	seen.wait(t, KindReadOnly, 10*time.Second)
	server.Do("replicaof", "no", "one")
	seen.wait(t, "", 10*time.Second)
}

func TestF41_SentinelFailover(t *testing.T) {
	master := redistest.Start(t)
	replica := redistest.Start(t, "--replicaof", "127.0.0.1 "+master.Port)
	watcher := redistest.StartSentinel(t, "limits", master)
	s := open(t, Options{Addrs: []string{watcher.Addr}, Mode: Sentinel, MasterName: "limits", Timeout: 3 * time.Second})
	l := perHour(t, "z", 100)
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	waitFor(t, "the sentinel to know the replica", func() bool {
		known, _ := watcher.Do("sentinel", "replicas", "limits").([]any)
		return len(known) == 1
	})
	waitFor(t, "the replica to have the counter", func() bool { return replica.Do("dbsize") != int64(0) })
	master.Kill()
	waitFor(t, "a decision by the new master", func() bool {
		var out [1]algorithms.Outcome
		err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, out[:])
		return err == nil && out[0].Remaining <= 98 // less if Redis has counted what timed out
	})
}

func waitFor(t testing.TB, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(20 * time.Second); !cond(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

func TestF44_TLSAndPassword(t *testing.T) {
	cert, key, pool := redistest.Certificate(t, "redis.example")
	good := &tls.Config{RootCAs: pool, ServerName: "redis.example"}
	server := redistest.StartWith(t, redis.Options{Password: "secret", TLSConfig: good},
		"--port", "0", "--tls-port", "{port}", "--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients", "no", "--requirepass", "secret")
	l := perHour(t, "z", 10)
	s := open(t, Options{Addrs: []string{server.Addr}, Password: "secret", TLS: good})
	if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); o.Remaining != 9 {
		t.Errorf("%+v", o)
	}
	for _, c := range []struct {
		name string
		o    Options
		want Kind
	}{
		{"wrong name", Options{Password: "secret", TLS: &tls.Config{RootCAs: pool, ServerName: "other.example"}}, KindTLS},
		{"name from the address", Options{Password: "secret", TLS: &tls.Config{RootCAs: pool}}, KindTLS},
		{"unknown authority", Options{Password: "secret", TLS: &tls.Config{ServerName: "redis.example"}}, KindTLS},
		{"wrong password", Options{Password: "guess", TLS: good}, KindWrongPass},
		{"no password", Options{TLS: good}, KindNoAuth},
		{"db out of range", Options{Password: "secret", TLS: good, DB: 99}, KindDB},
		{"no TLS", Options{Password: "secret"}, KindReset},
	} {
		seen := newChanges()
		c.o.Addrs, c.o.OnState, c.o.Timeout = []string{server.Addr}, seen.note, 5*time.Second
		s := open(t, c.o)
		for range 3 {
			_ = s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1))
		}
		select {
		case got := <-seen.ch:
			if got != c.want {
				t.Errorf("%s: %q, want %q", c.name, got, c.want)
			}
		case <-time.After(20 * time.Second):
			t.Errorf("%s: no change of state", c.name)
		}
	}
}

func TestUserAndSocketAndURL(t *testing.T) {
	server := redistest.Start(t)
	server.Do("acl", "setuser", "sluice", "on", ">word", "~limits:*", "+@all", "-@dangerous", "-@admin")
	server.Do("acl", "setuser", "reader", "on", ">word", "~limits:*", "+@read", "+evalsha", "+eval", "+time")
	l := perHour(t, "z", 10)
	for i, o := range []Options{
		{Addrs: []string{server.Addr}, Username: "sluice", Password: "word"},
		{Addrs: []string{"redis://sluice:word@" + server.Addr + "/3"}},
		{Addrs: []string{server.Socket}, Username: "sluice", Password: "word", DB: 4},
		{Addrs: []string{"unix://sluice:word@" + server.Socket + "?db=5"}},
	} {
		o.Prefix = "limits"
		if out := ask1(t, open(t, o), algorithms.Charge{Key: "k", Limit: l, Cost: 1}); out.Remaining != 9 {
			t.Errorf("%d: %+v", i, out)
		}
	}
	s := open(t, Options{Addrs: []string{server.Addr}, Username: "reader", Password: "word", Prefix: "limits"})
	if err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1)); kindOf(err) != KindNoPerm {
		t.Errorf("%v, want %q", err, KindNoPerm)
	}
}

func TestFullServer(t *testing.T) {
	server, seen := redistest.Start(t), newChanges()
	s := open(t, Options{Addrs: []string{server.Addr}, OnState: seen.note})
	l := perHour(t, "z", 100)
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	server.Do("config", "set", "maxmemory", "1")
	for range 3 {
		_ = s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1))
	}
	seen.wait(t, KindOOM, 10*time.Second)
	time.Sleep(200 * time.Millisecond) // probes write, so they see it too
	if got := seen.list(); len(got) != 1 {
		t.Errorf("changes %q, want one", got)
	}
	server.Do("config", "set", "maxmemory", "0")
	seen.wait(t, "", 10*time.Second)
	if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); o.Remaining != 98 {
		t.Errorf("%+v: a refused write was counted", o)
	}
}

// Slow: answers come too late. The timeout holds, and Redis's return is seen.
func TestSlowServer(t *testing.T) {
	server, seen := redistest.Start(t, "--enable-debug-command", "local"), newChanges()
	const timeout = 500 * time.Millisecond
	s := open(t, Options{Addrs: []string{server.Addr}, Timeout: timeout, OnState: seen.note})
	l := perHour(t, "z", 1_000_000)
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	slow := server.Client()
	defer slow.Close()
	slept := make(chan error, 1)
	go func() { slept <- slow.Do(context.Background(), "debug", "sleep", 4).Err() }()
	late := time.Duration(0)
	for start := time.Now(); len(seen.list()) == 0 && time.Since(start) < 20*time.Second; {
		asked := time.Now()
		_ = s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1))
		late = max(late, time.Since(asked)-timeout)
	}
	if late > 2*time.Second { // a busy machine's slack
		t.Errorf("%v later than the timeout", late)
	}
	if err := <-slept; err != nil {
		t.Fatal(err)
	}
	seen.wait(t, KindTimeout, time.Second) // it is there
	seen.wait(t, "", 10*time.Second)
}

// A counter that a later version has written is neither read wrongly nor overwritten, and is no
// outage.
func TestUnknownFormat(t *testing.T) {
	server, seen := redistest.Start(t), newChanges()
	s := open(t, Options{Addrs: []string{server.Addr}, OnState: seen.note, RefusedKeys: -1})
	for _, a := range []algorithms.Algorithm{algorithms.SlidingLog, algorithms.FixedWindow} {
		l := compile(t, "z", algorithms.Policy{Algorithm: a, Quota: 5, Window: time.Hour})
		readable := s.names.clear(l.Space)
		d, _ := s.names.sum(nil, readable, "k")
		name := string(s.names.append(nil, readable, d))
		for _, foreign := range []string{"\x02 a later version, which may be longer or shorter", "\x02", "\x02234567890123456789012"} {
			server.Do("set", name, foreign)
			for range 4 {
				err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1))
				if kindOf(err) != KindFormat {
					t.Errorf("%v: %v, want %q", a, err, KindFormat)
				}
			}
			if got := server.Do("get", name); got != foreign {
				t.Errorf("%v: overwritten by %q", a, got)
			}
		}
		server.Do("del", name)
		server.Do("rpush", name, "someone else's")
		if err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1)); kindOf(err) != KindFormat {
			t.Errorf("%v: %v, want %q", a, err, KindFormat)
		}
		ask1(t, s, algorithms.Charge{Key: "other", Limit: l, Cost: 1})
	}
	if len(seen.list()) != 0 {
		t.Errorf("changes %q", seen.list())
	}
}

// H13: a log that says that it is longer than it is, or holds less than nothing, is not read, and
// keeps Redis no longer busy than another.
func TestH13ForgedLog(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}, RefusedKeys: -1})
	l := compile(t, "z", algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: 1000, Window: time.Hour})
	readable := s.names.clear(l.Space)
	d, _ := s.names.sum(nil, readable, "k")
	name := string(s.names.append(nil, readable, d))
	now := uint64(time.Now().UnixMicro())
	state := func(a, sum uint64, head, n uint32, entries int) string {
		b := []byte{1}
		for _, v := range []uint64{now, a, sum} {
			b = append(b, binary.BigEndian.AppendUint64(nil, v)[1:]...)
		}
		b = binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(b, head), n)
		for i := range entries {
			b = append(b, binary.BigEndian.AppendUint64(nil, now)[1:]...)
			b = append(b, binary.BigEndian.AppendUint64(nil, uint64(i+1))[1:]...)
		}
		return string(b)
	}
	for what, forged := range map[string]string{
		"one entry that is not there":     state(0, 4, 0, 4, 3),
		"as many entries as can be":       state(0, 1<<52, 0, 1<<32-1, 100),
		"a head behind the end":           state(0, 3, 1<<32-1, 3, 3),
		"fewer units than were given off": state(1<<50, 3, 0, 3, 3),
	} {
		server.Do("set", name, forged)
		start := time.Now()
		err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Outcome, 1))
		if kindOf(err) != KindFormat || time.Since(start) > time.Second {
			t.Errorf("%s: %v after %v, want %q", what, err, time.Since(start), KindFormat)
		}
		ask1(t, s, algorithms.Charge{Key: "other", Limit: l, Cost: 1})
	}
	server.Do("set", name, state(0, 200, 0, 200, 200))
	if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); o.Remaining != 799 {
		t.Errorf("a log that is as long as it says: %+v", o)
	}
}

// A reply that the script cannot have made is a failure, and neither holds a request nor sends a
// client away.
func TestImpossibleRepliesAreFailures(t *testing.T) {
	queue := compile(t, "z", algorithms.Policy{Algorithm: algorithms.LeakyBucket, Quota: 1, Window: time.Second, Burst: 6, Queue: 5})
	window, flight := perHour(t, "z", 10), compile(t, "z", algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: 5, Window: time.Minute})
	const second, year, never, unknown = 1e6, 365 * 24 * 3600 * 1e6, -1, -2
	for _, tc := range []struct {
		what                   string
		limit                  *algorithms.Limit
		status                 byte
		remaining, retry, next int64
		possible               bool
	}{
		{"passed", window, 1, 9, 0, second, true},
		{"refused", window, 0, 0, second, second, true},
		{"refused for ever", window, 0, 3, never, second, true},
		{"full", window, 1, 10, 0, never, true},
		{"more than there is", window, 1, 11, 0, second, false},
		{"less than nothing", window, 0, -1, second, second, false},
		{"held without a queue", window, 1, 9, second, second, false},
		{"refused for a year", window, 0, 0, year, second, false},
		{"next in a year", window, 1, 0, 0, year, false},
		{"refused for no time", window, 0, 0, 0, second, false},
		{"a wait below zero", window, 0, 0, -3, second, false},
		{"nobody knows, of a window", window, 0, 0, unknown, second, false},
		{"nobody knows, of leases", flight, 0, 0, unknown, unknown, true},
		{"another status", window, 3, 9, 0, second, false},
		{"queued", queue, 1, 0, 5 * second, second, true},
		{"queued behind a forged queue", queue, 1, 0, 3600 * second, second, false},
		{"queued backwards", queue, 1, 0, -3, second, false},
	} {
		var p part
		p.asks = append(p.asks, newAsk(&algorithms.Charge{Limit: tc.limit, Cost: 1}))
		reply := []byte{tc.status}
		for _, n := range []int64{tc.remaining, tc.retry, tc.next, 0} {
			reply = binary.BigEndian.AppendUint64(reply, uint64(n))
		}
		c := call{parts: []*part{&p}, names: []string{"k"}}
		if err := c.read(string(reply)); err != nil || (p.err == nil) != tc.possible {
			t.Errorf("%s: %v, %v; want it possible: %t", tc.what, err, p.err, tc.possible)
		}
	}
}

func TestClusterWithoutClusterMode(t *testing.T) {
	nodes := redistest.StartCluster(t, 2)
	seen := newChanges()
	s := open(t, Options{Addrs: []string{nodes[0].Addr}, OnState: seen.note})
	a, b := perHour(t, "a", 1), perHour(t, "b", 1)
	for range 3 {
		_ = s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: a, Cost: 1}, {Key: "k", Limit: b, Cost: 1}}, make([]algorithms.Outcome, 2))
	}
	seen.wait(t, KindCrossSlot, 10*time.Second)
}

// A server that reads its data from disk answers LOADING; that is waited out, and named when it
// lasts.
func TestLoadingIsWaitedOut(t *testing.T) {
	server := redistest.Start(t, "--enable-debug-command", "local", "--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024", "--rdbcompression", "no")
	l := perHour(t, "z", 10)
	s := open(t, Options{Addrs: []string{server.Addr}, Timeout: time.Minute})
	ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1})
	server.Do("debug", "populate", 3000, "x", 200)
	server.Do("save")
	server.Kill()
	server.Launch()
	seen := newChanges()
	short := open(t, Options{Addrs: []string{server.Addr}, Timeout: 200 * time.Millisecond, OnState: seen.note, Prefix: s.options.Prefix})
	loading := false
	waitFor(t, "a LOADING answer", func() bool {
		err := short.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: l, Cost: 0}}, make([]algorithms.Outcome, 1))
		loading = kindOf(err) == KindLoading
		return loading || err == nil
	})
	if !loading {
		t.Error("the server was never seen loading")
	}
	if o := ask1(t, s, algorithms.Charge{Key: "k", Limit: l, Cost: 1}); o.Remaining != 8 {
		t.Errorf("%+v", o)
	}
}

type reply string

func (r reply) Error() string { return string(r) }
func (r reply) RedisError()   {}

func TestKinds(t *testing.T) {
	for text, want := range map[string]Kind{
		"NOAUTH Authentication required.": KindNoAuth, "WRONGPASS invalid username-password pair or user is disabled.": KindWrongPass,
		"READONLY You can't write against a read only replica.": KindReadOnly, "OOM command not allowed when used memory > 'maxmemory'.": KindOOM,
		"ERR Error running script (call to f_1): @user_script:4: -OOM command not allowed when used memory > 'maxmemory'.": KindOOM,
		"LOADING Redis is loading the dataset in memory":                                                                   KindLoading, "BUSY Redis is busy running a script.": KindBusy,
		"CROSSSLOT Keys in request don't hash to the same slot": KindCrossSlot, "CLUSTERDOWN Hash slot not served": KindClusterDown,
		"NOREPLICAS Not enough good replicas to write.": KindNoReplicas, "MISCONF Redis is configured to save RDB snapshots": KindMisconf,
		"MASTERDOWN Link with MASTER is down": KindReadOnly, "ERR max number of clients reached": KindMaxClients,
		"ERR invalid password": KindWrongPass, "ERR DB index is out of range": KindDB, "ERR unknown command": KindOther,
	} {
		if got := classify(reply(text)); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
