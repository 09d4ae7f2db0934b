// Package counting gives one answer about a request from all the places where its rules may count:
// this process with its waiting room, a store that several instances share, and this instance's
// share of that while it is down. It knows neither HTTP nor Caddy.
//
// The way of a request: a [Decision] is asked one [Entry] for each rule, [Decision.Decide] fills
// one [Answer] for each, and what a request that passes has to wait for or to give back is its
// [Receipt].
package counting

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/leaky"
	"github.com/caddy-sluice/sluice/memstore"
)

// Place is where a rule counts. It is fixed when the rule is loaded.
type Place uint8

// The places, in the order in which a request asks them.
const (
	Local  Place = iota // in this process
	Shared              // in the store that the instances share
)

// IfDown is what becomes of a rule's requests while the shared store does not answer.
type IfDown uint8

// The choices.
const (
	UseShare IfDown = iota // this instance limits them by itself, to its share of the limit
	Allow                  // they pass
	Deny                   // they are refused
)

// By is who answered an entry.
type By uint8

// Who may answer. From ByShare on, the shared store was asked and failed.
const (
	Nobody     By = iota // another place had refused the request before
	ByLocal              // this process
	ByShared             // the shared store
	ByShare              // this process, by its share of the limits
	ByAllowing           // nobody, and the request passes as far as the rule is concerned
	ByDenying            // nobody, and the request is refused for that
)

// StoreFailed reports whether the shared store was asked and failed.
func (b By) StoreFailed() bool { return b >= ByShare }

// Reserves is what may become of the units that a request took, once there is a response.
type Reserves uint8

// The choices.
const (
	ForGood  Reserves = iota // they stay taken
	ByStatus                 // they are given back if the response does not count
	ByCharge                 // they are corrected to what the response says that it cost
)

// Entry is what one rule asks about one request, under one key.
type Entry struct {
	Key    string // valid until the decision's next Begin
	Limits []*algorithms.Limit
	Ban    *Ban // nil: the key cannot be banned
	Place  Place
	IfDown IfDown
	Cost   int64
	Held   []int64 // for each limit what the request holds of its counter already; nil: nothing
	DryRun bool
	// Reserves is what a response changes of what was taken.
	Reserves Reserves
	// Keeps: a request that passes may have to wait, or has something to give back when it ends.
	Keeps bool
}

// Answer is what an entry was told. It is valid until the decision's next Begin.
type Answer struct {
	Limits   []*algorithms.Limit // those that decided: the entry's, or this instance's shares of them
	Outcomes []algorithms.Outcome
	Ban      *algorithms.Outcome // whether the key is banned; nil: not asked
	Pending  int64               // how many requests hold units of the key that they may yet give back
	By       By

	first, ban, pending int // where its charges are; ban and pending are -1 where there is none
}

// Banned reports whether the key is banned.
func (a *Answer) Banned() bool { return a.Ban != nil && !a.Ban.OK }

// Delay is how long the rule holds the request.
func (a *Answer) Delay() (longest time.Duration) {
	for i := range a.Outcomes {
		longest = max(longest, a.Outcomes[i].Delay)
	}
	return longest
}

// Store is a store that several instances share. It may fail.
type Store interface {
	algorithms.Store
	// Settle applies charges that cannot be refused, in the background.
	Settle(charges ...algorithms.Charge)
	// Hold renews a lease until it is released.
	Hold(limit *algorithms.Limit, key string, mark int64) Lease
	// Books are the receipts of requests under way that hold something of the store's.
	Books() *Books
}

// Lease is a unit in flight that is renewed until it is released.
type Lease interface{ Release() }

// Process is what is counted in this process. It outlives configs, which hand it on to each other.
type Process struct {
	*memstore.Store
	room  *leaky.Room
	now   func() time.Time
	began time.Time
	// bansHere is when the last of the bans ends that only this process knows, in nanoseconds since
	// it began.
	bansHere atomic.Int64
}

// NewProcess returns a process in which nothing is counted yet. The clock tells how long bans last
// that only the process knows, and when requests that wait are served: its seconds must be those of
// timers.
func NewProcess(store *memstore.Store, now func() time.Time) *Process {
	return &Process{Store: store, room: leaky.NewRoom(store, now), now: now, began: now()}
}

// age never steps, as a clock on the wall may.
func (p *Process) age() time.Duration { return p.now().Sub(p.began) }

// Counters are all that the rules of one config count in.
type Counters struct {
	*Process
	Shared Store      // nil: every rule counts in this process
	Fleet  func() int // the number of instances that share it, at least 1

	shares atomic.Pointer[shares]
}

// Look asks what a charge would be told now. It takes nothing.
func (c *Counters) Look(place Place, limit *algorithms.Limit, key string, cost int64) (out algorithms.Outcome, err error) {
	look, outs := [1]algorithms.Charge{{Key: key, Limit: limit, Cost: cost, Peek: true}}, [1]algorithms.Outcome{}
	err = c.at(place).Apply(context.Background(), look[:], outs[:])
	return outs[0], err
}

func (c *Counters) at(place Place) algorithms.Store {
	if place == Shared {
		return c.Shared
	}
	return c.Process
}
