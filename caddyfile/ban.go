// Bans: what too many refusals earn.

package caddyfile

import (
	"errors"
	"fmt"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Ban is what a client gets that is refused too often. Its limits are exact and count in spaces of
// their own.
type Ban struct {
	// Durations of the first ban and of those that follow it; the last one holds for all further.
	Durations []time.Duration
	// Strikes counts what earns a ban, on the instance that refuses: the last unit of its quota is
	// the ban.
	Strikes *algorithms.Limit
	// Ladder counts the bans of a key for twice the longest duration; nil with one duration.
	Ladder *algorithms.Limit
	// Bans holds them, see [algorithms.Ban].
	Bans *algorithms.Limit
	// Pending counts, where a response says what a request costs, those that reserved units and may
	// yet give them back: a refusal meanwhile is for want of an answer, not of good behaviour, and
	// no strike. Nil elsewhere.
	Pending *algorithms.Limit
}

const (
	longestBan  = 365 * 24 * time.Hour
	mostStrikes = 10_000 // each is remembered for a window
	mostPending = 1_000  // of one key; that one is pending is what matters
)

// ban compiles the ban.
func (z *zoneCompiler) ban() error {
	if z.z.Ban == nil {
		return nil
	}
	durations, err := z.banDurations()
	if err != nil {
		return err
	}
	text, known, err := z.expand(z.z.Ban.After)
	if err != nil {
		return z.fail("ban.after", -1, err)
	}
	if z.z.DryRun {
		z.warn("ban beside dry_run bans nobody")
	}
	if !known {
		return nil
	}
	quota, window, err := parseLimit(text)
	if err != nil || quota < 1 || quota > mostStrikes {
		return z.fail("ban.after", -1, fmt.Errorf("%q; want refusals/window with 1 to %d refusals, such as 5/10m", text, mostStrikes))
	}
	if shortest, _ := z.refills(); durations[0] < shortest {
		z.warn("a ban of %v ends before the limit's %v do, so that its client, told to come back then, may be refused again; want bans that last at least as long", durations[0], shortest)
	}
	b := &Ban{Durations: durations, Bans: algorithms.Ban(z.name + " (bans)")}
	if b.Strikes, err = z.beside(" (strikes)", algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: quota, Window: window}); err != nil {
		return z.fail("ban.after", -1, fmt.Errorf("%q: %w", text, err))
	}
	if len(durations) > 1 {
		ladder := algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: int64(len(durations)), Window: 2 * durations[len(durations)-1]}
		if b.Ladder, err = z.beside(" (ladder)", ladder); err != nil {
			return z.fail("ban.durations", -1, err)
		}
	}
	if z.z.Count != nil || z.z.Charge != "" {
		pending := algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: mostPending, Window: z.longestPending()}
		if b.Pending, err = z.beside(" (pending)", pending); err != nil {
			return z.fail("ban", -1, err)
		}
	}
	// A ban was earned, and forgetting one lets its client in. So a small table of clients does not
	// bound them.
	b.Bans.MaxKeys = max(z.maxKeys, algorithms.DefaultMaxKeys)
	if b.Ladder != nil {
		b.Ladder.MaxKeys = b.Bans.MaxKeys
	}
	z.out.Ban = b
	return nil
}

// longestPending is how long a reservation matters: until its units are free anyway, in a sliding
// window after two. For a day at most, since an instance that dies leaves its reservations in
// Redis.
func (z *zoneCompiler) longestPending() time.Duration {
	_, longest := z.refills()
	return min(max(time.Second, 2*longest), 24*time.Hour)
}

// refills is how long the fastest and the slowest of the limits take to offer all their units
// again.
func (z *zoneCompiler) refills() (shortest, longest time.Duration) {
	for limit := range z.out.AllLimits() {
		if limit.Algorithm == algorithms.Concurrency {
			continue
		}
		if refill := limit.Refill(); longest == 0 || refill < shortest {
			shortest = refill
		}
		longest = max(longest, limit.Refill())
	}
	return shortest, longest
}

// banDurations checks that bans last and do not get shorter.
func (z *zoneCompiler) banDurations() ([]time.Duration, error) {
	var list []time.Duration
	for i, d := range z.z.Ban.Durations {
		d := time.Duration(d)
		if d < time.Second || d > longestBan {
			return nil, z.fail("ban.durations", i, fmt.Errorf("%v; want 1s to 365d%s", d, nanoseconds(d)))
		}
		if i > 0 && d < list[i-1] {
			return nil, z.fail("ban.durations", i, fmt.Errorf("%v is shorter than the %v before it; want bans that get longer", d, list[i-1]))
		}
		list = append(list, d)
	}
	if len(list) == 0 {
		return nil, z.fail("ban", -1, errors.New("no duration; want one or several, such as 1m 10m 1h"))
	}
	return list, nil
}

// beside compiles a limit in a space beside the zone's own. No configured name can be this one.
func (z *zoneCompiler) beside(space string, p algorithms.Policy) (*algorithms.Limit, error) {
	l, err := algorithms.Compile(z.name+space, p)
	if err != nil {
		return nil, err
	}
	l.MaxKeys = z.maxKeys
	return l, nil
}
