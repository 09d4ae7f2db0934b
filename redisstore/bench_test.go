package redisstore

// Rough figures for this package's own decisions; bench/ compares with other limiters.

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// minimal is the least that a GCRA limiter in Redis can do: what others send once per decision.
const minimal = `local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local tat = tonumber(redis.call('GET', KEYS[1]) or now)
if tat < now then tat = now end
local new = tat + ARGV[1]
if new - now > ARGV[2] * 1 then return {0, 0, tat - now, 0} end
redis.call('SET', KEYS[1], new, 'PX', 60000)
return {1, ARGV[2] - (new - now), 0, new - now}`

func BenchmarkCallers(b *testing.B) {
	server := redistest.Start(b)
	for _, callers := range []int{1, 8, 64, 256} {
		b.Run(fmt.Sprintf("evalsha_per_call/%d", callers), func(b *testing.B) {
			c := redis.NewClient(&redis.Options{Addr: server.Addr})
			defer c.Close()
			sc := redis.NewScript(minimal)
			run(b, server, callers, func(key string) error { return sc.Run(context.Background(), c, []string{key}, 10, 100_000_000).Err() })
		})
		for _, zones := range []int{1, 4} {
			b.Run(fmt.Sprintf("store_%d_zones/%d", zones, callers), func(b *testing.B) {
				s := open(b, Options{Addrs: []string{server.Addr}})
				var limits []*algorithms.Limit
				for z := range zones {
					limits = append(limits, compile(b, strconv.Itoa(z), algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: 100_000, Window: time.Second, Burst: 100_000_000}))
				}
				run(b, server, callers, func(key string) error {
					charges, out := make([]algorithms.Charge, zones), make([]algorithms.Outcome, zones)
					for i := range charges {
						charges[i] = algorithms.Charge{Key: key, Limit: limits[i], Cost: 1}
					}
					return s.Apply(context.Background(), charges, out)
				})
			})
		}
	}
}

func run(b *testing.B, server *redistest.Server, callers int, decide func(key string) error) {
	took := make([]time.Duration, b.N)
	before := server.CPU()
	b.ResetTimer()
	var wg sync.WaitGroup
	for g := range callers {
		wg.Go(func() {
			for i := g; i < b.N; i += callers {
				start := time.Now()
				if err := decide("client" + strconv.Itoa(i%5000)); err != nil {
					b.Error(err)
					return
				}
				took[i] = time.Since(start)
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	slices.Sort(took)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "decisions/s")
	b.ReportMetric(float64(took[b.N/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(took[b.N*99/100].Microseconds()), "p99-µs")
	b.ReportMetric(float64((server.CPU()-before).Microseconds())/float64(b.N), "redis-µs/op")
}
