// Package caddyfile is the configuration language: the JSON form and its documentation (config.go),
// Caddyfile → config (parse.go), config → rules (compile.go), and the keys that separate clients
// (key.go). It never sees the handler.
package caddyfile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"reflect"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// Config is what an operator writes for one rate_limit handler.
type Config struct {
	// The zones by name. A zone says which requests it limits, what tells their clients apart, and
	// how much each client may have. All zones that match a request apply; they are decided
	// together, and a request that one of them refuses takes nothing from the others.
	//
	// A name may hold any printable characters; the fields show what is not ASCII percent-encoded.
	// Handlers that use the same name share its counters and must agree on its algorithm, limits,
	// burst, queue, concurrency, tiers, max_keys, store and on_store_error. Counters survive config
	// reloads.
	Zones map[string]*Zone `json:"rate_limits,omitempty"`

	// The names of all zones in the order in which they are listed to clients and in which ties are
	// broken. Without it the order is alphabetic: JSON objects have none of their own.
	ZoneOrder []string `json:"zone_order,omitempty"`

	// Which response fields tell clients about their limits: one or several of `ietf`
	// (RateLimit-Policy and RateLimit as in the IETF draft), `draft6` (RateLimit-Limit, -Remaining,
	// -Reset) and `x` (X-RateLimit-Limit, -Remaining, -Reset); or `off`. After `x`, the word
	// `epoch` (default) or `delta` says whether its reset is a Unix time or a number of seconds.
	// Default: `ietf`. Refusals carry Retry-After in any case.
	Headers []string `json:"headers,omitempty"`

	// The HTTP status of a refusal, from 400 to 599. Default: 429.
	Status Number `json:"status,omitempty"`

	// What a refusal is made of: `problem` (a problem+json body, written here), or `error` (an
	// error for the server's error routes, which `handle_errors` makes). Default: `error` when an
	// error route matches the request, else `problem`.
	Response string `json:"response,omitempty"`

	// Lengthens each Retry-After by a random share of itself between 0 and this fraction, so that
	// refused clients do not come back at one moment. Default: 0.
	Jitter Number `json:"jitter,omitempty"`

	// Whether log lines and events of refusals show the client's key. Off by default, since keys
	// may be secret.
	LogKey bool `json:"log_key,omitempty"`

	// How many keys each zone holds at most, in each algorithm and window. Beyond it idle keys are
	// forgotten first, then those that use the smallest share of their limit. Default: 1000000.
	MaxKeys Number `json:"max_keys,omitempty"`

	// How often idle keys are forgotten: 1s or longer; what is shorter counts as 1s. Default: 1m.
	SweepInterval caddy.Duration `json:"sweep_interval,omitempty"`

	// Turns off the metrics of this handler's zones.
	DisableMetrics bool `json:"disable_metrics,omitempty"`

	// Read so that a config written for caddy-ratelimit gets a clear answer: limits of several
	// instances are not added up through Caddy's storage. Redis in the global option `rate_limit`
	// takes its place.
	StorageRaw json.RawMessage `json:"storage,omitempty" caddy:"namespace=caddy.storage inline_key=module"`

	// Read so that a config written for caddy-ratelimit gets a clear answer, see storage.
	Distributed *Distributed `json:"distributed,omitempty"`

	// The one zone of a config written for caddy-ext's ratelimit: who. The placeholders of that
	// module are understood: `{remote.host}`, `{remote.port}`, `{remote.ip}`,
	// `{remote.host_prefix.N}`, `{remote.ip_prefix.N}`. `{remote.ip}` is Caddy's client address,
	// which honors trusted proxies only; there it was the leftmost X-Forwarded-For, which anyone
	// can forge.
	Key string `json:"key,omitempty"`

	// The one zone of a config written for caddy-ext's ratelimit: how much, such as `10r/s` or
	// `100r/m`. It is a limit like any other: up to 10 exact (sliding_log), above that a
	// sliding_window counter, which is what that module used.
	Rate string `json:"rate,omitempty"`

	// The one zone of a config written for caddy-ext's ratelimit: another word for max_keys.
	ZoneSize Number `json:"zone_size,omitempty"`

	// The one zone of a config written for caddy-ext's ratelimit: another word for status.
	RejectStatus Number `json:"reject_status,omitempty"`

	name string // of the caddy-ext zone
}

// Unnamed returns the name for the one zone of a JSON config in caddy-ext's form, which gives it
// none, or "" if the config has another form. The name depends on what is limited only, so that
// counters survive reloads. Where a whole config holds several handlers with the same key and rate,
// their owner tells them apart with [Config.SetName].
func (c *Config) Unnamed() string {
	if c.Key == "" && c.Rate == "" {
		return ""
	}
	if c.name != "" {
		return c.name
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(c.Key + "\x00" + c.Rate))
	return fmt.Sprintf("rate_%016x", h.Sum64())
}

// SetName names the zone of a config in caddy-ext's form; it must precede [Compile].
func (c *Config) SetName(name string) { c.name = name }

// Zone limits the requests that it matches, each key by itself.
type Zone struct {
	// Which requests are limited: sets of matchers, of which one must match. Default: all.
	MatchRaw caddyhttp.RawMatcherSets `json:"match,omitempty" caddy:"namespace=http.matchers"`

	// Which of those are never limited: sets of matchers, of which one must match. Default: none.
	ExemptRaw caddyhttp.RawMatcherSets `json:"exempt,omitempty" caddy:"namespace=http.matchers"`

	// Who: a text with placeholders, or several texts that make one composite key, which no client
	// can forge by moving characters from one part to the next. A text without placeholders is one
	// counter for all clients. Default: `{http.vars.client_ip}`, the client address; in zones
	// written with max_events and window one counter for all. Values of `{env.*}`, `{file.*}` and
	// `{system.*}` are read once, at load.
	//
	// A key whose placeholders are all empty falls back to key_fallback, so that leaving a header
	// out never means no limit.
	Key Texts `json:"key,omitempty"`

	// Who, when key expands to nothing; or `none`: then the zone does not limit the request.
	// Fallback keys never meet ordinary keys. Default: `{http.vars.client_ip}`.
	KeyFallback Texts `json:"key_fallback,omitempty"`

	// Whether `{path}` in the key is the path as it was sent. By default it is cleaned as Caddy's
	// own path matcher cleans it: in small letters, without `//`, `/./` and `/../`, so that other
	// spellings of a path are no other counters.
	RawPath bool `json:"raw_path,omitempty"`

	// How much: `quota/window`, such as `100/1m`, `10/s`, `5/15m`, `10r/s`. Several limits all
	// hold. A quota of 0 refuses everything. Instead of max_events and window, or of tier.
	Limit Texts `json:"limit,omitempty"`

	// How requests are counted: `sliding_log` (exact; memory grows with the quota in use),
	// `sliding_window` (two counters; at most 2·quota−1 within a window, quota−1 per window under
	// saturation), `fixed_window` (up to 2·quota around the edge of a window), `token_bucket` (lets
	// a burst through, then a steady rate), `leaky_bucket` (a steady rate). Default: sliding_log
	// for quotas up to 10 and for max_events, leaky_bucket beside queue, else sliding_window. Where
	// several tiers have a window, the largest quota over it chooses the default for all of them.
	Algorithm string `json:"algorithm,omitempty"`

	// For token_bucket: how many units may be taken at once from idle, 1 or more; default: the
	// quota. For leaky_bucket: how many above the one in service, 0 or more; default 0.
	Burst Number `json:"burst,omitempty"`

	// For leaky_bucket: lets requests over the rate wait for their turn instead of refusing them.
	// Instead of burst.
	Queue *Queue `json:"queue,omitempty"`

	// How many requests of a key may be in flight at once. Beside a limit, or alone.
	Concurrency *Concurrency `json:"concurrency,omitempty"`

	// How many units a request takes: a number from 1 up to what the zone admits at once, or one
	// placeholder. A placeholder whose value is negative or not a whole number counts as 1.
	// Default: 1.
	Cost Number `json:"cost,omitempty"`

	// For token_bucket: one placeholder that says after the response how many units the request
	// cost in all, such as `{http.response.header.X-Tokens-Used}`. cost is then what is reserved
	// before. A value that is missing or negative leaves it at the reservation.
	Charge string `json:"charge,omitempty"`

	// The most that charge may say; above it the reservation stands, and that is counted and
	// logged, since one wrong number would lock the client out. Default: 100 times what the zone
	// admits at once.
	ChargeMax Number `json:"charge_max,omitempty"`

	// Which responses count; the others give back what their request took. Default: all.
	Count *Statuses `json:"count,omitempty"`

	// Limits by plan, instead of limit.
	Tier *Tiers `json:"tier,omitempty"`

	// What a key earns that is refused too often, or whose counted failures are refused too often.
	Ban *Penalty `json:"ban,omitempty"`

	// How many units per window, in the spelling of caddy-ratelimit; 0 refuses everything. Such a
	// zone counts exactly (sliding_log), and without a key it is one counter for all clients.
	MaxEvents Number `json:"max_events,omitempty"`

	// The window of max_events.
	Window caddy.Duration `json:"window,omitempty"`

	// How many bits of an IPv4 address in the key tell clients apart, 1 to 32. IPv6-mapped
	// addresses are IPv4 addresses. Default: 32.
	IPv4Prefix Number `json:"ipv4_prefix,omitempty"`

	// How many bits of an IPv6 address in the key tell clients apart, 1 to 128. One subscriber
	// usually has a /64 to choose addresses from. Default: 64; 128 in zones written with max_events
	// and window.
	IPv6Prefix Number `json:"ipv6_prefix,omitempty"`

	// Where the counters are: `local`, in this process; or `redis`, shared by all instances that
	// have the same Redis in the global option `rate_limit`. Default: redis when that option has
	// one, else local.
	Store string `json:"store,omitempty"`

	// What is done with requests while Redis cannot be reached or answers too late: `local` (this
	// instance limits by itself, to the limit divided by the number of instances, at least 1),
	// `allow` (they pass), or `deny` (they are answered 503 with a Retry-After). Default: local.
	OnStoreError string `json:"on_store_error,omitempty"`

	// Decide, count and report, but never refuse.
	DryRun bool `json:"dry_run,omitempty"`

	// Which share of the keys is refused, such as `10%` or `0.5%`; for the others the zone is as in
	// a dry run. The keys are the same on every instance, and a larger share keeps those of a
	// smaller one. Default: 100%.
	Enforce Number `json:"enforce,omitempty"`

	// Where the zone is written, such as `Caddyfile:12`; the Caddyfile adapter fills it in. It only
	// appears in messages.
	Place string `json:"place,omitempty"`
}

// Queue is where requests over the rate wait for their turn.
type Queue struct {
	// How many may be above the one in service, 1 or more.
	Size Number `json:"size,omitempty"`
	// How many of those are served at once; the others wait. It is less than size. Default: 0.
	Delay Number `json:"delay,omitempty"`
	// The longest wait; what would wait longer is refused. Default: as long as the queue takes.
	MaxWait caddy.Duration `json:"max_wait,omitempty"`
}

// Concurrency limits the requests in flight.
type Concurrency struct {
	// How many of a key at once; 0 refuses everything.
	Max Number `json:"max,omitempty"`
	// In Redis: after which time an instance that died frees its requests, 1s to 24h. Requests that
	// live hold on to their places however long they take. Default: 30s.
	Lease caddy.Duration `json:"lease,omitempty"`
	// The Retry-After of what is refused, 1s to 24h. Default: none, since nobody knows when another
	// request ends.
	RetryAfter caddy.Duration `json:"retry_after,omitempty"`
}

// Statuses says which responses count, in one of two ways: codes from 100 to 599, or classes such
// as `4xx`.
type Statuses struct {
	// Only these count.
	Status Texts `json:"status,omitempty"`
	// All but these count.
	NotStatus Texts `json:"not_status,omitempty"`
}

// Tiers are limits by plan. A client whose plan changes keeps its usage in windows that both plans
// have.
type Tiers struct {
	// The placeholder that names the plan, such as `{http.auth.user.plan}`.
	By string `json:"by,omitempty"`
	// The plans in the order in which they are listed.
	Values []TierValue `json:"values,omitempty"`
	// What holds for all other values, and for none.
	Default *Tier `json:"default,omitempty"`
}

// TierValue is the plan of one value.
type TierValue struct {
	// The value of the placeholder, to the letter: printable characters, since it is a part of the
	// policy's name.
	Value string `json:"value,omitempty"`
	Tier
}

// Tier is what the clients of one plan may have.
type Tier struct {
	// How much, as in the zone's limit.
	Limit Texts `json:"limit,omitempty"`
	// As much as they want. Instead of limit.
	Unlimited bool `json:"unlimited,omitempty"`
}

// Penalty is a ban.
type Penalty struct {
	// How long the first ban lasts, and those that follow it within twice the longest: 1s to 365d,
	// none shorter than the one before. The last one holds for all further.
	Durations []caddy.Duration `json:"durations,omitempty"`
	// How many refusals earn a ban: a number from 1 to 10000 and a window, such as `5/10m`.
	After string `json:"after,omitempty"`
}

// Distributed holds the fields that caddy-ratelimit knows, so that they are read strictly; see
// [Config.Distributed].
type Distributed struct {
	// Ignored.
	WriteInterval caddy.Duration `json:"write_interval,omitempty"`
	// Ignored.
	ReadInterval caddy.Duration `json:"read_interval,omitempty"`
	// Ignored.
	PurgeAge caddy.Duration `json:"purge_age,omitempty"`
}

// UnmarshalJSON decodes strictly; see [decode].
func (c *Config) UnmarshalJSON(b []byte) error {
	type plain Config
	return decode(b, (*plain)(c), true)
}

// Number is a number, or a text with placeholders that is one: JSON `20`, `"20"` or
// `"{env.BURST}"`. Such placeholders are evaluated at load. The empty Number was not written.
type Number string

// MarshalJSON writes a plain number as a JSON number.
func (n Number) MarshalJSON() ([]byte, error) {
	if len(n) > 0 && (n[0] == '-' || n[0] >= '0' && n[0] <= '9') && json.Valid([]byte(n)) {
		return []byte(n), nil
	}
	return json.Marshal(string(n))
}

// UnmarshalJSON reads a JSON number or string.
func (n *Number) UnmarshalJSON(b []byte) error {
	var value any
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	if err := dec.Decode(&value); err != nil {
		return err
	}
	switch v := value.(type) {
	case nil:
	case json.Number:
		*n = Number(v)
	case string:
		*n = Number(v)
	default:
		return typeError(b, "a number, or a text such as \"{env.LIMIT}\"", *n)
	}
	return nil
}

// Texts is one text or several: JSON `"a"` or `["a", "b"]`.
type Texts []string

// MarshalJSON writes a single text as a JSON string.
func (t Texts) MarshalJSON() ([]byte, error) {
	if len(t) == 1 {
		return json.Marshal(t[0])
	}
	return json.Marshal([]string(t))
}

// UnmarshalJSON reads a JSON string or array of strings.
func (t *Texts) UnmarshalJSON(b []byte) error {
	if bytes.HasPrefix(bytes.TrimSpace(b), []byte(`"`)) {
		*t = make(Texts, 1)
		return json.Unmarshal(b, &(*t)[0])
	}
	var list []string
	if err := json.Unmarshal(b, &list); err != nil {
		return typeError(b, "a text or a list of texts", *t)
	}
	*t = list
	return nil
}

// typeError is the error to which encoding/json adds the path. It does not show what is in objects
// and lists, since that may be a password.
func typeError(value []byte, want string, into any) error {
	switch value = bytes.TrimSpace(value); value[0] {
	case '{':
		value = []byte("object")
	case '[':
		value = []byte("list")
	}
	return &json.UnmarshalTypeError{Value: fmt.Sprintf("%s (want %s)", value, want), Type: reflect.TypeOf(into)}
}
