package algorithms

import "time"

// Ban returns the limit whose counters are the bans of a zone: a meter that holds one unit and
// loses one unit each microsecond. [Banish] fills it, [Ask] refuses while anything is left, and the
// wait is what is left of the ban. Both in one batch ban a key that is not banned yet. No other
// limit of the zone may be a token bucket with a window of 1 µs.
//
// A clock that steps back to a moment before the ban began lets it begin anew: it is never shorter
// than it was said to be, and a step makes it at most twice as long.
func Ban(zone string) *Limit {
	l, _ := Compile(zone, Policy{Algorithm: TokenBucket, Quota: 1, Window: time.Microsecond, Burst: 1}) // these always compile
	return l
}

// Banish is the charge that bans a key for a time of at least 1 µs, or for that much longer if it
// is banned already.
func Banish(ban *Limit, key string, d time.Duration) Charge {
	return Charge{Key: key, Limit: ban, Cost: d.Microseconds(), Force: true}
}

// Ask is the charge that refuses a banned key and takes nothing.
func Ask(ban *Limit, key string) Charge {
	return Charge{Key: key, Limit: ban, Cost: 1, Check: true}
}
