package sluice

// Bans: what a client earns that is refused too often, or fails too often where failures count.

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/telemetry"
)

// Indices among the charges of an asked rule, before those of its limits.
const (
	ban     = -1 // asks whether the key is banned
	pending = -2 // counts the requests whose units may yet be given back
)

// punishRefusals counts the refusals of the question's rules, and shows the bans that they earn as if they had been there.
func (h *Handler) punishRefusals(q *question) {
	for i := range q.asked {
		a := &q.asked[i]
		if !a.asksBan || a.banned() {
			continue
		}
		if _, refused := a.refusedBy(); !refused || a.pending() > 0 {
			continue // it is not known yet whether that is deserved
		}
		if rest := h.punish(q.r, a.rule, a.key, a.batch == &q.shared); rest > 0 {
			*a.outcome(ban) = algorithms.Outcome{Retry: rest, Next: rest}
		}
	}
}

// pending is how many requests had units of the key at the moment of the decision that they may yet give back.
func (a *asked) pending() int64 {
	if !a.reserves {
		return 0
	}
	return a.charge(pending).Limit.Quota - a.outcome(pending).Remaining
}

// punish counts a strike against the key, and bans it if it was the last one that it had. It returns how long the ban lasts,
// 0 if there is none.
func (h *Handler) punish(r *http.Request, rule *rule, key string, shared bool) time.Duration {
	var out [1]algorithms.Outcome
	strike := [1]algorithms.Charge{{Key: key, Limit: rule.Ban.Strikes, Cost: 1}}
	_ = local.Apply(context.Background(), strike[:], out[:]) // this process cannot fail
	if !out[0].OK || out[0].Remaining > 0 {
		return 0
	}
	rule.zone.strikes.Forget(key) // the ban is for these; the next one needs new ones
	var step int
	var rest time.Duration
	err := error(nil)
	if shared {
		step, rest, err = banish(rule.redis, rule.Ban, key)
	}
	if !shared || err != nil { // then at least here
		step, rest, _ = banish(local, rule.Ban, key)
		rule.keepHere(rest)
	}
	if step >= 0 {
		rule.metrics.CountBan()
		key = strings.Clone(key) // subscribers may keep it
		h.reporter.Banned(r, telemetry.Ban{Zone: rule.Zone, Key: key, Text: caddyfile.Text, Duration: rest, Step: step + 1})
	}
	return rest
}

// bansHere is when the last of the bans ends that this process keeps alone. It belongs to the process, as the counters do in which
// they are: a reload with other settings of the shared store ends no ban.
var bansHere atomic.Int64

// keepHere notes that a ban of that length is known to this process only, if that is for want of the shared store.
func (r *rule) keepHere(rest time.Duration) {
	if r.redis == nil {
		return
	}
	end := int64(monotonic() + rest)
	for was := bansHere.Load(); was < end && !bansHere.CompareAndSwap(was, end); was = bansHere.Load() {
	}
}

// bannedHere reports whether a key has such a ban. It holds also when the shared store is back.
func (r *rule) bannedHere(key string) bool {
	if int64(monotonic()) >= bansHere.Load() {
		return false
	}
	ask, out := [1]algorithms.Charge{algorithms.Ask(r.Ban.Bans, key)}, [1]algorithms.Outcome{}
	_ = local.Apply(context.Background(), ask[:], out[:])
	return !out[0].OK
}

// banish bans a key, for longer the more bans it had of late, and returns which of the durations that is and how long it lasts.
// Who is banned already, by another instance at this moment, stays so for the rest of that ban; the step is then −1.
func banish(store algorithms.Store, b *caddyfile.Ban, key string) (step int, rest time.Duration, err error) {
	var out [3]algorithms.Outcome
	apply := func(more ...algorithms.Charge) bool {
		err = store.Apply(context.Background(), append([]algorithms.Charge{algorithms.Ask(b.Bans, key)}, more...), out[:])
		return err == nil && out[0].OK
	}
	var climb []algorithms.Charge
	if b.Ladder != nil {
		// Looked at first, and climbed only together with the ban: of several clients of one key that earn it at one moment,
		// one bans it, and the others make it no longer.
		if !apply(algorithms.Charge{Key: key, Limit: b.Ladder, Peek: true}) {
			return -1, out[0].Retry, err
		}
		step = min(len(b.Durations)-1, int(b.Ladder.Quota-out[1].Remaining))
		climb = []algorithms.Charge{{Key: key, Limit: b.Ladder, Cost: 1, Force: true}}
	}
	if !apply(append(climb, algorithms.Banish(b.Bans, key, b.Durations[step]))...) {
		return -1, out[0].Retry, err
	}
	// Asked once more, the shared store's memory of refusals knows the ban, so that the client costs no trip to Redis.
	ask := [1]algorithms.Charge{algorithms.Ask(b.Bans, key)}
	_ = store.Apply(context.Background(), ask[:], out[:])
	return step, b.Durations[step], nil
}
