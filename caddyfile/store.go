// Where a zone counts, and what happens when that place cannot be reached.

package caddyfile

import (
	"errors"
	"fmt"
)

// Store says where a zone's counters are.
type Store uint8

// The values of store.
const (
	StoreDefault Store = iota // redis when the global option has one, else local: see [Rule.Resolve]
	StoreLocal                // this process counts by itself
	StoreRedis                // all instances with the same Redis share the counters
)

// String returns the word in the configuration, "default" when it is left out.
func (s Store) String() string { return [...]string{"default", "local", "redis"}[s] }

// OnStoreError says what is done with a request while the shared store cannot decide it.
type OnStoreError uint8

// The values of on_store_error. The zero value is the default, so that leaving it out never means
// no limit.
const (
	OnStoreErrorLocal OnStoreError = iota // this instance limits by itself, to its share of the limit
	OnStoreErrorAllow                     // it passes
	OnStoreErrorDeny                      // it is answered 503
)

// String returns the word in the configuration.
func (o OnStoreError) String() string { return [...]string{"local", "allow", "deny"}[o] }

// store reads where the zone counts.
func (z *zoneCompiler) store() error {
	switch word := z.z.Store; word {
	case "":
	case "local":
		z.out.Store = StoreLocal
	case "redis":
		z.out.Store = StoreRedis
	default:
		return z.fail("store", -1, fmt.Errorf("%q%s; want local or redis", harmless(word), didYouMean(word, "local", "redis")))
	}
	switch word := z.z.OnStoreError; word {
	case "":
		return nil
	case "local":
	case "allow":
		z.out.OnStoreError = OnStoreErrorAllow
	case "deny":
		z.out.OnStoreError = OnStoreErrorDeny
	default:
		return z.fail("on_store_error", -1, fmt.Errorf("%q%s; want local, allow or deny", word, didYouMean(word, "local", "allow", "deny")))
	}
	if z.out.Store == StoreLocal {
		return z.fail("on_store_error", -1, fmt.Errorf("%q, but store local has no store that could fail; want store redis, or leave one of the two out", z.z.OnStoreError))
	}
	return nil
}

var (
	errNoRedis = errors.New("\"redis\", but the global option rate_limit has no redis; " +
		"want rate_limit { redis <address> } in the global options, or store local")
	errNoUse = errors.New("the zone counts locally, because the global option rate_limit has no redis; " +
		"want rate_limit { redis <address> } in the global options, or leave on_store_error out")
)

// Resolve settles where the rule counts once it is known whether the config has a shared store. It
// must precede a comparison of [Rule.Settings]: what was left out is then the same as the default
// spelled out. The error is about a rule that asks for a store that is not there.
func (r *Rule) Resolve(redis bool) error {
	field, err := "", error(nil)
	switch {
	case r.Store == StoreRedis && !redis:
		field, err = "store", errNoRedis
	case r.Store != StoreDefault:
	case redis:
		r.Store = StoreRedis
	case r.OnStoreError != OnStoreErrorLocal:
		field, err = "on_store_error", errNoUse
	default:
		r.Store = StoreLocal
	}
	if err == nil && r.Store == StoreLocal {
		field, err = "concurrency.lease", r.keepLeases()
	}
	if err != nil {
		return &fieldError{zone: r.Zone, place: r.Place, field: field, index: -1, err: err}
	}
	return nil
}
