package memstore

// The entries of sliding logs and leases, which a slot of fixed size cannot hold.

import "github.com/caddy-sluice/sluice/algorithms"

// history keeps the log of one key: a part of an array that the entries move through as old ones
// expire or are given back and new ones come.
type history struct {
	array   []algorithms.Entry // all of it, len == cap
	from    int
	len     int
	dropped int64 // State.A
}

func (h *history) load(state *algorithms.State) {
	state.A, state.B = h.dropped, 0
	state.Log = h.array[h.from : h.from+h.len]
	if h.len == 0 {
		state.Log = nil
	}
}

// store keeps a log that began as the one that load gave out: a cut of the same array, or a new one
// if it had to grow. The array is at most four times as long as the log; and one that is used up is
// used again from its start, so that a key at a steady rate allocates nothing. Each entry is copied
// at most twice for each one admitted.
func (h *history) store(state *algorithms.State) {
	log := state.Log
	h.dropped, h.len = state.A, len(log)
	switch {
	case len(log) == 0:
		h.array, h.from = nil, 0
	case !h.holds(log):
		h.array, h.from = log[:cap(log)], 0
	default:
		h.from = len(h.array) - cap(log)
	}
	if len(h.array) > 4*len(log) && len(log) > 0 {
		h.array, h.from = append(make([]algorithms.Entry, 0, 2*len(log)), log...), 0
		h.array = h.array[:cap(h.array)]
	} else if h.from+h.len == len(h.array) && 2*h.from >= h.len && h.from > 0 {
		copy(h.array, log)
		h.from = 0
	}
}

// holds reports whether the log lies in the array: then both end at the same place.
func (h *history) holds(log []algorithms.Entry) bool {
	return len(h.array) > 0 && &log[:cap(log)][cap(log)-1] == &h.array[len(h.array)-1]
}
