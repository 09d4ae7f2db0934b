# The two commands of the README are `make run` and `make test`; the rest is what they and CI are made of.
# One set of build flags for everything, so that Caddy is compiled once and not once per command.
export GOFLAGS := -trimpath -buildvcs=false

PORT     ?= 8080
UPSTREAM ?= 8081
XCADDY   := github.com/caddyserver/xcaddy/cmd/xcaddy@v0.4.5
STATIC   := honnef.co/go/tools/cmd/staticcheck@v0.8.2

.PHONY: run test build xcaddy lint walks race bench bench-redis bench-server bench-failure clean

## run: a Caddy with the module in front of an upstream, both on loopback
run: build
	@echo "listening on http://127.0.0.1:$(PORT)/ (5 requests per 10 seconds); stop with Ctrl-C"
	@PORT=$(PORT) UPSTREAM=$(UPSTREAM) bin/caddy run --config cmd/caddy/Caddyfile --adapter caddyfile

## test: every test, on servers that the tests start and stop themselves. One package after the other, since two of them start
## many servers and busy clients, which would take a small machine from each other; built before, since -p 1 holds for the compiler too.
test: redis-server redis-sentinel
	go build ./...
	@echo "testing: about 6 minutes on two cores; a line appears when a package is done, the first after about 3 minutes"
	go test -p 1 ./...

# PROGRAMS are all that tests and benchmarks start beside Go. Each command names those that it needs and installs them; each
# has the name of its package in Debian and Ubuntu. A test compares this list with what the code starts.
PROGRAMS := redis-server redis-sentinel gcc nginx haproxy
.PHONY: $(PROGRAMS)
$(PROGRAMS):
	@command -v $@ >/dev/null || { \
		echo "installing $@"; sudo=$$(command -v sudo || true); \
		$$sudo apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -y -qq $@ >/dev/null; }

# The package manager installs one at a time.
.NOTPARALLEL:

build: bin/caddy
bin/caddy: FORCE
	@go build -o bin/caddy ./cmd/caddy
FORCE:

## xcaddy: the production build, from this checkout, in both spellings. The second asks the module proxy which
## versions there are of a module that is not published; GOPROXY=off answers that there are none, whatever the proxy says.
MODULE := github.com/caddy-sluice/sluice
xcaddy:
	GOBIN=$(CURDIR)/bin go install $(XCADDY)
	bin/xcaddy build v2.11.9 --output bin/caddy-xcaddy --with $(MODULE)@v0.0.0=.
	GOPROXY=off bin/xcaddy build v2.11.9 --output bin/caddy-xcaddy --with $(MODULE)=.
	bin/caddy-xcaddy list-modules | grep -x http.handlers.rate_limit

## lint: vet, staticcheck and gofmt
lint:
	go vet ./...
	go run $(STATIC) ./...
	@test -z "$$(gofmt -l .)" || { echo "gofmt would change:"; gofmt -l .; exit 1; }

## walks: what docs/design/architecture.md says of how to add things, tried with a dummy of each
walks:
	go test -tags walks -run TestWalks .

## race: the race detector, which needs a C compiler, on the packages that share state, and on the handler where it meets concurrency. Package
## algorithms shares nothing; its conformance suite does, with the stores. Left out is what asks Redis from one goroutine only,
## to compare the script with the model or to measure it, which takes as long as all the rest.
race: redis-server redis-sentinel gcc
	go build -race ./...
	go test -race -p 1 ./algorithms/storetest ./leaky ./memstore ./fields
	go test -race -skip 'Parity|Mutants|Differential|Log' ./redisstore
	go test -race -p 1 -run 'F48|F49|F50|F51|Concurrent' . ./telemetry

## bench: the comparison with other limiters (see bench/README.md)
bench:
	cd bench && go run .

## bench-redis: the comparison of decisions in Redis
bench-redis: redis-server
	cd bench && go run ./shared

## bench-server: what a limiter costs a whole server, beside NGINX and HAProxy
bench-server: build nginx haproxy
	cd bench && go run ./server

## bench-failure: what a failing Redis costs requests
bench-failure: redis-server
	cd bench && go run ./failure

clean:
	rm -rf bin
