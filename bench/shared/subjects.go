package main

// Who is compared.

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/go-redis/redis_rate/v10"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore"
)

// subject decides about one request of a key.
type subject struct {
	name   string
	decide func(key int) error
}

// baseline is what the others are compared with: the Go limiter for Redis that most use.
const baseline = "redis_rate"

var errRefused = errors.New("refused, and the limit is far away")

func newSubjects(addr string) []subject {
	ctx := context.Background()
	names := make([]string, keys)
	for i := range names {
		names[i] = "client-" + strconv.Itoa(i)
	}
	client := redis.NewClient(&redis.Options{Addr: addr})
	rate := redis_rate.NewLimiter(client)
	pipelined, err := rueidis.NewClient(rueidis.ClientOption{InitAddress: []string{addr}, DisableCache: true})
	check(err)
	script, lua := redis.NewScript(gcra), rueidis.NewLuaScript(gcra)
	return []subject{
		{"sluice, 1 zone", zones(addr, names, 1)},
		{"sluice, 4 zones", zones(addr, names, 4)},
		{baseline, func(key int) error {
			r, err := rate.Allow(ctx, names[key], redis_rate.Limit{Rate: 1e6, Burst: 1e6, Period: time.Second})
			if err == nil && r.Allowed == 0 {
				err = errRefused
			}
			return err
		}},
		{"go-redis, one EVALSHA each", func(key int) error {
			return script.Run(ctx, client, []string{names[key]}, 1, 1_000_000).Err()
		}},
		{"rueidis, its defaults", func(key int) error {
			return lua.Exec(ctx, pipelined, []string{names[key]}, []string{"1", "1000000"}).Error()
		}},
	}
}

// zones is this module's store with that many zones on each request.
func zones(addr string, names []string, n int) func(int) error {
	store, err := redisstore.New(redisstore.Options{Addrs: []string{addr}, Prefix: fmt.Sprintf("z%d", n), Timeout: 5 * time.Second})
	check(err)
	limits := make([]*algorithms.Limit, n)
	for i := range limits {
		limits[i], err = algorithms.Compile(fmt.Sprintf("zone%d", i), algorithms.Policy{
			Algorithm: algorithms.TokenBucket, Quota: 1_000_000, Window: time.Second, Burst: 1_000_000})
		check(err)
	}
	return func(key int) error {
		charges, out := make([]algorithms.Charge, n), make([]algorithms.Outcome, n)
		for i, l := range limits {
			charges[i] = algorithms.Charge{Key: names[key], Limit: l, Cost: 1}
		}
		if err := store.Apply(context.Background(), charges, out); err != nil {
			return err
		}
		if algorithms.Binding(charges, out) >= 0 {
			return errRefused
		}
		return nil
	}
}

// gcra is the smallest honest script: one key, Redis's clock, one number back.
const gcra = `
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local tat = tonumber(redis.call('GET', KEYS[1]) or now)
if tat < now then tat = now end
local new = tat + ARGV[1]
if new - now > ARGV[1] * ARGV[2] then return tat - now end
redis.call('SET', KEYS[1], new, 'PX', math.ceil((new - now) / 1000) + 1000)
return 0`
