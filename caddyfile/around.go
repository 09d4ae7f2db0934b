// What stands around a rate_limit handler in its server, as far as that is known at load: which
// handlers run before it and what they set, and which matchers lead to it. So warnings speak only
// where they are true.

package caddyfile

import (
	"bytes"
	"encoding/json"
	"net/textproto"
	"reflect"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// around is what a handler's place says. The zero value is that of a handler before which nothing
// runs.
type around struct {
	// before are the placeholders that handlers before it set, with a * at the end where they set
	// all that begin so.
	before []string
	// behind are those of the handlers behind it in its site.
	behind []string
	// errors, response: it stands in an error route, or where there is a response already.
	errors, response bool
	// proxied: the server trusts proxies, so that the connection's address may be that of one.
	proxied bool
	// matchers of the routes that lead to it.
	matchers []any
	// errorRoutes of the server, in JSON.
	errorRoutes []any
}

const everything = "*"

// sets reports whether a handler before this one may set the placeholder.
func (a *around) sets(name string) bool { return a != nil && covers(a.before, name) }

// setsLater is sets for what is read after the response.
func (a *around) setsLater(name string) bool {
	return a.sets(name) || a != nil && covers(a.behind, name)
}

func covers(list []string, name string) bool {
	for _, set := range list {
		if prefix, open := strings.CutSuffix(set, "*"); set == name || open && strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// lookAround finds the handler with this config in its server. Caddy provisions routes in their
// order, and forgets the JSON of each when it is done, so the handler is in the first route that
// has its JSON yet, together with all that the route holds.
func lookAround(ctx caddy.Context, c *Config) *around {
	a := new(around)
	server, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok {
		return a
	}
	a.proxied = trustsProxies(server)
	if server.Errors != nil {
		for i := range server.Errors.Routes {
			a.errorRoutes = append(a.errorRoutes, toJSON(&server.Errors.Routes[i]))
		}
	}
	own, err := json.Marshal(c)
	if err == nil && a.findIn(server.Routes, own) {
		slices.Sort(a.before) // maps of JSON have no order, and messages have one
		return a
	}
	// In a named route, whose callers are not known, or in the server's error routes, before which
	// all others may have run.
	a.before, a.errors, a.response = []string{everything}, true, true
	return a
}

// trustsProxies reads a field that Caddy keeps for itself, since the setting is taken out of the
// config when it is read. Should the field have another name one day, fewer warnings are given.
func trustsProxies(server *caddyhttp.Server) bool {
	source := reflect.ValueOf(server).Elem().FieldByName("trustedProxies")
	return source.IsValid() && source.Kind() == reflect.Interface && !source.IsNil()
}

func (a *around) findIn(routes caddyhttp.RouteList, own []byte) bool {
	for i := range routes {
		if len(routes[i].HandlersRaw) == 0 {
			continue
		}
		if !a.find(toJSON(&routes[i]), own) {
			continue
		}
		for j := range routes[:i] {
			if before := &routes[j]; !before.Terminal && (before.Group == "" || before.Group != routes[i].Group) {
				a.before = collect(a.before, toJSON(before))
			}
		}
		return true
	}
	return false
}

// find looks for the handler in JSON, and notes what runs before it.
func (a *around) find(node any, own []byte) bool {
	switch node := node.(type) {
	case []any:
		for i := range node {
			if !a.find(node[i], own) {
				continue
			}
			for j := range node {
				switch {
				case j < i && runsBefore(node[j], node[i]):
					a.before = collect(a.before, node[j])
				case j > i:
					a.behind = collect(a.behind, node[j])
				}
			}
			return true
		}
	case map[string]any:
		if node["handler"] == "rate_limit" {
			return isConfig(node, own)
		}
		for name, value := range node {
			if !a.find(value, own) {
				continue
			}
			switch name {
			case "errors":
				a.errors, a.before = true, collect(a.before, node["routes"])
			case "handle_response":
				a.response = true
			case "handle":
				if match, ok := node["match"]; ok && !a.errors {
					a.matchers = append(a.matchers, match)
				}
			}
			return true
		}
	}
	return false
}

// runsBefore: of two routes, whether a request may go through the first and come to the second. Of
// handlers it is always so.
func runsBefore(first, second any) bool {
	one, _ := first.(map[string]any)
	two, _ := second.(map[string]any)
	return one["terminal"] != true && (one["group"] == nil || one["group"] != two["group"])
}

// isConfig reports whether a handler in JSON is the one with this config.
func isConfig(node map[string]any, own []byte) bool {
	fields := make(map[string]any, len(node))
	for name, value := range node {
		if name != "handler" {
			fields[name] = value
		}
	}
	raw, err := json.Marshal(fields)
	var c Config
	if err != nil || json.Unmarshal(raw, &c) != nil {
		return false
	}
	written, err := json.Marshal(&c)
	return err == nil && bytes.Equal(written, own)
}

// toJSON is a route as it was written, or what is left of it when it was provisioned.
func toJSON(route *caddyhttp.Route) any {
	node := map[string]any{}
	if route.Group != "" {
		node["group"] = route.Group
	}
	if route.Terminal {
		node["terminal"] = true
	}
	var match any = route.MatcherSets
	if len(route.MatcherSetsRaw) > 0 {
		match = route.MatcherSetsRaw
	}
	if match = generic(match); match != nil {
		node["match"] = match
	}
	var handlers []any
	for _, raw := range route.HandlersRaw {
		handlers = append(handlers, generic(raw))
	}
	for _, handler := range route.Handlers {
		handlers = append(handlers, handlerJSON(handler))
	}
	node["handle"] = handlers
	return node
}

// handlerJSON is a handler that was provisioned. What it has in routes of its own is no longer
// told.
func handlerJSON(handler caddyhttp.MiddlewareHandler) any {
	if sub, ok := handler.(*caddyhttp.Subroute); ok {
		var routes []any
		for i := range sub.Routes {
			routes = append(routes, toJSON(&sub.Routes[i]))
		}
		return map[string]any{"handler": "subroute", "routes": routes}
	}
	node, ok := generic(handler).(map[string]any)
	module, named := handler.(caddy.Module)
	if !ok || !named || node["handle_response"] != nil {
		return map[string]any{"handler": ""}
	}
	node["handler"] = module.CaddyModule().ID.Name()
	return node
}

func generic(value any) (node any) {
	raw, err := json.Marshal(value)
	if err != nil || json.Unmarshal(raw, &node) != nil {
		return nil
	}
	return node
}

// collect adds the placeholders that the handlers in JSON set.
func collect(to []string, node any) []string {
	switch node := node.(type) {
	case []any:
		for _, n := range node {
			to = collect(to, n)
		}
	case map[string]any:
		if name, ok := node["handler"].(string); ok {
			to = append(to, setBy(name, node)...)
		}
		for _, n := range node {
			to = collect(to, n)
		}
	}
	return to
}

// setBy lists what one handler sets. One that is not Caddy's may set anything.
func setBy(name string, node map[string]any) (set []string) {
	switch name {
	case "authentication":
		return []string{"http.auth.*"}
	case "reverse_proxy": // what is behind forward_auth
		return []string{"http.reverse_proxy.*"}
	case "intercept":
		return []string{"http.intercept.*"}
	case "rewrite":
		return []string{"http.request.uri.query.*"}
	case "vars":
		for name := range node {
			set = append(set, "http.vars."+name)
		}
	case "map":
		names, _ := node["destinations"].([]any)
		for _, n := range names {
			if name, ok := n.(string); ok {
				set = append(set, longName(strings.Trim(name, "{}")))
			}
		}
	case "headers":
		request, _ := node["request"].(map[string]any)
		written, _ := request["set"].(map[string]any)
		for name := range written {
			set = append(set, headerSet(name)...)
		}
		deleted, _ := request["delete"].([]any)
		for _, n := range deleted {
			if name, ok := n.(string); ok {
				set = append(set, headerSet(name)...)
			}
		}
	case "acme_server", "copy_response", "copy_response_headers", "encode", "error", "file_server", "log_append", "metrics",
		"push", "rate_limit", "request_body", "static_response", "subroute", "templates", "timeouts", "tracing":
	default:
		return []string{everything}
	}
	return set
}

// headerSet is a header that a client can no longer write; Cookie holds all cookies.
func headerSet(name string) []string {
	name = textproto.CanonicalMIMEHeaderKey(name)
	set := []string{"http.request.header." + name}
	if strings.HasPrefix(name, "*") {
		set = []string{"http.request.header.*"}
	}
	if covers(set, "http.request.header.Cookie") {
		set = append(set, "http.request.cookie.*")
	}
	return set
}
