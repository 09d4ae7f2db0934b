// Costs: how many units a request takes.

package caddyfile

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"net/http"

	"github.com/caddy-sluice/sluice/algorithms"
)

// chargeFactor is how many times the capacity a response may cost unless charge says its max: far
// more than is likely.
const chargeFactor = 100

// Cost is how many units a request takes: a fixed number, or read from the request.
type Cost struct {
	fixed int64
	text  *part // nil: fixed
}

// Dynamic reports whether the cost is read from the request.
func (c *Cost) Dynamic() bool { return c.text != nil }

// Least is the least that the cost can be.
func (c *Cost) Least() int64 { return c.fixed }

// Units returns what the request takes. ok is false when the placeholder's value is negative or not
// a whole number; the units are then 1, and the handler counts and logs that. A number that is too
// big for an int64 is the biggest one: it is above every capacity all the same.
func (c *Cost) Units(r *http.Request) (units int64, ok bool) {
	if units, _, ok = c.Value(r); !ok {
		return 1, false
	}
	return units, true
}

// Value is Units for a value that may be missing: written is false when it is empty, ok when it is
// a whole number of at least 0.
func (c *Cost) Value(r *http.Request) (units int64, written, ok bool) {
	if c.text == nil {
		return c.fixed, true, true
	}
	var buf [32]byte
	value, _ := c.text.append(buf[:0], r, nil)
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

// cost compiles the cost, and refuses a fixed one that can never pass.
func (z *zoneCompiler) cost() error {
	z.out.Cost.fixed = 1
	text := string(z.z.Cost)
	if text == "" {
		return nil
	}
	if err := checkBraces(text); err != nil {
		return z.fail("cost", -1, fmt.Errorf("%q: %w", text, err))
	}
	placeholder, err := z.placeholder("cost", text)
	if err != nil {
		return err
	}
	if placeholder != nil {
		z.out.Cost = Cost{text: placeholder}
		return nil
	}
	cost, known, err := z.integer(z.z.Cost, 1, algorithms.MaxExact)
	if err != nil {
		return z.fail("cost", -1, fmt.Errorf("%w, or one placeholder; requests that cost nothing are left out with exempt", err))
	}
	z.out.Cost.fixed = cost
	if !known || z.pending {
		return nil
	}
	for _, plan := range z.out.Plans {
		for i, l := range plan.Limits {
			if l.Algorithm != algorithms.Concurrency && l.Quota > 0 && cost > l.Capacity {
				return z.fail("cost", -1, fmt.Errorf("%d can never pass, the limit %s admits at most %d at once; want 1 to %d",
					cost, plan.Names[i], l.Capacity, l.Capacity))
			}
		}
	}
	return nil
}

// charge compiles the cost that is known after the response.
func (z *zoneCompiler) charge() error {
	text := z.z.Charge
	if text == "" {
		if z.z.ChargeMax != "" {
			return z.fail("charge_max", -1, errors.New("there is no charge that it could bound; want both, or neither"))
		}
		return nil
	}
	if z.z.Algorithm != algorithms.TokenBucket.String() {
		return z.fail("charge", -1, errors.New("only a token_bucket can carry a debt, so that the average holds whatever a response costs; "+
			"want algorithm token_bucket beside it"))
	}
	placeholder, err := z.placeholder("charge", text)
	if err != nil {
		return err
	}
	if placeholder == nil {
		return z.fail("charge", -1, fmt.Errorf("%q; want one placeholder with a value after the response, such as {http.response.header.X-Tokens-Used}", text))
	}
	z.out.Charge = &Cost{text: placeholder}
	for limit := range z.out.AllLimits() {
		if limit.Algorithm != algorithms.Concurrency {
			z.out.MaxCharge = max(z.out.MaxCharge, min(limit.Capacity, algorithms.MaxExact/chargeFactor)*chargeFactor)
		}
	}
	if z.z.ChargeMax == "" {
		return nil
	}
	if z.out.MaxCharge, _, err = z.integer(z.z.ChargeMax, 1, algorithms.MaxExact); err != nil {
		return z.fail("charge_max", -1, err)
	}
	return nil
}
