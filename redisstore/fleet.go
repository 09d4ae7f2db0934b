package redisstore

// The fleet: instances that share the store know how many they are, so that each can take its share
// when the store is gone, and tell each other which refusals no longer hold.

import (
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

//go:embed fleet.lua
var fleetScript string

const (
	maxForgotten = 1000             // told one by one; more are told as "all"
	goneAfter    = 4                // intervals without a sign of life: the others count an instance no more
	forgetAfter  = 50 * time.Second // without an answer: others may have forgotten what nobody tells any more
	oldestMajor  = 5                // the first that replicates what a script did, not the script
	everything   = "*"
)

type fleet struct {
	id        string
	instances string // keys
	forgets   string

	size atomic.Int64

	there context.Context // until it leaves
	leave context.CancelFunc

	pendingMu sync.Mutex
	pending   map[string]bool

	// Of the goroutine that announces.
	since    int64     // Redis's time of the last answer, µs
	answered time.Time // here
	gather   time.Time // until then others may not have come back yet
	failures int       // announcements in a row that failed though the server answers
	checked  map[*lane]bool
}

func (f *fleet) init(prefix string) {
	var id [12]byte
	rand.Read(id[:]) // never fails
	f.id = base64.RawURLEncoding.EncodeToString(id[:])
	f.instances, f.forgets = prefix+":{fleet}:instances", prefix+":{fleet}:forgotten"
	f.pending = map[string]bool{}
	f.size.Store(1)
}

// FleetSize is how many instances share the store: at least 1, and while Redis is down what was
// last known.
func (s *Store) FleetSize() int { return int(s.size.Load()) }

// forgotten notes that other instances must forget a counter's refusal.
func (s *Store) forgotten(d digest) {
	s.pendingMu.Lock()
	defer s.pendingMu.Unlock()
	if len(s.pending) >= maxForgotten {
		clear(s.pending)
		s.pending[everything] = true
	}
	if !s.pending[everything] {
		s.pending[base64.RawURLEncoding.EncodeToString(d[:])] = true
	}
}

func (s *Store) keepAnnouncing() {
	if s.cluster != nil {
		s.cluster.refresh() // of the addresses that were given, only those that matter are looked at
	}
	defer s.sayGoodbye()
	for {
		s.checkServers()
		s.announceOnce()
		if !s.answered.IsZero() && time.Since(s.answered) > forgetAfter {
			s.refused.forgetAll()
		}
		if !sleep(s.there, s.options.Announce) {
			return
		}
	}
}

// announceOnce tells and asks; what could not be told is told next time.
func (s *Store) announceOnce() {
	l := s.fleetLane()
	if l.blocked() != nil {
		return
	}
	s.pendingMu.Lock()
	told := s.pending
	s.pending = map[string]bool{}
	s.pendingMu.Unlock()
	args := []any{s.id, (goneAfter * s.options.Announce).Microseconds(), s.since}
	for name := range told {
		args = append(args, name)
	}
	reply, err := s.runFleet(l, args)
	if err == nil {
		err = s.heard(reply)
	}
	if err == nil {
		s.failures = 0
		return
	}
	s.count(classify(err))
	s.pendingMu.Lock()
	for name := range told {
		s.pending[name] = true
	}
	s.pendingMu.Unlock()
	if l.doubt(); l.blocked() == nil {
		s.unheard(err)
	}
}

// unheard warns, once, of what keeps the instance from announcing itself while decisions work, such
// as a right that is missing.
func (s *Store) unheard(err error) {
	if s.failures++; s.failures == goneAfter && s.options.OnWarning != nil {
		s.options.OnWarning(fmt.Sprintf("this instance cannot announce itself to the others (%v), so that it takes the fleet's size for %d "+
			"and hears of no reset elsewhere; want the rights that docs/redis.md names, on the keys %s and %s too",
			err, s.FleetSize(), s.instances, s.forgets))
	}
}

func (s *Store) fleetLane() *lane {
	return s.laneFor(fleetDigest, slot([]byte(s.instances)))
}

func (s *Store) runFleet(l *lane, args []any) ([]any, error) {
	ctx, cancel := context.WithTimeout(s.ctx, max(s.options.Timeout, 200*time.Millisecond))
	defer cancel()
	keys := []string{s.instances, s.forgets}
	for hops := 0; ; hops++ {
		reply, err := l.client.EvalSha(ctx, s.announce.sha, keys, args...).Slice()
		if redis.HasErrorPrefix(err, "NOSCRIPT") {
			reply, err = l.client.Eval(ctx, s.announce.text, keys, args...).Slice()
		}
		if s.cluster == nil || err == nil || classify(err) != KindMoved || hops == maxHops {
			return reply, err
		}
		l = s.cluster.follow(l, slot([]byte(s.instances)), err)
	}
}

// heard takes in the answer of fleet.lua.
func (s *Store) heard(reply []any) error {
	if len(reply) != 5 {
		return errReply
	}
	size, ok := reply[0].(int64)
	names, ok2 := reply[3].([]any)
	sec, err := strconv.ParseInt(fmt.Sprint(reply[1]), 10, 64)
	micro, err2 := strconv.ParseInt(fmt.Sprint(reply[2]), 10, 64)
	if !ok || !ok2 || err != nil || err2 != nil {
		return errReply
	}
	s.resize(size, reply[4] == int64(1))
	if s.refused != nil && s.since > 0 {
		for _, n := range names {
			s.hear(fmt.Sprint(n))
		}
	}
	// Not "after": what was told in the same microsecond is told again.
	s.since, s.answered = sec*1_000_000+micro, time.Now()
	return nil
}

// resize notes how many instances Redis knows. When it has forgotten this one, it was restarted or
// could not be reached: what it refused then may have been forgotten too. The others come back one
// after the other, and until they had the time the fleet is as large as it was.
func (s *Store) resize(size int64, unknown bool) {
	if unknown && !s.answered.IsZero() {
		s.gather = time.Now().Add(goneAfter * s.options.Announce)
		s.refused.forgetAll()
	}
	if size > s.size.Load() || time.Now().After(s.gather) {
		s.size.Store(size)
	}
}

func (s *Store) hear(name string) {
	if name == everything {
		s.refused.forgetAll()
		return
	}
	var d digest
	if n, err := base64.RawURLEncoding.Decode(d[:], []byte(name)); err == nil && n == len(d) {
		s.refused.forget(d)
	}
}

// sayGoodbye tells the others that this instance is gone, if that can be told at once.
func (s *Store) sayGoodbye() {
	l := s.fleetLane()
	if l.blocked() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(s.options.Timeout, settleAtClose))
	defer cancel()
	_ = l.client.ZRem(ctx, s.instances, s.id).Err() // else it expires
}

// checkServers warns once about each server whose settings endanger limits, or cannot be seen.
func (s *Store) checkServers() {
	if s.options.OnWarning == nil {
		return
	}
	checked := map[*lane]bool{} // of those in use
	for _, l := range s.allLanes() {
		checked[l] = s.checked[l] || l.blocked() == nil && s.check(l)
	}
	s.checked = checked
}

// check reports whether all is said about the server.
func (s *Store) check(l *lane) bool {
	ctx, cancel := context.WithTimeout(s.ctx, max(s.options.Timeout, 200*time.Millisecond))
	info, err := l.client.Info(ctx).Result()
	cancel()
	if err == nil {
		for _, text := range warnings(l.node, info) {
			s.options.OnWarning(text)
		}
		return true
	}
	l.doubt() // not there, or not allowed to look
	if kind := classify(err); l.blocked() != nil || kind != KindNoPerm && kind != KindOther {
		return false
	}
	s.options.OnWarning(fmt.Sprintf("redis %s does not let its settings be seen (INFO: %v): allow +info, or see to it that it is version %d.0 or later and has maxmemory-policy noeviction",
		l.node, err, oldestMajor))
	return true
}

// warnings reads the answer of INFO.
func warnings(node, info string) (all []string) {
	get := func(name string) string {
		_, rest, _ := strings.Cut(info, "\n"+name+":")
		value, _, _ := strings.Cut(rest, "\n")
		return strings.TrimSpace(value)
	}
	if policy := get("maxmemory_policy"); policy != "" && policy != "noeviction" {
		all = append(all, fmt.Sprintf("redis %s has maxmemory-policy %s: an evicted counter is a forgotten limit; use noeviction", node, policy))
	}
	version := get("redis_version")
	major, _, _ := strings.Cut(version, ".")
	if n, err := strconv.Atoi(major); err == nil && n < oldestMajor {
		all = append(all, fmt.Sprintf("redis %s is version %s: too old, want %d.0 or later", node, version, oldestMajor))
	}
	return all
}
