package fields

// The memory of one response's values.

import (
	"net/http"
	"slices"
	"strconv"
	"unsafe"
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
