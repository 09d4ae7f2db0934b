//go:build walks

package sluice

// The walks of docs/design/architecture.md, each taken with a dummy: `make walks`.

import (
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// edit adds text behind the first place in a file where another stands.
type edit struct{ file, behind, add string }

// walks are those of docs/design/architecture.md, each with a dummy of what it adds, and a test
// that only passes with it.
var walks = map[string]struct {
	edits []edit
	test  edit // behind: the room
}{
	"a placeholder": {
		[]edit{{"record.go", "switch what {\n\tcase \"limit\":\n\t\treturn a.limit.Capacity\n", "\tcase \"dummy\":\n\t\treturn a.cost\n"}},
		edit{"walk_test.go", ".", `package sluice
import "testing"
func TestWalk(t *testing.T) {
	if got := (&answer{cost: 7}).placeholder("dummy"); got != int64(7) { t.Error(got) }
}`},
	},
	"a word": {
		[]edit{
			{"caddyfile/config.go", "	Enforce Number `json:\"enforce,omitempty\"`\n", "	Dummy Number `json:\"dummy,omitempty\"`\n"},
			{"caddyfile/parse.go", "zoneWords = []string{\n", "\t\t\"dummy\",\n"},
			{"caddyfile/parse.go", "\t\treturn p.number(name, \"enforce\", &z.Enforce)\n", "\tcase \"dummy\":\n\t\treturn p.number(name, \"dummy\", &z.Dummy)\n"},
			{"caddyfile/rule.go", "type Rule struct {\n", "\tDummy string\n"},
			{"caddyfile/zone.go", "z.enforce, ", "z.dummy, "},
			{"caddyfile/enforce.go", "package caddyfile\n", ""},
		},
		edit{"dummy_test.go", "caddyfile", `package caddyfile
import "testing"
func (z *zoneCompiler) dummy() error { z.out.Dummy = string(z.z.Dummy); return nil }
func TestWalk(t *testing.T) {
	if got := rule(t, Zone{Dummy: "7"}).Dummy; got != "7" { t.Error(got) }
}`},
	},
	"a place to count": {
		[]edit{
			{"counting/counting.go", "const (\n\tLocal  Place = iota // in this process\n", "\tDummy\n"},
			{"counting/counting.go", "\tByDenying            // nobody, and the request is refused for that\n", "\tByDummy\n"},
			{"counting/decision.go", "\tif e.Place == Shared {\n", ""},
			{"counting/decision.go", "\ta := &d.Answers[len(d.Answers)-1]\n", "\tif e.Place == Dummy {\n\t\ta.By = ByDummy\n\t}\n"},
			{"counting/decision.go", "d.both = len(d.charges); e.Place == Local", " || e.Place == Dummy"},
			{"counting/receipt.go", "\tcase i.By == ByShared:\n", ""},
			{"rule.go", "switch compiled.OnStoreError {\n", ""},
		},
		edit{"walk_test.go", "counting", `package counting
import ("context"; "testing"; "time"; "github.com/caddy-sluice/sluice/algorithms"; "github.com/caddy-sluice/sluice/memstore")
func TestWalk(t *testing.T) {
	limit, _ := algorithms.Compile("z", algorithms.Policy{Algorithm: algorithms.FixedWindow, Quota: 5, Window: time.Hour})
	var d Decision
	d.Begin(&Counters{Process: NewProcess(memstore.New(), time.Now)})
	d.Ask(d.Add(&Entry{Key: "k", Limits: []*algorithms.Limit{limit}, Cost: 1, Place: Dummy}))
	d.Decide(context.Background())
	if a := &d.Answers[0]; a.By != ByDummy || a.Outcomes[0].Remaining != 4 { t.Errorf("%+v", a) }
}`},
	},
	"an algorithm": {
		[]edit{
			{"algorithms/policy.go", "\tLeakyBucket\n", "\tDummyWindow\n"},
			{"algorithms/policy.go", "LeakyBucket: \"leaky_bucket\", ", "DummyWindow: \"dummy_window\", "},
			{"algorithms/kernel.go", "LeakyBucket: Meter, ", "DummyWindow: Fixed, "},
		},
		edit{"walk_test.go", "algorithms", `package algorithms
import ("testing"; "time")
func TestWalk(t *testing.T) {
	a, ok := ParseAlgorithm("dummy_window")
	l, err := Compile("z", Policy{Algorithm: a, Quota: 5, Window: time.Hour})
	if !ok || err != nil { t.Fatal(ok, err) }
	out := make([]Outcome, 1)
	if !Decide(1, []Charge{{Limit: l, Cost: 5}}, []*Counter{{}}, out) || out[0].Remaining != 0 { t.Errorf("%+v", out) }
}`},
	},
}

// Each walk leads to where its words say: what it adds along it builds in every room, and works.
func TestWalks(t *testing.T) {
	var files []string
	err := filepath.WalkDir(".", func(file string, d fs.DirEntry, err error) error {
		switch {
		case err == nil && d.IsDir() && slices.Contains([]string{".git", "bench", "bin"}, file):
			return filepath.SkipDir
		case err == nil && !d.IsDir() && slices.Contains([]string{".go", ".mod", ".sum", ".lua", ".md"}, filepath.Ext(file)):
			files = append(files, file)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, walk := range walks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for _, file := range files {
				if strings.HasSuffix(file, "_test.go") && path.Dir(file) != "caddyfile" {
					continue
				}
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				for _, e := range walk.edits {
					if e.file == file && !strings.Contains(string(text), e.behind) {
						t.Errorf("%s has no %q: the walk in docs/design/architecture.md is not what it was", file, e.behind)
					} else if e.file == file {
						text = []byte(strings.Replace(string(text), e.behind, e.behind+e.add, 1))
					}
				}
				write(t, filepath.Join(dir, file), text)
			}
			write(t, filepath.Join(dir, walk.test.behind, walk.test.file), []byte(walk.test.add))
			for _, args := range [][]string{{"build", "./..."}, {"test", "-run", "^TestWalk$", "./" + walk.test.behind}} {
				if walk.test.behind == "caddyfile" && args[0] == "build" {
					continue // its dummy stands beside the test
				}
				cmd := exec.Command("go", args...)
				cmd.Dir = dir
				if out, err := cmd.CombinedOutput(); err != nil {
					t.Errorf("go %v: %v\n%s", args, err, out)
				}
			}
		})
	}
}

func write(t *testing.T, name string, text []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, text, 0o600); err != nil {
		t.Fatal(err)
	}
}
