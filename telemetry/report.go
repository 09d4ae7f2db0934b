package telemetry

// A refusal or a ban as operators hear of it: one log line, sampled, and one event, for whoever
// subscribed.

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/caddy-sluice/sluice/algorithms"
)

// What ban tools and subscribers match on. A dry run must not match, or it would ban.
const (
	exceeded       = "rate limit exceeded"
	exceededDryRun = "request would have been refused (dry run)"
	exceededEvent  = "rate_limit_exceeded"
	dryRunEvent    = "rate_limit_exceeded_dry_run"
	banned         = "client banned"
	bannedEvent    = "rate_limit_banned"
)

// Refusal is one refused request, or one that a dry-run rule would have refused.
type Refusal struct {
	// Zone and Key name the counter. Key is the key as it was counted; it is shown only with
	// log_key.
	Zone, Key string
	// Text makes the key readable; nil when it is already.
	Text func(key string) string
	// Wait is what Retry-After says before rounding, jitter included; algorithms.Never if waiting
	// does not help, algorithms.Unknown if nobody knows how long.
	Wait time.Duration
	// DryRun: nothing was refused, so there is a log line of other wording and an event of another
	// name.
	DryRun bool
	// Now is the monotonic clock, counted from one fixed moment of the process. It is only used for
	// sampling.
	Now time.Duration
}

// Ban is a ban that a client has just earned.
type Ban struct {
	// Zone, Key and Text are as in [Refusal].
	Zone, Key string
	Text      func(key string) string
	// Duration is how long the client is banned, Step which of the rule's durations that is, the
	// first being 1.
	Duration time.Duration
	Step     int
}

// Reporter reports the refusals and bans of one handler.
type Reporter struct {
	ctx     caddy.Context
	logger  *zap.Logger
	events  events
	sampler *sampler
	bans    *sampler
	logKey  bool
}

// events is the part of caddyevents.App that is used.
type events interface {
	ShouldEmit(name string) bool
	Emit(ctx caddy.Context, name string, data map[string]any) caddy.Event
}

// NewReporter makes the reporter of the module that ctx was provisioned for. It loads the events
// app.
func NewReporter(ctx caddy.Context, logKey bool) (*Reporter, error) {
	app, err := ctx.App("events")
	if err != nil {
		return nil, fmt.Errorf("loading the events app: %w", err)
	}
	return &Reporter{
		ctx: ctx, logger: ctx.Logger(), events: app.(*caddyevents.App),
		sampler: processSampler, bans: processBans, logKey: logKey,
	}, nil
}

// Refused reports a refusal. Every one is emitted as an event if anyone listens, and one per key
// and second is logged (see sampler for the bounds); the metrics count all of them.
func (t *Reporter) Refused(r *http.Request, f Refusal) {
	if t.logger.Core().Enabled(zapcore.InfoLevel) {
		t.log(r, &f)
	}
	event := exceededEvent
	if f.DryRun {
		event = dryRunEvent
	}
	if t.events.ShouldEmit(event) {
		data := map[string]any{}
		if f.Wait != algorithms.Unknown { // but Never is a wait: caddy-ratelimit's subscribers expect one
			data["wait"] = f.Wait
		}
		t.emit(r, event, f.Zone, f.Key, f.Text, data)
	}
}

// Banned reports a ban, also after the response. Every one is emitted as an event if anyone
// listens, and logged; only bans of a client that makes up keys, and those of thousands of clients
// in one second, are bounded as refusals are, apart from them.
func (t *Reporter) Banned(r *http.Request, b Ban) {
	// The line's own time will do for sampling: if the wall clock is set back, there is a line too
	// many.
	if entry := t.logger.Check(zapcore.WarnLevel, banned); entry != nil {
		now := time.Duration(entry.Time.UnixNano())
		if _, ok := t.bans.admit(b.Zone, b.Key, func() string { return clientIP(r) }, now); ok {
			entry.Write(t.line(r, b.Zone, b.Key, b.Text, zap.Duration("ban", b.Duration), zap.Int("step", b.Step))...)
		}
	}
	if t.events.ShouldEmit(bannedEvent) {
		t.emit(r, bannedEvent, b.Zone, b.Key, b.Text, map[string]any{"duration": b.Duration, "step": b.Step})
	}
}

func (t *Reporter) log(r *http.Request, f *Refusal) {
	suppressed, ok := t.sampler.admit(f.Zone, f.Key, func() string { return clientIP(r) }, f.Now)
	if !ok {
		return
	}
	message := exceeded
	if f.DryRun {
		message = exceededDryRun
	}
	entry := t.logger.Check(zapcore.InfoLevel, message)
	if entry == nil {
		return
	}
	wait := zap.Skip()
	if f.Wait != algorithms.Never && f.Wait != algorithms.Unknown { // as numbers they would read as 292 years and as the past
		wait = zap.Duration("wait", f.Wait)
	}
	line := t.line(r, f.Zone, f.Key, f.Text, wait)
	if suppressed > 0 {
		line = append(line, zap.Uint32("suppressed", suppressed))
	}
	entry.Write(line...)
}

// line is what every line tells of a client, around what it tells of the matter.
func (t *Reporter) line(r *http.Request, zone, key string, text func(string) string, matter ...zap.Field) []zap.Field {
	remote := remoteIP(r)
	line := append([]zap.Field{zap.String("zone", zone), zap.String("remote_ip", remote)}, matter...)
	if ip := clientIP(r); ip != remote {
		line = append(line, zap.String("client_ip", ip))
	}
	if t.logKey {
		line = append(line, zap.String("key", readable(key, text)))
	}
	return line
}

// emit adds to the data of an event what every event tells of a client.
func (t *Reporter) emit(r *http.Request, name, zone, key string, text func(string) string, data map[string]any) {
	data["zone"], data["remote_ip"] = zone, remoteIP(r)
	if t.logKey {
		data["key"] = readable(key, text)
	}
	t.events.Emit(t.ctx, name, data)
}

// clientIP is the client's address as the server's trusted_proxies tell it.
func clientIP(r *http.Request) string {
	if ip, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string); ip != "" {
		return ip
	}
	return remoteIP(r)
}

// remoteIP is the address of the connection, like Caddy's access log has it. Behind a proxy that is
// the proxy: the line then has client_ip too.
func remoteIP(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}

// maxText is how much of a key is shown, in bytes: a key can be as long as the header it is read
// from.
const maxText = 256

// readable is a key as it may be shown: valid UTF-8 in which different bytes stay different, and of
// bounded length.
func readable(key string, text func(string) string) string {
	if text != nil {
		key = text(key)
	}
	if len(key) > maxText {
		end := maxText
		for end > maxText-utf8.UTFMax && !utf8.RuneStart(key[end]) {
			end-- // not in the middle of a letter
		}
		key = key[:end] + "…"
	}
	if utf8.ValidString(key) {
		return key
	}
	quoted := strconv.Quote(key)
	return quoted[1 : len(quoted)-1]
}
