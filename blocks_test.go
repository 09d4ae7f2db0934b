package sluice_test

// Every block of Caddyfile in README and docs shows what its page says of it, with requests. The
// recipes' own tests are in recipes_test.go; here is the list of all, and what the short blocks
// claim.

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// shownBy names the test of each block, by its page and number there.
var shownBy = map[string]string{
	"README.md 0": "TestBlockFirstLimit", "README.md 1": "TestBlockHeaders", "README.md 2": "TestBlockKeys", "README.md 3": "TestBlockUsers",
	"README.md 4": "TestBlockSeveralZones", "README.md 5": "TestBlockRedis", "README.md 6": "TestBlockPageForPeople",
	"api.md 0": "TestBlockCosts", "api.md 1": "TestBlockBrowsers", "api.md 2": "TestBlockGRPC", "api.md 3": "TestBlockFailuresWeigh", "api.md 4": "TestBlockLocation",
	"exports.md 0": "TestRecipeExports", "exports.md 1": "TestBlockExportsShared",
	"fragile-backend.md 0": "TestRecipeFragileBackend", "fragile-backend.md 1": "TestRecipeFragileBackendAtOnce",
	"login.md 0": "TestRecipeLogin", "login.md 1": "TestBlockBasicAuth", "login.md 2": "TestBlockBehindCDN", "login.md 3": "TestRecipeLoginShared",
	"migrating.md 0": "TestBlockRedisPassword", "migrating.md 1": "TestBlockNGINX",
	"model-gateway.md 0": "TestRecipeModelGateway",
	"plans.md 0":         "TestRecipePlans", "plans.md 1": "TestBlockPlanOfToken", "plans.md 2": "TestRecipeListOfKeys",
	"redis.md 0":     "TestBlockRedis",
	"reference.md 0": "", "reference.md 1": "TestBlockPlans", "reference.md 2": "", // these describe the grammar
	"rollout.md 0": "TestRecipeRollout", "rollout.md 1": "TestRecipeRollout", "rollout.md 2": "TestRecipeComparing",
	"website.md 0": "TestBlockWebsite",
}

func TestEveryBlockShowsItsClaim(t *testing.T) {
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	source := ""
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		source += string(text)
	}
	left := map[string]bool{}
	for name := range shownBy {
		left[name] = true
	}
	for _, page := range pages(t) {
		content, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for n, found := range fence.FindAllSubmatch(content, -1) {
			name := fmt.Sprintf("%s %d", filepath.Base(page), n)
			delete(left, name)
			switch test, listed := shownBy[name]; {
			case !listed:
				t.Errorf("%s: no test shows what this block claims:\n%s", name, found[1])
			case test == "" && !isGrammar(string(found[1])):
				t.Errorf("%s is a config, and needs a test", name)
			case test != "" && !regexp.MustCompile(`(?m)^func `+test+`\(t \*testing\.T\)`).MatchString(source):
				t.Errorf("%s: there is no %s", name, test)
			}
		}
	}
	if len(left) > 0 {
		t.Error("there are no blocks", left)
	}
}

func ok(http.ResponseWriter, *http.Request) {}

func TestBlockFirstLimit(t *testing.T) {
	useClock(t)
	s := serve(t, recipe(t, "README.md", 0, upstream(t, ok)))
	for left := 99; left >= 0; left-- {
		if a := s.get("/", at()...); a.StatusCode != 200 || a.left("zone_1") != left {
			t.Fatal(a.Status, a.Header)
		}
	}
	if a := s.get("/", at()...); a.StatusCode != 429 || a.Header.Get("Retry-After") == "" {
		t.Error(a.Status, a.Header)
	}
}

// Each line of README's table of headers, in place of the one in its block.
func TestBlockHeaders(t *testing.T) {
	dial := upstream(t, ok)
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"ietf": "Ratelimit", "draft6": "Ratelimit-Limit", "x epoch": "X-Ratelimit-Limit", "x": "X-Ratelimit-Limit", "x delta": "X-Ratelimit-Limit", "off": ""}
	for value, field := range want {
		if !strings.Contains(string(text), "`"+value+"`") {
			t.Errorf("README does not speak of headers %s", value)
		}
		s := serve(t, recipe(t, "README.md", 1, dial, "headers draft6", "headers "+value, "100/1m", "1/1h"))
		a, refused := s.get("/", at()...), s.get("/", at()...)
		for _, other := range want {
			if other != "" && (a.Header[other] != nil) != (other == field) {
				t.Errorf("%q: %v", value, a.Header)
			}
		}
		if refused.StatusCode != 429 || refused.Header.Get("Retry-After") == "" {
			t.Errorf("%q: %s %v", value, refused.Status, refused.Header)
		}
		var reset int
		_, _ = fmt.Sscan(a.Header.Get("X-Ratelimit-Reset"), &reset)
		if epoch := reset > 1e9; epoch != (value == "x" || value == "x epoch") {
			t.Errorf("%q: X-RateLimit-Reset %d", value, reset)
		}
	}
}

func TestBlockKeys(t *testing.T) {
	parts := directives(block(t, "README.md", 2))
	dial := upstream(t, ok)
	site := func(directive string) *server {
		return serve(t, "{\nservers {\ntrusted_proxies static 127.0.0.0/8\n}\n}\nexample.com {\n"+directive+"reverse_proxy "+dial+"\n}")
	}
	s := site(parts[0])
	for i, key := range []string{"a", "a", "b"} {
		if a := s.get("/", at("X-API-Key", key)...); !strings.Contains(a.Header.Get("RateLimit"), fmt.Sprintf("r=%d;", []int{999, 998, 999}[i])) {
			t.Error(key, a.Header)
		}
	}
	s = site(parts[1])
	export := func(path string, header ...string) int { return s.get(path, at(header...)...).left("exports") }
	for i, test := range []struct {
		path   string
		header []string
		left   int
	}{
		{"/export/x", []string{"X-Account", "a"}, 4},
		{"/export/x?format=csv", []string{"X-Account", "a"}, 4}, // another counter
		{"/export/x", []string{"X-Account", "a"}, 3},
		{"/export/x?format=b", []string{"X-Account", ""}, 4},
		{"/export/x", []string{"X-Account", "b"}, 4},             // joined it would be the same text
		{"/export/x", []string{"X-Forwarded-For", "1.1.1.1"}, 4}, // by address
		{"/export/x", []string{"X-Forwarded-For", "1.1.1.1"}, 3},
		{"/export/x", []string{"X-Forwarded-For", "10.1.2.3", "X-Account", "a"}, -1}, // exempt
		{"/other", []string{"X-Account", "a"}, -1},
	} {
		if left := export(test.path, test.header...); left != test.left {
			t.Errorf("request %d: %d left, want %d", i, left, test.left)
		}
	}
}

func TestBlockUsers(t *testing.T) {
	s := serve(t, recipe(t, "README.md", 3, upstream(t, ok)))
	if a := s.get("/", at()...); a.StatusCode != 401 || a.Header.Get("RateLimit") != "" {
		t.Error(a.Status, a.Header)
	}
	for _, left := range []string{"r=999;", "r=998;"} {
		if a := s.get("/", at("Authorization", "Basic "+bob)...); a.StatusCode != 200 || !strings.Contains(a.Header.Get("RateLimit"), left) {
			t.Error(a.Status, a.Header)
		}
	}
}

func TestBlockSeveralZones(t *testing.T) {
	useClock(t)
	s := serve(t, recipe(t, "README.md", 4, upstream(t, ok)))
	if a := s.get("/", at("X-API-Key", "a")...); a.left("burst") != 9 || a.left("steady") != 999 || a.left("login") != -1 {
		t.Error(a.Header)
	}
	if a := s.post("/login", ""); a.left("burst") != 8 || a.left("login.15m") != 4 || a.left("login.1d") != 19 {
		t.Error(a.Header)
	}
	statuses(t, []int{200, 200, 200, 200, 429}, func() answer { return s.post("/login", "") })
}

// The zones of a config with the block count in Redis.
func TestBlockRedis(t *testing.T) {
	redis := redistest.Start(t)
	for _, where := range []struct {
		page string
		n    int
	}{{"README.md", 5}, {"redis.md", 0}} {
		config := recipe(t, where.page, where.n, upstream(t, ok), "redis redis.internal:6379", "redis "+redis.Addr+" {\n"+patient+"\n}")
		s := serve(t, config)
		first := s.get("/", at("X-API-Key", "shared")...)
		asked := decisions(redis)
		second := s.get("/", at("X-API-Key", "shared")...)
		if first.StatusCode != 200 || second.StatusCode != 200 || decisions(redis) == asked {
			t.Errorf("%s: %v, %v, %d decisions in Redis", where.page, first.Header, second.Header, decisions(redis)-asked)
		}
	}
}

func TestBlockPageForPeople(t *testing.T) {
	s := serve(t, recipe(t, "README.md", 6, upstream(t, ok), "100/1m", "1/1m"))
	s.get("/", at()...)
	a := s.get("/", at()...)
	if a.StatusCode != 429 || !strings.HasPrefix(a.Header.Get("Content-Type"), "text/html") || !strings.Contains(a.body, "come back in "+a.Header.Get("Retry-After")+" seconds") {
		t.Error(a.Status, a.Header, a.body)
	}
}

func TestBlockCosts(t *testing.T) {
	useClock(t)
	s := serve(t, recipe(t, "api.md", 0, upstream(t, ok)))
	key := at("X-API-Key", "k")
	left := 1000
	for _, step := range []struct {
		path string
		cost int
	}{{"/", 1}, {"/export/x", 20}, {"//export/x", 20}, {"/%65xport/x", 20}, {"/search", 1}} {
		left -= step.cost
		if a := s.get(step.path, key...); a.left("api") != left {
			t.Errorf("%s: %d left, want %d", step.path, a.left("api"), left)
		}
	}
	if a := s.post("/search", "", "X-API-Key", "k"); a.left("api") != left-5 {
		t.Errorf("search: %d left, want %d", a.left("api"), left-5)
	}
	for range 50 {
		s.get("/export/x", key...)
	}
	for s.get("/", key...).StatusCode == 200 {
	}
	if a := s.get("/quota", key...); a.StatusCode != 200 || !regexp.MustCompile(`^\{"limit":1000,"remaining":0,"reset":\d+\}$`).MatchString(a.body) {
		t.Error(a.Status, a.body)
	}
}

func TestBlockBrowsers(t *testing.T) {
	var reached atomic.Int64
	s := serve(t, recipe(t, "api.md", 1, upstream(t, func(http.ResponseWriter, *http.Request) { reached.Add(1) }), "600/1m", "1/1m"))
	for range 5 {
		a := s.do("OPTIONS", "/", at("Origin", "https://app.example.org", "Access-Control-Request-Method", "PUT")...)
		if a.StatusCode != 204 || a.Header.Get("Access-Control-Allow-Methods") == "" || a.Header.Get("Access-Control-Allow-Origin") != "https://app.example.org" {
			t.Error(a.Status, a.Header)
		}
	}
	last := statuses(t, []int{200, 429}, func() answer { return s.get("/", at("Origin", "https://app.example.org")...) })
	if last.Header.Get("Access-Control-Allow-Origin") != "https://app.example.org" || !strings.Contains(last.Header.Get("Access-Control-Expose-Headers"), "Retry-After") {
		t.Error(last.Header)
	}
	if reached.Load() != 1 {
		t.Errorf("%d requests reached the app, want 1", reached.Load())
	}
}

func TestBlockGRPC(t *testing.T) {
	s := serve(t, recipe(t, "api.md", 2, upstream(t, ok), "100/1s", "1/1h", "h2c://", ""))
	call := func(contentType string) answer {
		return s.post("/app.Service/Method", "", "Content-Type", contentType, "Authorization", "Bearer x")
	}
	statuses(t, []int{200}, func() answer { return call("application/grpc+proto") })
	if a := call("application/grpc+proto"); a.StatusCode != 200 || a.Header.Get("Grpc-Status") != "8" || a.body != "" || a.Header.Get("Content-Type") != "application/grpc" {
		t.Error(a.Status, a.Header, a.body)
	}
	if a := call("application/json"); a.StatusCode != 429 || a.Header.Get("Grpc-Status") != "" {
		t.Error(a.Status, a.Header)
	}
}

func TestBlockFailuresWeigh(t *testing.T) {
	useClock(t)
	s := serve(t, recipe(t, "api.md", 3, upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/" {
			w.WriteHeader(http.StatusNotFound)
		}
	})))
	for range 60 {
		statuses(t, []int{200}, func() answer { return s.get("/", at()...) })
	}
	for i := range 10 {
		statuses(t, []int{404}, func() answer { return s.get(fmt.Sprint("/", i, ".bak"), at()...) })
	}
	statuses(t, []int{429}, func() answer { return s.get("/10.bak", at()...) })
}

func TestBlockLocation(t *testing.T) {
	useClock(t)
	s := serve(t, recipe(t, "api.md", 4, upstream(t, func(w http.ResponseWriter, r *http.Request) {
		to := map[bool]string{true: "/", false: "/login?failed"}[r.FormValue("password") == "right"]
		http.Redirect(w, r, to, http.StatusSeeOther)
	})))
	login := func(password string) func() answer {
		return func() answer {
			return s.post("/login", "password="+password, "Content-Type", "application/x-www-form-urlencoded")
		}
	}
	statuses(t, []int{303, 303, 303, 303, 303, 303, 303}, login("right"))
	statuses(t, []int{303, 303, 303, 303, 303, 429}, login("wrong"))
}

func TestBlockExportsShared(t *testing.T) {
	redis, hold := redistest.Start(t), make(chan struct{})
	began := make(chan struct{}, 3)
	s := serve(t, recipe(t, "exports.md", 1, upstream(t, func(http.ResponseWriter, *http.Request) { began <- struct{}{}; <-hold }),
		"redis redis.internal:6379", "redis "+redis.Addr+" {\n"+patient+"\n}"))
	export := at("X-Account", "a")
	first, second := s.send(t.Context(), "/export/x", export...), s.send(t.Context(), "/export/x", export...)
	<-began
	<-began
	if a := s.get("/export/x", export...); a.StatusCode != 429 || s.wait(a) != 30 {
		t.Error(a.Status, a.Header)
	}
	if keys := redis.Do("keys", "rate_limit:exports:concurrency:60000000:*").([]any); len(keys) != 1 {
		t.Errorf("leases of a minute in Redis: %v", keys)
	}
	close(hold)
	<-first
	<-second
}

// bob's password is the one that the documentation's hash is of.
const bob = "Ym9iOmhpY2N1cA=="

func TestBlockBasicAuth(t *testing.T) {
	s := serve(t, recipe(t, "login.md", 1, upstream(t, ok)))
	login := func(user string) func() answer {
		return func() answer { return s.get("/", at("Authorization", "Basic "+user)...) }
	}
	statuses(t, []int{200, 200, 200, 200, 200, 200}, login(bob))
	statuses(t, []int{401, 401, 401, 401, 401, 429}, login("Ym9iOndyb25n"))
	statuses(t, []int{429}, login(bob))
	statuses(t, []int{401}, func() answer { return s.get("/", at()...) }) // a browser that has not asked for the password yet
}

func TestBlockBehindCDN(t *testing.T) {
	s := serve(t, recipe(t, "login.md", 2, upstream(t, loginSite(new(atomic.Int64))), "192.0.2.0/24", "127.0.0.0/8", "50/15m", "2/15m"))
	login := func(from string) func() answer {
		return func() answer { return s.post("/login", "password=wrong", "X-Forwarded-For", from) }
	}
	statuses(t, []int{401, 401, 429}, login("1.1.1.1"))
	statuses(t, []int{429}, login("6.6.6.6, 1.1.1.1")) // what the client writes does not count
	statuses(t, []int{401}, login("2.2.2.2"))
}

func TestBlockRedisPassword(t *testing.T) {
	redis := redistest.Start(t)
	redis.Do("config", "set", "requirepass", "the word")
	t.Setenv("REDIS_PASSWORD", "the word")
	s := serve(t, recipe(t, "migrating.md", 0, upstream(t, ok), "redis.internal:6379 {", redis.Addr+" {\n"+patient))
	statuses(t, []int{200, 200, 429}, func() answer { return s.get("/", at()...) })
	if up := s.metric(`caddy_rate_limit_store_up{store="redis"}`); up != 1 {
		t.Errorf("store_up is %v", up)
	}
	if n := s.metric(`caddy_rate_limit_decisions_total{result="passed",store="redis",zone="zone_1"}`); n != 2 {
		t.Errorf("%v decisions in Redis, want 2", n)
	}
}

// As NGINX's burst=5 nodelay: the one in service and five above it pass at once.
func TestBlockNGINX(t *testing.T) {
	useClock(t)
	s := serve(t, recipe(t, "migrating.md", 1, upstream(t, ok)))
	statuses(t, []int{200, 200, 200, 200, 200, 200, 429}, func() answer { return s.get("/", at()...) })
}

func TestBlockPlanOfToken(t *testing.T) {
	auth := "route {\nbasic_auth {\nbob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n}\n"
	// basic_auth says who it is, and nothing of a plan.
	config := "example.com {\n" + auth + block(t, "plans.md", 1) + "reverse_proxy " + upstream(t, ok) + "\n}\n}"
	s := serve(t, config)
	if a := s.get("/", at("Authorization", "Basic "+bob)...); a.left("api.default.1m") != 19 || a.left("api.default.1h") != 999 {
		t.Error(a.Status, a.Header)
	}
}

func TestBlockPlans(t *testing.T) {
	for plan, want := range map[string]string{"free": "api.free.1m", "pro": "api.pro.1h", "other": "api.default", "staff": ""} {
		s := serve(t, "example.com {\nvars {\nuser "+plan+"\nplan "+plan+"\n}\n"+block(t, "reference.md", 1)+"reverse_proxy "+upstream(t, ok)+"\n}")
		a := s.get("/", at()...)
		if left := a.left(want); want != "" && left < 9 || want == "" && a.Header.Get("RateLimit") != "" {
			t.Errorf("%s: %v", plan, a.Header)
		}
	}
}

func TestBlockWebsite(t *testing.T) {
	useClock(t)
	s := serve(t, "{\nservers {\ntrusted_proxies static 127.0.0.0/8\n}\n}\n"+recipe(t, "website.md", 0, upstream(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/wp-login.php") && r.FormValue("pwd") == "right" {
			http.Redirect(w, r, "/wp-admin/", http.StatusFound)
		}
	})))
	get := func(path, from string) answer { return s.get(path, at("X-Forwarded-For", from)...) }
	for range 120 {
		statuses(t, []int{200}, func() answer { return get("/page", "1.1.1.1") })
	}
	for _, path := range []string{"/style.css", "/style.css?ver=2", "/wp-content/uploads/a.pdf"} {
		if a := get(path, "1.1.1.1"); a.StatusCode != 200 || a.Header.Get("RateLimit") != "" {
			t.Errorf("%s: %s %v", path, a.Status, a.Header)
		}
	}
	a := get("/page", "1.1.1.1")
	if a.StatusCode != 429 || !strings.Contains(a.body, "<!doctype html>") || !strings.Contains(a.body, "come back in "+a.Header.Get("Retry-After")+" seconds") ||
		a.Header.Get("Cache-Control") != "no-store" {
		t.Error(a.Status, a.Header, a.body)
	}
	for _, from := range []string{"203.0.113.7", "66.249.64.1", "2001:4860:4801:10::1"} {
		if a := get("/page", from); a.StatusCode != 200 || a.Header.Get("RateLimit") != "" {
			t.Errorf("%s: %s %v", from, a.Status, a.Header)
		}
	}
	login := func(path, password string) func() answer {
		return func() answer {
			return s.post(path, "pwd="+password, "Content-Type", "application/x-www-form-urlencoded", "X-Forwarded-For", "2.2.2.2")
		}
	}
	statuses(t, []int{302, 302, 302, 302, 302, 302}, login("/wp-login.php", "right"))
	statuses(t, []int{200, 200, 200, 200}, login("/wp-login.php", "wrong"))
	statuses(t, []int{200, 429}, login("/wp-login.php/x", "wrong"))
	for i := range 21 {
		if a, want := get("/xmlrpc.php", "3.3.3.3"), 200+i/20*229; a.StatusCode != want {
			t.Errorf("xmlrpc %d: %s", i, a.Status)
		}
	}
}
