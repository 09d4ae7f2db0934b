package sluice

// What lives as long as the process.

import (
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/memstore"
)

// processes holds what is counted in this process, under the clock that it reads. It outlives
// configs: a reload acquires it, and opens its zones, before the old config lets go of them, so
// counts are kept and shared by name.
var processes = caddy.NewUsagePool()

// clock tells the time of configs that are loaded from now on: µs since the Unix epoch; nil: the
// time of day.
var clock *func() int64

// process is what is counted under one clock.
type process struct{ *counting.Process }

// Destruct implements caddy.Destructor. Nothing is held but memory.
func (process) Destruct() error { return nil }

// openProcess returns what configs of now count in, and the clock under which to let go of it.
func openProcess() (*counting.Process, *func() int64, error) {
	under := clock
	value, _, err := processes.LoadOrNew(under, func() (caddy.Destructor, error) {
		var options []memstore.Option
		if under != nil {
			options = append(options, memstore.WithClock(*under))
		}
		return process{counting.NewProcess(memstore.New(options...), time.Now)}, nil
	})
	if err != nil {
		return nil, nil, err
	}
	return value.(process).Process, under, nil
}

var processStart = time.Now()

// monotonic is the time since the process started; it never steps.
func monotonic() time.Duration { return time.Since(processStart) }
