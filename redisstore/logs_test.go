package redisstore

// What logs cost Redis when their units are given back: space and reads.

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// inFlight takes units of a key one after the other, and gives them back.
type inFlight struct {
	*testing.T
	store *Store
	limit *algorithms.Limit
	clock int64
	marks []int64
}

func newInFlight(t *testing.T, server *redistest.Server, a algorithms.Algorithm) *inFlight {
	f := &inFlight{T: t, clock: time.Now().UnixMicro()}
	f.store = open(t, Options{Addrs: []string{server.Addr}, RefusedKeys: -1, clock: func() int64 { return f.clock }})
	f.limit = compile(t, "z", algorithms.Policy{Algorithm: a, Quota: 20_000, Window: 24 * time.Hour})
	return f
}

func (f *inFlight) take(n int) {
	for range n {
		f.clock++
		f.marks = append(f.marks, ask1(f, f.store, algorithms.Charge{Key: "k", Limit: f.limit, Cost: 1}).Mark)
	}
}

func (f *inFlight) giveBack(i int) {
	f.clock++
	o := ask1(f, f.store, algorithms.Charge{Key: "k", Limit: f.limit, Cost: -1, Mark: f.marks[i]})
	if f.marks = append(f.marks[:i], f.marks[i+1:]...); o.Remaining != f.limit.Quota-int64(len(f.marks)) {
		f.Fatalf("given back: %+v with %d in flight", o, len(f.marks))
	}
}

// size is that of the key, 0 if there is none.
func (f *inFlight) size() (size int64) {
	for key := range ttls(f, f.store) {
		size += f.store.lanes[0].client.StrLen(context.Background(), key).Val()
	}
	return size
}

// A log is as large as what is in flight, not as what ever was: in order, in none, and with one
// that never ends.
func TestLogSizeFollowsWhatIsInFlight(t *testing.T) {
	server := redistest.Start(t)
	for _, a := range []algorithms.Algorithm{algorithms.Concurrency, algorithms.SlidingLog} {
		for order, pick := range map[string]func(n int) int{
			"oldest": func(int) int { return 0 }, "newest": func(n int) int { return n - 1 }, "any": rand.IntN,
			"but_the_oldest": func(n int) int { return 1 },
		} {
			for _, n := range []int{2, 200} {
				t.Run(fmt.Sprintf("%v/%s/%d", a, order, n), func(t *testing.T) {
					f := newInFlight(t, server, a)
					f.take(n)
					for i := range 1000 {
						f.take(1)
						f.giveBack(pick(len(f.marks)))
						// Twice as many entries as units and a few, and as many dead ones before
						// them.
						if most := int64(30 + 14*2*(2*n+64)); i%100 == 99 && f.size() > most {
							t.Fatalf("%d bytes after %d requests, want at most %d", f.size(), i, most)
						}
					}
					for len(f.marks) > 0 {
						f.giveBack(pick(len(f.marks)) % len(f.marks))
					}
					if size := f.size(); size > 0 {
						t.Errorf("%d bytes, and nothing is in flight", size)
					}
				})
			}
		}
	}
}

// After many were in flight the log becomes short again, also when the youngest end first.
func TestLogShortensWithWhatIsInFlight(t *testing.T) {
	server := redistest.Start(t)
	for _, a := range []algorithms.Algorithm{algorithms.Concurrency, algorithms.SlidingLog} {
		for order, pick := range map[string]func(n int) int{
			"oldest": func(int) int { return 0 }, "newest": func(n int) int { return n - 1 }, "any": rand.IntN,
		} {
			f := newInFlight(t, server, a)
			f.take(1500)
			for len(f.marks) > 100 {
				f.giveBack(pick(len(f.marks)))
			}
			if size, most := f.size(), int64(30+14*2*(2*100+64)); size > most {
				t.Errorf("%v, %s first: %d bytes for 100 in flight, want at most %d", a, order, size, most)
			}
		}
	}
}

// A lease is found among 20,000 by a search; what is given back to a sliding log changes all
// younger entries, read 500 at once.
func TestGivingBackReadsLittle(t *testing.T) {
	server := redistest.Start(t)
	for a, most := range map[algorithms.Algorithm]int{algorithms.Concurrency: 70, algorithms.SlidingLog: 70 + 20_000/500} {
		f := newInFlight(t, server, a)
		f.take(20_000)
		for range 10 {
			reads := server.Calls("getrange")
			f.giveBack(rand.IntN(len(f.marks) / 10))
			if reads = server.Calls("getrange") - reads; reads > most {
				t.Errorf("%v: %d reads, want at most %d", a, reads, most)
			}
		}
	}
}
