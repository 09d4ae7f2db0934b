package caddyfile

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

// FuzzParse: no directive panics; what is refused names a line; what is taken survives the way
// through JSON.
func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("../testdata/caddyfile/*/*.txt")
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		config, _, _ := strings.Cut(string(content), separator)
		if _, directive, ok := strings.Cut(config, "rate_limit"); ok {
			f.Add("rate_limit" + strings.TrimSuffix(directive, "\n}\n"))
		}
	}
	f.Fuzz(func(t *testing.T, input string) {
		tokens, err := caddyfile.Tokenize([]byte(input), "Caddyfile")
		if err != nil || len(tokens) == 0 || strings.Contains(input, "match") || strings.Contains(input, "exempt") {
			return // Caddy's own matchers are not what is tested here
		}
		var c Config
		if err := c.UnmarshalCaddyfile(caddyfile.NewDispenser(tokens)); err != nil {
			if !strings.Contains(err.Error(), "Caddyfile:") {
				t.Errorf("no line in %q", err)
			}
			return
		}
		raw, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		var again Config
		if err := caddy.StrictUnmarshalJSON(raw, &again); err != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		none := func(string) (string, bool) { return "", false }
		first, err := compile(&c, none, nil)
		second, err2 := compile(&again, none, nil)
		if (err == nil) != (err2 == nil) || err == nil && describe(first) != describe(second) {
			t.Errorf("%s\nbecame %v, %v", raw, err, err2)
		}
	})
}

// FuzzGlobal is FuzzParse for the global option.
func FuzzGlobal(f *testing.F) {
	files, _ := filepath.Glob("../testdata/caddyfile/*/*.txt")
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		if option, _, ok := strings.Cut(strings.TrimPrefix(string(content), "{\n"), "\n}\n\n"); ok && strings.HasPrefix(option, "\trate_limit") {
			f.Add(option)
		}
	}
	f.Fuzz(func(t *testing.T, input string) {
		tokens, err := caddyfile.Tokenize([]byte(input), "Caddyfile")
		if err != nil || len(tokens) == 0 {
			return
		}
		value, err := ParseGlobal(caddyfile.NewDispenser(tokens), nil)
		if err != nil {
			if !strings.Contains(err.Error(), "Caddyfile:") {
				t.Errorf("no line in %q", err)
			}
			return
		}
		var g Global
		if err := caddy.StrictUnmarshalJSON(value.(httpcaddyfile.App).Value, &g); err != nil {
			t.Fatalf("%s: %v", value.(httpcaddyfile.App).Value, err)
		}
		if g.Redis == nil {
			t.Errorf("nothing in %s", value.(httpcaddyfile.App).Value)
		}
		if _, err := g.compile(nil); err != nil {
			t.Errorf("%s\nbecame %v", value.(httpcaddyfile.App).Value, err)
		}
	})
}

func TestNumberAndTexts(t *testing.T) {
	for in, want := range map[string]string{
		`5`: `5`, `"5"`: `5`, `-1`: `-1`, `0.5`: `0.5`, `1e3`: `1e3`, `"{env.X}"`: `"{env.X}"`, `"05"`: `"05"`, `""`: `""`, `"+5"`: `"+5"`, `null`: `""`,
	} {
		var n Number
		if err := json.Unmarshal([]byte(in), &n); err != nil {
			t.Errorf("%s: %v", in, err)
		}
		if out, err := json.Marshal(n); err != nil || string(out) != want {
			t.Errorf("%s became %s, %v", in, out, err)
		}
	}
	for in, want := range map[string]string{`"a"`: `"a"`, `["a"]`: `"a"`, `["a","b"]`: `["a","b"]`, `""`: `""`} {
		var x Texts
		if err := json.Unmarshal([]byte(in), &x); err != nil {
			t.Errorf("%s: %v", in, err)
		}
		if out, err := json.Marshal(x); err != nil || string(out) != want {
			t.Errorf("%s became %s, %v", in, out, err)
		}
	}
	for _, in := range []string{`{"status":[1]}`, `{"rate_limits":{"a":{"limit":{}}}}`, `{"rate_limits":{"a":{"key":[1]}}}`, `{"status":true}`} {
		var c Config
		if err := json.Unmarshal([]byte(in), &c); err == nil {
			t.Errorf("%s is taken", in)
		} else if !strings.Contains(err.Error(), "want") || !strings.Contains(err.Error(), ": ") {
			t.Errorf("%s: %v", in, err)
		}
	}
}

func TestNearest(t *testing.T) {
	for _, tc := range []struct{ a, b string }{{"brust", "burst"}, {"stauts", "status"}, {"algoritm", "algorithm"}, {"key_falback", "key_fallback"}, {"algorytem", "algorithm"}} {
		if got := nearest(tc.a, zoneWords) + nearest(tc.a, handlerWords); got != tc.b {
			t.Errorf("%s is near %q, want %s", tc.a, got, tc.b)
		}
	}
	for _, word := range []string{"limes", "xy", "magic"} {
		if got := nearest(word, zoneWords); got != "" {
			t.Errorf("%s is near %s", word, got)
		}
	}
	for a, want := range map[string]int{"": 3, "abc": 0, "acb": 1, "ab": 1, "abcd": 1, "xyz": 3, "bca": 2} {
		if got := distance(a, "abc"); got != want {
			t.Errorf("distance of %q is %d, want %d", a, got, want)
		}
	}
}
