package sluice_test

// Long responses and upgraded connections pass the limiter as if it were not there.

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// Each event arrives before the next one is sent: nothing is buffered, and flushing works.
func TestEventStream(t *testing.T) {
	next := make(chan struct{})
	dial := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range 3 {
			fmt.Fprintf(w, "data: %d\n\n", i)
			w.(http.Flusher).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
			}
		}
	})
	s := serve(t, ":80 {\n rate_limit {\n zone z 1/1h\n }\n reverse_proxy "+dial+"\n}")
	resp, err := s.client.Get("http://" + s.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if (answer{Response: resp}).left("z") != 0 {
		t.Error(resp.Header)
	}
	body := bufio.NewReader(resp.Body)
	for i := range 3 {
		line, err := body.ReadString('\n')
		if err != nil || line != fmt.Sprintf("data: %d\n", i) {
			t.Fatalf("event %d: %q %v", i, line, err)
		}
		body.ReadString('\n')
		next <- struct{}{}
	}
	if rest, err := io.ReadAll(body); err != nil || len(rest) > 0 {
		t.Errorf("%q %v", rest, err)
	}
	s.refused("/")
}

// echo is an upstream that takes connections over as WebSockets do and answers each line, until the
// client goes or says "bye".
func echo(t testing.TB) (dial string) {
	return upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") == "" {
			return
		}
		conn, buf, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		for {
			line, err := buf.ReadString('\n')
			if err != nil || line == "bye\n" {
				return
			}
			fmt.Fprint(conn, "echo "+line)
		}
	})
}

// upgrade asks for a WebSocket, which is closed when the test ends at the latest.
func (s *server) upgrade() (net.Conn, *bufio.Reader, *http.Response) {
	s.t.Helper()
	conn, err := net.Dial("tcp", s.addr())
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	return conn, r, resp
}

// A connection that is upgraded is one request, and then carries whatever both sides say.
func TestWebSocket(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone z 1/1h\n }\n reverse_proxy "+echo(t)+"\n}")
	conn, r, resp := s.upgrade()
	if resp.StatusCode != 101 || (answer{Response: resp}).left("z") != 0 {
		t.Fatal(resp.Status, resp.Header)
	}
	for _, word := range []string{"one", "two", strings.Repeat("long", 5000)} {
		fmt.Fprintln(conn, word)
		if line, err := r.ReadString('\n'); err != nil || line != "echo "+word+"\n" {
			t.Fatalf("%.40q %v", line, err)
		}
	}
	if _, _, resp := s.upgrade(); resp.StatusCode != 429 {
		t.Error(resp.Status)
	}
}

// A body that the upstream reads while the response is being written.
func TestRequestBodyPasses(t *testing.T) {
	dial := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n, err)
	})
	s := serve(t, ":80 {\n rate_limit 1/1h\n reverse_proxy "+dial+"\n}")
	const size = 3 << 20
	resp, err := s.client.Post("http://"+s.addr(), "text/plain", strings.NewReader(strings.Repeat("b", size)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, _ := io.ReadAll(resp.Body); string(body) != fmt.Sprint(size, nil) {
		t.Errorf("%s", body)
	}
}

// The 101 of a WebSocket is its status: what was reserved comes back while the connection lasts.
func TestWebSocketEndsItsReservation(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone z 1/1h {\n count status 401\n }\n }\n reverse_proxy "+echo(t)+"\n}")
	for range 3 {
		if _, _, resp := s.upgrade(); resp.StatusCode != 101 {
			t.Fatal(resp.Status, resp.Header)
		}
	}
}
