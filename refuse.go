package sluice

// The answer to who is refused, and what stands between it and the client.

import (
	"errors"
	"math/rand/v2"
	"net/http"
	"reflect"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/encode"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"go.uber.org/zap"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/caddyfile"
	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/fields"
	"github.com/caddy-sluice/sluice/telemetry"
)

// voice is how a handler speaks of what it decides: to those whom it refuses, to the log and to
// subscribers of events.
type voice struct {
	settings *caddyfile.Rules
	reporter *telemetry.Reporter
	logger   *zap.Logger
}

// refuse answers the client, with the wait of the rule's limit that binds.
func (v *voice) refuse(w http.ResponseWriter, q *question, by *asked, why verdict, counters *counting.Counters) error {
	wait := why.wait
	if wait == algorithms.Unknown && by.rule.RetryAfter > 0 {
		wait = by.rule.RetryAfter
	}
	wait = v.jitter(q.record.waitForAll(wait, q.earlier, counters))
	q.refuse(refusal{zone: by.rule.Zone, policy: by.plan.Names[why.limit], wait: wait})
	v.report(q, by, wait)
	reason, problem := "rate limit exceeded", q.fields.Problem
	if by.Banned() {
		reason, problem = "banned for exceeding a rate limit", q.fields.AbnormalUsage
	}
	return v.answer(w, q, wait, v.settings.Status, reason, problem(q.applied))
}

// deny answers a client whose request cannot be counted. It has done nothing wrong, so ban tools
// hear nothing of it.
func (v *voice) deny(w http.ResponseWriter, q *question) error {
	const status = http.StatusServiceUnavailable
	return v.answer(w, q, v.jitter(counting.StoreBack), status, "rate limit cannot be counted: the shared store is down", fields.ReducedCapacity(status))
}

// turnAway answers a request that cannot be counted as it is. A matcher that failed is the site's
// to answer, as for every other handler.
func (v *voice) turnAway(w http.ResponseWriter, q *question, err error) error {
	var why caddyhttp.HandlerError
	if !errors.As(err, &why) || !errors.Is(err, errManyValues) && !errors.Is(err, caddyfile.ErrEarlyData) {
		fields.WriteRefusal(w.Header(), &q.record.scratch, algorithms.Unknown)
		return err
	}
	return v.answer(w, q, algorithms.Unknown, why.StatusCode, why.Err.Error(), fields.Malformed(why.StatusCode, why.Err.Error()))
}

// answer writes the response, or returns the error that lets an error route write it.
func (v *voice) answer(w http.ResponseWriter, q *question, wait time.Duration, status int, reason string, problem []byte) error {
	fields.WriteRefusal(w.Header(), &q.record.scratch, wait)
	if err := v.asError(q.r, status, reason); err != nil {
		return err
	}
	fields.WriteProblem(w.Header(), &q.record.scratch)
	w = unaltered(w)
	w.WriteHeader(status)
	_, err := w.Write(problem)
	return err
}

// jitter lengthens a wait by a random share, so that the refused do not all return at once. What is
// no number stays so.
func (v *voice) jitter(wait time.Duration) time.Duration {
	if v.settings.Jitter == 0 || wait == algorithms.Never || wait < 0 {
		return wait
	}
	more := rand.Float64() * v.settings.Jitter * float64(wait)
	return wait + time.Duration(min(more, float64(algorithms.MaxWindow)))
}

func (v *voice) report(q *question, a *asked, wait time.Duration) {
	key := a.key
	if v.settings.LogKey {
		key = strings.Clone(key) // subscribers may keep it
	}
	v.reporter.Refused(q.r, telemetry.Refusal{
		Zone: a.rule.Zone, Key: key, Text: caddyfile.Text, Wait: wait, DryRun: !a.enforced, Now: monotonic(),
	})
}

// asError returns the error that lets an error route answer, or nil when this handler is to answer
// itself: always within an error route, where a returned error would lose to the one that led
// there.
func (v *voice) asError(r *http.Request, status int, reason string) error {
	if _, within := r.Context().Value(caddyhttp.ErrorCtxKey).(error); within || v.settings.Response == caddyfile.ResponseProblem {
		return nil
	}
	server, _ := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if v.settings.Response == caddyfile.ResponseAuto && (server == nil || server.Errors == nil) {
		return nil // before making the error, which costs more than the decision
	}
	err := caddyhttp.Error(status, errors.New(reason))
	if v.settings.Response == caddyfile.ResponseError || answered(server.Errors.Routes, server.Errors.WithError(r, err)) {
		return err
	}
	return nil
}

// answered reports whether one of the error routes is about the request and its error. It looks
// into subroutes, because that is where `handle_errors 404` keeps its status; a matcher that fails
// is left to fail in the route.
func answered(routes caddyhttp.RouteList, r *http.Request) bool {
	for _, route := range routes {
		if matches, err := route.MatcherSets.AnyMatchWithError(r); !matches && err == nil {
			continue
		}
		for _, handler := range route.Handlers {
			sub, ok := handler.(*caddyhttp.Subroute)
			if !ok || answered(sub.Routes, r) {
				return true
			}
		}
	}
	return false
}

// The packages whose writers change a response on its way: Caddy's header sets fields at the last
// moment, which may say that all the world may keep the refusal for a year, and encode compresses a
// body that is told to be plain.
var (
	headerWriters = reflect.TypeFor[headers.Handler]().PkgPath()
	encodeWriters = reflect.TypeFor[encode.Encode]().PkgPath()
)

// unaltered is the way to the client without those writers. All others stay, since they need to see
// the response: the access log, templates and intercept, which would else write one of their own.
// That Caddy's writers embed an exported wrapper is how they are linked past what is left out; one
// that does not keeps what is behind it.
func unaltered(w http.ResponseWriter) http.ResponseWriter {
	first := past(w)
	for at := first; at != nil; {
		next := behind(at)
		to := past(next)
		if alters(next) {
			if link := wrapperOf(at); link != nil {
				link.ResponseWriter = to
			}
		}
		at = to
	}
	return first
}

// past is the next writer that alters nothing, w itself if it is one.
func past(w http.ResponseWriter) http.ResponseWriter {
	for alters(w) {
		w = behind(w)
	}
	return w
}

// behind is what a writer writes to; nil if it is the last one.
func behind(w http.ResponseWriter) http.ResponseWriter {
	if u, ok := w.(interface{ Unwrap() http.ResponseWriter }); ok {
		return u.Unwrap()
	}
	return nil
}

// alters reports whether the writer changes what passes. The last one never does.
func alters(w http.ResponseWriter) bool {
	t := reflect.TypeOf(w)
	if t == nil || t.Kind() != reflect.Pointer || behind(w) == nil {
		return false
	}
	pkg := t.Elem().PkgPath()
	return pkg == headerWriters || pkg == encodeWriters
}

// wrapperOf is the wrapper that a writer embeds; nil if there is none.
func wrapperOf(w http.ResponseWriter) *caddyhttp.ResponseWriterWrapper {
	v := reflect.ValueOf(w)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		return nil
	}
	field := v.Elem().FieldByName("ResponseWriterWrapper")
	if !field.IsValid() || !field.CanInterface() {
		return nil
	}
	wrapper, _ := field.Interface().(*caddyhttp.ResponseWriterWrapper)
	return wrapper
}

// badCost notes a cost that is none. It is logged once for each rule.
func (v *voice) badCost(rule *rule, warning string) {
	rule.metrics.CountBadCost()
	if !rule.badCost.Swap(true) {
		v.logger.Warn(warning, zap.String("zone", rule.Zone))
	}
}
