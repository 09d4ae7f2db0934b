package algorithms

import (
	"testing"
	"time"
)

// BenchmarkDecide measures the decision alone, without a store: a passing charge and a refused one.
func BenchmarkDecide(b *testing.B) {
	for a := FixedWindow; a <= Concurrency; a++ {
		p := Policy{Algorithm: a, Quota: 100, Window: time.Minute}
		if a.Bucket() {
			p.Burst = 100
		}
		l, err := Compile("z", p)
		if err != nil {
			b.Fatal(err)
		}
		for _, c := range []struct {
			name string
			step int64 // µs between requests
		}{{"pass", 1_000_000}, {"refuse", 0}} {
			b.Run(a.String()+"/"+c.name, func(b *testing.B) {
				var state State
				charges, out := []Charge{{Key: "k", Limit: l, Cost: 1}}, make([]Outcome, 1)
				counter := new(Counter)
				counters := []*Counter{counter}
				now := int64(1_767_225_600_000_000)
				b.ReportAllocs()
				for b.Loop() {
					*counter = Counter{State: state}
					if Decide(now, charges, counters, out) {
						state = counter.State
					}
					now += c.step
				}
			})
		}
	}
}
