//go:build !race

package shardweave

import (
	"reflect"
	"testing"
)

// What hot_path.go is for: its functions lie in few pages, and not amid others.
func TestHotPathIsInFewPages(t *testing.T) {
	const page = 4096
	first, last := reflect.ValueOf((*builtin).find).Pointer(), reflect.ValueOf((*rank).enterIfOpen).Pointer()
	for _, f := range []any{(*Tensor).binary, (*Tensor).call, (*rank).one, (*rank).add, (*rank).tensorOf, (*Tensor).Close} {
		if at := reflect.ValueOf(f).Pointer(); at < first || at > last {
			t.Errorf("a function lies at %#x, the others from %#x to %#x", at, first, last)
		}
	}
	if bytes := last - first; bytes > 3*page {
		t.Errorf("%d bytes", bytes)
	}
}
