package redistest

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// DocumentedUser is the command that makes the user "limiter" with password "word" and the rights
// that a guide names for some places, in lines such as "- every server: `+get …`".
func DocumentedUser(t testing.TB, guide string, places ...string) []any {
	t.Helper()
	text, err := os.ReadFile(guide)
	if err != nil {
		t.Fatal(err)
	}
	command := []any{"acl", "setuser", "limiter", "on", ">word"}
	for _, place := range places {
		found := regexp.MustCompile("(?m)- .*" + regexp.QuoteMeta(place) + ": `([^`]*)`").FindSubmatch(text)
		if found == nil {
			t.Fatalf("%s names no rights for %s", guide, place)
		}
		for right := range strings.FieldsSeq(string(found[1])) {
			command = append(command, right)
		}
	}
	return command
}

// Denied fails the test if the user that [DocumentedUser] makes was denied something on the server, or may do what no limiter needs.
func Denied(t testing.TB, s *Server, forbidden ...string) {
	t.Helper()
	if denials, _ := s.Do("acl", "log").([]any); len(denials) != 0 {
		t.Error("denied:", denials)
	}
	for _, text := range forbidden {
		try := []any{"acl", "dryrun", "limiter"}
		for word := range strings.FieldsSeq(text) {
			try = append(try, word)
		}
		if answer, _ := s.Do(try...).(string); !strings.Contains(answer, "no permissions") {
			t.Errorf("the user may %s: %s", text, answer)
		}
	}
}
