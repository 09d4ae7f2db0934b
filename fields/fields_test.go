package fields

import (
	"encoding/json"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/leaky"
)

func limit(t testing.TB, p algorithms.Policy) *algorithms.Limit {
	t.Helper()
	l, err := algorithms.Compile("zone", p)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func fixed(t testing.TB, quota int64, window time.Duration) *algorithms.Limit {
	return limit(t, algorithms.Policy{Algorithm: algorithms.FixedWindow, Quota: quota, Window: window})
}

// F17: Retry-After is never 0, never in the past, never a date, never a fraction, never early.
func TestF17RetryAfter(t *testing.T) {
	for wait, want := range map[time.Duration]string{
		time.Nanosecond:              "1",
		time.Microsecond:             "1",
		time.Second:                  "1",
		time.Second + 1:              "2",
		1200 * time.Millisecond:      "2",
		3 * time.Second:              "3",
		59*time.Second + 1000:        "60",
		0:                            "1",
		-time.Hour:                   "1",
		algorithms.MaxWindow:         "1125899907",
		algorithms.Never - 1:         "9223372037",
		math.MaxInt64 / 2:            "4611686019",
		365*24*time.Hour + time.Hour: "31539600",
		math.MinInt64:                "1",
	} {
		h := make(http.Header)
		WriteRefusal(h, new(Scratch), wait)
		if got := h["Retry-After"]; !slices.Equal(got, []string{want}) {
			t.Errorf("%v: Retry-After %q, want %s", wait, got, want)
		}
	}
	for _, wait := range []time.Duration{algorithms.Never, algorithms.Unknown} {
		h := make(http.Header)
		WriteRefusal(h, new(Scratch), wait)
		if got, ok := h["Retry-After"]; ok || h.Get("Cache-Control") != "no-store" {
			t.Errorf("%d: Retry-After %q, Cache-Control %q", wait, got, h.Get("Cache-Control"))
		}
	}
}

// F17, the other half: Retry-After is never earlier than t of the policies that refuse, whatever
// the algorithm and the moment; and waiting that long is enough.
func TestF17RetryAfterNotBeforeReset(t *testing.T) {
	for _, p := range []algorithms.Policy{
		{Algorithm: algorithms.FixedWindow, Quota: 3, Window: 10 * time.Second},
		{Algorithm: algorithms.SlidingLog, Quota: 3, Window: 10 * time.Second},
		{Algorithm: algorithms.SlidingWindow, Quota: 3, Window: 10 * time.Second},
		{Algorithm: algorithms.TokenBucket, Quota: 3, Window: 10 * time.Second, Burst: 4},
		leaky.Queue(3, 10*time.Second, 4, 1, 0),
		leaky.Queue(3, 10*time.Second, 4, 1, 5*time.Second),
	} {
		l := limit(t, p)
		var c algorithms.Counter
		var out [1]algorithms.Outcome
		now := int64(1_796_000_000_123_457)
		for step := range int64(400) {
			now += step * 7919
			charges := []algorithms.Charge{{Key: "k", Limit: l, Cost: 1 + step%3}}
			state := c.State
			c = algorithms.Counter{State: state}
			if algorithms.Decide(now, charges, []*algorithms.Counter{&c}, out[:]) {
				continue
			}
			if !c.Anchored {
				c = algorithms.Counter{State: state}
			}
			retry, reset := RetryAfter(out[0].Retry), seconds(out[0].Next)
			if retry < reset {
				t.Fatalf("%v at %d: Retry-After %d before t=%d", p.Algorithm, now, retry, reset)
			}
			later := algorithms.Counter{State: state}
			if !algorithms.Decide(now+retry*1_000_000, charges, []*algorithms.Counter{&later}, out[:]) {
				t.Fatalf("%v at %d: still refused after Retry-After %d", p.Algorithm, now, retry)
			}
		}
	}
}

// F18: `headers off` leaves Retry-After and Cache-Control, and nothing else.
func TestF18HeadersOff(t *testing.T) {
	set := NewSet(Families{}, 429, NewPolicy("api", fixed(t, 1, time.Minute)))
	h := make(http.Header)
	var sc Scratch
	applied := []Applied{{0, &algorithms.Outcome{Retry: time.Second, Next: time.Second}}}
	set.Write(h, &sc, applied, time.Time{})
	WriteRefusal(h, &sc, time.Second)
	if len(h) != 2 || h.Get("Retry-After") != "1" || h.Get("Cache-Control") != "no-store" {
		t.Errorf("got %v", h)
	}
	if body := string(set.Problem(applied)); !strings.HasSuffix(body, `"violated-policies":["api"]}`) {
		t.Errorf("body %s", body)
	}
}

// F19: what an upstream said survives, in its own slice and order, and ours follows.
func TestF19UpstreamFieldsSurvive(t *testing.T) {
	set := NewSet(Default, 429, NewPolicy("api", fixed(t, 100, time.Minute)))
	shared := make([]string, 1, 8)
	shared[0] = `"up";r=1`
	h := http.Header{"Ratelimit": shared}
	set.Write(h, new(Scratch), []Applied{{0, &algorithms.Outcome{OK: true, Remaining: 99, Next: time.Second}}}, time.Time{})
	if got := h.Values("RateLimit"); !slices.Equal(got, []string{`"up";r=1`, `"api";r=99;t=1`}) {
		t.Errorf("RateLimit %q", got)
	}
	if hidden := shared[:2]; hidden[1] != "" {
		t.Errorf("wrote %q into a slice that belongs to someone else", hidden[1])
	}
	checkFields(t, h)
}

// F20: whole seconds or nothing; a bucket's refill is rounded up.
func TestF20Window(t *testing.T) {
	bucket := func(quota, burst int64, window time.Duration) *algorithms.Limit {
		return limit(t, algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: quota, Window: window, Burst: burst})
	}
	for _, c := range []struct {
		l    *algorithms.Limit
		want string
	}{
		{fixed(t, 100, 24*time.Hour), `"p";q=100;w=86400`},
		{fixed(t, 100, time.Second), `"p";q=100;w=1`},
		{fixed(t, 100, 500*time.Millisecond), `"p";q=100`},
		{fixed(t, 100, 1500*time.Millisecond), `"p";q=100`},
		{fixed(t, 0, time.Minute), `"p";q=0;w=60`},
		{bucket(100, 100, time.Minute), `"p";q=100;w=60`},
		{bucket(100, 1, time.Minute), `"p";q=1;w=1`},
		{bucket(100, 500, time.Minute), `"p";q=500;w=300`},
		{bucket(3, 7, time.Second), `"p";q=7;w=3`},
		{bucket(10, 10, 500*time.Millisecond), `"p";q=10;w=1`},
	} {
		if p := NewPolicy("p", c.l); p.item != c.want {
			t.Errorf("%+v: %s, want %s", c.l.Policy, p.item, c.want)
		}
	}
}

// G08: whatever a name holds, fields and bodies are well-formed and name it alike.
func TestNamesCannotBreakOut(t *testing.T) {
	for name, want := range map[string]string{
		"a\"\\\r\né b":  `"a\"\\%0D%0A%C3%A9 b";q=1;w=1`,
		"api/v1":        `"api/v1";q=1;w=1`,
		"a, b;c=1":      `"a, b;c=1";q=1;w=1`,
		"*.example.com": `"*.example.com";q=1;w=1`,
		"50%":           `"50%";q=1;w=1`,
	} {
		p := NewPolicy(name, fixed(t, 1, time.Second))
		if p.item != want {
			t.Errorf("%s, want %s", p.item, want)
		}
		set := NewSet(Default, 429, p)
		applied := []Applied{{0, &algorithms.Outcome{Retry: time.Second, Next: time.Second}}}
		var body struct {
			Names []string `json:"violated-policies"`
		}
		if err := json.Unmarshal(set.Problem(applied), &body); err != nil || !slices.Equal(body.Names, []string{Name(name)}) {
			t.Errorf("%s: violated %q: %v", name, body.Names, err)
		}
		h, sc := make(http.Header), new(Scratch)
		set.Write(h, sc, applied, time.Time{})
		checkFields(t, h)
		if got := list(t, h, "RateLimit")[0].Value; got != Name(name) {
			t.Errorf("%s: RateLimit names %q", name, got)
		}
		if Retract(h, sc, name); len(h) > 0 {
			t.Errorf("%s: not retracted: %v", name, h)
		}
	}
}

// Every response has its own slices: what a handler does to one must not reach another, nor another
// field.
func TestEveryResponseHasItsOwnSlices(t *testing.T) {
	set := NewSet(Families{IETF: true, Draft6: true, X: true}, 429, NewPolicy("api", fixed(t, 100, time.Minute)))
	write := func() http.Header {
		h := make(http.Header)
		var sc Scratch
		set.Write(h, &sc, []Applied{{0, &algorithms.Outcome{Remaining: 0, Next: time.Second}}}, time.Unix(0, 0))
		WriteRefusal(h, &sc, time.Second)
		WriteProblem(h, &sc)
		return h
	}
	first, untouched := write(), write()
	for name := range first {
		first[name][0] = "edited"
		first[name] = append(first[name], "appended")
	}
	second := write()
	for name, values := range second {
		if !slices.Equal(values, untouched[name]) || len(values) != 1 {
			t.Errorf("%s: %q after another response was edited", name, values)
		}
	}
	for name, values := range first {
		if !slices.Equal(values, []string{"edited", "appended"}) {
			t.Errorf("%s: %q: fields of one response share memory", name, values)
		}
	}
}

// More text than the scratch has room for moves on without touching what was written.
func TestScratchOverflow(t *testing.T) {
	var policies []Policy
	var applied []Applied
	for i := range 40 {
		policies = append(policies, NewPolicy(strings.Repeat(string(rune('a'+i%26)), i+1), fixed(t, 1000, time.Minute)))
		applied = append(applied, Applied{i, &algorithms.Outcome{Remaining: int64(i), Next: time.Minute}})
	}
	set := NewSet(Families{IETF: true, X: true}, 429, policies...)
	h := make(http.Header)
	var sc Scratch
	set.Write(h, &sc, applied[:1], time.Unix(1000, 0))
	small := h.Get("RateLimit")
	set.Write(h, &sc, applied, time.Unix(1000, 0))
	WriteRefusal(h, &sc, time.Minute)
	if h["Ratelimit"][0] != small || small != `"a";r=0;t=60` {
		t.Errorf("an earlier text changed to %q", h["Ratelimit"][0])
	}
	if got := h["Ratelimit"][1]; !strings.HasPrefix(got, `"a";r=0;t=60, "bb";r=1;t=60, `) || strings.Count(got, ";t=60") != 40 {
		t.Errorf("RateLimit %q", got)
	}
	if h.Get("Retry-After") != "60" || h.Get("X-RateLimit-Reset") != "1060" {
		t.Errorf("got %v", h)
	}
}

// A queue's policy is its bucket's: the one in service and those that may wait, delayed or not.
func TestQueuePolicy(t *testing.T) {
	for _, c := range []struct {
		p    algorithms.Policy
		want string
	}{
		{leaky.Queue(10, time.Second, 5, 0, 0), `"q";q=6;w=1`},
		{leaky.Queue(10, time.Second, 5, 3, 0), `"q";q=6;w=1`},
		{leaky.Queue(10, time.Minute, 5, 0, 0), `"q";q=6;w=36`},
		{leaky.Queue(10, time.Minute, 5, 0, 10*time.Second), `"q";q=3;w=18`}, // no more can begin within 10 s
	} {
		if p := NewPolicy("q", limit(t, c.p)); p.item != c.want {
			t.Errorf("%+v: %s, want %s", c.p, p.item, c.want)
		}
	}
}

// The unit of what is in flight on the wire, from what the core answers while leases are taken and
// given back.
func TestInFlightOnTheWire(t *testing.T) {
	l := limit(t, algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: 2, Window: 30 * time.Second})
	set := NewSet(Families{IETF: true, X: true, XDelta: true}, 429, NewPolicy("exports", l))
	var counter algorithms.Counter
	var marks []int64
	for i, want := range []string{`"exports";r=1`, `"exports";r=0`, `"exports";r=0`, `"exports";r=1`, `"exports";r=2`} {
		charge := algorithms.Charge{Key: "k", Limit: l, Cost: 1}
		if i > 2 {
			charge.Cost, charge.Mark = -1, marks[i-3]
		}
		var out [1]algorithms.Outcome
		if !algorithms.Decide(int64(i)+1_796_000_000_000_000, []algorithms.Charge{charge}, []*algorithms.Counter{&counter}, out[:]) {
			out[0].OK = false
		}
		marks = append(marks, out[0].Mark)
		h, sc := make(http.Header), new(Scratch)
		set.Write(h, sc, []Applied{{0, &out[0]}}, time.Time{})
		if !out[0].OK {
			WriteRefusal(h, sc, out[0].Retry)
		}
		checkFields(t, h)
		unit, _ := list(t, h, "RateLimit-Policy")[0].Params.Get("qu")
		if got := h.Get("RateLimit"); got != want || unit != "concurrent-requests" || (i == 2) == out[0].OK {
			t.Errorf("step %d: %q, want %q; qu=%v; passed: %v", i, got, want, unit, out[0].OK)
		}
		if h.Get("Retry-After") != "" || h.Get("X-RateLimit-Limit") != "" {
			t.Errorf("step %d: %v", i, h)
		}
	}
}

// The whole request is allowed two allocations; these fields take none of them once the scratch is
// there.
func TestNoAllocations(t *testing.T) {
	set := NewSet(Default, 429, NewPolicy("api", fixed(t, 100, time.Minute)), NewPolicy("login", fixed(t, 5, time.Hour)),
		NewPolicy("exports", limit(t, algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: 5, Window: time.Minute})))
	outcomes := []algorithms.Outcome{{OK: true, Remaining: 99, Next: time.Second}, {Remaining: 0, Next: time.Hour, Retry: time.Hour}}
	applied := []Applied{{0, &outcomes[0]}, {1, &outcomes[1]}}
	inFlight := []Applied{applied[0], {2, &algorithms.Outcome{OK: true, Remaining: 4, Next: algorithms.Unknown}}}
	h := make(http.Header, 8)
	sc, room := new(Scratch), Values{}
	for name, c := range map[string]struct {
		want float64
		f    func()
	}{
		"passing, one zone":  {0, func() { set.Write(h, sc, applied[:1], time.Time{}) }},
		"passing, two zones": {0, func() { set.Write(h, sc, applied, time.Time{}) }},
		"refused": {0, func() {
			set.Write(h, sc, applied, time.Time{})
			WriteRefusal(h, sc, time.Hour)
			WriteProblem(h, sc)
			set.Problem(applied)
		}},
		"passing, one of them in flight": {0, func() { set.Write(h, sc, inFlight, time.Time{}) }},
		"banned":                         {0, func() { set.AbnormalUsage(applied) }},
	} {
		got := testing.AllocsPerRun(100, func() {
			clear(h)
			*sc = Scratch{}
			sc.Lend(&room)
			c.f()
		})
		if got != c.want {
			t.Errorf("%s: %v allocations, want %v", name, got, c.want)
		}
	}
}

func BenchmarkWrite(b *testing.B) {
	set := NewSet(Default, 429, NewPolicy("api", fixed(b, 100, time.Minute)), NewPolicy("login", fixed(b, 5, time.Hour)))
	outcomes := []algorithms.Outcome{{OK: true, Remaining: 99, Next: time.Second}, {OK: true, Remaining: 4, Next: time.Hour}}
	applied := []Applied{{0, &outcomes[0]}, {1, &outcomes[1]}}
	h := make(http.Header, 8)
	for name, n := range map[string]int{"one zone": 1, "two zones": 2} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				clear(h)
				sc := new(Scratch)
				set.Write(h, sc, applied[:n], time.Time{})
			}
		})
	}
	b.Run("refused", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			clear(h)
			sc := new(Scratch)
			set.Write(h, sc, applied[:1], time.Time{})
			WriteRefusal(h, sc, time.Hour)
			WriteProblem(h, sc)
		}
	})
}

// What another handler of the request told of a policy is taken out, and nothing else: F33 on the
// wire.
func TestRetract(t *testing.T) {
	h := http.Header{
		keyPolicy: {`"z";q=10;w=60, "other";q=5;w=1`, `"z";q=10;w=60`},
		keyLimit:  {`"z";r=9;t=60, "other";r=5`, `"zz";r=1`},
	}
	sc := new(Scratch)
	Retract(h, sc, "z")
	if got := h[keyPolicy]; !slices.Equal(got, []string{`"other";q=5;w=1`}) {
		t.Errorf("%q", got)
	}
	if got := h[keyLimit]; !slices.Equal(got, []string{`"other";r=5`, `"zz";r=1`}) {
		t.Errorf("%q", got)
	}
	if Retract(h, sc, "other", "zz"); h[keyLimit] != nil || h[keyPolicy] != nil {
		t.Errorf("%v", h)
	}
}

// However many fields are added, none takes the place of another.
func TestScratchKeepsEveryValue(t *testing.T) {
	var sc Scratch
	h := make(http.Header)
	for i := range 1000 {
		sc.add(h, strconv.Itoa(i), strconv.Itoa(i))
	}
	for i := range 1000 {
		if key := strconv.Itoa(i); h[key][0] != key {
			t.Fatalf("field %s says %s", key, h[key][0])
		}
	}
}
