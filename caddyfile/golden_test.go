package caddyfile

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/caddyauth"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/map"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	_ "github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy/forwardauth"

	"github.com/caddy-sluice/sluice/redisstore"
)

var update = flag.Bool("update", false, "write the goldens as they are now")

// handler stands in for the real one, which this package does not see: the directive is registered
// as module.go does.
type handler struct{ Config }

func (handler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.handlers.rate_limit", New: func() caddy.Module { return new(handler) }}
}

func (handler) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	return next.ServeHTTP(w, r)
}

func init() {
	caddy.RegisterModule(handler{})
	Register(func(c *Config) caddyhttp.MiddlewareHandler { return &handler{Config: *c} })
	httpcaddyfile.RegisterDirectiveOrder("rate_limit", httpcaddyfile.Before, "basic_auth")
	httpcaddyfile.RegisterGlobalOption("rate_limit", ParseGlobal)
}

const separator = "----------\n"

// TestGoldens compares what a config becomes with what stands below it in its file: the adapted
// JSON, the rules that it compiles to with their warnings, or the error. Configs in json/ are
// handlers in JSON, those in global/ are apps.
func TestGoldens(t *testing.T) {
	files, err := filepath.Glob("../testdata/caddyfile/*/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no goldens: %v", err)
	}
	t.Setenv("SLUICE_LIMIT", "20")
	t.Setenv("SLUICE_WORD", "many")
	t.Setenv("SLUICE_EMPTY", "")
	t.Setenv("SLUICE_PASSWORD", "hunter2")
	t.Setenv("SLUICE_REDIS", "rediss://app:hunter2@redis.example.com/3")
	t.Setenv("SLUICE_BAD_REDIS", "redis://app:hunter2#3@redis.example.com")
	for _, file := range files {
		kind := filepath.Base(filepath.Dir(file))
		t.Run(kind+"/"+strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			config, want, _ := strings.Cut(string(content), separator)
			var got string
			switch kind {
			case "json":
				got = load(t, json.RawMessage(config), false, nil)
			case "global":
				got = loadGlobal(json.RawMessage(config))
			default:
				got = adapt(t, config)
			}
			if kind == "errors" && strings.Contains(got, "hunter2") {
				t.Errorf("an error shows a secret: %s", got)
			}
			if kind == "errors" != strings.HasPrefix(got, "error: ") && kind != "json" && kind != "global" {
				t.Errorf("in %s: %s", kind, got)
			}
			if *update {
				if err := os.WriteFile(file, []byte(config+separator+got), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if got != want {
				t.Errorf("got:\n%s\nwant:\n%s", got, want)
			}
		})
	}
}

// adapt returns the adapted config with the rules of its handlers, or the error.
func adapt(t *testing.T, config string) string {
	t.Helper()
	if formatted := string(caddyfile.Format([]byte(config))); formatted != config {
		t.Errorf("not as caddy fmt writes it; want:\n%s", formatted)
	}
	adapter := caddyfile.Adapter{ServerType: httpcaddyfile.ServerType{}}
	result, warnings, err := adapter.Adapt([]byte(config), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return "error: " + err.Error() + "\n"
	}
	for _, w := range warnings {
		t.Errorf("adapter's warning: %v", w)
	}
	var tree any
	if err := json.Unmarshal(result, &tree); err != nil {
		t.Fatal(err)
	}
	pretty, err := json.MarshalIndent(tree, "", "\t")
	if err != nil {
		t.Fatal(err)
	}
	out := string(pretty) + "\n"
	app, _ := tree.(map[string]any)["apps"].(map[string]any)["rate_limit"].(map[string]any)
	if app != nil {
		raw, _ := json.Marshal(app)
		out += loadGlobal(raw)
	}
	server, err := serverIn(tree)
	if err != nil {
		t.Fatal(err)
	}
	for _, raw := range handlersIn(tree) {
		out += load(t, raw, app["redis"] != nil, server)
	}
	return out
}

// loadGlobal decodes the app as Caddy does and describes the shared store.
func loadGlobal(raw json.RawMessage) string {
	var g Global
	if err := caddy.StrictUnmarshalJSON(raw, &g); err != nil {
		return "error: " + err.Error() + "\n"
	}
	s, err := g.Compile()
	switch {
	case err != nil:
		return "error: " + err.Error() + "\n"
	case s == nil:
		return "no shared store\n"
	}
	o := s.Options
	store, err := redisstore.New(o)
	if err != nil {
		return "the store refuses what is taken here: " + err.Error() + "\n"
	}
	defer store.Close()
	encrypted := "no"
	if o.TLS != nil {
		encrypted = fmt.Sprintf("name %q, unchecked %t", o.TLS.ServerName, o.TLS.InsecureSkipVerify)
	}
	out := fmt.Sprintf("redis: %s %v, user %q %q, db %d, master %q, sentinels' user %q %q, tls: %s, timeout %v, pool %d, prefix %s, fleet %d\n",
		o.Mode, o.Addrs, o.Username, o.Password, o.DB, o.MasterName, o.SentinelUsername, o.SentinelPassword, encrypted,
		o.Timeout, o.PoolSize, o.Prefix, s.FleetSize)
	for _, w := range s.Warnings {
		out += "warning: " + w + "\n"
	}
	return out
}

// handlersIn finds the handlers in a config, in order.
func handlersIn(tree any) []json.RawMessage {
	var found []json.RawMessage
	switch v := tree.(type) {
	case []any:
		for _, e := range v {
			found = append(found, handlersIn(e)...)
		}
	case map[string]any:
		if v["handler"] == "rate_limit" {
			raw, _ := json.Marshal(v)
			return []json.RawMessage{raw}
		}
		for _, name := range []string{"apps", "http", "servers", "srv0", "named_routes", "limited", "routes", "errors", "handle"} {
			found = append(found, handlersIn(v[name])...)
		}
	}
	return found
}

// serverIn is the server of a config, nil if there is none.
func serverIn(tree any) (*caddyhttp.Server, error) {
	node := tree
	for _, name := range []string{"apps", "http", "servers", "srv0"} {
		within, _ := node.(map[string]any)
		node = within[name]
	}
	if node == nil {
		return nil, nil
	}
	raw, err := json.Marshal(node)
	if err != nil {
		return nil, err
	}
	server := new(caddyhttp.Server)
	return server, json.Unmarshal(raw, server)
}

// load decodes a handler as Caddy does and describes its rules. It stands in the server, if that is
// not nil.
func load(t *testing.T, raw json.RawMessage, redis bool, server *caddyhttp.Server) string {
	t.Helper()
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return "error: " + err.Error() + "\n"
	}
	delete(fields, "handler")
	raw, _ = json.Marshal(fields)
	var h handler
	if err := caddy.StrictUnmarshalJSON(raw, &h); err != nil {
		return "error: " + err.Error() + "\n"
	}
	ctx, cancel := caddy.NewContext(caddy.Context{Context: context.Background()})
	defer cancel()
	if server != nil {
		ctx = ctx.WithValue(caddyhttp.ServerCtxKey, server)
	}
	rules, err := Compile(ctx, &h.Config)
	if err != nil {
		return "error: " + err.Error() + "\n"
	}
	for _, rule := range rules.Rules {
		if err := rule.Resolve(redis); err != nil {
			return "error: " + err.Error() + "\n"
		}
	}
	return describe(rules)
}

func describe(rules *Rules) string {
	var out strings.Builder
	for _, r := range rules.Rules {
		fmt.Fprintf(&out, "rule %s: %s; names", r.Zone, r.Settings())
		for _, plan := range r.Plans {
			fmt.Fprintf(&out, " %v", plan.Names)
		}
		fmt.Fprintf(&out, "; key %s", describeKey(r.Key))
		if r.Fallback == nil {
			out.WriteString("; no fallback")
		} else {
			fmt.Fprintf(&out, "; fallback %s", describeKey(r.Fallback))
		}
		if len(r.Match)+len(r.Exempt) > 0 {
			fmt.Fprintf(&out, "; %d match, %d exempt", len(r.Match), len(r.Exempt))
		}
		switch {
		case r.Cost.Dynamic():
			out.WriteString("; cost from the request")
		case r.Cost.fixed != 1:
			fmt.Fprintf(&out, "; cost %d", r.Cost.fixed)
		}
		describeRest(&out, r)
		out.WriteString("\n")
	}
	fmt.Fprintf(&out, "handler: fields %+v, status %d, response %s, jitter %g, log key %t, sweep %v, no metrics %t\n",
		rules.Headers, rules.Status, rules.Response, rules.Jitter, rules.LogKey, rules.SweepInterval, rules.DisableMetrics)
	for _, w := range rules.Warnings {
		out.WriteString("warning: " + w + "\n")
	}
	return out.String()
}

// describeRest describes what few rules have.
func describeRest(out *strings.Builder, r *Rule) {
	if r.Charge != nil {
		fmt.Fprintf(out, "; charge %s up to %d", describePart(r.Charge.text), r.MaxCharge)
	}
	if r.tier != nil {
		fmt.Fprintf(out, "; tier %s", describePart(r.tier))
	}
	if r.Count != nil {
		out.WriteString("; count")
		for status := 0; status < 1000; status++ {
			first := status
			for status < 1000 && r.Count.Counts(status) {
				status++
			}
			if status > first {
				fmt.Fprintf(out, " %d-%d", first, status-1)
			}
		}
	}
	if b := r.Ban; b != nil {
		fmt.Fprintf(out, "; ban %v after %d/%v in %q", b.Durations, b.Strikes.Quota, b.Strikes.Window, b.Strikes.Space.Zone)
		if b.Ladder != nil {
			fmt.Fprintf(out, ", ladder %d/%v in %q", b.Ladder.Quota, b.Ladder.Window, b.Ladder.Space.Zone)
		}
		fmt.Fprintf(out, ", bans in %q, max_keys %d", b.Bans.Space.Zone, b.Bans.MaxKeys)
	}
	if r.RetryAfter > 0 {
		fmt.Fprintf(out, "; retry after %v", r.RetryAfter)
	}
	if r.share != nil {
		fmt.Fprintf(out, "; enforced for %.4f", float64(r.share.below)/(1<<64))
	}
	if r.DryRun {
		out.WriteString("; dry run")
	}
}

var kindNames = [...]string{
	"text", "constant", "client address", "remote host", "remote port", "remote", "header", "query", "cookie", "path", "raw path", "uri", "host", "method", "var", "placeholder",
}

func describeKey(k *Key) string {
	var parts []string
	for i := range k.parts {
		parts = append(parts, describePart(&k.parts[i]))
	}
	return strings.Join(parts, " ")
}

func describePart(p *part) string {
	var atoms []string
	for _, a := range p.atoms {
		s := kindNames[a.kind]
		if a.name != "" {
			s += " " + a.name
		}
		if a.mask != (mask{}) {
			s += fmt.Sprintf(" /%d,%d", a.mask.v4, a.mask.v6)
		}
		atoms = append(atoms, s)
	}
	s := strings.Join(atoms, " + ")
	if p.group {
		s += fmt.Sprintf(" (an address: /%d,%d)", p.mask.v4, p.mask.v6)
	}
	return "<" + s + ">"
}
