// Placeholders: which ones there are, what they are called in short, and how a key reads them.
//
// Caddy expands a placeholder that it does not know to nothing, and a key that is nothing for
// everyone is one counter for everyone. So names that cannot be right are refused at load.

package caddyfile

import (
	"errors"
	"fmt"
	"net/textproto"
	"slices"
	"strconv"
	"strings"
)

const clientAddress = "{http.vars.client_ip}"

// piece is literal text, or the name of a placeholder.
type piece struct {
	text        string
	placeholder bool
}

// split finds the placeholders in a text by the rules of Caddy's replacer: a backslash escapes a
// brace, and a brace that nothing closes is text.
func split(text string) []piece {
	var pieces []piece
	var lit strings.Builder
	flush := func() {
		if lit.Len() > 0 {
			pieces = append(pieces, piece{text: lit.String()})
			lit.Reset()
		}
	}
	for i := 0; i < len(text); i++ {
		if text[i] == '\\' && i+1 < len(text) && (text[i+1] == '{' || text[i+1] == '}') {
			i++
			lit.WriteByte(text[i])
			continue
		}
		size := -1
		if text[i] == '{' {
			size = closing(text[i+1:])
		}
		if size < 0 {
			lit.WriteByte(text[i])
			continue
		}
		flush()
		pieces = append(pieces, piece{text: text[i+1 : i+1+size], placeholder: true})
		i += size + 1
	}
	flush()
	return pieces
}

// closing is the index of the first closing brace that is not escaped, or -1.
func closing(text string) int {
	for i := range len(text) {
		if text[i] == '}' && (i == 0 || text[i-1] != '\\') {
			return i
		}
	}
	return -1
}

// checkBraces refuses braces that make no placeholder. The replacer would take them for text, and a
// key that is text is one counter for everyone.
func checkBraces(text string) error {
	open := false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '\\' && i+1 < len(text) && (text[i+1] == '{' || text[i+1] == '}'):
			i++
		case c == '{' && open:
			return errors.New(`a { within a placeholder; want each closed before the next, as in {host}{path}, or \{ for a brace that is meant`)
		case c == '}' && !open:
			return errors.New(`a } that closes nothing; want { before a placeholder's name, or \} for a brace that is meant`)
		case c == '{' || c == '}':
			open = c == '{'
		}
	}
	if open {
		return errors.New(`a { that nothing closes; want } after the placeholder's name, or \{ for a brace that is meant`)
	}
	return nil
}

// isGlobal: the placeholder has a value at load, the same for every request.
func isGlobal(name string) bool {
	return hasAnyPrefix(name, "env.", "file.", "system.")
}

func hasAnyPrefix(text string, prefixes ...string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(text, p) })
}

// key compiles the texts of a key.
func (z *zoneCompiler) key(field string, texts Texts, m mask) (*Key, error) {
	key := &Key{}
	for i, text := range texts {
		p, err := z.part(field, text, m)
		if err != nil {
			return nil, z.fail(field, i, fmt.Errorf("%q: %w", text, err))
		}
		for _, a := range p.atoms {
			key.dynamic = key.dynamic || a.kind != literal
		}
		if field == "key" {
			z.warnFixed(text)
		}
		key.parts = append(key.parts, *p)
	}
	return key, nil
}

// part compiles a text that is read from the request.
func (z *zoneCompiler) part(field, text string, m mask) (*part, error) {
	if err := checkBraces(text); err != nil {
		return nil, err
	}
	p := &part{mask: m}
	hasAddress := false
	for _, piece := range split(text) {
		if !piece.placeholder {
			p.atoms = append(p.atoms, atom{kind: literal, name: piece.text})
			continue
		}
		a, err := z.atom(field, piece.text, m)
		if err != nil {
			return nil, err
		}
		hasAddress = hasAddress || a.kind.isAddress()
		p.group = p.group || a.kind.mayHoldAddress()
		p.atoms = append(p.atoms, a)
	}
	p.group = p.group && !hasAddress && (m.v4 < 32 || m.v6 < 128)
	return p, nil
}

// placeholder compiles a text that is one placeholder with a value for each request; a text that is
// anything else is nil.
func (z *zoneCompiler) placeholder(field, text string) (*part, error) {
	pieces := split(text)
	if len(pieces) != 1 || !pieces[0].placeholder || isGlobal(pieces[0].text) {
		return nil, nil
	}
	p, err := z.part(field, text, mask{v4: 32, v6: 128})
	if err != nil {
		return nil, z.fail(field, -1, fmt.Errorf("%q: %w", text, err))
	}
	return p, nil
}

// atom compiles one placeholder.
func (z *zoneCompiler) atom(field, name string, m mask) (atom, error) {
	if isGlobal(name) {
		if rest, ok := strings.CutPrefix(name, "system."); ok && !slices.Contains(systemNames, rest) {
			return atom{}, unknownPlaceholder(name)
		}
		a := atom{kind: constant}
		if z.lookup != nil {
			a.name, _ = z.lookup(name)
		}
		return a, nil
	}
	if a, ok, err := peerAtom(name, m); ok || err != nil {
		switch a.kind {
		case remotePort:
			z.warnUseless(field, name, "http.request.remote.port")
		case remoteHost:
			z.warnUseless(field, name, "http.request.remote.host")
		}
		return a, err
	}
	full := longName(name)
	if meant, ok := mistakes[name]; ok && z.out.Events && strings.Contains(name, ".") {
		// Configs of the older spelling must load, and many hold {http.request.remote_ip}, which
		// Caddy does not know: there it made one counter for everyone, which nobody meant.
		z.warn("placeholder {%s} is not one of Caddy's; taken as {%s}, please write that", name, meant)
		full = longName(meant)
	}
	if err := z.check(field, name, full); err != nil {
		return atom{}, err
	}
	a := requestAtom(full, m)
	if a.kind == rawPath && isKey(field) && !z.z.RawPath {
		a.kind = cleanPath
	}
	return a, nil
}

// requestAtom finds the shortest way to a placeholder's value.
func requestAtom(full string, m mask) atom {
	switch full {
	case "http.vars.client_ip":
		return atom{kind: clientIP, mask: m}
	case "http.request.remote.host":
		return atom{kind: remoteHost, mask: m}
	case "http.request.remote.port":
		return atom{kind: remotePort}
	case "http.request.remote":
		return atom{kind: remoteAddr}
	case "http.request.uri.path":
		return atom{kind: rawPath}
	case "http.request.uri":
		return atom{kind: uri}
	case "http.request.host":
		return atom{kind: host}
	case "http.request.method":
		return atom{kind: method}
	}
	for _, p := range []struct {
		prefix string
		kind   kind
	}{{"http.request.header.", header}, {"http.request.uri.query.", query}, {"http.request.cookie.", cookie}, {"http.vars.", variable}} {
		if rest, ok := strings.CutPrefix(full, p.prefix); ok {
			if p.kind == header {
				rest = textproto.CanonicalMIMEHeaderKey(rest)
			}
			return atom{kind: p.kind, name: rest}
		}
	}
	return atom{kind: other, name: full}
}

// peerAtom reads the placeholders of caddy-ext's module, and Caddy's own form of a masked address.
func peerAtom(name string, m mask) (atom, bool, error) {
	switch name {
	case "remote.host":
		return atom{kind: remoteHost, mask: m}, true, nil
	case "remote.port":
		return atom{kind: remotePort}, true, nil
	case "remote.ip":
		return atom{kind: clientIP, mask: m}, true, nil
	}
	for prefix, kind := range map[string]kind{
		"remote.host_prefix.": remoteHost, "remote.ip_prefix.": clientIP, "http.request.remote.host/": remoteHost,
	} {
		bits, ok := strings.CutPrefix(name, prefix)
		if !ok {
			continue
		}
		v4, v6, both := bits, bits, false
		if prefix[len(prefix)-1] == '/' {
			if v4, v6, both = strings.Cut(bits, ","); !both {
				v6 = v4
			}
		}
		m4, err4 := strconv.ParseUint(v4, 10, 8)
		m6, err6 := strconv.ParseUint(v6, 10, 8)
		if err := errors.Join(err4, err6); err != nil || m4 > 128 || m6 > 128 || both && m4 > 32 {
			return atom{}, false, fmt.Errorf("{%s} keeps %q bits of an address; want 0 to 32 for IPv4 and 0 to 128 for IPv6", name, bits)
		}
		return atom{kind: kind, mask: mask{v4: uint8(min(m4, 32)), v6: uint8(m6)}}, true, nil
	}
	return atom{}, false, nil
}
