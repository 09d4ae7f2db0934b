package sluice_test

// Rolling a limit out: only a share of the keys is refused, the same one everywhere.

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

func enforcing(percent string) string {
	return "rate_limit {\nzone e 1/365d {\n key {header.X-User}\n enforce " + percent + "\n}\n}\nrespond ok"
}

// refusedKeys asks once for each of the keys, which have used all that they have, and says who is
// refused.
func (s *server) refusedKeys(n int) map[string]bool {
	s.t.Helper()
	refused := map[string]bool{}
	for i := range n {
		key := fmt.Sprint("user-", i)
		a := s.get("/", "X-User", key)
		switch {
		case a.StatusCode == 429 && a.left("e") == 0:
			refused[key] = true
		case a.StatusCode != 200 || a.Header["Ratelimit"] != nil || a.Header["Ratelimit-Policy"] != nil:
			s.t.Errorf("%s: %s %v", key, a.Status, a.Header)
		}
	}
	return refused
}

func TestEnforceShare(t *testing.T) {
	const keys = 200
	onStores(t, func(t *testing.T, st *stage) {
		s := serve(t, st.config(enforcing("0%")))
		if n := len(s.refusedKeys(keys)); n != 0 { // and each key has used what it has
			t.Errorf("%d of fresh keys are refused", n)
		}
		before := map[string]bool{}
		for _, step := range []struct {
			percent     string
			least, most int
		}{{"0%", 0, 0}, {"10%", 5, 45}, {"10.0%", 5, 45}, {"50%", 70, 130}, {"99.9%", 190, 200}, {"100%", keys, keys}} {
			s.mustLoad(st.config(enforcing(step.percent)))
			passedDry, refusedDry, rejected := s.decided("e", "passed_dry_run"), s.decided("e", "rejected_dry_run"), s.decided("e", "rejected")
			refused := s.refusedKeys(keys)
			t.Logf("%s: %d of %d keys", step.percent, len(refused), keys)
			if len(refused) < step.least || len(refused) > step.most {
				t.Errorf("%s: %d keys of %d are refused", step.percent, len(refused), keys)
			}
			for key := range before {
				if !refused[key] {
					t.Errorf("%s: %s is refused no more", step.percent, key)
				}
			}
			before = refused
			if p, d, r := s.decided("e", "passed_dry_run")-passedDry, s.decided("e", "rejected_dry_run")-refusedDry, s.decided("e", "rejected")-rejected; p != 0 || d != keys-len(refused) || r != len(refused) {
				t.Errorf("%s: the metrics count %d, %d and %d", step.percent, p, d, r)
			}
		}
	})
}

// Who is refused depends on the zone and the key, not on the instance.
func TestEnforceIsTheSameOnEveryInstance(t *testing.T) {
	const keys = 60
	s := serve(t, new(stage).config(enforcing("50%")))
	for i := range keys {
		s.pass(1, "/", "X-User", fmt.Sprint("user-", i))
	}
	here := s.refusedKeys(keys)
	port := freePort(t)
	startCaddy(t, fmt.Sprintf("http://:%d {\n%s\n}\n", port, enforcing("50%")))
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	for i := range keys {
		key := fmt.Sprint("user-", i)
		url := fmt.Sprintf("http://127.0.0.1:%d/", port)
		get(t, client, url, "X-User", key)
		if resp, _ := get(t, client, url, "X-User", key); (resp.StatusCode == 429) != here[key] {
			t.Errorf("%s: %s there, refused %t here", key, resp.Status, here[key])
		}
	}
	if len(here) == 0 || len(here) == keys {
		t.Errorf("%d of %d keys", len(here), keys)
	}
}

// The log says what would have happened, in words that ban tools do not look for, and no event is
// emitted.
func TestEnforceReports(t *testing.T) {
	events()
	onStores(t, func(t *testing.T, st *stage) {
		s := serve(t, st.config(enforcing("0%")))
		s.pass(2, "/", "X-User", "u", "X-Forwarded-For", "192.0.2.88")
		lines := logged(t, "request would have been refused (dry run)")
		if len(lines) != 1 || lines[0]["zone"] != "e" || lines[0]["client_ip"] != "192.0.2.88" {
			t.Errorf("%v", lines)
		}
		if len(events()) != 0 || len(logged(t, "rate limit exceeded")) != 0 {
			t.Error("it is reported as a refusal")
		}
		if text := s.metrics(); strings.Contains(text, `declined_requests_total{zone="e"} 1`) {
			t.Error("it is counted as a refusal")
		}
	})
}
