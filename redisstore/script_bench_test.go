package redisstore

// What one script call costs Redis, by its own count of processor time.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

func BenchmarkScript(b *testing.B) {
	server := redistest.Start(b)
	client := server.Client()
	defer client.Close()
	ctx := context.Background()
	run := func(name string, charges int, args []any) {
		b.Run(name, func(b *testing.B) {
			if err := client.Do(ctx, args...).Err(); err != nil {
				b.Fatal(err)
			}
			before := server.CPU()
			for range b.N {
				pipe := client.Pipeline()
				for range 16 {
					pipe.Do(ctx, args...)
				}
				if _, err := pipe.Exec(ctx); err != nil {
					b.Fatal(err)
				}
			}
			cost := float64((server.CPU() - before).Nanoseconds()) / float64(b.N*16*charges)
			b.ReportMetric(cost/1000, "redis-µs/charge")
		})
	}
	sha := client.ScriptLoad(ctx, minimal).Val()
	run("minimal", 1, []any{"evalsha", sha, 1, "min", 10, 100_000_000})
	sc := newScript(redisTime + body)
	if err := client.ScriptLoad(ctx, sc.text).Err(); err != nil {
		b.Fatal(err)
	}
	for _, a := range []algorithms.Algorithm{algorithms.TokenBucket, algorithms.SlidingWindow, algorithms.SlidingLog} {
		for _, shape := range [][2]int{{1, 1}, {1, 4}, {64, 1}, {64, 4}} {
			for _, quota := range []int64{1_000_000_000, 1} {
				if a == algorithms.SlidingLog && quota > 1 {
					continue
				}
				var c call
				for i := range shape[0] {
					p := &part{}
					for z := range shape[1] {
						policy := algorithms.Policy{Algorithm: a, Quota: quota, Window: time.Hour}
						if a.Bucket() {
							policy.Burst = quota
						}
						charge := algorithms.Charge{Limit: compile(b, strconv.Itoa(z), policy), Cost: 1}
						if i > 0 {
							charge.Limit = c.parts[0].asks[z].limit
						}
						p.names = append(p.names, fmt.Sprintf("prefix:%v:%d:zone%d:%d:aaaaaaaaaaaaaaaaaaaaaa", a, quota, z, i)...)
						ask := newAsk(&charge)
						ask.nameEnd = len(p.names)
						p.asks = append(p.asks, ask)
					}
					c.parts = append(c.parts, p)
				}
				name := fmt.Sprintf("%v/%dx%d/%s", a, shape[0], shape[1], map[bool]string{true: "refuse", false: "pass"}[quota == 1])
				run(name, shape[0]*shape[1], c.build(sc, false, ""))
			}
		}
	}
}

// What a key with many requests in flight costs: its oldest lease is renewed, or any of them, or 32
// in one call.
func BenchmarkLeases(b *testing.B) {
	server := redistest.Start(b)
	now := time.Now().UnixMicro()
	s := open(b, Options{Addrs: []string{server.Addr}, Timeout: time.Minute, clock: func() int64 { return now }})
	l := compile(b, "z", algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: 1 << 20, Window: time.Hour})
	for _, inFlight := range []int{10, 100, 1000, 3000, 20_000} {
		key := strconv.Itoa(inFlight)
		marks := make([]int64, inFlight)
		for i := range marks {
			now++
			marks[i] = ask1(b, s, algorithms.Charge{Key: key, Limit: l, Cost: 1}).Mark
		}
		renew := func(b *testing.B, at ...int) {
			now++
			var charges []algorithms.Charge
			for _, i := range at {
				charges = append(charges, algorithms.Charge{Key: key, Limit: l, Cost: -1, Mark: marks[i]},
					algorithms.Charge{Key: key, Limit: l, Cost: 1, Force: true})
			}
			out := make([]algorithms.Outcome, len(charges))
			if err := errors.Join(s.applyEach(context.Background(), time.Now().Add(s.options.Timeout), charges, out)...); err != nil {
				b.Fatal(err)
			}
			for j, i := range at {
				marks[i] = out[2*j+1].Mark
			}
		}
		oldest := 0
		next := func() int {
			oldest++
			return oldest % inFlight
		}
		for _, name := range []string{"oldest", "any", "32"} {
			step := func(b *testing.B) {
				switch name {
				case "oldest":
					renew(b, next())
				case "any":
					renew(b, rand.IntN(inFlight))
				default:
					var at []int
					for range min(32, inFlight) {
						at = append(at, next())
					}
					renew(b, at...)
				}
			}
			b.Run(key+"/"+name, func(b *testing.B) {
				before := server.CPU()
				for range b.N {
					step(b)
				}
				b.ReportMetric(float64((server.CPU()-before).Nanoseconds())/float64(b.N)/1000, "redis-µs/op")
				size := int64(0)
				for k := range ttls(b, s) {
					size = max(size, server.Do("strlen", k).(int64))
				}
				b.ReportMetric(float64(size), "bytes")
			})
		}
	}
}
