# Caddy with this module, built by xcaddy from the checkout: docker build -t sluice .
FROM golang:1.26-bookworm AS build
WORKDIR /src
RUN go install github.com/caddyserver/xcaddy/cmd/xcaddy@v0.4.5
COPY . .
RUN CGO_ENABLED=0 xcaddy build v2.11.9 --output /out/usr/bin/caddy --with github.com/caddy-sluice/sluice@v0.0.0=. \
 && mkdir -p /out/etc/ssl/certs /out/config/caddy /out/data/caddy /out/tmp \
 && cp /etc/ssl/certs/ca-certificates.crt /out/etc/ssl/certs/ \
 && echo 'caddy:x:65532:65532::/data:/' > /out/etc/passwd \
 && chown -R 65532:65532 /out/config /out/data && chmod 1777 /out/tmp

# Nothing but the program, the certificates that TLS to upstreams needs, and a user who is not root.
FROM scratch
COPY --from=build /out /
ENV XDG_CONFIG_HOME=/config XDG_DATA_HOME=/data
# Ports above 1023 need no privilege: set http_port 8080 and https_port 8443 in the Caddyfile
# and publish them with -p 80:8080 -p 443:8443 -p 443:8443/udp.
EXPOSE 8080 8443 8443/udp
USER 65532:65532
ENTRYPOINT ["/usr/bin/caddy"]
CMD ["run", "--config", "/etc/caddy/Caddyfile", "--adapter", "caddyfile"]
