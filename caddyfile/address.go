// The address of a Redis server, which may hold a password: it is taken apart here and only here,
// so that what goes on from here is harmless in logs and errors.

package caddyfile

import (
	"errors"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"
)

// address is a Redis server and what a URL says about it.
type address struct {
	host, port         string // of TCP; port "" is the default one
	path               string // of a unix socket
	tls                bool
	username, password string
	db                 string // "" when the address does not say
}

// dial is what is connected to.
func (a *address) dial(defaultPort string) string {
	switch {
	case a.path != "":
		return a.path
	case a.port == "":
		return net.JoinHostPort(a.host, defaultPort)
	}
	return net.JoinHostPort(a.host, a.port)
}

// sameBut reports whether a differs from b in host and port only.
func (a *address) sameBut(b *address) bool {
	x, y := *a, *b
	x.host, x.port, x.path = y.host, y.port, y.path
	return x == y
}

const wantAddress = "want host:port, the path of a unix socket, or a URL such as redis://user:password@host:port/db, rediss:// or unix://"

// parseAddress reads one address. Its errors do not quote it; see [harmless].
func parseAddress(text string) (*address, error) {
	switch {
	case strings.Contains(text, "://"):
		return parseURL(text)
	case strings.HasPrefix(text, "/"):
		return &address{path: text}, nil
	case strings.Contains(text, "@"):
		return nil, errors.New("a user or password without redis:// before it; " + wantAddress)
	}
	host, port, ok := hostPort(text)
	if !ok {
		return nil, errors.New(wantAddress)
	}
	return &address{host: host, port: port}, nil
}

// hostPort splits host, host:port, [v6], [v6]:port and v6.
func hostPort(text string) (host, port string, ok bool) {
	if inner, found := strings.CutPrefix(text, "["); found && strings.HasSuffix(inner, "]") {
		text = strings.TrimSuffix(inner, "]")
	}
	if ip, err := netip.ParseAddr(text); err == nil {
		return ip.String(), "", true
	}
	host = text
	if strings.Contains(text, ":") {
		var err error
		if host, port, err = net.SplitHostPort(text); err != nil {
			return "", "", false
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", "", false
		}
	}
	if _, err := netip.ParseAddr(host); err != nil && !hostName.MatchString(host) {
		return "", "", false
	}
	return host, port, true
}

var (
	hostName = regexp.MustCompile(`^[\pL\pN_.-]+$`)
	database = regexp.MustCompile(`^[0-9]{1,6}$`)
)

// parseURL reads a URL. What the standard library says of a bad one is left out, since it quotes
// the password.
func parseURL(text string) (*address, error) {
	scheme, _, _ := strings.Cut(text, "://")
	if scheme != "redis" && scheme != "rediss" && scheme != "unix" {
		return nil, errors.New("unknown kind of URL; " + wantAddress)
	}
	u, err := url.Parse(text)
	if err != nil || u.Fragment != "" {
		return nil, errors.New("not a URL; in a password, characters such as # / ? % @ are written %23 %2F %3F %25 %40, " +
			"or the password stands in password <text> and not in the address")
	}
	a := &address{tls: scheme == "rediss"}
	if u.User != nil {
		a.username = u.User.Username()
		a.password, _ = u.User.Password()
		if a.password == "" {
			return nil, errors.New("a user without a password; want redis://user:password@host, or redis://:password@host for the default user")
		}
	}
	query := u.Query()
	db := query.Get("db")
	if query.Del("db"); len(query) > 0 {
		return nil, errors.New("the part after ? is not understood; want the words timeout, pool_size and so on in the block of redis")
	}
	if scheme == "unix" {
		if u.Host != "" || !strings.HasPrefix(u.Path, "/") {
			return nil, errors.New("no absolute path; want unix:///path/of/the/socket")
		}
		a.path = u.Path
	} else {
		var ok bool
		if a.host, a.port, ok = hostPort(u.Host); !ok {
			return nil, errors.New("no host, or one that cannot be; want redis://host:port")
		}
		if path := strings.Trim(u.Path, "/"); path != "" {
			if db != "" {
				return nil, errors.New("two databases; want one")
			}
			db = path
		}
	}
	if db != "" && !database.MatchString(db) {
		return nil, errors.New("the database is not a number; want redis://host:port/1, or unix:///path?db=1")
	}
	a.db = db
	return a, nil
}

// harmless is an address without what may be secret: the user and password, and whatever may be a
// part of them.
func harmless(text string) string {
	scheme, rest, isURL := strings.Cut(text, "://")
	if isURL = isURL && schemeName.MatchString(scheme); isURL {
		scheme += "://"
	} else {
		scheme, rest = "", text
	}
	shown := rest
	if end := strings.IndexAny(rest, "?#"); end >= 0 {
		shown = rest[:end]
	}
	at := strings.LastIndexByte(shown, '@')
	switch {
	case strings.Contains(rest[len(shown):], "@"), at < 0 && !plainAddress.MatchString(shown):
		return scheme + "***"
	case at >= 0:
		return scheme + "***" + shown[at:]
	}
	return scheme + shown
}

var (
	schemeName = regexp.MustCompile(`^[a-z]+$`)
	// plainAddress is an address, or what follows a URL's scheme, without a password in it:
	// redis://:secret, which lacks @host, is not plain, nor is password=secret.
	plainAddress = regexp.MustCompile(`^([\pL\pN_.{}-]*|\[[0-9A-Fa-f:.]*\])(:[0-9]*)?(/.*)?$`)
)
