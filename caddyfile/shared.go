// Global → what the shared store is made of. Nothing here uses the network, so that a config can be
// validated anywhere.

package caddyfile

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice/redisstore"
)

// Shared is a compiled global option.
type Shared struct {
	// Options of the store, without the callbacks. The addresses hold no secrets.
	Options redisstore.Options
	// Fingerprint is the same for configs that can share connections within this process: it covers
	// all of Options, secrets and the contents of files included. It gives none of them away, not
	// even to a guess, since every process has its own.
	Fingerprint string
	// FleetSize is how many instances share the limits, or 0: as many as announced themselves.
	FleetSize int
	// Warnings are for the log: what is allowed and probably not meant.
	Warnings []string
}

// Place says where the counters are: settings with the same place reach the same counters. Of
// sentinels and of the nodes of a cluster any few lead there, so that their addresses do not count.
func (s *Shared) Place() string {
	o := &s.Options
	place := []string{"redis", string(o.Mode)}
	switch o.Mode {
	case redisstore.Sentinel:
		place = append(place, o.MasterName)
	case redisstore.Cluster:
	default:
		place = append(place, o.Addrs...)
	}
	return strings.Join(append(place, "db", strconv.Itoa(o.DB), "prefix", o.Prefix), " ")
}

const (
	leastTimeout, mostTimeout = time.Millisecond, time.Minute
	mostConnections           = 10_000
	mostInstances             = 1_000_000
	mostDatabase              = 999_999
)

// Compile checks the option and reads the secrets and files that it names. It returns nil when
// there is no shared store. The error names the JSON path, or the line of the Caddyfile that the
// config was adapted from, and what would be right; it never shows a secret.
func (g *Global) Compile() (*Shared, error) {
	repl := caddy.NewReplacer()
	return g.compile(func(name string) (string, bool) { return repl.GetString(name) })
}

// compile is Compile; with a nil lookup, as at adapt time, placeholders and files are left for the
// load, and what it returns is not complete.
func (g *Global) compile(lookup func(string) (string, bool)) (*Shared, error) {
	switch g.Placeholders {
	case "", "on", "off":
	default:
		return nil, g.fail("placeholders", -1, fmt.Errorf("%q; want off, or leave it out", g.Placeholders))
	}
	r := g.Redis
	if r == nil {
		if g.FleetSize != "" {
			return nil, g.fail("fleet_size", -1, errors.New("there is no redis that instances could share; want redis <address> beside it, or leave fleet_size out"))
		}
		return nil, nil
	}
	s := &sharedCompiler{compiler: compiler{lookup: lookup}, g: g, out: &Shared{}}
	for _, step := range []func(*Redis) error{s.mode, s.addresses, s.credentials, s.database, s.numbers, s.prefix, s.tls} {
		if err := step(r); err != nil {
			return nil, err
		}
	}
	s.out.Fingerprint = s.fingerprint()
	return s.out, nil
}

func (g *Global) fail(field string, index int, err error) error {
	return &fieldError{place: g.Place, field: field, index: index, err: err}
}

type sharedCompiler struct {
	compiler
	g     *Global
	out   *Shared
	first *address // nil when it is not known before the load
	files [][]byte // contents
}

// secret evaluates a text that errors must not show.
func (s *sharedCompiler) secret(field, text string) (value string, err error) {
	value, _, err = s.expandSecret(text)
	if err != nil {
		return "", s.g.fail(field, -1, err)
	}
	return value, nil
}

func (s *sharedCompiler) mode(r *Redis) error {
	mode := redisstore.Mode(r.Mode)
	switch mode {
	case "":
		mode = redisstore.Single
	case redisstore.Single, redisstore.Sentinel, redisstore.Cluster, redisstore.Ring:
	default:
		return s.g.fail("redis.mode", -1, fmt.Errorf("%q%s; want single, sentinel, cluster or ring", r.Mode, didYouMean(r.Mode, "single", "sentinel", "cluster", "ring")))
	}
	s.out.Options.Mode = mode
	if mode == redisstore.Sentinel {
		if r.MasterName == "" {
			return s.g.fail("redis.mode", -1, errors.New("sentinel, but master_name is missing; want the name that the sentinels know the master by"))
		}
		return nil
	}
	for _, f := range []struct{ field, text string }{
		{"master_name", r.MasterName}, {"sentinel_username", r.SentinelUsername}, {"sentinel_password", r.SentinelPassword},
	} {
		if f.text != "" {
			return s.g.fail("redis."+f.field, -1, fmt.Errorf("only mode sentinel has one, and the mode is %s; want mode sentinel, or leave it out", mode))
		}
	}
	return nil
}

func (s *sharedCompiler) addresses(r *Redis) error {
	o := &s.out.Options
	if len(r.Addresses) == 0 {
		return s.g.fail("redis.addresses", -1, errors.New("no address; "+wantAddress))
	}
	if len(r.Addresses) > 1 && o.Mode == redisstore.Single {
		return s.g.fail("redis.addresses", 1, errors.New("a second address, but the mode is single; want one, or mode sentinel, cluster or ring"))
	}
	port := "6379"
	if o.Mode == redisstore.Sentinel {
		port = "26379"
	}
	for i, text := range r.Addresses {
		fail := func(err error) error {
			return s.g.fail("redis.addresses", i, fmt.Errorf("%q: %w", harmless(text), err))
		}
		a, err := s.address(text)
		switch {
		case err != nil:
			return fail(err)
		case a == nil:
			continue
		case o.Mode == redisstore.Sentinel && (a.username+a.password+a.db != ""):
			return fail(errors.New("a user, password or database of a sentinel; want username, password and db of the servers, and sentinel_username and sentinel_password, in the block of redis"))
		case a.path != "" && len(r.Addresses) > 1 && o.Mode != redisstore.Ring, a.path != "" && o.Mode == redisstore.Cluster:
			return fail(fmt.Errorf("the path of a socket, but the servers of mode %s are reached over the network; want host:port", o.Mode))
		case i > 0 && s.first != nil && !a.sameBut(s.first):
			return fail(errors.New("another user, password, database or encryption than the first address; want the same, such as all of them as host:port, and the rest in the block of redis"))
		case slices.Contains(o.Addrs, a.dial(port)):
			return fail(errors.New("the same server twice; want it once"))
		case i == 0:
			s.first = a
		}
		o.Addrs = append(o.Addrs, a.dial(port))
	}
	return nil
}

// address evaluates and reads one address; it is nil if it is not known before the load.
func (s *sharedCompiler) address(text string) (*address, error) {
	value, known, err := s.expandSecret(text)
	if err != nil || !known {
		return nil, err
	}
	return parseAddress(value)
}

func (s *sharedCompiler) credentials(r *Redis) error {
	o := &s.out.Options
	for _, f := range []struct {
		field, text string
		to          *string
	}{
		{"redis.username", r.Username, &o.Username}, {"redis.password", r.Password, &o.Password},
		{"redis.master_name", r.MasterName, &o.MasterName},
		{"redis.sentinel_username", r.SentinelUsername, &o.SentinelUsername},
		{"redis.sentinel_password", r.SentinelPassword, &o.SentinelPassword},
	} {
		var err error
		if *f.to, err = s.secret(f.field, f.text); err != nil {
			return err
		}
	}
	if s.first != nil && s.first.password != "" {
		for _, field := range []struct{ name, text string }{{"username", r.Username}, {"password", r.Password}} {
			if field.text != "" {
				return s.g.fail("redis."+field.name, -1, errors.New("the address holds a password, and with it the user; want both in one place"))
			}
		}
		o.Username, o.Password = s.first.username, s.first.password
	} else if r.Username != "" && r.Password == "" {
		return s.g.fail("redis.username", -1, errors.New("password is missing beside it; want both"))
	}
	if r.SentinelUsername != "" && r.SentinelPassword == "" {
		return s.g.fail("redis.sentinel_username", -1, errors.New("sentinel_password is missing beside it; want both"))
	}
	return nil
}

func (s *sharedCompiler) database(r *Redis) error {
	db, in := r.DB, "redis.db"
	if s.first != nil && s.first.db != "" {
		if db != "" {
			return s.g.fail("redis.db", -1, errors.New("the address holds one too; want it in one place"))
		}
		db, in = Number(s.first.db), "redis.addresses"
	}
	if db == "" {
		return nil
	}
	n, err := s.number(db, 0, mostDatabase)
	if err == nil && n != 0 && s.out.Options.Mode == redisstore.Cluster {
		err = fmt.Errorf("database %d, but a cluster has only 0; want 0, or leave it out", n)
	}
	if err != nil {
		return s.g.fail(in, -1, err)
	}
	s.out.Options.DB = int(n)
	return nil
}

// number is integer for what stands beside secrets: the error does not quote what may be one, such
// as password=….
func (s *sharedCompiler) number(n Number, least, most int64) (int64, error) {
	value, _, err := s.integer(n, least, most)
	if err != nil && harmless(string(n)) != string(n) {
		return 0, fmt.Errorf("want a whole number from %d to %d", least, most)
	}
	return value, err
}

// numbers reads the settings that have bounds.
func (s *sharedCompiler) numbers(r *Redis) error {
	o := &s.out.Options
	o.Timeout, o.PoolSize = redisstore.DefaultTimeout, redisstore.DefaultPoolSize
	if d := time.Duration(r.Timeout); d != 0 {
		if d < leastTimeout || d > mostTimeout {
			return s.g.fail("redis.timeout", -1, fmt.Errorf("%v; want a duration from %s to %s, such as 50ms", d, shortWindow(leastTimeout), shortWindow(mostTimeout)))
		}
		o.Timeout = d
	}
	for _, f := range []struct {
		field string
		n     Number
		most  int64
		to    *int
	}{{"redis.pool_size", r.PoolSize, mostConnections, &o.PoolSize}, {"fleet_size", s.g.FleetSize, mostInstances, &s.out.FleetSize}} {
		if f.n == "" {
			continue
		}
		n, err := s.number(f.n, 1, f.most)
		if err != nil {
			return s.g.fail(f.field, -1, err)
		}
		*f.to = int(n)
	}
	return nil
}

var prefixText = regexp.MustCompile(`^[!-~]{1,100}$`)

func (s *sharedCompiler) prefix(r *Redis) error {
	o := &s.out.Options
	o.Prefix = redisstore.DefaultPrefix
	if r.Prefix == "" {
		return nil
	}
	text, known, err := s.expandText(r.Prefix)
	if err == nil && known && !prefixText.MatchString(text) {
		err = fmt.Errorf("%q; want 1 to 100 printable ASCII characters without spaces", text)
	}
	if err != nil {
		return s.g.fail("redis.prefix", -1, err)
	}
	o.Prefix = text
	return nil
}

// tls makes the TLS settings. A file that cannot be used is an error now, not at the first
// connection.
func (s *sharedCompiler) tls(r *Redis) error {
	o, t := &s.out.Options, r.TLS
	if t == nil {
		if s.first != nil && s.first.tls {
			o.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		return nil
	}
	switch {
	case s.first != nil && s.first.path != "":
		return s.g.fail("redis.tls", -1, errors.New("the address is a unix socket, which is not encrypted; want one of the two"))
	case (t.Cert == "") != (t.Key == ""):
		return s.g.fail("redis.tls.cert", -1, errors.New("cert and key belong together; want both files, or neither"))
	case t.CA != "" && t.InsecureSkipVerify:
		return s.g.fail("redis.tls.insecure_skip_verify", -1, errors.New("then nobody asks ca; want one of the two"))
	}
	name, _, err := s.expandText(t.ServerName)
	if err != nil {
		return s.g.fail("redis.tls.server_name", -1, err)
	}
	if t.InsecureSkipVerify {
		s.out.Warnings = append(s.out.Warnings, "insecure_skip_verify: anyone on the way to Redis can pretend to be it and read the password")
	}
	o.TLS = &tls.Config{MinVersion: tls.VersionTLS12, ServerName: name, InsecureSkipVerify: t.InsecureSkipVerify}
	if err := s.authorities(t); err != nil {
		return s.g.fail("redis.tls.ca", -1, err)
	}
	if err := s.certificate(t); err != nil {
		return s.g.fail("redis.tls.cert", -1, err)
	}
	return nil
}

func (s *sharedCompiler) authorities(t *TLS) error {
	content, name, err := s.file(t.CA)
	if err != nil || content == nil {
		return err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(content) {
		return fmt.Errorf("%q holds no certificate; want a file of certificates in PEM", name)
	}
	s.out.Options.TLS.RootCAs = pool
	return nil
}

func (s *sharedCompiler) certificate(t *TLS) error {
	cert, name, err := s.file(t.Cert)
	if err != nil {
		return err
	}
	key, keyName, err := s.file(t.Key)
	if err != nil || cert == nil || key == nil {
		return err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return fmt.Errorf("%q with %q: %w; want a certificate and its key in PEM", name, keyName, err)
	}
	s.out.Options.TLS.Certificates = []tls.Certificate{pair}
	return nil
}

// file reads a file at load. The content is nil for no file, and at adapt time, which may be on
// another machine.
func (s *sharedCompiler) file(text string) (content []byte, name string, err error) {
	name, known, err := s.expandText(text)
	if err != nil || !known || name == "" || s.lookup == nil {
		return nil, name, err
	}
	if content, err = os.ReadFile(name); err != nil {
		return nil, name, err // it names the file
	}
	s.files = append(s.files, content)
	return content, name, nil
}

// processKey is what fingerprints of this process are made with.
var processKey = func() (key [32]byte) {
	_, _ = rand.Read(key[:]) // never fails
	return key
}()

func (s *sharedCompiler) fingerprint() string {
	o := s.out.Options
	var secrets [][]byte // bytes, since JSON texts of bytes that are not UTF-8 would be alike
	for _, text := range []string{o.Username, o.Password, o.SentinelUsername, o.SentinelPassword} {
		secrets = append(secrets, []byte(text))
	}
	encrypted, name, trusting := o.TLS != nil, "", false
	if encrypted {
		name, trusting = o.TLS.ServerName, o.TLS.InsecureSkipVerify
	}
	text, _ := json.Marshal([]any{
		o.Addrs, o.Mode, secrets, o.DB, o.MasterName, o.Timeout, o.PoolSize, o.Prefix, encrypted, name, trusting, s.files,
	})
	h := hmac.New(sha256.New, processKey[:])
	h.Write(text)
	return hex.EncodeToString(h.Sum(nil))
}
