package algorithms

import (
	"os/exec"
	"strings"
	"testing"
)

// The package can be used by any Go program and proved by hand because it rests on nothing but the
// standard library.
func TestImportsOnlyTheStandardLibrary(t *testing.T) {
	list, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Fields(string(list)); len(got) != 1 || !strings.HasSuffix(got[0], "/sluice/algorithms") {
		t.Errorf("depends on %v, want nothing outside the standard library", got)
	}
	// What would make it impure although it is in the standard library.
	list, err = exec.Command("go", "list", "-f", `{{join .Imports "\n"}}`, ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range strings.Fields(string(list)) {
		switch path {
		case "context", "errors", "fmt", "math", "sort", "time": // time for Duration; Store names a context
		default:
			t.Errorf("imports %s: a pure decision has no need of it", path)
		}
	}
}
