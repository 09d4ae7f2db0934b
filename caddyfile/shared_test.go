package caddyfile

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
)

// writePair makes a certificate and its key in a directory.
func writePair(t *testing.T, dir, name string) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key")
	write(t, cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	write(t, key, string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})))
	return cert, key
}

func write(t *testing.T, file, content string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestTLSFiles(t *testing.T) {
	dir := t.TempDir()
	cert, key := writePair(t, dir, "a")
	_, otherKey := writePair(t, dir, "b")
	none := filepath.Join(dir, "none.pem")
	write(t, none, "no certificate")
	t.Setenv("SLUICE_CERTS", dir)

	for name, tc := range map[string]struct {
		tls  TLS
		want string // in the error, with DIR for the directory
	}{
		"all":         {TLS{CA: cert, Cert: cert, Key: key, ServerName: "cache"}, ""},
		"placeholder": {TLS{CA: "{env.SLUICE_CERTS}/a.pem"}, ""},
		"ca missing":  {TLS{CA: dir + "/x.pem"}, "Caddyfile:2: redis.tls.ca: open DIR/x.pem: no such file or directory"},
		"ca empty":    {TLS{CA: none}, `Caddyfile:2: redis.tls.ca: "DIR/none.pem" holds no certificate; want a file of certificates in PEM`},
		"cert missing": {TLS{Cert: dir + "/x.pem", Key: key},
			"Caddyfile:2: redis.tls.cert: open DIR/x.pem: no such file or directory"},
		"key missing": {TLS{Cert: cert, Key: dir + "/x.key"}, "Caddyfile:2: redis.tls.cert: open DIR/x.key: no such file or directory"},
		"another key": {TLS{Cert: cert, Key: otherKey},
			`Caddyfile:2: redis.tls.cert: "DIR/a.pem" with "DIR/b.key": tls: private key does not match public key; want a certificate and its key in PEM`},
		"no key in it": {TLS{Cert: cert, Key: none},
			`Caddyfile:2: redis.tls.cert: "DIR/a.pem" with "DIR/none.pem": tls: failed to find any PEM data in key input; want a certificate and its key in PEM`},
	} {
		g := Global{Redis: &Redis{Addresses: Texts{"localhost"}, TLS: &tc.tls}, Place: "Caddyfile:2"}
		s, err := g.Compile()
		if tc.want != "" {
			if err == nil || strings.ReplaceAll(err.Error(), dir, "DIR") != tc.want {
				t.Errorf("%s: got %v, want %s", name, err, tc.want)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if c := s.Options.TLS; c.RootCAs == nil || c.ServerName != tc.tls.ServerName || len(c.Certificates) != len(tc.tls.Key[:min(1, len(tc.tls.Key))]) {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// differences are what makes new connections necessary, in the config of TestFingerprint.
var differences = map[string]func(*Global){
	"an address":          func(g *Global) { g.Redis.Addresses[1] = "10.0.0.3" },
	"a port":              func(g *Global) { g.Redis.Addresses[1] = "10.0.0.2:1" },
	"the mode":            func(g *Global) { *g = Global{Redis: &Redis{Addresses: g.Redis.Addresses, Mode: "cluster"}} },
	"the other mode":      func(g *Global) { *g = Global{Redis: &Redis{Addresses: g.Redis.Addresses, Mode: "ring"}} },
	"the master":          func(g *Global) { g.Redis.MasterName = "n" },
	"the user":            func(g *Global) { g.Redis.Username = "v" },
	"the password":        func(g *Global) { g.Redis.Password = "other" },
	"a binary password":   func(g *Global) { g.Redis.Password = "\xfe" },
	"another binary one":  func(g *Global) { g.Redis.Password = "\xff" },
	"the sentinel's user": func(g *Global) { g.Redis.SentinelUsername = "sv" },
	"their password":      func(g *Global) { g.Redis.SentinelPassword = "sq" },
	"the database":        func(g *Global) { g.Redis.DB = "1" },
	"the timeout":         func(g *Global) { g.Redis.Timeout = caddy.Duration(20e6) },
	"the pool":            func(g *Global) { g.Redis.PoolSize = "4" },
	"the prefix":          func(g *Global) { g.Redis.Prefix = "p" },
	"no TLS":              func(g *Global) { g.Redis.TLS = nil },
	"TLS without files":   func(g *Global) { g.Redis.TLS = &TLS{} },
	"no authority":        func(g *Global) { g.Redis.TLS.CA = "" },
	"no certificate":      func(g *Global) { g.Redis.TLS.Cert, g.Redis.TLS.Key = "", "" },
	"the server's name":   func(g *Global) { g.Redis.TLS.ServerName = "cache" },
	"any server":          func(g *Global) { g.Redis.TLS = &TLS{InsecureSkipVerify: true} },
}

// TestFingerprint: connections are kept as long as nothing that matters changes, and only then.
func TestFingerprint(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	write(t, secret, "one\n")
	ca, key := writePair(t, dir, "a")
	base := func() *Global {
		return &Global{Redis: &Redis{
			Addresses: Texts{"10.0.0.1", "10.0.0.2"}, Mode: "sentinel", MasterName: "m", Username: "u",
			Password: "{file." + secret + "}", SentinelUsername: "su", SentinelPassword: "sp", TLS: &TLS{CA: ca, Cert: ca, Key: key},
		}}
	}
	fingerprint := func(g *Global) string {
		t.Helper()
		s, err := g.Compile()
		if err != nil {
			t.Fatal(err)
		}
		return s.Fingerprint
	}
	first := fingerprint(base())
	for name, same := range map[string]func(*Global){
		"nothing":             func(*Global) {},
		"the default port":    func(g *Global) { g.Redis.Addresses[0] = "10.0.0.1:26379" },
		"the default prefix":  func(g *Global) { g.Redis.Prefix = "rate_limit" },
		"the default timeout": func(g *Global) { g.Redis.Timeout = caddy.Duration(50e6) },
		"the fleet":           func(g *Global) { g.FleetSize = "3" },
		"the line":            func(g *Global) { g.Place = "Caddyfile:9" },
	} {
		g := base()
		if same(g); fingerprint(g) != first {
			t.Errorf("%s makes a difference", name)
		}
	}
	seen := map[string]string{first: "nothing"}
	for name, change := range differences {
		g := base()
		change(g)
		f := fingerprint(g)
		if other, ok := seen[f]; ok {
			t.Errorf("%s looks like %s", name, other)
		}
		seen[f] = name
	}
	write(t, secret, "two\n")
	second := fingerprint(base())
	writePair(t, dir, "a")
	if third := fingerprint(base()); second == first || third == second || third == first {
		t.Error("a changed file does not show")
	}
}

// FuzzAddress: whatever a password holds, the error about an address does not show it.
func FuzzAddress(f *testing.F) {
	for _, password := range []string{"hunter2", "hunter2#x", "hunter2/x", "hunter2?x", "a@hunter2", "x@hunter2?y", "%zz", "a://hunter2", "12/3", ":"} {
		f.Add(password)
	}
	f.Fuzz(func(t *testing.T, password string) {
		for _, text := range []string{"redis://app:" + password + "@cache:6379", "app:" + password + "@cache:6379", "redis://:" + password + "@cache/1"} {
			a, err := parseAddress(text)
			if err == nil && (a.dial("1") == "" || strings.Contains(a.dial("1"), "@")) {
				t.Errorf("%q is taken as %+v", text, a)
			}
			shown := harmless(text)
			for _, hidden := range []string{"***@cache:6379", "***@cache/1", "***"} {
				shown = strings.TrimSuffix(shown, hidden)
			}
			if shown != "" && shown != "redis://" && strings.Trim(shown, "abcdefghijklmnopqrstuvwxyz") != "://" {
				t.Errorf("%q shows %q", text, shown)
			}
		}
	})
}

func TestStoreWords(t *testing.T) {
	if got := StoreDefault.String() + StoreLocal.String() + StoreRedis.String(); got != "defaultlocalredis" {
		t.Error(got)
	}
	var zero OnStoreError
	if got := zero.String() + OnStoreErrorAllow.String() + OnStoreErrorDeny.String(); got != "localallowdeny" {
		t.Error(got)
	}
}
