// Command bench compares sluice with other limiters for Go in one run and prints one Markdown
// table.
//
// Every figure comes from a process of its own, so that no limiter pays for another's heap. The
// processes of a round run one after another in random order, and there are several rounds, because
// on a shared machine times drift by tens of percent.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"strings"
	"time"
)

// scenario is what one process measures.
type scenario struct {
	Subject string
	Keys    int
	Refuse  bool
}

// result is what it says.
type result struct {
	NS      [2]float64 // per decision, with one processor and with two
	Allocs  float64
	Bytes   float64 // per key, for the largest number of keys
	Objects float64
}

var sizes = []struct {
	keys int
	name string
}{{1, "hot key"}, {1000, "1k keys"}, {1_000_000, "1M keys"}}

func main() {
	rounds := flag.Int("rounds", 5, "how often each figure is measured")
	only := flag.String("only", "", "measure only subjects whose name contains this, and go-limiter")
	length := flag.Duration("time", 150*time.Millisecond, "how long one figure is measured")
	profile := flag.String("cpuprofile", "", "with -child: write a profile")
	child := flag.String("child", "", "for the program itself: measure this scenario and print the result")
	flag.Parse()
	if *child != "" {
		measureOne(*child, *length, *profile)
		return
	}
	var scenarios []scenario
	for _, s := range subjects {
		if s.name != baseline && !strings.Contains(s.name, *only) {
			continue
		}
		for _, size := range sizes {
			scenarios = append(scenarios, scenario{s.name, size.keys, false}, scenario{s.name, size.keys, true})
		}
	}
	results := make([]map[scenario]result, *rounds)
	for i := range results {
		results[i] = map[scenario]result{}
		rand.Shuffle(len(scenarios), func(a, b int) { scenarios[a], scenarios[b] = scenarios[b], scenarios[a] })
		for n, c := range scenarios {
			fmt.Fprintf(os.Stderr, "\rround %d of %d: %d of %d  ", i+1, *rounds, n+1, len(scenarios))
			results[i][c] = run(c, *length)
		}
	}
	fmt.Fprintln(os.Stderr)
	printTable(results)
}

// run measures a scenario in a process of its own.
func run(c scenario, length time.Duration) (r result) {
	text, err := json.Marshal(c)
	check(err)
	self, err := os.Executable()
	check(err)
	cmd := exec.Command(self, "-child", string(text), "-time", length.String())
	out, err := cmd.Output()
	if exit, ok := err.(*exec.ExitError); ok { // otherwise what it logs is of no interest
		fmt.Fprintf(os.Stderr, "\n%s: %s\n", text, exit.Stderr)
	}
	check(err)
	check(json.Unmarshal(out, &r))
	return r
}

func measureOne(text string, length time.Duration, profile string) {
	var c scenario
	check(json.Unmarshal([]byte(text), &c))
	if profile != "" {
		f, err := os.Create(profile)
		check(err)
		check(pprof.StartCPUProfile(f))
		defer pprof.StopCPUProfile()
	}
	// Preparing a request for the handler makes ten times the garbage of handling it, and would
	// keep the collector running all the time. A server's heap is larger, and so is the time
	// between its collections. So it runs only when the heap is full, of memory that was used
	// before: a page's first use takes as long as a tenth of a request.
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(3 << 30)
	use(2 << 30)
	check(json.NewEncoder(os.Stdout).Encode(measure(c, length)))
}

// use takes so much memory into use and frees it.
func use(bytes int) {
	const chunk = 1 << 20
	var chunks [][]byte
	for range bytes / chunk {
		b := make([]byte, chunk)
		for i := 0; i < chunk; i += 4096 {
			b[i] = 1
		}
		chunks = append(chunks, b)
	}
	runtime.KeepAlive(chunks)
	chunks = nil
	runtime.GC()
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
