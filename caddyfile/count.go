// Which responses count.

package caddyfile

import (
	"errors"
	"fmt"
	"strconv"
)

// Count says which responses count.
type Count struct {
	listed [600]bool // by status
	not    bool      // all but those
}

// Counts reports whether a response of that status counts.
func (c *Count) Counts(status int) bool {
	return (status >= 0 && status < len(c.listed) && c.listed[status]) != c.not
}

// count compiles the codes.
func (z *zoneCompiler) count() error {
	s := z.z.Count
	if s == nil {
		return nil
	}
	field, codes := "count.status", s.Status
	switch {
	case len(s.Status) > 0 && len(s.NotStatus) > 0:
		return z.fail("count", -1, errors.New("status and not_status are both written; want one of them"))
	case len(s.Status) == 0 && len(s.NotStatus) == 0:
		return z.fail("count", -1, errors.New("no codes; want status or not_status with some, such as 401 or 4xx"))
	case z.z.Charge != "":
		return z.fail("count", -1, errors.New("charge is written too, and each says what a response costs; want one of the two"))
	case len(s.NotStatus) > 0:
		field, codes = "count.not_status", s.NotStatus
	}
	z.out.Count = &Count{not: len(s.NotStatus) > 0}
	for i, code := range codes {
		code, known, err := z.expand(code)
		if err != nil {
			return z.fail(field, i, err)
		}
		if known && !z.out.Count.add(code) {
			return z.fail(field, i, fmt.Errorf("%q; want a status from 100 to 599, or a class such as 4xx", code))
		}
	}
	return nil
}

// add lists a code or a class, and reports whether the text is one.
func (c *Count) add(code string) bool {
	if len(code) != 3 || code[0] < '1' || code[0] > '5' {
		return false
	}
	if code[1:] == "xx" {
		class := int(code[0]-'0') * 100
		for status := class; status < class+100; status++ {
			c.listed[status] = true
		}
		return true
	}
	status, err := strconv.ParseUint(code, 10, 16)
	if err != nil {
		return false
	}
	c.listed[status] = true
	return true
}
