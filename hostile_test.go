package sluice_test

// Requests that no well-meaning client sends, over a bare socket.

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// odd has a key of every kind, each field family, and shows keys.
const odd = `
{
	events {
		on rate_limit_exceeded sluice_test
	}
	servers {
		trusted_proxies static 127.0.0.0/8
		max_header_size 1MB
	}
}
:80 {
	log
	log_append left {http.rate_limit.parts.remaining}
	rate_limit {
		zone parts 2/1h {
			key {path} {uri} {query.q} {header.X-Odd} {cookie.session} {host} {method} {client_ip} {remote_host} {http.request.uri.query}
			cost {header.X-Cost}
		}
		zone address 3/1h {
			key {client_ip}
		}
		zone text 3/1h {
			key {header.X-Odd}{cookie.session}
			dry_run
		}
		log_key
		headers ietf draft6 x
	}
	respond "ok {http.rate_limit.address.remaining}"
	handle_errors 429 {
		respond "{err.status_code} {http.rate_limit.exceeded.name}"
	}
}`

// seeds are requests as bytes.
var seeds = []string{
	"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"GET /%ff%00%2f%0d%0a HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"GET /?q=%ff&q=%&q=%zz&;;==&q HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"GET http://[::1%25eth0]/x HTTP/1.1\r\nHost: [::1]:80\r\n\r\n",
	"GET //../..//%2e%2e HTTP/1.1\r\nHost: A.TEST:99999\r\n\r\n",
	"OPTIONS * HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"GET / HTTP/1.0\r\n\r\n",
	"GET / HTTP/1.1\r\nHost:\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a.test\r\nX-Odd: \xff\xfe\x80\r\nX-Odd: \x01\x02\x03\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a.test\r\nX-Odd: \x01\r\nX-Odd: {env.HOME}\r\nCookie: session={path}\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a.test\r\nCookie: session=\xff\"; session; =; ;;session=a=b\r\nCookie: session=\"q\"\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a.test\r\nX-Forwarded-For: ,, ::ffff:1.2.3.4%eth0, not-an-address, 999.1.1.1\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a.test\r\nX-Forwarded-For: \xff\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a.test\r\nX-Cost: -9223372036854775808\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a.test\r\nX-Cost: 9223372036854775807\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a.test\r\nX-Cost: 1e9\r\nX-Cost: NaN\r\n\r\n",
	"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
	"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 10\r\n\r\nabc",
	"M\xffTHOD / HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"GET /" + strings.Repeat("a/", 5000) + " HTTP/1.1\r\nHost: a.test\r\n\r\n",
	"GET / HTTP/1.1\r\nHost: a.test\r\nX-Odd: " + strings.Repeat("\xf0\x9f", 20_000) + "\r\n\r\n",
	"\x16\x03\x01\x00\x05hello",
	"\r\n\r\n",
}

// sendRaw sends bytes as they are and checks whatever comes back.
func sendRaw(t *testing.T, s *server, request []byte) {
	t.Helper()
	conn, err := net.Dial("tcp", s.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := conn.Write(request); err != nil {
		return // the server has said enough
	}
	conn.(*net.TCPConn).CloseWrite()
	raw, _ := io.ReadAll(conn)
	r := bufio.NewReader(bytes.NewReader(raw))
	for {
		if _, err := r.Peek(1); err != nil {
			return
		}
		method := http.MethodGet
		if bytes.HasPrefix(request, []byte("HEAD ")) {
			method = http.MethodHead
		}
		resp, err := http.ReadResponse(r, &http.Request{Method: method})
		if err != nil {
			t.Fatalf("request %.300q: response %.300q: %v", request, raw, err)
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatalf("request %.300q: body %.100q: %v", request, body, err)
		}
		if checkFields(t, request, resp); resp.StatusCode == http.StatusBadRequest {
			return // from net/http, which sends HEAD a body then
		}
		if resp.StatusCode == http.StatusInternalServerError {
			t.Errorf("request %.300q: %s", request, resp.Status)
		}
	}
}

// checkFields: whatever was asked, the fields that we send are well formed.
func checkFields(t *testing.T, request []byte, resp *http.Response) {
	t.Helper()
	for name, values := range resp.Header {
		for _, v := range values {
			if strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r > '~' }) {
				t.Errorf("request %.300q: field %s: %q", request, name, v)
			}
		}
	}
	if limit := strings.Join(resp.Header["Ratelimit"], ", "); limit != "" && limitItem.ReplaceAllString(limit, "") != strings.Repeat(", ", strings.Count(limit, ", ")) {
		t.Errorf("request %.300q: RateLimit %q", request, limit)
	}
	for _, name := range []string{"Retry-After", "Ratelimit-Limit", "Ratelimit-Remaining", "Ratelimit-Reset", "X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset"} {
		for _, v := range resp.Header[name] {
			if v == "" || strings.Trim(v, "0123456789") != "" {
				t.Errorf("request %.300q: %s: %q", request, name, v)
			}
		}
	}
}

func checkLog(t *testing.T) {
	t.Helper()
	for line := range strings.Lines(processLog.String()) {
		if !json.Valid([]byte(line)) || strings.Contains(line, "panic") {
			t.Errorf("log line %.500q", line)
		}
	}
	processLog.reset()
}

// FuzzOddRequests: any bytes over a real socket. A response, if there is one, is well formed, and
// nothing panics.
func FuzzOddRequests(f *testing.F) {
	for _, seed := range seeds {
		f.Add([]byte(seed))
	}
	s := serve(f, odd)
	f.Fuzz(func(t *testing.T, request []byte) {
		if len(request) > 1<<20 {
			return
		}
		sendRaw(t, s, request)
		checkLog(t)
		events()
	})
}

// Random bytes where a well-formed request has room for them. The same numbers every time.
func TestOddRequests(t *testing.T) {
	s := serve(t, odd)
	random := rand.New(rand.NewPCG(1, 2))
	const alphabet = "ab/%?&=;.,:\"'\\{}[]()<>@#$*+-_~ \t0159ff\x01\x7f\x80\xc3\xff\xfe\xe2\x80\xa8"
	text := func(most int, without string) string {
		b := make([]byte, random.IntN(most))
		for i := range b {
			for b[i] = alphabet[random.IntN(len(alphabet))]; strings.IndexByte(without, b[i]) >= 0; b[i] = alphabet[random.IntN(len(alphabet))] {
			}
		}
		return string(b)
	}
	for range 1500 {
		request := fmt.Sprintf("%s /%s HTTP/1.1\r\nHost: %s\r\nX-Odd: %s\r\nCookie: session=%s\r\nCookie: %s\r\nX-Forwarded-For: %s\r\nX-Cost: %s\r\nConnection: close\r\n\r\n",
			[]string{"GET", "HEAD", "POST", "PURGE"}[random.IntN(4)], text(30, " \t\x01\x7f"), []string{"a.test", text(12, " ")}[random.IntN(2)],
			text(40, "\x01\x7f"), text(20, "\x01\x7f"), text(20, "\x01\x7f"), text(30, "\x01\x7f"), []string{"", "0", "1", "2", text(5, "\x01\x7f")}[random.IntN(5)])
		sendRaw(t, s, []byte(request))
	}
	asked := s.metric(`caddy_rate_limit_requests_total{zone="address"}`)
	if asked < 500 {
		t.Errorf("only %v of the requests came as far as the limiter", asked)
	}
	checkLog(t)
	checkMetrics(t, s.metrics())
}
