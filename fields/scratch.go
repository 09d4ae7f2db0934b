package fields

// The memory of one response's values.

import (
	"net/http"
	"slices"
	"strconv"
	"unsafe"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Scratch holds the values of one response. It belongs inside whatever the caller allocates for the
// request. The zero value is ready. It must not be copied once used, reused, or put into a pool:
// the header map refers to it for as long as the response lives.
type Scratch struct {
	// values backs the slices in the header map: each response has its own, because handlers edit
	// them in place.
	values [3]string
	array  [48]byte               // all texts, one after the other; never rewritten
	text   uint8                  // how much of the array is written
	used   uint32                 // how many values are
	more   *Values                // behind those
	ones   *[len(oneValues)]shown // nil until a family of one value is written
}

// Values is room for what only refusals need, which a caller that knows of one allocates together
// with the Scratch.
type Values [4]string

// Lend gives the scratch room for the values of a refusal.
func (sc *Scratch) Lend(room *Values) { sc.more = room }

// shown is what a family of one value says, by which a later handler of the request knows it from
// what others set.
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

// shown is what an earlier handler of the request wrote; nil if it did not, or not what stands
// there now.
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

// start begins a text: to append to, and to finish.
func (sc *Scratch) start() []byte { return sc.array[sc.text:sc.text] }

// finish returns a text that was begun as a string over the same bytes.
func (sc *Scratch) finish(b []byte) string {
	if len(b) == 0 {
		return ""
	}
	if int(sc.text) < len(sc.array) && &b[0] == &sc.array[sc.text] { // else it did not fit, and has an array of its own
		sc.text += uint8(len(b))
	}
	// Safe because these bytes are never written again: the next text begins behind them. It saves
	// an allocation on every response.
	return unsafe.String(unsafe.SliceData(b), len(b))
}

func (sc *Scratch) number(n int64) string {
	return sc.finish(strconv.AppendInt(sc.start(), clamp(n), 10))
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
	// Full slice expressions: an append by someone else must move away, not write into the next
	// field.
	i := int(sc.used)
	if sc.used++; i < len(sc.values) {
		sc.values[i] = value
		h[key] = sc.values[i : i+1 : i+1]
		return
	}
	if i -= len(sc.values); i%len(sc.more) == 0 && (sc.more == nil || i > 0) {
		sc.more = new(Values)
	}
	i %= len(sc.more)
	sc.more[i] = value
	h[key] = sc.more[i : i+1 : i+1]
}
