// Package fields tells clients what was decided: it turns outcomes into response fields and the
// body of a refusal. It is pure: no clock, no I/O, no server.
//
//	RateLimit-Policy, RateLimit       draft-ietf-httpapi-ratelimit-headers-11, as Structured Fields (RFC 9651)
//	RateLimit-Limit, -Remaining, …    draft 6 of the same document, one value each
//	X-RateLimit-Limit, -Remaining, …  what GitHub and many others send
//	Retry-After, Cache-Control        on every refusal (RFC 9110, RFC 9111)
//
// # Names
//
// Fields are stored in http.Header under Go's canonical keys, which for these names are Ratelimit,
// Ratelimit-Policy, X-Ratelimit-Limit and so on. That is how a proxy's copied fields, `header
// -RateLimit` and Header.Get meet them. On HTTP/1.1 they are therefore spelled Ratelimit; field
// names are case-insensitive, and HTTP/2 and HTTP/3 send lower case.
//
// # Cost
//
// Everything that does not change from request to request is written at load ([NewSet]). What
// changes is written into a [Scratch] that the caller allocates together with whatever else it
// needs for the request, so that this package allocates nothing on the common path.
package fields
