// JSON → config. Values of another shape are answered with their path and the shape that is right,
// which the standard library's errors do not say.

package caddyfile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// decode reads b strictly, as Caddy reads all modules. Errors quote values only where they cannot
// be secret.
func decode(b []byte, into any, quote bool) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	err := dec.Decode(into)
	if err == nil || !json.Valid(b) {
		return err
	}
	if m := findMisfit("", reflect.TypeOf(into).Elem(), b); m != nil {
		return m.error(quote)
	}
	return err
}

// misfit is a value of the wrong shape.
type misfit struct {
	path string
	kind reflect.Type
	raw  json.RawMessage
}

// findMisfit finds the innermost value that does not fit.
func findMisfit(path string, t reflect.Type, raw json.RawMessage) *misfit {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if json.Unmarshal(raw, reflect.New(t).Interface()) == nil {
		return nil
	}
	var fields map[string]json.RawMessage
	var list []json.RawMessage
	switch {
	case (t.Kind() == reflect.Struct || t.Kind() == reflect.Map) && json.Unmarshal(raw, &fields) == nil:
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			if inner := member(t, name); inner != nil {
				if m := findMisfit(strings.TrimPrefix(path+"."+name, "."), inner, fields[name]); m != nil {
					return m
				}
			}
		}
	case t.Kind() == reflect.Slice && json.Unmarshal(raw, &list) == nil:
		for i := range list {
			if m := findMisfit(path+"["+strconv.Itoa(i)+"]", t.Elem(), list[i]); m != nil {
				return m
			}
		}
	}
	return &misfit{path, t, raw}
}

// member is the type of what has the name in an object of type t, or nil.
func member(t reflect.Type, name string) reflect.Type {
	if t.Kind() == reflect.Map {
		return t.Elem()
	}
	for _, f := range reflect.VisibleFields(t) {
		if tag, _, _ := strings.Cut(f.Tag.Get("json"), ","); tag == name {
			return f.Type
		}
	}
	return nil
}

func (m *misfit) error(quote bool) error {
	value := "an object"
	switch raw := bytes.TrimSpace(m.raw); {
	case raw[0] == '{':
	case raw[0] == '[':
		value = "a list"
	case quote:
		value = string(raw)
	case raw[0] == '"':
		value = "a text"
	case raw[0] == 't' || raw[0] == 'f':
		value = "true or false"
	default:
		value = "a number"
	}
	return fmt.Errorf("%s: %s; want %s", m.path, value, shape(m.kind))
}

// shape is how a type is written in JSON.
func shape(t reflect.Type) string {
	switch t {
	case reflect.TypeFor[Number]():
		return `a number, or a text such as "{env.LIMIT}"`
	case reflect.TypeFor[Texts]():
		return "a text or a list of texts"
	case reflect.TypeFor[caddy.Duration]():
		return `a duration such as "1m"`
	case reflect.TypeFor[caddyhttp.RawMatcherSets]():
		return `a list of matcher sets, such as [{"path": ["/x"]}]`
	case reflect.TypeFor[Tier]():
		return `an object such as {"limit": "100/1m"} or {"unlimited": true}`
	case reflect.TypeFor[TierValue]():
		return `an object such as {"value": "pro", "limit": "100/1m"}`
	case reflect.TypeFor[Zone]():
		return `an object such as {"limit": "100/1m"}`
	case reflect.TypeFor[Statuses]():
		return `an object such as {"status": ["401", "4xx"]}`
	}
	switch t.Kind() {
	case reflect.String:
		return "a text"
	case reflect.Bool:
		return "true or false"
	case reflect.Slice:
		return "a list"
	}
	return "an object"
}
