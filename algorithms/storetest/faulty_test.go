package storetest

// Is the suite able to fail? Every fault that a store might have is built into one here, and Run
// must find it.

import (
	"context"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

var faults = []string{
	"none", // the control: without a fault the suite passes
	"charges one by one", "commits a refused batch", "commits a peek", "forgets re-anchoring", "no sums",
	"lost updates", "ignores the zone", "ignores the algorithm", "ignores the window", "counts the quota in",
	"truncates keys", "joins zone and key", "keeps the caller's key", "expires after the window", "milliseconds",
	"forgets refunds", "refunds to any window", "reads a wrong clock", "answers late", "ignores force", "no retry",
	"no delay", "delays a refusal", "gives back any slot", "commits a check", "ignores a check", "waits for leases", "leases for good",
}

// faulty is the reference store with one fault.
type faulty struct {
	fault string
	clock *Clock
	mu    sync.Mutex
	kept  map[counterKey]algorithms.State
	until map[counterKey]int64
}

func (f *faulty) Close() error { return nil }

func (f *faulty) is(fault string) bool { return f.fault == fault }

func (f *faulty) Apply(_ context.Context, charges []algorithms.Charge, out []algorithms.Outcome) error {
	if f.is("charges one by one") {
		for i := range charges {
			f.apply(charges[i:i+1], out[i:])
		}
		return nil
	}
	f.apply(append([]algorithms.Charge(nil), charges...), out)
	return nil
}

func (f *faulty) key(c algorithms.Charge) counterKey {
	k := counterKey{c.Limit.Space, c.Key}
	switch f.fault {
	case "ignores the zone":
		k.space.Zone = ""
	case "ignores the algorithm":
		k.space.Algorithm = 0
	case "ignores the window":
		k.space.Window = 0
	case "counts the quota in":
		k.space.Zone += time.Duration(c.Limit.Quota).String()
	case "truncates keys":
		k.key = k.key[:min(len(k.key), 4096)]
	case "joins zone and key":
		k.space.Zone, k.key = "", k.space.Zone+k.key
	}
	return k
}

func (f *faulty) apply(charges []algorithms.Charge, out []algorithms.Outcome) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.clock.Now()
	switch f.fault {
	case "milliseconds":
		now -= now % 1000
	case "reads a wrong clock":
		now = max(now, Start)
	}
	for i := range charges {
		f.spoil(&charges[i])
	}
	opened, counters := map[counterKey]*algorithms.Counter{}, make([]*algorithms.Counter, len(charges))
	for i := range charges {
		k := f.key(charges[i])
		if opened[k] == nil || f.is("no sums") {
			state := f.kept[k]
			if f.is("expires after the window") && now > f.until[k] {
				state = algorithms.State{}
			}
			state.Log = append([]algorithms.Entry(nil), state.Log...)
			opened[k] = &algorithms.Counter{State: state}
		}
		counters[i] = opened[k]
	}
	if f.is("lost updates") {
		f.mu.Unlock()
		runtime.Gosched()
		f.mu.Lock()
	}
	committed := algorithms.Decide(now, charges, counters, out)
	if !committed && f.is("commits a refused batch") {
		for i := range charges {
			charges[i].DryRun = true
		}
		committed = algorithms.Decide(now, charges, counters, make([]algorithms.Outcome, len(charges)))
	}
	for i, c := range charges {
		k := f.key(c)
		if !f.is("keeps the caller's key") {
			k.key = strings.Clone(k.key)
		}
		if committed || (counters[i].Anchored && !f.is("forgets re-anchoring")) {
			f.kept[k] = counters[i].State
			f.until[k] = now + c.Limit.Window.Microseconds()
		}
		switch {
		case f.is("answers late") && i > 0:
			out[i].Remaining = out[0].Remaining
		case f.is("no retry") && out[i].Retry == algorithms.Never:
			out[i].Retry = c.Limit.Window
		case f.is("no delay"):
			out[i].Delay = 0
		case f.is("delays a refusal") && c.Limit.Queue > 0 && !out[i].OK:
			out[i].Delay = out[i].Retry
		case f.is("waits for leases") && out[i].Retry == algorithms.Unknown:
			out[i].Retry = c.Limit.Window
		}
	}
}

func (f *faulty) spoil(c *algorithms.Charge) {
	switch {
	case f.is("commits a peek"):
		c.Peek = false
	case f.is("forgets refunds") && c.Cost < 0:
		c.Cost = 0
	case f.is("refunds to any window") && c.Cost < 0:
		now := f.clock.Now()
		c.Mark = now - now%c.Limit.Window.Microseconds()
	case f.is("ignores force"):
		c.Force = false
	case f.is("gives back any slot"):
		c.Force = c.Force || c.Cost < 0
	case f.is("commits a check"):
		c.Check = false
	case f.is("ignores a check") && c.Check:
		c.Check, c.Peek = false, true
	case f.is("leases for good") && c.Limit.Algorithm == algorithms.Concurrency:
		space := c.Limit.Space
		c.Limit, _ = algorithms.Compile(space.Zone, algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: c.Limit.Quota, Window: algorithms.MaxWindow})
		c.Limit.Space = space
	}
}

const faultVariable = "STORETEST_FAULT"

// TestFaulty is run by TestRunFindsFaults, in a process of its own, with the fault in the
// environment.
func TestFaulty(t *testing.T) {
	fault := os.Getenv(faultVariable)
	if fault == "" {
		return
	}
	Run(t, func(_ *testing.T, clock *Clock) algorithms.Store {
		return &faulty{fault: fault, clock: clock, kept: map[counterKey]algorithms.State{}, until: map[counterKey]int64{}}
	})
}

func TestRunFindsFaults(t *testing.T) {
	for _, fault := range faults {
		t.Run(fault, func(t *testing.T) {
			cmd := exec.Command(os.Args[0], "-test.run=^TestFaulty$", "-test.failfast", "-test.timeout=60s")
			cmd.Env = append(os.Environ(), faultVariable+"="+fault)
			output, err := cmd.CombinedOutput()
			if failed := err != nil; failed != (fault != "none") {
				t.Errorf("failed %t: %v\n%s", failed, err, output)
			}
			if strings.Contains(string(output), "panic:") {
				t.Errorf("found by a panic, not by a test:\n%s", output)
			}
		})
	}
}
