// Package redisstore is the shared store: any number of instances apply one limit, exactly, through
// Redis.
//
// Every decision is made inside Redis by one script, apply.lua, on Redis's own clock. The callers
// that wait share one script call, each batch all-or-none on its own, so that a busy server pays
// one round trip for many decisions; a caller alone is never held back to wait for company. A key
// that is known to be refused is refused here, without Redis, until the moment it was told to wait
// for.
//
// # Keys
//
// A counter is one Redis key: prefix, zone, algorithm, window in microseconds, and 128 bits of
// SHA-256 of the rest, 22 characters however long the client's key is. Every key has a TTL, at
// least a minute beyond its use.
//
// # Failure
//
// A decision waits at most [Options.Timeout], queueing and dialling included. What Redis did not
// answer in time may have been counted there and, by a caller that then counts locally, once more:
// twice at worst, never not at all. Only what certainly executed nothing is tried again. After
// failures the store answers at once with an [*Error], while one probe at a time looks for Redis's
// return.
//
// # Cluster and Ring
//
// Charges of one batch may live on different nodes. They are decided in parallel, one call to each
// node, and when one part refuses, what the others took is given back: for that moment, about a
// round trip, other clients see those units as taken. A prefix with a hash tag, such as {limits},
// keeps everything on one node.
package redisstore
