// Costs: how many units a request takes.

package caddyfile

import (
	"bytes"
	"math"
	"net/http"
)

// Cost is how many units a request takes: a fixed number, or read from the request.
type Cost struct {
	fixed int64
	text  *part // nil: fixed
}

// Dynamic reports whether the cost is read from the request.
func (c *Cost) Dynamic() bool { return c.text != nil }

// Least is the least that the cost can be.
func (c *Cost) Least() int64 { return c.fixed }

// Units returns what the request takes. ok is false when the placeholder's value is negative or not a whole number;
// the units are then 1, and the handler counts and logs that. A number that is too big for an int64 is the biggest one:
// it is above every capacity all the same.
func (c *Cost) Units(r *http.Request) (units int64, ok bool) {
	if units, _, ok = c.Value(r); !ok {
		return 1, false
	}
	return units, true
}

// Value is Units for a value that may be missing: written is false when it is empty, ok when it is a whole number of at least 0.
func (c *Cost) Value(r *http.Request) (units int64, written, ok bool) {
	if c.text == nil {
		return c.fixed, true, true
	}
	var buf [32]byte
	value, _ := c.text.append(buf[:0], r)
	value = bytes.TrimSpace(value)
	digits := bytes.TrimPrefix(value, []byte("+"))
	if len(digits) == 0 {
		return 0, len(value) > 0, false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, true, false
		}
		if units > (math.MaxInt64-9)/10 {
			units = math.MaxInt64
			continue
		}
		units = units*10 + int64(c-'0')
	}
	return units, true, true
}
