package algorithms

import "fmt"

// Kernel is how a state is read and charged; algorithms that differ in their numbers only share
// one. The numbers are those that stores use which decide elsewhere.
type Kernel uint8

// The kernels. The zero value is none: [Compile] refuses an algorithm that has none, and a switch
// over kernels ends in a panic instead of in one of them, so that an algorithm which was added by
// half fails at its first use.
const (
	// Leases is a log whose entries are given back in any order.
	Leases Kernel = iota + 1
	// Fixed counts the current window.
	Fixed
	// Log keeps each moment at which units were admitted.
	Log
	// Sliding weighs two windows.
	Sliding
	// Meter drains a level.
	Meter
)

var kernels = [len(algorithmNames)]Kernel{
	FixedWindow: Fixed, SlidingLog: Log, SlidingWindow: Sliding, TokenBucket: Meter, LeakyBucket: Meter, Concurrency: Leases,
}

// Kernel returns the algorithm's kernel, 0 if it has none.
func (a Algorithm) Kernel() Kernel {
	if int(a) < len(kernels) {
		return kernels[a]
	}
	return 0
}

// Bucket reports whether the algorithm is a bucket, which has a burst.
func (a Algorithm) Bucket() bool { return a.Kernel() == Meter }

// Log reports whether the algorithm keeps entries, by which its state has no constant size.
func (a Algorithm) Log() bool { return a.Kernel() == Log || a.Kernel() == Leases }

// unknown is the panic of a switch that lacks a kernel.
func (k Kernel) unknown() string { return fmt.Sprintf("algorithms: kernel %d is not handled here", k) }
