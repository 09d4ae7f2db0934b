package fields

// The body of a refusal that the module answers itself: problem details (RFC 9457) of the type that the draft defines.

import (
	"net/http"
	"slices"
	"strconv"
)

// ProblemType is the media type of [Set.Problem].
const ProblemType = "application/problem+json"

// QuotaExceeded is the problem type of a refusal.
const QuotaExceeded = "https://iana.org/assignments/http-problem-types#quota-exceeded"

// problem holds the parts of the body that are known at load.
type problem struct {
	head string
	one  [][]byte // the whole body when only that policy is violated
}

func newProblem(status int, policies []Policy) problem {
	p := problem{head: `{"type":"` + QuotaExceeded + `","title":"Quota Exceeded","status":` + strconv.Itoa(status) + `,"violated-policies":[`}
	for i := range policies {
		p.one = append(p.one, []byte(p.head+`"`+policies[i].name+`"]}`))
	}
	return p
}

// Problem is the body for the policies among those applied that refused. It must not be changed: with one
// refusing policy it is shared by all responses.
func (s *Set) Problem(applied []Applied) []byte {
	refused, count := -1, 0
	for i := range applied {
		if o := applied[i].Outcome; o != nil && !o.OK {
			refused = s.first[applied[i].Policy]
			count++
		}
	}
	if count == 1 {
		return s.problem.one[refused]
	}
	var names []string
	for i := range applied {
		if o := applied[i].Outcome; o != nil && !o.OK {
			if name := s.policies[applied[i].Policy].name; !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	body := []byte(s.problem.head)
	for i, name := range names {
		if i > 0 {
			body = append(body, ',')
		}
		// names are safe: they need no escaping in JSON
		body = append(append(append(body, '"'), name...), '"')
	}
	return append(body, "]}"...)
}

// WriteProblem adds the Content-Type of the body.
func WriteProblem(h http.Header, sc *Scratch) {
	delete(h, "Content-Type")
	sc.add(h, "Content-Type", ProblemType)
}
