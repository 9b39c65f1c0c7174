package shardweave

import (
	"context"
	"fmt"
	"io"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// TokenFile is a file of token ids, read where it lies: one that tools/tokenize has written, or a plain one. It belongs to no
// rank, and is never closed: the garbage collector ends it.
type TokenFile struct {
	_ noCopy
	*lasting[c.TokenFile]
}

func (f *TokenFile) it() *lasting[c.TokenFile] {
	if f == nil {
		return nil
	}
	return f.lasting
}

// OpenTokenFile opens a file. plain is 0 for one with a header; U8 for a text, whose tokens are its bytes, U16 for a .bin of
// nanoGPT, or U32. InvalidArgument for what is no such file, or not whole.
func OpenTokenFile(path string, plain DType) (*TokenFile, error) {
	handle, err := c.TokenFileOpen(path, int32(plain))
	if err != nil {
		return nil, public(err)
	}
	return &TokenFile{lasting: last(handle, c.TokenFileFree)}, nil
}

// NumTokens is how many there are; never 0.
func (f *TokenFile) NumTokens() (int64, error) { return with(f.it(), c.TokenFileNumTokens) }

// DType is that of a token: U8, U16 or U32.
func (f *TokenFile) DType() (DType, error) {
	number, err := with(f.it(), c.TokenFileDType)
	return DType(number), err
}

// VocabSize is more than every token; 0: not known.
func (f *TokenFile) VocabSize() (int64, error) { return with(f.it(), c.TokenFileVocabSize) }

// Read fills the slice with the tokens from begin on. OutOfRange if the file has less, DataLoss if it has become shorter or
// has an id outside of its vocabulary.
func (f *TokenFile) Read(begin int64, tokens []int64) error {
	_, err := with(f.it(), func(handle c.TokenFile) (struct{}, error) {
		return struct{}{}, c.TokenFileRead(handle, begin, tokens)
	})
	return err
}

// TokenLoaderOptions says what a [TokenLoader] reads.
type TokenLoaderOptions struct {
	Seq   int64 // tokens of a sample; 0: 1
	Batch int64 // samples of a batch, of all ranks together; 0: 1

	// Batches are sharded over it, as Spec says of [Batch, Seq]; nil: plain tensors.
	Mesh *Mesh
	Spec Spec
	// Without a mesh: the rows of part Part of Parts; Parts 0: all of them.
	Part, Parts int64

	Seed     uint64 // of the shuffles, another one in each epoch
	InOrder  bool   // not shuffled
	Epochs   int64  // 0: no end
	DropLast bool   // the last batch is left out if it is not whole
	Prefetch int    // batches that are read ahead, by a thread; 0: two, -1: none
}

// TokenBatch is of I64, [samples, Seq].
type TokenBatch struct {
	Tokens  *Tensor // what the model gets
	Targets *Tensor // what it is to say: one token further on
}

// TokenLoader gives batches of token files, read ahead. What a batch consists of is the same on any number of ranks, which
// read their parts of it and no more:
//
//	loader, err := w.TokenLoader(files, sw.TokenLoaderOptions{Seq: 1024, Batch: 32, Seed: 7, Mesh: mesh, Spec: sw.On{"dp": "S(0)"}})
//	for {
//		batch, err := loader.Next(ctx)
//		if err == io.EOF {
//			break
//		}
//		...
//	}
//	position, err := loader.Position() // for a checkpoint
//
// A loader goes on at a position of another one, on any number of ranks.
type TokenLoader struct {
	_ noCopy
	*thing[c.Loader]
}

func (l *TokenLoader) home() (*rank, error) {
	if l == nil || l.thing == nil {
		return nil, noThing("TokenLoader")
	}
	return l.rank, nil
}

// TokenLoader makes a loader of files one behind the other; a sample is of one file. InvalidArgument for options that cannot
// be, and on all ranks if theirs or their files differ. Collective with a mesh.
func (w *World) TokenLoader(files []*TokenFile, options TokenLoaderOptions) (*TokenLoader, error) {
	o := c.LoaderOptions{Seq: max1(options.Seq), Batch: max1(options.Batch), Epochs: options.Epochs, Part: options.Part,
		NumParts: max1(options.Parts), Seed: options.Seed, InOrder: options.InOrder, DropLast: options.DropLast}
	switch {
	case options.Prefetch == 0:
		o.Prefetch = c.DefaultLoaderPrefetch
	case options.Prefetch > 0:
		if err := int32s(options.Prefetch); err != nil {
			return nil, err
		}
		o.Prefetch = int32(options.Prefetch)
	case options.Prefetch < -1:
		return nil, invalid("Prefetch is %d; wanted -1 (none), or batches", options.Prefetch)
	}
	things := []used{w}
	if options.Mesh != nil {
		things = append(things, options.Mesh)
	}
	return ask(func(r *rank) (_ *TokenLoader, err error) {
		handles := make([]c.TokenFile, len(files))
		for i, file := range files {
			if handles[i], err = file.it().lend(r); err != nil {
				return nil, err
			}
		}
		if options.Mesh != nil {
			o.Mesh = options.Mesh.handle
			if o.Layout, err = r.layoutOn(orReplicated(options.Spec), options.Mesh); err != nil {
				return nil, err
			}
		} else if options.Spec != nil {
			return nil, invalid("there is a Spec, but no Mesh")
		}
		handle, err := c.LoaderCreate(handles, o)
		if err != nil {
			return nil, err
		}
		return &TokenLoader{thing: own(r, "loader", handle, c.LoaderFree)}, nil
	}, things...)
}

// max1 is 1 for 0.
func max1(n int64) int64 {
	if n == 0 {
		return 1
	}
	return n
}

// Close ends the loader, and waits for a read that is under way.
func (l *TokenLoader) Close() error {
	if l == nil {
		return nil
	}
	return l.thing.close()
}

// NumSamples is how many one pass through the files has.
func (l *TokenLoader) NumSamples() (int64, error) {
	return ask(func(*rank) (int64, error) { return c.LoaderNumSamples(l.handle) }, l)
}

// Next is the next batch, and io.EOF after the last one. All ranks call it alike; nothing is sent. An error of a file is this
// rank's alone, comes in the place of its batch, and stays until [TokenLoader.SetPosition]. A context that is done is an
// error at once, and the batch comes with the next call; a read that is under way goes on to its end.
func (l *TokenLoader) Next(ctx context.Context) (*TokenBatch, error) {
	if err := usable(ctx); err != nil {
		return nil, err
	}
	batch, err := ask(func(r *rank) (*TokenBatch, error) {
		tokens, targets, err := c.LoaderNext(l.handle)
		if err != nil || tokens == nil {
			return nil, err
		}
		return &TokenBatch{r.tensor(tokens), r.tensor(targets)}, nil
	}, l)
	if err == nil && batch == nil {
		return nil, io.EOF
	}
	return batch, err
}

// Position is where the next batch begins, as JSON, whatever was read ahead.
func (l *TokenLoader) Position() (string, error) {
	return ask(func(*rank) (string, error) { return c.LoaderPosition(l.handle) }, l)
}

// SetPosition goes on there. The position is one of a loader of the same files, Seq and Seed, on any number of ranks, of any
// Batch; InvalidArgument for anything else. Collective with a mesh.
func (l *TokenLoader) SetPosition(position string) error {
	return do(func(*rank) error { return c.LoaderSetPosition(l.handle, position) }, l)
}

// String says how many tokens there are.
func (f *TokenFile) String() string {
	n, err := f.NumTokens()
	if err != nil {
		return "TokenFile(" + err.Error() + ")"
	}
	return fmt.Sprintf("TokenFile(%d tokens)", n)
}
