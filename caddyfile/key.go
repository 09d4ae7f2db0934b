// Keys: the text that separates clients, compiled once at load so that a request pays for reading
// its parts and not for a placeholder engine (Caddy's costs two allocations a call).

package caddyfile

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// The first byte of a key says how to read it. A plain text needs none, unless it begins with one
// of these: then markText goes before it. So no text that a client sends can pass for a composite
// or a fallback key.
const (
	markComposite = 0x01 // parts follow, each with its length before it
	markFallback  = 0x02 // a key of any kind follows
	markText      = 0x03 // a text follows
)

// Key is a compiled key. It is immutable and safe for concurrent use.
type Key struct {
	parts    []part
	fallback bool
	dynamic  bool // holds a placeholder, so it can expand to nothing
}

// part is one of the texts of a composite key, or the only one.
type part struct {
	atoms []atom
	// group: an address that the whole text happens to be is masked, since no placeholder in it is
	// one for sure.
	group bool
	mask  mask
}

// mask is how many bits of an address tell clients apart.
type mask struct{ v4, v6 uint8 }

// atom is a literal or one placeholder.
type atom struct {
	kind kind
	name string // what to read, or the literal
	mask mask
}

type kind uint8

const (
	literal  kind = iota
	constant      // a placeholder whose value was read at load
	clientIP
	remoteHost
	remotePort
	remoteAddr
	header
	query
	cookie
	cleanPath // as Caddy's path matcher sees it
	rawPath
	uri
	host
	method
	variable
	other // Caddy's replacer
)

func (k kind) isAddress() bool { return k == clientIP || k == remoteHost || k == remoteAddr }

// mayHoldAddress: clients' addresses also come in headers of proxies, variables and the like.
func (k kind) mayHoldAddress() bool {
	return k == header || k == query || k == cookie || k == variable || k == other
}

// Append appends one of the request's keys to dst: the nth, from 0, of as many as there are. The
// vars are the request's, which the caller has found already. That is one, but for a source that
// occurs several times, which makes one of each distinct value, see [choice]. More than [MaxKeys]
// are not told apart.
//
// ok is false when the key expanded to nothing: every placeholder in it is empty. A fallback is
// used even then, as for a unix socket: one counter for those. The error is HTTP 425 for HTTP/3
// early data, whatever the key: anyone can send it again, to charge a client once more, and its
// address is not proven yet (RFC 8470). Any bytes in the request are fine.
func (k *Key) Append(dst []byte, r *http.Request, vars map[string]any, nth int) (key []byte, ok bool, of int, err error) {
	if r.TLS != nil && !r.TLS.HandshakeComplete {
		return dst, false, 1, caddyhttp.Error(http.StatusTooEarly, ErrEarlyData)
	}
	c := choice{nth: nth, of: 1, vars: vars}
	if k.fallback {
		dst = append(dst, markFallback)
	}
	if len(k.parts) == 1 {
		start := len(dst)
		dst, ok = k.parts[0].append(dst, r, &c)
		if len(dst) > start && dst[start] <= markText {
			dst = insert(dst, start, markText)
		}
		return dst, ok || !k.dynamic || k.fallback, c.of, nil
	}
	dst = append(dst, markComposite)
	for i := range k.parts {
		start := len(dst)
		dst = append(dst, 0) // the length, if it fits into one byte as it nearly always does
		var some bool
		dst, some = k.parts[i].append(dst, r, &c)
		dst = setLength(dst, start)
		ok = ok || some
	}
	return dst, ok || !k.dynamic || k.fallback, c.of, nil
}

// ErrEarlyData is the cause of the error of [Key.Append].
var ErrEarlyData = errors.New("the TLS handshake is not complete, so that the request may be a copy of another and its address forged; it cannot be counted")

// Text shows a key: a text as it is, a composite one as a JSON array.
func (k *Key) Text(key []byte) string { return Text(string(key)) }

// Text shows a key that [Key.Append] made: a text as it is, a composite one as a JSON array.
func Text(key string) string {
	if key == "" {
		return ""
	}
	switch key[0] {
	case markFallback:
		return Text(key[1:])
	case markText:
		return key[1:]
	case markComposite:
		list := []string{}
		for rest := []byte(key[1:]); len(rest) > 0; {
			size, n := binary.Uvarint(rest)
			if n <= 0 || size > uint64(len(rest)-n) {
				break
			}
			list = append(list, string(rest[n:n+int(size)]))
			rest = rest[n+int(size):]
		}
		text, err := json.Marshal(list)
		if err != nil {
			return fmt.Sprintf("%q", list)
		}
		return string(text)
	}
	return key
}

// Encode makes the key that Append makes when the parts have these texts, for looking it up by
// hand.
func Encode(fallback bool, parts ...string) string {
	var dst []byte
	if fallback {
		dst = append(dst, markFallback)
	}
	if len(parts) == 1 {
		if parts[0] != "" && parts[0][0] <= markText {
			dst = append(dst, markText)
		}
		return string(append(dst, parts[0]...))
	}
	dst = append(dst, markComposite)
	for _, p := range parts {
		dst = append(binary.AppendUvarint(dst, uint64(len(p))), p...)
	}
	return string(dst)
}

func insert(dst []byte, at int, b ...byte) []byte {
	dst = append(dst, b...)
	copy(dst[at+len(b):], dst[at:])
	copy(dst[at:], b)
	return dst
}

// setLength writes the length of what follows dst[at] into it, and makes room if it needs more than
// that byte.
func setLength(dst []byte, at int) []byte {
	size := len(dst) - at - 1
	if size < 0x80 {
		dst[at] = byte(size)
		return dst
	}
	var buf [binary.MaxVarintLen64]byte
	n := binary.PutUvarint(buf[:], uint64(size))
	dst = insert(dst, at, buf[:n-1]...)
	copy(dst[at:], buf[:n])
	return dst
}

// append appends the part's text and reports whether a placeholder in it had a value. Without a
// choice, a source that occurs several times is read as Caddy's placeholder reads it.
func (p *part) append(dst []byte, r *http.Request, c *choice) ([]byte, bool) {
	some, start := false, len(dst)
	for i := range p.atoms {
		a, before := &p.atoms[i], len(dst)
		dst = a.append(dst, r, c)
		some = some || a.kind != literal && len(dst) > before
	}
	if p.group && mayBeAddress(dst[start:]) {
		if addr, err := netip.ParseAddr(string(dst[start:])); err == nil {
			dst = p.mask.append(dst[:start], addr)
		}
	}
	return dst, some
}

func (a *atom) append(dst []byte, r *http.Request, c *choice) []byte {
	switch a.kind {
	case literal, constant:
		return append(dst, a.name...)
	case clientIP:
		ip, _ := c.variable(r, caddyhttp.ClientIPVarKey).(string)
		return a.mask.appendText(dst, ip)
	case remoteHost:
		return a.mask.appendText(dst, splitHost(r.RemoteAddr))
	case remotePort:
		_, port, _ := net.SplitHostPort(r.RemoteAddr)
		return append(dst, port...)
	case remoteAddr:
		return append(dst, r.RemoteAddr...)
	case header:
		values := r.Header[a.name]
		if len(values) > 1 && c != nil {
			return c.header(dst, values)
		}
		return appendJoined(dst, values)
	case query:
		if c != nil {
			return c.query(dst, r.URL.RawQuery, a.name)
		}
		return appendQuery(dst, r.URL.RawQuery, a.name)
	case cookie:
		if c != nil {
			return c.cookie(dst, r.Header["Cookie"], a.name)
		}
		return appendCookie(dst, r.Header["Cookie"], a.name)
	case cleanPath:
		return appendCleanPath(dst, r.URL.Path)
	case rawPath:
		return append(dst, r.URL.Path...)
	case uri:
		return append(dst, r.URL.RequestURI()...)
	case host:
		return appendLower(dst, hostname(r.Host))
	case method:
		return append(dst, r.Method...)
	case variable:
		return appendValue(dst, c.variable(r, a.name))
	}
	repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return dst
	}
	value, _ := repl.Get(a.name)
	return appendValue(dst, value)
}

func appendValue(dst []byte, value any) []byte {
	if text, ok := value.(string); ok {
		return append(dst, text...)
	}
	return append(dst, caddy.ToString(value)...)
}

// appendText appends a masked address, or the text as it is when it is none (a unix socket).
func (m mask) appendText(dst []byte, text string) []byte {
	if m.v4 == 32 && strings.IndexByte(text, ':') < 0 {
		return append(dst, text...)
	}
	addr, err := netip.ParseAddr(text)
	if err != nil {
		return append(dst, text...)
	}
	return m.append(dst, addr)
}

// append appends the address, or the network it belongs to when fewer than all bits count. An
// IPv4-mapped address is the IPv4 address that it holds, and an IPv6 zone says something about this
// machine, not about the client.
func (m mask) append(dst []byte, addr netip.Addr) []byte {
	addr = addr.Unmap().WithZone("")
	bits := int(m.v6)
	if addr.Is4() {
		bits = int(m.v4)
	}
	if bits >= addr.BitLen() {
		return addr.AppendTo(dst)
	}
	prefix, err := addr.Prefix(bits)
	if err != nil {
		return addr.AppendTo(dst)
	}
	return prefix.AppendTo(dst)
}

// mayBeAddress spares most texts the attempt to parse them.
func mayBeAddress(text []byte) bool {
	if len(text) < 2 || len(text) > 64 {
		return false
	}
	for i, c := range text {
		switch {
		case c == '%':
			return i > 1
		case c >= '0' && c <= '9', c >= 'a' && c <= 'f', c >= 'A' && c <= 'F', c == ':', c == '.':
		default:
			return false
		}
	}
	return true
}

func splitHost(hostport string) string {
	name, _, err := net.SplitHostPort(hostport)
	if err != nil {
		return hostport // a unix socket
	}
	return name
}

// hostname is the host without the port. Unlike net.SplitHostPort it allocates no error when there
// is none.
func hostname(hostport string) string {
	if strings.IndexByte(hostport, ':') < 0 {
		return hostport
	}
	return splitHost(hostport)
}

// appendLower, because host names in other letters are the same host, and must not be another
// counter.
func appendLower(dst []byte, text string) []byte {
	for i := range len(text) {
		c := text[i]
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		dst = append(dst, c)
	}
	return dst
}

// appendCleanPath appends the path in the one spelling that Caddy's path matcher makes of all that
// it takes for the same.
func appendCleanPath(dst []byte, path string) []byte {
	if path == "" {
		return dst
	}
	return append(dst, caddyhttp.CleanPath(strings.ToLower(path), true)...)
}

// appendJoined joins the values of repeated header lines by commas, as Caddy's placeholders do,
// without the blanks around each: HTTP/2 and 3 carry them, and the next proxy takes them off, so
// that to the backend they are one value.
func appendJoined(dst []byte, values []string) []byte {
	for i, v := range values {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, strings.Trim(v, blank)...)
	}
	return dst
}
