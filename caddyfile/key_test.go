package caddyfile

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// rule compiles a zone.
func rule(t testing.TB, z Zone) *Rule {
	t.Helper()
	if z.MaxEvents == "" && len(z.Limit) == 0 && z.Tier == nil {
		z.Limit = Texts{"5/1m"}
	}
	repl := caddy.NewReplacer()
	rules, err := compile(&Config{Zones: map[string]*Zone{"z": &z}}, func(name string) (string, bool) { return repl.GetString(name) }, nil)
	if err != nil {
		t.Fatal(err)
	}
	return rules.Rules[0]
}

// prepare makes the request that a handler in a server would see. edit runs before Caddy looks at
// the request.
func prepare(target string, edit func(*http.Request)) *http.Request {
	r := httptest.NewRequest("GET", target, nil)
	r.RemoteAddr = "192.0.2.7:1234"
	if edit != nil {
		edit(r)
	}
	ctx := context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 80})
	return caddyhttp.PrepareRequest(r.WithContext(ctx), caddy.NewReplacer(), httptest.NewRecorder(), &caddyhttp.Server{})
}

func from(addr string) func(*http.Request) {
	return func(r *http.Request) { r.RemoteAddr = addr }
}

func keyOf(t testing.TB, k *Key, r *http.Request) (string, bool) {
	t.Helper()
	key, ok, _, err := k.Append([]byte("kept"), r, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(key, []byte("kept")) {
		t.Fatalf("Append changed what was there: %q", key)
	}
	return string(key[4:]), ok
}

// text is the key as an operator sees it.
func text(t testing.TB, k *Key, r *http.Request) string {
	t.Helper()
	key, _ := keyOf(t, k, r)
	return Text(key)
}

func TestKeyAddresses(t *testing.T) {
	for _, tc := range []struct{ key, remote, v4, v6, want string }{
		{"", "192.0.2.7:1", "", "", "192.0.2.7"},
		{"", "192.0.2.7:1", "24", "", "192.0.2.0/24"},
		{"", "[2001:db8::1]:1", "", "", "2001:db8::/64"},
		{"", "[2001:db8::1]:1", "", "128", "2001:db8::1"},
		{"", "[2001:db8::1]:1", "", "20", "2001::/20"},
		{"", "[::ffff:192.0.2.7]:1", "", "", "192.0.2.7"},
		{"", "[::ffff:192.0.2.7]:1", "16", "", "192.0.0.0/16"},
		{"", "[fe80::1%eth0]:1", "", "128", "fe80::1"},
		{"{remote_host}", "[fe80::1%eth0]:1", "", "128", "fe80::1"},
		{"{remote_host}", "[fe80::1%eth0]:1", "", "", "fe80::/64"},
		{"{remote_host}", "/run/caddy.sock", "", "", "/run/caddy.sock"},
		{"a-{client_ip}-b", "[2001:db8::1]:1", "", "", "a-2001:db8::/64-b"},
		{"{http.request.remote.host/16,32}", "192.0.2.7:1", "", "", "192.0.0.0/16"},
		{"{http.request.remote.host/16,32}", "[2001:db8::1]:1", "", "", "2001:db8::/32"},
		{"{http.request.remote.host/16}", "[2001:db8::1]:1", "", "", "2001::/16"},
		{"{remote.ip_prefix.24}", "192.0.2.7:1", "", "", "192.0.2.0/24"},
		{"{remote.host_prefix.48}", "[2001:db8::1]:1", "", "", "2001:db8::/48"},
		{"{remote.host_prefix.48}", "192.0.2.7:1", "", "", "192.0.2.7"},
		{"{remote.ip}", "192.0.2.7:1", "", "", "192.0.2.7"},
		{"{remote.host}", "192.0.2.7:1", "", "", "192.0.2.7"},
		{"{remote.port}", "192.0.2.7:81", "", "", "81"},
		{"{remote}", "192.0.2.7:81", "", "", "192.0.2.7:81"},
	} {
		z := Zone{IPv4Prefix: Number(tc.v4), IPv6Prefix: Number(tc.v6)}
		if tc.key != "" {
			z.Key = Texts{tc.key}
		}
		if got := text(t, rule(t, z).Key, prepare("/", from(tc.remote))); got != tc.want {
			t.Errorf("key %q prefixes %q %q of %s: %q, want %q", tc.key, tc.v4, tc.v6, tc.remote, got, tc.want)
		}
	}
}

// An address that the whole text happens to be is grouped too; others stay as they are.
func TestKeyTextThatIsAnAddress(t *testing.T) {
	limit, events := rule(t, Zone{Key: Texts{"{header.X-Real-IP}"}}), rule(t, Zone{Key: Texts{"{header.X-Real-IP}"}, MaxEvents: "5", Window: 1e9})
	masked := rule(t, Zone{Key: Texts{"{header.X-Real-IP}"}, MaxEvents: "5", Window: 1e9, IPv4Prefix: "24", IPv6Prefix: "64"})
	for _, tc := range []struct{ value, limit, events, masked string }{
		{"2001:db8::1", "2001:db8::/64", "2001:db8::1", "2001:db8::/64"},
		{"192.0.2.7", "192.0.2.7", "192.0.2.7", "192.0.2.0/24"},
		{"::ffff:192.0.2.7", "192.0.2.7", "::ffff:192.0.2.7", "192.0.2.0/24"},
		{"fe80::1%x", "fe80::/64", "fe80::1%x", "fe80::/64"},
		{"2001:db8::1, 2001:db8::2", "2001:db8::1, 2001:db8::2", "2001:db8::1, 2001:db8::2", "2001:db8::1, 2001:db8::2"},
		{"abc", "abc", "abc", "abc"},
		{"1.2.3", "1.2.3", "1.2.3", "1.2.3"},
	} {
		r := prepare("/", func(r *http.Request) { r.Header.Set("X-Real-IP", tc.value) })
		for i, k := range []*Key{limit.Key, events.Key, masked.Key} {
			if got, want := text(t, k, r), [...]string{tc.limit, tc.events, tc.masked}[i]; got != want {
				t.Errorf("%s in zone %d: %q, want %q", tc.value, i, got, want)
			}
		}
	}
}

func TestF22CompositeKeysCannotBeForged(t *testing.T) {
	composite := rule(t, Zone{Key: Texts{"{header.A}", "{header.B}"}})
	single := rule(t, Zone{Key: Texts{"{header.A}"}})
	fixed := rule(t, Zone{Key: Texts{"x"}, KeyFallback: Texts{"{header.A}"}})
	values := []string{
		"", "a", "b", "c", "ab", "bc", "abc", ":", "_", "|", "\x00", "{", "}", "\x01", "\x02", "\x03", "\x02a", "\x03\x02a",
		"\x01\x01a\x01b", "a,b", strings.Repeat("x", 126), strings.Repeat("x", 127), strings.Repeat("x", 128), strings.Repeat("x", 20000),
	}
	seen := map[string]string{}
	check := func(who string, k *Key, r *http.Request) {
		key, _ := keyOf(t, k, r)
		if other, ok := seen[key]; ok {
			t.Errorf("%q and %q have the same key", who, other)
		}
		seen[key] = who
	}
	for _, a := range values {
		r := prepare("/", func(r *http.Request) { r.Header["A"] = []string{a} })
		check("single "+a, single.Key, r)
		check("fallback "+a, fixed.Fallback, r)
		for _, b := range values {
			r := prepare("/", func(r *http.Request) { r.Header["A"], r.Header["B"] = []string{a}, []string{b} })
			check("composite "+a+" "+b, composite.Key, r)
			key, _ := keyOf(t, composite.Key, r)
			if encoded := Encode(false, a, b); encoded != key {
				t.Errorf("Encode(%q, %q) is %q, the key %q", a, b, encoded, key)
			}
		}
		if key, _ := keyOf(t, single.Key, r); Text(key) != a || Encode(false, a) != key {
			t.Errorf("text %q, encoded %q, key %q", Text(key), Encode(false, a), key)
		}
		if key, _ := keyOf(t, fixed.Fallback, r); Text(key) != a || Encode(true, a) != key {
			t.Errorf("fallback: text %q, encoded %q, key %q", Text(key), Encode(true, a), key)
		}
	}
}

func TestF23LongKeysDiffer(t *testing.T) {
	k := rule(t, Zone{Key: Texts{"{header.A}", "{path}"}}).Key
	long := strings.Repeat("k", 100_000)
	one, _ := keyOf(t, k, prepare("/p", func(r *http.Request) { r.Header.Set("A", long+"1") }))
	two, _ := keyOf(t, k, prepare("/p", func(r *http.Request) { r.Header.Set("A", long+"2") }))
	if one == two || len(one) < 100_000 {
		t.Error("keys that differ in the last byte are the same")
	}
}

func TestF24OneClientManyAddresses(t *testing.T) {
	k := rule(t, Zone{}).Key
	key := func(addr string) string { s, _ := keyOf(t, k, prepare("/", from(addr))); return s }
	if key("[::ffff:1.2.3.4]:1") != key("1.2.3.4:2") {
		t.Error("an IPv4-mapped address is another client")
	}
	if key("[2001:db8::1]:1") != key("[2001:db8::2]:1") || key("[2001:db8::1]:1") == key("[2001:db8:0:1::1]:1") {
		t.Error("addresses are not grouped by /64")
	}
	if key("[fe80::1%eth0]:1") != key("[fe80::1%eth1]:1") {
		t.Error("the zone of an address counts")
	}
}

func TestF26Headers(t *testing.T) {
	k := rule(t, Zone{Key: Texts{"{header.x-API-key}"}}).Key
	for _, tc := range []struct {
		header http.Header
		want   string
		ok     bool
	}{
		{http.Header{"X-Api-Key": {"a"}}, "a", true},
		{http.Header{"X-Api-Key": {"a", "b"}}, "a", true}, // the other is another key, see TestH02KeysOfARequest
		{http.Header{"X-Api-Key": {""}}, "", false},
		{http.Header{}, "", false},
	} {
		key, ok := keyOf(t, k, prepare("/", func(r *http.Request) { r.Header = tc.header }))
		if Text(key) != tc.want || ok != tc.ok {
			t.Errorf("%v: %q, %t", tc.header, key, ok)
		}
	}
}

func TestF27OddRequests(t *testing.T) {
	k := rule(t, Zone{Key: Texts{"{path}", "{cookie.c}", "{query.q}", "{uri}"}}).Key
	r := prepare("/%ff?q=1", func(r *http.Request) {
		r.URL.RawQuery = strings.Repeat("q=%ff&", 10_000)
		r.Header["Cookie"] = []string{"c=\xff\xfe", "c=fine"}
	})
	got := text(t, k, r)
	if len(got) < 20_000 {
		t.Errorf("%.60q", got)
	}
}

func TestF28HostCountsOnlyInTheKey(t *testing.T) {
	plain, withHost := rule(t, Zone{}).Key, rule(t, Zone{Key: Texts{"{client_ip}", "{host}"}}).Key
	a, b, c := prepare("http://a.example.com/", nil), prepare("http://b.example.com:8080/", nil), prepare("http://A.EXAMPLE.com:80/", nil)
	if text(t, plain, a) != text(t, plain, b) {
		t.Error("the host is in a key that does not name it")
	}
	if text(t, withHost, a) == text(t, withHost, b) || text(t, withHost, a) != text(t, withHost, c) {
		t.Errorf("hosts %s, %s, %s", text(t, withHost, a), text(t, withHost, b), text(t, withHost, c))
	}
}

func TestKeyExpandsToNothing(t *testing.T) {
	empty := prepare("/", func(r *http.Request) { r.RemoteAddr = "@" })
	for _, tc := range []struct {
		key  Texts
		want bool // has a value
	}{
		{Texts{"{header.X}"}, false},
		{Texts{"user-{header.X}"}, false},
		{Texts{"{header.X}", "{query.y}"}, false},
		{Texts{"{header.X}", "fixed"}, false},
		{Texts{"{header.X}", "{method}"}, true},
		{Texts{"{method}", "{header.X}"}, true},
		{Texts{"fixed"}, true},
		{Texts{"a", "b"}, true},
		{Texts{"{client_ip}"}, false}, // a unix socket
		{Texts{"{http.auth.user.id}"}, false},
		{Texts{"{env.SLUICE_NO_SUCH}"}, false},
	} {
		r := rule(t, Zone{Key: tc.key})
		if _, ok := keyOf(t, r.Key, empty); ok != tc.want {
			t.Errorf("%v has a value: %t", tc.key, ok)
		}
		if key, _ := keyOf(t, r.Fallback, empty); key != "\x02" {
			t.Errorf("the fallback of a unix socket is %q", key)
		}
	}
	if rule(t, Zone{Key: Texts{"{header.X}"}, KeyFallback: Texts{"none"}}).Fallback != nil {
		t.Error("key_fallback none has a key")
	}
}

func TestKeyEarlyData(t *testing.T) {
	early := prepare("/", func(r *http.Request) { r.TLS = &tls.ConnectionState{} })
	for _, key := range []string{"{client_ip}", "{remote_host}", "{http.request.remote.host/24,64}", "{header.X}", "fixed"} {
		_, _, _, err := rule(t, Zone{Key: Texts{key}}).Key.Append(nil, early, nil, 0)
		var status caddyhttp.HandlerError
		if !errors.As(err, &status) || status.StatusCode != http.StatusTooEarly {
			t.Errorf("%s in early data: %v", key, err)
		}
	}
	done := prepare("/", func(r *http.Request) { r.TLS = &tls.ConnectionState{HandshakeComplete: true} })
	if got := text(t, rule(t, Zone{}).Key, done); got != "192.0.2.7" {
		t.Error(got)
	}
}

// Nothing is allocated for what the keys of most configs read.
func TestKeyAllocations(t *testing.T) {
	v6 := prepare("/p?q=1", from("[2001:db8::1]:1"))
	v4 := prepare("http://example.com:80/p?a=b&q=1", func(r *http.Request) {
		r.Header["X-Api-Key"], r.Header["Cookie"] = []string{"secret"}, []string{"a=b; c=d"}
	})
	caddyhttp.SetVar(v4.Context(), "v", "value")
	buf := make([]byte, 0, 256)
	for _, key := range []Texts{
		{"{client_ip}"}, {"{remote_host}"}, {"{remote_port}"}, {"{header.X-API-Key}"}, {"{query.q}"}, {"{cookie.c}"}, {"{path}"}, {"{host}"},
		{"{method}"}, {"{vars.v}"}, {"{remote}"}, {"fixed"}, {"{client_ip}", "{header.X-API-Key}", "{host}"},
	} {
		k := rule(t, Zone{Key: key}).Key
		for _, r := range []*http.Request{v4, v6} {
			if n := testing.AllocsPerRun(100, func() { _, _, _, _ = k.Append(buf, r, nil, 0) }); n > 0 {
				t.Errorf("%v allocates %g times from %s", key, n, r.RemoteAddr)
			}
		}
	}
}

// The names that are known here are the names that Caddy knows.
func TestPlaceholdersAreCaddys(t *testing.T) {
	r := prepare("/", nil)
	repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	for _, name := range requestNames {
		if _, ok := repl.Get("http.request." + name); !ok {
			t.Errorf("Caddy does not know http.request.%s", name)
		}
	}
	for _, name := range requestByNumber {
		if _, ok := repl.Get("http.request." + name + "0"); !ok {
			t.Errorf("Caddy does not know http.request.%s0", name)
		}
	}
	for _, name := range systemNames {
		if _, ok := repl.Get("system." + name); !ok {
			t.Errorf("Caddy does not know system.%s", name)
		}
	}
	short := httpcaddyfile.NewShorthandReplacer()
	replace := func(text string) string {
		segment := caddyfile.Segment{{Text: text}}
		short.ApplyToSegment(&segment)
		return segment[0].Text
	}
	for name, long := range shorthands {
		if got := replace("{" + name + "}"); got != "{"+long+"}" || longName(name) != long {
			t.Errorf("Caddy takes {%s} for %s, not {%s}", name, got, long)
		}
	}
	for name, long := range shortPrefixes {
		if got := replace("{" + name + "x}"); got != "{"+long+"x}" {
			t.Errorf("Caddy takes {%sx} for %s, not {%sx}", name, got, long)
		}
	}
}

// H02: names of cookies are compared exactly.
func TestCookieNames(t *testing.T) {
	if got := string(appendCookie(nil, []string{"\u212a=kelvin; K=1; k=2"}, "k")); got != "2" {
		t.Errorf("cookie k is %q", got)
	}
}

func TestCost(t *testing.T) {
	c := rule(t, Zone{Limit: Texts{"100/1m"}, Cost: "{header.X-Cost}"}).Cost
	for value, want := range map[string]struct {
		units int64
		ok    bool
	}{
		"0": {0, true}, "7": {7, true}, " 7 ": {7, true}, "+7": {7, true}, "007": {7, true},
		"": {1, false}, "-1": {1, false}, "1.5": {1, false}, "seven": {1, false}, "1,2": {1, false}, "\xff": {1, false},
		"99999999999999999999999": {math.MaxInt64, true}, "100000000000000000000": {math.MaxInt64, true},
	} {
		r := prepare("/", func(r *http.Request) { r.Header["X-Cost"] = []string{value} })
		if units, ok := c.Units(r); units != want.units || ok != want.ok {
			t.Errorf("cost %q: %d, %t", value, units, ok)
		}
	}
}

func TestUnnamed(t *testing.T) {
	c := Config{Key: "{remote.ip}", Rate: "5r/s"}
	first := c.Unnamed()
	if first == "" || first == (&Config{Key: "{remote.ip}", Rate: "6r/s"}).Unnamed() || (&Config{}).Unnamed() != "" {
		t.Errorf("unnamed %q", first)
	}
	c.SetName(first + "-2")
	rules, err := compile(&c, nil, nil)
	if err != nil || rules.Rules[0].Zone != first+"-2" {
		t.Errorf("%v, %v", rules, err)
	}
}

// FuzzKeyLikeCaddy: a key reads what Caddy's placeholder reads, and of a source that occurs several
// times every value that Go reads, whatever a client sends, and never panics.
func FuzzKeyLikeCaddy(f *testing.F) {
	f.Add("value", "q=1&q=2", "c=1; C=2", "example.com:80", "/a/b", "192.0.2.7:1")
	f.Add("v", "q=1;2&q=3", "c=1;c=2", "example.com", "", "192.0.2.7")
	f.Add("\xff", "q=%ff&Q=1&%71=3&q;=4&q=%&=", `c="quoted"; c=`, "[::1]:80", "/%ff", "@")
	f.Add("", "q", "c", "", "//", "[fe80::1%25]:")
	f.Add("a\x00b", "+q=1&q+=2&q=a+b", "c=a\"b; c=ok\\; c=\xff", "::1", "*", ":")
	f.Add("x", "[q]=1&q[]=2&q[a]=3", "c=%41; c=1 c=2,c=3;c =4", "h", "/", "192.0.2.7:1")
	zone := func(key string) *Rule {
		return rule(f, Zone{Key: Texts{key}, RawPath: true, MaxEvents: "1", Window: 1e9})
	}
	names := []string{"host", "path", "method", "remote_port"}
	rules := make([]*Rule, len(names))
	for i, name := range names {
		rules[i] = zone("{" + name + "}")
	}
	header, query, cookie := zone("{header.X-Value}"), zone("{query.q}"), zone("{cookie.c}")
	everything := rule(f, Zone{Key: Texts{
		"{client_ip}", "{remote_host}", "{remote}", "{uri}", "{header.X-Value}{query.q}", "{http.request.remote.host/24,64}", "{http.request.tls.version}",
	}})
	f.Fuzz(func(t *testing.T, value, rawQuery, cookies, host, path, remote string) {
		if strings.Count(rawQuery, "&") > 1000 || strings.Count(cookies, ";") > 1000 {
			return // beyond its bounds Go reads no parameter and no cookie at all
		}
		r := prepare("/", func(r *http.Request) {
			r.Header["X-Value"], r.Header["Cookie"] = []string{value, value + "2"}, strings.Split(cookies, "\n")
			r.Host, r.RemoteAddr, r.URL = host, remote, &url.URL{Path: path, RawQuery: rawQuery}
		})
		repl := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
		for i, name := range names {
			want, _ := repl.GetString(longName(name))
			if name == "host" {
				want = string(appendLower(nil, want))
			}
			if name == "remote_port" {
				_, want, _ = net.SplitHostPort(remote) // Caddy writes 080 as 80
			}
			key, ok := keyOf(t, rules[i].Key, r)
			if Text(key) != want && !(want != "" && want[0] == markComposite) || ok != (want != "") {
				t.Errorf("{%s} is %q, %t, in Caddy %q", name, key, ok, want)
			}
		}
		check := func(k *Key, want []string) {
			if keys, few := keysOf(t, k, r); few {
				for _, value := range want {
					if !slices.Contains(keys, value) && !(value != "" && value[0] <= markText) {
						t.Errorf("keys %q lack %q", keys, value)
					}
				}
			}
		}
		check(header.Key, r.Header["X-Value"])
		check(query.Key, r.URL.Query()["q"])
		var values []string
		for _, c := range r.CookiesNamed("c") {
			values = append(values, percentDecoded(c.Value, false))
		}
		check(cookie.Key, values)
		if key, _ := keyOf(t, everything.Key, r); key == "" {
			t.Error("no key")
		}
		_ = fmt.Sprint(everything.Cost.Units(r))
	})
}
