package telemetry

// Which refusals and bans are logged. A limiter is attacked by definition, and its log is what ban
// tools read, so:
//
//   - A key that is refused again and again gets one line per second, the first. The next line of that key
//     says in `suppressed` how many refusals of its last active second went unlogged.
//   - One client that has many keys (user names it tries, API keys it makes up) gets at most perAddress lines per
//     second, whatever the keys. A client is an IPv4 address or an IPv6 /64.
//   - All together get at most sets·ways lines per second, and the memory is fixed (64 kB).
//
// (Seconds are fixed windows, so around an edge two may come close together.)
//
// A cap on the total alone would let the loudest hide all others. Here nobody is hidden by a client
// with one key or one address, however fast. Only when more than about 4,096 clients are refused
// within one second do some of them go without a line, and which ones changes: the hash is seeded,
// and each set of keys begins its second at another moment, so a burst cannot aim at the start of
// it. What is not logged is still counted by the metrics.

import (
	"hash/maphash"
	"math/bits"
	"net/netip"
	"sync/atomic"
	"time"
)

const (
	sets       = 1024
	ways       = 4
	perAddress = 16
)

// sampler decides which refusals, or which bans, are logged. Its zero value is not ready.
type sampler struct {
	seed      maphash.Seed
	keys      table
	addresses table
}

// processSampler serves all handlers, so that the bounds hold for the process and survive reloads.
// Bans have one of their own: what a client was refused before must not hide the ban that it earned
// thereby.
var processSampler, processBans = newSampler(), newSampler()

func newSampler() *sampler { return &sampler{seed: maphash.MakeSeed()} }

// admit reports whether this refusal is logged, and how many of the key's last active second were
// not. The client is only asked for when the key is not known already.
func (s *sampler) admit(zone, key string, client func() string, now time.Duration) (suppressed uint32, ok bool) {
	hash := bits.RotateLeft64(maphash.String(s.seed, zone), 1) ^ maphash.String(s.seed, key)
	if s.keys.again(hash, now) {
		return 0, false
	}
	// Before the key takes a slot: or a client with many keys would fill the table with what is not
	// logged.
	if nth, _ := s.addresses.visit(s.hashClient(client()), now); nth > perAddress {
		return 0, false
	}
	nth, before := s.keys.visit(hash, now)
	return max(before, 1) - 1, nth == 1
}

func (s *sampler) hashClient(client string) uint64 {
	if ip, err := netip.ParseAddr(client); err == nil && ip.Unmap().Is6() {
		if prefix, err := ip.WithZone("").Prefix(64); err == nil {
			return maphash.Comparable(s.seed, prefix)
		}
	}
	return maphash.String(s.seed, client)
}

// table counts visits per second of up to sets·ways hashes, without locks or pointers.
// A slot is one word, so that every change is one atomic operation:
//
//	bits  0–23  tag: the part of the hash that the set does not say. Two keys of one set are taken for one with probability 2^-24.
//	bits 24–39  the second, modulo 18 hours
//	bits 40–63  visits in it; on the top, so that a carry falls off instead of corrupting the rest
//
// The zero word is an empty slot: it has no visits.
type table [sets][ways]atomic.Uint64

const (
	tagBits = 24
	one     = 1 << 40 // visit
)

func tagOf(word uint64) uint64    { return word & (1<<tagBits - 1) }
func secondOf(word uint64) uint16 { return uint16(word >> tagBits) }
func visitsOf(word uint64) uint32 { return uint32(word >> 40) }

func (t *table) locate(hash uint64, now time.Duration) (set *[ways]atomic.Uint64, tag uint64, second uint16) {
	i := hash % sets
	phase := time.Duration(i) * time.Second / sets
	return &t[i], hash >> (64 - tagBits), uint16((now + phase) / time.Second)
}

// live reports whether the word's visits belong to this second, or to the next one: a request that
// read the clock just before the edge may arrive after one that read it just behind, and is no new
// second.
func live(word uint64, second uint16) bool {
	age := int16(second - secondOf(word))
	return visitsOf(word) > 0 && (age == 0 || age == -1)
}

// again counts a visit if this is not the first in this second, and reports that.
func (t *table) again(hash uint64, now time.Duration) bool {
	set, tag, second := t.locate(hash, now)
	for i := range set {
		if w := set[i].Load(); tagOf(w) == tag && live(w, second) {
			set[i].Add(one) // between Load and Add the slot may change hands: then a stranger's count is one too high
			return true
		}
	}
	return false
}

// visit counts a visit and returns which one it is in this second, and how many there were in the
// last second in which there were any. It returns 0 when all slots of the set are taken by others
// in this second.
func (t *table) visit(hash uint64, now time.Duration) (nth, before uint32) {
	set, tag, second := t.locate(hash, now)
	for {
		slot, word := choose(set, tag, second)
		if slot == nil {
			return 0, 0
		}
		mine := tagOf(word) == tag && visitsOf(word) > 0
		if mine && live(word, second) {
			return visitsOf(slot.Add(one)), 0
		}
		if !slot.CompareAndSwap(word, one|uint64(second)<<tagBits|tag) {
			continue // someone else was faster; look again
		}
		if mine {
			before = visitsOf(word)
		}
		return 1, before
	}
}

// choose returns the slot of the tag, else an empty one, else the one that has been quiet longest;
// nil if none is quiet.
func choose(set *[ways]atomic.Uint64, tag uint64, second uint16) (slot *atomic.Uint64, word uint64) {
	var quiet uint16
	for i := range set {
		w := set[i].Load()
		age := second - secondOf(w)
		switch {
		case visitsOf(w) == 0:
			age = 1<<16 - 1
		case tagOf(w) == tag:
			return &set[i], w
		case live(w, second):
			continue
		}
		if age > quiet {
			slot, word, quiet = &set[i], w, age
		}
	}
	return slot, word
}
