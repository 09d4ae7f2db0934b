package redisstore

// Servers that answer what Redis never would (H01, H13).

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-sluice/sluice/algorithms"
)

// hostile listens on every loopback address and gives the n-th command what answer returns, an
// empty text being nothing.
func hostile(t *testing.T, answer func(command []string) string) (port string) {
	t.Helper()
	ln, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				in := bufio.NewReader(c)
				for {
					command, err := readCommand(in)
					if err != nil {
						return
					}
					if _, err := io.WriteString(c, answer(command)); err != nil {
						return
					}
				}
			}()
		}
	}()
	_, port, _ = net.SplitHostPort(ln.Addr().String())
	return port
}

// readCommand reads an array of strings, as clients send them.
func readCommand(in *bufio.Reader) (words []string, err error) {
	number := func() (n int, err error) {
		line, err := in.ReadString('\n')
		if err != nil {
			return 0, err
		}
		return strconv.Atoi(strings.TrimSpace(line[1:]))
	}
	n, err := number()
	for range n {
		size, err := number()
		if err != nil {
			return nil, err
		}
		word := make([]byte, size+2)
		if _, err := io.ReadFull(in, word); err != nil {
			return nil, err
		}
		words = append(words, string(word[:size]))
	}
	return words, err
}

// polite answers what a client asks before its first script.
func polite(script func() string) func([]string) string {
	return func(command []string) string {
		switch strings.ToLower(command[0]) {
		case "evalsha", "eval":
			return script()
		}
		return "+OK\r\n"
	}
}

var hostileReplies = map[string]string{
	"a string of 2^63 bytes":    "$9223372036854775800\r\n",
	"an array of 2^63":          "*9223372036854775800\r\n",
	"a negative string":         "$-9223372036854775800\r\n",
	"a string of 4 GB":          "$4000000000\r\n",
	"an array of 200 million":   "*200000000\r\n",
	"a string of 500 MB":        "$500000000\r\n",
	"arrays without end":        strings.Repeat("*1\r\n", 1<<20),
	"arrays within a large one": strings.Repeat("*262144\r\n", 100),
	"a map of RESP3":            "%9223372036854775800\r\n",
	"a set of RESP3":            "~200000000\r\n",
	"a verbatim of RESP3":       "=9223372036854775800\r\n",
	"an attribute of RESP3":     strings.Repeat("|1\r\n", 1<<16),
	"no length":                 "$\r\n",
	"a length that is none":     "*1x\r\n",
	"no protocol":               "HTTP/1.1 400 Bad Request\r\n\r\n",
	"a line without end":        "+" + strings.Repeat("x", 20<<20),
}

func TestHostileRepliesFailTheCallAndNothingElse(t *testing.T) {
	for name, reply := range hostileReplies {
		t.Run(name, func(t *testing.T) {
			for where, answer := range map[string]func([]string) string{
				"to a script":     polite(func() string { return reply }),
				"to all commands": func([]string) string { return reply },
			} {
				s := open(t, Options{Addrs: []string{"127.0.0.1:" + hostile(t, answer)}, Timeout: 2 * time.Second})
				s.Start() // the fleet's announcement reads replies too
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				var out [1]algorithms.Outcome
				err := s.Apply(t.Context(), []algorithms.Charge{{Key: "k", Limit: perHour(t, "z", 10), Cost: 1}}, out[:])
				if err == nil {
					t.Errorf("%s: an answer: %+v", where, out)
				}
				runtime.ReadMemStats(&after)
				if grown := after.TotalAlloc - before.TotalAlloc; grown > 200<<20 {
					t.Errorf("%s: %d MB were allocated", where, grown>>20)
				}
			}
		})
	}
}

// A server that never knows the script, and one that redirects without end, are down: no loop, and
// requests do not wait each time.
func TestEndlessRepetitionsOpenTheBreaker(t *testing.T) {
	t.Run("NOSCRIPT", func(t *testing.T) {
		var asked atomic.Int64
		port := hostile(t, polite(func() string { asked.Add(1); return "-NOSCRIPT No matching script.\r\n" }))
		s := open(t, Options{Addrs: []string{"127.0.0.1:" + port}, Timeout: 2 * time.Second})
		opens(t, s)
		if n := asked.Load(); n > 10*failuresToOpen {
			t.Errorf("%d scripts were sent", n)
		}
	})
	t.Run("MOVED", func(t *testing.T) {
		var next atomic.Int64
		var port string
		port = hostile(t, func(command []string) string {
			switch strings.ToLower(command[0]) {
			case "evalsha", "eval":
				n := next.Add(1)
				return "-MOVED 1 127.0." + strconv.Itoa(int(n>>8&255)) + "." + strconv.Itoa(int(n&255)) + ":" + port + "\r\n"
			case "cluster":
				return "-ERR unknown command\r\n"
			}
			return "+OK\r\n"
		})
		s := open(t, Options{Mode: Cluster, Addrs: []string{"127.0.0.1:" + port}, Timeout: 100 * time.Millisecond})
		opens(t, s)
	})
}

// opens asks until the breaker answers at once.
func opens(t *testing.T, s *Store) {
	t.Helper()
	var out [1]algorithms.Outcome
	for range 4 * failuresToOpen {
		err := s.Apply(t.Context(), []algorithms.Charge{{Key: "k", Limit: perHour(t, "z", 10), Cost: 1}}, out[:])
		if err == nil {
			t.Fatalf("an answer: %+v", out)
		}
		if known := (*Error)(nil); errors.As(err, &known) && known.Open {
			return
		}
	}
	t.Error("the breaker never opens")
}

// The guard passes what Redis answers, in any chunks.
func TestGuardPassesWhatRedisAnswers(t *testing.T) {
	const stream = "+OK\r\n-ERR no\r\n:-12\r\n$5\r\nab\r\nc\r\n$-1\r\n$0\r\n\r\n*-1\r\n*0\r\n" +
		"*2\r\n*3\r\n:0\r\n:5460\r\n*4\r\n$9\r\n127.0.0.1\r\n:7000\r\n$1\r\nx\r\n*2\r\n$8\r\nhostname\r\n$1\r\nh\r\n*1\r\n$-1\r\n+OK\r\n" +
		"%2\r\n$1\r\na\r\n:1\r\n+b\r\n_\r\n>2\r\n+message\r\n#t\r\n~1\r\n,1.5\r\n=5\r\ntxt:x\r\n"
	for size := 1; size <= len(stream); size++ {
		var r replies
		for rest := []byte(stream); len(rest) > 0; rest = rest[min(size, len(rest)):] {
			if err := r.scan(rest[:min(size, len(rest))]); err != nil {
				t.Fatalf("in chunks of %d: %v", size, err)
			}
		}
		if r.kind != 0 || r.depth != 0 || r.size != 0 {
			t.Fatalf("in chunks of %d: %+v after the last reply", size, r)
		}
	}
}

// stream is a connection on which the same bytes come whatever is asked.
type stream struct {
	net.Conn
	*bytes.Reader
}

func (s stream) Read(b []byte) (int, error)       { return s.Reader.Read(b) }
func (s stream) Write(b []byte) (int, error)      { return len(b), nil }
func (s stream) Close() error                     { return nil }
func (s stream) SetDeadline(time.Time) error      { return nil }
func (s stream) SetReadDeadline(time.Time) error  { return nil }
func (s stream) SetWriteDeadline(time.Time) error { return nil }
func (s stream) RemoteAddr() net.Addr             { return &net.TCPAddr{} }

// FuzzReplies: the client survives whatever comes through the guard, whose verdict does not depend
// on chunks.
func FuzzReplies(f *testing.F) {
	for _, reply := range hostileReplies {
		f.Add([]byte("+OK\r\n" + reply[:min(len(reply), 200)]))
	}
	f.Add([]byte("+OK\r\n*2\r\n$1\r\na\r\n:1\r\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		c := redis.NewClient(&redis.Options{
			Protocol: 2, DisableIdentity: true, MaxRetries: -1, DialerRetries: 1,
			Dialer: func(context.Context, string, string) (net.Conn, error) {
				return guard(stream{Reader: bytes.NewReader(data)}), nil
			},
		})
		defer c.Close()
		_ = c.Do(t.Context(), "evalsha").Err()
		var whole, single replies
		a := whole.scan(data)
		var b error
		for i := 0; i < len(data) && b == nil; i++ {
			b = single.scan(data[i : i+1])
		}
		if (a == nil) != (b == nil) {
			t.Errorf("at once %v, byte by byte %v", a, b)
		}
	})
}

// What a passing reply costs: one of a decision, as it comes in one read.
func BenchmarkGuard(b *testing.B) {
	reply := []byte("$33\r\n" + strings.Repeat("x", 33) + "\r\n")
	var r replies
	for b.Loop() {
		if err := r.scan(reply); err != nil {
			b.Fatal(err)
		}
	}
}
