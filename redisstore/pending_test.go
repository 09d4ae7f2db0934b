package redisstore

import (
	"context"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// Who counts units in flight beside a limit is told how many there are, also of a key that is known
// to be refused; only of one that is banned nobody wants to know.
func TestUnitsInFlightAreToldOfTheRefused(t *testing.T) {
	s := open(t, Options{Addrs: []string{redistest.Start(t).Addr}})
	flight := compile(t, "f", algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: 10, Window: time.Hour})
	limit, bans := perHour(t, "z", 1), algorithms.Ban("b")
	batch := func() (calls int64, out [3]algorithms.Outcome) {
		before := s.Stats().Calls
		err := s.Apply(context.Background(), []algorithms.Charge{
			{Key: "k", Limit: flight, Cost: 1, DryRun: true}, algorithms.Ask(bans, "k"), {Key: "k", Limit: limit, Cost: 1},
		}, out[:])
		if err != nil {
			t.Fatal(err)
		}
		return s.Stats().Calls - before, out
	}
	batch()
	for range 3 {
		if calls, out := batch(); calls != 1 || out[0].Remaining != 9 || out[2].OK {
			t.Errorf("%d calls, %+v", calls, out)
		}
	}
	ask1(t, s, algorithms.Banish(bans, "k", time.Hour))
	batch()
	for range 3 {
		if calls, out := batch(); calls != 0 || out[0].Asked() || out[1].OK {
			t.Errorf("%d calls of a banned key, %+v", calls, out)
		}
	}
}
