package main

// The table: a row for each subject, with the least of its rounds and the ratio to the baseline's
// least. Other work on the machine only ever adds: where two processors share a core, a neighbour
// makes a whole round slower by three quarters, and the median would tell how often there was one.

import (
	"fmt"
	"math"
	"runtime"
	"strings"
)

func printTable(results []map[scenario]result) {
	fmt.Printf("%d processors, %s, the least of %d rounds. Cells: nanoseconds per decision with GOMAXPROCS 1 / 2 (ratio to %s).\n\n",
		runtime.NumCPU(), runtime.Version(), len(results), baseline)
	head, line := []string{"", ""}, []string{"---", "---"}
	for _, size := range sizes {
		head, line = append(head, size.name), append(line, "---")
	}
	fmt.Println(row(append(head, "allocations", "bytes a key", "objects a key")...))
	fmt.Println(row(append(line, "---", "---", "---")...))
	for _, refuse := range []bool{false, true} {
		for _, s := range subjects {
			if _, ok := results[0][scenario{s.name, 1, refuse}]; ok {
				fmt.Println(row(cells(results, s.name, refuse)...))
			}
		}
	}
}

func row(cells ...string) string { return "| " + strings.Join(cells, " | ") + " |" }

func cells(results []map[scenario]result, name string, refuse bool) []string {
	cells := []string{name, map[bool]string{true: "refuse", false: "pass"}[refuse]}
	for _, size := range sizes {
		var ns, ratio [2]float64
		for p := range ns {
			speed := func(r result) float64 { return r.NS[p] }
			ns[p] = least(results, scenario{name, size.keys, refuse}, speed)
			ratio[p] = ns[p] / least(results, scenario{baseline, size.keys, refuse}, speed)
		}
		cells = append(cells, fmt.Sprintf("%.0f / %.0f (%.2f / %.2f)", ns[0], ns[1], ratio[0], ratio[1]))
	}
	of := func(value func(result) float64) float64 {
		return least(results, scenario{name, sizes[len(sizes)-1].keys, refuse}, value)
	}
	cells = append(cells, fmt.Sprintf("%.1f", of(func(r result) float64 { return r.Allocs })))
	if refuse {
		return append(cells, "", "")
	}
	return append(cells, fmt.Sprintf("%.0f", of(func(r result) float64 { return r.Bytes })),
		fmt.Sprintf("%.2f", of(func(r result) float64 { return r.Objects })))
}

func least(results []map[scenario]result, c scenario, value func(result) float64) float64 {
	lowest := math.Inf(1)
	for _, r := range results {
		lowest = min(lowest, value(r[c]))
	}
	return lowest
}
