package sluice_test

// What a process that is stopped in an orderly way holds in the shared store is given back before
// it ends (G33).

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

func TestAStopGivesBackWhatRequestsHold(t *testing.T) {
	redis, port := redistest.Start(t), freePort(t)
	hangs := make(chan struct{}, 1)
	never := upstream(t, func(_ http.ResponseWriter, r *http.Request) {
		hangs <- struct{}{}
		<-r.Context().Done()
	})
	options := "\tgrace_period 100ms\n\trate_limit {\n\t\tredis " + redis.Addr + " {\n\t\t\ttimeout 5s\n\t\t}\n\t}\n"
	sites := fmt.Sprintf("http://127.0.0.1:%d {\n handle /ws {\n rate_limit {\n zone ws {\n concurrency 1 lease 1h\n }\n }\n reverse_proxy %s\n }\n"+
		" handle {\n rate_limit {\n zone login 1/1h {\n count status 401\n ban 1h after 5/1h\n }\n }\n reverse_proxy %s\n }\n}\n", port, echo(t), never)
	upgrade := func() string {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conn.SetDeadline(time.Now().Add(20 * time.Second))
		fmt.Fprint(conn, "GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		line, err := bufio.NewReader(conn).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return line
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	guess := func() {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/login", port), nil)
		if err != nil {
			t.Error(err)
			return
		}
		if resp, err := http.DefaultClient.Do(req); err == nil {
			resp.Body.Close()
		}
	}
	for turn := range 2 { // the second process meets what the first has left behind
		p := startCaddyWith(t, options, sites)
		if line := upgrade(); !strings.Contains(line, "101") {
			t.Fatalf("process %d: %s", turn+1, line)
		}
		go guess()
		select {
		case <-hangs:
		case <-time.After(10 * time.Second):
			t.Fatalf("process %d: the attempt does not reach the upstream", turn+1)
		}
		if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		eventually(t, 10*time.Second, "a line that says so", func() bool {
			return strings.Contains(p.log.String(), "what they hold in the shared store is given back")
		})
		eventually(t, 5*time.Second, "the exit", func() bool { return strings.Contains(p.log.String(), "shutdown complete") })
	}
}
