package caddyfile

import "testing"

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
