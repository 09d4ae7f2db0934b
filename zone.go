package sluice

// A zone: what one config says of a name, over all its handlers, and the counters of that name in
// this process.

import (
	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/memstore"
)

// zone is what one config says of a zone name, over all its handlers.
type zone struct {
	process  *counting.Process
	first    *caddyfile.Rule
	counters *memstore.Zone
	strikes  *memstore.Zone            // what earns a ban; nil when no rule bans
	opened   map[string]*memstore.Zone // these and all others that the zone needs
	rules    int
	units    int64 // what the rules take at least, together, from a request that meets all of them
}

// open acquires counters in this process, once, until the config ends.
func (z *zone) open(name string) *memstore.Zone {
	if z.opened[name] == nil {
		z.opened[name] = z.process.Open(name)
	}
	return z.opened[name]
}

// openBan acquires what a rule's ban needs, which may be more than another's.
func (z *zone) openBan(b *caddyfile.Ban) {
	z.strikes = z.open(b.Strikes.Space.Zone)
	for _, limit := range []*algorithms.Limit{b.Bans, b.Ladder, b.Pending} {
		if limit != nil {
			z.open(limit.Space.Zone)
		}
	}
}

// severalRules reports whether more than one rule of the config charges the zone, so that one
// request may meet it twice.
func (z *zone) severalRules() bool { return z.rules > 1 }
