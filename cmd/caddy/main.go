// Command caddy is Caddy with its standard modules and this rate limiter compiled in.
// It is what `make run` and the tests start; `xcaddy build` makes the same program for production.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/caddy-sluice/sluice"
)

func main() { caddycmd.Main() }
