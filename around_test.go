package sluice_test

// What is said at load: where it is true, and nowhere else.

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// warnings are what the handlers and the app say at load.
func warnings(t *testing.T) (list []string) {
	t.Helper()
	for line := range strings.Lines(processLog.String()) {
		var entry map[string]any
		if json.Unmarshal([]byte(line), &entry) != nil || entry["level"] != "warn" {
			continue
		}
		if logger, _ := entry["logger"].(string); strings.HasSuffix(logger, "rate_limit") {
			list = append(list, fmt.Sprint(entry["msg"], entry["place"], entry["other"]))
		}
	}
	return list
}

const (
	setsPlan = "request_header X-Plan free\n"
	byPlan   = "rate_limit {\n zone z {\n tier {header.X-Plan} {\n pro 2/1h\n default 1/1h\n }\n }\n }\n"
)

// G14, G15, G18, G22: the words with which a warning must begin behind its place, or contain; ""
// for none.
func TestWarningsAreTrue(t *testing.T) {
	proxies := "{\n servers {\n trusted_proxies static 10.0.0.0/8\n }\n}\n"
	for name, test := range map[string]struct{ config, want string }{
		"plan that a client writes":              {":80 {\n " + byPlan + "}", "can forge"},
		"address in a header":                    {":80 {\n rate_limit {header.X-Real-IP} 1/1h\n}", "use {client_ip}"},
		"address in a header set before":         {":80 {\n route {\n request_header X-Real-IP {client_ip}\n rate_limit {header.X-Real-IP} 1/1h\n }\n}", ""},
		"plan in a header written otherwise":     {":80 {\n route {\n request_header x-PLAN free\n" + byPlan + "}\n}", ""},
		"plan set behind":                        {":80 {\n " + byPlan + setsPlan + "}", "can forge"},
		"plan set before in a route":             {":80 {\n route {\n " + setsPlan + byPlan + "}\n}", ""},
		"plan deleted before":                    {":80 {\n route {\n request_header -X-*\n" + byPlan + "}\n}", ""},
		"plan set behind in a route":             {":80 {\n route {\n " + byPlan + setsPlan + "}\n}", "can forge"},
		"plan set in another site":               {"http://a.test {\n " + setsPlan + "respond ok\n}\nhttp://b.test {\n " + byPlan + "}", "can forge"},
		"plan set in another handle":             {":80 {\n handle /a/* {\n " + setsPlan + "}\n handle {\n " + byPlan + "}\n}", "can forge"},
		"plan set around a handle":               {":80 {\n route {\n " + setsPlan + "handle {\n " + byPlan + "}\n}\n}", ""},
		"plan set with another matcher before":   {"{\n order rate_limit after request_header\n}\n:80 {\n request_header /x* X-Plan free\n" + byPlan + "}", ""},
		"user without auth":                      {":80 {\n rate_limit {http.auth.user.id} 1/1h\n}", "no auth handler"},
		"user behind auth":                       {"{\n order rate_limit after basic_auth\n}\n:80 {\n basic_auth {\n bob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n }\n rate_limit {http.auth.user.id} 1/1h\n}", ""},
		"map in the same site":                   {":80 {\n map {path} {map.user} {\n default x\n }\n rate_limit {map.user} 1/1h\n}", ""},
		"map in another site":                    {"http://a.test {\n map {path} {map.user} {\n default x\n }\n}\nhttp://b.test {\n rate_limit {map.user} 1/1h\n}", "map.user"},
		"charge by what a later map sets":        {":80 {\n route {\n rate_limit 100/1h {\n algorithm token_bucket\n charge {map.tokens}\n }\n map {path} {map.tokens} {\n default 1\n }\n }\n}", ""},
		"charge by what nobody sets":             {":80 {\n rate_limit 100/1h {\n algorithm token_bucket\n charge {map.tokens}\n }\n}", "no response is charged"},
		"named route":                            {"&(limited) {\n " + byPlan + "}\n:80 {\n invoke limited\n}", ""},
		"error route":                            {":80 {\n handle_errors {\n " + byPlan + "}\n}", ""},
		"response of an upstream":                {":80 {\n reverse_proxy 127.0.0.1:1 {\n @bad status 401\n handle_response @bad {\n rate_limit {http.reverse_proxy.status_code} 1/1h\n }\n }\n}", ""},
		"matcher around":                         {":80 {\n @failed vars {http.reverse_proxy.status_code} 401\n handle @failed {\n rate_limit 1/1h\n }\n}", "a route around it"},
		"matcher of the directive":               {":80 {\n @failed expression `{http.error.status_code} == 401`\n rate_limit @failed 1/1h\n}", "count status 401"},
		"forwarded header":                       {":80 {\n rate_limit {header.X-Forwarded-For} 1/1h\n}", "use {client_ip}"},
		"remote_host":                            {":80 {\n rate_limit {remote_host} 1/1h\n}", ""},
		"remote_host behind proxies":             {proxies + ":80 {\n rate_limit {remote_host} 1/1h\n}", "use {client_ip}"},
		"remote_host of caddy-ext":               {proxies + ":80 {\n rate_limit {remote.host} 1r/m\n}", "use {client_ip}"},
		"remote_ip":                              {":80 {\n rate_limit 1/1h {\n exempt {\n remote_ip 10.0.0.0/8\n }\n }\n}", ""},
		"remote_ip behind proxies":               {proxies + ":80 {\n rate_limit 1/1h {\n exempt {\n remote_ip 10.0.0.0/8\n }\n }\n}", "use client_ip"},
		"client_ip behind proxies":               {proxies + ":80 {\n rate_limit 1/1h {\n exempt {\n client_ip 10.0.0.0/8\n }\n }\n}", ""},
		"exempt by a header":                     {":80 {\n rate_limit 1/1h {\n exempt {\n header User-Agent *Googlebot*\n }\n }\n}", "never limited"},
		"one zone with two keys":                 {"http://a.test {\n rate_limit {\n zone z {header.A} 2/1h\n }\n}\nhttp://b.test {\n rate_limit {\n zone z {header.B} 2/1h\n }\n}", "different keys"},
		"one zone with one key in two spellings": {"http://a.test {\n rate_limit {\n zone z 2/1h\n }\n}\nhttp://b.test {\n rate_limit {\n zone z {http.vars.client_ip} 2/1h\n }\n}", ""},
		"a dry run and a rule on one zone":       {"http://a.test {\n rate_limit {\n zone z 2/1h {\n dry_run\n }\n }\n}\nhttp://b.test {\n rate_limit {\n zone z 2/1h\n }\n}", "dry run in one place"},
	} {
		t.Run(name, func(t *testing.T) {
			serve(t, test.config)
			got := warnings(t)
			if test.want == "" && len(got) > 0 || test.want != "" && (len(got) != 1 || !strings.Contains(got[0], test.want)) {
				t.Errorf("%q, want %q", got, test.want)
			}
		})
	}
}

// G01. An error route that lets refusals be kept by caches is told of, whatever it is written
// around.
func TestCacheableErrorRoutesAreWarnedOf(t *testing.T) {
	const limited = ":80 {\n rate_limit 1/1h%s\n respond ok\n %s\n}"
	for name, test := range map[string]struct{ more, routes, want string }{
		"for an hour":            {"", "handle_errors {\n header Cache-Control \"public, max-age=3600\"\n respond sorry\n }", `Cache-Control "public, max-age=3600"`},
		"in a handle":            {"", "handle_errors {\n handle {\n header Expires \"Thu, 01 Jan 2099 00:00:00 GMT\"\n respond sorry\n }\n }", "Expires"},
		"of refusals":            {"", "handle_errors 429 {\n header CDN-Cache-Control max-age=60\n respond sorry\n }", "Cdn-Cache-Control"},
		"of all 4xx":             {"", "handle_errors 4xx {\n header >Cache-Control max-age=60\n respond sorry\n }", "Cache-Control"},
		"of another status":      {"", "handle_errors 404 {\n header Cache-Control max-age=60\n respond sorry\n }", ""},
		"of 5xx":                 {"", "handle_errors 5xx {\n header Cache-Control max-age=60\n respond sorry\n }", ""},
		"not to be kept":         {"", "handle_errors {\n header Cache-Control no-store\n respond sorry\n }", ""},
		"another field":          {"", "handle_errors {\n header X-Sorry yes\n respond sorry\n }", ""},
		"answered by the module": {" {\n response problem\n }", "handle_errors {\n header Cache-Control max-age=60\n respond sorry\n }", ""},
		"of a status of its own": {" {\n status 503\n }", "handle_errors 503 {\n header Cache-Control max-age=60\n respond sorry\n }", "Cache-Control"},
	} {
		t.Run(name, func(t *testing.T) {
			serve(t, fmt.Sprintf(limited, test.more, test.routes))
			got := strings.Join(warnings(t), "\n")
			if test.want == "" && got != "" || !strings.Contains(got, test.want) {
				t.Errorf("warned %q, want %q", got, test.want)
			}
		})
	}
}

// A warning about two places names both.
func TestWarningsNameBothPlaces(t *testing.T) {
	serve(t, "http://a.test {\n rate_limit {\n  zone z {header.A} 2/1h\n }\n}\nhttp://b.test {\n rate_limit {\n  zone z {header.B} 2/1h\n }\n}")
	if got := warnings(t); len(got) != 1 || !strings.Contains(got[0], "Caddyfile:3") || !strings.Contains(got[0], "Caddyfile:8") {
		t.Errorf("%q", got)
	}
}

// JSON, where a route may hold what sets a value, or a route before it, which is provisioned
// already.
func TestWarningsInJSON(t *testing.T) {
	limit := `{"handler":"rate_limit","rate_limits":{"z":{"limit":"1/1h","tier":null,"cost":"{http.request.header.X-Cost}"}}}`
	set := `{"handler":"headers","request":{"set":{"x-cost":["1"]}}}`
	for name, test := range map[string]struct {
		routes string
		warns  bool
	}{
		"alone":                    {`{"handle":[` + limit + `]}`, true},
		"same route":               {`{"handle":[` + set + `,` + limit + `]}`, false},
		"behind in the same route": {`{"handle":[` + limit + `,` + set + `]}`, true},
		"route before":             {`{"handle":[` + set + `]},{"handle":[` + limit + `]}`, false},
		"subroute before":          {`{"handle":[{"handler":"subroute","routes":[{"handle":[` + set + `]}]}]},{"handle":[` + limit + `]}`, false},
		"terminal route before":    {`{"handle":[` + set + `],"terminal":true},{"handle":[` + limit + `]}`, true},
		"same group before":        {`{"group":"g","handle":[` + set + `]},{"group":"g","handle":[` + limit + `]}`, true},
		"other group before":       {`{"group":"f","handle":[` + set + `]},{"group":"g","handle":[` + limit + `]}`, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			if err := s.loadJSON([]byte(`{"apps":{"http":{"servers":{"srv0":{"listen":[":80"],"routes":[` + test.routes + `]}}}}}`)); err != nil {
				t.Fatal(err)
			}
			if got := warnings(t); len(got) > 0 != test.warns {
				t.Errorf("%q", got)
			}
		})
	}
}

// G22: what the documentation recommends is not warned about. A directive alone that reads who was
// authenticated is shown to stand behind the handler that does it.
func TestDocumentedConfigsDoNotWarn(t *testing.T) {
	t.Setenv("REDIS_PASSWORD", "any")
	for _, e := range examples(t) {
		t.Run(e.place, func(t *testing.T) {
			s := newServer(t)
			if directive, ok := strings.CutPrefix(e.config, ":80 {\nrate_limit"); ok && strings.Contains(directive, "{http.auth.") {
				e.config = ":80 {\nroute {\nbasic_auth {\nbob $2a$14$Zkx19XLiW6VYouLHR5NmfOFU0z2GTNmpkT/5qqR7hx4IjWJPDhjvG\n}\nrate_limit" + directive + "}\n"
			}
			if err := s.load(strings.ReplaceAll(e.config, "/var/log/caddy", s.dir)); err != nil {
				t.Fatal(err)
			}
			for _, w := range warnings(t) {
				t.Errorf("%s\n%s", w, e.config)
			}
		})
	}
}
