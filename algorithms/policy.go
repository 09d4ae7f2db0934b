package algorithms

import (
	"errors"
	"fmt"
	"time"
)

// Algorithm names how a policy counts. The zero value is not an algorithm.
type Algorithm uint8

// The classic algorithms. Each constant's text form is its name in the configuration.
const (
	// FixedWindow counts units in windows aligned to the Unix epoch. Up to 2·quota can pass within
	// one window's length around an edge.
	FixedWindow Algorithm = iota + 1
	// SlidingLog remembers every admitted request and is exact. Its memory grows with the quota in
	// use.
	SlidingLog
	// SlidingWindow weighs the previous window's count by its overlap with the sliding one. At most
	// 2·quota−1 units pass within one window's length, quota−1 per window under saturation.
	SlidingWindow
	// TokenBucket admits Burst units at once from idle and refills at quota per window (also known
	// as GCRA).
	TokenBucket
	// LeakyBucket is the leaky bucket: arithmetically a token bucket whose capacity is small. As a
	// meter it polices; with a Queue it shapes. Package leaky builds its policies in the terms that
	// NGINX operators know.
	LeakyBucket
	// Concurrency counts units in flight. A unit is a lease: it ends when it is given back, or
	// after Window unless it is renewed. Leases of one moment are interchangeable, so whoever holds
	// one must give it back once; after a clock stepped back by more than Window they have lost
	// their moments, and end by time alone. It is no algorithm that a limit per window could
	// choose, so [ParseAlgorithm] does not know it.
	Concurrency
)

var algorithmNames = [...]string{
	FixedWindow: "fixed_window", SlidingLog: "sliding_log", SlidingWindow: "sliding_window",
	TokenBucket: "token_bucket", LeakyBucket: "leaky_bucket", Concurrency: "concurrency",
}

// AlgorithmNames lists the names that [ParseAlgorithm] knows.
func AlgorithmNames() []string { return append([]string(nil), algorithmNames[1:Concurrency]...) }

// ParseAlgorithm returns the algorithm of that name, or false.
func ParseAlgorithm(name string) (Algorithm, bool) {
	for a := FixedWindow; a < Concurrency; a++ {
		if algorithmNames[a] == name {
			return a, true
		}
	}
	return 0, false
}

// String returns the name used in configuration, logs and metrics.
func (a Algorithm) String() string {
	if int(a) < len(algorithmNames) && a > 0 {
		return algorithmNames[a]
	}
	return fmt.Sprintf("algorithm(%d)", uint8(a))
}

// Policy is a limit as an operator thinks of it.
type Policy struct {
	Algorithm Algorithm
	// Quota is how many units per Window, or in flight, 0 (refuse everything) or more.
	Quota int64
	// Window is a whole number of microseconds, from 1 µs to [MaxWindow]. For Concurrency it is how
	// long a lease lasts that is not renewed.
	Window time.Duration
	// Burst is how many units a bucket admits at once from idle, in total, at least 1.
	// It must be zero for the other algorithms.
	Burst int64
	// Queue makes a leaky bucket shape: of the Burst−1 units above the one in service, the last
	// Queue wait for their slots ([Outcome.Delay]), those before are served at once. It is 0 to
	// Burst−1, and 0 for the other algorithms.
	Queue int64
	// MaxWait is the longest Delay, rounded down to a tick; what would wait longer is refused. 0
	// leaves it to Queue. It needs a Queue.
	MaxWait time.Duration
}

// Space identifies a set of counters: those of one zone under one algorithm and window.
// The quota is not part of it, so configs with different quotas share the counters.
type Space struct {
	Zone      string
	Algorithm Algorithm
	Window    time.Duration
}

// Limit is a compiled policy: integers ready for the kernels. It is immutable after [Compile]
// but for MaxKeys, which the owner may set before first use.
type Limit struct {
	Policy
	Space Space
	// Capacity is the largest cost that can ever pass: the quota, or a bucket's burst.
	Capacity int64
	// MaxKeys bounds how many keys a local store holds for this space; 0 means [DefaultMaxKeys].
	MaxKeys int

	kernel Kernel
	window int64 // µs
	tick   int64 // µs per tick
	ticks  int64 // window in ticks
	num    int64 // meter: the level falls by num per tick
	den    int64 // meter: one unit is den of level
	most   int64 // window: the largest count whose product with ticks is exact
	// meter: the most a level can be, debts included, so that no wait exceeds MaxExact µs
	ceiling int64
	slack   int64 // up to this level a charge is served at once, above it in its slot
	latest  int64 // above this level it would wait longer than MaxWait
}

// Bounds of what can be compiled.
const (
	// MaxExact is the bound that every intermediate stays under: see the package documentation.
	MaxExact = int64(1) << 52
	// MaxWindow keeps every moment that a decision names below MaxExact (about 35 years).
	MaxWindow = time.Duration(1<<50) * time.Microsecond
	// DefaultMaxKeys is how many keys a local store holds for a space unless the limit says
	// otherwise.
	DefaultMaxKeys = 1_000_000
)

// Errors that [Compile] wraps, with the value that was wrong and what would be right.
var (
	ErrAlgorithm = errors.New("unknown algorithm")
	ErrQuota     = errors.New("quota out of range")
	ErrWindow    = errors.New("window out of range")
	ErrBurst     = errors.New("burst out of range")
	ErrQueue     = errors.New("queue out of range")
	ErrInexact   = errors.New("limit cannot be counted exactly")
)

// Compile turns a policy of a zone into a Limit, or says what is wrong with it.
func Compile(zone string, p Policy) (*Limit, error) {
	if p.Algorithm.Kernel() == 0 {
		return nil, fmt.Errorf("%w: %v, want one of %v", ErrAlgorithm, p.Algorithm, AlgorithmNames())
	}
	if p.Quota < 0 || p.Quota > MaxExact {
		return nil, fmt.Errorf("%w: %d, want 0 to %d", ErrQuota, p.Quota, MaxExact)
	}
	if p.Window < time.Microsecond || p.Window > MaxWindow || p.Window%time.Microsecond != 0 {
		return nil, fmt.Errorf("%w: %v, want whole microseconds from 1µs to %v", ErrWindow, p.Window, MaxWindow)
	}
	l := &Limit{
		Policy:   p,
		Space:    Space{Zone: zone, Algorithm: p.Algorithm, Window: p.Window},
		Capacity: p.Quota,
		kernel:   p.Algorithm.Kernel(),
		window:   p.Window.Microseconds(),
	}
	if err := l.checkBurst(); err != nil {
		return nil, err
	}
	if err := l.checkQueue(); err != nil {
		return nil, err
	}
	if !l.chooseTick() {
		return nil, fmt.Errorf("%w: %d per %v needs numbers above 2^52 at every tick that divides the window; "+
			"use a smaller quota or burst, or a rounder window", ErrInexact, p.Quota, p.Window)
	}
	if l.Algorithm.Bucket() && l.Capacity*l.den/l.num >= int64(MaxWindow/time.Microsecond)/l.tick {
		return nil, fmt.Errorf("%w: %d, which takes more than %v to refill at %d per %v",
			ErrBurst, p.Burst, MaxWindow, p.Quota, p.Window)
	}
	l.boundQueue()
	return l, nil
}

func (l *Limit) checkBurst() error {
	switch {
	case !l.Algorithm.Bucket() && l.Burst != 0:
		return fmt.Errorf("%w: %d, but %v has no burst; use token_bucket or leaky_bucket", ErrBurst, l.Burst, l.Algorithm)
	case l.Algorithm.Bucket() && (l.Burst < 1 || l.Burst > MaxExact) && l.Quota > 0:
		return fmt.Errorf("%w: %d, want 1 to %d", ErrBurst, l.Burst, MaxExact)
	case l.Algorithm.Bucket() && l.Quota > 0:
		l.Capacity = l.Burst
	}
	return nil
}

func (l *Limit) checkQueue() error {
	switch {
	case l.Queue == 0 && l.MaxWait == 0:
		return nil
	case l.Algorithm != LeakyBucket:
		return fmt.Errorf("%w: %d waiting, but %v has no queue; use leaky_bucket", ErrQueue, l.Queue, l.Algorithm)
	case l.Queue < 1 || l.Queue >= l.Burst:
		return fmt.Errorf("%w: %d waiting of a burst of %d, want 1 to %d", ErrQueue, l.Queue, l.Burst, l.Burst-1)
	case l.MaxWait < 0 || l.MaxWait > MaxWindow || l.MaxWait%time.Microsecond != 0:
		return fmt.Errorf("%w: the longest wait is %v, want whole microseconds up to %v", ErrQueue, l.MaxWait, MaxWindow)
	}
	return nil
}

// boundQueue says between which levels a charge waits: without a queue above the highest, which
// none exceeds.
func (l *Limit) boundQueue() {
	l.slack, l.latest = MaxExact, MaxExact
	if l.Queue == 0 || l.Quota == 0 {
		return
	}
	l.slack = (l.Capacity - 1 - l.Queue) * l.den
	if ticks := l.MaxWait.Microseconds() / l.tick; l.MaxWait > 0 && ticks <= (MaxExact-l.slack)/l.num {
		l.latest = l.slack + ticks*l.num
	}
}

// chooseTick takes the finest tick at which the kernel's largest product is exact.
func (l *Limit) chooseTick() bool {
	const coarsest = 1_000_000_000 // µs; ticks beyond this would be felt
	for tick := int64(1); tick <= coarsest && l.window%tick == 0; tick *= 10 {
		l.tick, l.ticks = tick, l.window/tick
		switch l.kernel {
		case Meter:
			// Reduced, because 100 per minute needs no more precision than 5 per 3 seconds.
			g := gcd(l.Quota, l.ticks)
			l.num, l.den = l.Quota/g, l.ticks/g
			if l.Quota == 0 {
				l.num, l.den = 1, 1
			}
			l.ceiling = MaxExact
			if l.num < tick {
				l.ceiling = MaxExact / tick * l.num
			}
			if l.den <= MaxExact/max(l.Capacity, 1) {
				return true
			}
		case Sliding:
			l.most = MaxExact / l.ticks
			if l.Quota <= l.most {
				return true
			}
		case Fixed, Log, Leases: // no products
			return true
		default:
			panic(l.kernel.unknown())
		}
	}
	return false
}

// Refill is how long an empty counter takes to offer its whole capacity: the window, or for a
// bucket burst·window/quota, rounded up to a tick. It is what a client reads as the policy's
// window.
func (l *Limit) Refill() time.Duration {
	if !l.Algorithm.Bucket() || l.Quota == 0 {
		return l.Window
	}
	return time.Duration(ceilDiv(l.Capacity*l.den, l.num)*l.tick) * time.Microsecond
}

// Interval is the time that a bucket takes to lose a number of units, rounded down to a tick; 0 for
// the other algorithms.
func (l *Limit) Interval(units int64) time.Duration {
	if !l.Algorithm.Bucket() {
		return 0
	}
	return time.Duration(min(units, l.Capacity)*l.den/l.num*l.tick) * time.Microsecond
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// ceilDiv is ceil(a/b) for a ≥ 0, b > 0.
func ceilDiv(a, b int64) int64 { return (a + b - 1) / b }
