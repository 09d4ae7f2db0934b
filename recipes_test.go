package sluice_test

// The recipes in docs/ do what they claim: each page's own Caddyfile is loaded, in front of an
// upstream outside of Caddy.

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// block is a page's n-th Caddyfile.
func block(t *testing.T, page string, n int) string {
	t.Helper()
	if page != "README.md" {
		page = "docs/" + page
	}
	content, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	blocks := fence.FindAllSubmatch(content, -1)
	if len(blocks) <= n {
		t.Fatalf("%s has %d Caddyfiles", page, len(blocks))
	}
	return string(blocks[n][1])
}

// recipe returns a page's n-th Caddyfile with the upstream in place of app:8080, and further texts
// replaced by pairs. What is only a directive gets a site around it, what is only options a site
// behind them.
func recipe(t *testing.T, page string, n int, dial string, changes ...string) string {
	t.Helper()
	config := block(t, page, n)
	switch {
	case strings.HasPrefix(config, "rate_limit"):
		config = "example.com {\n" + config + "reverse_proxy app:8080\n}\n"
	case !strings.Contains(config, "example.com {"):
		config += "example.com {\nrate_limit 2/1h\nreverse_proxy app:8080\n}\n"
	}
	changes = append(changes, "app:8080", dial)
	for i := 0; i < len(changes); i += 2 {
		if !strings.Contains(config, changes[i]) {
			t.Fatalf("%s, Caddyfile %d: no %q", page, n, changes[i])
		}
		config = strings.ReplaceAll(config, changes[i], changes[i+1])
	}
	return config
}

// counting makes the zones of a recipe count on the stage, and its requests be waited for.
func (st *stage) counting(config string) string {
	config = strings.Replace(config, "example.com {", "example.com {\n\ttracked", 1)
	if options, found := strings.CutPrefix(config, "{\n"); found {
		return "{\n" + st.globals() + options
	}
	return "{\n" + st.globals() + "}\n" + config
}

// at asks the site of the recipes.
func at(header ...string) []string { return append(header, "Host", "example.com") }

// post sends a body to the site of the recipes.
func (s *server) post(path, body string, header ...string) answer {
	s.t.Helper()
	a, err := s.ask(s.t.Context(), http.MethodPost, path, strings.NewReader(body), at(header...)...)
	if err != nil {
		s.t.Fatal(err)
	}
	return a
}

// statuses asks and checks what comes back, in order.
func statuses(t *testing.T, want []int, ask func() answer) (last answer) {
	t.Helper()
	for i, status := range want {
		if last = ask(); last.StatusCode != status {
			t.Fatalf("request %d: %s %v %s; want %d", i+1, last.Status, last.Header, last.body, status)
		}
	}
	return last
}

// loginSite answers 401 to a wrong password. It counts the attempts that reach it.
func loginSite(attempts *atomic.Int64) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		attempts.Add(1)
		if r.FormValue("password") != "right" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	}
}

// G20: what frameworks serve as /login is counted as /login.
func TestRecipeLoginCatchesOtherSpellings(t *testing.T) {
	var attempts atomic.Int64
	s := serve(t, recipe(t, "login.md", 0, upstream(t, loginSite(&attempts))))
	for i, path := range []string{"/login/", "/login/x", "/login;x", "/login%2f", "//LOGIN", "/login"} {
		want := map[bool]int{true: 401, false: 429}[i < 5]
		if a := s.post(path, "user=bob&password=wrong", "Content-Type", "application/x-www-form-urlencoded"); a.StatusCode != want {
			t.Errorf("%s: %s, want %d", path, a.Status, want)
		}
	}
}

// G19: the pattern for JSON that the page names tells users apart.
func TestRecipeLoginReadsJSON(t *testing.T) {
	page, err := os.ReadFile("docs/login.md")
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile("For JSON the line is `` (.*) ``").FindSubmatch(page)
	if line == nil {
		t.Fatal("the page names no pattern for JSON")
	}
	dial := upstream(t, func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
	s := serve(t, recipe(t, "login.md", 0, dial, "~(?:^|&)user=([^&]*) ${1}", string(line[1])))
	wrong := func(user string) func() answer {
		return func() answer {
			return s.post("/login", `{"password": "wrong", "user" : "`+user+`"}`, "Content-Type", "application/json")
		}
	}
	statuses(t, []int{401, 401, 401, 401, 401, 429}, wrong("bob"))
	statuses(t, []int{401}, wrong("ann"))
}

func TestRecipeLogin(t *testing.T) {
	c := useClock(t)
	var attempts atomic.Int64
	behindCDN := "{\n\tservers {\n\t\ttrusted_proxies static 127.0.0.0/8\n\t\ttrusted_proxies_strict\n\t}\n"
	s := serve(t, recipe(t, "login.md", 0, upstream(t, loginSite(&attempts)), "{\n\tlog rate_limit", behindCDN+"\tlog rate_limit"))
	login := func(user, password, ip string) func() answer {
		return func() answer {
			return s.post("/login", "user="+user+"&password="+password, "Content-Type", "application/x-www-form-urlencoded", "X-Forwarded-For", ip)
		}
	}
	statuses(t, []int{200, 200, 200, 200, 200, 200, 200}, login("bob", "right", "1.1.1.1")) // successes are free
	if a := statuses(t, []int{401, 401, 401, 401, 401}, login("bob", "wrong", "1.1.1.1")); a.left("login") != 0 || a.left("login_address") != 45 {
		t.Error(a.Header)
	}
	reached := attempts.Load()
	if a := statuses(t, []int{429}, login("bob", "right", "1.1.1.1")); s.wait(a) != 900 || !strings.Contains(a.body, "quota-exceeded") {
		t.Error(a.Header, a.body)
	}
	if attempts.Load() != reached {
		t.Error("a refused attempt reached the app")
	}
	statuses(t, []int{200}, login("bob", "right", "2.2.2.2"))
	statuses(t, []int{200}, login("ann", "right", "1.1.1.1"))
	statuses(t, []int{429}, login("bob", "right", "6.6.6.6, 1.1.1.1")) // what a client writes before the CDN does

	// The tenth strike within an hour is the ban.
	a := statuses(t, []int{429, 429, 429}, login("bob", "wrong", "1.1.1.1"))
	if !strings.Contains(a.body, "abnormal-usage-detected") || s.wait(a) != 900 {
		t.Error(a.Header, a.body)
	}
	checkFilters(t, "1.1.1.1")
	if n := s.metric(`caddy_rate_limit_bans_total{zone="login"}`); n != 1 {
		t.Errorf("%v bans", n)
	}
	c.add(15 * time.Minute) // and no more, though the client has asked meanwhile
	statuses(t, []int{200}, login("bob", "right", "1.1.1.1"))

	// One password for many users is what the zone per address is for.
	for i := range 50 {
		statuses(t, []int{401}, login(fmt.Sprint("user", i), "wrong", "3.3.3.3"))
	}
	if a := statuses(t, []int{429}, login("user50", "wrong", "3.3.3.3")); !strings.Contains(a.body, `["login_address"]`) {
		t.Error(a.body)
	}
	if a := s.post("/login", strings.Repeat("x", 20_000)); a.StatusCode != http.StatusRequestEntityTooLarge {
		t.Error(a.Status)
	}
}

// The failures of a fleet count in Redis, and without it nobody logs in.
func TestRecipeLoginShared(t *testing.T) {
	redis := redistest.Start(t)
	option := "redis " + redis.Addr + " {\n" + patient + "\n}\n}\nservers {\ntrusted_proxies static 127.0.0.0/8\n}\n"
	s := serve(t, recipe(t, "login.md", 3, upstream(t, loginSite(new(atomic.Int64))),
		"redis redis.internal:6379\n\t}\n", option, "50/15m", "5/15m", "60/1h", "8/1h"))
	login := func(password, ip string) func() answer {
		return func() answer {
			return s.post("/login", "user=bob&password="+password, "Content-Type", "application/x-www-form-urlencoded", "X-Forwarded-For", ip)
		}
	}
	statuses(t, []int{401, 401, 401, 401, 401, 429, 429}, login("wrong", "1.1.1.1"))
	eventually(t, 10*time.Second, "the eighth strike is the ban", func() bool { // in Redis the last failure may still be pending
		a := statuses(t, []int{429}, login("right", "1.1.1.1"))
		return strings.Contains(a.body, "abnormal-usage-detected") && s.wait(a) == 3600
	})
	asked := decisions(redis)
	statuses(t, []int{429, 429, 429}, login("right", "1.1.1.1"))
	if n := decisions(redis); n != asked {
		t.Errorf("a banned client cost %d trips to Redis", n-asked)
	}
	statuses(t, []int{200}, login("right", "2.2.2.2"))
	redis.Kill()
	if a := statuses(t, []int{503}, login("right", "2.2.2.2")); s.wait(a) < 1 {
		t.Error(a.Header)
	}
	statuses(t, []int{429}, login("right", "1.1.1.1")) // a ban that is known holds
}

var failregex = regexp.MustCompile(`(?m)^failregex += (.*)$`)

// checkFilters reads the ban's line as fail2ban does, with the page's filters.
func checkFilters(t *testing.T, client string) {
	t.Helper()
	page, err := os.ReadFile("docs/login.md")
	if err != nil {
		t.Fatal(err)
	}
	filters := failregex.FindAllSubmatch(page, -1)
	if len(filters) != 2 {
		t.Fatalf("%d filters", len(filters))
	}
	for i, want := range []string{"127.0.0.1", client} { // the connection's address, and the client's
		filter := regexp.MustCompile(strings.ReplaceAll(string(filters[i][1]), "<HOST>", `([0-9a-fA-F.:]+)`))
		found := filter.FindAllStringSubmatch(processLog.String(), -1)
		if len(found) != 1 || found[0][1] != want {
			t.Errorf("%s found %q; want one, %s", filter, found, want)
		}
	}
}

// An app that answers every attempt with 200 or a redirect.
func TestRecipeLoginByRedirect(t *testing.T) {
	s := serve(t, recipe(t, "login.md", 0, upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.FormValue("password") == "right" {
			http.Redirect(w, r, "/", http.StatusSeeOther)
		}
	}), "count status 401", "count not_status 302 303"))
	ask := func(password string) func() answer {
		return func() answer {
			return s.post("/login", "user=bob&password="+password, "Content-Type", "application/x-www-form-urlencoded")
		}
	}
	statuses(t, []int{303, 303, 303, 303, 303, 303}, ask("right"))
	statuses(t, []int{200, 200, 200, 200, 200, 429}, ask("wrong"))
	statuses(t, []int{429}, ask("right"))
}

// planOf is an auth service that knows who has which plan; it says nothing of one user's.
func planOf(w http.ResponseWriter, r *http.Request) {
	user, ok := map[string][2]string{"k1": {"alice", "pro"}, "k2": {"bob", ""}, "k3": {"ops", "staff"}, "k4": {"bob", "pro"}}[r.Header.Get("X-API-Key")]
	if !ok {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	w.Header().Set("X-User", user[0])
	if user[1] != "" {
		w.Header().Set("X-Plan", user[1])
	}
}

func TestRecipePlans(t *testing.T) {
	auth, app := upstream(t, planOf), upstream(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.Header.Get("X-Quota-Left"))
	})
	useClock(t)
	s := serve(t, recipe(t, "plans.md", 0, app, "auth:9091", auth))
	if a := s.get("/", at("X-API-Key", "k1")...); a.StatusCode != 200 || a.left("api.pro.1m") != 99 || a.left("api.pro.1h") != 9999 || a.left("address") != 299 || a.body != "99" {
		t.Error(a.Status, a.Header, a.body)
	}
	if a := s.get("/", at("X-API-Key", "k3")...); a.StatusCode != 200 || a.left("api.staff") != -1 || a.left("address") != 298 {
		t.Error("unlimited:", a.Status, a.Header)
	}
	if a := s.get("/", at("X-API-Key", "k0")...); a.StatusCode != 401 || a.left("address") != 297 {
		t.Error(a.Status, a.Header)
	}
	for range 15 { // whatever the client says of its plan
		if a := s.get("/", at("X-API-Key", "k2", "X-Plan", "staff", "X-User", "alice")...); a.StatusCode != 200 || a.left("api.default.1m") < 5 {
			t.Fatal(a.Status, a.Header)
		}
	}
	if a := s.get("/", at("X-API-Key", "k4")...); a.left("api.pro.1m") != 84 || a.left("api.pro.1h") != 9984 {
		t.Error("after a change of plan:", a.Header)
	}
}

// G21. Staff have no quota, and the zone per address in front of the auth service, where nobody
// knows who is staff.
func TestRecipePlansOfStaff(t *testing.T) {
	useClock(t)
	auth := upstream(t, planOf)
	s := serve(t, recipe(t, "plans.md", 0, upstream(t, ok), "auth:9091", auth, "300/1m", "30/1m", "20/1m 1000/1h", "2/1m 1000/1h"))
	for range 30 {
		statuses(t, []int{200}, func() answer { return s.get("/", at("X-API-Key", "k3")...) })
	}
	if a := s.get("/", at("X-API-Key", "k3")...); a.StatusCode != 429 || !strings.Contains(a.body, `["address"]`) {
		t.Error(a.Status, a.body)
	}
}

func TestRecipeListOfKeys(t *testing.T) {
	useClock(t)
	t.Setenv("KEY_ALICE", "secret")
	s := serve(t, recipe(t, "plans.md", 2, upstream(t, func(http.ResponseWriter, *http.Request) {})))
	for i, want := range []struct{ key, policy string }{{"secret", "api.pro.1m"}, {"k2", "api.free.1m"}, {"k1", "api.default"}, {"", "api.default"}} {
		left := map[string]int{"api.pro.1m": 99, "api.free.1m": 19, "api.default": 19}[want.policy]
		if i == 3 {
			left-- // who has no key counts by address, as who has a wrong one does
		}
		if a := s.get("/", at("X-API-Key", want.key)...); a.StatusCode != 200 || a.left(want.policy) != left || a.left("address") != 299-i {
			t.Errorf("%q: %s %v", want.key, a.Status, a.Header)
		}
	}
}

// notesArrival is an app that notes when requests come.
func notesArrival(came chan<- time.Time) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		came <- time.Now()
		io.Copy(io.Discard, r.Body)
	}
}

func TestRecipeFragileBackend(t *testing.T) { onStores(t, testRecipeFragileBackend) }

func testRecipeFragileBackend(t *testing.T, st *stage) {
	came := make(chan time.Time, 100)
	s := serve(t, st.counting(recipe(t, "fragile-backend.md", 0, upstream(t, notesArrival(came)), "queue 30", "queue 5")))
	const clients = 60 // far more than there is room for until the last of them is there
	start := time.Now()
	var answers [clients]<-chan *answer
	for i := range answers {
		answers[i] = s.send(t.Context(), "/", at()...)
	}
	count := map[int]int{}
	for _, came := range answers {
		if a := <-came; a != nil {
			count[a.StatusCode]++
		}
	}
	if count[200] < 6 || count[429] < 1 || count[200]+count[429] != clients {
		t.Error(count)
	}
	for i := range count[200] { // late on a busy machine, but never early
		if after := (<-came).Sub(start); after < time.Duration(i)*100*time.Millisecond-time.Millisecond {
			t.Errorf("request %d came after %v", i, after)
		}
	}
	if n := s.metric(`caddy_rate_limit_delay_seconds_count{zone="backend"}`); n < 5 {
		t.Errorf("%v delayed", n)
	}
	if n := s.metric(`caddy_rate_limit_waiting{zone="backend"}`); n != 0 {
		t.Errorf("%v wait", n)
	}
}

// A client that leaves makes room for another.
func TestRecipeFragileBackendLeaver(t *testing.T) {
	onStores(t, testRecipeFragileBackendLeaver)
}

func testRecipeFragileBackendLeaver(t *testing.T, st *stage) {
	came := make(chan time.Time, 100)
	s := serve(t, st.counting(recipe(t, "fragile-backend.md", 0, upstream(t, notesArrival(came)), "backend 10/s", "backend 1/1h", "queue 30 max_wait 3s", "queue 1")))
	wait := func() (leave func()) {
		ctx, cancel := context.WithCancel(t.Context())
		came := s.waits(ctx, "backend", 1, at()...)
		return func() {
			cancel()
			if a := <-came; a != nil {
				t.Error("who should have waited got", a.Status)
			}
		}
	}
	none := func() {
		t.Helper()
		eventually(t, 10*time.Second, "nobody waits", func() bool { return s.waitingIn("backend") == 0 })
	}
	s.pass(1, "/", at()...)
	leave := wait()
	s.refused("/", at()...)
	leave()
	none()
	leave = wait()
	leave()
	none()
	if len(came) != 1 {
		t.Errorf("%d requests came to the backend", len(came))
	}
}

// Who waits is not among those that are at the backend.
func TestRecipeFragileBackendAtOnce(t *testing.T) {
	onStores(t, testRecipeFragileBackendAtOnce)
}

func testRecipeFragileBackendAtOnce(t *testing.T, st *stage) {
	began, release := make(chan struct{}, 10), make(chan struct{})
	s := serve(t, st.counting(recipe(t, "fragile-backend.md", 1, upstream(t, func(http.ResponseWriter, *http.Request) {
		began <- struct{}{}
		<-release
	}), "concurrency 20", "concurrency 2", "10/s", "50/s")))
	first, second := s.send(t.Context(), "/", at()...), s.send(t.Context(), "/", at()...)
	<-began
	<-began
	if a := s.get("/", at()...); a.StatusCode != 429 || s.wait(a) != 5 || a.left("backend_busy") != 0 {
		t.Error(a.Status, a.Header)
	}
	close(release)
	for _, came := range []<-chan *answer{first, second} {
		if a := <-came; a == nil || a.StatusCode != 200 {
			t.Error(a)
		}
	}
	eventually(t, 10*time.Second, "a lease comes back", func() bool { return s.get("/", at()...).StatusCode == 200 })
}

func TestRecipeExports(t *testing.T) { onStores(t, testRecipeExports) }

func testRecipeExports(t *testing.T, st *stage) {
	s := serve(t, st.counting(recipe(t, "exports.md", 0, upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "" {
			conn, buf, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			fmt.Fprint(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
			buf.ReadString('\n')
			return
		}
		w.(http.Flusher).Flush()
		if r.URL.Path == "/export/long" {
			<-r.Context().Done()
		}
	}))))
	export := func() *http.Response {
		req, _ := http.NewRequest(http.MethodGet, "http://"+s.addr()+"/export/long", nil)
		req.Host, req.Header = "example.com", http.Header{"X-Account": {"acme"}}
		resp, err := s.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	first, second := export(), export()
	defer second.Body.Close()
	a := s.get("/export/short", at("X-Account", "acme")...)
	if a.StatusCode != 429 || s.wait(a) != 30 || a.left("exports.concurrent") != 0 || a.left("exports.1d") != 18 || !strings.Contains(a.body, `["exports.concurrent"]`) {
		t.Error(a.Status, a.Header, a.body)
	}
	if a := s.get("/export/short", at("X-Account", "other")...); a.StatusCode != 200 {
		t.Error(a.Status)
	}
	first.Body.Close() // the client leaves
	eventually(t, 10*time.Second, "a lease comes back", func() bool {
		a = s.get("/export/short", at("X-Account", "acme")...)
		return a.StatusCode == 200
	})
	if a.left("exports.1d") != 17 { // what was refused for want of a lease does not count
		t.Error(a.Header)
	}

	live := func() (net.Conn, int) {
		conn, err := net.Dial("tcp", s.addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		fmt.Fprint(conn, "GET /live/1 HTTP/1.1\r\nHost: example.com\r\nX-Account: acme\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil || (answer{Response: resp}).left("live") != 0 {
			t.Fatal(resp, err)
		}
		return conn, resp.StatusCode
	}
	conn, status := live()
	if _, second := live(); status != 101 || second != 429 {
		t.Error(status, second)
	}
	conn.Close()
	eventually(t, 10*time.Second, "the WebSocket's lease comes back", func() bool {
		_, status := live()
		return status == 101
	})
}

// modelServer answers what the request asks it to have cost, in a header or, for streams, in a
// trailer.
func modelServer(w http.ResponseWriter, r *http.Request) {
	tokens := r.Header.Get("X-Cost")
	if r.URL.Path != "/v1/stream" {
		w.Header().Set("X-Tokens-Used", tokens)
		return
	}
	w.Header().Set("Trailer", "X-Tokens-Used")
	fmt.Fprint(w, "data: 1\n\n")
	w.(http.Flusher).Flush()
	w.Header().Set("X-Tokens-Used", tokens)
}

func TestRecipeModelGateway(t *testing.T) {
	c := useClock(t)
	s := serve(t, recipe(t, "model-gateway.md", 0, upstream(t, modelServer)))
	ask := func(path, tokens string) answer {
		return s.post(path, "{}", "Authorization", "Bearer k1", "X-Cost", tokens)
	}
	left := func(want int) {
		t.Helper()
		if a := ask("/v1/chat", "0"); a.left("tokens.1m") != want-500 { // the reservation, which is then given back
			t.Fatalf("%d left before the request, want %d", a.left("tokens.1m")+500, want)
		}
	}
	left(30000)
	ask("/v1/chat", "700")
	left(29300)
	ask("/v1/chat", "10")
	left(29290)
	ask("/v1/stream", "2000") // in a trailer
	left(27290)
	ask("/v1/chat", "") // it does not say
	left(26790)
	if a := ask("/v1/chat", "40000"); a.StatusCode != 200 {
		t.Error(a.Status)
	}
	a := ask("/v1/chat", "1") // in debt by 13210, and 500 to reserve
	if a.StatusCode != 429 || s.wait(a) != 14 || !strings.Contains(a.body, `["tokens.1m"]`) {
		t.Error(a.Status, a.Header, a.body)
	}
	c.add(13710 * time.Millisecond)
	if a := ask("/v1/chat", "1"); a.StatusCode != 200 {
		t.Error(a.Status, a.Header)
	}
}

// What clients are not to see can be charged all the same.
func TestRecipeModelGatewayHidden(t *testing.T) {
	useClock(t)
	s := serve(t, recipe(t, "model-gateway.md", 0, upstream(t, modelServer)+" {\nheader_down -X-Tokens-Used\n}",
		"{http.response.header.X-Tokens-Used}", "{http.reverse_proxy.header.X-Tokens-Used}"))
	for _, left := range []int{29500, 22500} {
		if a := s.post("/v1/chat", "{}", "Authorization", "Bearer k1", "X-Cost", "7000"); a.left("tokens.1m") != left || a.Header.Get("X-Tokens-Used") != "" {
			t.Error(a.Header)
		}
	}
}

// H04: the spellings of one token are one client.
func TestRecipeModelGatewayKnowsOneToken(t *testing.T) {
	useClock(t)
	s := serve(t, recipe(t, "model-gateway.md", 0, upstream(t, modelServer)))
	for i, spelling := range []string{"Bearer k1", "bearer k1", "BEARER  k1", " Bearer k1 "} {
		if a := s.post("/v1/chat", "{}", "Authorization", spelling, "X-Cost", "1000"); a.left("tokens.1m") != 29500-1000*i {
			t.Errorf("%q: %v", spelling, a.Header)
		}
	}
	for i, key := range []string{"k2", "k3"} {
		if a := s.post("/v1/chat", "{}", "Authorization", "Bearer "+key, "X-Cost", "1000"); a.left("tokens.1m") != 29500 {
			t.Error(a.Header)
		}
		if a := s.post("/v1/chat", "{}", "Authorization", "Bearer "+key, "Authorization", "Bearer k1", "X-Cost", "1000"); a.left("tokens.1m") != 29500-1000*i {
			t.Error("two tokens:", a.Header)
		}
	}
	if a := s.post("/v1/chat", "{}", "X-Cost", "1000"); a.left("tokens.1m") != 29500 {
		t.Error("no token:", a.Header)
	}
}

// Over an hour of a client that asks whenever it may, whatever its answers cost, the average is the
// quota.
func TestRecipeModelGatewayAverage(t *testing.T) {
	c := useClock(t)
	s := serve(t, recipe(t, "model-gateway.md", 0, upstream(t, modelServer)))
	random := rand.New(rand.NewPCG(4, 28))
	var used, last int
	for start := c.micros.Load(); c.micros.Load()-start < time.Hour.Microseconds(); {
		tokens := random.IntN(20_000)
		a := s.post("/v1/chat", "{}", "Authorization", "Bearer k1", "X-Cost", strconv.Itoa(tokens))
		switch a.StatusCode {
		case 200:
			used, last = used+tokens, tokens
		case 429:
			c.add(time.Duration(s.wait(a)) * time.Second)
		default:
			t.Fatal(a.Status)
		}
	}
	// A full burst to begin with, and the last answer may leave a debt. A client that is told whole
	// seconds loses nothing by them.
	if quota := 60 * 60_000; used > quota+30_000+last || used < quota {
		t.Errorf("%d tokens in an hour; the quota is %d", used, quota)
	}
}

func TestRecipeRollout(t *testing.T) { onStores(t, testRecipeRollout) }

func testRecipeRollout(t *testing.T, st *stage) {
	app := upstream(t, func(http.ResponseWriter, *http.Request) {})
	step := func(n int, changes ...string) string {
		return st.counting(recipe(t, "rollout.md", n, app, append(changes, "api 1000/1h", "api 3/1h")...))
	}
	s := serve(t, step(0))
	round := func() (refused map[string]bool) {
		refused = map[string]bool{}
		for key := range 40 {
			for range 5 {
				switch a := s.get("/", at("X-API-Key", fmt.Sprint("k", key))...); a.StatusCode {
				case 429:
					refused[fmt.Sprint("k", key)] = true
				case 200:
					if refused[fmt.Sprint("k", key)] {
						t.Errorf("k%d passed after it was refused", key)
					}
				}
			}
		}
		return refused
	}
	if refused := round(); len(refused) > 0 || s.decided("api", "rejected_dry_run") != 80 || s.decided("api", "passed_dry_run") != 120 {
		t.Errorf("%v, %s", refused, s.metrics())
	}
	if lines := logged(t, "request would have been refused (dry run)"); len(lines) == 0 || !strings.HasPrefix(fmt.Sprint(lines[0]["key"]), "k") {
		t.Error(lines)
	}
	if lines := logged(t, "handled request"); len(lines) != 200 || lines[4]["quota"] != "rejected_dry_run" || lines[0]["quota"] != "passed_dry_run" {
		t.Errorf("%d lines, %v", len(lines), lines[:min(5, len(lines))])
	}
	if a := s.get("/", at("X-API-Key", "k0")...); a.left("api") != -1 {
		t.Error("a dry run sends fields:", a.Header)
	}
	var before map[string]bool
	for _, percent := range []string{"10%", "50%", "100%", "0%"} {
		s.mustLoad(step(1, "enforce 10%", "enforce "+percent))
		refused := round()
		if share := map[string]int{"10%": 4, "50%": 20, "100%": 40, "0%": 0}[percent]; max(len(refused)-share, share-len(refused)) > 10 {
			t.Errorf("enforce %s: %d of 40 keys", percent, len(refused))
		}
		for key := range before {
			if percent != "0%" && !refused[key] {
				t.Errorf("enforce %s: %s is free again", percent, key)
			}
		}
		before = refused
	}
	if len(before) != 0 {
		t.Errorf("enforce 0%%: %v", before)
	}
}

// Two limits on the same requests: what the one refuses takes nothing from the other.
func TestRecipeComparing(t *testing.T) {
	s := serve(t, recipe(t, "rollout.md", 2, upstream(t, func(http.ResponseWriter, *http.Request) {}), "api 1000/1h", "api 4/1h", "api_next 600/1h", "api_next 2/1h"))
	s.pass(4, "/", at("X-API-Key", "k")...)
	s.refused("/", at("X-API-Key", "k")...)
	for series, want := range map[string]float64{
		`result="rejected",store="local",zone="api"`: 1, `result="passed_dry_run",store="local",zone="api_next"`: 2,
		`result="rejected_dry_run",store="local",zone="api_next"`: 3,
	} {
		if n := s.metric("caddy_rate_limit_decisions_total{" + series + "}"); n != want {
			t.Errorf("%s: %v, want %v", series, n, want)
		}
	}
}
