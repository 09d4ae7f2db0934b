// Config → rules. Everything that can be wrong with a config is found here, so that Caddyfile
// users, whose files the adapter compiles once to find errors while it still knows lines, and JSON
// users get the same answers.

package caddyfile

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/fields"
)

// Rules is a compiled config.
type Rules struct {
	// Rules in the order of the file, which breaks ties.
	Rules          []*Rule
	Headers        fields.Families
	Status         int
	Response       Response
	Jitter         float64 // the largest share by which a Retry-After grows, 0 to 1
	LogKey         bool
	SweepInterval  time.Duration
	DisableMetrics bool
	// Warnings are for the log: what is allowed and probably not meant.
	Warnings []string
}

// Response says what a refusal is made of.
type Response uint8

// The values of response.
const (
	ResponseAuto    Response = iota // an error route if one matches the request, else problem+json
	ResponseProblem                 // problem+json
	ResponseError                   // an error for the error routes
)

// String returns the word in the configuration, "auto" for the default.
func (r Response) String() string { return [...]string{"auto", "problem", "error"}[r] }

const (
	defaultSweep = time.Minute
	mostJitter   = 1000
	// exactQuota is up to which quota a zone without an algorithm counts exactly: a sliding window
	// counter gives quota−1 per window under saturation, which is much of a small quota, and a log
	// of few entries is cheap.
	exactQuota = 10
)

// Compile checks a config and turns it into rules. It loads the matchers of c's zones into ctx,
// which takes them out of c, so a config is compiled once. The error names the JSON path, or the
// line of the Caddyfile that the config was adapted from, the value that was wrong, and what would
// be right.
func Compile(ctx caddy.Context, c *Config) (*Rules, error) {
	repl := caddy.NewReplacer()
	rules, err := compile(c, func(name string) (string, bool) { return repl.GetString(name) }, lookAround(ctx, c))
	if err != nil {
		return nil, err
	}
	for _, rule := range rules.Rules {
		zone, ok := c.Zones[rule.Zone]
		if !ok {
			continue // the zone of a caddy-ext config, which has no matchers
		}
		if rule.Match, err = loadMatchers(ctx, zone, "MatchRaw", len(zone.MatchRaw)); err != nil {
			return nil, &fieldError{zone: rule.Zone, place: rule.Place, field: "match", index: -1, err: err}
		}
		if rule.Exempt, err = loadMatchers(ctx, zone, "ExemptRaw", len(zone.ExemptRaw)); err != nil {
			return nil, &fieldError{zone: rule.Zone, place: rule.Place, field: "exempt", index: -1, err: err}
		}
	}
	return rules, nil
}

func loadMatchers(ctx caddy.Context, zone *Zone, field string, sets int) (caddyhttp.MatcherSets, error) {
	if sets == 0 {
		return nil, nil
	}
	loaded, err := ctx.LoadModule(zone, field)
	if err != nil {
		return nil, err
	}
	var matchers caddyhttp.MatcherSets
	return matchers, matchers.FromInterface(loaded)
}

// fieldError says where in the config something is wrong. Its text is the JSON path; the parser
// replaces it by a line.
type fieldError struct {
	zone, place string // "" for a setting of the handler
	field       string // JSON name, "" for the whole zone
	index       int    // in a list, or -1
	err         error
}

func (e *fieldError) Error() string {
	path := e.field
	if e.zone != "" {
		path = strings.TrimSuffix("rate_limits."+e.zone+"."+e.field, ".")
	}
	if e.index >= 0 {
		path += "[" + strconv.Itoa(e.index) + "]"
	}
	if e.place != "" {
		path = e.place + ": " + path
	}
	return path + ": " + e.err.Error()
}

func (e *fieldError) Unwrap() error { return e.err }

// compiler holds what compiling one config needs.
type compiler struct {
	c *Config
	// lookup reads placeholders that stand for one value at load; nil while adapting, when their
	// values do not count.
	lookup func(name string) (string, bool)
	around *around // nil while adapting
	rules  *Rules
}

// compile is Compile without matchers. With a nil lookup, as at adapt time, settings that hold
// placeholders are left for the load, and the rules are not complete.
func compile(c *Config, lookup func(string) (string, bool), around *around) (*Rules, error) {
	k := &compiler{c: c, lookup: lookup, around: around, rules: &Rules{
		LogKey: c.LogKey, DisableMetrics: c.DisableMetrics, SweepInterval: defaultSweep,
	}}
	if err := k.handler(); err != nil {
		return nil, err
	}
	k.warnCacheable()
	zones, names, err := k.zones()
	if err != nil {
		return nil, err
	}
	maxKeys, known, err := k.maxKeys()
	if err != nil {
		return nil, err
	}
	for i, name := range names {
		z := &zoneCompiler{compiler: k, name: name, z: zones[name], maxKeys: maxKeys, pending: !known}
		rule, err := z.rule()
		if err != nil {
			return nil, err
		}
		if i == 0 {
			z.warnAround()
		}
		k.rules.Rules = append(k.rules.Rules, rule)
	}
	return k.rules, k.wireNames()
}

// handler checks the settings that all zones share.
func (k *compiler) handler() error {
	c := k.c
	if c.Distributed != nil {
		return handlerError("distributed", errNoStorage)
	}
	if len(c.StorageRaw) > 0 && string(c.StorageRaw) != "null" {
		return handlerError("storage", errNoStorage)
	}
	if err := k.headers(); err != nil {
		return err
	}
	if err := k.status(); err != nil {
		return err
	}
	switch c.Response {
	case "":
	case "problem":
		k.rules.Response = ResponseProblem
	case "error":
		k.rules.Response = ResponseError
	default:
		return handlerError("response", fmt.Errorf("%q%s; want problem or error", c.Response, didYouMean(c.Response, "problem", "error")))
	}
	if c.Jitter != "" {
		text, known, err := k.expand(string(c.Jitter))
		if err != nil {
			return handlerError("jitter", err)
		}
		jitter, err := strconv.ParseFloat(text, 64)
		if known && (err != nil || !(jitter >= 0 && jitter <= mostJitter)) {
			return handlerError("jitter", fmt.Errorf("%q; want a fraction from 0 to 1, such as 0.2", text))
		}
		if jitter > 1 {
			k.warn("jitter: %q lengthens waits to up to %g times themselves; a fraction such as 0.2 lengthens them by up to a fifth", text, 1+jitter)
		}
		k.rules.Jitter = jitter
	}
	if sweep := time.Duration(c.SweepInterval); sweep != 0 {
		if sweep < 0 {
			return handlerError("sweep_interval", fmt.Errorf("%v; want 1s or longer, such as 1m", sweep))
		}
		if sweep < time.Second {
			k.warn("sweep_interval: %v is used as 1s; want 1s or longer, such as 1m%s", sweep, nanoseconds(sweep))
		}
		k.rules.SweepInterval = max(sweep, time.Second)
	}
	return nil
}

// warn is for what is about the whole handler.
func (k *compiler) warn(format string, args ...any) {
	k.rules.Warnings = append(k.rules.Warnings, fmt.Sprintf(format, args...))
}

// nanoseconds reminds of what a number means, where a duration is so short that it was probably
// meant as another unit.
func nanoseconds(d time.Duration) string {
	if d > 0 && d < time.Millisecond {
		return "; a JSON number is nanoseconds"
	}
	return ""
}

var errNoStorage = errors.New("limits are not added up over instances through Caddy's storage here; " +
	"want the shared store, rate_limit { redis <address> } in the global options, instead of distributed and storage")

func handlerError(field string, err error) error {
	return &fieldError{field: field, index: -1, err: err}
}

func (k *compiler) headers() error {
	words, h := k.c.Headers, &k.rules.Headers
	if len(words) == 0 {
		*h = fields.Default
		return nil
	}
	for i, word := range words {
		fail := func(format string, args ...any) error {
			return &fieldError{field: "headers", index: i, err: fmt.Errorf(format, args...)}
		}
		if slices.Contains(words[:i], word) {
			return fail("%q is written twice", word)
		}
		switch word {
		case "off":
			if len(words) > 1 {
				return fail("\"off\" stands alone, or leave it out")
			}
		case "ietf":
			h.IETF = true
		case "draft6":
			h.Draft6 = true
		case "x":
			h.X = true
		case "epoch", "delta":
			if i == 0 || words[i-1] != "x" {
				return fail("%q belongs directly after x, as the form of its reset", word)
			}
			h.XDelta = word == "delta"
		default:
			return fail("%q%s; want ietf, draft6, x (with epoch or delta), or off",
				word, didYouMean(word, "ietf", "draft6", "x", "epoch", "delta", "off"))
		}
	}
	return nil
}

func (k *compiler) status() error {
	field, n := "status", k.c.Status
	if k.c.RejectStatus != "" {
		if n != "" {
			return handlerError("reject_status", errors.New("status is written too, and means the same; want one of them"))
		}
		field, n = "reject_status", k.c.RejectStatus
	}
	k.rules.Status = http.StatusTooManyRequests
	if n == "" || field == "reject_status" && n == "0" { // 0 was a way to write none there
		return nil
	}
	status, _, err := k.integer(n, 400, 599)
	if err != nil {
		return handlerError(field, err)
	}
	k.rules.Status = int(status)
	return nil
}

func (k *compiler) maxKeys() (keys int, known bool, err error) {
	field, n := "max_keys", k.c.MaxKeys
	if k.c.ZoneSize != "" {
		if n != "" {
			return 0, false, handlerError("zone_size", errors.New("max_keys is written too, and means the same; want one of them"))
		}
		field, n = "zone_size", k.c.ZoneSize
	}
	if n == "" || field == "zone_size" && n == "0" {
		return algorithms.DefaultMaxKeys, true, nil
	}
	value, known, err := k.integer(n, 1, math.MaxInt32)
	if err != nil {
		return 0, false, handlerError(field, err)
	}
	return int(value), known, nil
}

// zones returns the zones and their names in order.
func (k *compiler) zones() (map[string]*Zone, []string, error) {
	c := k.c
	if c.Key != "" || c.Rate != "" {
		return k.unnamedZone()
	}
	if len(c.Zones) == 0 {
		k.warn("rate_limit has no zone and limits nothing; want a limit such as 100/1m on its line, or zones in its block")
		return nil, nil, nil
	}
	if len(c.ZoneOrder) == 0 {
		names := make([]string, 0, len(c.Zones))
		for name := range c.Zones {
			names = append(names, name)
		}
		sort.Strings(names)
		return c.Zones, names, nil
	}
	for i, name := range c.ZoneOrder {
		fail := func(text string) error {
			return &fieldError{field: "zone_order", index: i, err: fmt.Errorf("%q %s; want every zone once", name, text)}
		}
		if _, ok := c.Zones[name]; !ok {
			return nil, nil, fail("is not in rate_limits")
		}
		if slices.Contains(c.ZoneOrder[:i], name) {
			return nil, nil, fail("is written twice")
		}
	}
	for name := range c.Zones {
		if !slices.Contains(c.ZoneOrder, name) {
			return nil, nil, handlerError("zone_order", fmt.Errorf("zone %q is missing; want every zone once", name))
		}
	}
	return c.Zones, c.ZoneOrder, nil
}

// unnamedZone is the zone of a caddy-ext config.
func (k *compiler) unnamedZone() (map[string]*Zone, []string, error) {
	c := k.c
	switch {
	case len(c.Zones) > 0:
		return nil, nil, handlerError("rate", errors.New("rate_limits is written too; want one of the two forms, and a limit in each zone"))
	case c.Rate == "":
		return nil, nil, handlerError("key", errors.New("rate is missing; want one such as 10r/s"))
	}
	z := &Zone{Limit: Texts{c.Rate}}
	if c.Key != "" {
		z.Key = Texts{c.Key}
	}
	return map[string]*Zone{c.Unnamed(): z}, []string{c.Unnamed()}, nil
}

// expand evaluates the placeholders in a number or limit. known is false at adapt time if there are
// any.
func (k *compiler) expand(text string) (value string, known bool, err error) {
	if name, ok := notGlobal(text); ok {
		return "", false, fmt.Errorf("{%s} has no value at load; want a number, or a global placeholder such as {env.LIMIT}", name)
	}
	return k.expandGlobal(text)
}

// expandText is expand for a text.
func (k *compiler) expandText(text string) (value string, known bool, err error) {
	if name, ok := notGlobal(text); ok {
		return "", false, fmt.Errorf("{%s} has no value at load; want a text, or a global placeholder such as {env.NAME}", name)
	}
	return k.expandGlobal(text)
}

// expandSecret is expand for a text that may be secret: braces may be a part of it, so that the
// error does not quote them.
func (k *compiler) expandSecret(text string) (value string, known bool, err error) {
	if _, ok := notGlobal(text); ok {
		return "", false, errors.New(`{ and } around what has no value at load; want {env.<name>} or {file.<path>}, or \{ for a brace that is meant`)
	}
	return k.expandGlobal(text)
}

// notGlobal finds a placeholder that has no value at load.
func notGlobal(text string) (name string, found bool) {
	for _, piece := range split(text) {
		if piece.placeholder && !isGlobal(piece.text) {
			return piece.text, true
		}
	}
	return "", false
}

func (k *compiler) expandGlobal(text string) (value string, known bool, err error) {
	var out strings.Builder
	for _, piece := range split(text) {
		if !piece.placeholder {
			out.WriteString(piece.text)
			continue
		}
		if k.lookup == nil {
			return "", false, nil
		}
		v, _ := k.lookup(piece.text)
		if v = strings.TrimSpace(v); v == "" {
			return "", false, emptyError(piece.text)
		}
		out.WriteString(v)
	}
	return out.String(), true, nil
}

func emptyError(placeholder string) error {
	if file, ok := strings.CutPrefix(placeholder, "file."); ok {
		if f, err := os.Open(file); err != nil {
			return fmt.Errorf("{%s}: %w", placeholder, err)
		} else if err := f.Close(); err != nil {
			return fmt.Errorf("{%s}: %w", placeholder, err)
		}
	}
	if env, ok := strings.CutPrefix(placeholder, "env."); ok {
		return fmt.Errorf("{%s} is empty; want it set in the environment, or {$%s:default} in its place in a Caddyfile", placeholder, env)
	}
	return fmt.Errorf("{%s} is empty; want a value there", placeholder)
}

// integer evaluates a number within bounds. An unknown one is 0.
func (k *compiler) integer(n Number, least, most int64) (value int64, known bool, err error) {
	text, known, err := k.expand(string(n))
	if err != nil || !known {
		return 0, false, err
	}
	value, err = strconv.ParseInt(text, 10, 64)
	if err != nil || value < least || value > most {
		return 0, false, fmt.Errorf("%q; want a whole number from %d to %d", text, least, most)
	}
	return value, true, nil
}

// wireNames refuses names that clients would see for two limits.
func (k *compiler) wireNames() error {
	taken := map[string]*Rule{}
	for _, rule := range k.rules.Rules {
		for name := range rule.AllNames() {
			wire := fields.Name(name)
			other := taken[wire]
			taken[wire] = rule
			switch other {
			case nil:
			case rule:
				return &fieldError{zone: rule.Zone, place: rule.Place, field: "tier", index: -1,
					err: fmt.Errorf("clients would see two limits called %q, of two tiers; want another value for one of them", name)}
			default:
				return &fieldError{zone: rule.Zone, place: rule.Place, index: -1,
					err: fmt.Errorf("clients would see two limits called %q (the other is in zone %s); want another zone name", name, other.Zone)}
			}
		}
	}
	return nil
}

// besides are how the names end of the spaces that a zone has besides its own.
var besides = []string{" (bans)", " (strikes)", " (ladder)", " (pending)", " (share)"}

// checkName refuses names that people cannot read, and those of spaces that a zone has besides its
// own.
func checkName(name string) error {
	switch {
	case name == "":
		return errors.New("want one or more printable characters")
	case !utf8.ValidString(name) || strings.ContainsFunc(name, func(c rune) bool { return !unicode.IsPrint(c) }):
		return errors.New("want printable characters, and no space but the plain one")
	}
	for _, end := range besides {
		if strings.HasSuffix(name, end) {
			return fmt.Errorf("want another end than %q, which names what is counted beside a zone", end)
		}
	}
	return nil
}
