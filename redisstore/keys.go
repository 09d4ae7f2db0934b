package redisstore

// How a counter is named in Redis.

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"net/url"
	"strconv"
	"strings"
	"sync"

	"github.com/caddy-sluice/sluice/algorithms"
)

// digest is 128 bits that stand for space and key together: zones cannot collide, whatever their
// names, and a key of 100 kB is 16 bytes, 22 characters in a name.
type digest [16]byte

// namer builds the names of counters. A space's readable part is built once.
type namer struct {
	prefix string
	spaces sync.Map // algorithms.Space → string
}

// clear is the part of a name that operators read: prefix:zone:algorithm:window in µs, and a colon.
func (n *namer) clear(s algorithms.Space) string {
	if c, ok := n.spaces.Load(s); ok {
		return c.(string)
	}
	text := strings.Join([]string{
		n.prefix, url.QueryEscape(s.Zone), s.Algorithm.String(), strconv.FormatInt(s.Window.Microseconds(), 10), "",
	}, ":")
	n.spaces.Store(s, text)
	return text
}

// append adds the name of a key's counter to dst.
func (n *namer) append(dst []byte, clear string, d digest) []byte {
	dst = append(dst, clear...)
	return base64.RawURLEncoding.AppendEncode(dst, d[:])
}

// sum hashes a key with the readable part, which ends in a number and a colon and so needs no
// length.
func (n *namer) sum(scratch []byte, clear, key string) (digest, []byte) {
	scratch = append(append(scratch[:0], clear...), key...)
	full := sha256.Sum256(scratch)
	if cap(scratch) > 4096 { // a giant key's memory is not kept
		scratch = nil
	}
	return digest(full[:16]), scratch
}

// slot is the cluster slot of a key: CRC16 (XMODEM) of its hash tag, or of all of it.
func slot(key []byte) uint16 {
	if i := bytes.IndexByte(key, '{'); i >= 0 {
		if j := bytes.IndexByte(key[i+1:], '}'); j > 0 {
			key = key[i+1 : i+1+j]
		}
	}
	crc := uint16(0)
	for _, b := range key {
		crc = crc<<8 ^ crcTable[byte(crc>>8)^b]
	}
	return crc & (slots - 1)
}

const slots = 16384

var crcTable = func() (t [256]uint16) {
	for i := range t {
		crc := uint16(i) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
		t[i] = crc
	}
	return t
}()
