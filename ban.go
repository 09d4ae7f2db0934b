package sluice

// Bans: what the log, the events and the metrics hear of what package counting decides.

import (
	"net/http"
	"strings"

	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/telemetry"
)

// strikeRefused counts a strike for each rule that refused the request under a key that it may ban,
// and shows the bans that these earn.
func (v *voice) strikeRefused(q *question) {
	for i := range q.asked {
		a := &q.asked[i]
		if a.Ban != nil && !a.Banned() && a.refusedBy().refused {
			v.banned(q.r, a.rule, a.By, a.key, q.decision.StrikeRefused(i))
		}
	}
}

// banned tells of a ban, if it is one that was not there before.
func (v *voice) banned(r *http.Request, rule *rule, by counting.By, key string, ban counting.Banned) {
	if ban.Step < 0 {
		return
	}
	rule.countedBy(by).CountBan()
	v.reporter.Banned(r, telemetry.Ban{
		Zone: rule.Zone, Key: strings.Clone(key), Text: caddyfile.Text, Duration: ban.Rest, Step: ban.Step + 1, // subscribers may keep the key
	})
}
