// The global option: what the handlers of a config share. Its JSON form is the app rate_limit.
// No error here shows a value that may hold a secret.

package caddyfile

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
)

// Global is what an operator writes for all rate_limit handlers together. Without it every zone
// counts in this process.
type Global struct {
	// The Redis whose counters all instances share. Zones count there unless they say `store
	// local`. Caddy starts and serves without it: each zone's on_store_error says how.
	Redis *Redis `json:"redis,omitempty"`

	// How many instances share the limits, for zones that limit by themselves while Redis is away:
	// each then gives an equal part. From 1 to 1000000. Default: as many as announced themselves in
	// Redis, which lags behind when instances come and go.
	FleetSize Number `json:"fleet_size,omitempty"`

	// `off` when nothing reads the placeholders `{http.rate_limit.…}`: requests then do not pay for
	// them, and they are unknown. Default: on.
	Placeholders string `json:"placeholders,omitempty"`

	// Where the option is written, such as `Caddyfile:2`; the Caddyfile adapter fills it in. It
	// only appears in messages.
	Place string `json:"place,omitempty"`
}

// Redis says how the shared store is reached. Texts may hold `{env.*}`, `{file.*}` and
// `{system.*}`, which are read at load: so secrets need not stand in the config.
type Redis struct {
	// Where: `host:port` (port 6379, or 26379 of sentinels, when left out), the path of a unix
	// socket, or a URL of the form `redis://user:password@host:port/db`, `rediss://…` with TLS, or
	// `unix://user:password@/path?db=1`. Several for the modes sentinel, cluster and ring; as URLs
	// they must then agree in all but host and port.
	Addresses Texts `json:"addresses,omitempty"`

	// What the addresses are: `single` (one server), `sentinel` (sentinels, which know the master),
	// `cluster` (some nodes of a Redis Cluster), or `ring` (servers that know nothing of each
	// other, over which keys are spread). Default: single. Valkey is configured as Redis is.
	Mode string `json:"mode,omitempty"`

	// The ACL user. Default: the server's default user.
	Username string `json:"username,omitempty"`

	// The password of the user; better as `{env.REDIS_PASSWORD}` or `{file./run/secrets/redis}`
	// than in the config.
	Password string `json:"password,omitempty"`

	// The number of the database. A cluster has only 0. Default: 0.
	DB Number `json:"db,omitempty"`

	// In mode sentinel: the name that the sentinels know the master by.
	MasterName string `json:"master_name,omitempty"`

	// In mode sentinel: the ACL user at the sentinels.
	SentinelUsername string `json:"sentinel_username,omitempty"`

	// In mode sentinel: the password at the sentinels.
	SentinelPassword string `json:"sentinel_password,omitempty"`

	// Encrypts the connections. Default: only if the address begins with `rediss://`.
	TLS *TLS `json:"tls,omitempty"`

	// The most that one decision may wait for Redis, connecting and queueing included, from 1ms to
	// 1m. Default: 50ms.
	Timeout caddy.Duration `json:"timeout,omitempty"`

	// The most connections to one server, from 1 to 10000. Decisions share round trips, so that few
	// are needed. Default: 8.
	PoolSize Number `json:"pool_size,omitempty"`

	// What the name of every key in Redis begins with, without spaces. Instances with different
	// prefixes share nothing. Default: rate_limit.
	Prefix string `json:"prefix,omitempty"`
}

// TLS says whom to trust. All files are PEM and are read at load.
type TLS struct {
	// A file of the authorities that the server's certificate may come from. Default: those of the
	// system.
	CA string `json:"ca,omitempty"`

	// A file with this client's certificate, for servers that ask for one.
	Cert string `json:"cert,omitempty"`

	// The file with the key of cert.
	Key string `json:"key,omitempty"`

	// The name that the server's certificate must bear. Default: the host of the address.
	ServerName string `json:"server_name,omitempty"`

	// Trust any certificate. Anyone between here and Redis can then read the password; for tests
	// only.
	InsecureSkipVerify bool `json:"insecure_skip_verify,omitempty"`
}

// UnmarshalJSON decodes strictly; see [decode]. What stands there may be secret.
func (g *Global) UnmarshalJSON(b []byte) error {
	type plain Global
	return decode(b, (*plain)(g), false)
}

var (
	globalWords = []string{"redis", "fleet_size", "placeholders"}
	redisWords  = []string{
		"mode", "username", "password", "db", "master_name", "sentinel_username", "sentinel_password",
		"tls", "timeout", "pool_size", "prefix",
	}
	tlsWords = []string{"ca", "cert", "server_name", "insecure_skip_verify"}
)

// ParseGlobal reads the global option:
//
//	rate_limit {
//		redis <address...> { ... }
//		fleet_size <n>
//		placeholders off
//	}
func ParseGlobal(d *caddyfile.Dispenser, existing any) (any, error) {
	d.Next() // the option's name
	if app, ok := existing.(httpcaddyfile.App); ok {
		var first Global
		if err := json.Unmarshal(app.Value, &first); err != nil {
			return nil, d.WrapErr(err)
		}
		return nil, d.Errf("global option rate_limit is written twice, first at %s; want it once", first.Place)
	}
	p := &parser{d: d, written: map[spot]caddyfile.Token{}}
	g := &Global{Place: placeOf(d.Token())}
	p.note("", "", -1)
	if err := p.global(g); err != nil {
		return nil, err
	}
	value, err := json.Marshal(g)
	return httpcaddyfile.App{Name: "rate_limit", Value: value}, err
}

// hasRedis reports whether a global option that was parsed names a Redis.
func hasRedis(option any) bool {
	app, ok := option.(httpcaddyfile.App)
	var g Global
	return ok && json.Unmarshal(app.Value, &g) == nil && g.Redis != nil
}

func (p *parser) global(g *Global) error {
	if p.d.NextArg() {
		return p.d.Err("text after rate_limit; want a block with redis <address>")
	}
	for nesting := p.d.Nesting(); p.d.NextBlock(nesting); {
		var err error
		switch p.d.Val() {
		case "redis":
			err = p.redisOption(g)
		case "fleet_size":
			err = p.number("", "fleet_size", &g.FleetSize)
		case "placeholders":
			err = p.text("", "placeholders", &g.Placeholders)
		default:
			err = p.unrecognizedGlobal(globalWords)
		}
		if err != nil {
			return err
		}
	}
	if p.d.Next() {
		return p.d.Err("text after the block of rate_limit; want it on lines of its own")
	}
	if len(p.written) == 1 {
		return errorAt(p.written[spot{index: -1}], errors.New("rate_limit has nothing in its block; want redis <address> or placeholders off"))
	}
	if _, err := g.compile(nil); err != nil {
		return p.locate(err)
	}
	return nil
}

// redisOption parses
//
//	redis <address...> {
//		<redis options>
//	}
func (p *parser) redisOption(g *Global) error {
	if err := p.once("", "redis"); err != nil {
		return err
	}
	r := &Redis{}
	g.Redis = r
	p.note("", "redis.addresses", -1)
	for p.d.NextArg() {
		p.note("", "redis.addresses", len(r.Addresses))
		r.Addresses = append(r.Addresses, p.d.Val())
	}
	for nesting := p.d.Nesting(); p.d.NextBlock(nesting); {
		if err := p.redisSetting(r); err != nil {
			return err
		}
	}
	return nil
}

func (p *parser) redisSetting(r *Redis) error {
	switch p.d.Val() {
	case "mode":
		return p.text("", "redis.mode", &r.Mode)
	case "username":
		return p.private("redis.username", &r.Username)
	case "password":
		return p.private("redis.password", &r.Password)
	case "db":
		return p.number("", "redis.db", &r.DB)
	case "master_name":
		return p.private("redis.master_name", &r.MasterName)
	case "sentinel_username":
		return p.private("redis.sentinel_username", &r.SentinelUsername)
	case "sentinel_password":
		return p.private("redis.sentinel_password", &r.SentinelPassword)
	case "tls":
		return p.tls(r)
	case "timeout":
		return p.duration("", "redis.timeout", &r.Timeout)
	case "pool_size":
		return p.number("", "redis.pool_size", &r.PoolSize)
	case "prefix":
		return p.private("redis.prefix", &r.Prefix)
	}
	return p.unrecognizedGlobal(redisWords)
}

// tls parses
//
//	tls {
//		ca <file>
//		cert <file> <key>
//		server_name <name>
//		insecure_skip_verify
//	}
//
// and the word alone, which is enough for a server whose certificate the system trusts.
func (p *parser) tls(r *Redis) error {
	if err := p.once("", "redis.tls"); err != nil {
		return err
	}
	if p.d.NextArg() {
		return p.d.Errf("text after tls; want tls alone or with a block")
	}
	t := &TLS{}
	r.TLS = t
	for nesting := p.d.Nesting(); p.d.NextBlock(nesting); {
		var err error
		switch p.d.Val() {
		case "ca":
			err = p.private("redis.tls.ca", &t.CA)
		case "cert":
			err = p.cert(t)
		case "server_name":
			err = p.private("redis.tls.server_name", &t.ServerName)
		case "insecure_skip_verify":
			err = p.flag("", "redis.tls.insecure_skip_verify", &t.InsecureSkipVerify)
		default:
			err = p.unrecognizedGlobal(tlsWords)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *parser) cert(t *TLS) error {
	if err := p.once("", "redis.tls.cert"); err != nil {
		return err
	}
	word := p.d.Token()
	args := p.d.RemainingArgs()
	if len(args) != 2 || args[0] == "" || args[1] == "" {
		return errorAt(word, errors.New("cert wants two files, the certificate and its key"))
	}
	t.Cert, t.Key = args[0], args[1]
	return nil
}

// private parses one argument that is written once, cannot be empty, and is not shown in errors.
func (p *parser) private(field string, to *string) error {
	if err := p.once("", field); err != nil {
		return err
	}
	if !p.d.NextArg() || p.d.Val() == "" {
		return p.d.Errf("%s has no value", word(field))
	}
	*to = p.d.Val()
	if p.d.NextArg() {
		return p.d.Errf("a second value; %s has one, in quotes if it holds spaces", word(field))
	}
	return nil
}

// unrecognizedGlobal quotes a word only if it is one of the language, or nearly: any other may be a
// secret, such as password=… or what stands on a line of its own by mistake.
func (p *parser) unrecognizedGlobal(words []string) error {
	written := p.d.Val()
	switch inDirective := slices.Contains(handlerWords, written) || slices.Contains(zoneWords, written); {
	case inDirective:
		return p.d.Errf("%s belongs in the directive rate_limit of a site; want one of %s here", written, strings.Join(words, ", "))
	case written == "memcached":
		return p.d.Errf("unrecognized subdirective %q; want redis <address>, through which instances share limits", written)
	case nearest(written, words) != "":
		return p.unrecognized(words)
	}
	name, _, joined := strings.Cut(strings.ReplaceAll(written, ":", "="), "=")
	if near := nearest(name, words); joined && near != "" {
		return p.d.Errf("unrecognized subdirective that begins with %s; want the word, a space and its value", near)
	}
	return p.d.Errf("unrecognized subdirective; want one of %s", strings.Join(words, ", "))
}
