package sluice_test

// Tests against a real Caddy process, as a user runs it: built from cmd/caddy, configured by a
// Caddyfile, asked over real sockets.

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// built is where the binary is, if it was built.
var built string

// caddyBinary is built once per test run.
var caddyBinary = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "sluice-e2e-")
	if err != nil {
		return "", err
	}
	built = dir
	bin := filepath.Join(dir, "caddy")
	out, err := exec.Command("go", "build", "-o", bin, "./cmd/caddy").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return bin, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	os.RemoveAll(built) // nothing, when no test of this run needed the binary
	os.Exit(code)
}

// freePort finds a loopback port that is free for TCP and UDP.
func freePort(t testing.TB) int {
	t.Helper()
	port, err := strconv.Atoi(redistest.FreePort(t))
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// process is a running Caddy.
type process struct {
	t     testing.TB
	cmd   *exec.Cmd
	dir   string
	admin string
	log   *lockedBuffer
	// options are global options besides those of every process; sites are what it was started
	// with.
	options, sites string
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// globals is the global options block that every test process needs: an admin endpoint of its own
// and no trust store.
func globals(admin int, options string) string {
	return fmt.Sprintf("{\n\tadmin 127.0.0.1:%d\n\tskip_install_trust\n\tauto_https disable_redirects\n%s}\n", admin, options)
}

// startCaddy runs a Caddy with the sites given (no global options) and waits until it serves.
func startCaddy(t testing.TB, sites string) *process {
	t.Helper()
	return startCaddyWith(t, "", sites)
}

// startCaddyWith is startCaddy with more global options and more environment ("NAME=value").
func startCaddyWith(t testing.TB, options, sites string, env ...string) *process {
	t.Helper()
	bin, err := caddyBinary()
	if err != nil {
		t.Fatal(err)
	}
	admin := freePort(t)
	p := &process{t: t, dir: t.TempDir(), options: options, sites: sites, admin: fmt.Sprintf("http://127.0.0.1:%d", admin), log: new(lockedBuffer)}
	p.cmd = exec.Command(bin, "run", "--config", p.write(sites), "--adapter", "caddyfile")
	p.cmd.Env = append(os.Environ(), "XDG_DATA_HOME="+p.dir, "XDG_CONFIG_HOME="+p.dir, "HOME="+p.dir)
	p.cmd.Env = append(p.cmd.Env, env...)
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- p.cmd.Wait() }()
	t.Cleanup(func() {
		p.cmd.Process.Signal(os.Interrupt)
		select {
		case <-exited:
		case <-time.After(10 * time.Second):
			p.cmd.Process.Kill()
			t.Error("caddy did not stop within 10 s")
		}
		if t.Failed() {
			t.Log(p.log.String())
		}
	})
	p.await(exited, "serving initial configuration")
	if strings.Contains(sites, "tls internal") {
		p.await(exited, "certificate obtained successfully")
	}
	return p
}

func (p *process) write(sites string) string {
	p.t.Helper()
	var port int
	fmt.Sscanf(p.admin, "http://127.0.0.1:%d", &port)
	path := filepath.Join(p.dir, "Caddyfile")
	if err := os.WriteFile(path, []byte(globals(port, p.options)+sites), 0o600); err != nil {
		p.t.Fatal(err)
	}
	return path
}

// await polls the log for a line.
func (p *process) await(exited <-chan error, line string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !strings.Contains(p.log.String(), line) {
		select {
		case err := <-exited:
			p.t.Fatalf("caddy exited: %v\n%s", err, p.log.String())
		case <-ctx.Done():
			p.t.Fatalf("caddy does not say %q:\n%s", line, p.log.String())
		case <-tick.C:
		}
	}
}

// reload posts other sites to the admin endpoint and returns its answer's status and body.
func (p *process) reload(sites string) (int, string) {
	p.t.Helper()
	path := p.write(sites)
	file, err := os.ReadFile(path)
	if err != nil {
		p.t.Fatal(err)
	}
	resp, err := http.Post(p.admin+"/load", "text/caddyfile", bytes.NewReader(file))
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body)
}

// get asks once and returns the response with its body read.
func get(t testing.TB, c *http.Client, url string, header ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

// insecure trusts the test's own certificate authority blindly.
func insecure() *tls.Config { return &tls.Config{InsecureSkipVerify: true, ServerName: "localhost"} }

// protocols returns a client for each HTTP version.
func protocols(t testing.TB) map[string]*http.Client {
	h1 := &http.Transport{TLSClientConfig: insecure(), TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{}}
	h2 := &http.Transport{TLSClientConfig: insecure(), ForceAttemptHTTP2: true}
	h3 := &http3.Transport{TLSClientConfig: insecure()}
	t.Cleanup(func() {
		h1.CloseIdleConnections()
		h2.CloseIdleConnections()
		h3.Close()
	})
	clients := make(map[string]*http.Client)
	for proto, rt := range map[string]http.RoundTripper{"HTTP/1.1": h1, "HTTP/2.0": h2, "HTTP/3.0": h3} {
		clients[proto] = &http.Client{Transport: rt, Timeout: 10 * time.Second}
	}
	return clients
}
