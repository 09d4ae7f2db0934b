// What an error route writes is the operator's, and may be kept by a cache as long as it says. A
// refusal that is kept is answered to everybody, so a route that says so of refusals is warned
// about.

package caddyfile

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/caddy-sluice/sluice/fields"
)

// warnCacheable warns of error routes about refusals that let them be kept.
func (k *compiler) warnCacheable() {
	if k.around == nil || k.rules.Response == ResponseProblem {
		return
	}
	for _, field := range kept(nil, k.around.errorRoutes, strconv.Itoa(k.rules.Status)) {
		k.warn("an error route sets %s on what may be a refusal, which caches then answer to everybody; "+
			"set it for other statuses only (handle_errors 404), or to no-store", field)
	}
}

// kept lists what routes in JSON set that lets a response of the status be kept.
func kept(to []string, node any, status string) []string {
	switch node := node.(type) {
	case []any:
		for _, n := range node {
			to = kept(to, n, status)
		}
	case map[string]any:
		if !mayBeAbout(generic(node["match"]), status) {
			return to
		}
		if node["handler"] == "headers" {
			response, _ := node["response"].(map[string]any)
			for _, how := range []string{"add", "set"} {
				set, _ := response[how].(map[string]any)
				to = append(to, keptBy(set)...)
			}
		}
		for _, n := range node {
			to = kept(to, n, status)
		}
		slices.Sort(to) // maps of JSON have no order, and messages have one
		return slices.Compact(to)
	}
	return to
}

func keptBy(set map[string]any) (list []string) {
	for name, values := range set {
		text := strings.Trim(fmt.Sprint(values), "[]")
		if fields.Caching(http.CanonicalHeaderKey(name)) && !strings.Contains(text, "no-store") {
			list = append(list, fmt.Sprintf("%s %q", name, text))
		}
	}
	return list
}

// mayBeAbout reports whether a route with these matchers in JSON may be about the status: not if an
// expression names other statuses only, as handle_errors 404 and 5xx write it.
func mayBeAbout(match any, status string) bool {
	sets, _ := match.([]any)
	for _, set := range sets {
		named, _ := set.(map[string]any)
		text := fmt.Sprint(named["expression"])
		if !strings.Contains(text, "{http.error.status_code}") || strings.Contains(text, status) || strings.Contains(text, ">= "+status[:1]+"00") {
			return true
		}
	}
	return len(sets) == 0
}
