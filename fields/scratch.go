package fields

// The memory of one response's values.

import (
	"net/http"
	"slices"
	"strconv"
	"unsafe"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Scratch holds the values of one response. It belongs inside whatever the caller allocates for the request.
// The zero value is ready. It must not be copied once used, reused, or put into a pool: the
// header map refers to it for as long as the response lives.
type Scratch struct {
	text []byte // all texts, one after the other; never rewritten
	from int    // where the text being written starts
	used int
	// values backs the slices in the header map: each response has its own, because handlers edit them in place.
	values [5]string
	array  [56]byte
	ones   *[len(oneValues)]shown // nil until a family of one value is written
}

// shown is what a family of one value says, by which a later handler of the request knows it from what others set.
type shown struct {
	name             string
	capacity         int64
	outcome          algorithms.Outcome
	limit, remaining string // as they stand in the header
}

// show notes what a family says.
func (sc *Scratch) show(family int, s shown) {
	if sc.ones == nil {
		sc.ones = new([len(oneValues)]shown)
	}
	sc.ones[family] = s
}

// shown is what an earlier handler of the request wrote; nil if it did not, or not what stands there now.
func (sc *Scratch) shown(h http.Header, family int) *shown {
	if sc.ones == nil {
		return nil
	}
	s, keys := &sc.ones[family], &oneValues[family]
	if !slices.Equal(h[keys.limit], []string{s.limit}) || !slices.Equal(h[keys.remaining], []string{s.remaining}) {
		return nil
	}
	return s
}

// start begins a text.
func (sc *Scratch) start() {
	if sc.text == nil {
		sc.text = sc.array[:0]
	}
	sc.from = len(sc.text)
}

// started reports whether anything was written since start.
func (sc *Scratch) started() bool { return len(sc.text) > sc.from }

// finish returns what was written since start as a string over the same bytes.
func (sc *Scratch) finish() string {
	b := sc.text[sc.from:]
	// Safe because these bytes are never written again: texts are only appended, and when an append moves
	// them to a larger array, the old one stays as it was. It saves an allocation on every response.
	return unsafe.String(unsafe.SliceData(b), len(b))
}

func (sc *Scratch) number(n int64) string {
	sc.start()
	sc.text = strconv.AppendInt(sc.text, clamp(n), 10)
	return sc.finish()
}

// add adds a field line; an empty list means no field.
func (sc *Scratch) add(h http.Header, key, value string) {
	if value == "" {
		return
	}
	if old := h[key]; len(old) > 0 {
		// Clipped, so that whoever shares the slice does not see ours.
		h[key] = append(slices.Clip(old), value)
		return
	}
	if sc.used == len(sc.values) {
		h[key] = []string{value}
		return
	}
	i := sc.used
	sc.used++
	sc.values[i] = value
	// Full slice expression: an append by someone else must move away, not write into the next field.
	h[key] = sc.values[i : i+1 : i+1]
}
