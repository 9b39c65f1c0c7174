package cshardweave

// #include "shim.h"
import "C"

// Handles.
type (
	TokenFile = *C.swv_token_file
	Loader    = *C.swv_loader
)

// TokenFileOpen takes 0 for a file with a header.
func TokenFileOpen(path string, plain int32) (TokenFile, error) {
	if err := checkText("path", path); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out TokenFile
	err := result(C.swv_token_file_open(a.text(path), C.swv_dtype(plain), &out))
	return out, err
}

func TokenFileFree(f TokenFile) { C.swv_token_file_free(f) }

func TokenFileNumTokens(f TokenFile) (int64, error) {
	var out C.int64_t
	err := result(C.swv_token_file_num_tokens(f, &out))
	return int64(out), err
}

func TokenFileDType(f TokenFile) (int32, error) {
	var out C.swv_dtype
	err := result(C.swv_token_file_dtype(f, &out))
	return int32(out), err
}

func TokenFileVocabSize(f TokenFile) (int64, error) {
	var out C.int64_t
	err := result(C.swv_token_file_vocab_size(f, &out))
	return int64(out), err
}

func TokenFileRead(f TokenFile, begin int64, tokens []int64) error {
	return result(C.swv_token_file_read(f, C.int64_t(begin), int64s(tokens), C.size_t(len(tokens))))
}

// LoaderOptions is swv_loader_options.
type LoaderOptions struct {
	Seq, Batch, Epochs, Part, NumParts int64
	Seed                               uint64
	Mesh                               Mesh
	Layout                             Layout
	Prefetch                           int32
	InOrder, DropLast                  bool
}

func LoaderCreate(files []TokenFile, o LoaderOptions) (Loader, error) {
	var out Loader
	err := result(C.swvgo_loader_create(first(files), C.size_t(len(files)), C.int64_t(o.Seq), C.int64_t(o.Batch), C.uint64_t(o.Seed),
		C.int64_t(o.Epochs), o.Mesh, o.Layout, C.int64_t(o.Part), C.int64_t(o.NumParts), C.int32_t(o.Prefetch), flag(o.InOrder),
		flag(o.DropLast), &out))
	return out, err
}

func LoaderFree(l Loader) { C.swv_loader_free(l) }

func LoaderNumSamples(l Loader) (int64, error) {
	var out C.int64_t
	err := result(C.swv_loader_num_samples(l, &out))
	return int64(out), err
}

// LoaderNext gives nil, both, at the end.
func LoaderNext(l Loader) (tokens, targets Tensor, err error) {
	err = result(C.swv_loader_next(l, &tokens, &targets))
	return tokens, targets, err
}

func LoaderPosition(l Loader) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_loader_position(l, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

func LoaderSetPosition(l Loader, json string) error {
	if err := checkText("position", json); err != nil {
		return err
	}
	var a arena
	defer a.free()
	return result(C.swv_loader_set_position(l, a.text(json)))
}
