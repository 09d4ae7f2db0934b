// What is allowed in a key or a matcher and probably not meant: it has no value where it is read,
// or whoever is to be limited writes it. Said at load, and only where it is true, see [around].

package caddyfile

import (
	"encoding/json"
	"maps"
	"net/textproto"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// isForgeable: a client writes what it likes there.
func isForgeable(full string) bool {
	return hasAnyPrefix(full, "http.request.header.", "http.request.uri.query.", "http.request.cookie.")
}

// ofResponse: it has a value when there is a response, and in an error route if it is about the
// error.
func (a *around) ofResponse(full string) bool {
	switch {
	case hasAnyPrefix(full, "http.response.", "http.reverse_proxy.", "http.intercept."):
		return a == nil || !a.response && !a.sets(full)
	case strings.HasPrefix(full, "http.error"):
		return a == nil || !a.errors
	}
	return false
}

const noResponseYet = "is empty when rate_limit decides, which is before there is a response; count limits by the outcome, such as count status 401"

// warnUseless warns of placeholders that exist and yet make no sense here.
func (z *zoneCompiler) warnUseless(field, name, full string) {
	late := field == "charge" // read after the response, when all handlers have run
	switch {
	case strings.HasPrefix(full, "http.auth.") && !late && !z.around.sets(full):
		z.warn("{%s} is empty, since no auth handler runs before this rate_limit, as none does by default; a route block or the order option changes that", name)
	case !late && z.around.ofResponse(full):
		z.warn("{%s} "+noResponseYet, name)
	case late && strings.HasPrefix(full, "http.intercept.") && !z.around.setsLater(full):
		z.warn("{%s} has a value within intercept only, so no response is charged; want {http.response.header.…} or {http.reverse_proxy.…}", name)
	case full == "http.request.header.Host":
		z.warn("{%s} is always empty in Go servers; use {host}", name)
	case isForgeable(full) && !isKey(field) && !z.around.sets(full):
		z.warn("%s reads {%s}, which a client can forge, since no handler that runs before this rate_limit sets it; "+
			"a route block or the order option puts the one that does before", word(field), name)
	case isKey(field) && slices.Contains(addressHeaders, full) && !z.around.sets(full):
		z.warn("{%s} is what a client writes, who can be another one each time; use {client_ip}, which honors the server option trusted_proxies", name)
	case isKey(field) && full == "http.request.remote.host" && z.around != nil && z.around.proxied:
		z.warn("{%s} is the address of the proxy, where trusted_proxies has one; use {client_ip}", name)
	case slices.Contains(uniqueNames, full) && isKey(field):
		z.warn("{%s} differs between requests of one client, so each gets a counter of its own", name)
	case hasAnyPrefix(full, "http.request.body"):
		z.warn("{%s} reads the whole request body into memory", name)
	}
}

// addressHeaders are those in which proxies say who the client is.
var addressHeaders = func() (list []string) {
	for _, name := range []string{
		"X-Forwarded-For", "Forwarded", "X-Real-Ip", "X-Client-Ip", "X-Cluster-Client-Ip", "X-Original-Forwarded-For", "True-Client-Ip",
		"Cf-Connecting-Ip", "Cf-Connecting-Ipv6", "Fastly-Client-Ip", "Fly-Client-Ip", "X-Azure-Clientip",
	} {
		list = append(list, "http.request.header."+name)
	}
	return list
}()

// matchers warns of matchers of the zone that can never be met, always are, or that a client
// chooses.
func (z *zoneCompiler) matchers() error {
	for _, m := range []struct {
		field string
		sets  caddyhttp.RawMatcherSets
	}{{"match", z.z.MatchRaw}, {"exempt", z.z.ExemptRaw}} {
		if len(m.sets) > 0 {
			z.warnMatcher(m.field, generic(m.sets))
		}
	}
	return nil
}

// warnAround warns of the matchers that lead to the handler. The zone is its first.
func (z *zoneCompiler) warnAround() {
	if z.around == nil {
		return
	}
	for _, name := range readBy(z.around.matchers) {
		if z.around.ofResponse(name) {
			z.warn("the matcher of this rate_limit, or of a route around it, reads {%s}, which "+noResponseYet, name)
		}
	}
}

// warnMatcher warns of what matchers in JSON read.
func (z *zoneCompiler) warnMatcher(field string, node any) {
	for _, name := range readBy(node) {
		switch {
		case z.around.ofResponse(name):
			z.warn("%s reads {%s}, which "+noResponseYet, field, name)
		case field == "exempt" && isForgeable(name) && !z.around.sets(name):
			z.warn("exempt reads {%s}: whoever writes that is never limited, since no handler that runs before this rate_limit sets it; "+
				"want what a client cannot choose, such as client_ip", name)
		case name == "http.request.remote.host" && z.around != nil && z.around.proxied:
			z.warn("%s looks at the address of the connection, which is the proxy's where trusted_proxies has one; use client_ip", field)
		}
	}
}

// readBy lists the placeholders that matchers in JSON read, those included whose module has them
// for its subject.
func readBy(node any) []string {
	read := map[string]bool{}
	visit(node, read)
	return slices.Sorted(maps.Keys(read))
}

func visit(node any, read map[string]bool) {
	switch node := node.(type) {
	case string:
		for _, p := range split(node) {
			if p.placeholder {
				read[longName(p.text)] = true
			}
		}
	case []any:
		for _, n := range node {
			visit(n, read)
		}
	case map[string]any:
		for name, n := range node {
			visit(name, read)
			visit(n, read)
			visitSubject(name, n, read)
		}
	}
}

// visitSubject: a matcher for headers or parameters has their names for keys. Values that are read
// at load are secrets, which not every client knows.
func visitSubject(module string, node any, read map[string]bool) {
	prefix := ""
	switch module {
	case "remote_ip":
		read["http.request.remote.host"] = true
	case "header", "header_regexp":
		prefix = "http.request.header."
	case "query":
		prefix = "http.request.uri.query."
	}
	fields, ok := node.(map[string]any)
	if prefix == "" || !ok {
		return
	}
	for name, values := range fields {
		if raw, err := json.Marshal(values); err == nil && (strings.Contains(string(raw), "{env.") || strings.Contains(string(raw), "{file.")) {
			continue
		}
		if module != "query" {
			name = textproto.CanonicalMIMEHeaderKey(name)
		}
		read[prefix+name] = true
	}
}

// warnFixed warns of a fixed text that is probably no text that was meant.
func (z *zoneCompiler) warnFixed(text string) {
	meant := placeholderMeant(text)
	switch {
	case meant != "" && strings.HasPrefix(text, "$"):
		z.warn("key %q: a $ has no meaning here; want {%s} if that is meant", text, meant)
	case meant != "":
		z.warn("key %q is a fixed text, the same for all clients; want {%s} if that is meant", text, meant)
	case strings.HasPrefix(text, "$"):
		z.warn("key %q: a $ has no meaning here; want a placeholder such as {client_ip}", text)
	case strings.ContainsAny(text, "/*") && !strings.Contains(text, "{"):
		z.warn("key %q is a fixed text, the same for all clients; which requests are limited is said by match, "+
			"or before the limit, as in rate_limit /api/* 100/1m", text)
	}
}

// placeholderMeant is the placeholder that a fixed text names, as others write it, or "".
func placeholderMeant(text string) string {
	name, dollar := strings.CutPrefix(text, "$")
	if dollar {
		name = strings.Trim(name, "{}")
		if meant := nginxName(name); meant != "" {
			return meant
		}
	}
	if meant := mistakes[name]; meant != "" {
		return meant
	}
	if _, ok := shorthands[name]; ok {
		return name
	}
	if hasAnyPrefix(name, "header.", "cookie.", "query.", "vars.", "labels.", "http.") || slices.Contains([]string{"remote.ip", "remote.host", "remote.port"}, name) {
		return name
	}
	return ""
}

// nginxName is what a variable of NGINX is called here.
func nginxName(name string) string {
	if meant := nginxNames[name]; meant != "" {
		return meant
	}
	for prefix, short := range map[string]string{"http_": "header.", "cookie_": "cookie.", "arg_": "query."} {
		if rest, ok := strings.CutPrefix(name, prefix); ok && prefix == "http_" {
			return short + textproto.CanonicalMIMEHeaderKey(strings.ReplaceAll(rest, "_", "-"))
		} else if ok {
			return short + rest
		}
	}
	return ""
}

var nginxNames = map[string]string{
	"binary_remote_addr": "client_ip", "remote_addr": "client_ip", "realip_remote_addr": "remote_host", "http_x_forwarded_for": "client_ip",
	"http_host": "host", "server_name": "host", "request_uri": "uri", "document_uri": "path", "uri": "path", "request_method": "method",
	"remote_user": "http.auth.user.id",
}
