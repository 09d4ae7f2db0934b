package counting_test

import (
	"sync"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/redisstore"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// Instances that ban a client at the same moment are one ban and one step: a first ban is as long
// as it is written.
func TestConcurrentBansAreOneStep(t *testing.T) {
	r := redistest.Start(t)
	ladder, err := algorithms.Compile("z (ladder)", algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: 3, Window: 2 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	b := &counting.Ban{Durations: []time.Duration{time.Minute, 10 * time.Minute, time.Hour}, Bans: algorithms.Ban("z (bans)"), Ladder: ladder}
	var stores []*redisstore.Store
	for range 4 {
		s, err := redisstore.New(redisstore.Options{Addrs: []string{r.Addr}, Timeout: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		stores = append(stores, s)
	}
	for round := range 50 {
		key := string(rune('A' + round))
		var steps [4]int
		var wg sync.WaitGroup
		for i, s := range stores {
			wg.Go(func() {
				var rest time.Duration
				ban, err := counting.Banish(s, b, key)
				if steps[i], rest = ban.Step, ban.Rest; err != nil || rest <= 0 || rest > time.Minute {
					t.Errorf("round %d: banned for %v, %v; want a minute at most", round, rest, err)
				}
			})
		}
		wg.Wait()
		if sum := steps[0] + steps[1] + steps[2] + steps[3]; sum != -3 { // one first step, and three that came too late
			t.Errorf("round %d: steps %v", round, steps)
		}
	}
}
