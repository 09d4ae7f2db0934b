package redisstore

// What is known to be refused is answered here, with the right countdown, without Redis.
//
// Only what cannot be wrong is remembered: the key has nothing left and gets nothing before the
// moment that is kept, for the same limit, the same cost and the same charges beside it. The moment
// is counted from the arrival of Redis's answer, so that a client that obeys its Retry-After always
// reaches Redis again.

import (
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

const refusalShards = 64

// How long Redis is not asked again about a refusal, however long its wait is. Alone, a counter
// changes by hand only, or by a refund of which instances hear. Beside other charges the wait is
// the longest of all, and others may have used up what those count.
const (
	aloneFor  = time.Minute
	besideFor = time.Second
)

type refusal struct {
	params algorithms.Params
	cost   int64
	until  time.Time // until then nothing becomes available
	retry  time.Time // then the cost is available
	again  time.Time // from then on Redis is asked again
	batch  batchOf
	ban    bool
}

// batchOf is what a refusal was one of: it answers for the same batch only, and only with all that
// refused it.
type batchOf struct {
	fingerprint uint64
	refusals    int
}

type refusals struct {
	size   int // of a shard
	shards [refusalShards]struct {
		sync.Mutex
		keys map[digest]refusal
		// forgets tells a refusal that was decided before a key was forgotten and arrives after it.
		forgets atomic.Uint64
	}
}

func newRefusals(size int) *refusals {
	if size < 0 {
		return nil
	}
	r := &refusals{size: max(1, size/refusalShards)}
	for i := range r.shards {
		r.shards[i].keys = make(map[digest]refusal)
	}
	return r
}

// refuses reports whether a charge is one that a remembered refusal can answer for.
func refuses(c *algorithms.Charge) bool {
	return c.Cost > 0 && c.Held == 0 && !c.Peek && !c.Force && !c.DryRun
}

// find returns what is known of a charge at the moment now. A ban holds on while Redis cannot be
// asked.
func (r *refusals) find(d digest, c *algorithms.Charge, now time.Time, down func() bool) (refusal, bool) {
	shard := &r.shards[d[0]%refusalShards]
	shard.Lock()
	known, ok := shard.keys[d]
	if ok && (!now.Before(known.until) || !now.Before(known.again) && !(known.ban && down())) {
		delete(shard.keys, d)
		ok = false
	}
	shard.Unlock()
	return known, ok && known.cost == c.Cost && known.params == c.Limit.Params()
}

// outcome is what the charge is told at the moment now.
func (k *refusal) outcome(now time.Time) algorithms.Outcome {
	return algorithms.Outcome{Retry: ceilMicro(k.retry.Sub(now)), Next: ceilMicro(k.until.Sub(now))}
}

// ceilMicro rounds up to whole microseconds, the unit of all waits.
func ceilMicro(d time.Duration) time.Duration {
	return (d + time.Microsecond - 1).Truncate(time.Microsecond)
}

// forgets is to be read before Redis is asked, and handed to learn.
func (r *refusals) forgets(d digest) uint64 { return r.shards[d[0]%refusalShards].forgets.Load() }

// counts reports whether a refusal has a moment at which it ends, and until then cannot be wrong.
func counts(o *algorithms.Outcome) bool {
	return !o.OK && o.Remaining == 0 && o.Next != algorithms.Never && o.Retry != algorithms.Never && o.Retry != algorithms.Unknown
}

// learn remembers a refusal that arrived at the moment now, unless the key may have been forgotten
// meanwhile.
func (r *refusals) learn(d digest, c *algorithms.Charge, o algorithms.Outcome, of batchOf, now time.Time, forgets uint64) {
	if !counts(&o) {
		return
	}
	fresh := besideFor
	if of.fingerprint == alone {
		fresh = aloneFor
	}
	shard := &r.shards[d[0]%refusalShards]
	shard.Lock()
	defer shard.Unlock()
	if shard.forgets.Load() != forgets {
		return
	}
	if _, known := shard.keys[d]; !known && len(shard.keys) >= r.size {
		evict(shard.keys, now)
	}
	shard.keys[d] = refusal{
		params: c.Limit.Params(), cost: c.Cost, until: now.Add(o.Next), retry: now.Add(o.Retry), again: now.Add(fresh), batch: of, ban: c.Check,
	}
}

// evict makes room: of a few keys, those that are over, else the one that is over soonest.
func evict(keys map[digest]refusal, now time.Time) {
	var soonest digest
	var least time.Time
	looked, freed := 0, false
	for d, k := range keys {
		if !now.Before(k.until) {
			delete(keys, d)
			freed = true
		} else if least.IsZero() || k.until.Before(least) {
			soonest, least = d, k.until
		}
		if looked++; looked == 8 {
			break
		}
	}
	if !freed {
		delete(keys, soonest)
	}
}

// forget drops a key and reports whether it was known.
func (r *refusals) forget(d digest) bool {
	shard := &r.shards[d[0]%refusalShards]
	shard.Lock()
	defer shard.Unlock()
	shard.forgets.Add(1)
	_, known := shard.keys[d]
	delete(shard.keys, d)
	return known
}

// forgetAll is for when it is not known what others have forgotten.
func (r *refusals) forgetAll() { r.drop(func(refusal) bool { return true }) }

// forgetCounters forgets all but bans. A server that is down may come back without its counters,
// and until then each zone does what its operator chose. A ban was earned, and nobody chose that it
// ends then.
func (r *refusals) forgetCounters() { r.drop(func(known refusal) bool { return !known.ban }) }

func (r *refusals) drop(which func(refusal) bool) {
	if r == nil {
		return
	}
	for i := range r.shards {
		shard := &r.shards[i]
		shard.Lock()
		shard.forgets.Add(1)
		maps.DeleteFunc(shard.keys, func(_ digest, known refusal) bool { return which(known) })
		shard.Unlock()
	}
}
