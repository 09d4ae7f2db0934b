package sluice_test

// A refusal is one whole response that nobody may keep, whatever handlers before or around the
// limiter say of theirs (G01, G02).

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice"
)

// around are sites whose second request is refused by the limiter itself.
var around = map[string]string{
	"fields that speak to some caches": "header {\n Cloudflare-CDN-Cache-Control max-age=60\n >Akamai-Cache-Control max-age=60\n X-Accel-Expires 60\n >Edge-Control x\n}\nrate_limit 1/1h\nrespond ok",
	"header, deferred by a deletion":   "header {\n Cache-Control \"public, max-age=31536000, immutable\"\n Expires \"Thu, 01 Jan 2037 00:00:00 GMT\"\n CDN-Cache-Control max-age=60\n Surrogate-Control max-age=60\n -Server\n}\nrate_limit 1/1h\nrespond ok",
	"header, deferred by >":            "header >Cache-Control \"public, max-age=60\"\nrate_limit 1/1h\nrespond ok",
	"header, at once":                  "header Cache-Control \"public, max-age=60\"\nheader Expires x\nheader CDN-Cache-Control x\nheader Surrogate-Control x\nrate_limit 1/1h\nrespond ok",
	"header, a default":                "header ?Cache-Control \"public, max-age=60\"\nrate_limit 1/1h\nrespond ok",
	"header by the response's status":  "header {\n Cache-Control public\n defer\n match {\n status 4xx\n}\n}\nrate_limit 1/1h\nrespond ok",
	"several headers":                  "header >Cache-Control public\nheader >Expires x\nroute {\n header >Surrogate-Control x\n rate_limit 1/1h\n respond ok\n}",
	"what a body is":                   "header Content-Encoding gzip\nheader ETag x\nheader Last-Modified x\nheader Accept-Ranges bytes\nheader Content-Range \"bytes 1-2/3\"\nheader Content-Length 7\nheader Trailer X-T\nrate_limit 1/1h\nrespond seven77",
	"encode before it":                 "route {\n encode {\n gzip\n minimum_length 1\n match {\n header Content-Type *\n}\n}\n header >Cache-Control public\n rate_limit 1/1h\n respond ok\n}",
	"templates around it":              "route {\n header >Cache-Control public\n templates\n header >Expires x\n rate_limit 1/1h\n respond ok\n}",
	"templates of all types":           "route {\n header >Cache-Control public\n templates {\n mime application/problem+json\n}\n rate_limit 1/1h\n respond ok\n}",
	"intercept of other statuses":      "route {\n header >Cache-Control public\n intercept {\n @gone status 410\n handle_response @gone {\n respond gone 410\n}\n}\n header >Expires x\n rate_limit 1/1h\n respond ok\n}",
	"two limiters":                     "route {\n header >Cache-Control public\n rate_limit 9/1h {\n zone a 9/1h {\n concurrency 5\n }\n }\n header >Expires x\n rate_limit 1/1h\n respond ok\n}",
}

func TestARefusalIsWholeAndUncacheable(t *testing.T) {
	for name, site := range around {
		t.Run(name, func(t *testing.T) {
			config := "{\n admin off\n}\n:80 {\n log\n " + site + "\n}"
			s := serve(t, config)
			s.get("/", "Accept-Encoding", "gzip")
			a := s.get("/", "Accept-Encoding", "gzip")
			checkRefusal(t, a)
			var sizes []any
			for _, line := range logged(t, "handled request") {
				if line["status"] == float64(http.StatusTooManyRequests) {
					sizes = append(sizes, line["size"])
				}
			}
			if len(sizes) != 1 || sizes[0] != float64(len(a.body)) {
				t.Errorf("the access log knows refusals of %v bytes, want one of %d", sizes, len(a.body))
			}
		})
	}
}

// So is the answer to a request that cannot be counted, which tells no wait.
func TestWhatCannotBeCountedIsUncacheable(t *testing.T) {
	for name, site := range around {
		t.Run(name, func(t *testing.T) {
			site = strings.ReplaceAll(site, "rate_limit 1/1h", "rate_limit {\n zone z {header.X-Key} 1/1h\n}")
			s := serve(t, "{\n admin off\n}\n:80 {\n "+site+"\n}")
			a := s.get("/", "Accept-Encoding", "gzip", "X-Key", "a", "X-Key", "b", "X-Key", "c", "X-Key", "d", "X-Key", "e")
			checkUncacheable(t, a, http.StatusBadRequest)
			if a.Header.Get("Retry-After") != "" || !strings.Contains(a.body, "more than 4 values") {
				t.Errorf("%v %q", a.Header, a.body)
			}
		})
	}
	s := serve(t, ":80 {\n rate_limit {\n zone z {header.X-Key} 1/1h\n }\n respond ok\n handle_errors {\n respond \"{err.status_code} {err.message}\"\n}\n}")
	a := s.get("/", "X-Key", "a", "X-Key", "b", "X-Key", "c", "X-Key", "d", "X-Key", "e")
	if a.StatusCode != http.StatusBadRequest || !strings.HasPrefix(a.body, "400 ") || a.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("an error route answers: %s %v %q", a.Status, a.Header, a.body)
	}
}

func checkRefusal(t *testing.T, a answer) {
	t.Helper()
	checkUncacheable(t, a, http.StatusTooManyRequests)
}

// checkUncacheable wants problem+json, whole, with none of what others said of their responses.
func checkUncacheable(t *testing.T, a answer, status int) {
	t.Helper()
	if a.StatusCode != status || !strings.HasPrefix(a.body, `{"type":`) || strings.Count(a.body, "{") != 1 || !strings.HasSuffix(a.body, "}") {
		t.Errorf("%s %v %q", a.Status, a.Header, a.body)
	}
	if got := a.Header["Cache-Control"]; len(got) != 1 || got[0] != "no-store" {
		t.Errorf("Cache-Control: %q", got)
	}
	for _, field := range []string{"Expires", "Cdn-Cache-Control", "Cloudflare-Cdn-Cache-Control", "Akamai-Cache-Control", "X-Accel-Expires", "Edge-Control", "Surrogate-Control", "Content-Encoding", "Etag", "Last-Modified", "Accept-Ranges", "Content-Range", "Trailer"} {
		if got := a.Header[field]; got != nil {
			t.Errorf("%s: %q", field, got)
		}
	}
}

// What an upstream said of its response is not said of a refusal in its place.
func TestARefusalInPlaceOfAnUpstreamsResponse(t *testing.T) {
	dial := upstream(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Encoding", "x")
		w.Header().Set("Cache-Control", "public")
		w.Header().Set("Etag", `"x"`)
		_, _ = w.Write([]byte("from the upstream"))
	})
	s := serve(t, "{\n admin off\n}\n:80 {\n reverse_proxy "+dial+" {\n handle_response {\n copy_response_headers\n rate_limit 1/1h\n copy_response\n}\n}\n}")
	s.get("/")
	checkRefusal(t, s.get("/"))
}

// foreign is a writer of another module that cannot be compared and embeds nothing of Caddy's.
type foreign struct {
	http.ResponseWriter
	notes []string
}

func (f foreign) Unwrap() http.ResponseWriter { return f.ResponseWriter }

// Writers that nobody knows stay in the way, whatever they are.
func TestUnknownWritersStay(t *testing.T) {
	last := httptest.NewRecorder()
	w := foreign{&caddyhttp.ResponseWriterWrapper{ResponseWriter: foreign{last, nil}}, nil}
	if _, ok := sluice.Unaltered(w).(foreign); !ok {
		t.Error("the first writer was left out")
	}
	if sluice.Unaltered(last) != http.ResponseWriter(last) {
		t.Error("the last writer was left out")
	}
}

// The refused request itself comes back through the error route that answers it.
func TestF29RefusedWithinErrorRoute(t *testing.T) {
	s := serve(t, `
&(limited) {
	rate_limit {
		zone once 1/1h
	}
}
:80 {
	route {
		invoke limited
		respond ok
	}
	handle_errors {
		invoke limited
		respond "sorry: {err.status_code}"
	}
}`)
	s.pass(1, "/")
	if a := s.refused("/"); a.body != "sorry: 429" || s.wait(a) < 3500 || len(a.Header["Ratelimit"]) != 1 {
		t.Errorf("%q %v", a.body, a.Header)
	}
}

func TestDefectWithinHandleErrors(t *testing.T) {
	s := serve(t, `
:80 {
	error 404
	handle_errors {
		rate_limit {
			zone errors {
				events 2
				window 1h
			}
		}
		respond "not found" 404
	}
}`)
	for range 2 {
		if a := s.get("/"); a.StatusCode != 404 || a.body != "not found" {
			t.Fatal(a.StatusCode, a.body)
		}
	}
	a := s.refused("/")
	if s.wait(a) < 3500 || !strings.Contains(a.body, "quota-exceeded") || a.Header.Get("Content-Type") != "application/problem+json" {
		t.Error(a.Header, a.body)
	}
}
