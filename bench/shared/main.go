// Command shared compares decisions in Redis: this module's store with the clients and limiters
// that others use. It starts a redis-server of its own on a free loopback port. Run it with `make
// bench-redis`.
//
// All subjects decide on the same 10,000 keys with a limit that is never reached, in rounds that
// take turns, so that a drift of the machine's speed meets all of them. What counts is the ratio
// within a run.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

const keys = 10_000

// crowds is how many callers decide at the same time.
var crowds = []int{1, 8, 64, 256}

func main() {
	rounds := flag.Int("rounds", 5, "how often each subject is measured")
	length := flag.Duration("time", time.Second, "how long each measurement takes")
	only := flag.String("only", "", "leave out subjects without this in their name; the baseline stays")
	callers := flag.Int("callers", 0, "this many callers instead of 1, 8, 64 and 256")
	profile := flag.String("cpuprofile", "", "write a profile of this process, which is the client, to a file")
	flag.Parse()
	if *callers > 0 {
		crowds = []int{*callers}
	}
	if *profile != "" {
		f, err := os.Create(*profile)
		check(err)
		check(pprof.StartCPUProfile(f))
		defer pprof.StopCPUProfile()
	}
	addr, stop := startRedis()
	defer stop()
	info := redis.NewClient(&redis.Options{Addr: addr})
	defer info.Close()

	subjects := slices.DeleteFunc(newSubjects(addr), func(s subject) bool {
		return s.name != baseline && !strings.Contains(s.name, *only)
	})
	results := make(map[string][]result)
	for range *rounds {
		for _, callers := range crowds {
			for _, s := range subjects {
				id := s.name + "/" + strconv.Itoa(callers)
				results[id] = append(results[id], measure(info, s, callers, *length))
			}
		}
	}
	print(subjects, results)
}

// startRedis runs a server without persistence and returns its address.
func startRedis() (addr string, stop func()) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	addr = l.Addr().String()
	l.Close()
	_, port, _ := net.SplitHostPort(addr)
	cmd := exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
	check(cmd.Start())
	client := redis.NewClient(&redis.Options{Addr: addr})
	defer client.Close()
	for deadline := time.Now().Add(5 * time.Second); client.Ping(context.Background()).Err() != nil; {
		if time.Now().After(deadline) {
			check(fmt.Errorf("redis-server does not answer on %s", addr))
		}
	}
	return addr, func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
}

// result is one measurement.
type result struct {
	perSecond            float64
	p50, p99             float64 // µs
	clientCPU, serverCPU float64 // µs per decision
}

func measure(info *redis.Client, s subject, callers int, length time.Duration) result {
	run(s, callers, length/5) // connections, scripts, caches
	server, client := serverCPU(info), clientCPU()
	start := time.Now()
	took := run(s, callers, length)
	wall := time.Since(start)
	n := float64(len(took))
	slices.Sort(took)
	return result{
		perSecond: n / wall.Seconds(),
		p50:       micros(took[len(took)/2]), p99: micros(took[len(took)*99/100]),
		clientCPU: micros(clientCPU()-client) / n, serverCPU: micros(serverCPU(info)-server) / n,
	}
}

// run lets callers decide one after the other, each on its own, and returns how long each decision
// took.
func run(s subject, callers int, length time.Duration) (took []time.Duration) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var next atomic.Uint64
	end := time.Now().Add(length)
	for range callers {
		wg.Go(func() {
			var mine []time.Duration
			for start := time.Now(); start.Before(end); {
				check(s.decide(int(next.Add(7919) % keys)))
				now := time.Now()
				mine = append(mine, now.Sub(start))
				start = now
			}
			mu.Lock()
			took = append(took, mine...)
			mu.Unlock()
		})
	}
	wg.Wait()
	return took
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// serverCPU is what Redis has used, user and system.
func serverCPU(info *redis.Client) time.Duration {
	text, err := info.Info(context.Background(), "cpu").Result()
	check(err)
	var total float64
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if name == "used_cpu_user" || name == "used_cpu_sys" {
			seconds, err := strconv.ParseFloat(value, 64)
			check(err)
			total += seconds
		}
	}
	return time.Duration(total * float64(time.Second))
}

func clientCPU() time.Duration {
	var u syscall.Rusage
	check(syscall.Getrusage(syscall.RUSAGE_SELF, &u))
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// print writes a table: medians over the rounds, and the median of the ratios to redis_rate in the
// same round.
func print(subjects []subject, results map[string][]result) {
	fmt.Println("| | callers | decisions/s | to redis_rate | p50 µs | p99 µs | client CPU µs | Redis CPU µs |")
	fmt.Println("|---|---|---|---|---|---|---|---|")
	for _, s := range subjects {
		for _, callers := range crowds {
			crowd := "/" + strconv.Itoa(callers)
			rs, base := results[s.name+crowd], results[baseline+crowd]
			ratios := make([]float64, len(rs))
			for i := range rs {
				ratios[i] = rs[i].perSecond / base[i].perSecond
			}
			fmt.Printf("| %s | %d | %.0f | %.2f | %.0f | %.0f | %.1f | %.1f |\n", s.name, callers,
				median(rs, func(r result) float64 { return r.perSecond }), middle(ratios),
				median(rs, func(r result) float64 { return r.p50 }), median(rs, func(r result) float64 { return r.p99 }),
				median(rs, func(r result) float64 { return r.clientCPU }), median(rs, func(r result) float64 { return r.serverCPU }))
		}
	}
}

func median(rs []result, of func(result) float64) float64 {
	values := make([]float64, len(rs))
	for i, r := range rs {
		values[i] = of(r)
	}
	return middle(values)
}

func middle(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}
