// A header line, cookie or query parameter that occurs several times. Backends differ in which of
// its values they take, and a client that knows one may add others at will, so a key is made of
// each. The values are read here as loosely as any backend reads them, and what one of them takes
// for the same value is one here: a reading too many costs the sender a unit, one too few would be
// a counter that nobody watches.

package caddyfile

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// MaxKeys is how many keys of one request are charged. What would be more is no honest request.
const MaxKeys = 4

// choice is which of its values each source takes: the digits of nth, where a source with three
// values has base 3.
type choice struct {
	nth int
	of  int // how many numbers there are, for what was read so far

	vars map[string]any // the request's, if they were found already: it takes a walk through its context
}

// variable returns one of the request's variables.
func (c *choice) variable(r *http.Request, name string) any {
	if c != nil && c.vars != nil {
		return c.vars[name]
	}
	return caddyhttp.GetVar(r.Context(), name)
}

// readings are the distinct values of a source, and one more than may be.
type readings struct {
	list [MaxKeys + 1]string
	n    int
}

func (s *readings) full() bool { return s.n == len(s.list) }

// add notes a value unless it is known.
func (s *readings) add(value string) {
	for _, known := range s.list[:s.n] {
		if known == value {
			return
		}
	}
	if !s.full() {
		s.list[s.n] = value
		s.n++
	}
}

// take appends the value that is chosen. A source without a value has one choice.
func (c *choice) take(dst []byte, from *readings) []byte {
	if from.n == 0 {
		return dst
	}
	value := from.list[0]
	if from.n > 1 {
		value = from.list[c.nth%from.n]
		c.nth /= from.n
		c.of = min(c.of*from.n, MaxKeys+1) // many sources must not overflow it
	}
	return append(dst, value...)
}

func (c *choice) header(dst []byte, lines []string) []byte {
	var values readings
	for _, line := range lines {
		values.add(strings.Trim(line, blank))
	}
	return c.take(dst, &values)
}

// query reads a parameter. What Go's parser drops as malformed other parsers read, as it stands.
func (c *choice) query(dst []byte, raw, name string) []byte {
	var values readings
	for raw != "" && !values.full() {
		var pair string
		pair, raw, _ = strings.Cut(raw, "&")
		values.parameter(pair, name)
		if strings.IndexByte(pair, ';') >= 0 { // which ends a pair to some
			for part := range strings.SplitSeq(pair, ";") {
				values.parameter(part, name)
			}
		}
	}
	return c.take(dst, &values)
}

func (s *readings) parameter(pair, name string) {
	key, value, _ := strings.Cut(pair, "=")
	if key != "" && isParameter(percentDecoded(key, true), name) {
		s.add(percentDecoded(value, true))
	}
}

// isParameter: parsers that make lists and objects of parameters take name[], name[0] and [name]
// for the same.
func isParameter(key, name string) bool {
	if rest, ok := strings.CutPrefix(key, "["); ok {
		return strings.HasPrefix(rest, name) && strings.HasPrefix(rest[len(name):], "]")
	}
	return strings.HasPrefix(key, name) && (len(key) == len(name) || key[len(name)] == '[')
}

// cookie reads a cookie, whose name is compared exactly as backends do. Some parsers end a cookie
// at a blank or a comma too.
func (c *choice) cookie(dst []byte, lines []string, name string) []byte {
	var values readings
	for _, line := range lines {
		for at := 0; !values.full(); {
			i := strings.Index(line[at:], name)
			if i < 0 {
				break
			}
			start := at + i
			at = start + len(name)
			value, ok := strings.CutPrefix(strings.TrimLeft(line[at:], blank), "=")
			if !ok || start > 0 && strings.IndexByte("; \t,", line[start-1]) < 0 {
				continue
			}
			value, _, _ = strings.Cut(value, ";")
			values.add(cookieText(value))
			if end := strings.IndexAny(value, " \t,"); end >= 0 && strings.Contains(value[end:], name) {
				values.add(cookieText(value[:end]))
			}
		}
	}
	return c.take(dst, &values)
}

// cookieText takes off what one parser or another takes off: blanks, quotes, backslashes within
// them, and percent encoding.
func cookieText(text string) string {
	text = strings.Trim(text, blank)
	if len(text) > 1 && text[0] == '"' {
		text = text[1 : len(text)-1]
		if strings.IndexByte(text, '\\') >= 0 {
			text = unquote(text)
		}
	}
	return percentDecoded(text, false)
}

// unquote resolves \" and \101.
func unquote(text string) string {
	var plain strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] == '\\' && i+1 < len(text) {
			i++
			if i+2 < len(text) && text[i] <= '3' && isOctal(text[i:i+3]) {
				plain.WriteByte((text[i]-'0')<<6 | (text[i+1]-'0')<<3 | (text[i+2] - '0'))
				i += 2
				continue
			}
		}
		plain.WriteByte(text[i])
	}
	return plain.String()
}

func isOctal(text string) bool { return strings.Trim(text, "01234567") == "" }

// percentDecoded resolves percent encoding and, in a form, the + for a blank. What is malformed
// stays as it is.
func percentDecoded(text string, form bool) string {
	if strings.IndexByte(text, '%') < 0 && !(form && strings.IndexByte(text, '+') >= 0) {
		return text
	}
	plain := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '+' && form:
			plain = append(plain, ' ')
		case c == '%' && i+2 < len(text) && isHex(text[i+1]) && isHex(text[i+2]):
			code, _ := strconv.ParseUint(text[i+1:i+3], 16, 8)
			plain = append(plain, byte(code))
			i += 2
		default:
			plain = append(plain, c)
		}
	}
	return string(plain)
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}
