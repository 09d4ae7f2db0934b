package fields

// Which families of fields a response carries.

// Families are the families of fields that responses carry. The zero value sends none;
// Retry-After and Cache-Control of a refusal are sent in any case.
type Families struct {
	// IETF sends RateLimit-Policy and RateLimit (draft 11).
	IETF bool
	// Draft6 sends RateLimit-Limit, -Remaining and -Reset (seconds), and draft 6's RateLimit-Policy
	// unless IETF is set too: one list cannot carry both kinds of items.
	Draft6 bool
	// X sends X-RateLimit-Limit, -Remaining and -Reset.
	X bool
	// XDelta makes X-RateLimit-Reset a number of seconds from now instead of seconds since the Unix
	// epoch.
	XDelta bool
}

// Default is what is sent when nothing is configured: the current draft.
var Default = Families{IETF: true}
