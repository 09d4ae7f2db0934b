package sluice

// The order of the root's files, as docs/design/architecture.md draws it.

import (
	"cmp"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// floors are the root's files from top to bottom. A file may use what files below it define, and
// nothing above.
var floors = []string{
	"module.go", "response.go", "ban.go", "refuse.go", "request.go", "earlier.go", "record.go",
	"app.go", "reload.go", "sharedstore.go", "rule.go", "zone.go", "process.go",
}

func TestFilesLookDown(t *testing.T) {
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	names = slices.DeleteFunc(names, func(name string) bool { return strings.HasSuffix(name, "_test.go") })
	if want := slices.Sorted(slices.Values(floors)); !slices.Equal(names, want) {
		t.Fatalf("files %v, want %v: give a new file its floor here and in docs/design/architecture.md", names, want)
	}
	set := token.NewFileSet()
	var files []*ast.File
	for _, name := range names {
		file, err := parser.ParseFile(set, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	info := types.Info{Uses: map[*ast.Ident]types.Object{}}
	config := types.Config{Importer: nothing{}, Error: func(error) {}} // of what is imported, which is not looked at
	pkg, _ := config.Check("sluice", set, files, &info)
	arrows := map[[2]string][]string{}
	for id, object := range info.Uses {
		if _, field := object.(*types.Var); object.Pkg() != pkg || field && object.Parent() != pkg.Scope() {
			continue
		}
		from, to := set.Position(id.Pos()).Filename, set.Position(object.Pos()).Filename
		if arrow := [2]string{from, to}; from != to && !slices.Contains(arrows[arrow], id.Name) {
			arrows[arrow] = append(arrows[arrow], id.Name)
		}
	}
	for arrow, names := range arrows {
		if slices.Index(floors, arrow[0]) > slices.Index(floors, arrow[1]) {
			t.Errorf("%s looks up to %s, for %v", arrow[0], arrow[1], names)
		}
	}
	t.Logf("%d arrows between %d files", len(arrows), len(files))
	if len(arrows) < 20 {
		t.Error("that is too few to be true")
	}
}

// nothing imports packages that are empty.
type nothing struct{}

func (nothing) Import(name string) (*types.Package, error) {
	pkg := types.NewPackage(name, path.Base(name))
	pkg.MarkComplete()
	return pkg, nil
}

// doors are the rooms that each room may import, and Caddy where it may.
var doors = map[string][]string{
	"algorithms":           {},
	"algorithms/storetest": {"algorithms"},
	"memstore":             {"algorithms"},
	"leaky":                {"algorithms"},
	"fields":               {"algorithms"},
	"redisstore":           {"algorithms"},
	"redisstore/redistest": {},
	"counting":             {"algorithms", "leaky", "memstore"},
	"telemetry":            {"algorithms", "caddy"},
	"caddyfile":            {"algorithms", "fields", "leaky", "redisstore", "caddy"},
	".":                    {"algorithms", "caddyfile", "counting", "fields", "memstore", "redisstore", "telemetry", "caddy"},
	"cmd/caddy":            {".", "caddy"},
}

func TestDoors(t *testing.T) {
	const module = "github.com/caddy-sluice/sluice"
	for room, may := range doors {
		names, _ := filepath.Glob(filepath.Join(room, "*.go"))
		if len(names) == 0 {
			t.Errorf("%s is empty", room)
		}
		for _, name := range names {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
			if err != nil {
				t.Fatal(err)
			}
			for _, i := range file.Imports {
				to, _ := strconv.Unquote(i.Path.Value)
				switch {
				case strings.HasPrefix(to, module):
					to = cmp.Or(strings.TrimPrefix(strings.TrimPrefix(to, module), "/"), ".")
				case strings.HasPrefix(to, "github.com/caddyserver/"):
					to = "caddy"
				default:
					continue
				}
				if !slices.Contains(may, to) {
					t.Errorf("%s imports %s, which %s may not", name, to, room)
				}
			}
		}
	}
}
