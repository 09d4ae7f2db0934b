// Command failure shows what a failing Redis costs: 1,000 decisions a second, asked at fixed
// moments however long the answers take, while Redis is stopped, killed or slowed and comes back.
// Run it with `make bench-failure`.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore"
)

const (
	rate    = 1000 // decisions a second
	healthy = 2 * time.Second
	broken  = 4 * time.Second
	after   = 4 * time.Second
)

func main() {
	fmt.Println("| Redis is | p99 before | p99 in the first second | p99 while the breaker is open | up again after | goroutines before / most | heap before / most |")
	fmt.Println("|---|---|---|---|---|---|---|")
	for _, c := range []struct {
		name     string
		down, up func(*server)
	}{
		{"stopped (SIGSTOP)", func(s *server) { s.signal(syscall.SIGSTOP) }, func(s *server) { s.signal(syscall.SIGCONT) }},
		{"killed", (*server).kill, (*server).start},
		{"slowed to 100 ms an answer", func(s *server) { s.delay.Store(int64(100 * time.Millisecond)) }, func(s *server) { s.delay.Store(0) }},
	} {
		s := newServer()
		run(c.name, s, c.down, c.up)
		s.kill()
		s.proxy.Close()
	}
}

// run asks at a constant rate through the three phases and prints a row.
func run(name string, s *server, down, up func(*server)) {
	store, err := redisstore.New(redisstore.Options{Addrs: []string{s.proxy.Addr().String()}})
	check(err)
	defer store.Close()
	limit, err := algorithms.Compile("zone", algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: 1e6, Window: time.Second, Burst: 1e6})
	check(err)

	var phases [3][]time.Duration // before, the first second, later while the breaker is open
	var mu sync.Mutex
	var returned, back atomic.Int64
	var wg sync.WaitGroup
	goroutines, heap := runtime.NumGoroutine(), heapNow()
	most, mostHeap := goroutines, heap
	start := time.Now()
	for n := 0; ; n++ {
		at := time.Duration(n) * time.Second / rate
		if at > healthy+broken+after {
			break
		}
		time.Sleep(time.Until(start.Add(at)))
		switch n {
		case int(healthy/time.Second) * rate:
			go down(s)
		case int((healthy+broken)/time.Second) * rate:
			go func() { up(s); returned.Store(int64(time.Since(start))) }()
		}
		if n%100 == 0 {
			most, mostHeap = max(most, runtime.NumGoroutine()), max(mostHeap, heapNow())
		}
		wg.Go(func() {
			var out [1]algorithms.Outcome
			asked := time.Now()
			err := store.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: limit, Cost: 1}}, out[:])
			took := time.Since(asked)
			if r := returned.Load(); err == nil && r > 0 {
				back.CompareAndSwap(0, int64(time.Since(start))-r)
			}
			mu.Lock()
			defer mu.Unlock()
			switch {
			case at > healthy/2 && at < healthy:
				phases[0] = append(phases[0], took)
			case at >= healthy && at < healthy+time.Second:
				phases[1] = append(phases[1], took)
			case at >= healthy+time.Second && at < healthy+broken:
				phases[2] = append(phases[2], took)
			}
		})
	}
	wg.Wait()
	fmt.Printf("| %s | %v | %v | %v | %v | %d / %d | %.1f / %.1f MB |\n", name, p99(phases[0]), p99(phases[1]), p99(phases[2]),
		time.Duration(back.Load()).Round(time.Millisecond), goroutines, most, float64(heap)/1e6, float64(mostHeap)/1e6)
}

func p99(took []time.Duration) time.Duration {
	slices.Sort(took)
	return took[len(took)*99/100].Round(time.Microsecond)
}

func heapNow() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse
}

// server is a redis-server behind a proxy that can delay answers.
type server struct {
	port  string
	cmd   *exec.Cmd
	proxy net.Listener
	delay atomic.Int64
}

func newServer() *server {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	_, port, _ := net.SplitHostPort(l.Addr().String())
	l.Close()
	s := &server{port: port}
	s.start()
	s.proxy, err = net.Listen("tcp", "127.0.0.1:0")
	check(err)
	go s.forward()
	return s
}

// start runs the server and waits until it answers.
func (s *server) start() {
	s.cmd = exec.Command("redis-server", "--port", s.port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
	check(s.cmd.Start())
	client := redis.NewClient(&redis.Options{Addr: "127.0.0.1:" + s.port})
	defer client.Close()
	for deadline := time.Now().Add(5 * time.Second); client.Ping(context.Background()).Err() != nil; {
		if time.Now().After(deadline) {
			check(fmt.Errorf("redis-server does not answer on port %s", s.port))
		}
	}
}

func (s *server) signal(sig syscall.Signal) { check(s.cmd.Process.Signal(sig)) }

func (s *server) kill() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

func (s *server) forward() {
	for {
		client, err := s.proxy.Accept()
		if err != nil {
			return
		}
		go func() {
			defer client.Close()
			redis, err := net.Dial("tcp", "127.0.0.1:"+s.port)
			if err != nil {
				return
			}
			defer redis.Close()
			go s.copy(redis, client, false)
			s.copy(client, redis, true)
		}()
	}
}

func (s *server) copy(to, from net.Conn, delayed bool) {
	defer to.Close()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if d := time.Duration(s.delay.Load()); delayed && d > 0 {
				time.Sleep(d)
			}
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}
