package sluice_test

import (
	"testing"
	"unicode/utf8"
)

func checkMetrics(t testing.TB, text string) {
	if !utf8.ValidString(text) {
		t.Error("metrics are not UTF-8")
	}
}
