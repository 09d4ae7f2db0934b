package main

// How one scenario is measured: the requests of a batch are made outside of the measured time, and
// processors that measure together begin each batch together.

import (
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// limiter is a limiter that is ready to decide.
type limiter interface {
	// worker returns what one goroutine uses.
	worker() worker
}

// worker decides on the requests of a batch. prepare is not measured.
type worker interface {
	// batch is how many requests it likes to have prepared: few enough to stay in the processor's
	// cache, as a request that was just read does, and enough for processors to get into one
	// another's way.
	batch() int
	prepare(slot int, key string)
	// decide reports whether the request passed.
	decide(slot int) bool
}

const maxBatch = 512

// stride makes neighbours in time no neighbours in memory. It is coprime to the numbers of keys.
const stride = 7919

func measure(c scenario, length time.Duration) (r result) {
	subject := find(c.Subject)
	keys := make([]string, c.Keys)
	for i := range keys {
		keys[i] = "10." + strconv.Itoa(i>>16) + "." + strconv.Itoa(i>>8&255) + "." + strconv.Itoa(i&255)
	}
	if c.Keys == sizes[len(sizes)-1].keys && !c.Refuse {
		r.Bytes, r.Objects = memory(subject, keys)
	}
	l := subject.limiter(c.Refuse)
	fill(l, keys)
	runtime.GC()
	for i := range r.NS {
		r.NS[i] = speed(l, keys, c.Refuse, i+1, length)
	}
	r.Allocs = allocations(l, keys)
	return r
}

// fill uses every key once: enough to refuse the next time, if the limiter is to refuse.
func fill(l limiter, keys []string) {
	w := l.worker()
	for _, k := range keys {
		w.prepare(0, k)
		w.decide(0)
	}
}

// speed returns the nanoseconds per decision, all processors together. It is that of the median
// batch, which a machine with other work on it did not interrupt; a batch lasts from the first
// processor's start to the last one's end.
func speed(l limiter, keys []string, refuse bool, processors int, length time.Duration) float64 {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(processors))
	var wg sync.WaitGroup
	var together barrier
	spans := make([][]span, processors)
	epoch := time.Now()
	size := l.worker().batch()
	for p := range processors {
		w := l.worker()
		wg.Go(func() {
			var spent time.Duration
			for next := p * len(keys) / 2; ; {
				for i := range w.batch() {
					next = (next + stride) % len(keys)
					w.prepare(i, keys[next])
				}
				if together.wait(processors, spent >= length) {
					break
				}
				s := span{from: time.Since(epoch)}
				decide(w, refuse)
				s.to = time.Since(epoch)
				spans[p] = append(spans[p], s)
				spent += s.to - s.from
			}
		})
	}
	wg.Wait()
	batches := make([]time.Duration, len(spans[0]))
	for i := range batches {
		all := spans[0][i]
		for p := range spans {
			all.from, all.to = min(all.from, spans[p][i].from), max(all.to, spans[p][i].to)
		}
		batches[i] = all.to - all.from
	}
	slices.Sort(batches)
	return float64(batches[len(batches)/2]) / float64(size*processors)
}

// span is when a processor worked on a batch.
type span struct{ from, to time.Duration }

func decide(w worker, refuse bool) {
	for i := range w.batch() {
		if w.decide(i) == refuse {
			panic(fmt.Sprintf("a request passed: %v, want %v", !refuse, refuse))
		}
	}
}

// barrier lets goroutines begin together. They spin, because waking one up takes as long as many
// decisions.
type barrier struct {
	arrived atomic.Int64
	last    atomic.Int64 // the arrival that completes the last round; 0 before that is known
}

// wait reports whether any of them said, on arriving at this round or an earlier one, that it is
// done.
func (b *barrier) wait(n int, done bool) bool {
	round := (b.arrived.Load()/int64(n) + 1) * int64(n)
	if done {
		b.last.CompareAndSwap(0, round)
	}
	b.arrived.Add(1)
	for spins := 0; b.arrived.Load() < round; spins++ {
		if spins > 100_000 { // whoever is missing needs this processor
			runtime.Gosched()
		}
	}
	last := b.last.Load()
	return last > 0 && last <= round
}

func allocations(l limiter, keys []string) float64 {
	w := l.worker()
	for i := range w.batch() {
		w.prepare(i, keys[i*stride%len(keys)])
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for i := range w.batch() {
		w.decide(i)
	}
	runtime.ReadMemStats(&after)
	return float64(after.Mallocs-before.Mallocs) / float64(w.batch())
}

// memory is what a key costs at 100 per minute: bytes and objects.
func memory(s subject, keys []string) (bytes, objects float64) {
	l := s.hundred()
	fill(l, keys[:1])
	before := heap()
	// The keys are made anew: a limiter that keeps them is to pay for them, and one that does not
	// is not.
	w := l.worker()
	for i := range keys {
		w.prepare(0, string(append([]byte(nil), keys[i]...)))
		w.decide(0)
	}
	w.prepare(0, keys[0])
	after := heap()
	n := float64(len(keys))
	bytes, objects = float64(after.HeapAlloc-before.HeapAlloc)/n, float64(after.HeapObjects-before.HeapObjects)/n
	runtime.KeepAlive(l)
	return bytes, objects
}

func heap() (m runtime.MemStats) {
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m
}
