package sluice_test

// A fresh machine: what the code starts is what the Makefile installs.

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// prerequisites returns the words behind a target of the Makefile, or behind a variable of that
// name.
func prerequisites(t *testing.T, makefile, target string) []string {
	t.Helper()
	line := regexp.MustCompile(`(?m)^` + target + `\s*:=?(.*)$`).FindStringSubmatch(makefile)
	if line == nil {
		t.Fatalf("the Makefile has no %s", target)
	}
	return strings.Fields(line[1])
}

// started finds the programs that a Go file starts, Go itself and what the project builds left out.
func started(t *testing.T, file string) (programs []string) {
	t.Helper()
	positions := token.NewFileSet()
	tree, err := parser.ParseFile(positions, file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(tree, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		name, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if pkg, ok := name.X.(*ast.Ident); !ok || pkg.Name != "exec" {
			return true
		}
		program := call.Args[0]
		if name.Sel.Name == "CommandContext" {
			program = call.Args[1]
		}
		switch p := program.(type) {
		case *ast.BasicLit:
			if text, _ := strconv.Unquote(p.Value); text != "go" {
				programs = append(programs, text)
			}
		case *ast.Ident, *ast.IndexExpr: // a Caddy that the tests built, or the test itself
			if id, ok := p.(*ast.Ident); ok && id.Name != "bin" && id.Name != "self" {
				t.Errorf("%s starts %s: write the program's name there, so that this test finds it", positions.Position(call.Pos()), id.Name)
			}
		default:
			t.Errorf("%s starts what this test cannot read", positions.Position(call.Pos()))
		}
		return true
	})
	return programs
}

// Every program that tests and benchmarks start is installed by the command that starts it, from
// one list (G29).
func TestTheMakefileInstallsWhatTheCodeStarts(t *testing.T) {
	content, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	makefile := string(content)
	all := prerequisites(t, makefile, "PROGRAMS")
	commands := func(file string) []string {
		switch {
		case strings.HasPrefix(file, "bench/shared/"):
			return []string{"bench-redis"}
		case strings.HasPrefix(file, "bench/server/"):
			return []string{"bench-server"}
		case strings.HasPrefix(file, "bench/failure/"):
			return []string{"bench-failure"}
		case strings.HasPrefix(file, "bench/"):
			return []string{"bench"}
		}
		return []string{"test", "race"}
	}
	needed := []string{"gcc"} // the race detector's
	err = filepath.WalkDir(".", func(file string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(file) != ".go" {
			return err
		}
		for _, program := range started(t, file) {
			needed = append(needed, program)
			for _, command := range commands(filepath.ToSlash(file)) {
				if !slices.Contains(prerequisites(t, makefile, command), program) {
					t.Errorf("%s starts %s, which `make %s` does not install", file, program, command)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(needed)
	slices.Sort(all)
	if needed = slices.Compact(needed); !slices.Equal(needed, all) {
		t.Errorf("PROGRAMS in the Makefile are %v, but the code starts %v", all, needed)
	}
}
