package caddyfile

import (
	"net/http"
	"slices"
	"strings"
	"testing"
)

// keysOf are the texts of a request's keys; few is false when there are more than may be.
func keysOf(t testing.TB, k *Key, r *http.Request) (keys []string, few bool) {
	t.Helper()
	for nth, of := 0, 1; nth < of; nth++ {
		var key []byte
		var err error
		if key, _, of, err = k.Append(nil, r, nil, nth); err != nil {
			t.Fatal(err)
		}
		if of > MaxKeys {
			return keys, false
		}
		keys = append(keys, Text(string(key)))
	}
	return keys, true
}

// H02: a request has a key for each value that some backend may read.
func TestH02KeysOfARequest(t *testing.T) {
	header := func(values ...string) func(*http.Request) {
		return func(r *http.Request) { r.Header["X-Key"] = values }
	}
	cookies := func(lines ...string) func(*http.Request) { return func(r *http.Request) { r.Header["Cookie"] = lines } }
	query := func(raw string) func(*http.Request) { return func(r *http.Request) { r.URL.RawQuery = raw } }
	for _, tc := range []struct {
		name string
		key  Texts
		edit func(*http.Request)
		want []string // nil: too many
	}{
		{"one header", Texts{"{header.X-Key}"}, header("a"), []string{"a"}},
		{"one header that is a list", Texts{"{header.X-Key}"}, header("a, b"), []string{"a, b"}},
		{"the same header twice", Texts{"{header.X-Key}"}, header("a", "a"), []string{"a"}},
		{"two headers", Texts{"{header.X-Key}"}, header("a", "b", "a"), []string{"a", "b"}},
		{"two headers, one empty", Texts{"{header.X-Key}"}, header("", "b"), []string{"", "b"}},
		{"four headers", Texts{"{header.X-Key}"}, header("a", "b", "c", "d"), []string{"a", "b", "c", "d"}},
		{"five headers", Texts{"{header.X-Key}"}, header("a", "b", "c", "d", "e"), nil},
		{"blanks around a header", Texts{"{header.X-Key}"}, header(" a\t"), []string{"a"}},
		{"blanks around two headers", Texts{"{header.X-Key}"}, header("a", " a", "b "), []string{"a", "b"}},
		{"a header of blanks", Texts{"{header.X-Key}"}, header(" \t"), []string{""}},
		{"blanks around a header in a text", Texts{"u-{header.X-Key}"}, header(" a "), []string{"u-a"}},
		{"no header", Texts{"{header.X-Key}"}, header(), []string{""}},
		{"two headers in a text", Texts{"u-{header.X-Key}"}, header("a", "b"), []string{"u-a", "u-b"}},
		{"two headers in a composite key", Texts{"{client_ip}", "{header.X-Key}"}, header("a", "b"), []string{`["192.0.2.7","a"]`, `["192.0.2.7","b"]`}},
		{"two headers read twice", Texts{"{header.X-Key}", "{header.X-Key}"}, header("a", "b"), []string{`["a","a"]`, `["b","a"]`, `["a","b"]`, `["b","b"]`}},
		{"two addresses", Texts{"{header.X-Key}"}, header("2001:db8::1", "2001:db8:0:1::1"), []string{"2001:db8::/64", "2001:db8:0:1::/64"}},

		{"one parameter", Texts{"{query.k}"}, query("a=1&k=v%20w&b=2"), []string{"v w"}},
		{"two parameters", Texts{"{query.k}"}, query("k=a&%6b=%62&k=a"), []string{"a", "b"}},
		{"another letter case", Texts{"{query.k}"}, query("K=a&k=b"), []string{"b"}},
		{"a parameter that Go drops", Texts{"{query.k}"}, query("k=%zz&k=a"), []string{"%zz", "a"}},
		{"a semicolon that ends a pair to some", Texts{"{query.k}"}, query("k=a;k=b"), []string{"a;k=b", "a", "b"}},
		{"a semicolon behind another parameter", Texts{"{query.k}"}, query("x=a;k=b"), []string{"b"}},
		{"lists and objects", Texts{"{query.k}"}, query("k=a&k[]=b&k%5B0%5d=c&[k]=d&kk=e&k]=f&[k=g"), []string{"a", "b", "c", "d"}},
		{"five parameters", Texts{"{query.k}"}, query("k=a&k=b&k=c&k=d&k=e"), nil},
		{"no parameter", Texts{"{query.k}"}, query("&&=k&;"), []string{""}},

		{"one cookie", Texts{"{cookie.s}"}, cookies("as=0; s=a; xs=1; is=s"), []string{"a"}},
		{"another letter case of the cookie", Texts{"{cookie.SESSION}"}, cookies("session=x; SESSION=good; Session=y"), []string{"good"}},
		{"two cookies", Texts{"{cookie.s}"}, cookies("s=a; t=1;s=b"), []string{"a", "b"}},
		{"two lines", Texts{"{cookie.s}"}, cookies("s=a", "s =b"), []string{"a", "b"}},
		{"a quoted cookie", Texts{"{cookie.s}"}, cookies(`s="good"; s=good; s="good`, `s="g\157od"; s=g%6fod; s="goodX`), []string{"good", "goo"}},
		{"a cookie that Go drops", Texts{"{cookie.s}"}, cookies(`s=a"b`), []string{`a"b`}},
		{"a blank that ends a cookie to some", Texts{"{cookie.s}"}, cookies("s=a s=b"), []string{"a s=b", "a", "b"}},
		{"a comma that ends a cookie to some", Texts{"{cookie.s}"}, cookies("t=1,s=b"), []string{"b"}},
		{"a blank in the value", Texts{"{cookie.s}"}, cookies("s=a b; t=1"), []string{"a b"}},
		{"five cookies", Texts{"{cookie.s}"}, cookies("s=a;s=b;s=c;s=d;s=e"), nil},
		{"no cookie", Texts{"{cookie.s}"}, cookies("s", "t=1", ""), []string{""}},
	} {
		keys, few := keysOf(t, rule(t, Zone{Key: tc.key}).Key, prepare("/", tc.edit))
		if few != (tc.want != nil) || few && !slices.Equal(keys, tc.want) {
			t.Errorf("%s: %q, %t, want %q", tc.name, keys, few, tc.want)
		}
	}
}

// H02: sources with more values than may be cost what they cost to read, however many they are.
func TestManyValuesAreReadOnce(t *testing.T) {
	r := prepare("/", func(r *http.Request) {
		r.Header["Cookie"] = []string{strings.Repeat("s=s s=s,", 2000)}
		r.URL.RawQuery = strings.Repeat("k=%61;k;", 2000)
		for i := range 2000 {
			r.Header.Add("X-Key", strings.Repeat("x", i))
		}
	})
	key := Texts{}
	for range 40 {
		key = append(key, "{header.X-Key}", "{cookie.s}", "{query.k}")
	}
	if _, few := keysOf(t, rule(t, Zone{Key: key}).Key, r); few {
		t.Error("few keys")
	}
}

// H05: a path has one spelling in a key, as in Caddy's own path matcher.
func TestH05PathIsCleaned(t *testing.T) {
	clean, raw := rule(t, Zone{Key: Texts{"{path}"}}).Key, rule(t, Zone{Key: Texts{"{http.request.uri.path}"}, RawPath: true}).Key
	for path, want := range map[string]string{
		"/big.txt": "/big.txt", "//big.txt": "/big.txt", "/./big.txt": "/big.txt", "/x/../big.txt": "/big.txt", "/%62ig.txt": "/big.txt",
		"/BIG.txt": "/big.txt", "/dir/": "/dir/", "/dir//": "/dir/", "/": "/", "//": "/",
	} {
		r := prepare("http://example.com"+path, nil)
		if got := text(t, clean, r); got != want {
			t.Errorf("%s is %q, want %q", path, got, want)
		}
		if got := text(t, raw, r); got != r.URL.Path {
			t.Errorf("%s is %q with raw_path", path, got)
		}
	}
}
