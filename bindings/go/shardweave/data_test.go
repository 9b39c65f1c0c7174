package shardweave_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// someTokens is a text of 90 bytes as a token file.
func someTokens(name string) *sw.TokenFile {
	folder := mustOf(os.MkdirTemp("", "shardweave"))
	defer os.RemoveAll(folder) // what is open stays
	path := filepath.Join(folder, name)
	text := make([]byte, 90)
	for i := range text {
		text[i] = byte(i * i % 251)
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		panic(err)
	}
	return mustOf(sw.OpenTokenFile(path, sw.U8))
}

func TestTokenFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "plain.bin")
	if err := os.WriteFile(path, []byte{1, 2, 255, 255, 0, 1}, 0o600); err != nil {
		t.Fatal(err)
	}
	file := mustOf(sw.OpenTokenFile(path, sw.U16))
	if n, err := file.NumTokens(); n != 3 || err != nil {
		t.Error(n, err)
	}
	if d, err := file.DType(); d != sw.U16 || err != nil {
		t.Error(d, err)
	}
	if n, err := file.VocabSize(); n != 0 || err != nil {
		t.Error(n, err)
	}
	tokens := make([]int64, 2)
	if err := file.Read(1, tokens); err != nil || !reflect.DeepEqual(tokens, []int64{65535, 256}) {
		t.Error(tokens, err)
	}
	if err := file.Read(2, tokens); !errors.Is(err, sw.OutOfRange) || !strings.Contains(err.Error(), "TokenFile.Read: ") {
		t.Error(err)
	}
	if text := file.String(); text != "TokenFile(3 tokens)" {
		t.Error(text)
	}
	for _, plain := range []sw.DType{0, sw.I64, sw.U32} {
		if _, err := sw.OpenTokenFile(path, plain); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "OpenTokenFile: ") {
			t.Error(plain, err)
		}
	}
	if _, err := sw.OpenTokenFile(path+"2", sw.U8); !errors.Is(err, sw.NotFound) {
		t.Error(err)
	}
}

// batchesOf is the next batches' targets, whole.
func batchesOf(l *sw.TokenLoader, most int) (all [][]int64, err error) {
	for len(all) < most {
		batch, err := l.Next(background)
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		targets, err := sw.Data[int64](batch.Targets.Full())
		if err != nil {
			return nil, err
		}
		all = append(all, targets)
	}
	return all, nil
}

// Batches are the same on any number of ranks, and go on there on any other.
func TestTokenLoader(t *testing.T) {
	files := []*sw.TokenFile{someTokens("a"), someTokens("b")}
	options := sw.TokenLoaderOptions{Seq: 4, Batch: 5, Seed: 3, Epochs: 2}
	w := alone(t)
	whole := mustOf(w.TokenLoader(files, options))
	if n, err := whole.NumSamples(); n != 44 || err != nil {
		t.Error(n, err)
	}
	want := mustOf(batchesOf(whole, 7))
	position := mustOf(whole.Position())
	want = append(want, mustOf(batchesOf(whole, 100))...)
	if len(want) != 18 || len(want[17]) != 3*4 {
		t.Fatal(len(want), len(want[len(want)-1]))
	}
	for ranks := 1; ranks <= 4; ranks++ {
		run(t, ranks, func(w *sw.World) error {
			mesh, err := w.Mesh(sw.Dim("dp", ranks))
			if err != nil {
				return err
			}
			here := options
			here.Mesh, here.Spec, here.Prefetch = mesh, sw.On{"dp": "S(0)"}, ranks-2
			loader, err := w.TokenLoader(files, here)
			if err != nil {
				return err
			}
			got, err := batchesOf(loader, 100)
			if err != nil || !reflect.DeepEqual(got, want) {
				return fmt.Errorf("%d ranks: %v, %w", ranks, got, err)
			}
			if err := loader.SetPosition(position); err != nil {
				return err
			}
			if got, err = batchesOf(loader, 2); err != nil || !reflect.DeepEqual(got, want[7:9]) {
				return fmt.Errorf("%d ranks, from the middle: %v, %w", ranks, got, err)
			}
			here.Seed = uint64(w.Rank())
			if _, err := w.TokenLoader(files, here); ranks > 1 && !errors.Is(err, sw.InvalidArgument) {
				return fmt.Errorf("seeds that differ: %w", err)
			}
			return loader.Close()
		})
	}
	// Parts without a mesh.
	options.Part, options.Parts = 1, 3
	part := mustOf(w.TokenLoader(files, options))
	if got := mustOf(batchesOf(part, 1)); !reflect.DeepEqual(got[0], want[0][8:16]) {
		t.Error(got, want[0])
	}

	done, cancel := context.WithCancel(background)
	cancel()
	if _, err := part.Next(done); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if got := mustOf(batchesOf(part, 1)); !reflect.DeepEqual(got[0], want[1][8:16]) {
		t.Error("the context that was done has cost a batch")
	}
	for _, wrong := range []sw.TokenLoaderOptions{{Seq: -1}, {Batch: -1}, {Epochs: -1}, {Prefetch: -2}, {Prefetch: 5000}, {Part: 2, Parts: 2}, {Spec: sw.On{"dp": "R"}}} {
		if _, err := w.TokenLoader(files, wrong); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "World.TokenLoader: ") {
			t.Errorf("%+v: %v", wrong, err)
		}
	}
	if err := part.SetPosition("{}"); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "has no 'epoch'") {
		t.Error(err)
	}
}
