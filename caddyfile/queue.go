// Queues: requests over the rate wait for their turn.

package caddyfile

import (
	"errors"
	"fmt"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// queueBounds are the numbers of a queue, as [leaky.Queue] takes them.
type queueBounds struct {
	size, delay int64
	maxWait     time.Duration
}

// queue reads the queue of plans of at most so many limits.
func (z *zoneCompiler) queue(limits int) (*queueBounds, error) {
	q := z.z.Queue
	if q == nil {
		return nil, nil
	}
	if err := z.queueFits(limits); err != nil {
		return nil, z.fail("queue", -1, err)
	}
	size, known, err := z.integer(q.Size, 1, algorithms.MaxExact-1)
	if err != nil {
		return nil, z.fail("queue.size", -1, err)
	}
	var delay int64
	if q.Delay != "" {
		var delayKnown bool
		if delay, delayKnown, err = z.integer(q.Delay, 0, algorithms.MaxExact); err != nil {
			return nil, z.fail("queue.delay", -1, err)
		}
		known = known && delayKnown
	}
	z.pending = z.pending || !known
	if known && delay >= size {
		return nil, z.fail("queue.delay", -1, fmt.Errorf("%d of a queue of %d, so that nothing would wait; want 0 to %d, or burst %d instead of queue",
			delay, size, size-1, size))
	}
	wait := time.Duration(q.MaxWait)
	if wait < 0 || wait > 0 && wait < time.Millisecond {
		return nil, z.fail("queue.max_wait", -1, fmt.Errorf("%v; want 1ms or longer, such as 1s%s", wait, nanoseconds(wait)))
	}
	if !known {
		return nil, nil
	}
	return &queueBounds{size: size, delay: delay, maxWait: wait}, nil
}

// queueFits refuses what makes no sense beside a queue.
func (z *zoneCompiler) queueFits(limits int) error {
	switch name := z.z.Algorithm; {
	case name != "" && name != algorithms.LeakyBucket.String():
		return fmt.Errorf("%s has none; want algorithm leaky_bucket, or leave algorithm out", name)
	case limits > 1:
		return fmt.Errorf("the slots of %d limits would contradict each other; want one limit beside queue", limits)
	case z.z.Charge != "":
		return errors.New("charge is written too, but a slot is as long as what is known before the response; want one of the two")
	case z.z.Count != nil:
		return errors.New("count is written too, but a slot that was waited for cannot be given back; want one of the two")
	}
	return nil
}
