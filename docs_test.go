package sluice_test

// The commands that operators run before they trust a config, and the configs in the documentation,
// so that it cannot rot.

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/caddy-sluice/sluice/algorithms"
)

// example is a Caddyfile from the documentation.
type example struct{ place, config string }

var fence = regexp.MustCompile("(?ms)^```caddyfile\n(.*?)^```")

// pages lists the documentation.
func pages(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("docs/*.md")
	if err != nil || len(files) < 9 {
		t.Fatal(files, err)
	}
	return append(files, "README.md")
}

// examples finds every block of Caddyfile in the documentation. A block that is only directives is
// put into a site.
func examples(t *testing.T) (found []example) {
	t.Helper()
	for _, file := range pages(t) {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range fence.FindAllSubmatchIndex(content, -1) {
			block := string(content[at[2]:at[3]])
			line := bytes.Count(content[:at[2]], []byte("\n"))
			add := func(config string) {
				found = append(found, example{fmt.Sprintf("%s:%d", file, line+1), config})
			}
			switch first := strings.Fields(block)[0]; {
			case isGrammar(block):
			case first == "rate_limit":
				for _, directive := range directives(block) {
					add(":80 {\n" + directive + "}\n")
				}
			default:
				add(block)
			}
		}
	}
	return found
}

// isGrammar: a block that describes the syntax is no config.
func isGrammar(block string) bool {
	return isDirective(block) || strings.Contains(block, "<address...>")
}

// isDirective: it describes the directive, and not the global option.
func isDirective(block string) bool { return strings.Contains(block, "<matcher>") }

// directives splits a block into its directives: alternatives, of which a site has one.
func directives(block string) (list []string) {
	for line := range strings.Lines(block) {
		if strings.HasPrefix(line, "rate_limit") {
			list = append(list, "")
		}
		list[len(list)-1] += line
	}
	return list
}

// configs are the documentation's examples and the files of testdata that must work.
func configs(t *testing.T) []example {
	all := examples(t)
	for _, pattern := range []string{"testdata/dropin/*.caddyfile", "cmd/caddy/Caddyfile"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(string(content), "# Must not load") {
				all = append(all, example{file, string(content)})
			}
		}
	}
	return all
}

// caddyCommand runs the built binary.
func caddyCommand(t *testing.T, dir string, args ...string) (stdout string, err error) {
	t.Helper()
	bin, err := caddyBinary()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, args...)
	cmd.Env = append(os.Environ(), "XDG_DATA_HOME="+dir, "XDG_CONFIG_HOME="+dir, "HOME="+dir, "REDIS_PASSWORD=any")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("caddy %s: %w\n%s%s", strings.Join(args, " "), err, &out, &errs)
	}
	return out.String(), nil
}

// Every config in the documentation and in testdata adapts, validates, and means the same after
// caddy fmt.
func TestCaddyCommands(t *testing.T) {
	all := configs(t)
	if len(all) < 10 {
		t.Fatalf("only %d configs found", len(all))
	}
	for _, e := range all {
		t.Run(e.place, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			file := filepath.Join(dir, "Caddyfile")
			config := strings.ReplaceAll(e.config, "/var/log/caddy", dir) // where not every user may write
			if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
				t.Fatal(err)
			}
			adapted, err := caddyCommand(t, dir, "adapt", "--config", file, "--adapter", "caddyfile")
			if err != nil {
				t.Fatalf("%v\n%s", err, e.config)
			}
			if !strings.Contains(adapted, `"handler":"rate_limit"`) && !strings.Contains(adapted, `"apps":{"rate_limit"`) {
				t.Error("no rate_limit in", adapted)
			}
			if _, err := caddyCommand(t, dir, "validate", "--config", file, "--adapter", "caddyfile"); err != nil {
				t.Errorf("%v\n%s", err, e.config)
			}
			if _, err := caddyCommand(t, dir, "fmt", "--overwrite", file); err != nil {
				t.Fatal(err)
			}
			again, err := caddyCommand(t, dir, "adapt", "--config", file, "--adapter", "caddyfile")
			if err != nil || withoutPlaces(t, again) != withoutPlaces(t, adapted) {
				formatted, _ := os.ReadFile(file)
				t.Errorf("caddy fmt changes what the file means: %v\n%s", err, formatted)
			}
		})
	}
}

// withoutPlaces leaves out the lines that zones are written at.
func withoutPlaces(t *testing.T, config string) string {
	t.Helper()
	var c any
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	return regexp.MustCompile(`"place":"[^"]*",?`).ReplaceAllString(string(text), "")
}

// JSON validates as it is, and a config that must not load is refused with a reason and status 1.
func TestCaddyValidate(t *testing.T) {
	for file, reason := range map[string]string{
		"several_zones.json": "", "ext.json": "", "distributed.caddyfile": "shared store", "storage.json": "shared store",
	} {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			args := []string{"validate", "--config", filepath.Join("testdata/dropin", file)}
			if filepath.Ext(file) == ".caddyfile" {
				args = append(args, "--adapter", "caddyfile")
			}
			_, err := caddyCommand(t, t.TempDir(), args...)
			switch {
			case reason == "" && err != nil:
				t.Error(err)
			case reason != "" && (err == nil || !strings.Contains(err.Error(), reason)):
				t.Errorf("%v; want an error with %q", err, reason)
			}
		})
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)#]*)(?:#([^)]*))?\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
)

// anchors lists what links may name in a page, as GitHub makes it of headings.
func anchors(page []byte) (list []string) {
	for _, h := range heading.FindAllStringSubmatch(string(page), -1) {
		list = append(list, strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case unicode.IsLetter(r) || unicode.IsDigit(r) || r == '-' || r == '_':
				return unicode.ToLower(r)
			}
			return -1
		}, h[1]))
	}
	return list
}

// Every link within the documentation leads somewhere.
func TestDocumentedLinks(t *testing.T) {
	for _, file := range pages(t) {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range link.FindAllStringSubmatch(string(content), -1) {
			if strings.Contains(l[1], "://") {
				continue
			}
			target := file
			if l[1] != "" {
				target = filepath.Join(filepath.Dir(file), l[1])
			}
			page, err := os.ReadFile(target)
			if err != nil || l[2] != "" && !slices.Contains(anchors(page), l[2]) {
				t.Errorf("%s: %s leads nowhere: %v", file, l[0], err)
			}
		}
	}
}

var documentedMetric = regexp.MustCompile(`caddy_rate_limit_[a-z_]+[a-z]`)

// Every metric that the documentation names in full exists.
func TestDocumentedMetrics(t *testing.T) {
	s := serve(t, "{\n rate_limit {\n redis 127.0.0.1:1\n }\n}\n:80 {\n rate_limit {\n zone z 1/1h {\n queue 1\n concurrency 1\n }\n }\n}")
	eventually(t, 10*time.Second, "the store fails", func() bool { return strings.Contains(s.metrics(), "caddy_rate_limit_store_errors_total{") })
	names := map[string]bool{}
	for _, name := range documentedMetric.FindAllString(s.metrics(), -1) {
		names[name] = true
	}
	for _, file := range pages(t) {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range documentedMetric.FindAllString(string(content), -1) {
			if !names[name] {
				t.Errorf("%s: no metric %s", file, name)
			}
		}
	}
}

// The syntax in the documentation has no word that the parser does not know.
func TestDocumentedWordsExist(t *testing.T) {
	content, err := os.ReadFile("docs/reference.md")
	if err != nil {
		t.Fatal(err)
	}
	words := 0
	for _, block := range fence.FindAllSubmatch(content, -1) {
		if !isGrammar(string(block[1])) {
			continue
		}
		for line := range strings.Lines(string(block[1])) {
			word := strings.Fields(line + " }")[0]
			depth := strings.Count(line, "\t")
			if strings.Trim(word, "abcdefghijklmnopqrstuvwxyz0123456789_") != "" || depth == 0 {
				continue
			}
			config := within(isDirective(string(block[1])), depth, word)
			words++
			if _, err := adapt(config); err != nil && strings.Contains(err.Error(), "unrecognized") {
				t.Errorf("%s: %v", word, err)
			}
		}
	}
	if words < 40 {
		t.Errorf("only %d words found", words)
	}
}

// within puts a word where the grammar of the directive or of the global option has it.
func within(directive bool, depth int, word string) string {
	open := []string{"{", "rate_limit {", "redis a {", "tls {"}[:depth]
	if directive {
		open = []string{":80 {", "rate_limit {", "zone z {"}[:depth+1]
	}
	return strings.Join(open, "\n") + "\n" + word + strings.Repeat("\n}", len(open)) + "\n"
}

// README's table says of every algorithm what it is for, docs/redis.md what it costs there, and the
// reference how it is written.
func TestDocumentedAlgorithms(t *testing.T) {
	for page, form := range map[string]string{
		"README.md": "(?m)^\\|[^|]*`%s`", "docs/redis.md": "(?m)^\\|[^|]*`%s`", "docs/reference.md": `(?m)^\s+algorithm .*\b%s\b`,
	} {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range algorithms.AlgorithmNames() {
			if !regexp.MustCompile(fmt.Sprintf(form, name)).Match(text) {
				t.Errorf("%s does not speak of %s", page, name)
			}
		}
	}
}
