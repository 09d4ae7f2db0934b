package redisstore

// Which server a counter lives on.

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

// open makes the lanes of the mode.
func (s *Store) open(all []endpoint) error {
	switch s.options.Mode {
	case Single, Ring:
		for _, e := range all {
			s.lanes = append(s.lanes, &lane{store: s, node: e.addr, client: s.connect(e)})
		}
	case Sentinel:
		if s.options.MasterName == "" {
			return fmt.Errorf("%w sentinel: no master_name given, want the name that the sentinels know the master by", ErrMode)
		}
		s.lanes = []*lane{{store: s, node: s.options.MasterName, client: s.connectFailover(all)}}
	case Cluster:
		if all[0].db != 0 {
			return fmt.Errorf("%w cluster: db %d, but a cluster has only db 0", ErrMode, all[0].db)
		}
		s.cluster = newCluster(s, all)
		s.background.Go(s.cluster.keepRefreshing)
	default:
		return fmt.Errorf("%w: %q, want %s, %s, %s or %s", ErrMode, s.options.Mode, Single, Sentinel, Cluster, Ring)
	}
	return nil
}

// allLanes are those in use.
func (s *Store) allLanes() []*lane {
	if s.cluster != nil {
		return s.cluster.all()
	}
	return s.lanes
}

// rendezvous picks the server of a ring for a counter: each server gets its even share, and adding
// one moves only that share. A server that is down keeps its counters: moving them would forget
// what was used.
func (s *Store) rendezvous(d digest) *lane {
	var best *lane
	var most uint64
	for _, l := range s.lanes {
		h := fnv.New64a()
		h.Write([]byte(l.node))
		h.Write(d[:])
		score := mix(h.Sum64())
		if best == nil || score > most {
			best, most = l, score
		}
	}
	return best
}

// mix spreads the last bytes over all bits, which FNV does not. Source: the finalizer of
// SplitMix64.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

const (
	refreshEvery = 30 * time.Second
	refreshPause = 100 * time.Millisecond // at least, between two looks at the slots
	retireAfter  = 5 * time.Second        // and two timeouts, a decision and what it gives back: then nobody uses a retired lane any more
	noMaster     = "(slots without a master)"
)

// cluster knows who owns the slots. The road not taken: go-redis's ClusterClient repeats commands
// whose answer was lost, which may count twice, and shares one fate among all nodes.
type cluster struct {
	store  *Store
	first  endpoint
	seeds  []*lane // used until the owners are known; later they are addresses to ask when nobody else answers
	owners [slots]atomic.Pointer[lane]
	look   chan struct{}

	asking sync.Mutex // so that no older answer is adopted after a newer one
	mu     sync.Mutex
	lanes  map[string]*lane
	old    map[*lane]time.Time // retired
}

func newCluster(s *Store, all []endpoint) *cluster {
	c := &cluster{store: s, first: all[0], look: make(chan struct{}, 1), lanes: map[string]*lane{}, old: map[*lane]time.Time{}}
	for _, e := range all {
		c.seeds = append(c.seeds, c.lane(e.addr))
	}
	return c
}

// lane returns the lane to an address.
func (c *cluster) lane(addr string) *lane {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.lanes[addr]
	if l == nil {
		l = c.connect(addr)
		c.lanes[addr] = l
	}
	return l
}

func (c *cluster) connect(addr string) *lane {
	e := c.first
	e.network, e.addr = "tcp", addr
	return &lane{store: c.store, node: addr, client: c.store.connect(e)}
}

// all returns the lanes that are not retired.
func (c *cluster) all() []*lane {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.lanes))
}

// close ends the lanes that were retired at least so long ago.
func (c *cluster) close(after time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for l, since := range c.old {
		if time.Since(since) >= after {
			delete(c.old, l)
			_ = l.client.Close()
		}
	}
}

// owner is the lane to a slot's master. While nobody was asked yet it is a seed, which redirects.
func (c *cluster) owner(slot uint16) *lane {
	if l := c.owners[slot].Load(); l != nil {
		return l
	}
	c.refreshSoon()
	for _, l := range c.seeds {
		if l.blocked() == nil {
			return l
		}
	}
	return c.seeds[0]
}

// moved notes the new owner of a slot.
func (c *cluster) moved(slot uint16, addr string, from *lane) *lane {
	l := c.lane(complete(addr, from))
	c.owners[slot].Store(l)
	c.refreshSoon()
	return l
}

// follow returns where an answer redirects to, or the owner.
func (c *cluster) follow(from *lane, slot uint16, err error) *lane {
	if addr, ok := redis.IsMovedError(err); ok {
		return c.moved(slot, addr, from)
	}
	return c.owner(slot)
}

// complete fills in the host that a server leaves out when it does not know its own name.
func complete(addr string, from *lane) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || (host != "" && host != "?") {
		return addr
	}
	known, _, _ := net.SplitHostPort(from.node)
	return net.JoinHostPort(known, port)
}

// retired reports whether a lane leads to a server that owns nothing any more.
func (c *cluster) retired(l *lane) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lanes[l.node] != l
}

func (c *cluster) refreshSoon() {
	select {
	case c.look <- struct{}{}:
	default:
	}
}

func (c *cluster) keepRefreshing() {
	tick := time.NewTicker(refreshEvery)
	defer tick.Stop()
	for {
		select {
		case <-c.store.ctx.Done():
			return
		case <-c.look:
		case <-tick.C:
		}
		c.refresh()
		if !sleep(c.store.ctx, refreshPause) {
			return
		}
	}
}

// refresh asks the first server that answers who owns the slots: those that are up first, then the
// others, and at last the addresses that were given, where by now somebody else may answer.
func (c *cluster) refresh() {
	c.asking.Lock()
	defer c.asking.Unlock()
	var up, down []*lane
	for _, l := range c.all() {
		if l.blocked() == nil {
			up = append(up, l)
		} else {
			down = append(down, l)
		}
	}
	for _, l := range append(up, down...) {
		if c.ask(l) {
			return
		}
	}
	for _, seed := range c.seeds {
		if c.retired(seed) {
			again := c.connect(seed.node)
			found := c.ask(again)
			_ = again.client.Close()
			if found {
				return
			}
		}
	}
}

// ask adopts what a server knows of the slots, if it answers.
func (c *cluster) ask(l *lane) bool {
	ctx, cancel := context.WithTimeout(c.store.ctx, c.store.options.Timeout)
	defer cancel()
	//lint:ignore SA1019 Redis before 7 and Valkey know this command only
	ranges, err := l.client.ClusterSlots(ctx).Result()
	if err != nil || len(ranges) == 0 {
		return false
	}
	c.adopt(ranges, l)
	return true
}

// adopt makes the owners those of an answer, and retires lanes to servers that own nothing: whether
// they are up is nobody's concern. Slots that nobody owns have a lane of their own, that leads
// nowhere, so that they fail alone.
func (c *cluster) adopt(ranges []redis.ClusterSlot, from *lane) {
	used := map[*lane]bool{}
	var owned [slots]bool
	for _, r := range ranges {
		if len(r.Nodes) == 0 {
			continue
		}
		l := c.lane(complete(r.Nodes[0].Addr, from))
		used[l] = true
		for i := max(0, r.Start); i <= min(r.End, slots-1); i++ {
			c.owners[i].Store(l)
			owned[i] = true
		}
	}
	for i := range owned {
		if !owned[i] {
			l := c.lane(noMaster)
			l.doubt() // nobody shall wait for it
			used[l] = true
			c.owners[i].Store(l)
		}
	}
	for _, l := range c.all() {
		if !used[l] {
			c.retire(l)
		}
	}
	c.close(retireAfter + 2*c.store.options.Timeout)
}

func (c *cluster) retire(l *lane) {
	c.mu.Lock()
	delete(c.lanes, l.node)
	c.old[l] = time.Now()
	c.mu.Unlock()
	c.store.laneUp(l)
}

// fleetDigest places what the fleet shares on a server of a ring.
var fleetDigest = func() (d digest) {
	binary.BigEndian.PutUint64(d[:], 1)
	return d
}()

// quiet is go-redis's logger. Left alone it writes a line to stderr for every failed dial; what it
// would say is in the errors, which are counted, and reported once for each change of state.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

func init() { redis.SetLogger(quiet{}) }
