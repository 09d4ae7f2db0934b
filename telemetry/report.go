package telemetry

// A refusal as operators hear of it: one log line, sampled, and one event, for whoever subscribed.

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
)

// Refusal is one refused request, or one that a dry-run rule would have refused.
type Refusal struct {
	// Zone and Key name the counter. Key is the key as it was counted; it is shown only with log_key.
	Zone, Key string
	// Text makes the key readable; nil when it is already.
	Text func(key string) string
	// Wait is what Retry-After says before rounding, jitter included; algorithms.Never if waiting does not help.
	Wait time.Duration
	// DryRun: nothing was refused, so there is a log line of other wording and no event.
	DryRun bool
	// Now is the monotonic clock, counted from one fixed moment of the process. It is only used for sampling.
	Now time.Duration
}

// Reporter reports the refusals of one handler.
type Reporter struct {
	ctx     caddy.Context
	logger  *zap.Logger
	events  events
	sampler *sampler
	logKey  bool
}

// events is the part of caddyevents.App that is used.
type events interface {
	ShouldEmit(name string) bool
	Emit(ctx caddy.Context, name string, data map[string]any) caddy.Event
}

// NewReporter makes the reporter of the module that ctx was provisioned for. It loads the events app.
func NewReporter(ctx caddy.Context, logKey bool) (*Reporter, error) {
	app, err := ctx.App("events")
	if err != nil {
		return nil, fmt.Errorf("loading the events app: %w", err)
	}
	return &Reporter{ctx: ctx, logger: ctx.Logger(), events: app.(*caddyevents.App), sampler: processSampler, logKey: logKey}, nil
}

// Refused reports a refusal. Every one is emitted as an event if anyone listens, and one per key and second is
// logged (see sampler for the bounds); the metrics count all of them.
func (t *Reporter) Refused(r *http.Request, f Refusal) {
	if t.logger.Core().Enabled(zapcore.InfoLevel) {
		t.log(r, &f)
	}
	if !f.DryRun && t.events.ShouldEmit(exceededEvent) {
		data := map[string]any{"zone": f.Zone, "wait": f.Wait, "remote_ip": remoteIP(r)}
		if t.logKey {
			data["key"] = f.text()
		}
		t.events.Emit(t.ctx, exceededEvent, data)
	}
}

func (t *Reporter) log(r *http.Request, f *Refusal) {
	client := func() string {
		ip, _ := caddyhttp.GetVar(r.Context(), caddyhttp.ClientIPVarKey).(string)
		if ip == "" {
			ip = remoteIP(r)
		}
		return ip
	}
	suppressed, ok := t.sampler.admit(f.Zone, f.Key, client, f.Now)
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
	remote := remoteIP(r)
	line := []zap.Field{zap.String("zone", f.Zone), zap.String("remote_ip", remote)}
	if f.Wait != algorithms.Never { // as a number it would read as 292 years
		line = append(line, zap.Duration("wait", f.Wait))
	}
	if ip := client(); ip != remote {
		line = append(line, zap.String("client_ip", ip))
	}
	if t.logKey {
		line = append(line, zap.String("key", f.text()))
	}
	if suppressed > 0 {
		line = append(line, zap.Uint32("suppressed", suppressed))
	}
	entry.Write(line...)
}

// remoteIP is the address of the connection, like Caddy's access log has it. Behind a proxy that is the
// proxy: the line then has client_ip too.
func remoteIP(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	return host
}

// maxText is how much of a key is shown, in bytes: a key can be as long as the header it is read from.
const maxText = 256

// text is the key as it may be shown: valid UTF-8 in which different bytes stay different, and of bounded length.
func (f *Refusal) text() string {
	key := f.Key
	if f.Text != nil {
		key = f.Text(key)
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
