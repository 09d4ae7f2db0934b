package algorithms

import (
	"testing"
	"time"
)

// What a committed charge took is given back whole by what undoes it, for every algorithm; what
// took nothing undoes nothing.
func TestUndo(t *testing.T) {
	for a := Algorithm(1); a.Kernel() != 0; a++ {
		p := Policy{Algorithm: a, Quota: 5, Window: time.Minute}
		if a.Bucket() {
			p.Burst = 5
		}
		l := newSingle(t, p).l
		counter := new(Counter)
		apply := func(c Charge) Outcome {
			out := make([]Outcome, 1)
			Decide(60_000_000, []Charge{c}, []*Counter{counter}, out)
			return out[0]
		}
		took := Charge{Key: "k", Limit: l, Cost: 3}
		o := apply(took)
		undo := took.Undo(&o)
		if back := apply(undo); undo.Cost != -3 || undo.Force || back.Remaining != 5 {
			t.Errorf("%v: %+v leaves %+v", a, undo, back)
		}
		o = apply(Charge{Key: "k", Limit: l, Cost: 3})
		refund := took.Undo(&o)
		given := apply(refund)
		if again := refund.Undo(&given); again.Cost != 3 || !again.Force || apply(again).Remaining != 2 {
			t.Errorf("%v: undone, a refund is %+v", a, again)
		}
		for name, c := range map[string]Charge{
			"refused": {Limit: l, Cost: 9}, "peek": {Limit: l, Cost: 1, Peek: true}, "check": {Limit: l, Cost: 1, Check: true}, "nothing": {Limit: l},
		} {
			o := apply(c)
			if undo := c.Undo(&o); undo.Cost != 0 || undo.Force {
				t.Errorf("%v, %s: %+v", a, name, undo)
			}
		}
		unasked := Unasked
		if undo := took.Undo(&unasked); undo.Cost != 0 {
			t.Errorf("%v, unasked: %+v", a, undo)
		}
	}
}
