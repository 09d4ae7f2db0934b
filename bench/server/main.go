// Command server compares what a limiter costs a whole server: Caddy with this module, NGINX with
// limit_req and HAProxy with a stick table, each without its limiter, with one that lets everything
// pass and with one that refuses everything. Clients ask on kept connections, each as soon as it has
// its answer. What counts is the ratio to the same server without a limiter, in the same round.
// Run it with `make bench-server`.
package main

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// The three states of a server's limiter.
const (
	without = iota
	passing
	refusing
	states
)

// subject is a server that is measured.
type subject struct {
	name string
	// start writes the files that the server needs into a directory, to listen on a port with its
	// limiter in a state, and returns its command.
	start func(dir, port string, state int) *exec.Cmd
	ports [states]string
}

func main() {
	rounds := flag.Int("rounds", 9, "how often each server is measured")
	length := flag.Duration("time", time.Second, "how long each measurement takes")
	clients := flag.Int("clients", 32, "how many clients ask at the same time")
	caddy := flag.String("caddy", "../bin/caddy", "a Caddy with this module")
	flag.Parse()
	runtime.LockOSThread() // see Pdeathsig
	dir, err := os.MkdirTemp("", "bench-server")
	check(err)
	defer os.RemoveAll(dir)
	check(os.Chmod(dir, 0o755)) // NGINX's workers are another user
	subjects := []*subject{{name: "Caddy, sluice", start: caddyWith(*caddy)}, {name: "NGINX, limit_req", start: nginx}, {name: "HAProxy, stick table", start: haproxy}}
	for i, s := range subjects {
		for state := range states {
			home := filepath.Join(dir, strconv.Itoa(i), strconv.Itoa(state))
			check(os.MkdirAll(home, 0o755))
			s.ports[state] = freePort()
			defer run(s.start(home, s.ports[state], state), s.ports[state])()
		}
	}
	rates := make(map[string][][states]float64)
	for range *rounds {
		for _, s := range subjects {
			var r [states]float64
			for state := range states {
				r[state] = ask(s.ports[state], *clients, *length, state == refusing)
			}
			rates[s.name] = append(rates[s.name], r)
		}
	}
	fmt.Println("| server | requests/s without | passing, to that | refusing, to that |")
	fmt.Println("|---|---|---|---|")
	for _, s := range subjects {
		fmt.Printf("| %s | %.0f | %s | %s |\n", s.name,
			median(rates[s.name], func(r [states]float64) float64 { return r[without] }),
			spread(rates[s.name], passing), spread(rates[s.name], refusing))
	}
}

func median(list [][states]float64, of func([states]float64) float64) float64 {
	var values []float64
	for _, r := range list {
		values = append(values, of(r))
	}
	slices.Sort(values)
	return values[len(values)/2]
}

// spread is the median of the rounds' ratios, and the least and the most.
func spread(list [][states]float64, state int) string {
	ratio := func(r [states]float64) float64 { return r[state] / r[without] }
	least, most := ratio(list[0]), ratio(list[0])
	for _, r := range list {
		least, most = min(least, ratio(r)), max(most, ratio(r))
	}
	return fmt.Sprintf("%.2f (%.2f to %.2f)", median(list, ratio), least, most)
}

func caddyWith(bin string) func(dir, port string, state int) *exec.Cmd {
	return func(dir, port string, state int) *exec.Cmd {
		limit := [states]string{passing: "rate_limit 1000000000/1m", refusing: "rate_limit 1/1d"}[state]
		file := write(dir, "Caddyfile", "{\n admin off\n log {\n output discard\n }\n}\nhttp://127.0.0.1:"+port+" {\n "+limit+"\n respond ok\n}\n")
		cmd := exec.Command(bin, "run", "--adapter", "caddyfile", "--config", file)
		cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir)
		return cmd
	}
}

func nginx(dir, port string, state int) *exec.Cmd {
	zone := [states]string{passing: "rate=1000000r/s", refusing: "rate=1r/m"}[state]
	limit := [states]string{passing: "limit_req zone=z burst=1000000 nodelay;", refusing: "limit_req zone=z;"}[state]
	if zone != "" {
		zone = "limit_req_zone $binary_remote_addr zone=z:10m " + zone + "; limit_req_status 429; limit_req_log_level info;"
	}
	write(dir, "index.html", "ok")
	conf := write(dir, "nginx.conf", fmt.Sprintf(`daemon off; worker_processes 2; pid %[1]s/pid; error_log /dev/null crit;
events { worker_connections 1024; }
http {
	access_log off; keepalive_requests 1000000000; %[2]s
	client_body_temp_path %[1]s/b; proxy_temp_path %[1]s/p; fastcgi_temp_path %[1]s/f; uwsgi_temp_path %[1]s/u; scgi_temp_path %[1]s/s;
	server { listen 127.0.0.1:%[3]s; location / { root %[1]s; %[4]s } }
}
`, dir, zone, port, limit))
	return exec.Command("nginx", "-e", "/dev/null", "-c", conf)
}

func haproxy(dir, port string, state int) *exec.Cmd {
	most := [states]string{passing: "1000000000", refusing: "1"}[state]
	limit := ""
	if most != "" {
		limit = " stick-table type ip size 1m expire 1d store http_req_rate(1h)\n http-request track-sc0 src\n http-request deny deny_status 429 if { sc_http_req_rate(0) gt " + most + " }\n"
	}
	conf := write(dir, "haproxy.cfg", "global\n nbthread 2\n maxconn 1000\ndefaults\n mode http\n timeout client 1m\n timeout connect 1m\n timeout server 1m\nfrontend f\n bind 127.0.0.1:"+port+
		"\n"+limit+" http-request return status 200 content-type text/plain string ok\n")
	return exec.Command("haproxy", "-db", "-f", conf)
}

func write(dir, name, text string) string {
	file := filepath.Join(dir, name)
	check(os.WriteFile(file, []byte(text), 0o644))
	return file
}

// run starts a server, waits until it answers, and returns what stops it.
func run(cmd *exec.Cmd, port string) (stop func()) {
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM} // it ends with this command, however that ends
	check(cmd.Start())
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		conn, err := net.Dial("tcp", "127.0.0.1:"+port)
		if err == nil {
			conn.Close()
			break
		}
		if time.Since(began) > 10*time.Second {
			check(fmt.Errorf("%v does not answer: %s", cmd, out.String()))
		}
	}
	return func() {
		check(cmd.Process.Signal(syscall.SIGTERM))
		_ = cmd.Wait() // how it ended is not what is measured
	}
}

// ask returns how many requests a second the server answers, as its limiter's state demands.
func ask(port string, clients int, length time.Duration, refused bool) float64 {
	want := []byte("HTTP/1.1 200")
	if refused {
		want = []byte("HTTP/1.1 429")
		check(one(port)) // which a window of one lets pass
	}
	var answered atomic.Int64
	var all sync.WaitGroup
	start := time.Now()
	for range clients {
		all.Go(func() {
			conn, err := net.Dial("tcp", "127.0.0.1:"+port)
			check(err)
			defer conn.Close()
			r, n := bufio.NewReader(conn), int64(0)
			for time.Since(start) < length {
				status, err := exchange(conn, r)
				check(err)
				if !bytes.HasPrefix(status, want) {
					check(fmt.Errorf("%q, want %q", status, want))
				}
				n++
			}
			answered.Add(n)
		})
	}
	all.Wait()
	return float64(answered.Load()) / time.Since(start).Seconds()
}

func one(port string) error {
	conn, err := net.Dial("tcp", "127.0.0.1:"+port)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = exchange(conn, bufio.NewReader(conn))
	return err
}

var request = []byte("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: bench\r\n\r\n")

// exchange sends a request and reads the whole response, of which it returns the first line.
func exchange(conn net.Conn, r *bufio.Reader) (status []byte, err error) {
	if _, err := conn.Write(request); err != nil {
		return nil, err
	}
	length := 0
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return nil, err
		}
		if status == nil {
			status = append(status, line...)
			continue
		}
		if len(line) <= 2 {
			break
		}
		if name, value, _ := strings.Cut(string(line), ":"); strings.EqualFold(name, "Content-Length") {
			if length, err = strconv.Atoi(strings.TrimSpace(value)); err != nil {
				return nil, err
			}
		}
	}
	_, err = r.Discard(length)
	return status, err
}

func freePort() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	check(err)
	return port
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
