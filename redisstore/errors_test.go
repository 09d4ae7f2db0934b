package redisstore

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// A server may have any name.
func TestSentinelIsNoName(t *testing.T) {
	refused := &net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", Name: "sentinel-0"}}
	if got := classify(refused); got != KindUnreachable {
		t.Errorf("%v: %q, want %q", refused, got, KindUnreachable)
	}
	master := redistest.Start(t)
	watcher := redistest.StartSentinel(t, "limits", master)
	for _, c := range []struct{ addr, name string }{{watcher.Addr, "others"}, {"127.0.0.1:" + redistest.FreePort(t), "limits"}} {
		s := open(t, Options{Addrs: []string{c.addr}, Mode: Sentinel, MasterName: c.name})
		err := s.Apply(context.Background(), []algorithms.Charge{{Key: "k", Limit: perHour(t, "z", 5), Cost: 1}}, make([]algorithms.Outcome, 1))
		if kindOf(err) != KindSentinel || !unapplied(err) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestWhatMayBeTriedAgain(t *testing.T) {
	for err, want := range map[error]bool{
		redis.ErrPoolTimeout: true,
		&net.OpError{Op: "dial", Err: context.DeadlineExceeded}: true,
		&net.OpError{Op: "read", Err: context.DeadlineExceeded}: false,
		reply("LOADING"):                 true,
		reply("OOM command not allowed"): true,
		reply("NOPERM this user has no permissions to run the 'set' command"): false,
		reply("something new"):                              false,
		errReply:                                            false,
		&Error{Kind: KindFormat, Err: errFormat}:            false,
		&Error{Kind: KindTimeout, Unapplied: true}:          true,
		&Error{Kind: KindTimeout, Open: true}:               true,
		fmt.Errorf("and so: %w", &Error{Kind: KindLoading}): false,
	} {
		if got := unapplied(err); got != want {
			t.Errorf("%v: %v, want %v", err, got, want)
		}
	}
	for kind, nature := range natures {
		if nature.passing && !nature.unapplied {
			t.Errorf("%s is tried again although it may have been applied", kind)
		}
	}
}

// What a script did before it was told that it may not do more cannot be known.
func TestForbiddenSettlementIsDropped(t *testing.T) {
	server := redistest.Start(t)
	server.Do("acl", "setuser", "reader", "on", ">word", "~*", "+@read", "+evalsha", "+eval", "+time")
	var dropped atomic.Int64
	s := open(t, Options{Addrs: []string{server.Addr}, Username: "reader", Password: "word", OnUnsettled: func(n int) { dropped.Add(int64(n)) }})
	s.Settle(algorithms.Charge{Key: "k", Limit: hourly(t, "z", 5), Cost: 1, Force: true})
	waitFor(t, "it to be dropped", func() bool { return dropped.Load() == 1 })
}

// While a cause is waited out, the last attempt may be executed although nobody hears of it.
func TestLastAttemptMayHaveBeenExecuted(t *testing.T) {
	server := redistest.Start(t)
	s := open(t, Options{Addrs: []string{server.Addr}, Timeout: 2 * time.Second})
	charge := algorithms.Charge{Key: "k", Limit: perHour(t, "z", 10), Cost: 1}
	ask1(t, s, charge)
	server.Do("replicaof", "127.0.0.1", redistest.FreePort(t))
	failed := make(chan error)
	go func() {
		failed <- s.Apply(context.Background(), []algorithms.Charge{charge}, make([]algorithms.Outcome, 1))
	}()
	waitFor(t, "it to be refused", func() bool { return strings.Contains(fmt.Sprint(server.Do("info", "errorstats")), "READONLY") })
	server.Stop()
	err := <-failed
	server.Continue()
	var failure *Error
	if !errors.As(err, &failure) || failure.Kind != KindReadOnly || failure.Unapplied {
		t.Errorf("%+v", failure)
	}
}
