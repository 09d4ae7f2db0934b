package algorithms

import (
	"testing"
	"time"
)

// An algorithm that was added by half fails at its first use, and is not counted as another.
func TestUnknownKernelFailsLoudly(t *testing.T) {
	for _, a := range []Algorithm{0, Concurrency + 1, 255} {
		if l, err := Compile("z", Policy{Algorithm: a, Quota: 1, Window: time.Second}); err == nil {
			t.Errorf("%v compiles to %+v", a, l)
		}
	}
	const lacking = Meter + 1
	l := newSingle(t, Policy{Algorithm: FixedWindow, Quota: 1, Window: time.Second}).l
	l.kernel = lacking
	for name, use := range map[string]func(){
		"Decide": func() { Decide(1, []Charge{{Key: "k", Limit: l, Cost: 1}}, []*Counter{{}}, make([]Outcome, 1)) },
		"Idle":   func() { l.Idle(State{}, 1) },
		"Used":   func() { l.Used(State{}, 1) },
		"idle":   func() { l.idle(&Counter{}) },
		"used":   func() { l.used(&Counter{}) },
		"wait":   func() { l.wait(&Counter{}, 1, 1) },
		"anchor": func() { l.anchor(&Counter{}, 1) },
		"take":   func() { l.take(&Counter{}, &Charge{Cost: 1}) },
		"back":   func() { l.take(&Counter{}, &Charge{Cost: -1}) },
		"tick":   func() { l.chooseTick() },
	} {
		func() {
			defer func() {
				if got := recover(); got != lacking.unknown() {
					t.Errorf("%s with an unknown kernel: %v", name, got)
				}
			}()
			use()
		}()
	}
}

// Every algorithm that has a name has a kernel, and the other way round.
func TestEveryAlgorithmHasAKernel(t *testing.T) {
	for a := range Algorithm(len(algorithmNames)) {
		if (algorithmNames[a] == "") != (a.Kernel() == 0) {
			t.Errorf("%v has kernel %d", a, a.Kernel())
		}
	}
}
