package memstore

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"runtime/metrics"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/algorithms/storetest"
)

// F46: a million keys. All constant-size algorithms share one representation.
func TestF46BytesPerKey(t *testing.T) {
	const n = 1_000_000
	s := New(WithClock(storetest.NewClock().Now))
	z := s.Open("z")
	charges := []algorithms.Charge{{Limit: limit(t, "z", algorithms.SlidingWindow, 100, time.Minute), Cost: 1}}
	out := make([]algorithms.Outcome, 1)
	key := make([]byte, 0, 32)
	bytes, objects, scanned := heap(), heapObjects(), scannable()
	for i := range n {
		key = fmt.Appendf(key[:0], "2001:db8::%x", i)
		charges[0].Key = string(key)
		s.Apply(context.Background(), charges, out)
	}
	perKey := float64(heap()-bytes) / n
	objects, scanned = heapObjects()-objects, scannable()-scanned
	t.Logf("%.1f bytes a key; for all keys %d objects, %d bytes for the garbage collector to scan", perKey, objects, scanned)
	if z.Keys() != n || perKey > 48 || objects > n/50 || scanned > n {
		t.Errorf("%d keys of %.1f bytes in %d objects, %d bytes to scan", z.Keys(), perKey, objects, scanned)
	}
	runtime.KeepAlive(s)
}

// scannable is how much of the heap may hold pointers.
func scannable() int64 {
	runtime.GC()
	sample := []metrics.Sample{{Name: "/gc/scan/heap:bytes"}}
	metrics.Read(sample)
	return int64(sample[0].Value.Uint64())
}

// The garbage collector looks into what has a pointer, so a million keys cost it nothing only if
// slots have none.
func TestSlotsHoldNoPointer(t *testing.T) {
	for _, v := range []any{chunk{}, shard{}.index} {
		if typ := reflect.TypeOf(v).Elem(); pointers(typ) {
			t.Errorf("%v holds a pointer", typ)
		}
	}
	if size := reflect.TypeFor[shard]().Size(); size%64 != 0 {
		t.Errorf("a shard of %d bytes shares a cache line", size)
	}
}

func pointers(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Struct:
		for f := range t.Fields() {
			if pointers(f.Type) {
				return true
			}
		}
		return false
	case reflect.Array:
		return pointers(t.Elem())
	default:
		return t.Kind() > reflect.Complex128
	}
}

func TestF46NothingForTheQuotaUpFront(t *testing.T) {
	s := New()
	before := heap()
	for _, a := range everyAlgorithm {
		ask(t, s, limit(t, "z", a, 1_000_000, time.Hour), "k", 1)
	}
	if grown := heap() - before; grown > 100_000 {
		t.Errorf("%d bytes for five keys of 1,000,000 an hour", grown)
	}
	runtime.KeepAlive(s)
}

// F47: the flood that an attacker with many addresses sends, up to a table of as many shards as
// there can be.
func TestF47LimitedKeySurvivesAFlood(t *testing.T) {
	for _, bound := range []int{1, 100, 3000, maxShards * keysPerShard} {
		for _, a := range everyAlgorithm {
			clock := storetest.NewClock()
			s := New(WithClock(clock.Now))
			z := s.Open("z")
			l := limit(t, "z", a, 10, time.Minute)
			l.MaxKeys = bound
			limited := min(max(1, bound/10), 300)
			if bound == 1 {
				limited = 0 // the newcomer is the one that is kept
			}
			for i := range limited {
				ask(t, s, l, fmt.Sprint("limited ", i), 10)
			}
			flood := min(10*bound, 2*maxShards*keysPerShard)
			for i := range flood {
				ask(t, s, l, fmt.Sprint("flood ", i), 1)
			}
			for i := range limited {
				if ask(t, s, l, fmt.Sprint("limited ", i), 1).OK {
					t.Fatalf("%v, max_keys %d: limited key %d was forgotten", a, bound, i)
				}
			}
			if over := z.Keys() - bound; over > len(s.spaces[l.Space].shards)-1 || over < 0 {
				t.Errorf("%v: %d keys, want %d", a, z.Keys(), bound)
			}
			if got, want := z.Evictions(), int64(limited+flood-z.Keys()); got != want {
				t.Errorf("%v: %d evictions, want %d", a, got, want)
			}
		}
	}
}

func TestF47IdleKeysGoFirst(t *testing.T) {
	clock := storetest.NewClock()
	s := New(WithClock(clock.Now))
	z := s.Open("z")
	l := limit(t, "z", algorithms.FixedWindow, 100, time.Minute)
	l.MaxKeys = 1000
	for i := range 1000 {
		ask(t, s, l, fmt.Sprint("idle ", i), 100)
	}
	clock.Advance(2 * time.Minute)
	for i := range 1000 {
		ask(t, s, l, fmt.Sprint("new ", i), 1)
	}
	for i := range 1000 {
		if got := ask(t, s, l, fmt.Sprint("new ", i), 0).Remaining; got != 99 {
			t.Fatalf("a new key has %d remaining: it went before idle ones", got)
		}
	}
	if z.Evictions() != 0 || z.Keys() != 1000 {
		t.Errorf("%d evictions, %d keys", z.Evictions(), z.Keys())
	}
}

// Idle keys go first wherever they are, and going is no eviction.
func TestF47FewIdleKeysGoFirst(t *testing.T) {
	for name, idle := range map[string]func(i int) bool{
		"one in ten":      func(i int) bool { return i%10 == 0 },
		"far from a hand": func(i int) bool { return i >= 500 },
	} {
		clock := storetest.NewClock()
		s := New(WithClock(clock.Now))
		z := s.Open("z")
		l := limit(t, "z", algorithms.SlidingLog, 100, time.Minute)
		l.MaxKeys = 1000
		for i := range 1000 {
			ask(t, s, l, fmt.Sprint(i), 1)
		}
		s.spaces[l.Space].shards[0].hand = 0
		clock.Advance(59 * time.Second)
		for i := range 1000 {
			if !idle(i) {
				ask(t, s, l, fmt.Sprint(i), 1)
			}
		}
		clock.Advance(2 * time.Second)
		for i := range 25 {
			ask(t, s, l, fmt.Sprint("new ", i), 1)
		}
		if z.Evictions() > 2 || z.Keys() > 1000 {
			t.Errorf("%s: %d evictions, %d keys", name, z.Evictions(), z.Keys())
		}
	}
}

func TestLoweredBoundIsReached(t *testing.T) {
	s := New()
	z := s.Open("z")
	wide, narrow := limit(t, "z", algorithms.FixedWindow, 100, time.Hour), limit(t, "z", algorithms.FixedWindow, 100, time.Hour)
	wide.MaxKeys, narrow.MaxKeys = 20_000, 500
	for i := range 20_000 {
		ask(t, s, wide, fmt.Sprint(i), 1)
	}
	for i := range 30_000 {
		ask(t, s, narrow, fmt.Sprint("new ", i), 1)
	}
	if z.Keys() > 500+2*maxShards {
		t.Errorf("%d keys, want 500", z.Keys())
	}
}

// A batch whose new keys push out the counters that it has just read.
func TestBatchLargerThanTheBound(t *testing.T) {
	s := New()
	z := s.Open("z")
	l := limit(t, "z", algorithms.SlidingLog, 10, time.Hour)
	l.MaxKeys = 2
	for round := range 200 {
		var charges []algorithms.Charge
		for i := range 6 {
			charges = append(charges, algorithms.Charge{Key: fmt.Sprint((round + i*i) % 9), Limit: l, Cost: 1})
		}
		apply(t, s, charges...)
		if z.Keys() > 2 {
			t.Fatalf("%d keys, want 2", z.Keys())
		}
		check(t, &s.spaces[l.Space].shards[0])
	}
}

// The shard against a map, with ids that meet in the index, in the tag and in all of the id.
func TestShardAgainstMap(t *testing.T) {
	for _, log := range []bool{false, true} {
		r := rand.New(rand.NewPCG(1, 2))
		s := &shard{log: log}
		want := map[digest]algorithms.State{}
		for i := range 20_000 {
			k := digest{id: 1 + r.Uint64N(40)*3 | r.Uint64N(4)<<20 | r.Uint64N(3)<<56, more: r.Uint64N(5) << (r.Uint64N(2) * 9)}
			state := algorithms.State{T: r.Int64(), A: r.Int64N(1<<52 + 1), B: r.Int64N(1<<52 + 1)}
			if log {
				state.B, state.Log = 0, []algorithms.Entry{{At: r.Int64(), Sum: r.Int64()}}
			}
			n, found := s.find(k)
			if _, ok := want[k]; ok != found {
				t.Fatalf("step %d: found %v, want %v", i, found, ok)
			}
			grow := i/1000%2 == 0
			switch {
			case found && (r.IntN(3) == 0 || !grow && r.IntN(10) > 0):
				s.remove(n)
				delete(want, k)
			case found:
				s.store(n, &state)
				want[k] = state
			case grow:
				s.add(k, &state)
				want[k] = state
			}
			if i%10_000 == 0 {
				s.compact()
				check(t, s)
			}
			var got algorithms.State
			if n, found = s.find(k); found {
				s.load(n, &got)
			}
			if !reflect.DeepEqual(got, want[k]) {
				t.Fatalf("step %d: %+v, want %+v", i, got, want[k])
			}
		}
		if int(s.live) != len(want) {
			t.Errorf("%d live, want %d", s.live, len(want))
		}
	}
}

// check holds a shard to what its parts say of each other.
func check(t *testing.T, s *shard) {
	t.Helper()
	used, free, entries := 0, 0, 0
	for n := range s.top {
		if p := s.slot(n); p.id != 0 {
			used++
			if got, ok := s.find(digest{p.id, p.a&checkMask | p.b&checkMask<<checkBits}); !ok || got != n {
				t.Fatalf("slot %d is found as %d, %v", n, got, ok)
			}
		}
	}
	for f := s.free; f != 0; f = uint32(s.slot(f - 1).a) {
		free++
	}
	for _, e := range s.index {
		if e != 0 {
			entries++
		}
	}
	if used != int(s.live) || used+free != int(s.top) || entries != used || used*10 > len(s.index)*7 {
		t.Fatalf("%d used, %d live, %d free, top %d, %d of %d index entries", used, s.live, free, s.top, entries, len(s.index))
	}
}

// A log follows the use, not the quota, in both directions.
func TestLogFollowsTheUse(t *testing.T) {
	clock := storetest.NewClock()
	s := New(WithClock(clock.Now))
	l := limit(t, "z", algorithms.SlidingLog, 1_000_000, time.Hour)
	array := func() int { return len(s.spaces[l.Space].shard(s.digest("k")).history(0).array) }
	for i := range 10_000 {
		clock.Advance(time.Microsecond)
		ask(t, s, l, "k", 1)
		if array() > max(4, 4*(i+1)) {
			t.Fatalf("an array of %d entries for %d", array(), i+1)
		}
	}
	clock.Advance(59 * time.Minute)
	for range 20 {
		ask(t, s, l, "k", 1)
		clock.Advance(time.Second)
	}
	clock.Advance(time.Minute)
	ask(t, s, l, "k", 1)
	if array() > 4*21 {
		t.Errorf("an array of %d entries for 21", array())
	}
	if got := ask(t, s, l, "k", 0).Remaining; got != 1_000_000-21 {
		t.Errorf("%d remaining", got)
	}
	s.Open("z").Forget("k")
	if array() != 0 {
		t.Errorf("an array of %d entries for a key that was forgotten", array())
	}
}
