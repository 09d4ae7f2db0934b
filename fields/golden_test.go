package fields

// Every file of testdata/fields is a case: what applied, a line of dashes, the response that
// follows from it. `go test ./fields -update` rewrites the responses; read the difference before
// committing it.

import (
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

var update = flag.Bool("update", false, "rewrite the goldens")

func TestGoldens(t *testing.T) {
	files, err := filepath.Glob("../testdata/fields/*.txt")
	if err != nil || len(files) < 10 {
		t.Fatalf("goldens: %d files, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			input, want, _ := strings.Cut(string(text), "---\n")
			c := readCase(t, input)
			got := c.response(t)
			if *update {
				if err := os.WriteFile(file, []byte(input+"---\n"+got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if got != want {
				t.Errorf("got:\n%s\nwant:\n%s", got, want)
			}
		})
	}
}

// testCase is a golden's upper half.
type testCase struct {
	families Families
	status   int
	policies []Policy
	applied  []Applied
	header   http.Header
	now      time.Time
	retry    time.Duration
	refused  bool
	banned   bool
}

// readCase reads the lines
//
//	headers <words>                                    as in the directive
//	policy <name> <algorithm>|concurrency <quota> <window> [<burst> [<queue>]]
//	passed|refused|banned <name> <remaining> <next>|never|unknown [<retry>|never|unknown]
//	unasked <name>
//	existing <field>: <value>                          already in the response
//	now <RFC 3339>
//	status <code>
func readCase(t *testing.T, input string) *testCase {
	c := &testCase{status: 429, header: make(http.Header), families: Default, retry: algorithms.Unknown}
	for line := range strings.Lines(input) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		w := strings.Fields(line)
		switch w[0] {
		case "headers":
			families, err := parseFamilies(w[1:])
			check(t, err)
			c.families = families
		case "policy":
			c.policies = append(c.policies, readPolicy(t, w[1:]))
		case "passed", "refused", "banned":
			o := &algorithms.Outcome{OK: w[0] == "passed", Remaining: number(t, w[2]), Next: wait(t, w[3])}
			if !o.OK {
				o.Retry, c.refused, c.banned = wait(t, w[4]), true, c.banned || w[0] == "banned"
				c.retry = max(c.retry, o.Retry)
			}
			c.applied = append(c.applied, Applied{Policy: c.index(t, w[1]), Outcome: o})
		case "unasked":
			c.applied = append(c.applied, Applied{Policy: c.index(t, w[1])})
		case "existing":
			name, value, _ := strings.Cut(strings.TrimPrefix(line, "existing "), ": ")
			c.header.Add(name, value)
		case "now":
			now, err := time.Parse(time.RFC3339Nano, w[1])
			check(t, err)
			c.now = now
		case "status":
			c.status = int(number(t, w[1]))
		default:
			t.Fatalf("unknown line %q", line)
		}
	}
	return c
}

func readPolicy(t *testing.T, w []string) Policy {
	algorithm, ok := algorithms.ParseAlgorithm(w[1])
	if w[1] == algorithms.Concurrency.String() {
		algorithm, ok = algorithms.Concurrency, true
	}
	if !ok {
		t.Fatalf("algorithm %q", w[1])
	}
	p := algorithms.Policy{Algorithm: algorithm, Quota: number(t, w[2]), Window: wait(t, w[3])}
	if len(w) > 4 {
		p.Burst = number(t, w[4])
	}
	if len(w) > 5 {
		p.Queue = number(t, w[5])
	}
	l, err := algorithms.Compile(w[0], p)
	check(t, err)
	return NewPolicy(w[0], l)
}

// index finds a policy by name.
func (c *testCase) index(t *testing.T, name string) int {
	i := slices.IndexFunc(c.policies, func(p Policy) bool { return p.Name() == name })
	if i < 0 {
		t.Fatalf("no policy %q", name)
	}
	return i
}

// response is the golden's lower half: the fields in alphabetical order, and the body of a refusal.
func (c *testCase) response(t *testing.T) string {
	set := NewSet(c.families, c.status, c.policies...)
	if set.NeedsNow() && c.now.IsZero() {
		t.Fatal("the case needs a now line")
	}
	var sc Scratch
	set.Write(c.header, &sc, c.applied, c.now)
	body := ""
	if c.refused {
		WriteRefusal(c.header, &sc, c.retry)
		WriteProblem(c.header, &sc)
		problem := set.Problem
		if c.banned {
			problem = set.AbnormalUsage
		}
		body = "\n" + string(problem(c.applied)) + "\n"
	}
	checkFields(t, c.header)
	var lines []string
	for name, values := range c.header {
		if http.CanonicalHeaderKey(name) != name {
			t.Errorf("%s is stored under a key that is not canonical", name)
		}
		for i, v := range values { // further lines of a field keep their order
			lines = append(lines, fmt.Sprintf("%s\x00%d\x00: %s\n", name, i, v))
		}
	}
	slices.Sort(lines)
	var b strings.Builder
	for _, line := range lines {
		parts := strings.SplitN(line, "\x00", 3)
		b.WriteString(parts[0] + parts[2])
	}
	return b.String() + body
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func number(t *testing.T, s string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(s, 10, 64)
	check(t, err)
	return n
}

func wait(t *testing.T, s string) time.Duration {
	t.Helper()
	switch s {
	case "never":
		return algorithms.Never
	case "unknown":
		return algorithms.Unknown
	}
	d, err := time.ParseDuration(s)
	check(t, err)
	return d
}

// parseFamilies reads the words that the directive headers has.
func parseFamilies(words []string) (f Families, err error) {
	for _, word := range words {
		switch word {
		case "ietf":
			f.IETF = true
		case "draft6":
			f.Draft6 = true
		case "x", "epoch":
			f.X = true
		case "delta":
			f.XDelta = true
		case "off":
		default:
			return f, fmt.Errorf("unknown family %q", word)
		}
	}
	return f, nil
}
