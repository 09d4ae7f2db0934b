package sluice_test

// Findings of an attack on the whole program.

import (
	"strings"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// A ban that was earned while Redis was away holds on its instance when Redis is back, as the
// client and the log were told, over a reload too. Others are decided in Redis as ever.
func TestBanOfAnOutageOutlivesIt(t *testing.T) {
	r := redistest.Start(t)
	config := sharing(r.Addr, "timeout 2s", "zone outage 10/1h {\n key {header.X-User}\n ban 1h after 2/10m\n}")
	s := serve(t, config)
	banned := func() float64 { return s.metric(`caddy_rate_limit_bans_total{zone="outage"}`) }
	s.pass(1, "/", "X-User", "ann")
	r.Kill()
	eventually(t, 10*time.Second, "the store to go down", func() bool { s.get("/", "X-User", "bob"); return len(logged(t, downLine)) > 0 })
	eventually(t, 10*time.Second, "a ban", func() bool { s.get("/", "X-User", "ann"); return banned() == 1 })
	r.Launch()
	eventually(t, 10*time.Second, "the store's return", func() bool { return len(logged(t, upLine)) > 0 })
	for range 3 {
		if a := s.refused("/", "X-User", "ann"); s.wait(a) < 3500 {
			t.Error(a.Header, a.body)
		}
	}
	s.mustLoad(config)
	s.refused("/", "X-User", "ann")
	s.mustLoad(strings.Replace(config, "timeout 2s", "timeout 2001ms", 1)) // G34: another store, for the same Redis
	s.refused("/", "X-User", "ann")
	s.pass(1, "/", "X-User", "cid")
	if n := banned(); n != 1 {
		t.Errorf("%v bans are counted, want 1", n)
	}
}
