package caddyfile

import (
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice/algorithms"
)

func TestCounts(t *testing.T) {
	only := rule(t, Zone{Count: &Statuses{Status: Texts{"401", "4xx", "503"}}}).Count
	but := rule(t, Zone{Count: &Statuses{NotStatus: Texts{"401", "4xx", "503"}}}).Count
	for status, want := range map[int]bool{
		401: true, 400: true, 499: true, 503: true, 200: false, 399: false, 500: false, 100: false, 599: false,
		0: false, -1: false, 600: false, 999: false, 1 << 40: false,
	} {
		if only.Counts(status) != want || but.Counts(status) == want {
			t.Errorf("%d counts %t with status, %t with not_status", status, only.Counts(status), but.Counts(status))
		}
	}
}

// A reservation is pending while its units matter; in Redis for a day at most, in this process
// until it ends.
func TestPending(t *testing.T) {
	ban := &Penalty{Durations: []caddy.Duration{caddy.Duration(time.Hour)}, After: "5/15m"}
	count := &Statuses{Status: Texts{"401"}}
	for _, test := range []struct {
		zone Zone
		want time.Duration
	}{
		{Zone{Limit: Texts{"5/15m"}, Count: count, Ban: ban}, 30 * time.Minute},
		{Zone{Limit: Texts{"5/1m", "50/1h"}, Count: count, Ban: ban, Concurrency: &Concurrency{Max: "3"}}, 2 * time.Hour},
		{Zone{Limit: Texts{"5/30d"}, Count: count, Ban: ban}, 24 * time.Hour},
		{Zone{Limit: Texts{"60/1m"}, Algorithm: "token_bucket", Burst: "120", Charge: "{http.response.header.X-Used}", Ban: ban}, 4 * time.Minute},
		{Zone{Limit: Texts{"60/1m"}, Ban: ban}, 0},
	} {
		for _, redis := range []bool{true, false} {
			r := rule(t, test.zone)
			if err := r.Resolve(redis); err != nil {
				t.Fatal(err)
			}
			want, got := test.want, time.Duration(0)
			if !redis && want > 0 {
				want = algorithms.MaxWindow
			}
			if p := r.Ban.Pending; p != nil {
				got = p.Window
			}
			if got != want {
				t.Errorf("%v, redis %t: pending for %v, want %v", test.zone.Limit, redis, got, want)
			}
		}
	}
}
