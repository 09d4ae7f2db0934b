// Reading one query parameter or one cookie without building the map or list of all of them.
// The standard library's rules hold: what it skips as malformed is skipped here.

package caddyfile

import (
	"net/url"
	"strings"
)

const blank = " \t\n\r"

// appendQuery appends the values of a query parameter, joined by commas.
func appendQuery(dst []byte, raw, name string) []byte {
	first := true
	for raw != "" {
		var pair string
		pair, raw, _ = strings.Cut(raw, "&")
		if pair == "" || strings.IndexByte(pair, ';') >= 0 {
			continue
		}
		key, value, _ := strings.Cut(pair, "=")
		if key, ok := unescape(key); !ok || key != name {
			continue
		}
		value, ok := unescape(value)
		if !ok {
			continue
		}
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = append(dst, value...)
	}
	return dst
}

func unescape(text string) (string, bool) {
	if !strings.ContainsAny(text, "%+") {
		return text, true
	}
	plain, err := url.QueryUnescape(text)
	return plain, err == nil
}

// appendCookie appends the value of the first cookie of that name. Unlike Caddy's placeholder it
// takes no other spelling of it: cookies that differ in their letters are two to every backend.
func appendCookie(dst []byte, lines []string, name string) []byte {
	for _, line := range lines {
		for line != "" {
			var pair string
			pair, line, _ = strings.Cut(line, ";")
			key, value, _ := strings.Cut(strings.Trim(pair, blank), "=")
			if strings.Trim(key, blank) != name {
				continue
			}
			if value, ok := cookieValue(value); ok {
				return append(dst, value...)
			}
		}
	}
	return dst
}

// cookieValue takes quotes off and refuses bytes that RFC 6265 does not allow, which ends up as no
// cookie.
func cookieValue(raw string) (string, bool) {
	if len(raw) > 1 && raw[0] == '"' && raw[len(raw)-1] == '"' {
		raw = raw[1 : len(raw)-1]
	}
	for i := range len(raw) {
		if c := raw[i]; c < 0x20 || c >= 0x7f || c == '"' || c == ';' || c == '\\' {
			return "", false
		}
	}
	return raw, true
}
