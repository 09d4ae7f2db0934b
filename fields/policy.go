package fields

// One limit as it stands on the wire: the texts that never change, written once at load.

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// MaxInteger is the largest Integer of Structured Fields (RFC 9651, section 3.3.1). Larger numbers
// are sent as this one.
const MaxInteger = 999_999_999_999_999

// Policy is a limit under the name that clients see.
type Policy struct {
	name     string
	quoted   string // as a String of Structured Fields, and of JSON
	capacity int64
	item     string // of RateLimit-Policy: "api";q=100;w=60
	limit    string // how the item of RateLimit begins: "api";r=
	draft6   string // of draft 6's RateLimit-Policy: 100;w=60; empty when there is no whole-second window, which it requires
	inFlight bool   // counts units in flight, which the older families have no way to say
}

// NewPolicy prepares the texts of a limit. Any name makes a well-formed field, see [Name].
func NewPolicy(name string, l *algorithms.Limit) Policy {
	name = Name(name)
	quoted := quote(name)
	q := strconv.FormatInt(clamp(l.Capacity), 10)
	p := Policy{
		name:     name,
		quoted:   quoted,
		capacity: l.Capacity,
		item:     quoted + `;q=` + q,
		limit:    quoted + `;r=`,
		inFlight: l.Algorithm == algorithms.Concurrency,
	}
	if p.inFlight {
		p.item += `;qu="concurrent-requests"`
	}
	if w := window(l); w > 0 {
		text := ";w=" + strconv.FormatInt(w, 10)
		p.item += text
		p.draft6 = q + text
	}
	return p
}

// Name returns the name that clients see.
func (p *Policy) Name() string { return p.name }

// window returns the policy's window in whole seconds, 0 when it has none that is true. A bucket's
// is the time in which it refills, rounded up: to claim that more comes back in less time would be
// a promise that is not kept. That of units in flight is only how long a lease may go unrenewed.
func window(l *algorithms.Limit) int64 {
	switch {
	case l.Algorithm == algorithms.Concurrency:
		return 0
	case l.Algorithm.Bucket():
		return clamp(seconds(l.Refill()))
	case l.Window%time.Second != 0:
		return 0
	}
	return clamp(seconds(l.Window))
}

// appendLimit writes the item of RateLimit: r and, if it is known when more becomes available, t.
func (p *Policy) appendLimit(dst []byte, o *algorithms.Outcome) []byte {
	dst = append(dst, p.limit...)
	dst = strconv.AppendInt(dst, clamp(o.Remaining), 10)
	if known(o.Next) {
		dst = append(dst, ";t="...)
		dst = strconv.AppendInt(dst, clamp(seconds(o.Next)), 10)
	}
	return dst
}

// Tighter reports whether outcome a of a limit with capacity p is closer to exhaustion than b of
// one with capacity q: the smaller share remains, or the same share and the longer wait for more.
// Shares are compared as fractions, exactly.
func Tighter(p int64, a *algorithms.Outcome, q int64, b *algorithms.Outcome) bool {
	// a/p < b/q; a capacity of 0 counts as 1, since nothing of it remains either way
	hi1, lo1 := bits.Mul64(uint64(max(a.Remaining, 0)), uint64(max(q, 1)))
	hi2, lo2 := bits.Mul64(uint64(max(b.Remaining, 0)), uint64(max(p, 1)))
	if hi1 != hi2 {
		return hi1 < hi2
	}
	if lo1 != lo2 {
		return lo1 < lo2
	}
	return a.Next > b.Next
}

// known reports whether a wait is one that clients can be told.
func known(wait time.Duration) bool { return wait != algorithms.Never && wait != algorithms.Unknown }

// seconds rounds up, so that no client is told to come back too early.
func seconds(d time.Duration) int64 {
	if d <= 0 {
		return 0
	}
	s := int64(d / time.Second)
	if d%time.Second > 0 {
		s++
	}
	return s
}

func clamp(n int64) int64 { return max(0, min(n, MaxInteger)) }

// Name is the name that clients see: what is not printable ASCII is percent-encoded. A percent sign
// stays as it is.
func Name(name string) string {
	var out []byte
	for i := range len(name) {
		if c := name[i]; c < ' ' || c > '~' {
			out = fmt.Appendf(out, "%%%02X", c)
		} else {
			out = append(out, c)
		}
	}
	return string(out)
}

// quote writes a printable ASCII text as a String of Structured Fields (RFC 9651, section 3.3.3),
// which is one in JSON too.
func quote(text string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(text) + `"`
}
