// Caddyfile → config. The syntax stands above the function that parses it; what a value may be is
// not checked here but by compile, which runs at the end of the directive, and whose errors get the
// line of the value.

package caddyfile

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Parse reads a rate_limit directive whose matcher token is already taken off. It numbers unnamed
// zones over the whole Caddyfile and refuses zones of one name whose settings differ.
func Parse(h httpcaddyfile.Helper) (*Config, error) {
	p := &parser{
		d:      h.Dispenser,
		config: &Config{},
		file:   adaptationOf(h.State),
		prefix: "zone_",
		inFile: true,
		redis:  hasRedis(h.Option("rate_limit")),
		matcher: func(t caddyfile.Token) (caddy.ModuleMap, bool, error) {
			return h.WithDispenser(caddyfile.NewDispenser([]caddyfile.Token{t})).MatcherToken()
		},
	}
	if h.IsNamedRoute() {
		p.prefix = "route_zone_" // named routes are adapted apart from the sites, with a count of their own
	}
	return p.config, p.directive()
}

// Register registers the directive as httpcaddyfile.RegisterHandlerDirective does, and looks at the
// matcher token too.
func Register(handler func(*Config) caddyhttp.MiddlewareHandler) {
	httpcaddyfile.RegisterDirective("rate_limit", func(h httpcaddyfile.Helper) ([]httpcaddyfile.ConfigValue, error) {
		h.Next()
		first := ""
		if h.NextArg() {
			first = h.Val()
			h.Prev()
		}
		matchers, err := h.ExtractMatcherSet()
		if err != nil {
			return nil, err
		}
		c, err := Parse(h)
		if err != nil {
			return nil, err
		}
		if _, _, err := parseLimit("1" + first); err == nil && strings.HasPrefix(first, "/") && len(c.Zones) == 0 {
			return nil, h.Errf("%q has no quota, so that it is a path matcher; want a limit such as 100%s (is a variable before the / not set?)", first, first)
		}
		return h.NewRoute(matchers, handler(c)), nil
	})
}

// UnmarshalCaddyfile reads a rate_limit directive where no named matchers are known.
func (c *Config) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	p := &parser{d: d, config: c, file: adaptationOf(map[string]any{}), prefix: "zone_"}
	return p.directive()
}

type parser struct {
	d       *caddyfile.Dispenser
	config  *Config
	file    *adaptation
	prefix  string // of the names of unnamed zones
	matcher func(caddyfile.Token) (caddy.ModuleMap, bool, error)
	// inFile: the directive is read with its whole Caddyfile, so that redis says whether that has a
	// shared store.
	inFile, redis bool
	// written remembers where each setting stands, to find repeated ones, and the line for an
	// error.
	written map[spot]caddyfile.Token
}

// spot is a setting: of a zone, or of the handler when zone is "".
type spot struct {
	zone, field string
	index       int // in a list, or -1
}

// The words of the language. Some have another name in JSON.
var (
	zoneWords = []string{
		"match", "exempt", "key", "key_fallback", "raw_path", "limit", "algorithm", "burst", "queue", "concurrency",
		"cost", "charge", "count", "tier", "ban", "events", "window", "ipv4_prefix", "ipv6_prefix",
		"store", "on_store_error", "dry_run", "enforce",
	}
	handlerWords = []string{
		"zone", "headers", "status", "response", "jitter", "log_key", "max_keys", "sweep_interval",
		"disable_metrics", "storage", "distributed",
	}
)

// directive parses
//
//	rate_limit [[<key>] <limit> [<zone_size> [<reject_status>]]] {
//		<zone options, when the limit stands on the first line>
//		zone <name> [[<key>] <limit>] { ... }
//		<handler options>
//	}
func (p *parser) directive() error {
	p.written = map[spot]caddyfile.Token{}
	p.d.Next() // the directive's name
	p.note("", "", -1)
	first, err := p.firstLine(p.d.RemainingArgsAsTokens())
	if err != nil {
		return err
	}
	for nesting := p.d.Nesting(); p.d.NextBlock(nesting); {
		if err := p.subdirective(first); err != nil {
			return err
		}
	}
	if p.d.Next() {
		return p.d.Errf("unexpected %q after the directive", p.d.Val())
	}
	if len(p.config.ZoneOrder) < 2 {
		p.config.ZoneOrder = nil
	}
	return p.check()
}

// firstLine makes the unnamed zone of the directive's line, if there is one, and returns its name.
// The two last arguments are those of caddy-ext's module, whose rates were written r/s and r/m.
func (p *parser) firstLine(args []caddyfile.Token) (string, error) {
	if len(args) == 0 {
		return "", nil
	}
	if slices.ContainsFunc(args, func(t caddyfile.Token) bool { return t.Text == "/" }) {
		return "", errorAt(args[0], errors.New("spaces around the / of a limit; want it in one word, such as 100/1m"))
	}
	if len(args) > 4 {
		return "", errorAt(args[4], fmt.Errorf("unexpected %q; want [<key>] <limit>, with further limits on a limit line in the block", args[4].Text))
	}
	name := p.file.unnamed(p.prefix)
	z := p.addZone(name, p.written[spot{index: -1}])
	if len(args) > 2 { // a 0 was the default there
		if rate := args[1].Text; !strings.HasSuffix(rate, "r/s") && !strings.HasSuffix(rate, "r/m") {
			return "", errorAt(args[2], fmt.Errorf("unexpected %q; want [<key>] <limit>, with further limits on a limit line in the block", args[2].Text))
		}
		if args[2].Text != "0" {
			p.config.MaxKeys = Number(args[2].Text)
		}
		p.written[spot{"", "max_keys", -1}] = args[2]
	}
	if len(args) > 3 {
		if args[3].Text != "0" {
			p.config.Status = Number(args[3].Text)
		}
		p.written[spot{"", "status", -1}] = args[3]
	}
	if err := p.keyAndLimit(name, z, args[:min(len(args), 2)]); err != nil {
		return "", err
	}
	return name, fixedKey(args)
}

// fixedKey refuses a fixed text for the key of the directive's line: it is a slip nearly always,
// and one counter for all clients.
func fixedKey(args []caddyfile.Token) error {
	if len(args) < 2 || slices.ContainsFunc(split(args[0].Text), func(p piece) bool { return p.placeholder }) {
		return nil
	}
	text := args[0].Text
	both := text + "/" + args[1].Text
	_, _, err := parseLimit(both)
	want := fmt.Sprintf("want a placeholder such as {client_ip}; for one counter write key %s into the block, and for a zone of that name zone %s %s", text, text, args[1].Text)
	switch meant := placeholderMeant(text); {
	case err == nil:
		want = fmt.Sprintf("want the limit as one word, %s", both)
	case strings.Count(text, "{") > strings.Count(text, "}"):
		want = fmt.Sprintf("the brace is not closed; want %s}", text)
	case meant != "":
		want = fmt.Sprintf("want {%s}", meant)
	case strings.HasPrefix(text, "$"):
		want = "want a placeholder such as {client_ip}"
	case strings.ContainsAny(text, "/*"):
		want = fmt.Sprintf("want a path that begins with /, as in rate_limit /%s %s, or a matcher @name", strings.TrimLeft(text, "/"), args[1].Text)
	}
	return errorAt(args[0], fmt.Errorf("key %q is a fixed text, and so one counter for all clients; %s", text, want))
}

// keyAndLimit parses [<key>] <limit>.
func (p *parser) keyAndLimit(name string, z *Zone, args []caddyfile.Token) error {
	if len(args) == 0 {
		return nil
	}
	if len(args) > 2 {
		return errorAt(args[2], fmt.Errorf("unexpected %q; want [<key>] <limit>, with further limits on a limit line in the block", args[2].Text))
	}
	limit := args[len(args)-1]
	if len(args) == 1 && slices.ContainsFunc(split(limit.Text), func(p piece) bool { return p.placeholder && !isGlobal(p.text) }) {
		return errorAt(limit, fmt.Errorf("no limit after the key %q; want one such as 100/1m", limit.Text))
	}
	if _, _, err := parseLimit(args[0].Text); err == nil && len(args) == 2 {
		return errorAt(limit, fmt.Errorf("unexpected %q after the limit %q; want [<key>] <limit>, with further limits on a limit line in the block",
			limit.Text, args[0].Text))
	}
	if len(args) == 2 {
		z.Key = Texts{args[0].Text}
		p.written[spot{name, "key", -1}], p.written[spot{name, "key", 0}] = args[0], args[0]
	}
	z.Limit = Texts{limit.Text}
	p.written[spot{name, "limit", 0}] = limit
	return nil
}

// subdirective parses one line of the directive's block. first names the zone of the directive's
// line, or is "".
func (p *parser) subdirective(first string) error {
	c, word := p.config, p.d.Val()
	if slices.Contains(zoneWords, word) {
		if first == "" {
			return p.d.Errf("%s belongs in a zone block; want it there, or a limit on the line of rate_limit itself", word)
		}
		return p.zoneOption(first, c.Zones[first])
	}
	switch word {
	case "zone":
		return p.zone()
	case "headers":
		return p.texts("", "headers", &c.Headers)
	case "status":
		return p.number("", "status", &c.Status)
	case "response":
		return p.response()
	case "jitter":
		return p.number("", "jitter", &c.Jitter)
	case "log_key":
		return p.repeatedFlag("log_key", &c.LogKey)
	case "max_keys":
		return p.number("", "max_keys", &c.MaxKeys)
	case "sweep_interval":
		return p.sweepInterval()
	case "disable_metrics":
		return p.repeatedFlag("disable_metrics", &c.DisableMetrics)
	case "distributed", "storage":
		return p.unsupported(word)
	}
	return p.unrecognized(slices.Concat(handlerWords, zoneWords))
}

// response parses
//
//	response problem|error
func (p *parser) response() error {
	if err := p.text("", "response", &p.config.Response); err != nil {
		return err
	}
	if _, err := strconv.Atoi(p.config.Response); err == nil {
		return p.d.Errf("response %s; want status %[1]s for another status; %[2]s", p.config.Response, wantRoute)
	}
	for nesting := p.d.Nesting(); p.d.NextBlock(nesting); {
		return p.d.Errf("unexpected block after response; %s", wantRoute)
	}
	return nil
}

// zone parses
//
//	zone <name> [[<key>] <limit>] {
//		<zone options>
//	}
func (p *parser) zone() error {
	if !p.d.NextArg() {
		return p.d.Errf("zone has no name; want zone <name> [[<key>] <limit>]")
	}
	name, at := p.d.Val(), p.d.Token()
	if _, ok := p.config.Zones[name]; ok {
		return p.d.Errf("zone %q is written twice here, first at %s; want another name", name, p.config.Zones[name].Place)
	}
	z := p.addZone(name, at)
	if err := p.keyAndLimit(name, z, p.d.RemainingArgsAsTokens()); err != nil {
		return err
	}
	for nesting := p.d.Nesting(); p.d.NextBlock(nesting); {
		if err := p.zoneOption(name, z); err != nil {
			return err
		}
	}
	return nil
}

func (p *parser) addZone(name string, at caddyfile.Token) *Zone {
	z := &Zone{Place: placeOf(at)}
	if p.config.Zones == nil {
		p.config.Zones = map[string]*Zone{}
	}
	p.config.Zones[name] = z
	p.config.ZoneOrder = append(p.config.ZoneOrder, name)
	p.written[spot{name, "", -1}] = at
	return z
}

// zoneOption parses one line of a zone's block.
func (p *parser) zoneOption(name string, z *Zone) error {
	switch p.d.Val() {
	case "match":
		return p.matchers(name, "match", &z.MatchRaw)
	case "exempt":
		return p.matchers(name, "exempt", &z.ExemptRaw)
	case "key":
		return p.texts(name, "key", (*[]string)(&z.Key))
	case "key_fallback":
		return p.texts(name, "key_fallback", (*[]string)(&z.KeyFallback))
	case "raw_path":
		return p.flag(name, "raw_path", &z.RawPath)
	case "limit":
		return p.limit(name, z)
	case "algorithm":
		return p.text(name, "algorithm", &z.Algorithm)
	case "burst":
		return p.number(name, "burst", &z.Burst)
	case "queue":
		return p.queue(name, z)
	case "concurrency":
		return p.concurrency(name, z)
	case "cost":
		return p.number(name, "cost", &z.Cost)
	case "charge":
		return p.charge(name, z)
	case "count":
		return p.count(name, z)
	case "tier":
		return p.tier(name, z)
	case "ban":
		return p.ban(name, z)
	case "events":
		return p.number(name, "max_events", &z.MaxEvents)
	case "window":
		return p.duration(name, "window", &z.Window)
	case "ipv4_prefix":
		return p.number(name, "ipv4_prefix", &z.IPv4Prefix)
	case "ipv6_prefix":
		return p.number(name, "ipv6_prefix", &z.IPv6Prefix)
	case "store":
		return p.text(name, "store", &z.Store)
	case "on_store_error":
		return p.text(name, "on_store_error", &z.OnStoreError)
	case "dry_run":
		return p.flag(name, "dry_run", &z.DryRun)
	case "enforce":
		return p.number(name, "enforce", &z.Enforce)
	}
	if slices.Contains(handlerWords, p.d.Val()) {
		return p.d.Errf("%s belongs to rate_limit itself; want it outside of the zone block", p.d.Val())
	}
	return p.unrecognized(zoneWords)
}

// matchers parses, any number of times, each time one more set of which any may match:
//
//	match @<name>...
//	match [<matcher>] {
//		<matchers>
//	}
func (p *parser) matchers(zone, field string, sets *caddyhttp.RawMatcherSets) error {
	p.note(zone, field, -1)
	word := p.d.Token()
	named := false
	for p.d.NextArg() {
		if !strings.HasPrefix(p.d.Val(), "@") {
			p.d.Prev()
			break
		}
		named = true
		if p.matcher == nil {
			return p.d.Errf("named matcher %s is not known here; want matchers in a block", p.d.Val())
		}
		set, _, err := p.matcher(p.d.Token())
		if err != nil {
			return p.d.WrapErr(err)
		}
		*sets = append(*sets, set)
	}
	if named {
		if p.d.NextArg() {
			return p.d.Errf("unexpected %q after a named matcher; want @<name> or matchers in a block", p.d.Val())
		}
		return nil
	}
	set, err := caddyhttp.ParseCaddyfileNestedMatcherSet(p.d)
	if err != nil {
		return matcherError(word, err)
	}
	if len(set) == 0 && field != "match" { // an empty match is one more way to say every request
		return errorAt(word, fmt.Errorf("%s has no matcher; want @<name> or matchers in a block", field))
	}
	*sets = append(*sets, set)
	return nil
}

// matcherError names what is right in place of what is no matcher.
func matcherError(word caddyfile.Token, err error) error {
	if !strings.Contains(err.Error(), "module not registered") {
		return errorAt(word, err)
	}
	_, name, _ := strings.Cut(err.Error(), "matcher module '")
	name, _, _ = strings.Cut(name, "'")
	want := "matchers such as path /x, or @<name>"
	_, notPrefix := netip.ParsePrefix(name)
	_, notAddress := netip.ParseAddr(name)
	switch {
	case strings.HasPrefix(name, "/"):
		want = word.Text + " path " + name
	case notPrefix == nil || notAddress == nil:
		want = word.Text + " client_ip " + name
	case name == strings.ToUpper(name):
		want = word.Text + " method " + name
	}
	return errorAt(word, fmt.Errorf("%q is not a matcher; want %s", name, want))
}

// limit parses, any number of times:
//
//	limit <quota>/<window>...
func (p *parser) limit(zone string, z *Zone) error {
	word := p.d.Token()
	args := p.d.RemainingArgsAsTokens()
	if len(args) == 0 {
		return errorAt(word, errors.New("limit has no value; want one or several such as 100/1m"))
	}
	for _, arg := range args {
		p.written[spot{zone, "limit", len(z.Limit)}] = arg
		z.Limit = append(z.Limit, arg.Text)
	}
	return nil
}

// queue parses
//
//	queue <n> [delay <n>] [max_wait <duration>]
func (p *parser) queue(zone string, z *Zone) error {
	if err := p.once(zone, "queue"); err != nil {
		return err
	}
	z.Queue = &Queue{}
	err := p.numberArg(zone, "queue.size", &z.Queue.Size)
	for err == nil && p.d.NextArg() {
		switch p.d.Val() {
		case "delay":
			err = p.numberArg(zone, "queue.delay", &z.Queue.Delay)
		case "max_wait":
			err = p.durationArg(zone, "queue.max_wait", &z.Queue.MaxWait)
		default:
			err = p.d.Errf("unexpected %q; want queue <n> [delay <n>] [max_wait <duration>]", p.d.Val())
		}
	}
	return err
}

// concurrency parses
//
//	concurrency <n> [lease <duration>] [retry_after <duration>]
func (p *parser) concurrency(zone string, z *Zone) error {
	if err := p.once(zone, "concurrency"); err != nil {
		return err
	}
	z.Concurrency = &Concurrency{}
	err := p.numberArg(zone, "concurrency.max", &z.Concurrency.Max)
	for err == nil && p.d.NextArg() {
		switch p.d.Val() {
		case "lease":
			err = p.durationArg(zone, "concurrency.lease", &z.Concurrency.Lease)
		case "retry_after":
			err = p.durationArg(zone, "concurrency.retry_after", &z.Concurrency.RetryAfter)
		default:
			err = p.d.Errf("unexpected %q; want concurrency <n> [lease <duration>] [retry_after <duration>]", p.d.Val())
		}
	}
	return err
}

// charge parses
//
//	charge <placeholder> [max <n>]
func (p *parser) charge(zone string, z *Zone) error {
	if err := p.arg(zone, "charge", &z.Charge); err != nil {
		return err
	}
	if z.Charge == "" {
		return p.d.Errf("charge is empty; want a placeholder such as {http.response.header.X-Tokens-Used}")
	}
	if !p.d.NextArg() {
		return nil
	}
	if p.d.Val() != "max" {
		return p.d.Errf("unexpected %q; want charge <placeholder> [max <n>]", p.d.Val())
	}
	return p.number(zone, "charge_max", &z.ChargeMax)
}

// count parses
//
//	count status|not_status <codes...>
func (p *parser) count(zone string, z *Zone) error {
	if err := p.once(zone, "count"); err != nil {
		return err
	}
	if !p.d.NextArg() {
		return p.d.Errf("count has no value; want status or not_status, and codes such as 401 or 4xx")
	}
	z.Count = &Statuses{}
	switch p.d.Val() {
	case "status":
		return p.texts(zone, "count.status", (*[]string)(&z.Count.Status))
	case "not_status":
		return p.texts(zone, "count.not_status", (*[]string)(&z.Count.NotStatus))
	}
	return p.d.Errf("count %q%s; want status or not_status, and codes such as 401 or 4xx",
		p.d.Val(), didYouMean(p.d.Val(), "status", "not_status"))
}

// tier parses
//
//	tier <placeholder> {
//		<value> <limit>... | unlimited
//		default <limit>... | unlimited
//	}
func (p *parser) tier(zone string, z *Zone) error {
	if err := p.once(zone, "tier"); err != nil {
		return err
	}
	z.Tier = &Tiers{}
	if err := p.text(zone, "tier.by", &z.Tier.By); err != nil {
		return err
	}
	for nesting := p.d.Nesting(); p.d.NextBlock(nesting); {
		field, tier := "tier.default", &Tier{}
		if slices.Contains(zoneWords, p.d.Val()) {
			return p.d.Errf("%s within tier; want it in the zone, beside tier, for all plans", p.d.Val())
		}
		if p.d.Val() == "default" {
			if first, ok := p.written[spot{zone, field, -1}]; ok {
				return p.d.Errf("default is written twice, first at %s; want it once", placeOf(first))
			}
			z.Tier.Default = tier
		} else {
			z.Tier.Values = append(z.Tier.Values, TierValue{Value: p.d.Val()})
			last := len(z.Tier.Values) - 1
			field, tier = tierField(last), &z.Tier.Values[last].Tier
		}
		p.note(zone, field, -1)
		for p.d.NextArg() {
			if p.d.Val() == "unlimited" {
				tier.Unlimited = true
				continue
			}
			if slices.Contains(zoneWords, p.d.Val()) {
				return p.d.Errf("%s within a plan; want it in the zone, beside tier, for all plans", p.d.Val())
			}
			p.note(zone, field+".limit", len(tier.Limit))
			tier.Limit = append(tier.Limit, p.d.Val())
		}
	}
	return nil
}

// tierField is the path of a tier within its zone.
func tierField(i int) string { return fmt.Sprintf("tier.values[%d]", i) }

// ban parses
//
//	ban <duration>... after <n>/<window>
func (p *parser) ban(zone string, z *Zone) error {
	if err := p.once(zone, "ban"); err != nil {
		return err
	}
	z.Ban = &Penalty{}
	for p.d.NextArg() {
		if p.d.Val() == "after" {
			return p.text(zone, "ban.after", &z.Ban.After)
		}
		d, err := p.parseDuration("ban", p.d.Val())
		if err != nil {
			return err
		}
		p.note(zone, "ban.durations", len(z.Ban.Durations))
		z.Ban.Durations = append(z.Ban.Durations, d)
	}
	return p.d.Errf("ban has no after; want ban <duration>... after <n>/<window>, such as ban 1m 10m 1h after 5/10m")
}

// texts parses a list that is written once.
func (p *parser) texts(zone, field string, to *[]string) error {
	if err := p.once(zone, field); err != nil {
		return err
	}
	for p.d.NextArg() {
		p.note(zone, field, len(*to))
		*to = append(*to, p.d.Val())
	}
	if len(*to) == 0 {
		return p.d.Errf("%s has no value", word(field))
	}
	return nil
}

// text parses one argument that is written once.
func (p *parser) text(zone, field string, to *string) error {
	if err := p.arg(zone, field, to); err != nil {
		return err
	}
	return p.end(field)
}

func (p *parser) number(zone, field string, to *Number) error {
	if err := p.numberArg(zone, field, to); err != nil {
		return err
	}
	return p.end(field)
}

func (p *parser) duration(zone, field string, to *caddy.Duration) error {
	if err := p.durationArg(zone, field, to); err != nil {
		return err
	}
	return p.end(field)
}

// arg parses the next argument, as a setting that is written once.
func (p *parser) arg(zone, field string, to *string) error {
	if err := p.once(zone, field); err != nil {
		return err
	}
	if !p.d.NextArg() {
		return p.d.Errf("%s has no value", word(field))
	}
	p.note(zone, field, -1)
	*to = p.d.Val()
	return nil
}

func (p *parser) numberArg(zone, field string, to *Number) error {
	if err := p.arg(zone, field, (*string)(to)); err != nil {
		return err
	}
	if *to == "" {
		return p.d.Errf("%s is empty; want a number", word(field))
	}
	return nil
}

func (p *parser) durationArg(zone, field string, to *caddy.Duration) error {
	var text string
	err := p.arg(zone, field, &text)
	if err == nil {
		*to, err = p.parseDuration(field, text)
	}
	return err
}

func (p *parser) parseDuration(field, text string) (caddy.Duration, error) {
	d, err := caddy.ParseDuration(text)
	if err != nil || d <= 0 {
		want := "a duration above zero, such as 1m"
		if n, err := strconv.ParseUint(text, 10, 32); err == nil && n > 0 {
			want = fmt.Sprintf("a unit behind the number, such as %ss or %sms", text, text)
		}
		return 0, p.d.Errf("%s %q; want %s", word(field), harmless(text), want)
	}
	return caddy.Duration(d), nil
}

// end refuses further arguments.
func (p *parser) end(field string) error {
	if p.d.NextArg() {
		return p.d.Errf("unexpected %q; %s has one value%s", shown(p.d.Val()), word(field), together(field, p.d.Val()))
	}
	return nil
}

// shown is a word as a message may show it: what is left over on a line may be a secret, but not if
// it is signs only.
func shown(text string) string {
	if strings.ContainsFunc(text, func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }) {
		return harmless(text)
	}
	return text
}

// together is the hint for a sign that stands apart from its number.
func together(field, sign string) string {
	if sign == "%" {
		return "; write the sign to the number, as in " + word(field) + " 10%"
	}
	return ""
}

func (p *parser) flag(zone, field string, to *bool) error {
	if err := p.once(zone, field); err != nil {
		return err
	}
	if p.d.NextArg() {
		return p.d.Errf("unexpected %q; %s has no value", p.d.Val(), word(field))
	}
	*to = true
	return nil
}

// repeatedFlag parses a flag of caddy-ratelimit, which takes it any number of times.
func (p *parser) repeatedFlag(field string, to *bool) error {
	delete(p.written, spot{"", field, -1})
	return p.flag("", field, to)
}

// sweepInterval parses a duration that may be 0, which is the default.
func (p *parser) sweepInterval() error {
	var text string
	if err := p.text("", "sweep_interval", &text); err != nil {
		return err
	}
	d, err := caddy.ParseDuration(text)
	if err != nil || d < 0 {
		return p.d.Errf("sweep_interval %q; want a duration, such as 1m", text)
	}
	p.config.SweepInterval = caddy.Duration(d)
	return nil
}

// unsupported reads what caddy-ratelimit's storage and distributed say, so that compile can answer
// for both forms.
func (p *parser) unsupported(word string) error {
	if err := p.once("", word); err != nil {
		return err
	}
	p.d.NextSegment()
	if word == "distributed" {
		p.config.Distributed = &Distributed{}
	} else {
		p.config.StorageRaw = []byte(`{}`)
	}
	return nil
}

func (p *parser) unrecognized(words []string) error {
	if p.d.Val() == "{" {
		return p.d.Errf("unexpected block")
	}
	if hint := mistakenWords[p.d.Val()]; hint != "" {
		return p.d.Errf("unrecognized subdirective %q; %s", p.d.Val(), hint)
	}
	if slices.Contains(directives, p.d.Val()) {
		return p.d.Errf("unrecognized subdirective %q, which is a directive of Caddy's; want a } before it that ends the block", p.d.Val())
	}
	return p.d.Errf("unrecognized subdirective %q%s", p.d.Val(), didYouMean(p.d.Val(), words...))
}

// directives are those of Caddy that stand behind rate_limit where a closing brace was forgotten.
var directives = strings.Fields(`
	abort acme_server basic_auth bind copy_response encode file_server forward_auth fs handle handle_errors handle_path import
	intercept invoke log map metrics php_fastcgi push redir request_body request_header respond reverse_proxy rewrite root route
	templates tls tracing try_files uri vars`)

// mistakenWords says what is meant by words of other tools, of other places in a Caddyfile, and of
// JSON.
var mistakenWords = map[string]string{
	"requests": "want limit 5/1m, or events 5 with window 1m", "max_requests": "want limit 5/1m, or events 5 with window 1m",
	"max_events": "that is the word in JSON; want events 5 with window 1m, or limit 5/1m",
	"rate":       "want limit 1/s", "rps": "want limit 1/s", "interval": "want limit 5/1m, or events 5 with window 1m",
	"period": "want limit 5/1m, or events 5 with window 1m", "per": "want limit 5/1m",
	"path": wantMatch, "match_path": wantMatch, "method": wantMatch, "methods": wantMatch, "matches": wantMatch, "matcher": wantMatch,
	"host": wantMatch, "header": wantMatch, "remote_ip": wantMatch, "client_ip": wantMatch, "paths": wantMatch, "not": wantMatch,
	"whitelist": wantExempt, "allowlist": wantExempt, "allow": wantExempt, "bypass": wantExempt, "exclude": wantExempt,
	"except": wantExempt, "skip": wantExempt, "ignore": wantExempt,
	"blacklist": "want Caddy's respond @<matcher> 403, or ban <duration> after <n>/<window> for clients that are refused too often",
	"deny":      "want Caddy's respond @<matcher> 403, or ban <duration> after <n>/<window> for clients that are refused too often",
	"redis":     "redis belongs in the global options, rate_limit { redis <address> }, and store redis in a zone",
	"memcached": "instances share limits through redis <address> in the global option rate_limit", "backend": wantStore,
	"storage_backend": wantStore, "fleet_size": "fleet_size belongs in the global option rate_limit, beside redis",
	"nodelay":  "want algorithm leaky_bucket with burst <n>, which refuses at once; queue <n> makes requests wait",
	"by":       "want key <text>, such as key {client_ip}",
	"identity": "want key <text>, such as key {client_ip}", "identifier": "want key <text>, such as key {client_ip}",
	"status_code": "want status <code> in rate_limit itself", "reject_status": "want status <code> in rate_limit itself",
	"zone_size": "want max_keys <n> in rate_limit itself",
	"message":   wantRoute, "body": wantRoute, "on_limit": wantRoute, "error": wantRoute,
}

const (
	wantMatch  = "want match { path /x } or match @<name>, or a matcher after the word rate_limit"
	wantExempt = "want exempt { client_ip 10.0.0.0/8 } or exempt @<name>"
	wantStore  = "want store local or redis, with rate_limit { redis <address> } in the global options"
	wantRoute  = "a body of one's own is written in handle_errors 429 { … }"
)

// once notes a setting that may be written once.
func (p *parser) once(zone, field string) error {
	if first, ok := p.written[spot{zone, field, -1}]; ok {
		return p.d.Errf("%s is written twice, first at %s; want it once", word(field), placeOf(first))
	}
	p.note(zone, field, -1)
	return nil
}

func (p *parser) note(zone, field string, index int) {
	p.written[spot{zone, field, index}] = p.d.Token()
}

// word is the Caddyfile's word for a JSON field, or for a path of them.
func word(field string) string {
	switch field {
	case "redis.addresses":
		return "redis"
	case "max_events":
		return "events"
	case "charge_max":
		return "charge max"
	case "rate_limits":
		return "rate_limit"
	case "queue.size", "concurrency.max", "count.status", "count.not_status", "ban.durations":
		return field[:strings.IndexByte(field, '.')]
	}
	if strings.HasPrefix(field, "tier.") {
		return "tier"
	}
	return field[strings.LastIndexByte(field, '.')+1:]
}
