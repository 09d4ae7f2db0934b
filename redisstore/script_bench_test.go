package redisstore

// What one script call costs Redis, by its own count of processor time.

import (
	"context"
	"fmt"
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
