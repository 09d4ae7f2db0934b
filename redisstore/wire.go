package redisstore

// What goes to the script and comes back: packed numbers, because every separate argument costs
// Redis more than a decision's arithmetic does.

import (
	"crypto/sha1" // Redis names scripts by it
	_ "embed"
	"encoding/binary"
	"encoding/hex"
	"regexp"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/caddy-sluice/sluice/algorithms"
)

//go:embed apply.lua
var body string

// The two prologues over one body.
const (
	redisTime = "local time = redis.call('TIME')\nlocal now = time[1] * 1000000 + time[2]\n"
	givenTime = "local now = tonumber(ARGV[3])\n"
)

// script is a text with the name that Redis knows it by.
type script struct{ text, sha string }

func newScript(text string) script {
	text = inline(text)
	sum := sha1.Sum([]byte(text))
	return script{text: text, sha: hex.EncodeToString(sum[:])}
}

var (
	constants = regexp.MustCompile(`(?m)^local [A-Z_, ]+ = .*$`)
	constant  = regexp.MustCompile(`[A-Z_]+`)
)

// inline puts the values of a script's constants where they are used: Lua has no constants, and a
// variable that a function uses costs more at each call of the script than the arithmetic of a
// decision does.
func inline(text string) string {
	values := map[string]string{}
	for _, line := range constants.FindAllString(text, -1) {
		line, _, _ = strings.Cut(strings.TrimPrefix(line, "local "), " --")
		left, right, _ := strings.Cut(line, " = ")
		each := strings.Split(right, ", ")
		for i, name := range strings.Split(left, ", ") {
			values[name] = each[i]
		}
	}
	text = constants.ReplaceAllString(text, "")
	return constant.ReplaceAllStringFunc(text, func(name string) string {
		if v, ok := values[name]; ok {
			return v
		}
		return name
	})
}

// ask is a charge as it waits to be sent. The client's key is not kept, only its name in Redis.
type ask struct {
	limit            *algorithms.Limit
	cost, mark, held int64
	flags            byte
	nameEnd          int // of its name within the part's names
}

// Flags of a charge on the wire.
const (
	flagLast   = 1 // ends its batch
	flagFull   = 2 // cost, mark and held follow; without it the cost is 1
	flagDryRun = 4
	flagForce  = 8
	flagPeek   = 16
	flagCheck  = 32
	flagAgain  = 64 // the counter of another charge of the call, so it is read when its turn comes
)

func newAsk(c *algorithms.Charge) ask {
	const most = algorithms.MaxExact
	a := ask{
		limit: c.Limit,
		cost:  max(-most, min(c.Cost, most+1)), // most+1 is above any capacity
		// A mark that no kernel can have given matches nothing, clamped or not.
		mark: max(-1, min(c.Mark, 2*most)),
		held: max(0, min(c.Held, most)),
	}
	if a.cost != 1 || a.mark != 0 || a.held != 0 {
		a.flags |= flagFull
	}
	if c.DryRun {
		a.flags |= flagDryRun
	}
	if c.Force {
		a.flags |= flagForce
	}
	switch {
	case c.Peek, c.Check && c.DryRun: // a check that refuses nobody looks
		a.flags |= flagPeek
	case c.Check:
		a.flags |= flagCheck
	}
	return a
}

// appendTo writes the charge in the form that decode in apply.lua reads.
func (a *ask) appendTo(dst []byte, limit int, flags byte) []byte {
	dst = append(dst, flags)
	dst = binary.BigEndian.AppendUint16(dst, uint16(limit))
	if flags&flagFull != 0 {
		for _, n := range [...]int64{a.cost, a.mark, a.held} {
			dst = binary.BigEndian.AppendUint64(dst, uint64(n))
		}
	}
	return dst
}

func appendLimit(dst []byte, l *algorithms.Limit) []byte {
	p := l.Params()
	numOrTicks := p.Num
	if p.Kernel != algorithms.Meter {
		numOrTicks = p.Ticks
	}
	dst = append(dst, byte(p.Kernel))
	for _, n := range [...]int64{p.Capacity, p.Window, p.Tick, numOrTicks, p.Den, p.Ceiling, p.Slack, p.Latest} {
		dst = binary.BigEndian.AppendUint64(dst, uint64(n))
	}
	return dst
}

// Statuses of a charge in the reply.
const (
	statusRefused = 0
	statusOK      = 1
	statusFormat  = 2

	outcomeSize = 33
)

// outcome reads one charge's answer.
func outcome(reply string) (o algorithms.Outcome, status byte) {
	n := func(i int) int64 {
		var v uint64
		for _, b := range []byte(reply[1+8*i : 9+8*i]) {
			v = v<<8 | uint64(b)
		}
		return int64(v)
	}
	status = reply[0]
	o = algorithms.Outcome{OK: status == statusOK, Remaining: n(0), Next: wait(n(2)), Mark: n(3)}
	if held := wait(n(1)); o.OK {
		o.Delay = held
	} else {
		o.Retry = held
	}
	return o, status
}

// wait reads a time of the reply.
func wait(us int64) time.Duration {
	switch us {
	case -1:
		return algorithms.Never
	case -2:
		return algorithms.Unknown
	}
	return time.Duration(us) * time.Microsecond
}

// call is one script call: parts of one slot, or of one server that has no slots. It is reused.
type call struct {
	parts   []*part
	limits  []*algorithms.Limit
	names   []string
	named   map[string]struct{} // the names, of a call with several
	packed  []byte
	charges []byte
	args    []any
	cmd     *redis.Cmd
	err     error
}

// build lays out the arguments of EVALSHA, or of EVAL when text is set.
func (c *call) build(s script, text bool, now string) []any {
	c.limits, c.names, c.packed, c.charges = c.limits[:0], c.names[:0], c.packed[:0], append(c.charges[:0], 1)
	clear(c.named)
	alone := len(c.parts) == 1 && len(c.parts[0].asks) == 1
	var joined strings.Builder
	size := 0
	for _, p := range c.parts {
		size += len(p.names)
	}
	joined.Grow(size)
	for _, p := range c.parts {
		start := joined.Len()
		joined.Write(p.names)
		all, from := joined.String(), start
		for i := range p.asks {
			a := &p.asks[i]
			name, flags := all[from:start+a.nameEnd], a.flags
			c.names = append(c.names, name)
			from = start + a.nameEnd
			if i == len(p.asks)-1 {
				flags |= flagLast
			}
			if !alone && c.again(name) {
				flags |= flagAgain
			}
			if a.limit.Algorithm.Log() { // may be large, and is read in pieces
				c.charges[0] = 0
			}
			c.charges = a.appendTo(c.charges, c.limit(a.limit), flags)
		}
	}
	if text {
		c.args = append(c.args[:0], "eval", s.text)
	} else {
		c.args = append(c.args[:0], "evalsha", s.sha)
	}
	c.args = append(c.args, len(c.names))
	for i := range c.names {
		c.args = append(c.args, &c.names[i]) // a pointer needs no boxing
	}
	c.args = append(c.args, c.packed, c.charges)
	if now != "" {
		c.args = append(c.args, now)
	}
	return c.args
}

// again reports whether a name was there before, and notes it.
func (c *call) again(name string) bool {
	if c.named == nil {
		c.named = make(map[string]struct{}, maxCall)
	}
	before := len(c.named)
	c.named[name] = struct{}{}
	return len(c.named) == before
}

// limit returns the index of a limit among those of the call. They are few: a linear search is
// fastest.
func (c *call) limit(l *algorithms.Limit) int {
	for i, known := range c.limits {
		if known == l {
			return i
		}
	}
	c.limits = append(c.limits, l)
	c.packed = appendLimit(c.packed, l)
	return len(c.limits) - 1
}

// read hands the reply out to the parts. Nothing in it is believed that the script cannot have
// answered: a request would be held, or a client sent away, for as long as somebody wrote into
// Redis.
func (c *call) read(reply string) error {
	if len(reply) != outcomeSize*len(c.names) {
		return errReply
	}
	for _, p := range c.parts {
		p.out = p.out[:0]
		for i := range p.asks {
			o, status := outcome(reply)
			switch a := &p.asks[i]; {
			case status == statusFormat:
				p.err = &Error{Kind: KindFormat, Err: errFormat}
			case status > statusFormat, !a.limit.Possible(&o, a.flags&flagForce != 0):
				p.err = &Error{Kind: KindFormat, Err: errImpossible}
			}
			p.out = append(p.out, o)
			reply = reply[outcomeSize:]
		}
	}
	return nil
}
