package fields

// The body of a refusal that the module answers itself: problem details (RFC 9457) of the types
// that the draft defines.

import (
	"net/http"
	"strconv"
)

// ProblemType is the media type of the bodies.
const ProblemType = "application/problem+json"

const registry = "https://iana.org/assignments/http-problem-types#"

// The problem types: of a refusal, of one because the client is banned, and of one for want of the
// means to count.
const (
	QuotaExceeded            = registry + "quota-exceeded"
	AbnormalUsageDetected    = registry + "abnormal-usage-detected"
	TemporaryReducedCapacity = registry + "temporary-reduced-capacity"
)

// problem holds the parts of a body that are known at load.
type problem struct {
	head string
	one  [][]byte // the whole body when only that policy is violated
}

func newProblem(kind, title string, status int, policies []Policy) problem {
	p := problem{head: head(kind, title, status) + `,"violated-policies":[`}
	for i := range policies {
		p.one = append(p.one, []byte(p.head+policies[i].quoted+`]}`))
	}
	return p
}

// head is how a body begins.
func head(kind, title string, status int) string {
	return `{"type":"` + kind + `","title":"` + title + `","status":` + strconv.Itoa(status)
}

// Problem is the body for the policies among those applied that refused. It must not be changed:
// with one refusing policy it is shared by all responses.
func (s *Set) Problem(applied []Applied) []byte { return s.violated(&s.exceeded, applied) }

// AbnormalUsage is the body for a client that is banned, by the policies that refused. As with
// Problem, it must not be changed.
func (s *Set) AbnormalUsage(applied []Applied) []byte { return s.violated(&s.abnormal, applied) }

func (s *Set) violated(p *problem, applied []Applied) []byte {
	refused, count := -1, 0
	for i := range applied {
		if o := applied[i].Outcome; o != nil && !o.OK {
			refused = applied[i].Policy
			count++
		}
	}
	if count == 1 {
		return p.one[refused]
	}
	body := []byte(p.head)
	for i := range applied {
		if o := applied[i].Outcome; o == nil || o.OK {
			continue
		}
		if len(body) > len(p.head) {
			body = append(body, ',')
		}
		body = append(body, s.policies[applied[i].Policy].quoted...)
	}
	return append(body, "]}"...)
}

// ReducedCapacity is the body of a refusal for want of the means to count, which is no fault of the
// client's.
func ReducedCapacity(status int) []byte {
	return []byte(head(TemporaryReducedCapacity, "Temporary Reduced Capacity", status) + "}")
}

// Malformed is the body of a refusal of a request that cannot be counted as it is. The detail says
// why, in plain text.
func Malformed(status int, detail string) []byte {
	return []byte(head("about:blank", http.StatusText(status), status) + `,"detail":` + strconv.Quote(detail) + "}")
}

// WriteProblem adds the Content-Type of the body.
func WriteProblem(h http.Header, sc *Scratch) {
	delete(h, "Content-Type")
	sc.add(h, "Content-Type", ProblemType)
}
