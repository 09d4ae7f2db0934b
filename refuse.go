package sluice

// What stands between a refusal and the client.

import (
	"net/http"
	"reflect"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/encode"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
)

// The packages whose writers change a response on its way: Caddy's header sets fields at the last moment, which may say that
// all the world may keep the refusal for a year, and encode compresses a body that is told to be plain.
var (
	headerWriters = reflect.TypeFor[headers.Handler]().PkgPath()
	encodeWriters = reflect.TypeFor[encode.Encode]().PkgPath()
)

// unaltered is the way to the client without those writers. All others stay, since they need to see the response: the access log,
// templates and intercept, which would else write one of their own. That Caddy's writers embed an exported wrapper is how
// they are linked past what is left out; one that does not keeps what is behind it.
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
