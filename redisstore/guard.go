package redisstore

// What a server may answer. The client's reply reader believes every length that it reads: one of
// 2^63 ends the process, a small reply can announce gigabytes, and arrays within arrays without end
// overflow the stack, which no recover catches. Whoever can write into a connection must not reach
// a web server that way, so lengths are read here first, in the bytes as they come.

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"syscall"
)

// The bounds are far above what the commands of this package answer: INFO is the longest text, the
// fleet's forgotten counters are the longest list, CLUSTER SLOTS is four arrays deep.
const (
	maxReply = 16 << 20 // bytes of one reply
	maxBulk  = 4 << 20  // bytes of one string
	maxItems = 1 << 18  // of one array
	maxDepth = 5        // arrays within arrays
)

var errHostile = errors.New("not an answer of Redis")

// guarded is a connection that ends when a reply on it is out of bounds.
type guarded struct {
	net.Conn
	replies replies
}

// guard watches the replies on a connection. What it returns can be looked at for being alive if c
// can.
func guard(c net.Conn) net.Conn {
	g := &guarded{Conn: c}
	if raw, ok := c.(syscall.Conn); ok {
		return struct {
			*guarded
			syscall.Conn
		}{g, raw}
	}
	return g
}

// Read implements net.Conn.
func (g *guarded) Read(b []byte) (int, error) {
	n, err := g.Conn.Read(b)
	if bad := g.replies.scan(b[:n]); bad != nil {
		_ = g.Conn.Close()
		return 0, bad
	}
	return n, err
}

// replies follows the framing of RESP through a stream of any chunks: version 2, and of 3 what the
// client's talk with sentinels uses. The zero value stands before the first reply.
type replies struct {
	kind   byte // of the element that is being read, 0 before its first byte
	number int64
	digits int
	minus  bool
	ended  bool            // the line's \r was read
	skip   int64           // bytes of a string to come, its line end included
	left   [maxDepth]int64 // elements to come in each open array
	depth  int             // how many are open
	size   int64           // bytes of the reply so far
}

// scan follows the next bytes, and returns an error when they are no reply within bounds.
func (r *replies) scan(b []byte) error {
	for len(b) > 0 {
		n := 1
		var err error
		switch {
		case r.skip > 0:
			n = int(min(r.skip, int64(len(b))))
			if r.skip -= int64(n); r.skip == 0 {
				r.finish()
			}
		case r.kind == 0:
			err = r.begin(b[0])
		case hasLength(r.kind):
			err = r.length(b[0])
		default:
			n = len(b)
			if i := bytes.IndexByte(b, '\n'); i >= 0 {
				n = i + 1
				r.finish()
			}
		}
		if err != nil {
			return err
		}
		b = b[n:]
		if r.kind == 0 && r.depth == 0 {
			r.size = 0 // a reply is complete
		} else if r.size += int64(n); r.size > maxReply {
			return fmt.Errorf("%w: a reply of more than %d bytes", errHostile, maxReply)
		}
	}
	return nil
}

// begin reads the first byte of an element.
func (r *replies) begin(c byte) error {
	switch c {
	case '+', '-', ':', '$', '*', '_', '#', ',', '(', '!', '=', '~', '>', '%':
		r.kind, r.number, r.digits, r.minus, r.ended = c, 0, 0, false, false
		return nil
	}
	return fmt.Errorf("%w: a reply begins with %q", errHostile, c)
}

// hasLength reports whether an element of that kind begins with its length: strings and arrays.
func hasLength(kind byte) bool { return isString(kind) || isArray(kind) }

func isString(kind byte) bool { return kind == '$' || kind == '!' || kind == '=' }

func isArray(kind byte) bool { return kind == '*' || kind == '~' || kind == '>' || kind == '%' }

// length reads a byte of the line that says how long a string or an array is.
func (r *replies) length(c byte) error {
	switch {
	case r.ended && c == '\n' && r.digits > 0:
		return r.open()
	case r.ended:
	case c == '\r':
		r.ended = true
		return nil
	case c == '-' && r.digits == 0 && !r.minus:
		r.minus = true
		return nil
	case c >= '0' && c <= '9' && r.digits < 9:
		r.number, r.digits = 10*r.number+int64(c-'0'), r.digits+1
		return nil
	}
	return fmt.Errorf("%w: %q in the length of a reply", errHostile, c)
}

// open begins what the length was about: nothing for the null of -1.
func (r *replies) open() error {
	if r.kind == '%' { // a key and a value each
		r.number *= 2
	}
	switch {
	case r.minus && r.number != 1:
		return fmt.Errorf("%w: a length of -%d", errHostile, r.number)
	case r.minus || isArray(r.kind) && r.number == 0:
		r.finish()
	case isString(r.kind) && r.number > maxBulk:
		return fmt.Errorf("%w: a string of %d bytes", errHostile, r.number)
	case isString(r.kind):
		r.skip = r.number + 2
	case r.number > maxItems:
		return fmt.Errorf("%w: an array of %d", errHostile, r.number)
	case r.depth == maxDepth:
		return fmt.Errorf("%w: more than %d arrays within one another", errHostile, maxDepth)
	default:
		r.left[r.depth] = r.number
		r.depth++
		r.kind = 0
	}
	return nil
}

// finish ends an element, and the arrays whose last one it was.
func (r *replies) finish() {
	r.kind = 0
	for r.depth > 0 {
		if r.left[r.depth-1]--; r.left[r.depth-1] > 0 {
			return
		}
		r.depth--
	}
}
