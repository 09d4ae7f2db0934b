// Package leaky is the leaky bucket in the terms that operators know from NGINX. As a meter
// ([Meter]) it polices: a request over the rate and beyond the burst is refused at once. As a queue
// ([Queue]) it shapes: such a request waits for its slot and then leaves at the constant rate. Both
// are the same kernel, a meter that answers with a delay; [Room] is where the requests of a process
// wait.
package leaky

import (
	"math"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
)

// Meter is the policy of NGINX's limit_req with nodelay: quota units per window, evenly spaced, and
// burst units above the one in service, so that burst 0 admits one at a time and burst 5 admits six
// at once from idle.
//
// The arithmetic is exact where NGINX counts in thousandths of a request. Quota is 0 (refuse
// everything) or more, window a whole number of microseconds, burst 0 or more; [algorithms.Compile]
// says what is out of range.
//
// Source: the module reference of ngx_http_limit_req_module.
func Meter(quota int64, window time.Duration, burst int64) algorithms.Policy {
	total := burst
	if total < math.MaxInt64 { // left as it is, for Compile to refuse with a number that makes sense
		total++
	}
	return algorithms.Policy{Algorithm: algorithms.LeakyBucket, Quota: quota, Window: window, Burst: total}
}
