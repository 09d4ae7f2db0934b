package redisstore

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/caddy-sluice/sluice/algorithms"
	"github.com/caddy-sluice/sluice/redisstore/redistest"
)

func TestTmp(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client()
	ctx := context.Background()
	charge := algorithms.Charge{Limit: compile(t, "z", algorithms.Policy{Algorithm: algorithms.TokenBucket, Quota: 1000000000, Burst: 1000000000, Window: time.Hour}), Cost: 1}
	p := &part{names: []byte("prefix:token_bucket:zone:3600000:aaaaaaaaaaaaaaaaaaaaaa")}
	a := newAsk(&charge)
	a.nameEnd = len(p.names)
	p.asks = append(p.asks, a)
	cut := func(at string) script {
		if at == "" {
			return newScript(redisTime + body)
		}
		if !strings.Contains(body, at) {
			t.Fatal(at)
		}
		return newScript(redisTime + strings.Replace(body, at, "if true then return '' end\n"+at, 1))
	}
	scs := map[string]script{
		"0start": cut("local unpack, pack"), "1locals": cut("-- log makes"), "2fns": cut("-- One batch, reused"),
		"3calltables": cut("while pos"), "4decoded": cut("  local commit = true"), "5decided": cut("for i = 1, loaded do"), "6all": cut(""),
		"min": newScript(minimal), "empty": newScript("return ''"),
	}
	for round := range 3 {
		for _, n := range []string{"empty", "min", "0start", "1locals", "2fns", "3calltables", "4decoded", "5decided", "6all"} {
			c := call{parts: []*part{p}}
			args := c.build(scs[n], false, "")
			if n == "min" {
				args = []any{"evalsha", scs[n].sha, 1, "min", 10, 100_000_000}
			}
			client.ScriptLoad(ctx, scs[n].text)
			before := server.CPU()
			for range 300 {
				pipe := client.Pipeline()
				for range 16 {
					pipe.Do(ctx, args...)
				}
				if _, err := pipe.Exec(ctx); err != nil {
					t.Fatal(err)
				}
			}
			if round > 0 {
				t.Logf("%s %.2f", n, float64((server.CPU()-before).Nanoseconds())/4800/1000)
			}
		}
	}
}
