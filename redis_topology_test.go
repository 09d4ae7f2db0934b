package sluice_test

import (
	"crypto/tls"
	"crypto/x509"
)

// trusting is how tests reach a server with the certificate of redis.example.
func trusting(pool *x509.CertPool) *tls.Config {
	return &tls.Config{RootCAs: pool, ServerName: "redis.example"}
}
