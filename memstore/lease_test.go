package memstore

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/algorithms/storetest"
)

func giveBack(l *algorithms.Limit, key string, mark int64) algorithms.Charge {
	return algorithms.Charge{Key: key, Limit: l, Cost: -1, Mark: mark}
}

// F47: a flood of short bans pushes out the shortest, not those that have long to go; bans that are
// over go before any.
func TestF47LongBansGoLast(t *testing.T) {
	clock := storetest.NewClock()
	s := New(WithClock(clock.Now))
	z := s.Open("z")
	ban := algorithms.Ban("z")
	ban.MaxKeys = 200
	banish := func(name string, i int, d time.Duration) {
		apply(t, s, algorithms.Banish(ban, fmt.Sprint(name, i), d))
	}
	for i := range 100 {
		banish("over ", i, time.Millisecond)
	}
	for i := range 20 {
		banish("long ", i, time.Hour)
	}
	clock.Advance(time.Second)
	for i := range 180 {
		banish("short ", i, time.Second)
	}
	if z.Keys() > 200 || z.Evictions() != 0 {
		t.Errorf("%d keys, %d evictions; bans that are over are none", z.Keys(), z.Evictions())
	}
	for i := range 5000 {
		banish("flood ", i, time.Second)
	}
	for i := range 20 {
		if o := apply(t, s, algorithms.Ask(ban, fmt.Sprint("long ", i)))[0]; o.Retry != time.Hour-time.Second {
			t.Fatalf("long ban %d was forgotten: %+v", i, o)
		}
	}
	if z.Keys() != 200 || z.Evictions() != 5000 {
		t.Errorf("%d keys, %d evictions, want 200 and 5000", z.Keys(), z.Evictions())
	}
}

// F47, F51: keys with requests in flight go after those without; a lease whose key was pushed out
// gives nothing back.
func TestF47KeysInFlightGoLast(t *testing.T) {
	s := New(WithClock(storetest.NewClock().Now))
	z := s.Open("z")
	l := limit(t, "z", algorithms.Concurrency, 10, time.Hour)
	l.MaxKeys = 100
	for i := range 10 {
		ask(t, s, l, fmt.Sprint("busy ", i), 5)
	}
	var ended []string
	for i := range 85 {
		key := fmt.Sprint("ended ", i)
		apply(t, s, giveBack(l, key, ask(t, s, l, key, 1).Mark))
		ended = append(ended, key)
	}
	marks := map[string]int64{}
	for i := range 80 {
		key := fmt.Sprint("new ", i)
		marks[key] = ask(t, s, l, key, 1).Mark
	}
	if z.Evictions() > 5 {
		t.Errorf("%d evictions while keys without a lease were held", z.Evictions())
	}
	for i := range 1000 {
		ask(t, s, l, fmt.Sprint("flood ", i), 1)
	}
	for i := range 10 {
		if left := ask(t, s, l, fmt.Sprint("busy ", i), 0).Remaining; left != 5 {
			t.Fatalf("busy key %d has %d remaining, want 5", i, left)
		}
	}
	keys := z.Keys()
	for key, mark := range marks {
		if o := apply(t, s, giveBack(l, key, mark))[0]; o.Remaining != 10 {
			t.Errorf("%s: %+v", key, o)
		}
	}
	for _, key := range ended {
		apply(t, s, giveBack(l, key, 1))
	}
	if z.Keys() != keys || keys > 100 {
		t.Errorf("giving back made %d keys of %d", z.Keys(), keys)
	}
}

// F51: what was given back is no key any more once someone looks; what is in flight or renewed
// stays.
func TestSweepKeepsLeases(t *testing.T) {
	clock := storetest.NewClock()
	s := New(WithClock(clock.Now))
	z := s.Open("z")
	l := limit(t, "z", algorithms.Concurrency, 3, time.Minute)
	renewed := ask(t, s, l, "renewed", 2).Mark
	for i := range 500 {
		key := fmt.Sprint("ended ", i)
		apply(t, s, giveBack(l, key, ask(t, s, l, key, 1).Mark))
	}
	ask(t, s, l, "silent", 3)
	z.Sweep()
	if z.Keys() != 2 {
		t.Errorf("%d keys, want the two in flight", z.Keys())
	}
	for range 4 {
		clock.Advance(50 * time.Second)
		out := apply(t, s, giveBack(l, "renewed", renewed), algorithms.Charge{Key: "renewed", Limit: l, Cost: 1, Force: true})
		renewed = out[1].Mark
		z.Sweep()
	}
	if z.Keys() != 1 || ask(t, s, l, "renewed", 0).Remaining != 2 || ask(t, s, l, "silent", 0).Remaining != 3 {
		t.Errorf("%d keys, want the one that is renewed", z.Keys())
	}
	apply(t, s, giveBack(l, "renewed", renewed))
	z.Sweep()
	if z.Keys() != 0 {
		t.Errorf("%d keys, want none", z.Keys())
	}
}

// Requests that come and go on a busy key cost no memory, in whatever order they go, and a burst
// that is over leaves none.
func TestLeasesReuseTheirLog(t *testing.T) {
	clock := storetest.NewClock()
	s := New(WithClock(clock.Now))
	l := limit(t, "z", algorithms.Concurrency, 100_000, time.Hour)
	array := func() int { return len(s.spaces[l.Space].shard(s.digest("k")).history(0).array) }
	var marks []int64
	take := func() {
		clock.Advance(time.Microsecond)
		marks = append(marks, ask(t, s, l, "k", 1).Mark)
	}
	end := func(i int) {
		apply(t, s, giveBack(l, "k", marks[i]))
		marks[i] = marks[len(marks)-1]
		marks = marks[:len(marks)-1]
	}
	for range 20_000 {
		take()
	}
	for len(marks) > 10 {
		end((len(marks) * 7) % len(marks))
	}
	if n := array(); n > 40 {
		t.Errorf("an array of %d entries for 10 in flight", n)
	}
	charges, back, out := []algorithms.Charge{{Key: "k", Limit: l, Cost: 1}}, make([]algorithms.Charge, 1), make([]algorithms.Outcome, 1)
	turn := 0
	if got := testing.AllocsPerRun(1000, func() {
		clock.Advance(time.Microsecond)
		s.Apply(context.Background(), charges, out)
		back[0] = giveBack(l, "k", marks[turn%len(marks)])
		marks[turn%len(marks)] = out[0].Mark
		turn += 3
		s.Apply(context.Background(), back, out)
	}); got != 0 {
		t.Errorf("%v allocations for a request that comes and one that goes", got)
	}
	for len(marks) > 0 {
		end(0)
	}
	if n := array(); n != 0 || ask(t, s, l, "k", 0).Remaining != 100_000 {
		t.Errorf("an array of %d entries for none in flight", n)
	}
}
