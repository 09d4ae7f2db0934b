package storetest

// Traces: requests with their right answers, one a line, for people first. The same files are read
// by every store's tests and, through the Reference, by those of the pure decision. The form:
//
//	limit <zone> <algorithm> <quota>/<window> [burst <n>] [queue <n>] [max_wait <wait>]
//	                                                           a later line for the same zone is a reload
//	<time> <zone> <key> <cost> [option...] [; ...] -> <answer> [; ...]
//
// A time counts from the start of the trace, a whole number of days since the epoch; it may step
// back. Options: peek, check, force, dry, held <n>, as <name> (remember what was taken), of <name>
// (give it back). An answer is "ok <remaining>", with "delay <wait>" unless it is 0, or "no
// <remaining> retry <wait>"; then, if it is to be checked, "next <wait>". A wait is a Go duration,
// never or unknown. Empty lines and what follows a # are skipped.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Traces replays every *.trace file of dir, each on a new store.
func Traces(t *testing.T, dir string, newStore func(t *testing.T, clock *Clock) algorithms.Store) {
	files, err := filepath.Glob(filepath.Join(dir, "*.trace"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no *.trace files in %s: %v", dir, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		steps, err := parseTrace(string(text))
		if err != nil {
			t.Fatalf("%s:%v", filepath.Base(file), err)
		}
		t.Run(strings.TrimSuffix(filepath.Base(file), ".trace"), func(t *testing.T) {
			clock := NewClock()
			store := newStore(t, clock)
			defer func() {
				if err := store.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
			}()
			if err := replay(store, clock, steps); err != nil {
				t.Fatalf("%s:%v", filepath.Base(file), err)
			}
		})
	}
}

// traceStep is one request of a trace.
type traceStep struct {
	line    int
	at      time.Duration
	charges []algorithms.Charge
	as, of  []string // per charge: the name its mark is kept under, the name of the mark it gives back
	want    []traceAnswer
}

type traceAnswer struct {
	algorithms.Outcome
	next bool // whether Next is to be checked
}

func replay(store algorithms.Store, clock *Clock, steps []traceStep) error {
	marks := map[string]int64{}
	start := clock.Now()
	for _, s := range steps {
		clock.Set(start + s.at.Microseconds())
		for i, name := range s.of {
			if name == "" {
				continue
			}
			mark, ok := marks[name]
			if !ok {
				return fmt.Errorf("%d: nothing was taken as %q", s.line, name)
			}
			s.charges[i].Mark = mark
		}
		out := make([]algorithms.Outcome, len(s.charges))
		if err := store.Apply(context.Background(), s.charges, out); err != nil {
			return fmt.Errorf("%d: %w", s.line, err)
		}
		for i, want := range s.want {
			got := out[i]
			if !want.next {
				want.Next = got.Next
			}
			if want.Mark = got.Mark; got != want.Outcome {
				return fmt.Errorf("%d: charge %d is answered %q, want %q", s.line, i+1,
					answerText(got, want.next), answerText(want.Outcome, want.next))
			}
			if err := plausible(&s.charges[i], got); err != "" {
				return fmt.Errorf("%d: %s: %+v", s.line, err, got)
			}
			if s.as[i] != "" {
				marks[s.as[i]] = got.Mark
			}
		}
	}
	return nil
}

func answerText(o algorithms.Outcome, next bool) string {
	text := fmt.Sprintf("ok %d", o.Remaining)
	if !o.OK {
		text = fmt.Sprintf("no %d retry %s", o.Remaining, waitText(o.Retry))
	}
	if o.Delay != 0 {
		text += " delay " + waitText(o.Delay)
	}
	if next {
		text += " next " + waitText(o.Next)
	}
	return text
}

func waitText(d time.Duration) string {
	switch d {
	case algorithms.Never:
		return "never"
	case algorithms.Unknown:
		return "unknown"
	}
	return d.String()
}

// parseTrace reads a trace; its errors begin with the line number.
func parseTrace(text string) ([]traceStep, error) {
	limits := map[string]*algorithms.Limit{}
	var steps []traceStep
	for i, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if words[0] == "limit" {
			l, err := parseLimit(words[1:])
			if err != nil {
				return nil, fmt.Errorf("%d: %w", i+1, err)
			}
			limits[l.Space.Zone] = l
			continue
		}
		s, err := parseStep(line, limits)
		if err != nil {
			return nil, fmt.Errorf("%d: %w", i+1, err)
		}
		s.line = i + 1
		steps = append(steps, s)
	}
	return steps, nil
}

func parseLimit(words []string) (*algorithms.Limit, error) {
	if len(words) < 3 || len(words)%2 == 0 {
		return nil, errLimit
	}
	a, ok := algorithms.ParseAlgorithm(words[1])
	if words[1] == algorithms.Concurrency.String() {
		a, ok = algorithms.Concurrency, true
	}
	if !ok {
		return nil, fmt.Errorf("unknown algorithm %q, want one of %v", words[1], algorithms.AlgorithmNames())
	}
	p := algorithms.Policy{Algorithm: a}
	quota, window, _ := strings.Cut(words[2], "/")
	var err error
	if p.Quota, err = strconv.ParseInt(quota, 10, 64); err != nil {
		return nil, err
	}
	if p.Window, err = time.ParseDuration(window); err != nil {
		return nil, err
	}
	for i := 3; i < len(words) && err == nil; i += 2 {
		switch words[i] {
		case "burst":
			p.Burst, err = strconv.ParseInt(words[i+1], 10, 64)
		case "queue":
			p.Queue, err = strconv.ParseInt(words[i+1], 10, 64)
		case "max_wait":
			p.MaxWait, err = time.ParseDuration(words[i+1])
		default:
			err = errLimit
		}
	}
	if err != nil {
		return nil, err
	}
	return algorithms.Compile(words[0], p)
}

var errLimit = errors.New("want: limit <zone> <algorithm> <quota>/<window> [burst <n>] [queue <n>] [max_wait <wait>]")

func parseStep(line string, limits map[string]*algorithms.Limit) (s traceStep, err error) {
	request, answers, ok := strings.Cut(line, "->")
	moment, request, _ := strings.Cut(strings.TrimSpace(request), " ")
	if !ok {
		return s, fmt.Errorf("no answer, want: <time> <zone> <key> <cost> -> <answer>")
	}
	if s.at, err = time.ParseDuration(moment); err != nil {
		return s, err
	}
	for _, text := range strings.Split(request, ";") {
		if err = s.parseCharge(strings.Fields(text), limits); err != nil {
			return s, err
		}
	}
	for _, text := range strings.Split(answers, ";") {
		a, err := parseAnswer(strings.Fields(text))
		if err != nil {
			return s, err
		}
		s.want = append(s.want, a)
	}
	if len(s.want) != len(s.charges) {
		return s, fmt.Errorf("%d charges with %d answers", len(s.charges), len(s.want))
	}
	return s, nil
}

func (s *traceStep) parseCharge(words []string, limits map[string]*algorithms.Limit) (err error) {
	if len(words) < 3 {
		return fmt.Errorf("charge %q, want: <zone> <key> <cost> [option...]", words)
	}
	c := algorithms.Charge{Key: words[1], Limit: limits[words[0]]}
	if c.Limit == nil {
		return fmt.Errorf("no limit %q above this line", words[0])
	}
	if c.Cost, err = strconv.ParseInt(words[2], 10, 64); err != nil {
		return err
	}
	var as, of string
	for i := 3; i < len(words); i++ {
		var value string
		if i+1 < len(words) {
			value = words[i+1]
		}
		switch words[i] {
		case "peek":
			c.Peek = true
			continue
		case "check":
			c.Check = true
			continue
		case "force":
			c.Force = true
			continue
		case "dry":
			c.DryRun = true
			continue
		case "held":
			c.Held, err = strconv.ParseInt(value, 10, 64)
		case "as":
			as = value
		case "of":
			of = value
		default:
			err = fmt.Errorf("unknown option %q, want peek, check, force, dry, held, as or of", words[i])
		}
		if err == nil && value == "" {
			err = fmt.Errorf("option %q wants a value", words[i])
		}
		if err != nil {
			return err
		}
		i++
	}
	s.charges, s.as, s.of = append(s.charges, c), append(s.as, as), append(s.of, of)
	return nil
}

func parseAnswer(words []string) (a traceAnswer, err error) {
	wrong := fmt.Errorf("answer %q, want: ok <remaining> [delay <wait>] | no <remaining> retry <wait>, then [next <wait>]", words)
	if len(words) < 2 || (words[0] != "ok" && words[0] != "no") {
		return a, wrong
	}
	if a.Remaining, err = strconv.ParseInt(words[1], 10, 64); err != nil {
		return a, err
	}
	a.OK = words[0] == "ok"
	for words = words[2:]; len(words) >= 2; words = words[2:] {
		var wait *time.Duration
		switch words[0] {
		case "retry":
			wait = &a.Retry
		case "delay":
			wait = &a.Delay
		case "next":
			wait, a.next = &a.Next, true
		default:
			return a, wrong
		}
		if *wait, err = parseWait(words[1]); err != nil {
			return a, err
		}
	}
	if len(words) > 0 || a.OK != (a.Retry == 0) {
		return a, wrong
	}
	return a, nil
}

func parseWait(word string) (time.Duration, error) {
	switch word {
	case "never":
		return algorithms.Never, nil
	case "unknown":
		return algorithms.Unknown, nil
	}
	return time.ParseDuration(word)
}
