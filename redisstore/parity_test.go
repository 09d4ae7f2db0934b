package redisstore

// The script must answer as algorithms.Decide does, number for number: random batches go to both,
// at given moments that step to waits ± 1 µs and across window edges.

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

// choices decides everything in a session, so that a fuzzer can steer it.
type choices struct{ bytes []byte }

func randomChoices(seed uint64, n int) *choices {
	c := rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8), byte(seed >> 16)})
	b := make([]byte, n)
	c.Read(b)
	return &choices{b}
}

func (c *choices) done() bool { return len(c.bytes) == 0 }

// below returns a number from 0 to n-1, n at most 256.
func (c *choices) below(n int) int {
	if c.done() {
		return 0
	}
	b := c.bytes[0]
	c.bytes = c.bytes[1:]
	return int(b) % n
}

func choose[T any](c *choices, all ...T) T { return all[c.below(len(all))] }

// model is the simplest store: see storetest.Reference, which hides its names.
type model map[string]algorithms.State

func (m model) apply(now int64, names []string, charges []algorithms.Charge, out []algorithms.Outcome) {
	opened, counters := map[string]*algorithms.Counter{}, make([]*algorithms.Counter, len(names))
	for i, name := range names {
		if opened[name] == nil {
			s := m[name]
			s.Log = append([]algorithms.Entry(nil), s.Log...)
			opened[name] = &algorithms.Counter{State: s}
		}
		counters[i] = opened[name]
	}
	committed := algorithms.Decide(now, charges, counters, out)
	for name, c := range opened {
		if committed || c.Anchored {
			m[name] = c.State
		}
	}
}

// session drives one script and the model side by side.
type session struct {
	*choices
	client *redis.Client
	script script
	names  namer
	model  model
	now    int64
	limits []*algorithms.Limit
	marks  map[string][]took
	last   []algorithms.Outcome
	// counted batches, and how often each kind of answer came
	batches, refused, refunds, delayed, unknown int
}

type took struct{ mark, cost int64 }

const (
	earliest = 1_200_000_000_000_000
	latest   = 2_600_000_000_000_000
)

func newSession(client *redis.Client, s script, prefix string, c *choices) *session {
	return &session{
		choices: c, client: client, script: s, names: namer{prefix: prefix}, model: model{},
		now: 1_767_225_600_000_000, marks: map[string][]took{},
	}
}

// drawn are the algorithms; leaky buckets, of which most have a queue, more often.
var drawn = []algorithms.Algorithm{
	algorithms.FixedWindow, algorithms.SlidingLog, algorithms.SlidingWindow, algorithms.TokenBucket, algorithms.Concurrency,
	algorithms.LeakyBucket, algorithms.LeakyBucket, algorithms.LeakyBucket,
}

// pickLimits draws the session's limits; some share their counters with different quotas.
func (s *session) pickLimits() {
	coarse := s.below(4) == 0 // limits of one space that need different ticks
	logs := s.below(8) == 0
	for tries := 0; len(s.limits) < 6 && tries < 60; tries++ {
		zone := choose(s.choices, "a", "b")
		p := algorithms.Policy{
			Algorithm: choose(s.choices, drawn...),
			Quota:     choose[int64](s.choices, 1, 2, 3, 5, 3, 7, 10, 50, 90, 1000, 1_000_000, 1<<40, 1<<52, 0),
			Window: choose(s.choices, time.Second, time.Minute, 10*time.Second, 13*time.Second, time.Millisecond, time.Hour, 7*time.Microsecond,
				time.Microsecond, 365*24*time.Hour, 1<<50*time.Microsecond),
		}
		if logs {
			p.Algorithm = choose(s.choices, algorithms.SlidingLog, algorithms.Concurrency)
		}
		if p.Algorithm.Bucket() {
			p.Burst = choose(s.choices, 1, 2, 3, max(1, p.Quota), 20, 1000)
		}
		if p.Algorithm == algorithms.LeakyBucket && p.Burst > 1 && s.below(3) > 0 {
			p.Queue = choose(s.choices, p.Burst-1, 1, p.Burst/2)
			p.MaxWait = choose(s.choices, 0, 0, p.Window, p.Window/3/time.Microsecond*time.Microsecond)
		}
		if coarse {
			zone, p.Algorithm, p.Window = "c", algorithms.TokenBucket, 365*24*time.Hour
			p.Quota, p.Burst = choose[int64](s.choices, 1, 7, 43, 97, 999, 100_003), choose[int64](s.choices, 1, 3, 240, 999, 1500, 100_003)
		} else if len(s.limits) > 0 && s.below(3) == 0 { // share
			known := s.limits[s.below(len(s.limits))]
			zone, p.Algorithm, p.Window, p.Burst = known.Space.Zone, known.Algorithm, known.Window, known.Burst
			p.Queue, p.MaxWait = known.Queue, known.MaxWait
		}
		if l, err := algorithms.Compile(zone, p); err == nil {
			s.limits = append(s.limits, l)
		}
	}
}

// step moves the time.
func (s *session) step() {
	l := s.limits[s.below(len(s.limits))]
	w := l.Window.Microseconds()
	d := int64(0)
	switch s.below(12) {
	case 0, 1, 2, 3, 4:
		if len(s.last) > 0 {
			o := s.last[s.below(len(s.last))]
			wait := choose(s.choices, o.Retry, o.Next)
			if o.Delay > 0 {
				wait = o.Delay
			}
			if wait != algorithms.Never {
				d = wait.Microseconds() + choose[int64](s.choices, -1, 0, 1)
			}
		}
	case 5:
		d = w - s.now%w + choose[int64](s.choices, -1, 0, 1)
	case 6:
		d = w*int64(s.below(100))/100 + choose[int64](s.choices, 0, 1, 3)
	case 7:
		d = choose(s.choices, w, 2*w-s.now%w-1, 2*w, 2*w+1, 3*w, w/2, w/3)
	case 8:
		d = choose(s.choices, 1, 10, 999_999, w/max(1, l.Quota))
	case 9:
		d = -choose(s.choices, 1, w/10, w-1, w, w+1, 3*w, 1000)
	}
	if now := s.now + d; now > earliest && now < latest {
		s.now = now
	}
}

func (s *session) charge() algorithms.Charge {
	l := s.limits[s.below(len(s.limits))]
	c := algorithms.Charge{Key: choose(s.choices, "k", "k", "other"), Limit: l, Cost: 1}
	switch s.below(16) {
	case 0:
		c.Cost = 0
	case 1:
		c.Cost = choose(s.choices, l.Capacity, l.Capacity+1, 1<<52, 1<<52+1, 1<<60, l.Capacity/2+1)
	case 2, 3, 4, 5:
		c.Cost = choose[int64](s.choices, 2, 3, 2, 5)
	case 6, 7, 8:
		if all := s.marks[s.name(&c)]; len(all) > 0 {
			t := all[max(0, len(all)-1-s.below(8))]
			c.Cost, c.Mark = -choose(s.choices, t.cost, 1, t.cost, 1000), t.mark+choose[int64](s.choices, 0, 0, 0, 0, 1)
		}
	}
	switch s.below(24) {
	case 0:
		c.Peek = true
	case 5:
		c.Check = true
	case 1:
		c.Force = true
		c.Cost = choose(s.choices, c.Cost, c.Cost, 1<<52)
	case 2, 3:
		c.DryRun = true
	case 4:
		c.Held = choose(s.choices, 1, 2, l.Capacity, 1<<60)
	}
	return c
}

func (s *session) name(c *algorithms.Charge) string {
	readable := s.names.clear(c.Limit.Space)
	d, _ := s.names.sum(nil, readable, c.Key)
	return string(s.names.append(nil, readable, d))
}

// round sends many batches in one script call and compares.
func (s *session) round() error {
	var c call
	var batches [][]algorithms.Charge
	for range 1 + s.below(24) {
		b := make([]algorithms.Charge, choose(s.choices, 1, 1, 1, 2, 3))
		p := newPart()
		for i := range b {
			b[i] = s.charge()
			if i > 0 && s.below(4) == 0 {
				b[i].Limit, b[i].Key = b[i-1].Limit, b[i-1].Key
			}
			for j := range i { // one counter in one batch has one limit
				if b[j].Limit.Space == b[i].Limit.Space {
					b[i].Limit = b[j].Limit
				}
			}
			a := newAsk(&b[i])
			p.names = append(p.names, s.name(&b[i])...)
			a.nameEnd = len(p.names)
			p.asks = append(p.asks, a)
		}
		batches, c.parts = append(batches, b), append(c.parts, p)
	}
	args := c.build(s.script, false, fmt.Sprint(s.now))
	reply, err := s.client.Do(context.Background(), args...).Text()
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		reply, err = s.client.Do(context.Background(), c.build(s.script, true, fmt.Sprint(s.now))...).Text()
	}
	if err != nil {
		return fmt.Errorf("at %d: %w", s.now, err)
	}
	if err := c.read(reply); err != nil {
		return err
	}
	s.last = s.last[:0]
	for i, b := range batches {
		if err := s.compare(b, c.parts[i]); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) compare(b []algorithms.Charge, p *part) error {
	names := make([]string, len(b))
	for i := range b {
		names[i] = s.name(&b[i])
	}
	out := make([]algorithms.Outcome, len(b))
	s.model.apply(s.now, names, b, out)
	s.batches++
	for i := range b {
		if p.err != nil || out[i] != p.out[i] {
			return fmt.Errorf("batch %d at %d, charge %d of %+v (policy %+v): script %+v (%v), decide %+v",
				s.batches, s.now, i, b[i], b[i].Limit.Policy, p.out[i], p.err, out[i])
		}
		if out[i].Delay > 0 {
			s.delayed++
		}
		switch {
		case out[i].Retry == algorithms.Unknown:
			s.unknown++
		case !out[i].OK:
			s.refused++
		case b[i].Cost < 0:
			s.refunds++
		case out[i].Mark != 0:
			s.marks[names[i]] = append(s.marks[names[i]], took{out[i].Mark, b[i].Cost})
		}
	}
	s.last = append(s.last, out...)
	return nil
}

// play runs until the choices are used up.
func (s *session) play() error {
	s.pickLimits()
	if len(s.limits) == 0 {
		return nil
	}
	for !s.done() {
		s.step()
		if err := s.round(); err != nil {
			return err
		}
	}
	return nil
}

func testClient(t testing.TB, s *redistest.Server) *redis.Client {
	c := s.Client()
	t.Cleanup(func() { c.Close() })
	return c
}

// scripts are the script as it is, and with its rare paths made frequent: logs that count as large
// from the fourth entry on and are read in pieces of two, running sums that begin anew early, and
// logs that are compacted at each change.
func scripts(text string) [4]script {
	large := strings.NewReplacer("local SMALL = 64", "local SMALL = 3", "local PIECE = 500", "local PIECE = 2").Replace(text)
	return [4]script{
		newScript(givenTime + text), newScript(givenTime + large),
		newScript(givenTime + strings.Replace(large, "c.A >= EXACT / 2", "c.A >= 2", 1)),
		newScript(givenTime + strings.Replace(large, "> 2 * (c.S - c.A) + SMALL", "> 0", 1)),
	}
}

func TestParity(t *testing.T) {
	client := testClient(t, redistest.Start(t))
	all := scripts(body)
	total, refused, refunds, delayed, unknown := 0, 0, 0, 0, 0
	seed := uint64(time.Now().UnixNano())
	for i := uint64(0); total < 120_000; i++ {
		s := newSession(client, all[i%4], fmt.Sprintf("p%d", i), randomChoices(seed+i, 6000))
		if err := s.play(); err != nil {
			t.Fatalf("seed %d: %v", seed+i, err)
		}
		total, refused, refunds = total+s.batches, refused+s.refused, refunds+s.refunds
		delayed, unknown = delayed+s.delayed, unknown+s.unknown
		if i%50 == 0 {
			client.FlushAll(context.Background())
		}
	}
	if refused < total/20 || refunds < total/100 || delayed < total/200 || unknown < total/100 {
		t.Errorf("the generator lost its edge")
	}
	t.Logf("%d batches, %d refused charges, %d refunds, %d delays, %d refused for want of a lease", total, refused, refunds, delayed, unknown)
}

func FuzzParity(f *testing.F) {
	client := testClient(f, redistest.Start(f))
	all := scripts(body)
	for seed := range uint64(8) {
		f.Add(randomChoices(seed, 400).bytes)
	}
	n := 0
	f.Fuzz(func(t *testing.T, data []byte) {
		n++
		s := newSession(client, all[n%4], fmt.Sprintf("f%d.%d", n, time.Now().UnixNano()), &choices{data})
		if err := s.play(); err != nil {
			t.Fatal(err)
		}
	})
}

// mutants are the script with one token wrong; the parity sessions must notice every one.
var mutants = []struct{ old, new string }{
	{"elseif states then", "end if states then"},
	{"state = states[answered + n]", "state = states[n]"},
	{"c.now - l.window + 1", "c.now - l.window"},
	{"held(c, c.head, dead), dead", "held(c, c.head, dead), dead + 1"},
	{"c.A + held(c, c.head, dead)", "held(c, c.head, dead)"},
	{"lo, hi, step = hi + 1,", "lo, hi, step = hi + 2,"},
	{"lower(c, c.head, c.A)", "lower(c, c.head + 1, c.A)"},
	{"if not c.own then lower(c, c.head", "do lower(c, c.head"},
	{"units = min(units, EXACT - (c.S - c.A))", ""},
	{"if at == c.now then", "if false then"},
	{"units = before + units", "units = units"},
	{"c.own and units or c.S", "c.S"},
	{"or entry(c, i) ~= mark", ""},
	{"units = min(units, had)", ""},
	{"if units == 0 then return false end", ""},
	{"else lower(c, i, units)", "else lower(c, i + 1, units)"},
	{"had - units)", "0)"},
	{"c.S = c.S - units", ""},
	{"c.head + 1) > 0", "c.head + 1) >= 0 and c.n < 0"},
	{"repeat c.n = c.n - 1 until", "repeat c.n = c.n - 2 until"},
	{"if i > c.head then _, before", "if i < 0 then _, before"},
	{"bytes(c, from, min(from + PIECE, last))", "bytes(c, from, last)"},
	{"return c.raw:sub(i * ENTRY_SIZE + 1, last", "return c.raw:sub(1, last"},
	{"c.raw:sub(last + 1))", "'')"},
	{"c.n = max(c.n, last / ENTRY_SIZE)", "c.n = last / ENTRY_SIZE"},
	{"c.own and held(c, i, c.n) or c.S", "c.own and 1 or c.S"},
	{"full, before = {}, c.own and 0 or c.A", "full, before = {}, c.A"},
	{"if value > before then", "if value >= before + 2 then"},
	{"before = c.own and 0 or value", "before = value"},
	{"live = compact(c)", "live = bytes(c, c.head, c.n - 1)"},
	{"c.head, c.n, c.raw = 0,", "c.n, c.raw ="},
	{"if given then changed = true else mark = 0 end", "changed = changed or given"},
	{"if A > l.ceiling then A = l.ceiling end -- also", "-- also"},
	{"if c then return A, B, k.remove(c, units, mark) end", "if c then return A, B, false, k.remove(c, units, mark) end"},
	{"if i < c.n then\n", "if i > c.n then\n"},
	{"(product + -product % from) / from", "(product - product % from) / from"},
	{"if ahead <= l.window then", "if ahead < l.window then"},
	{"if B ~= den then", "if false then"},
	{"T = T + -T % tick", ""},
	{"if at < T then at = T end", ""},
	{"elapsed >= (A", "elapsed > (A"},
	{"return at, last, A, den", "return at, at, A, den"},
	{"start == T + l.window then B = A", "start >= T + l.window then B = A"},
	{"(at - start - (at - start) % tick) / tick", "(at - start) / tick"},
	{"if cost > l.capacity then", "if cost >= l.capacity then"},
	{"(over + -over % l.num) / l.num * l.tick - at % l.tick", "(over + -over % l.num) / l.num * l.tick"},
	{"if B * left > room then", "if B * left >= room then"},
	{"(left - (room - room % B) / B)", "(left - (room + -room % B) / B)"},
	{"(left + ticks - (room", "(left + ticks - 1 - (room"},
	{"elseif A > room then", "elseif A >= room then"},
	{"return w + at - now", "return w"},
	{"(A + -A % l.den) / l.den", "(A - A % l.den) / l.den"},
	{"if at >= mark or", "if at > mark or"},
	{"if mark == T - l.window and", "if mark == T + l.window and"},
	{"max(0, A - units * l.den)", "A - units * l.den"},
	{"if A > l.ceiling then A = l.ceiling end\n    return", "return"},
	{"if flags < 16 and asked > 0 then", "if asked > 0 then"},
	{"and not (f % 8 >= 4 and flags % 8 < 4)", ""},
	{"flags % 16 < 8 and cost or 0", "cost"},
	{"asked = EXACT + 1", "asked = EXACT"},
	{"wait(l, cost + held, 0", "wait(l, cost, 0"},
	{"commit and (retry == 0 or flags >= 4 and", "commit and (retry == 0 or flags >= 16 and"},
	{"if not commit or retry ~= 0", "if retry ~= 0"},
	{"retry ~= 0 or flags >= 16 or", "retry ~= 0 or"},
	{"more = wait(l, remaining + 1,", "more = wait(l, remaining,"},
	{"if inUse == 0 then call('DEL', key) else", "do"},
	{"row[RETRY] == 0 or flags >= 4 and", "row[RETRY] == 0 or flags >= 16 and"},
	{"if flags % 16 >= 8 or asked < 0", "if asked < 0"},
	{"changed or anchored", "changed"},
	{"if changed and owner == i then", "if commit and owner == i then"},
	{"(round == 1 or not shared)", "true"},
	{"max(0, A - units), B", "A - units, B"},
	{"A, max(0, B - units)", "A, B - units"},
	{"(EXACT - EXACT % num) / num", "EXACT"},
	{"A - l.latest > over then over = A - l.latest", "A - l.latest > over then over = A - l.latest - 1"},
	{"if l.latest and A - l.latest > over", "if false"},
	{"local over = A - l.slack", "local over = A - l.slack - 1"},
	{"if over <= 0 or cost <= 0", "if over <= 0"},
	{"* l.tick - at % l.tick + at - now", "* l.tick - at % l.tick"},
	{"cost + held > l.capacity and NEVER or", "cost > l.capacity and NEVER or"},
	{"if over > 0 and l.kernel == LEASES then", "if over >= 0 and l.kernel == LEASES then"},
	{"kernel == LOG or kernel == LEASES", "kernel == LOG"},
	{"and not force and mark", "and mark"},
	{"if l.slack and not force", "if false and not force"},
	{"or l.latest and A > l.latest then", "then"},
	{"(retry == 0 or flags >= 4 and flags < 32)", "(retry == 0 or flags >= 4)"},
	{"row[RETRY] == 0 or flags >= 4 and flags < 32", "row[RETRY] == 0 or flags >= 4"},
	{"if retry == 0 then retry = late end", ""},
}

func TestMutants(t *testing.T) {
	client := testClient(t, redistest.Start(t))
	for i, m := range mutants {
		changed := strings.Replace(body, m.old, m.new, 1)
		if changed == body {
			t.Errorf("mutant %d: the script no longer contains %q", i, m.old)
			continue
		}
		all := scripts(changed)
		caught := false
		for seed := uint64(0); seed < 400 && !caught; seed++ {
			s := newSession(client, all[seed%4], fmt.Sprintf("m%d.%d", i, seed), randomChoices(seed, 2000))
			err := s.play()
			caught = err != nil
			if caught && strings.Contains(err.Error(), "compiling") {
				t.Errorf("mutant %d is no script: %v", i, err)
			}
		}
		if !caught {
			t.Errorf("mutant %d was not noticed: %q instead of %q", i, m.new, m.old)
		}
		client.FlushAll(context.Background())
	}
}

// A number that becomes text inside the script loses digits above 1e14, on the real server only.
func TestScriptKeepsNumbersFromText(t *testing.T) {
	for name, text := range map[string]string{"apply.lua": redisTime + body, "fleet.lua": fleetScript} {
		for n, line := range strings.Split(text, "\n") {
			code, _, _ := strings.Cut(line, "--")
			for _, trap := range []string{"..", "tostring", "string.format", ":format(", "string.rep", "cjson", "cmsgpack"} {
				if strings.Contains(code, trap) {
					t.Errorf("%s:%d: %q can turn a number into text: %s", name, n+1, trap, line)
				}
			}
		}
	}
}

// An algorithm that was added by half is an error of the script, and is not counted as another.
func TestScriptRefusesAKernelItLacks(t *testing.T) {
	client := testClient(t, redistest.Start(t))
	limit, err := algorithms.Compile("z", algorithms.Policy{Algorithm: algorithms.FixedWindow, Quota: 1, Window: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	packed := appendLimit(nil, limit)
	one := (&ask{cost: 1}).appendTo([]byte{1}, 0, flagLast)
	for kernel, lacks := range map[algorithms.Kernel]bool{0: true, algorithms.Meter: false, algorithms.Meter + 1: true} {
		packed[0] = byte(kernel)
		if err := client.Eval(t.Context(), redisTime+body, []string{"key"}, packed, one).Err(); (err != nil) != lacks {
			t.Errorf("kernel %d: error %v", kernel, err)
		}
	}
}
