package fields

// The fields, read back by a Structured Fields parser that is not ours.

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/dunglas/httpsfv"
)

// checkFields fails unless the structured fields are well-formed lists of items as the draft
// defines them.
func checkFields(t *testing.T, h http.Header) {
	t.Helper()
	quotas, inFlight := make(map[string]int64), make(map[string]bool)
	for _, item := range list(t, h, "RateLimit-Policy") {
		name, ok := item.Value.(string)
		if !ok {
			continue // draft 6, or an upstream's
		}
		if _, twice := quotas[name]; twice {
			t.Errorf("RateLimit-Policy names %q twice", name)
		}
		quotas[name] = integer(t, item, "q", 0)
		_, window := item.Params.Get("w")
		if window {
			integer(t, item, "w", 1)
		}
		if unit, has := item.Params.Get("qu"); has {
			inFlight[name] = true
			if unit != "concurrent-requests" || window {
				t.Errorf("RateLimit-Policy: %q has qu=%v (w: %v), want the String concurrent-requests and no w", name, unit, window)
			}
		}
	}
	seen := make(map[string]bool)
	for _, item := range list(t, h, "RateLimit") {
		name, ok := item.Value.(string)
		if !ok || seen[name] {
			t.Errorf("RateLimit: name %v is not a String, or is there twice", item.Value)
		}
		seen[name] = true
		q, known := quotas[name]
		if r := integer(t, item, "r", 0); known && r > q {
			t.Errorf("RateLimit: %q has r=%d above q=%d", name, r, q)
		}
		if _, has := item.Params.Get("t"); has {
			integer(t, item, "t", 0)
			if inFlight[name] {
				t.Errorf("RateLimit: %q counts requests in flight and has a t", name)
			}
		}
	}
}

func list(t *testing.T, h http.Header, name string) (items []httpsfv.Item) {
	t.Helper()
	if len(h.Values(name)) == 0 {
		return nil
	}
	l, err := httpsfv.UnmarshalList(h.Values(name))
	if err != nil || len(l) == 0 {
		t.Fatalf("%s: %q is not a list of items: %v", name, h.Values(name), err)
	}
	for _, member := range l {
		item, ok := member.(httpsfv.Item)
		if !ok {
			t.Fatalf("%s: %q has a member that is not an item", name, h.Values(name))
		}
		items = append(items, item)
	}
	return items
}

func integer(t *testing.T, item httpsfv.Item, param string, least int64) int64 {
	t.Helper()
	v, ok := item.Params.Get(param)
	n, isInt := v.(int64)
	if !ok || !isInt || n < least || n > MaxInteger {
		t.Errorf("item %v: parameter %s is %v, want an integer from %d", item.Value, param, v, least)
	}
	return n
}

// FuzzWellFormed: whatever the names and numbers, the fields parse and the body is JSON that says
// the same.
func FuzzWellFormed(f *testing.F) {
	f.Add("api", "login", int64(100), int64(60_000_000), int64(5), int64(1_000_000), int64(0), uint8(0))
	f.Add("a\"b\\", "é\r\nX: y", int64(0), int64(1), int64(-1), int64(-5), int64(1)<<62, uint8(0xff))
	f.Add("api", "api.1m", int64(1)<<52, int64(algorithms.MaxWindow/time.Microsecond), int64(1)<<60, int64(algorithms.Never), int64(algorithms.Never), uint8(0x5a))
	f.Fuzz(func(t *testing.T, name1, name2 string, quota, window, remaining, next, retry int64, bits uint8) {
		if Name(name1) == Name(name2) {
			return // the caller's policies have names of their own
		}
		l, err := algorithms.Compile(name1, algorithms.Policy{Algorithm: algorithms.FixedWindow, Quota: quota, Window: time.Duration(window) * time.Microsecond})
		if err != nil {
			return
		}
		second, two := l, &algorithms.Outcome{OK: bits&32 > 0, Remaining: min(remaining/2, quota), Next: time.Duration(retry)}
		if bits&128 > 0 {
			second = limit(t, algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: quota, Window: l.Window})
			two.Next, two.Retry = algorithms.Unknown, algorithms.Unknown
		}
		families := Families{IETF: bits&1 == 0, Draft6: bits&2 > 0, X: bits&4 > 0, XDelta: bits&8 > 0}
		set := NewSet(families, 429, NewPolicy(name1, l), NewPolicy(name2, second))
		one := &algorithms.Outcome{OK: bits&16 > 0, Remaining: min(remaining, quota), Next: time.Duration(next), Retry: time.Duration(retry)}
		applied := []Applied{{0, one}, {1, two}}
		if bits&64 > 0 {
			applied[1].Outcome = nil
		}
		h := make(http.Header)
		var sc Scratch
		set.Write(h, &sc, applied, time.Unix(1796000000, 1))
		WriteRefusal(h, &sc, time.Duration(retry))
		WriteProblem(h, &sc)
		checkFields(t, h)
		checkValues(t, h)
		checkBody(t, set.Problem(applied), QuotaExceeded, "Quota Exceeded")
		checkBody(t, set.AbnormalUsage(applied), AbnormalUsageDetected, "Abnormal Usage Detected")
	})
}

// checkValues fails on bytes that could break out of a field, and on anything but digits where one
// number stands.
func checkValues(t *testing.T, h http.Header) {
	t.Helper()
	for name, values := range h {
		for _, v := range values {
			for _, c := range []byte(v) {
				if c < ' ' || c > '~' {
					t.Errorf("%s: %q holds byte %#x", name, v, c)
				}
			}
			single := name == "Retry-After" || strings.HasSuffix(name, "-Limit") || strings.HasSuffix(name, "-Remaining") || strings.HasSuffix(name, "-Reset")
			if single && (v == "" || strings.Trim(v, "0123456789") != "" || len(v) > 15) {
				t.Errorf("%s: %q is not a number", name, v)
			}
			if name == "Retry-After" && v == "0" {
				t.Errorf("Retry-After: 0")
			}
		}
	}
}

func checkBody(t *testing.T, body []byte, kind, title string) {
	t.Helper()
	var p struct {
		Type, Title string
		Status      int
		Violated    []string `json:"violated-policies"`
	}
	if err := json.Unmarshal(body, &p); err != nil || p.Type != kind || p.Title != title || p.Status != 429 || p.Violated == nil {
		t.Errorf("body %s: %v", body, err)
	}
}
