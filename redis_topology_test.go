package sluice_test

// Every way to reach a Redis, and instances that are several, through real Caddy processes.

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// trusting is how tests reach a server with the certificate of redis.example.
func trusting(pool *x509.CertPool) *tls.Config {
	return &tls.Config{RootCAs: pool, ServerName: "redis.example"}
}

// instance is a Caddy process whose zones are shared.
type instance struct {
	*process
	url    string
	client *http.Client
}

// startInstance runs a Caddy with the given global option (what follows `redis`, and fleet_size)
// and zones.
func startInstance(t *testing.T, option, zones string, env ...string) *instance {
	t.Helper()
	port := freePort(t)
	i := &instance{url: fmt.Sprintf("http://127.0.0.1:%d/", port), client: &http.Client{Transport: &http.Transport{}, Timeout: 20 * time.Second}}
	t.Cleanup(i.client.CloseIdleConnections)
	i.process = startCaddyWith(t, "rate_limit {\n"+option+"\n}\n", fmt.Sprintf("http://:%d {\n rate_limit {\n%s\n}\n respond ok\n}\n", port, zones), env...)
	return i
}

func (i *instance) ask(header ...string) answer {
	i.t.Helper()
	resp, body := get(i.t, i.client, i.url, header...)
	return answer{resp, body}
}

// counts asks until nothing is left, and wants that to be after n requests.
func (i *instance) counts(n int, zone string, header ...string) {
	i.t.Helper()
	for left := n - 1; left >= 0; left-- {
		if a := i.ask(header...); a.StatusCode != 200 || a.left(zone) != left {
			i.t.Fatalf("%d left of %s, want %d: %s %v", a.left(zone), zone, left, a.Status, a.Header)
		}
	}
	if a := i.ask(header...); a.StatusCode != 429 {
		i.t.Errorf("not refused: %s %v", a.Status, a.Header)
	}
}

func TestUnixSocket(t *testing.T) {
	t.Parallel()
	r := redistest.Start(t)
	for n, address := range []string{r.Socket, "unix://" + r.Socket + "?db=2"} {
		i := startInstance(t, "redis "+address+" {\n"+patient+"\n}", "zone z 3/1h")
		i.counts(3, "z")
		r.Do("select", 0)
		if keys, _ := r.Do("info", "keyspace").(string); !strings.Contains(keys, fmt.Sprintf("db%d:", 2*n)) {
			t.Errorf("%s: keyspace %q", address, keys)
		}
	}
}

// TLS and a password, from the environment and from a file; a changed file counts at the next
// reload. None of it is logged.
func TestTLSAndPassword(t *testing.T) {
	t.Parallel()
	cert, key, pool := redistest.Certificate(t, "redis.example")
	r := redistest.StartWith(t, redis.Options{Password: secretOf, TLSConfig: trusting(pool)}, "--port", "0", "--tls-port", "{port}",
		"--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients", "no", "--requirepass", secretOf)
	file := filepath.Join(t.TempDir(), "password")
	if err := os.WriteFile(file, []byte("an old one"), 0o600); err != nil {
		t.Fatal(err)
	}
	const encrypt = "\n tls {\n ca {env.SLUICE_TEST_CA}\n server_name redis.example\n}\n"
	env := []string{"SLUICE_TEST_CA=" + cert, "SLUICE_TEST_PASSWORD=" + secretOf}
	i := startInstance(t, "redis "+r.Addr+" {\n"+patient+"\n password {env.SLUICE_TEST_PASSWORD}"+encrypt+"}", "zone z 3/1h", env...)
	i.counts(3, "z")

	j := startInstance(t, "redis "+r.Addr+" {\n"+patient+"\n password {file."+file+"}"+encrypt+"}", "zone z 5/1h", env...)
	eventually(t, 10*time.Second, "a line that the password is wrong", func() bool {
		return strings.Contains(j.log.String(), downLine) && strings.Contains(j.log.String(), `"wrongpass"`)
	})
	if err := os.WriteFile(file, []byte(secretOf), 0o600); err != nil {
		t.Fatal(err)
	}
	if status, body := j.reload(j.sites); status != 200 {
		t.Fatal(status, body)
	}
	// Caddy itself loses connections that are made while it reloads, with EOF or a reset, whatever the
	// handlers are. So the next request waits until one is answered.
	eventually(t, 10*time.Second, "an answer after the reload", func() bool {
		resp, err := j.client.Get(j.url)
		if err != nil {
			return false
		}
		return resp.Body.Close() == nil
	})
	eventually(t, 10*time.Second, "a decision by Redis", func() bool { return j.ask().left("z") <= 1 })
	for _, p := range []*process{i.process, j.process} {
		resp, config := get(t, http.DefaultClient, p.admin+"/config/")
		if resp.StatusCode != 200 || strings.Contains(config+p.log.String(), secretOf) {
			t.Error("the password is shown")
		}
	}
}

// F41: the sentinels elect a new master; what it knows still counts.
func TestSentinelFailover(t *testing.T) {
	t.Parallel()
	master := redistest.Start(t)
	replica := redistest.Start(t, "--replicaof", "127.0.0.1 "+master.Port)
	sentinel := redistest.StartSentinel(t, "limits", master)
	i := startInstance(t, "redis "+sentinel.Addr+" {\n mode sentinel\n master_name limits\n timeout 3s\n}", "zone z 100/1h {\n on_store_error deny\n}")
	if a := i.ask(); a.left("z") != 99 {
		t.Fatal(a.Status, a.Header)
	}
	eventually(t, 10*time.Second, "the sentinel knows the replica", func() bool {
		known, _ := sentinel.Do("sentinel", "replicas", "limits").([]any)
		return len(known) == 1
	})
	eventually(t, 10*time.Second, "the replica has the counter", func() bool {
		keys, _ := replica.Do("keys", "*:z:*").([]any)
		return len(keys) == 1
	})
	master.Kill()
	denied := 0
	eventually(t, 60*time.Second, "a decision by the new master", func() bool {
		a := i.ask()
		if a.StatusCode == 503 {
			denied++
			return false
		}
		if left := a.left("z"); left < 90 || left > 98 { // less than 98 if Redis has counted what timed out
			t.Errorf("%d left: %s", a.left("z"), a.Status)
		}
		return true
	})
	if denied == 0 {
		t.Error("nothing was denied while there was no master")
	}
	if log := i.log.String(); strings.Count(log, downLine) != 1 {
		t.Error("want one line that it went down")
	}
}

// The zones of one request live on several nodes of a cluster: all are charged, or none.
func TestClusterOfThree(t *testing.T) {
	t.Parallel()
	nodes := redistest.StartCluster(t, 3)
	i := startInstance(t, "redis "+nodes[0].Addr+" "+nodes[1].Addr+" {\n mode cluster\n"+patient+"\n}", `
		zone client 4/1h {
			key {header.X-Client}
		}
		zone site 30/1h {
			key everyone
		}
		zone tenant 20/1h {
			key {header.X-Tenant}
		}`)
	for client := range 5 { // their counters are spread over the nodes
		name := fmt.Sprint("client-", client)
		for n := range 4 {
			a := i.ask("X-Client", name, "X-Tenant", "t")
			if taken := client*4 + n + 1; a.StatusCode != 200 || a.left("client") != 3-n || a.left("site") != 30-taken || a.left("tenant") != 20-taken {
				t.Fatal(client, n, a.Status, a.Header)
			}
		}
		if a := i.ask("X-Client", name, "X-Tenant", "u"); a.StatusCode != 429 || !strings.Contains(a.body, `["client"]`) {
			t.Error(a.Status, a.Header, a.body)
		}
	}
	if a := i.ask("X-Client", "fresh", "X-Tenant", "t"); a.StatusCode != 429 || a.left("client") != 4 || !strings.Contains(a.body, `["tenant"]`) {
		t.Error("refused by the tenant's zone:", a.Status, a.Header, a.body)
	}
	a := i.ask("X-Client", "fresh", "X-Tenant", "u")
	if a.left("client") != 3 || a.left("tenant") != 19 || a.left("site") != 9 {
		t.Error("what refused requests took was not given back:", a.Header)
	}
	for _, node := range nodes {
		if keys, _ := node.Do("keys", "rate_limit:*").([]any); len(keys) == 0 {
			t.Errorf("no counter on %s", node.Addr)
		}
	}
}

// While Redis is down each of two instances allows half, or what fleet_size says.
func TestShareOfTheFleet(t *testing.T) {
	t.Parallel()
	r := redistest.Start(t)
	const zones = "zone z 20/1h"
	option := "redis " + r.Addr + " {\n" + patient + "\n}"
	a, b := startInstance(t, option, zones), startInstance(t, option, zones)
	configured := startInstance(t, "redis "+r.Addr+" {\n"+patient+"\n prefix alone\n}\nfleet_size 5", zones)
	a.ask()
	b.ask()
	// Both have announced themselves after both were there.
	since := time.Now().UnixMicro()
	eventually(t, 10*time.Second, "the instances know each other", func() bool {
		after, _ := r.Do("zcount", "rate_limit:{fleet}:instances", since, "+inf").(int64)
		all, _ := r.Do("zcard", "rate_limit:{fleet}:instances").(int64)
		return after == 2 && all == 2
	})
	r.Kill()
	for i, want := range map[*instance]int{a: 10, b: 10, configured: 4} {
		policy := fmt.Sprintf(`"z";q=%d;w=3600`, want)
		eventually(t, 10*time.Second, "the share", func() bool { return i.ask().Header.Get("Ratelimit-Policy") == policy })
		passed := 1
		for i.ask().StatusCode == 200 {
			passed++
		}
		if passed != want {
			t.Errorf("%d passed, want %d", passed, want)
		}
	}
}

// What an instance takes for the time changes nothing. It is a store in a bubble of its own, where
// it is the year 2000 until hours pass in no time; Redis is outside, with the other instance. (Go
// reads the clock without the C library, so that a whole process cannot be lied to as libfaketime
// does it.)
func TestClocksOfInstancesDoNotMatter(t *testing.T) {
	r := redistest.Start(t)
	limit, err := algorithms.Compile("z", algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: 40, Window: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(s *redisstore.Store) (out [1]algorithms.Outcome) {
		if err := s.Apply(t.Context(), []algorithms.Charge{{Key: "k", Limit: limit, Cost: 1}}, out[:]); err != nil {
			t.Fatal(err)
		}
		return out
	}
	open := func() *redisstore.Store {
		s, err := redisstore.New(redisstore.Options{Addrs: []string{r.Addr}, Timeout: 10 * time.Second, RefusedKeys: -1})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	here := open()
	defer here.Close()
	left := int64(40)
	for range 10 {
		if left--; ask(here)[0].Remaining != left {
			t.Fatalf("want %d left", left)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		there := open()
		defer there.Close()
		for range 30 {
			if time.Now().Year() != 2000 {
				t.Fatal(time.Now())
			}
			if left--; ask(there)[0].Remaining != left {
				t.Fatalf("want %d left", left)
			}
			time.Sleep(3 * time.Hour) // there, and nowhere else
		}
		if o := ask(there)[0]; o.OK || o.Retry > time.Hour || o.Retry < 50*time.Minute {
			t.Errorf("after %v: %+v", time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)), o)
		}
	})
	for range 2 { // the second time a sync.Pool loses what it was given, and what was made in a bubble must not leave it
		runtime.GC()
	}
	if o := ask(here)[0]; o.OK {
		t.Errorf("%+v", o)
	}
}
