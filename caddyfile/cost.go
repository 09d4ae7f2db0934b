// Costs: how many units a request takes.

package caddyfile

import (
	"math"
	"net/http"
	"strconv"
	"strings"
)

// Cost is how many units a request takes: a fixed number, or read from the request.
type Cost struct {
	fixed int64
	text  *part // nil: fixed
}

// Dynamic reports whether the cost is read from the request.
func (c *Cost) Dynamic() bool { return c.text != nil }

// Units returns what the request takes. ok is false when the placeholder's value is negative or not a whole number;
// the units are then 1, and the handler counts and logs that.
func (c *Cost) Units(r *http.Request) (units int64, ok bool) {
	if c.text == nil {
		return c.fixed, true
	}
	var buf [32]byte
	value, _ := c.text.append(buf[:0], r)
	text := strings.TrimSpace(string(value))
	units, err := strconv.ParseInt(text, 10, 64)
	switch {
	case err == nil && units >= 0:
		return units, true
	case units == math.MaxInt64: // out of range upwards: a number all the same, and above every capacity
		return units, true
	}
	return 1, false
}
