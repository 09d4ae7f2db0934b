package main

// The table: a row for each subject, with its medians and the medians of its ratios to the baseline.

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
)

func printTable(results []map[scenario]result) {
	fmt.Printf("%d processors, %s, medians of %d rounds. Cells: nanoseconds per decision with GOMAXPROCS 1 / 2 (ratio to %s).\n\n",
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
			ns[p] = median(results, func(r map[scenario]result) float64 { return r[scenario{name, size.keys, refuse}].NS[p] })
			ratio[p] = median(results, func(r map[scenario]result) float64 {
				return r[scenario{name, size.keys, refuse}].NS[p] / r[scenario{baseline, size.keys, refuse}].NS[p]
			})
		}
		cells = append(cells, fmt.Sprintf("%.0f / %.0f (%.2f / %.2f)", ns[0], ns[1], ratio[0], ratio[1]))
	}
	of := func(value func(result) float64) float64 {
		return median(results, func(r map[scenario]result) float64 {
			return value(r[scenario{name, sizes[len(sizes)-1].keys, refuse}])
		})
	}
	cells = append(cells, fmt.Sprintf("%.1f", of(func(r result) float64 { return r.Allocs })))
	if refuse {
		return append(cells, "", "")
	}
	return append(cells, fmt.Sprintf("%.0f", of(func(r result) float64 { return r.Bytes })),
		fmt.Sprintf("%.2f", of(func(r result) float64 { return r.Objects })))
}

func median(results []map[scenario]result, value func(map[scenario]result) float64) float64 {
	values := make([]float64, len(results))
	for i := range results {
		values[i] = value(results[i])
	}
	slices.Sort(values)
	n := len(values)
	return (values[(n-1)/2] + values[n/2]) / 2
}
