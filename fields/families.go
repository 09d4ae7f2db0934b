package fields

// The words after the directive `headers`: which families of fields a response carries.

import (
	"errors"
	"fmt"
	"slices"
)

// Families are the families of fields that responses carry. The zero value sends none;
// Retry-After and Cache-Control of a refusal are sent in any case.
type Families struct {
	// IETF sends RateLimit-Policy and RateLimit (draft 11).
	IETF bool
	// Draft6 sends RateLimit-Limit, -Remaining and -Reset (seconds), and draft 6's RateLimit-Policy
	// unless IETF is set too: one list cannot carry both kinds of items.
	Draft6 bool
	// X sends X-RateLimit-Limit, -Remaining and -Reset.
	X bool
	// XDelta makes X-RateLimit-Reset a number of seconds from now instead of seconds since the Unix epoch.
	XDelta bool
}

// Default is what is sent when nothing is configured: the current draft.
var Default = Families{IETF: true}

// ErrFamilies is what [Parse] wraps.
var ErrFamilies = errors.New("headers")

// Parse reads the words of the directive: `ietf`, `draft6`, `x [epoch|delta]`, several of them, or `off` alone.
// No words mean [Default].
func Parse(words []string) (Families, error) {
	if len(words) == 0 {
		return Default, nil
	}
	var f Families
	for i, word := range words {
		if slices.Contains(words[:i], word) {
			return Families{}, fmt.Errorf("%w: '%s' is given twice", ErrFamilies, word)
		}
		switch word {
		case "ietf":
			f.IETF = true
		case "draft6":
			f.Draft6 = true
		case "x":
			f.X = true
		case "epoch", "delta":
			if i == 0 || words[i-1] != "x" {
				return Families{}, fmt.Errorf("%w: '%s' must follow 'x'", ErrFamilies, word)
			}
			f.XDelta = word == "delta"
		case "off":
			if len(words) > 1 {
				return Families{}, fmt.Errorf("%w: 'off' must stand alone", ErrFamilies)
			}
		default:
			return Families{}, fmt.Errorf("%w: unknown word '%s', want ietf, draft6, x [epoch|delta], or off", ErrFamilies, word)
		}
	}
	return f, nil
}

// Words is the opposite of [Parse]: the words that give these families.
func (f Families) Words() []string {
	var words []string
	if f.IETF {
		words = append(words, "ietf")
	}
	if f.Draft6 {
		words = append(words, "draft6")
	}
	if f.X {
		words = append(words, "x")
		if f.XDelta {
			words = append(words, "delta")
		}
	}
	if words == nil {
		return []string{"off"}
	}
	return words
}
