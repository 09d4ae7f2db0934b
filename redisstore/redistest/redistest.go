// Package redistest starts real Redis servers for tests, on free loopback ports and in temporary
// directories. A missing redis-server fails the test: an imitation would hide what matters, such as
// how the real one turns numbers into text.
package redistest

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Server is a running redis-server or sentinel. It ends with the test.
type Server struct {
	Addr   string // host:port; with TLS the encrypted port
	Socket string // path of its unix socket
	Port   string

	t    testing.TB
	dir  string
	args []string
	kind string
	cmd  *exec.Cmd
	out  bytes.Buffer
	dial redis.Options
}

// Start runs a server with extra settings, given as on the command line: "--requirepass", "secret".
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return start(t, "redis-server", redis.Options{}, args...)
}

// StartWith is Start for servers that the helper must log in to: dial holds user, password and TLS.
func StartWith(t testing.TB, dial redis.Options, args ...string) *Server {
	t.Helper()
	return start(t, "redis-server", dial, args...)
}

func start(t testing.TB, kind string, dial redis.Options, args ...string) *Server {
	t.Helper()
	dir, err := os.MkdirTemp("", "redistest") // short: a socket's path has little room
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &Server{t: t, dir: dir, kind: kind, args: args, dial: dial, Port: FreePort(t), Socket: filepath.Join(dir, "s")}
	s.Addr = "127.0.0.1:" + s.Port
	t.Cleanup(s.Kill)
	s.Restart()
	return s
}

// given are the ports that this process was told are free, some of which are meant to stay so.
var given sync.Map

// FreePort returns a loopback port that is free for TCP and UDP. It is below those that the system
// gives to outgoing connections, or one of them could take it before its server listens, and a
// random one, since tests run in several processes. No port is given twice.
func FreePort(t testing.TB) string {
	t.Helper()
	for range 1000 {
		port := strconv.Itoa(10_000 + rand.IntN(22_000))
		if _, twice := given.LoadOrStore(port, nil); twice {
			continue
		}
		l, err := net.Listen("tcp", "127.0.0.1:"+port)
		if err != nil {
			continue
		}
		l.Close()
		if u, err := net.ListenPacket("udp", "127.0.0.1:"+port); err == nil {
			u.Close()
			return port
		}
	}
	t.Fatal("no port is free")
	return ""
}

// Restart starts the server again on the same port, after Kill, and waits until it answers.
func (s *Server) Restart() {
	s.t.Helper()
	s.Launch()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := s.ping()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("%s does not answer: %v\n%s", s.kind, err, s.out.String())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// Launch starts the process and does not wait for it to answer.
func (s *Server) Launch() {
	s.t.Helper()
	fill := strings.NewReplacer("{port}", s.Port, "{dir}", s.dir).Replace
	args := []string{"--port", s.Port, "--bind", "127.0.0.1", "--dir", s.dir, "--save", "", "--unixsocket", s.Socket, "--daemonize", "no"}
	if s.kind == "redis-sentinel" { // takes its settings from a file that it rewrites
		if err := os.WriteFile(fill(s.args[0]), []byte(fill(s.args[1])), 0o600); err != nil {
			s.t.Fatal(err)
		}
		s.cmd = exec.Command("redis-sentinel", fill(s.args[0]))
	} else {
		for _, a := range s.args {
			args = append(args, fill(a))
		}
		s.cmd = exec.Command("redis-server", args...)
	}
	s.cmd.Stdout, s.cmd.Stderr = &s.out, &s.out
	if err := s.cmd.Start(); err != nil {
		s.t.Fatalf("start %s: %v; `make %s` installs it", s.kind, err, s.kind)
	}
}

func (s *Server) ping() error {
	listening, err := net.Dial("tcp", s.Addr)
	if err != nil {
		return err
	}
	listening.Close()
	c := s.Client()
	defer c.Close()
	return c.Ping(context.Background()).Err()
}

// Client returns a new connection to the server.
func (s *Server) Client() *redis.Client {
	o := s.dial
	o.Addr, o.MaxRetries, o.DialerRetries, o.DialTimeout, o.ReadTimeout = s.Addr, -1, 1, 10*time.Second, 10*time.Second
	o.Protocol = 2
	return redis.NewClient(&o)
}

// Do runs a command and returns its answer; an error fails the test.
func (s *Server) Do(args ...any) any {
	s.t.Helper()
	c := s.Client()
	defer c.Close()
	v, err := c.Do(context.Background(), args...).Result()
	if err != nil && err != redis.Nil {
		s.t.Fatalf("%v: %v", args, err)
	}
	return v
}

// Kill ends the server at once. It may be called again.
func (s *Server) Kill() {
	if s.cmd == nil || s.cmd.Process == nil {
		return
	}
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait() // it was killed
	s.cmd = nil
}

// Stop halts the process without ending it: it accepts connections and never answers.
func (s *Server) Stop() { s.signal(syscall.SIGSTOP) }

// Continue undoes Stop.
func (s *Server) Continue() { s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig os.Signal) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
}

// Calls returns how often a command was called, by Redis's own count.
func (s *Server) Calls(command string) int {
	s.t.Helper()
	info, _ := s.Do("info", "commandstats").(string)
	_, rest, found := strings.Cut(info, "cmdstat_"+command+":calls=")
	if !found {
		return 0
	}
	n := 0
	if _, err := fmt.Sscanf(rest, "%d,", &n); err != nil {
		s.t.Fatal(err)
	}
	return n
}

// CPU returns the processor time that the server has used, by its own count.
func (s *Server) CPU() time.Duration {
	s.t.Helper()
	info, _ := s.Do("info", "cpu").(string)
	total := time.Duration(0)
	for _, name := range []string{"used_cpu_sys", "used_cpu_user"} {
		_, rest, _ := strings.Cut(info, "\n"+name+":")
		var seconds float64
		if _, err := fmt.Sscanf(rest, "%g", &seconds); err != nil {
			s.t.Fatal(err)
		}
		total += time.Duration(seconds * float64(time.Second))
	}
	return total
}

// StartSentinel runs a sentinel that watches master under the given name and fails over as fast as
// it may without taking a busy machine for a dead master.
func StartSentinel(t testing.TB, name string, master *Server) *Server {
	t.Helper()
	s := start(t, "redis-sentinel", redis.Options{}, "{dir}/sentinel.conf",
		"port {port}\nbind 127.0.0.1\ndir {dir}\n"+
			"sentinel monitor "+name+" 127.0.0.1 "+master.Port+" 1\n"+
			"sentinel down-after-milliseconds "+name+" 2000\nsentinel failover-timeout "+name+" 3000\n")
	return s
}

// StartCluster runs a cluster of n masters that share the slots evenly.
func StartCluster(t testing.TB, n int) []*Server {
	t.Helper()
	nodes, bus := make([]*Server, n), make([]string, n)
	for i := range nodes {
		bus[i] = FreePort(t)
		nodes[i] = Start(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", bus[i])
		nodes[i].Do("cluster", "addslotsrange", 16384*i/n, 16384*(i+1)/n-1)
		if i > 0 {
			nodes[i].Do("cluster", "meet", "127.0.0.1", nodes[0].Port, bus[0])
		}
	}
	deadline := time.Now().Add(60 * time.Second)
	for _, s := range nodes {
		for {
			info, _ := s.Do("cluster", "info").(string)
			slots, _ := s.Do("cluster", "slots").([]any)
			if strings.Contains(info, "cluster_state:ok") && len(slots) == n {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("the cluster does not form: %s", info)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nodes
}

// MoveSlot moves a slot with its keys from one cluster node to another, as a live resharding does.
func MoveSlot(slot int, from, to *Server) {
	fromID, toID := from.Do("cluster", "myid"), to.Do("cluster", "myid")
	to.Do("cluster", "setslot", slot, "importing", fromID)
	from.Do("cluster", "setslot", slot, "migrating", toID)
	for {
		keys, _ := from.Do("cluster", "getkeysinslot", slot, 10).([]any)
		if len(keys) == 0 {
			break
		}
		from.Do(append([]any{"migrate", "127.0.0.1", to.Port, "", 0, 5000, "keys"}, keys...)...)
	}
	to.Do("cluster", "setslot", slot, "node", toID)
	from.Do("cluster", "setslot", slot, "node", toID)
}
