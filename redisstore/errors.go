package redisstore

// What can go wrong with a store, named so that a log line, an event and a metric label tell the
// cause.

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/redis/go-redis/v9"
)

// Kind is the cause of a failure, short enough for a metric label.
type Kind string

// The causes. Those in capitals in Redis's answers keep their names.
const (
	KindRefused     Kind = "refused"     // nobody listens there
	KindUnreachable Kind = "unreachable" // no route, or the name does not resolve
	KindTimeout     Kind = "timeout"     // no answer within the timeout
	KindReset       Kind = "reset"       // the connection broke
	KindTLS         Kind = "tls"         // certificate, name or protocol
	KindNoAuth      Kind = "noauth"      // a password is needed
	KindWrongPass   Kind = "wrongpass"   // user name or password is wrong
	KindNoPerm      Kind = "noperm"      // the user may not do this
	KindDB          Kind = "db"          // no such database
	KindReadOnly    Kind = "readonly"    // a replica
	KindNoReplicas  Kind = "noreplicas"  // too few replicas to write
	KindOOM         Kind = "oom"         // maxmemory reached
	KindLoading     Kind = "loading"     // reading its data from disk
	KindBusy        Kind = "busy"        // another script runs
	KindMaxClients  Kind = "maxclients"  // too many connections
	KindCrossSlot   Kind = "crossslot"   // a cluster, but mode is not cluster
	KindMoved       Kind = "moved"       // a cluster, but mode is not cluster; or one that does not settle
	KindClusterDown Kind = "clusterdown" // slots without a master
	KindMisconf     Kind = "misconf"     // Redis cannot save and refuses writes
	KindFormat      Kind = "format"      // a counter whose state this version cannot read, of a later version perhaps
	KindOverload    Kind = "overload"    // too many decisions wait already
	KindCanceled    Kind = "canceled"    // the caller went away
	KindClosed      Kind = "closed"      // the store was closed
	KindSentinel    Kind = "sentinel"    // no sentinel knows the master
	KindOther       Kind = "other"
)

// Error is what [Store.Apply] returns. It is never about a refused charge.
type Error struct {
	Kind Kind
	// Node is the server's address, empty when none was asked.
	Node string
	// Open: Redis was not asked, because it failed before and has not yet come back.
	Open bool
	// Unapplied: Redis has certainly not applied the charges, as with Open, so that to try again
	// cannot count twice.
	Unapplied bool
	Err       error

	lane *lane // whose breaker it concerns
}

// Error implements error.
func (e *Error) Error() string {
	where := "redis"
	if e.Node != "" {
		where += " " + e.Node
	}
	if e.Open {
		where += " is down"
	}
	return fmt.Sprintf("%s: %s: %v", where, e.Kind, e.Err)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Timeout reports whether the cause was a timeout, as net.Error does.
func (e *Error) Timeout() bool { return e.Kind == KindTimeout }

var (
	errTimeout    = errors.New("no answer within the timeout")
	errOverload   = errors.New("too many decisions wait already")
	errClosed     = errors.New("store is closed")
	errFormat     = errors.New("counter is in a format that this version does not know")
	errReply      = errors.New("unexpected reply to the script")
	errImpossible = errors.New("the script's reply is impossible: the counter's state is damaged, or something else answers in Redis's place")
	errNoMaster   = errors.New("the cluster names no server for this slot")
)

// answers are the beginnings of Redis's error replies.
var answers = []struct {
	prefix string
	kind   Kind
}{
	{"NOAUTH", KindNoAuth}, {"WRONGPASS", KindWrongPass}, {"NOPERM", KindNoPerm}, {"ERR The user executing the script can't", KindNoPerm},
	{"ERR invalid password", KindWrongPass}, {"ERR AUTH", KindWrongPass}, {"ERR Client sent AUTH", KindWrongPass},
	{"READONLY", KindReadOnly}, {"MASTERDOWN", KindReadOnly}, {"NOREPLICAS", KindNoReplicas},
	{"OOM", KindOOM}, {"LOADING", KindLoading}, {"BUSY", KindBusy}, {"MISCONF", KindMisconf},
	{"CROSSSLOT", KindCrossSlot}, {"MOVED", KindMoved}, {"ASK", KindMoved}, {"TRYAGAIN", KindMoved},
	{"CLUSTERDOWN", KindClusterDown}, {"ERR max number of clients", KindMaxClients},
	{"ERR DB index is out of range", KindDB}, {"ERR invalid DB index", KindDB},
	{"ERR SELECT is not allowed in cluster mode", KindDB}, {"ERR Script attempted to access a non local key", KindCrossSlot},
}

// noSentinel begins the client's error for it, around what each sentinel answered.
const noSentinel = "redis: all sentinels"

// classify names the cause of an error.
func classify(err error) Kind {
	var known *Error
	if errors.As(err, &known) {
		return known.Kind
	}
	var reply redis.Error
	if errors.As(err, &reply) && !strings.HasPrefix(err.Error(), noSentinel) {
		text := reply.Error()
		for _, a := range answers {
			// The error of a command inside the script names the script first in old versions.
			if strings.HasPrefix(text, a.prefix) || strings.Contains(text, ": -"+a.prefix) {
				return a.kind
			}
		}
		return KindOther
	}
	return classifyNetwork(err)
}

func classifyNetwork(err error) Kind {
	var (
		dns       *net.DNSError
		verify    *tls.CertificateVerificationError
		record    tls.RecordHeaderError
		alert     tls.AlertError
		host      x509.HostnameError
		authority x509.UnknownAuthorityError
		timeout   interface{ Timeout() bool }
	)
	switch {
	case errors.Is(err, redis.ErrClosed), errors.Is(err, errClosed):
		return KindClosed
	case errors.Is(err, errNoMaster):
		return KindClusterDown
	case errors.As(err, &verify), errors.As(err, &record), errors.As(err, &alert), errors.As(err, &host), errors.As(err, &authority),
		strings.Contains(err.Error(), "tls: "):
		return KindTLS
	case strings.HasPrefix(err.Error(), noSentinel):
		return KindSentinel
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, os.ErrNotExist):
		return KindRefused
	case errors.As(err, &dns), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return KindUnreachable
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, redis.ErrPoolTimeout), errors.Is(err, os.ErrDeadlineExceeded),
		errors.As(err, &timeout) && timeout.Timeout():
		return KindTimeout
	case errors.Is(err, context.Canceled):
		return KindCanceled
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, net.ErrClosed):
		return KindReset
	}
	return KindOther
}

// natures tells of each cause what may be done about it.
var natures = map[Kind]struct {
	unapplied bool // the script has not run, and may if it is tried again
	passing   bool // and the cause passes by itself, mostly within the time of a call
}{
	KindReadOnly: {true, true}, KindLoading: {true, true}, KindBusy: {true, true}, KindClusterDown: {true, true}, KindMoved: {true, true},

	KindRefused: {true, false}, KindUnreachable: {true, false}, KindTLS: {true, false}, KindSentinel: {true, false},
	KindNoAuth: {true, false}, KindWrongPass: {true, false}, KindDB: {true, false}, KindCrossSlot: {true, false},
	KindNoReplicas: {true, false}, KindOOM: {true, false}, KindMisconf: {true, false}, KindMaxClients: {true, false}, KindOverload: {true, false},

	KindTimeout: {}, KindReset: {}, KindCanceled: {}, KindClosed: {}, KindOther: {},
	KindNoPerm: {}, // a command of the script may have been forbidden after others were not
	KindFormat: {}, // it will not run before that counter has expired
}

// unapplied reports whether what failed has certainly not been applied, and may be tried again.
func unapplied(err error) bool {
	var known *Error
	if errors.As(err, &known) {
		return known.Open || known.Unapplied
	}
	var op *net.OpError
	unsent := errors.Is(err, redis.ErrPoolTimeout) || errors.As(err, &op) && op.Op == "dial"
	return unsent || natures[classify(err)].unapplied
}
