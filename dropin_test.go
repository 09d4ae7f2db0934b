package sluice_test

// Configs that were written for the two older modules, as they are in testdata/dropin: they load
// unchanged, and real requests are answered as their authors meant.

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// dropIn serves a file of testdata/dropin.
func dropIn(t *testing.T, name string) *server {
	t.Helper()
	s := newServer(t)
	if err := loadFile(s, filepath.Join("testdata/dropin", name)); err != nil {
		t.Fatal(err)
	}
	return s
}

func loadFile(s *server, path string) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if filepath.Ext(path) == ".json" {
		return s.loadJSON(content)
	}
	return s.load(string(content))
}

func TestDropInStaticAndDynamic(t *testing.T) {
	s := dropIn(t, "static_and_dynamic.caddyfile")
	for range 3 {
		if a := s.do("POST", "/"); a.StatusCode != 200 || a.left("everyone_reads") != -1 {
			t.Fatal(a.Status, a.Header)
		}
	}
	if a := s.do("POST", "/"); a.StatusCode != 429 {
		t.Error(a.Status)
	}
	if a := s.refused("/"); a.left("everyone_reads") != 4 || s.wait(a) < 295 {
		t.Error(a.Header)
	}
	lines := logged(t, "rate limit exceeded")
	if len(lines) != 1 || lines[0]["zone"] != "each_address" || lines[0]["key"] != "127.0.0.1" {
		t.Error(lines)
	}
}

func TestDropInMethodMatchers(t *testing.T) {
	s := dropIn(t, "method_matchers.caddyfile")
	site := []string{"Host", "example.com", "X-Forwarded-For", "192.0.2.1"}
	s.pass(2, "/", site...)
	if a := s.do("HEAD", "/", site...); a.StatusCode != 200 || a.left("reads") != 0 || a.left("writes") != -1 {
		t.Error(a.Status, a.Header)
	}
	a := s.refused("/", site...)
	if wait := s.wait(a); wait < 595 || wait > 720 {
		t.Errorf("Retry-After with jitter 0.2: %d", wait)
	}
	if a := s.do("POST", "/", site...); a.StatusCode != 200 {
		t.Error(a.Status)
	}
	if a := s.do("DELETE", "/x", site...); a.StatusCode != 429 {
		t.Error(a.Status)
	}
	other := []string{"Host", "example.com", "X-Forwarded-For", "192.0.2.2"}
	s.pass(1, "/upload/x", other...) // reads and writes, by the second matcher set
	if a := s.refused("/upload/x", other...); a.left("reads") != 2 || a.left("writes") != 0 {
		t.Error(a.Header)
	}
	if a := s.do("OPTIONS", "/", other...); a.StatusCode != 200 || a.Header.Get("RateLimit") != "" {
		t.Error(a.Status, a.Header)
	}
}

func TestDropInIPv6Prefix(t *testing.T) {
	s := dropIn(t, "ipv6_prefix.caddyfile")
	for _, client := range []struct {
		ip     string
		status int
	}{
		{"2001:db8:0:100::1", 200}, {"2001:db8:0:1ff::2", 429}, {"2001:db8:0:200::1", 200},
		{"198.51.100.1", 200}, {"198.51.100.255", 429}, {"::ffff:198.51.100.7", 429}, {"198.51.101.1", 200},
	} {
		if a := s.get("/", "Host", "example.com", "X-Forwarded-For", client.ip); a.StatusCode != client.status {
			t.Errorf("%s: %s", client.ip, a.Status)
		}
	}
}

func TestDropInSnippet(t *testing.T) {
	t.Setenv("SITE_EVENTS", "4")
	s := dropIn(t, "snippet.caddyfile")
	s.pass(1, "/", "Host", "example.com")
	s.pass(1, "/", "Host", "example.org") // the same zone
	if a := s.get("/login", "Host", "example.com"); a.StatusCode != 200 || a.left("site") != 1 || a.left("login") != 0 {
		t.Error(a.Status, a.Header)
	}
	if a := s.refused("/login", "Host", "example.com"); s.wait(a) < 3500 {
		t.Error(a.Header)
	}
	if a := s.refused("/", "Host", "example.org"); a.left("site") != 0 {
		t.Error(a.Header)
	}
}

func TestDropInAfterBasicAuth(t *testing.T) {
	s := dropIn(t, "after_basic_auth.caddyfile")
	bob := []string{"Host", "example.com", "Authorization", "Basic Ym9iOnNlY3JldA=="}
	eve := []string{"Host", "example.com", "Authorization", "Basic ZXZlOnNlY3JldA=="}
	for range 5 { // who is not let in is not counted
		if a := s.get("/", "Host", "example.com", "Authorization", "Basic Ym9iOndyb25n"); a.StatusCode != 401 || a.Header.Get("RateLimit") != "" {
			t.Fatal(a.Status, a.Header)
		}
	}
	s.pass(2, "/", bob...)
	s.refused("/", bob...)
	if a := s.get("/", eve...); a.StatusCode != 200 || a.body != "hello eve" || a.left("users") != 1 {
		t.Error(a.Status, a.body, a.Header)
	}
}

func TestDropInErrorPage(t *testing.T) {
	s := dropIn(t, "error_page.caddyfile")
	s.pass(3, "/", "Host", "example.com", "X-Api-Key", "a") // the directive's matcher
	s.pass(1, "/api/x", "Host", "example.com", "X-Api-Key", "a")
	a := s.refused("/api/x", "Host", "example.com", "X-Api-Key", "a")
	if a.body != "slow down" || a.Header.Get("X-Zone") != "api" || s.wait(a) < 3500 || a.left("api") != 0 {
		t.Error(a.body, a.Header)
	}
	s.pass(1, "/api/x", "Host", "example.com", "X-Api-Key", "b")
}

func TestDropInJSON(t *testing.T) {
	s := dropIn(t, "several_zones.json")
	site := []string{"Host", "example.com"}
	s.pass(3, "/", site...)
	s.refused("/", site...)
	if a := s.do("POST", "/", site...); a.StatusCode != 200 || a.Header.Get("RateLimit") != "" {
		t.Error(a.Status, a.Header)
	}
	if a := s.do("POST", "/upload", site...); a.StatusCode != 200 || a.left("uploads") != 0 {
		t.Error(a.Status, a.Header)
	}
	if a := s.do("PUT", "/elsewhere", site...); a.StatusCode != 429 || s.wait(a) < 3500 {
		t.Error(a.Status, a.Header)
	}
}

func TestDropInExt(t *testing.T) {
	s := dropIn(t, "ext.caddyfile")
	site := []string{"Host", "example.com", "X-Forwarded-For", "203.0.113.9"}
	s.pass(2, "/download?id=1", site...)
	s.refused("/download?id=1", site...)
	s.pass(2, "/download?id=2", site...)
	// An empty key falls back to the address.
	s.pass(2, "/download", site...)
	s.refused("/download", site...)
	// {remote.ip} does not believe a header that anyone can write.
	for i := range 3 {
		s.pass(1, "/api/", "Host", "example.com", "X-Forwarded-For", strings.Repeat("1", i+1)+".0.0.1")
	}
	if a := s.get("/api/", "Host", "example.com", "X-Forwarded-For", "9.9.9.9"); a.StatusCode != 503 || s.wait(a) < 1 {
		t.Error(a.Status, a.Header)
	}
}

func TestDropInExtJSON(t *testing.T) {
	s := dropIn(t, "ext.json")
	s.pass(2, "/?id=1")
	if a := s.get("/?id=1"); a.StatusCode != 503 || s.wait(a) < 1 || !strings.Contains(a.body, `"status":503`) {
		t.Error(a.Status, a.Header, a.body)
	}
	s.pass(1, "/?id=2")
	// Counters there were lost at a reload.
	if err := loadFile(s, "testdata/dropin/ext.json"); err != nil {
		t.Fatal(err)
	}
	if a := s.get("/?id=1"); a.StatusCode != 503 {
		t.Error(a.Status)
	}
}

func TestDropInSharedStorageIsAClearError(t *testing.T) {
	for file, place := range map[string]string{"distributed.caddyfile": "Caddyfile:4", "storage.json": "distributed"} {
		s := newServer(t)
		err := loadFile(s, filepath.Join("testdata/dropin", file))
		if err == nil || !strings.Contains(err.Error(), place) || !strings.Contains(err.Error(), "shared store") {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// G08: a zone may have any printable name. Fields show it as a string that cannot be malformed,
// logs and metrics as it is written.
func TestDropInZoneNames(t *testing.T) {
	s := serve(t, ":80 {\nrate_limit {\nzone `ünï \"x\"` {\nevents 1\nwindow 1h\n}\n}\nrespond ok\n}")
	if a := s.get("/"); a.StatusCode != 200 || a.Header.Get("RateLimit-Policy") != `"%C3%BCn%C3%AF \"x\"";q=1;w=3600` {
		t.Error(a.Status, a.Header)
	}
	a := s.refused("/")
	if !strings.Contains(a.body, `["%C3%BCn%C3%AF \"x\""]`) {
		t.Error(a.body)
	}
	if lines := logged(t, "rate limit exceeded"); len(lines) != 1 || lines[0]["zone"] != `ünï "x"` {
		t.Error(lines)
	}
	if n := s.metric(`caddy_rate_limit_declined_requests_total{zone="ünï \"x\""}`); n != 1 {
		t.Errorf("%v declined", n)
	}
}

// G09: what has no zone limits nothing, and says so.
func TestDropInNoZone(t *testing.T) {
	s := serve(t, ":80 {\nrate_limit {\nlog_key\nlog_key\n}\nrespond ok\n}")
	s.pass(20, "/")
	if lines := logged(t, "rate_limit has no zone and limits nothing; want a limit such as 100/1m on its line, or zones in its block"); len(lines) != 1 {
		t.Errorf("%d warnings", len(lines))
	}
}

// G09: a jitter above 1 loads, and a wait of years does not overflow.
func TestDropInLargeJitter(t *testing.T) {
	s := serve(t, ":80 {\nrate_limit {\njitter 1000\nzone z {\nevents 1\nwindow 13000d\n}\n}\nrespond ok\n}")
	s.pass(1, "/")
	for range 20 {
		if wait := s.wait(s.refused("/")); wait < 13000*86400 {
			t.Fatalf("Retry-After %d", wait)
		}
	}
}

// Two handlers of caddy-ext's form have no names in JSON, and a counter each.
func TestTwoUnnamedHandlersHaveTwoCounters(t *testing.T) {
	s := newServer(t)
	limit := func(path string) string {
		return `{"match":[{"path":["` + path + `"]}],"handle":[{"handler":"rate_limit","key":"{http.request.remote.host}","rate":"1r/m"},{"handler":"static_response","body":"ok"}]}`
	}
	if err := s.loadJSON([]byte(`{"apps":{"http":{"servers":{"srv0":{"listen":[":80"],"routes":[` + limit("/a") + "," + limit("/b") + `]}}}}}`)); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/a", "/b"} {
		s.pass(1, path)
		s.refused(path)
	}
}

func TestDefectMaxEventsZero(t *testing.T) {
	s := serve(t, eventsZone(0, "1h"))
	for range 2 {
		if a := s.refused("/"); s.wait(a) != -1 || a.left("z") != 0 {
			t.Error(a.Header)
		}
	}
	if err := s.loadJSON([]byte(`{"apps":{"http":{"servers":{"s":{"listen":[":80"],"routes":[{"handle":[
		{"handler":"rate_limit","rate_limits":{"z":{"max_events":0,"window":"1h"}}}]}]}}}}}`)); err != nil {
		t.Fatal(err)
	}
	s.refused("/")
}
