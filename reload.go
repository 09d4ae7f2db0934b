package sluice

// What operators hear of a reload: which zones start afresh.

import (
	"slices"
	"sync"

	"go.uber.org/zap"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
)

// counted is what the zones of a config that was started count, and where.
type counted struct {
	config any // whose this is; nil: nobody's
	limits map[string][]*algorithms.Limit
	place  map[string]string
}

// started is the config that was started last, and the one before it until that is cleaned up: if
// the newer fails to start, the older goes on.
var started struct {
	sync.Mutex
	last, before counted
}

// startCounting notes what a config counts that starts, and warns of zones that were there before
// and get new counters, because they count elsewhere, or their algorithm or window changed. It is
// said when a config starts, so that a rejected one says nothing.
func startCounting(now counted, logger *zap.Logger) {
	started.Lock()
	defer started.Unlock()
	before := started.last
	started.before, started.last = before, now
	for name, limits := range now.limits {
		known, was := before.limits[name], before.place[name]
		switch {
		case known == nil:
		case was != now.place[name]:
			logger.Warn("a zone that counts elsewhere starts afresh, bans included", zap.String("zone", name),
				zap.String("before", was), zap.String("now", now.place[name]))
		default:
			sayFreshLimits(name, known, limits, logger)
		}
	}
}

// sayFreshLimits warns of those of a zone's limits that have no counters yet.
func sayFreshLimits(name string, known, limits []*algorithms.Limit, logger *zap.Logger) {
	for _, limit := range limits {
		if slices.ContainsFunc(known, func(l *algorithms.Limit) bool { return l.Space == limit.Space }) {
			continue
		}
		if limit.Algorithm == algorithms.Concurrency {
			logger.Warn("requests in flight are counted afresh, because their lease changed", zap.String("zone", name))
			continue
		}
		var was []string
		hint := zap.Skip()
		for _, l := range known {
			was = append(was, caddyfile.DescribeLimit(l.Policy))
			if l.Window == limit.Window {
				hint = zap.String("hint", "the default algorithm is another for quotas up to 10 than above; the word algorithm keeps it")
			}
		}
		logger.Warn("a limit with another window or algorithm starts afresh", zap.String("zone", name),
			zap.Strings("before", was), zap.String("now", caddyfile.DescribeLimit(limit.Policy)), hint)
	}
}

// endCounting undoes startCounting when the config ends, or has failed to start.
func endCounting(config any) {
	started.Lock()
	defer started.Unlock()
	switch config {
	case started.last.config:
		started.last, started.before = started.before, counted{}
	case started.before.config:
		started.before = counted{}
	}
}
