// The names of Caddy's placeholders (as of 2.11), for telling a misspelled one from one that a
// plugin sets.

package caddyfile

import (
	"errors"
	"fmt"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
)

// shorthands are the names that the Caddyfile has for longer ones. They are understood in JSON too.
var shorthands = map[string]string{
	"host": "http.request.host", "hostport": "http.request.hostport", "port": "http.request.port",
	"method": "http.request.method", "scheme": "http.request.scheme", "uuid": "http.request.uuid",
	"uri": "http.request.uri", "%uri": "http.request.uri_escaped",
	"path": "http.request.uri.path", "%path": "http.request.uri.path_escaped",
	"dir": "http.request.uri.path.dir", "file": "http.request.uri.path.file",
	"query": "http.request.uri.query", "%query": "http.request.uri.query_escaped",
	"?query":      "http.request.uri.prefixed_query",
	"orig_method": "http.request.orig_method", "orig_uri": "http.request.orig_uri",
	"orig_path": "http.request.orig_uri.path", "orig_dir": "http.request.orig_uri.path.dir",
	"orig_file": "http.request.orig_uri.path.file", "orig_query": "http.request.orig_uri.query",
	"orig_?query": "http.request.orig_uri.prefixed_query",
	"remote":      "http.request.remote", "remote_host": "http.request.remote.host", "remote_port": "http.request.remote.port",
	"client_ip":  "http.vars.client_ip",
	"tls_cipher": "http.request.tls.cipher_suite", "tls_version": "http.request.tls.version",
	"tls_client_fingerprint":            "http.request.tls.client.fingerprint",
	"tls_client_issuer":                 "http.request.tls.client.issuer",
	"tls_client_serial":                 "http.request.tls.client.serial",
	"tls_client_subject":                "http.request.tls.client.subject",
	"tls_client_certificate_pem":        "http.request.tls.client.certificate_pem",
	"tls_client_certificate_der_base64": "http.request.tls.client.certificate_der_base64",
	"upstream_hostport":                 "http.reverse_proxy.upstream.hostport",
}

// shortPrefixes are the shorthands that take a name of the user's choice.
var shortPrefixes = map[string]string{
	"header.": "http.request.header.", "cookie.": "http.request.cookie.", "labels.": "http.request.host.labels.",
	"path.": "http.request.uri.path.", "file.": "http.request.uri.path.file.", "query.": "http.request.uri.query.",
	"re.": "http.regexp.", "vars.": "http.vars.", "rp.": "http.reverse_proxy.", "resp.": "http.intercept.",
	"err.": "http.error.", "file_match.": "http.matchers.file.",
}

// bodyVars is what caddy-ext's module called {http.request.body.*}, which the requestbodyvar plugin
// sets.
const bodyVars = "body."

// requestNames are all of http.request.* but those that end in a name or number of the user's
// choice.
var requestNames = strings.Fields(`
	body body_base64 duration duration_ms host hostport local local.host local.port method orig_method
	orig_uri orig_uri.path orig_uri.path.dir orig_uri.path.file orig_uri.path.file_escaped orig_uri.prefixed_query orig_uri.query
	port proto proto_name remote remote.host remote.port scheme
	uri uri_escaped uri.path uri.path_escaped uri.path.dir uri.path.file uri.path.file.base uri.path.file.ext
	uri.prefixed_query uri.query uri.query_escaped uuid
	tls.cipher_suite tls.ech tls.proto tls.proto_mutual tls.resumed tls.server_name tls.version
	tls.client.certificate_der_base64 tls.client.certificate_pem tls.client.fingerprint tls.client.issuer
	tls.client.public_key tls.client.public_key_sha256 tls.client.serial tls.client.subject
	tls.client.san.dns_names tls.client.san.emails tls.client.san.ips tls.client.san.uris`)

// requestLists are the http.request.* that end in a name, and those that end in a number.
var (
	requestByName   = []string{"header.", "uri.query.", "cookie."}
	requestByNumber = []string{
		"host.labels.", "uri.path.", "orig_uri.path.",
		"tls.client.san.dns_names.", "tls.client.san.emails.", "tls.client.san.ips.", "tls.client.san.uris.",
	}
)

// responseNames are all that end no name of the user's choice, and the beginnings of the others, of
// what there is after a response.
var responseNames = map[string][]string{
	"http.reverse_proxy.": {"header.", "status_code", "status_text", "duration", "duration_ms", "retries", "is_transport_error", "upstream.", "active."},
	"http.intercept.":     {"header.", "status_code"},
	"http.response.":      {"header."},
	"http.error.":         {"status_code", "status_text", "message", "trace", "id"},
}

// systemNames are all of system.*.
var systemNames = []string{"hostname", "slash", "os", "wd", "arch"}

// namespaces are the beginnings of all other names that Caddy gives values to.
var namespaces = []string{
	"http.auth.", "http.error.", "http.intercept.", "http.matchers.", "http.rate_limit.", "http.regexp.",
	"http.request.", "http.response.header.", "http.reverse_proxy.", "http.vars.",
	"env.", "file.", "system.", "time.now",
}

// mistakes are names that people try, and what they mean.
var mistakes = map[string]string{
	"ip": "client_ip", "clientip": "client_ip", "client": "client_ip", "remote_ip": "client_ip", "real_ip": "client_ip",
	"remote_addr": "client_ip", "remoteip": "client_ip", "client.ip": "client_ip", "http.request.client_ip": "client_ip",
	"http.request.remote_ip": "client_ip", "http.request.remote_host": "remote_host", "http.remote.host": "remote_host", "user": "http.auth.user.id", "user_id": "http.auth.user.id",
	"user_agent": "header.User-Agent", "user-agent": "header.User-Agent", "url": "uri",
}

// longName is the name that Caddy's replacer knows, header names as Go writes them.
func longName(name string) string {
	const header = "http.request.header."
	long := writtenOut(name)
	if rest, ok := strings.CutPrefix(long, header); ok {
		return header + textproto.CanonicalMIMEHeaderKey(rest)
	}
	return long
}

func writtenOut(name string) string {
	if rest, ok := strings.CutPrefix(name, bodyVars); ok {
		return "http.request.body." + rest
	}
	if long, ok := shorthands[name]; ok {
		return long
	}
	for short, long := range shortPrefixes {
		// {file.X} is a file's content to the replacer; the adapter has already replaced what meant
		// the path's.
		if rest, ok := strings.CutPrefix(name, short); ok && short != "file." {
			return long + rest
		}
	}
	return name
}

// check refuses names that have no value for sure, and warns of those that may have none where that
// matters.
func (z *zoneCompiler) check(field, name, full string) error {
	if rest, ok := strings.CutPrefix(full, "http.request."); ok {
		if strings.HasPrefix(rest, bodyVars) && z.around.sets(full) {
			return nil
		}
		if strings.HasPrefix(rest, bodyVars) {
			then := ""
			if isKey(field) {
				then = "; an empty key falls back to the client address"
			}
			z.warn("{%s} is empty unless the requestbodyvar plugin is there%s", name, then)
			return nil
		}
		if !knownRequestName(rest) {
			return unknownPlaceholder(name)
		}
		z.warnUseless(field, name, full)
		return nil
	}
	if hasAnyPrefix(full, namespaces...) || full == "http.error" || full == "http.shutting_down" || full == "http.time_until_shutdown" {
		if !knownResponseName(full) {
			return unknownPlaceholder(name)
		}
		if strings.HasPrefix(full, "http.response.") && (field == tierBy || z.z.Charge != "" && field != "charge") {
			return fmt.Errorf("{%s} has no value yet, since this is decided before there is a response; want what the request says", name)
		}
		z.warnUseless(field, name, full)
		return nil
	}
	if z.around.sets(full) {
		return nil
	}
	switch {
	case nearNamespace(full) != "", mistakes[name] != "":
		return unknownPlaceholder(name)
	// A map directive may set a name without a dot. A slip of the finger has none either, would be
	// empty for every client and so make one counter for all; a map can be given another name.
	case !strings.Contains(name, "."):
		return unknownPlaceholder(name)
	}
	z.warnUnknown(field, name, full)
	return nil
}

// warnUnknown warns of a name with a dot that neither Caddy nor a handler that runs before this one
// gives a value to.
func (z *zoneCompiler) warnUnknown(field, name, full string) {
	then := "the default holds for every request"
	switch {
	case field == "charge" && z.around.setsLater(full):
		return
	case field == "charge":
		then = "no response is charged"
	case field == "cost":
		then = "every request costs 1"
	case isKey(field):
		then = "counts as if it were not there (an empty key falls back to the client address)"
	}
	hint := ""
	if z.around != nil {
		hint = didYouMean(name, z.around.before...)
	}
	z.warn("placeholder {%s}%s is not one of Caddy's, and no handler that runs before this rate_limit sets it; if no plugin does, it is empty, and %s",
		name, hint, then)
}

// isKey tells keys from what is read for another purpose: a cost, a charge, a tier.
func isKey(field string) bool { return field == "key" || field == "key_fallback" }

func knownRequestName(rest string) bool {
	if slices.Contains(requestNames, rest) {
		return true
	}
	for _, p := range requestByName {
		if name, ok := strings.CutPrefix(rest, p); ok {
			return isToken(name) || p == "uri.query." && name != ""
		}
	}
	for _, p := range requestByNumber {
		if index, ok := strings.CutPrefix(rest, p); ok {
			_, err := strconv.ParseUint(index, 10, 31)
			return err == nil
		}
	}
	return false
}

// knownResponseName: the name is none of a response, or one that Caddy gives a value to.
func knownResponseName(full string) bool {
	for prefix, names := range responseNames {
		if rest, ok := strings.CutPrefix(full, prefix); ok {
			return slices.ContainsFunc(names, func(n string) bool {
				return n == rest || strings.HasSuffix(n, ".") && strings.HasPrefix(rest, n) && rest != n
			})
		}
	}
	return true
}

// nearResponseName puts the second word of such a name right, or returns "".
func nearResponseName(full string) string {
	for prefix, names := range responseNames {
		rest, ok := strings.CutPrefix(full, prefix)
		if !ok {
			continue
		}
		word, tail, dotted := strings.Cut(rest, ".")
		for _, n := range names {
			if open, ok := strings.CutSuffix(n, "."); ok && dotted && nearest(word, []string{open}) != "" {
				return prefix + n + tail
			}
		}
		if near := nearest(rest, names); near != "" {
			return prefix + near
		}
	}
	return ""
}

func unknownPlaceholder(name string) error {
	if name == "" {
		return errors.New(`a placeholder without a name; want one such as {client_ip}, or \{\} for braces that are meant`)
	}
	meant := mistakes[name]
	if meant == "" {
		meant = nearest(name, allNames())
	}
	if meant == "" {
		meant = nearResponseName(longName(name))
	}
	if near := nearNamespace(longName(name)); meant == "" && near != longName(name) {
		meant = near
	}
	if meant == "" {
		meant = meantRequest(longName(name))
	}
	hint, dotted := "did you mean {"+meant+"}?", strings.Contains(name, ".")
	toMap := "what map or a plugin sets needs a name with a dot in it, such as {map." + name + "}"
	switch {
	case meant == "" && dotted:
		hint = "see the placeholders in Caddy's documentation"
	case meant == "":
		hint = toMap
	case !dotted:
		hint += " (" + toMap + ")"
	}
	return fmt.Errorf("unknown placeholder {%s}; %s", name, hint)
}

// meantRequest is what is meant by a name of http.request.* whose second word is a plural or
// another tool's, or that lacks its number; or "".
func meantRequest(name string) string {
	rest, _ := strings.CutPrefix(name, "http.request.")
	for _, list := range requestByNumber {
		if strings.HasPrefix(rest, list) {
			return "http.request." + list + "0"
		}
	}
	word, tail, _ := strings.Cut(rest, ".")
	if word = strings.TrimSuffix(word, "s"); word == "param" || word == "arg" || word == "querie" {
		word = "query"
	}
	if meant := word + "." + tail; slices.Contains([]string{"header", "cookie", "query"}, word) && knownRequestName(strings.TrimPrefix(longName(meant), "http.request.")) {
		return meant
	}
	return ""
}

// nearNamespace returns a dotted name with its beginning put right, when that is nearly one that
// Caddy knows, such as heder.X or http.requst.method; or "".
func nearNamespace(name string) string {
	prefix, rest, words := "", name, firstWords()
	if after, ok := strings.CutPrefix(name, "http."); ok {
		prefix, rest, words = "http.", after, []string{"response"}
		for _, n := range namespaces {
			if second, _, ok := strings.Cut(strings.TrimPrefix(n, "http."), "."); ok && strings.HasPrefix(n, "http.") {
				words = append(words, second)
			}
		}
	}
	word, tail, ok := strings.Cut(rest, ".")
	near := nearest(word, words)
	if near == "" || !ok {
		return ""
	}
	return prefix + near + "." + tail
}

// firstWords are what Caddy's dotted names begin with.
func firstWords() []string {
	words := []string{"http", "env", "system", "time", "remote"}
	for short := range shortPrefixes {
		words = append(words, strings.TrimSuffix(short, "."))
	}
	slices.Sort(words)
	return words
}

// uniqueNames differ from one request or connection of a client to the next.
var uniqueNames = []string{
	"http.request.uuid", "http.request.duration", "http.request.duration_ms", "http.request.remote", "http.request.remote.port",
	"time.now", "time.now.http", "time.now.rfc3339", "time.now.common_log", "time.now.unix", "time.now.unix_ms",
}

func isToken(name string) bool {
	return name != "" && strings.IndexFunc(name, func(c rune) bool {
		return c <= ' ' || c >= 0x7f || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, c)
	}) < 0
}

// allNames lists what a misspelled name can be compared with.
func allNames() []string {
	var names []string
	for short := range shorthands {
		names = append(names, short)
	}
	for _, n := range requestNames {
		names = append(names, "http.request."+n)
	}
	slices.Sort(names)
	return names
}

// didYouMean is a hint for an error, or nothing when no word is near.
func didYouMean(word string, words ...string) string {
	if near := nearest(word, words); near != "" {
		return " (did you mean " + near + "?)"
	}
	return ""
}

// nearest returns the word with the fewest differences, or "" when all have too many.
func nearest(word string, words []string) string {
	best, least := "", 3
	if len(word) > 100 {
		return best // not a slip of the finger, and the comparison is quadratic
	}
	for _, w := range words {
		if d := distance(word, w); d < least && d <= tolerance(w) {
			best, least = w, d
		}
	}
	return best
}

// tolerance is how many differences are a slip: in a short word two make another word.
func tolerance(word string) int {
	switch {
	case len(word) <= 2:
		return 0
	case len(word) <= 5:
		return 1
	}
	return 2
}

// distance is how many letters must be put in, left out, changed, or swapped with their neighbor to
// get from a to b.
func distance(a, b string) int {
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			change := 1
			if a[i-1] == b[j-1] {
				change = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+change)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
