package sluice_test

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The main job: one line limits real traffic before it reaches a real upstream, over every HTTP
// version.
func TestOneLineOverEveryProtocol(t *testing.T) {
	port, upstream := freePort(t), freePort(t)
	startCaddy(t, fmt.Sprintf(`
https://localhost:%d {
	tls internal
	header >Cache-Control public
	rate_limit {http.request.proto}{client_ip} 3/1h
	reverse_proxy 127.0.0.1:%d
}
http://:%d {
	respond "hello from the upstream"
}
`, port, upstream, upstream))
	eventually(t, 10*time.Second, "the certificate, which Caddy uses a moment after it says that it has it", func() bool {
		c, err := tls.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port), &tls.Config{ServerName: "localhost", InsecureSkipVerify: true})
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	for proto, client := range protocols(t) {
		t.Run(proto, func(t *testing.T) {
			url := fmt.Sprintf("https://localhost:%d/", port)
			for i := range 3 {
				resp, body := get(t, client, url)
				if resp.Proto != proto || resp.StatusCode != 200 || body != "hello from the upstream" {
					t.Fatalf("request %d: %s %d %q", i, resp.Proto, resp.StatusCode, body)
				}
				limit := resp.Header.Get("RateLimit")
				if !strings.Contains(limit, fmt.Sprintf(";r=%d", 2-i)) {
					t.Errorf("RateLimit: %q", limit)
				}
			}
			resp, body := get(t, client, url)
			if resp.StatusCode != 429 || !strings.Contains(body, "quota-exceeded") {
				t.Fatalf("refusal: %d %q", resp.StatusCode, body)
			}
			checkRefusalHeader(t, resp.Header)
		})
	}
}

func checkRefusalHeader(t *testing.T, h http.Header) {
	t.Helper()
	if n, err := strconv.Atoi(h.Get("Retry-After")); err != nil || n < 1 || n > 3600 {
		t.Errorf("Retry-After: %q", h.Get("Retry-After"))
	}
	if h.Get("Cache-Control") != "no-store" || h.Get("Content-Type") != "application/problem+json" {
		t.Errorf("header of a refusal: %v", h)
	}
}
