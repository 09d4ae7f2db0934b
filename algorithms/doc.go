// Package algorithms decides: given what a counter holds and the moment, may a request pass, what
// is left, and when is there more? It is pure. It reads no clock, takes no lock and does no I/O, so
// that every store gives the same answer to the same request at the same instant.
//
// # Vocabulary
//
// A policy is a quota over a window under a named algorithm ([Policy]); compiled, it is a [Limit].
// A zone is a named space of counters; a counter ([State]) belongs to one zone, algorithm, window
// and key, never to a quota, so that a changed quota keeps what was used. A request is a batch of
// charges ([Charge]), decided at one instant and committed together or not at all ([Decide]); each
// gets an [Outcome].
//
// # Three kernels
//
//	kernel   state                     serves
//	meter    moment, level             token bucket, leaky bucket, queue
//	window   window start, cur, prev   fixed window, sliding-window counter
//	log      (moment, units) entries   sliding-window log, concurrency
//
// Everything else is a charge on one of them. A refund is a charge below zero that names, as its
// Mark, the window, entry or bucket it was taken from. A peek is a charge that is never committed.
// A cost that is known only after the response is a forced charge. A queue is a meter that answers
// with a delay. A lease is a log entry: taken, given back by its Mark, and renewed by giving it
// back and taking it anew at once, by force; two leases of the same moment are interchangeable. A
// ban ([Ban]) is a meter filled by force for as long as it lasts, and asked by a check, which
// refuses and takes nothing.
//
// # Units
//
// A moment is an int64 of microseconds since the Unix epoch on the store's own clock. Waits inside
// this package are microseconds, outside it time.Duration. Units, quotas and costs are whole
// numbers.
//
// # The 2^52 rule
//
// Redis's Lua computes in doubles: integers are exact to 2^53 and floor(a/b) is exact while a+b ≤
// 2^53. So that the script in redisstore can compute what this package computes, [Compile] keeps
// every intermediate product at or below 2^52. For very long windows with large quotas it measures
// time in a coarser tick (10 µs, 100 µs, …) that divides the window; what no tick makes exact is an
// error. There is no floating point anywhere.
package algorithms
