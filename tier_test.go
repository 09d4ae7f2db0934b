package sluice_test

// Plans: whose limits hold for a request is told by a header, a map, a variable, or an
// authentication service.

import (
	"strings"
	"testing"
)

const plans = `zone api {
	key {header.X-User}
	tier % {
		free 3/1h
		pro 5/1h 100/1d
		staff unlimited
		default 1/1h
	}
}`

// plansBy is a zone with plans that the placeholder tells.
func plansBy(placeholder string) string { return strings.Replace(plans, "%", placeholder, 1) }

// A client that changes its plan keeps what it has used.
func TestTierFromHeader(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		s := serve(t, st.config("rate_limit {\n"+plansBy("{header.X-Plan}")+"\n}\nrespond ok"))
		s.pass(3, "/", "X-User", "u", "X-Plan", "free")
		a := s.refused("/", "X-User", "u", "X-Plan", "free")
		if a.Header.Get("Ratelimit-Policy") != `"api.free";q=3;w=3600` || a.left("api.free") != 0 || !strings.Contains(a.body, `["api.free"]`) {
			t.Error(a.Header, a.body)
		}
		for i := range 2 { // two more, of both limits
			a := s.get("/", "X-User", "u", "X-Plan", "pro")
			if a.Header.Get("Ratelimit-Policy") != `"api.pro.1h";q=5;w=3600, "api.pro.1d";q=100;w=86400` ||
				a.StatusCode != 200 || a.left("api.pro.1h") != 1-i || a.left("api.pro.1d") != 99-i {
				t.Error(a.Status, a.Header)
			}
		}
		if a := s.refused("/", "X-User", "u", "X-Plan", "pro"); !strings.Contains(a.body, `["api.pro.1h"]`) || a.left("api.pro.1d") != 98 {
			t.Error(a.Header, a.body)
		}
		for range 10 {
			if a := s.get("/", "X-User", "u", "X-Plan", "staff"); a.StatusCode != 200 || a.Header["Ratelimit"] != nil || a.Header["Ratelimit-Policy"] != nil {
				t.Error(a.Status, a.Header)
			}
		}
		for _, unknown := range [][]string{{"X-Plan", "gold"}, {"X-Plan", "PRO"}, {"X-Plan", "default"}, {"X-Plan", "pro "}, {"X-Plan", "free,pro"}, {}} {
			a := s.get("/", append(unknown, "X-User", "u")...)
			if strings.TrimSpace(strings.Join(unknown, "")) == "X-Planpro" { // servers trim header values
				if a.left("api.pro.1h") != 0 {
					t.Error(a.Header)
				}
			} else if a.StatusCode != 429 || a.Header.Get("Ratelimit-Policy") != `"api.default";q=1;w=3600` {
				t.Error(unknown, a.Status, a.Header)
			}
		}
		s.refused("/", "X-User", "u", "X-Plan", "free")
		s.pass(1, "/", "X-User", "another")
		if n := s.decided("api", "exempt"); n != 10 {
			t.Errorf("%d exempt, want those that are unlimited", n)
		}
	})
}

func TestTierFromMap(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		s := serve(t, st.config("map {header.X-User} {my.plan} {\n ann pro\n bob staff\n default free\n}\nrate_limit {\n"+plansBy("{my.plan}")+"\n}\nrespond ok"))
		s.pass(5, "/", "X-User", "ann")
		s.refused("/", "X-User", "ann")
		s.pass(20, "/", "X-User", "bob")
		s.pass(3, "/", "X-User", "cyd")
		s.refused("/", "X-User", "cyd")
	})
}

func TestTierFromVariable(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		s := serve(t, st.config("@pro header_regexp X-Token ^pro\nroute {\nvars @pro plan pro\nrate_limit {\n"+plansBy("{vars.plan}")+"\n}\nrespond ok\n}"))
		s.pass(5, "/", "X-User", "ann", "X-Token", "pro-1234")
		s.refused("/", "X-User", "ann", "X-Token", "pro-1234")
		s.pass(1, "/", "X-User", "bob")
		s.refused("/", "X-User", "bob")
	})
}

// The plan and the name that an authentication service tells, in a route block before the limiter,
// no client can forge.
func TestTierFromForwardAuth(t *testing.T) {
	onStores(t, func(t *testing.T, st *stage) {
		s := serve(t, st.config("route {\nforward_auth 127.0.0.1:81 {\n uri /who\n copy_headers X-User X-Plan\n}\nrate_limit {\n"+plansBy("{header.X-Plan}")+"\n}\nrespond {header.X-User}\n}")+`
:81 {
	@ann header Authorization "Bearer a"
	@bob header Authorization "Bearer b"
	handle @ann {
		header X-User ann
		header X-Plan pro
		respond 200
	}
	handle @bob {
		header X-User bob
		respond 200
	}
	respond 401
}`)
		for range 5 {
			if a := s.get("/", "Authorization", "Bearer a"); a.StatusCode != 200 || a.body != "ann" || a.left("api.pro.1h") < 0 {
				t.Fatal(a.Status, a.Header, a.body)
			}
		}
		s.refused("/", "Authorization", "Bearer a", "X-Plan", "staff")
		s.refused("/", "Authorization", "Bearer a", "X-User", "somebody")
		s.pass(1, "/", "Authorization", "Bearer b", "X-Plan", "staff", "X-User", "ann")
		if a := s.refused("/", "Authorization", "Bearer b", "X-Plan", "staff"); !strings.Contains(a.body, "api.default") {
			t.Error(a.body)
		}
		if a := s.get("/", "X-Plan", "staff", "X-User", "ann"); a.StatusCode != 401 || a.Header["Ratelimit"] != nil {
			t.Error(a.Status, a.Header)
		}
	})
}

// What an auth handler sets is empty at the limiter's default place; the load says so.
func TestTierWarnsOfLateValues(t *testing.T) {
	serve(t, ":80 {\nrate_limit {\n"+plansBy("{http.auth.user.plan}")+"\n}\nrespond ok\n}")
	if !strings.Contains(processLog.String(), "{http.auth.user.plan} is empty, since no auth handler runs before this rate_limit") {
		t.Error(processLog.String())
	}
}
