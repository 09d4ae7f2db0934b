package redisstore

// What an operator can set, and how it becomes connections.

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// Mode is how the addresses are to be understood.
type Mode string

// The topologies. Valkey and other servers that speak Redis's protocol and run its Lua count as the
// same.
const (
	Single   Mode = "single"   // one server
	Sentinel Mode = "sentinel" // addresses of sentinels, which know the master
	Cluster  Mode = "cluster"  // addresses of some nodes, which know the others
	Ring     Mode = "ring"     // independent servers; keys are spread over them by this store
)

// Defaults of [Options].
const (
	DefaultTimeout  = 50 * time.Millisecond
	DefaultPoolSize = 8
	DefaultPrefix   = "rate_limit"
)

// Options configure a [Store]. The zero value of every field but Addrs is usable.
type Options struct {
	// Addrs: host:port, a path of a unix socket, or a URL (redis://user:password@host:port/db,
	// rediss://, unix://). What a URL says wins over the fields below.
	Addrs []string
	// Mode; default [Single].
	Mode Mode
	// Username and Password of the servers (ACL); Password alone is the default user's.
	Username, Password string
	// DB is the database, in modes Single, Sentinel and Ring.
	DB int
	// MasterName is the name that the sentinels know the master by.
	MasterName string
	// SentinelUsername and SentinelPassword, when the sentinels ask for them.
	SentinelUsername, SentinelPassword string
	// TLS, when not nil, encrypts; an empty ServerName is taken from the address.
	TLS *tls.Config
	// Timeout is the most that one decision may wait, queueing and dialling included; default 50
	// ms.
	Timeout time.Duration
	// PoolSize is the most connections to one server; default 8. Decisions use two at a time.
	PoolSize int
	// Prefix of every key; default "rate_limit".
	Prefix string
	// RefusedKeys is how many refused keys are remembered; default 65,536, negative none.
	RefusedKeys int
	// Announce is how often the instance shows itself to the others and learns what they have
	// forgotten; default 2 s.
	Announce time.Duration

	// OnState is called once for every change: a server goes down, so that decisions about its
	// counters fail, or is up again. It must not block.
	OnState func(State)
	// OnWarning is called with what an operator should know about a server, once per server and
	// start.
	OnWarning func(text string)
	// OnUnsettled is called with the number of charges given to [Store.Settle] that had to be
	// dropped.
	OnUnsettled func(n int)
	// OnCall is called after every round trip with its duration and how many batches shared it.
	OnCall func(took time.Duration, batches int)
	// OnFailure is called for every batch, settlement and look at a server that fails. What is
	// answered while a server is known to be down, and what its caller has left, is none.
	OnFailure func(kind Kind)

	// clock is given in tests: the script's time in microseconds.
	clock func() int64
}

// State is a change of one server, and how all are since.
type State struct {
	Server string // its address; in mode Sentinel the master's name
	Err    *Error // why it is down; nil when it is up again, or in a cluster another serves what it did
	Down   int    // how many servers are down
	Of     int    // how many there are
}

// Errors of [New].
var (
	ErrAddress = errors.New("redis address")
	ErrMode    = errors.New("redis mode")
)

func (o *Options) setDefaults() {
	if o.Mode == "" {
		o.Mode = Single
	}
	if o.Timeout <= 0 {
		o.Timeout = DefaultTimeout
	}
	if o.PoolSize <= 0 {
		o.PoolSize = DefaultPoolSize
	}
	if o.Prefix == "" {
		o.Prefix = DefaultPrefix
	}
	if o.RefusedKeys == 0 {
		o.RefusedKeys = 1 << 16
	}
	if o.Announce <= 0 {
		o.Announce = 2 * time.Second
	}
}

// endpoint is one parsed address with the credentials to use there.
type endpoint struct {
	network, addr      string
	username, password string
	db                 int
	tls                *tls.Config
}

func (o *Options) endpoints() ([]endpoint, error) {
	if len(o.Addrs) == 0 {
		return nil, fmt.Errorf("%w: none given, want host:port, a socket path or a redis:// URL", ErrAddress)
	}
	if o.Mode == Single && len(o.Addrs) > 1 {
		return nil, fmt.Errorf("%w: %d addresses in mode single, want one, or mode sentinel, cluster or ring", ErrMode, len(o.Addrs))
	}
	all := make([]endpoint, 0, len(o.Addrs))
	for i, a := range o.Addrs {
		e, err := o.endpoint(a)
		if err != nil {
			// The address may hold a password: it is named by its place.
			return nil, fmt.Errorf("%w %d: %w", ErrAddress, i+1, err)
		}
		all = append(all, e)
	}
	return all, nil
}

func (o *Options) endpoint(a string) (endpoint, error) {
	e := endpoint{network: "tcp", addr: a, username: o.Username, password: o.Password, db: o.DB, tls: o.TLS}
	switch {
	case strings.Contains(a, "://"):
		u, err := redis.ParseURL(a)
		if err != nil {
			return e, errors.New("not a URL of the form redis://user:password@host:port/db")
		}
		e.network, e.addr = u.Network, u.Addr
		if u.Username != "" || u.Password != "" {
			e.username, e.password = u.Username, u.Password
		}
		if u.DB != 0 {
			e.db = u.DB
		}
		if u.TLSConfig != nil && e.tls == nil {
			e.tls = u.TLSConfig
		}
	case strings.HasPrefix(a, "/"):
		e.network = "unix"
	default:
		if _, _, err := net.SplitHostPort(a); err != nil {
			e.addr = net.JoinHostPort(strings.Trim(a, "[]"), "6379")
		}
	}
	return e, nil
}

// dialer counts connections, guards what is read from them and, unlike go-redis's own, lets the
// deadline bound the TLS handshake too.
func (s *Store) dialer(config *tls.Config) func(ctx context.Context, network, addr string) (net.Conn, error) {
	plain := &net.Dialer{KeepAlive: 30 * time.Second}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		if addr == noMaster {
			return nil, errNoMaster
		}
		s.dials.Add(1)
		ctx, cancel := context.WithTimeout(ctx, s.options.Timeout) // a handshake is ended by a timer only
		defer cancel()
		if strings.HasPrefix(addr, "/") {
			network = "unix"
		}
		dial := plain.DialContext
		if config != nil && network != "unix" {
			dial = (&tls.Dialer{NetDialer: plain, Config: config}).DialContext
		}
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return guard(c), nil
	}
}

// connect makes a client for one server. It does not dial.
func (s *Store) connect(e endpoint) *redis.Client {
	o := s.options
	return redis.NewClient(&redis.Options{
		Network: e.network, Addr: e.addr, Username: e.username, Password: e.password, DB: e.db,
		Dialer: s.dialer(e.tls), Protocol: 2, DisableIdentity: true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		// A retry may count twice, so only this package decides what is tried again.
		MaxRetries: -1, DialerRetries: 1, DialTimeout: o.Timeout, ReadTimeout: o.Timeout, WriteTimeout: o.Timeout,
		ContextTimeoutEnabled: true, PoolTimeout: o.Timeout, PoolSize: o.PoolSize, MaxActiveConns: o.PoolSize,
		PipelinePoolSize: -1,
	})
}

// connectFailover makes a client that asks the sentinels for the master.
func (s *Store) connectFailover(all []endpoint) *redis.Client {
	o, addrs := s.options, make([]string, len(all))
	for i, e := range all {
		addrs[i] = e.addr
	}
	e := all[0]
	return redis.NewFailoverClient(&redis.FailoverOptions{
		MasterName: o.MasterName, SentinelAddrs: addrs,
		SentinelUsername: o.SentinelUsername, SentinelPassword: o.SentinelPassword,
		Username: o.Username, Password: o.Password, DB: e.db,
		Dialer: s.dialer(e.tls), Protocol: 2, DisableIdentity: true,
		MaxRetries: -1, DialerRetries: 1, DialTimeout: o.Timeout, ReadTimeout: o.Timeout, WriteTimeout: o.Timeout,
		ContextTimeoutEnabled: true, PoolTimeout: o.Timeout, PoolSize: o.PoolSize, MaxActiveConns: o.PoolSize,
		PipelinePoolSize: -1,
	})
}
