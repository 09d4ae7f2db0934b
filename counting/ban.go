package counting

// Bans: what a key earns that is refused too often, or fails too often where failures count.

import (
	"context"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/memstore"
)

// Ban is what earns a ban in a zone, and where its bans are counted.
type Ban struct {
	// Durations of the first ban and of those that follow it; the last one holds for all further.
	Durations []time.Duration
	// Strikes counts what earns a ban, in this process: the last unit of its quota is the ban.
	// Struck holds them.
	Strikes *algorithms.Limit
	Struck  *memstore.Zone
	// Ladder counts the bans of a key for twice the longest duration; nil with one duration.
	Ladder *algorithms.Limit
	// Bans holds them, see [algorithms.Ban].
	Bans *algorithms.Limit
	// Pending counts requests that reserved units and may yet give them back: a refusal meanwhile
	// is for want of an answer, not of good behaviour, and no strike. Nil where no response
	// decides.
	Pending *algorithms.Limit
}

// Banned says what a strike has earned.
type Banned struct {
	// Rest is how long the key is banned from now on; 0: it is not.
	Rest time.Duration
	// Step is which of the durations that is, from 0; −1 if it is none, or the key was banned
	// already.
	Step int
}

// NoBan is what most strikes earn.
var NoBan = Banned{Step: -1}

// Strike counts a strike against the key of a rule that counts at a place and was answered by
// someone, and bans it if it was the last one that it had.
func (c *Counters) Strike(b *Ban, place Place, by By, key string) Banned {
	var out [1]algorithms.Outcome
	strike := [1]algorithms.Charge{{Key: key, Limit: b.Strikes, Cost: 1}}
	_ = c.Process.Apply(context.Background(), strike[:], out[:]) // this process cannot fail
	if !out[0].OK || out[0].Remaining > 0 {
		return NoBan
	}
	b.Struck.Forget(key) // the ban is for these; the next one needs new ones
	if by == ByShared {
		if ban, err := Banish(c.Shared, b, key); err == nil {
			return ban
		}
	}
	ban, _ := Banish(c.Process, b, key)
	if place == Shared { // at least here, also when the shared store is back
		c.keepHere(ban.Rest)
	}
	return ban
}

// StrikeRefused counts a strike for the refusal of an entry, unless it is not known yet whether
// that is deserved, and shows a ban that it earns as if it had been there.
func (d *Decision) StrikeRefused(i int) Banned {
	e, a := &d.Entries[i], &d.Answers[i]
	if a.Pending > 0 {
		return NoBan
	}
	ban := d.counters.Strike(e.Ban, e.Place, a.By, e.Key)
	if ban.Rest > 0 {
		*a.Ban = algorithms.Outcome{Retry: ban.Rest, Next: ban.Rest}
	}
	return ban
}

// keepHere notes that a ban of that length is known to this process only.
func (p *Process) keepHere(rest time.Duration) {
	end := int64(p.age() + rest)
	for was := p.bansHere.Load(); was < end && !p.bansHere.CompareAndSwap(was, end); was = p.bansHere.Load() {
	}
}

// bannedHere reports whether this process knows a ban of a rule's key that the shared store may not
// know.
func (p *Process) bannedHere(b *Ban, key string) bool {
	end := p.bansHere.Load()
	if end == 0 || int64(p.age()) >= end {
		return false
	}
	ask, out := [1]algorithms.Charge{algorithms.Ask(b.Bans, key)}, [1]algorithms.Outcome{}
	_ = p.Apply(context.Background(), ask[:], out[:])
	return !out[0].OK
}

// Banish bans a key, for longer the more bans it had of late. Who is banned already, by another
// instance at this moment, stays so for the rest of that ban.
func Banish(store algorithms.Store, b *Ban, key string) (ban Banned, err error) {
	var out [3]algorithms.Outcome
	apply := func(more ...algorithms.Charge) bool {
		err = store.Apply(context.Background(), append([]algorithms.Charge{algorithms.Ask(b.Bans, key)}, more...), out[:])
		return err == nil && out[0].OK
	}
	step := 0
	var climb []algorithms.Charge
	if b.Ladder != nil {
		// Looked at first, and climbed only together with the ban: of several clients of one key
		// that earn it at one moment, one bans it, and the others make it no longer.
		if !apply(algorithms.Charge{Key: key, Limit: b.Ladder, Peek: true}) {
			return Banned{out[0].Retry, -1}, err
		}
		step = min(len(b.Durations)-1, int(b.Ladder.Quota-out[1].Remaining))
		climb = []algorithms.Charge{{Key: key, Limit: b.Ladder, Cost: 1, Force: true}}
	}
	if !apply(append(climb, algorithms.Banish(b.Bans, key, b.Durations[step]))...) {
		return Banned{out[0].Retry, -1}, err
	}
	// Asked once more, the shared store's memory of refusals knows the ban, so that the client
	// costs no trip to it.
	ask := [1]algorithms.Charge{algorithms.Ask(b.Bans, key)}
	_ = store.Apply(context.Background(), ask[:], out[:])
	return Banned{b.Durations[step], step}, nil
}
