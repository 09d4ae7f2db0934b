package counting_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/counting"
	"github.com/caddy-sluice/sluice/leaky"
	"github.com/caddy-sluice/sluice/memstore"
)

// remote stands for a shared store: it counts in memory, can be out of reach, and settles at once.
type remote struct {
	*memstore.Store
	books counting.Books
	down  atomic.Bool
	calls atomic.Int64
	held  atomic.Int64
}

func (r *remote) Apply(ctx context.Context, charges []algorithms.Charge, out []algorithms.Outcome) error {
	if r.calls.Add(1); r.down.Load() {
		return errors.New("out of reach")
	}
	return r.Store.Apply(ctx, charges, out)
}

func (r *remote) Settle(charges ...algorithms.Charge) {
	_ = r.Store.Apply(context.Background(), charges, make([]algorithms.Outcome, len(charges)))
}

func (r *remote) Books() *counting.Books { return &r.books }

type lease struct {
	of   *remote
	back algorithms.Charge
}

func (r *remote) Hold(limit *algorithms.Limit, key string, mark int64) counting.Lease {
	r.held.Add(1)
	return lease{r, algorithms.Charge{Key: key, Limit: limit, Cost: -1, Mark: mark}}
}

func (l lease) Release() {
	l.of.held.Add(-1)
	l.of.Settle(l.back)
}

// site is all that the rules of a config count in.
type site struct {
	*counting.Counters
	t      testing.TB
	remote *remote
	fleet  int
}

func newSite(t testing.TB) *site {
	s := &site{t: t, remote: &remote{Store: memstore.New()}, fleet: 1}
	s.Counters = &counting.Counters{
		Process: counting.NewProcess(memstore.New(), time.Now), Shared: s.remote, Fleet: func() int { return s.fleet },
	}
	return s
}

func (s *site) limit(zone string, p algorithms.Policy) *algorithms.Limit {
	s.t.Helper()
	l, err := algorithms.Compile(zone, p)
	if err != nil {
		s.t.Fatal(err)
	}
	return l
}

func (s *site) perHour(zone string, quota int64) *algorithms.Limit {
	s.t.Helper()
	return s.limit(zone, algorithms.Policy{Algorithm: algorithms.FixedWindow, Quota: quota, Window: time.Hour})
}

// local and shared are entries that ask for one unit of a limit.
func local(limits ...*algorithms.Limit) counting.Entry {
	return counting.Entry{Key: "k", Limits: limits, Cost: 1}
}

func shared(limits ...*algorithms.Limit) counting.Entry {
	return counting.Entry{Key: "k", Limits: limits, Cost: 1, Place: counting.Shared}
}

func (s *site) ask(entries ...counting.Entry) (d *counting.Decision, denied bool) {
	d = new(counting.Decision)
	d.Begin(s.Counters)
	for i := range entries {
		d.Ask(d.Add(&entries[i]))
	}
	return d, d.Decide(context.Background())
}

// left is what remains of an entry's first limit.
func (s *site) left(e counting.Entry) int64 {
	s.t.Helper()
	o, err := s.Look(e.Place, e.Limits[0], e.Key, 1)
	if err != nil {
		s.t.Fatal(err)
	}
	return o.Remaining
}

func (s *site) wantLeft(e counting.Entry, want int64) {
	s.t.Helper()
	if got := s.left(e); got != want {
		s.t.Errorf("%d left, want %d", got, want)
	}
}

func by(d *counting.Decision) (list []counting.By) {
	for i := range d.Answers {
		list = append(list, d.Answers[i].By)
	}
	return list
}

// A request is charged in all places or in none, and what one refuses no later one hears of.
func TestAllOrNoneOverPlaces(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	here, there := local(s.perHour("here", 3)), shared(s.perHour("there", 1))
	if d, denied := s.ask(here, there); denied || !d.Answers[0].Outcomes[0].OK || !d.Answers[1].Outcomes[0].OK || d.Answers[1].By != counting.ByShared {
		t.Fatalf("%+v", d.Answers)
	}
	d, _ := s.ask(here, there)
	if o := d.Answers[1].Outcomes[0]; o.OK || o.Retry <= 0 {
		t.Errorf("%+v", o)
	}
	if o := d.Answers[0].Outcomes[0]; !o.OK || o.Remaining != 2 {
		t.Errorf("the units that were given back do not show: %+v", o)
	}
	s.wantLeft(here, 2)

	none := local(s.perHour("none", 0))
	calls := s.remote.calls.Load()
	d, _ = s.ask(here, none, shared(s.perHour("other", 5)))
	if s.remote.calls.Load() != calls {
		t.Error("the shared store was asked for what this process had refused")
	}
	if a := d.Answers[2]; a.By != counting.Nobody || !a.Outcomes[0].OK || a.Outcomes[0].Asked() {
		t.Errorf("%+v", a)
	}
	s.wantLeft(here, 2)
}

// While the shared store is down each rule does what it chose, and who answered is told.
func TestFailure(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.remote.down.Store(true)
	s.fleet = 2
	here, share, allow, deny := local(s.perHour("here", 3)), shared(s.perHour("share", 4)), shared(s.perHour("allow", 1)), shared(s.perHour("deny", 1))
	allow.IfDown, deny.IfDown = counting.Allow, counting.Deny
	d, denied := s.ask(here, share, allow)
	if got := fmt.Sprint(by(d)); denied || got != fmt.Sprint([]counting.By{counting.ByLocal, counting.ByShare, counting.ByAllowing}) {
		t.Errorf("denied %t, by %v", denied, got)
	}
	if a := d.Answers[1]; a.Limits[0].Quota != 2 || a.Outcomes[0].Remaining != 1 || a.Limits[0] == share.Limits[0] {
		t.Errorf("the share of 4 for two instances: %+v %+v", a.Limits[0], a.Outcomes)
	}
	if a := d.Answers[2]; !a.Outcomes[0].OK || a.Outcomes[0].Asked() {
		t.Errorf("%+v", a)
	}
	s.wantLeft(here, 2)

	d, denied = s.ask(here, share, deny)
	if !denied || d.Answers[2].By != counting.ByDenying || d.Answers[1].Outcomes[0].Asked() {
		t.Errorf("denied %t: %+v", denied, d.Answers)
	}
	s.wantLeft(here, 2)
	deny.DryRun = true
	if d, denied = s.ask(here, deny); denied || !d.Answers[1].Outcomes[0].OK {
		t.Errorf("a dry run denies: %+v", d.Answers[1])
	}
	s.wantLeft(here, 1)

	// More than the share ever holds passes again when the store is back; more than the limit never
	// does.
	share.Cost = 3
	if d, _ = s.ask(share); d.Answers[0].Outcomes[0].OK || d.Answers[0].Outcomes[0].Retry < counting.StoreBack || d.Answers[0].Outcomes[0].Retry == algorithms.Never {
		t.Errorf("%+v", d.Answers[0].Outcomes)
	}
	share.Cost = 5
	if d, _ = s.ask(share); d.Answers[0].Outcomes[0].Retry != algorithms.Never {
		t.Errorf("%+v", d.Answers[0].Outcomes)
	}
	s.fleet, share.Cost = 4, 1
	if d, _ = s.ask(share); d.Answers[0].Limits[0].Quota != 1 || d.Answers[0].Outcomes[0].OK {
		t.Errorf("of four instances: %+v %+v", d.Answers[0].Limits[0], d.Answers[0].Outcomes)
	}
}

// The shares of an outage are what later ones are counted in, for the same limits the same values.
func TestSharesStayTheSame(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	limits := []*algorithms.Limit{s.perHour("a", 9), s.limit("a", algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: 4, Window: time.Minute})}
	s.fleet = 3
	first := s.Shares(limits, s.fleet)
	if again := s.Shares(limits, s.fleet); &again[0] != &first[0] || first[0].Quota != 3 || first[1].Quota != 1 || first[1].Window != algorithms.MaxWindow {
		t.Errorf("%+v", first)
	}
	s.fleet = 1
	if whole := s.Shares(limits, s.fleet); whole[0].Quota != 9 || whole[0].Space.Zone != counting.ShareZone("a") {
		t.Errorf("%+v", whole[0])
	}
	queue := s.limit("q", leaky.Queue(10, time.Second, 5, 0, 0))
	s.fleet = 10
	if one := s.Shares([]*algorithms.Limit{queue}, s.fleet)[0]; one.Queue != 0 || one.Burst != 1 {
		t.Errorf("a tenth of a queue of five: %+v", one.Policy)
	}
}

func (s *site) ban(zone string, strikes int64, pending bool) *counting.Ban {
	b := &counting.Ban{
		Durations: []time.Duration{time.Minute, time.Hour}, Strikes: s.perHour(zone+" (strikes)", strikes), Bans: algorithms.Ban(zone + " (bans)"),
		Ladder: s.limit(zone+" (ladder)", algorithms.Policy{Algorithm: algorithms.SlidingLog, Quota: 2, Window: 2 * time.Hour}),
	}
	b.Struck = s.Open(zone + " (strikes)")
	if pending {
		b.Pending = s.limit(zone+" (pending)", algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: 100, Window: algorithms.MaxWindow})
	}
	return b
}

// Refusals earn a ban, which grows, and which the answer shows at once.
func TestRefusalsEarnABan(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	for name, e := range map[string]counting.Entry{"here": local(s.perHour("h", 0)), "there": shared(s.perHour("t", 0))} {
		e.Ban = s.ban(name, 2, false)
		d, _ := s.ask(e)
		if got := d.StrikeRefused(0); got != counting.NoBan || d.Answers[0].Banned() {
			t.Errorf("%s: the first strike is %+v", name, got)
		}
		d, _ = s.ask(e)
		if got := d.StrikeRefused(0); got != (counting.Banned{Rest: time.Minute, Step: 0}) || !d.Answers[0].Banned() || d.Answers[0].Ban.Retry != time.Minute {
			t.Errorf("%s: the second is %+v, and shows %+v", name, got, d.Answers[0].Ban)
		}
		d, _ = s.ask(e)
		if a := d.Answers[0]; !a.Banned() || a.Ban.Retry <= 0 || a.Ban.Retry > time.Minute {
			t.Errorf("%s: afterwards %+v", name, a.Ban)
		}
	}
}

// A ban that is earned while the shared store is away holds here when it is back, and says nothing
// of other rules.
func TestABanOfAnOutageOutlivesIt(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	here, before, banned, after := local(s.perHour("here", 9)), shared(s.perHour("before", 9)), shared(s.perHour("banned", 0)), shared(s.perHour("after", 9))
	banned.Ban, before.Ban = s.ban("banned", 1, true), s.ban("before", 5, true)
	s.remote.down.Store(true)
	d, _ := s.ask(banned)
	if got := d.StrikeRefused(0); got.Step != 0 {
		t.Fatalf("%+v", got)
	}
	s.remote.down.Store(false)
	calls := s.remote.calls.Load()
	d, _ = s.ask(here, before, banned, after)
	if s.remote.calls.Load() != calls {
		t.Error("the shared store was asked about who is banned here")
	}
	for i := range d.Answers {
		a := &d.Answers[i]
		if a.Banned() != (i == 2) || i != 2 && !a.Outcomes[0].OK || i == 0 && a.Outcomes[0].Remaining != 9 {
			t.Errorf("answer %d: banned %t, %+v", i, a.Banned(), a.Outcomes)
		}
	}
	banned.Key = "another"
	if d, _ = s.ask(here, banned); d.Answers[1].Banned() || d.Answers[1].By != counting.ByShared {
		t.Errorf("another key: %+v", d.Answers[1])
	}
}

// What was reserved is given back, stands, or is corrected, once.
func TestReservations(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	bucket := func(zone string) *algorithms.Limit {
		return s.limit(zone, algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: 1, Window: time.Hour, Burst: 10})
	}
	for name, e := range map[string]counting.Entry{"here": local(bucket("h")), "there": shared(bucket("t"))} {
		t.Run(name, func(t *testing.T) {
			e.Keeps, e.Reserves, e.Ban = true, counting.ByStatus, s.ban(name, 1, true)
			pending := func() int64 {
				o, _ := s.Look(e.Place, e.Ban.Pending, e.Key, 1)
				return e.Ban.Pending.Quota - o.Remaining
			}
			keep := func() *counting.Receipt {
				d, _ := s.ask(e)
				return d.Keep()
			}
			r := keep()
			if s.wantLeft(e, 9); pending() != 1 || !r.Reserved() || !r.Open(0) || r.Waits() || s.remote.Books().Empty() != (name == "here") {
				t.Errorf("%d pending, %+v", pending(), r.Items)
			}
			r.Return(0)
			r.Return(0)
			r.Close()
			if s.wantLeft(e, 10); pending() != 0 || r.Open(0) || !s.remote.Books().Empty() {
				t.Errorf("%d pending after it was given back", pending())
			}
			r = keep()
			if ban := r.Count(0); ban.Step != 0 || ban.Rest != time.Minute {
				t.Errorf("the failure earns %+v", ban)
			}
			if ban := r.Count(0); ban != counting.NoBan {
				t.Errorf("counted twice: %+v", ban)
			}
			r.Close()
			s.wantLeft(e, 9)

			e.Ban, e.Reserves, e.Cost = nil, counting.ByCharge, 3
			r = keep()
			s.wantLeft(e, 6)
			r.Correct(0, 5)
			r.Correct(0, 9)
			r.Close()
			s.wantLeft(e, 4)
			r = keep()
			r.Correct(0, 1)
			r.Close()
			s.wantLeft(e, 3)
			r = keep()
			r.Close() // without a word of it the reservation stands
			s.wantLeft(e, 0)
		})
	}
}

// A process that ends gives back what counts by the response, which nobody sees any more, and not
// what a response would have charged.
func TestCutOff(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	status, charge := shared(s.perHour("status", 5)), shared(s.perHour("charge", 5))
	status.Keeps, status.Reserves, charge.Keeps, charge.Reserves = true, counting.ByStatus, true, counting.ByCharge
	d, _ := s.ask(status, charge)
	r := d.Keep()
	if n := s.remote.Books().CutOff(); n != 1 {
		t.Errorf("%d requests", n)
	}
	s.wantLeft(status, 5)
	s.wantLeft(charge, 4)
	r.Return(0)
	r.Correct(1, 0)
	r.Close()
	s.wantLeft(status, 5)
	s.wantLeft(charge, 4)
}

// Units in flight are given back when the request ends, in either place.
func TestLeases(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	flight := func(zone string) *algorithms.Limit {
		return s.limit(zone, algorithms.Policy{Algorithm: algorithms.Concurrency, Quota: 2, Window: time.Minute})
	}
	here, there := local(flight("h")), shared(flight("t"))
	here.Keeps, there.Keeps, here.Cost, there.Cost = true, true, 7, 7 // a request is one, whatever it costs
	d, _ := s.ask(here, there)
	r := d.Keep()
	if r.Items[0].InFlight() != 1 || r.Items[1].InFlight() != 1 || s.remote.held.Load() != 1 {
		t.Errorf("%+v", r.Items)
	}
	s.wantLeft(here, 1)
	s.wantLeft(there, 1)
	r.Close()
	s.wantLeft(here, 2)
	s.wantLeft(there, 2)
	if s.remote.held.Load() != 0 {
		t.Error("the lease is still held")
	}
	there.DryRun = true
	for range 3 {
		if d, _ = s.ask(there); d.Answers[0].Outcomes[0].OK {
			d.Keep()
		}
	}
	if d.Answers[0].Outcomes[0].OK {
		t.Error("a dry run is not counted")
	}
}

// A request waits for the last of its slots, wherever they are; one that goes away leaves them.
func TestWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		here, there := local(s.limit("h", leaky.Queue(10, time.Second, 5, 0, 0))), shared(s.limit("t", leaky.Queue(5, time.Second, 5, 0, 0)))
		here.Keeps, there.Keeps = true, true
		start := time.Now()
		for i, want := range []time.Duration{0, 200 * time.Millisecond, 400 * time.Millisecond} {
			d, _ := s.ask(here, there)
			r := d.Keep()
			if r.Waits() != (i > 0) || r.Items[1].Delay != want || r.Items[0].Delay != want/2 {
				t.Errorf("request %d: %+v", i, r.Items)
			}
			if i == 2 {
				ctx, leave := context.WithCancelCause(context.Background())
				gone := errors.New("gone")
				leave(gone)
				if err := r.Wait(ctx); err != gone {
					t.Errorf("%v, want its cause", err)
				}
			}
			r.Close()
		}
		d, _ := s.ask(here, there) // gets the place of the one that went away
		r := d.Keep()
		if r.Items[1].Delay != 400*time.Millisecond || r.Items[0].Delay != 200*time.Millisecond {
			t.Errorf("the newcomer: %+v", r.Items)
		}
		if err := r.Wait(context.Background()); err != nil || time.Since(start) != 400*time.Millisecond {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		r.Close()
		here.DryRun, there.DryRun = true, true
		if d, _ = s.ask(here, there); d.Keep().Waits() {
			t.Error("a dry run waits")
		}
	})
}

// A slot of this process is given back when the shared store refuses, also that of a dry run, and
// the next request is served in it.
func TestASlotIsGivenBackToo(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t)
		queue := local(s.limit("q", leaky.Queue(10, time.Second, 5, 0, 0)))
		dry := queue
		dry.Limits = []*algorithms.Limit{s.limit("dry", leaky.Queue(10, time.Second, 5, 0, 0))}
		dry.DryRun = true
		none := shared(s.perHour("none", 0))
		s.ask(queue, dry)
		for range 4 {
			d, _ := s.ask(queue, dry, none)
			if r := d.Answers[0].Outcomes[0]; r.Remaining != 5 {
				t.Errorf("%+v", r)
			}
		}
		d, _ := s.ask(queue, dry)
		if a, b := d.Answers[0].Delay(), d.Answers[1].Delay(); a != 100*time.Millisecond || b != a {
			t.Errorf("delays %v and %v, want those of the second", a, b)
		}
	})
}

// However many ask at once, what passes is what both places have.
func TestConcurrentDecisions(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	here, there := local(s.perHour("here", 100)), shared(s.perHour("there", 60))
	var passed atomic.Int64
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			var d counting.Decision
			for range 50 {
				d.Begin(s.Counters)
				d.Ask(d.Add(&here))
				d.Ask(d.Add(&there))
				d.Decide(context.Background())
				if d.Answers[0].Outcomes[0].OK && d.Answers[1].Outcomes[0].OK {
					passed.Add(1)
				}
			}
		})
	}
	all.Wait()
	if passed.Load() > 60 || s.left(there) != 60-passed.Load() || s.left(here) != 100-passed.Load() {
		t.Errorf("%d passed, %d and %d are left", passed.Load(), s.left(here), s.left(there))
	}
}

// A share is asked about bans and what is pending too, and each rule is told its own wait, wherever
// its charges lie.
func TestSharesOfSeveralRules(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.fleet = 2
	first, second := shared(s.perHour("first", 8)), shared(s.perHour("second", 4), s.perHour("second", 4))
	second.Limits[1] = s.limit("second", algorithms.Policy{Algorithm: algorithms.FixedWindow, Quota: 40, Window: 24 * time.Hour})
	first.Ban, second.Ban = s.ban("first", 5, true), s.ban("second", 5, true)
	first.Keeps, first.Reserves = true, counting.ByStatus
	s.remote.down.Store(true)
	d, _ := s.ask(first, second)
	if a := d.Answers[0]; a.Banned() || a.Pending != 1 || a.Outcomes[0].Remaining != 3 {
		t.Errorf("%+v", a)
	}
	if a := d.Answers[1]; len(a.Outcomes) != 2 || a.Outcomes[0].Remaining != 1 || a.Outcomes[1].Remaining != 19 {
		t.Errorf("%+v", a)
	}
	r := d.Keep()
	second.Cost = 3 // more than half of 4, not of 40
	d, _ = s.ask(first, second)
	if a := d.Answers[0]; a.Pending != 1 || a.Outcomes[0].Remaining != 3 || !a.Outcomes[0].OK {
		t.Errorf("%+v", a)
	}
	if a := d.Answers[1]; a.Outcomes[0].OK || a.Outcomes[0].Retry == algorithms.Never || a.Outcomes[0].Retry < time.Second || !a.Outcomes[1].OK || a.Outcomes[1].Retry != 0 {
		t.Errorf("%+v", a)
	}
	second.Held = []int64{2, 0} // together more than the limit: that never passes
	if d, _ = s.ask(first, second); d.Answers[1].Outcomes[0].Retry != algorithms.Never {
		t.Errorf("%+v", d.Answers[1])
	}
	r.Close()
	// A full share has no moment at which more is there: then the store's return is the wait.
	fresh := shared(s.perHour("fresh", 4))
	fresh.Cost = 4
	if d, _ = s.ask(fresh); d.Answers[0].Outcomes[0].Retry != counting.StoreBack || counting.StoreBack != 2*time.Second {
		t.Errorf("%+v", d.Answers[0])
	}
}

// A queue's share still holds its requests.
func TestAShareThatQueues(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.remote.down.Store(true)
	queue := shared(s.limit("q", leaky.Queue(10, time.Second, 5, 0, 0)))
	queue.Keeps = true
	s.ask(queue)
	d, _ := s.ask(queue)
	r := d.Keep()
	if !r.Waits() || r.Items[0].Delay <= 0 || r.Items[0].By != counting.ByShare {
		t.Errorf("%+v", r.Items)
	}
	if err := r.Wait(context.Background()); err != nil {
		t.Error(err)
	}
	r.Close()
}

// Instances may come and go at any moment; a decision is made, and told, by one number of them.
func TestOneFleetForADecision(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.remote.down.Store(true)
	known := 0
	s.Counters.Fleet = func() int { known++; return known }
	d, _ := s.ask(shared(s.perHour("a", 12)), shared(s.perHour("b", 12)), shared(s.perHour("c", 12)))
	for i := range d.Answers {
		if a := &d.Answers[i]; a.Limits[0].Quota != 12/int64(d.Fleet) {
			t.Errorf("answer %d has a share of %d, by a fleet of %d", i, a.Limits[0].Quota, d.Fleet)
		}
	}
}
