package sluice_test

import (
	"strings"
	"testing"
	"time"
)

// Several zones on one request, and several rules on one zone.

func TestF30RefusalLeavesGroupLimit(t *testing.T) {
	s := serve(t, ":80 {\n rate_limit {\n zone group 10/1h\n zone special 3/1h\n }\n respond ok\n}")
	s.pass(3, "/")
	for range 2 {
		if a := s.refused("/"); a.left("group") != 7 || a.left("special") != 0 {
			t.Error(a.Header)
		}
	}
}

// 5/s with 10/s offered for 10 s: refused requests do not count. A token bucket that was full has
// its burst of 5 on top.
func TestF31SteadyOverload(t *testing.T) {
	for algorithm, want := range map[string][2]int{
		"sliding_log": {50, 51}, "fixed_window": {50, 51}, "token_bucket": {50, 55}, "leaky_bucket": {50, 51}, "sliding_window": {39, 43},
	} {
		t.Run(algorithm, func(t *testing.T) {
			c := useClock(t)
			s := serve(t, ":80 {\n rate_limit 5/1s {\n algorithm "+algorithm+"\n }\n respond ok\n}")
			passed := 0
			for range 100 {
				if s.get("/").StatusCode == 200 {
					passed++
				}
				c.add(100 * time.Millisecond)
			}
			if passed < want[0] || passed > want[1] {
				t.Errorf("%d passed, want %d to %d", passed, want[0], want[1])
			}
		})
	}
}

func TestF32OneOfThreeRefuses(t *testing.T) {
	c := useClock(t)
	s := serve(t, ":80 {\n rate_limit {\n zone day 100/1d\n zone burst 2/10s\n zone hour 50/1h {\n algorithm token_bucket\n }\n }\n respond ok\n}")
	s.pass(2, "/")
	c.add(3 * time.Second)
	for range 3 {
		a := s.refused("/")
		if a.left("day") != 98 || a.left("burst") != 0 || a.left("hour") != 48 || s.wait(a) != 7 {
			t.Error(a.Header)
		}
		if !strings.Contains(a.body, `"violated-policies":["burst"]`) {
			t.Error(a.body)
		}
	}
}

// Two handlers that name one zone charge a request twice.
func TestF33TwoRulesOneZone(t *testing.T) {
	config := func(limit string) string {
		zone := "rate_limit {\n zone twice " + limit + "\n }\n"
		return ":80 {\n route {\n " + zone + zone + " respond ok\n }\n}"
	}
	const warning = "a request that meets all rules of this zone can never pass, because together they take more than it holds"
	t.Run("never", func(t *testing.T) {
		s := serve(t, config("1/1h"))
		if len(logged(t, warning)) != 1 {
			t.Error("no warning at load")
		}
		for range 3 {
			a := s.refused("/")
			if s.wait(a) != -1 {
				t.Errorf("Retry-After %q though it can never pass", a.Header["Retry-After"])
			}
		}
	})
	for algorithm, want := range map[string]time.Duration{
		"sliding_log": time.Hour - 10*time.Second, "token_bucket": 40*time.Minute - 10*time.Second,
	} {
		t.Run(algorithm, func(t *testing.T) {
			c := useClock(t)
			s := serve(t, config("3/1h {\n algorithm "+algorithm+"\n }"))
			if len(logged(t, warning)) != 0 {
				t.Error("a warning without need")
			}
			s.pass(1, "/")
			c.add(10 * time.Second)
			a := s.refused("/")
			if got := time.Duration(s.wait(a)) * time.Second; got != want {
				t.Fatalf("Retry-After %v, want %v, when there is room for both charges", got, want)
			}
			c.add(want)
			s.pass(1, "/")
			// Now it is the first of the two handlers that refuses, and its wait must be for both
			// as well.
			for {
				if a = s.refused("/"); s.wait(a) < 0 {
					t.Fatal("no Retry-After")
				} else if a.left("twice") == 0 {
					break
				}
			}
			c.add(time.Duration(s.wait(a)) * time.Second)
			s.pass(1, "/")
		})
	}
}

// Two handlers that name one zone with other keys share the zone, not a counter.
func TestF33TwoRulesOneZoneOtherKeys(t *testing.T) {
	s := serve(t, `:80 {
	route {
		rate_limit {
			zone twice 1/1h
		}
		rate_limit {
			zone twice 1/1h {
				key {header.X-User}
			}
		}
		respond ok
	}
}`)
	s.pass(1, "/", "X-User", "a")
	s.refused("/", "X-User", "b")
}

func TestDefectRefusedRequestPaysOtherZones(t *testing.T) {
	for _, order := range []string{"zone wide 10/1h\n zone narrow 1/1h", "zone narrow 1/1h\n zone wide 10/1h"} {
		t.Run(order, func(t *testing.T) {
			s := serve(t, ":80 {\n rate_limit {\n "+order+"\n }\n respond ok\n}")
			s.pass(1, "/")
			for range 5 {
				if a := s.refused("/"); a.left("wide") != 9 {
					t.Error(a.Header)
				}
			}
		})
	}
}

func TestDefectEqualZonesInRandomOrder(t *testing.T) {
	useClock(t)
	zones := ""
	for _, name := range []string{"m", "a", "z", "b", "y"} {
		zones += " zone " + name + " {\n events 1\n window 1h\n }\n"
	}
	s := newServer(t)
	for i := range 20 {
		s.mustLoad(":80 {\n rate_limit {\n" + zones + " }\n respond ok\n handle_errors {\n respond {http.rate_limit.exceeded.name}\n }\n}")
		if i == 0 {
			s.pass(1, "/")
		}
		if a := s.refused("/"); a.body != "m" {
			t.Fatalf("load %d names zone %s, want the first in the file", i, a.body)
		}
	}
}

func TestDefectDuplicateZone(t *testing.T) {
	err := newServer(t).load(":80 {\n rate_limit {\n zone z {\n events 1\n window 1h\n }\n zone z {\n events 2\n window 1h\n }\n }\n}")
	if err == nil || !strings.Contains(err.Error(), "z") || !strings.Contains(err.Error(), "Caddyfile:7") {
		t.Error(err)
	}
}

func TestDefectSameZoneOtherSettings(t *testing.T) {
	site := func(port, limit string) string {
		return ":" + port + " {\n rate_limit {\n zone shared " + limit + "\n }\n respond ok\n}\n"
	}
	s := serve(t, site("80", "2/1h"))
	s.pass(1, "/")
	err := s.load(site("80", "2/1h") + site("81", "3/1h"))
	if err == nil || !strings.Contains(err.Error(), "Caddyfile:3") || !strings.Contains(err.Error(), "Caddyfile:9") {
		t.Errorf("%v; want both places", err)
	}
	// JSON has no adapter that could see it: the load does.
	two := `{"handler":"rate_limit","rate_limits":{"shared":{"max_events":2,"window":"1h"}}},
		{"handler":"rate_limit","rate_limits":{"shared":{"max_events":3,"window":"1h"}}}`
	err = s.loadJSON([]byte(`{"apps":{"http":{"servers":{"s":{"listen":[":80"],"routes":[{"handle":[` + two + `]}]}}}}}`))
	if err == nil || !strings.Contains(err.Error(), `"shared"`) || !strings.Contains(err.Error(), "2/1h") || !strings.Contains(err.Error(), "3/1h") {
		t.Errorf("%v; want both settings", err)
	}
	s.pass(1, "/")
	s.refused("/")
}
