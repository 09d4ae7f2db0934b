package storetest

import (
	"strings"
	"testing"

	"github.com/caddy-sluice/sluice/algorithms"
)

func newReference(_ *testing.T, clock *Clock) algorithms.Store { return NewReference(clock.Now) }

func TestReference(t *testing.T) { Run(t, newReference) }

func TestReferenceDifferential(t *testing.T) {
	for seed := range uint64(4) {
		clock := NewClock()
		Differential(t, newReference(t, clock), clock, 25_000, seed)
	}
}

// The random walk meets each kind of answer often: a store that got one of them wrong would be
// found.
func TestWalkMeetsEverything(t *testing.T) {
	clock := NewClock()
	w, store := newWalk(t, clock, 1), NewReference(clock.Now)
	met := map[string]int{}
	count := func(what string, is bool) {
		if is {
			met[what]++
		}
	}
	const n = 20_000
	for range n {
		batch := w.batch()
		out := make([]algorithms.Outcome, len(batch))
		if err := store.Apply(t.Context(), batch, out); err != nil {
			t.Fatal(err)
		}
		for i, o := range out {
			c := &batch[i]
			count("refused", !o.OK && o.Retry != algorithms.Never)
			count("never", o.Retry == algorithms.Never)
			count("delayed", o.Delay > 0)
			count("refused for the wait alone", c.Limit.MaxWait > 0 && !o.OK && o.Retry < algorithms.Never && c.Cost == 1)
			count("refused in flight", o.Retry == algorithms.Unknown)
			count("given back in flight", o.Mark != 0 && c.Cost < 0 && c.Limit.Algorithm == algorithms.Concurrency)
			count("given back in a queue", o.Mark != 0 && c.Cost < 0 && !c.Force && c.Limit.Queue > 0)
			count("refused by a check", !o.OK && c.Check)
			count("banned", !o.OK && c.Limit.Window == tick)
			count("forced", o.Mark != 0 && c.Force && c.Cost > 0)
		}
		w.step(batch, out)
	}
	t.Log(met)
	if len(met) != 10 {
		t.Errorf("met %v, want all ten", met)
	}
	for what, times := range met {
		if times < n/200 {
			t.Errorf("%s: %d in %d batches", what, times, n)
		}
	}
}

func TestReferenceTraces(t *testing.T) { Traces(t, "../../testdata/traces", newReference) }

// A trace that cannot be read says where and why.
func TestTraceErrors(t *testing.T) {
	const limit = "limit z fixed_window 5/1s\n"
	for text, want := range map[string]string{
		"limit z":                                      "1: want: limit",
		"limit z fixed 5/1s":                           `1: unknown algorithm "fixed"`,
		"limit z fixed_window x/1s":                    `1: strconv`,
		"limit z fixed_window 5":                       `1: time: invalid duration`,
		"limit z token_bucket 5/1s burst x":            `1: strconv`,
		"limit z fixed_window 5/1s burst 3":            "1: burst out of range",
		"limit z fixed_window 5/1s burst":              "1: want: limit",
		"limit z fixed_window 5/1s delay 3":            "1: want: limit",
		"limit z leaky_bucket 5/1s burst 5 queue x":    "1: strconv",
		"limit z leaky_bucket 5/1s burst 5 queue 5":    "1: queue out of range",
		"limit z leaky_bucket 5/1s burst 5 max_wait x": "1: time: invalid duration",
		limit + "0s z k 1":                             "2: no answer",
		limit + "0 z k 1 -> ok":                        `2: answer ["ok"]`,
		limit + "soon z k 1 -> ok 1":                   `2: time: invalid duration "soon"`,
		limit + "0s z k -> ok 1":                       `2: charge ["z" "k"]`,
		limit + "\n0s y k 1 -> ok 1":                   `3: no limit "y"`,
		limit + "0s z k one -> ok 1":                   "2: strconv",
		limit + "0s z k 1 twice -> ok 1":               `2: unknown option "twice"`,
		limit + "0s z k 1 as -> ok 1":                  `2: option "as" wants a value`,
		limit + "0s z k 1 held x -> ok 1":              `2: strconv`,
		limit + "0s z k 1 ; z k 1 -> ok 1":             "2: 2 charges with 1 answers",
		limit + "0s z k 1 -> ok x":                     "2: strconv",
		limit + "0s z k 1 -> no 1":                     `2: answer ["no" "1"]`,
		limit + "0s z k 1 -> no 1 retry x":             `2: time: invalid duration "x"`,
		limit + "0s z k 1 -> ok 1 later":               `2: answer ["ok" "1" "later"]`,
		limit + "0s z k 1 -> ok 1 next x":              `2: time: invalid duration "x"`,
		limit + "0s z k 1 -> ok 1 delay x":             `2: time: invalid duration "x"`,
		limit + "0s z k 1 -> ok 1 retry 1s":            `2: answer ["ok" "1" "retry" "1s"]`,
		limit + "0s z k 1 -> ok 1 # fine\n-> x":        "3: time",
	} {
		if _, err := parseTrace(text); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
}

// Replaying a trace finds a wrong answer, a missing mark and a failed store.
func TestTraceFindsDifferences(t *testing.T) {
	const limit = "limit z fixed_window 5/1s\n"
	for text, want := range map[string]string{
		"0s z k 1 -> ok 4 next 1s":    "",
		"0s z k 1 -> ok 5":            `2: charge 1 is answered "ok 4", want "ok 5"`,
		"0s z k 1 -> ok 4 next never": `2: charge 1 is answered "ok 4 next 1s", want "ok 4 next never"`,
		"0s z k 6 -> no 5 retry 1s":   `2: charge 1 is answered "no 5 retry never", want "no 5 retry 1s"`,
		"0s z k 1 -> no 4 retry 1s":   `2: charge 1 is answered "ok 4", want "no 4 retry 1s"`,
		"0s z k 1 -> ok 4 delay 1s":   `2: charge 1 is answered "ok 4", want "ok 4 delay 1s"`,
		"limit q leaky_bucket 1/1s burst 3 queue 2\n0s q k 1 ; q k 1 -> ok 1 ; ok 1\n0s q k 1 -> ok 0 delay 1s": `4: charge 1 is answered "ok 0 delay 2s", want "ok 0 delay 1s"`,
		"limit c concurrency 1/1s\n0s c k 1 -> ok 0 next 1s":                                                    `3: charge 1 is answered "ok 0 next unknown", want "ok 0 next 1s"`,
		"0s z k 6 check -> ok 5":           `2: charge 1 is answered "no 5 retry never", want "ok 5"`,
		"0s z k -1 of a -> ok 5":           `2: nothing was taken as "a"`,
		"0s z k 1 as a -> ok 4\nx":         "3: no answer",
		"0s z a 1 ; z k 1 -> ok 4 ; ok 3":  `2: charge 2 is answered "ok 4", want "ok 3"`,
		"0s z a 1 ; z a -1 -> ok 4 ; ok 4": "",
	} {
		clock := NewClock()
		steps, err := parseTrace(limit + text)
		if err == nil {
			err = replay(NewReference(clock.Now), clock, steps)
		}
		if (err == nil) != (want == "") || (err != nil && err.Error()[:min(len(want), len(err.Error()))] != want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func BenchmarkReference(b *testing.B) {
	Bench(b, func(b *testing.B) algorithms.Store {
		clock := NewClock() // a microsecond a decision
		return NewReference(func() int64 { clock.Advance(tick); return clock.Now() })
	})
}

// Every algorithm is in the walk that holds each store against the reference, the script among
// them, and in the suite of promises, unless it has a suite of its own.
func TestEveryAlgorithmIsWalked(t *testing.T) {
	walked, promised := map[algorithms.Algorithm]bool{}, map[algorithms.Algorithm]bool{algorithms.Concurrency: true}
	for _, p := range walkPolicies {
		walked[p.Algorithm] = true
	}
	for _, p := range policies {
		promised[p.Algorithm] = true
	}
	for a := algorithms.Algorithm(1); a.Kernel() != 0; a++ {
		if !walked[a] || !promised[a] {
			t.Errorf("%v: in the walk %v, in the suite %v", a, walked[a], promised[a])
		}
	}
}
