package memstore

// Zones by name, shared by whoever opens the name: two configs that run side by side during a
// reload count together.

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Zone is one acquisition of a named set of counters, over all of its spaces. It is safe for
// concurrent use.
type Zone struct {
	store *Store
	name  string
	close sync.Once
}

// Open acquires the zone of that name: whoever opens the same name shares its counters, and they
// live until the last one closes. Opening makes nothing and changes nothing, so a config that is
// later rejected leaves no trace.
func (s *Store) Open(name string) *Zone {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opened[name]++
	return &Zone{store: s, name: name}
}

// Expect tells the zone which limits its keys will be under. Before it is asked about one of them,
// a key that is idle by the others would be forgotten. What is told stays for as long as the
// counters live.
func (z *Zone) Expect(limits ...*algorithms.Limit) {
	for _, l := range limits {
		z.store.bind(l, nil)
	}
}

// Close releases this acquisition; the last one of the name drops the counters. Further calls do
// nothing. A batch that comes after that starts afresh.
func (z *Zone) Close() {
	z.close.Do(func() { z.store.release(z.name) })
}

func (s *Store) release(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// Also while others hold the zone: the limits of the config that closes must not stay in
	// memory.
	s.bound.Store(&map[*algorithms.Limit]*table{})
	if s.opened[name]--; s.opened[name] > 0 {
		return
	}
	delete(s.opened, name)
	maps.DeleteFunc(s.spaces, func(space algorithms.Space, _ *table) bool { return space.Zone == name })
}

func (z *Zone) tables() []*table {
	z.store.mu.Lock()
	defer z.store.mu.Unlock()
	var tables []*table
	for space, t := range z.store.spaces {
		if space.Zone == z.name {
			tables = append(tables, t)
		}
	}
	return tables
}

// Keys returns how many keys the zone holds over all of its spaces, idle ones that are not
// forgotten yet included.
func (z *Zone) Keys() int {
	var n int64
	for _, t := range z.tables() {
		n += t.keys.Load()
	}
	return int(n)
}

// Evictions returns how many keys in use were forgotten to keep a bound. It only grows while the
// zone is open.
func (z *Zone) Evictions() int64 {
	var n int64
	for _, t := range z.tables() {
		n += t.evictions.Load()
	}
	return n
}

// Sweep forgets idle keys and gives their memory back. It holds each lock for some microseconds at
// a time. New keys push idle ones out by themselves; Sweep is for zones that have become quiet.
func (z *Zone) Sweep() {
	for _, t := range z.tables() {
		t.sweep(z.store.clock)
	}
}

// Forget makes the key one that was never seen, in every space of the zone.
func (z *Zone) Forget(key string) {
	for _, t := range z.tables() {
		t.drop(z.store.digest(key))
	}
}

// Spaces lists the spaces that hold or held counters of this zone, in a fixed order. A limit whose
// space is not among them starts afresh.
func (z *Zone) Spaces() []algorithms.Space {
	z.store.mu.Lock()
	defer z.store.mu.Unlock()
	var spaces []algorithms.Space
	for space := range z.store.spaces {
		if space.Zone == z.name {
			spaces = append(spaces, space)
		}
	}
	slices.SortFunc(spaces, func(a, b algorithms.Space) int {
		return cmp.Or(cmp.Compare(a.Algorithm, b.Algorithm), cmp.Compare(a.Window, b.Window))
	})
	return spaces
}
