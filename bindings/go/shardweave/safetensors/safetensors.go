// Package safetensors reads the files in which Hugging Face keeps models (https://github.com/huggingface/safetensors): a
// header of JSON, and the bytes of tensors behind it.
//
//	_, err := w.ModuleOf(model) // with the names of the files' tensors
//	err = safetensors.Load(w, model.Module, "model.safetensors")
//
// What is no such file is an error that says where: a header that is cut off or no JSON, offsets that overlap, leave
// something out or end elsewhere than the file, sizes that are not those of the shape.
package safetensors

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"sort"
	"strings"
	"unsafe"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// mostHeader is the largest header that there is, as in Hugging Face's reader.
const mostHeader = 100_000_000

// dtypes by their names in files.
var dtypes = map[string]sw.DType{"F64": sw.F64, "F32": sw.F32, "F16": sw.F16, "BF16": sw.BF16, "I64": sw.I64, "I32": sw.I32, "I16": sw.I16,
	"I8": sw.I8, "U8": sw.U8, "U16": sw.U16, "U32": sw.U32, "U64": sw.U64, "BOOL": sw.Bool, "F8_E4M3": sw.F8E4M3, "F8_E5M2": sw.F8E5M2}

// Entry is a tensor of a file.
type Entry struct {
	Name  string
	DType sw.DType
	Shape []int64
	at    int64 // in the file
	bytes int64
}

// File is an open file. Goroutines may share it.
type File struct {
	path     string
	file     *os.File
	entries  []Entry
	byName   map[string]int
	metadata map[string]string
}

// Open reads the header, and checks it.
func Open(path string) (*File, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	f := &File{path: path, file: file, byName: map[string]int{}, metadata: map[string]string{}}
	if err := f.readHeader(); err != nil {
		file.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return f, nil
}

// Close closes the file. Closing twice is allowed.
func (f *File) Close() error {
	if f == nil {
		return nil
	}
	if err := f.file.Close(); !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Entries are the file's tensors, in the order of their bytes.
func (f *File) Entries() []Entry {
	if f == nil {
		return nil
	}
	return append([]Entry(nil), f.entries...)
}

// Metadata is what the file says besides.
func (f *File) Metadata() map[string]string {
	if f == nil {
		return nil
	}
	return f.metadata
}

func (f *File) readHeader() error {
	info, err := f.file.Stat()
	if err != nil {
		return err
	}
	var length [8]byte
	if _, err := io.ReadFull(f.file, length[:]); err != nil {
		return fmt.Errorf("the file has %d bytes; wanted 8 at least, which say how long the header is", info.Size())
	}
	n := binary.LittleEndian.Uint64(length[:])
	if n > mostHeader || int64(n) > info.Size()-8 {
		return fmt.Errorf("the header has %d bytes, says the file, which has %d; wanted %d at most", n, info.Size(), mostHeader)
	}
	header := make([]byte, n)
	if _, err := io.ReadFull(f.file, header); err != nil {
		return err
	}
	if len(header) == 0 || header[0] != '{' {
		return errors.New("the header does not begin with '{'")
	}
	if err := f.parse(header); err != nil {
		return fmt.Errorf("the header: %w", err)
	}
	return f.checkOffsets(8+int64(n), info.Size())
}

// parse reads {"name": {...}, ...}, where each name is there once.
func (f *File) parse(header []byte) error {
	all := json.NewDecoder(bytes.NewReader(header))
	if _, err := all.Token(); err != nil { // '{'
		return err
	}
	for all.More() {
		key, err := all.Token()
		if err != nil {
			return err
		}
		name, is := key.(string)
		if !is {
			return fmt.Errorf("%v in place of a name", key)
		}
		if name == "__metadata__" {
			if err := all.Decode(&f.metadata); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			continue
		}
		if _, there := f.byName[name]; there {
			return fmt.Errorf("'%s' is there twice", name)
		}
		var said struct {
			DType   *string   `json:"dtype"`
			Shape   *[]int64  `json:"shape"`
			Offsets *[2]int64 `json:"data_offsets"`
		}
		if err := all.Decode(&said); err != nil {
			return fmt.Errorf("'%s': %w", name, err)
		}
		if said.DType == nil || said.Shape == nil || said.Offsets == nil {
			return fmt.Errorf("'%s': wanted dtype, shape and data_offsets", name)
		}
		dtype, there := dtypes[*said.DType]
		if !there {
			return fmt.Errorf("'%s': there is no dtype '%s' here", name, *said.DType)
		}
		begin, end := said.Offsets[0], said.Offsets[1]
		if begin < 0 || end < begin {
			return fmt.Errorf("'%s': data_offsets are %d and %d; wanted 0 or more, and no end before the beginning", name, begin, end)
		}
		needed := int64(dtype.Size())
		for _, size := range *said.Shape {
			if size < 0 || size > 0 && needed > math.MaxInt64/size {
				return fmt.Errorf("'%s': the shape is %v", name, *said.Shape)
			}
			needed *= size
		}
		if needed != end-begin {
			return fmt.Errorf("'%s': data_offsets %d and %d have %d bytes between them; %s of shape %v needs %d", name, begin, end, end-begin, *said.DType, *said.Shape, needed)
		}
		f.byName[name] = len(f.entries)
		f.entries = append(f.entries, Entry{name, dtype, *said.Shape, begin, end - begin})
	}
	if _, err := all.Token(); err != nil { // '}'
		return err
	}
	if rest := bytes.TrimRight(header[all.InputOffset():], " "); len(rest) > 0 {
		return fmt.Errorf("%d bytes follow its end", len(rest))
	}
	return nil
}

// checkOffsets sees that tensors have every byte behind the header, and have it once.
func (f *File) checkOffsets(begin, end int64) error {
	sort.SliceStable(f.entries, func(i, j int) bool {
		a, b := f.entries[i], f.entries[j]
		return a.at < b.at || a.at == b.at && a.bytes < b.bytes // those of no bytes first
	})
	next := int64(0)
	for i := range f.entries {
		e := &f.entries[i]
		f.byName[e.Name] = i
		if e.at != next {
			what := "overlaps with what is before it"
			if e.at > next {
				what = "leaves bytes out before it"
			}
			return fmt.Errorf("'%s': data_offsets begin at %d, which %s; wanted %d", e.Name, e.at, what, next)
		}
		next += e.bytes
		e.at += begin
	}
	if begin+next != end {
		return fmt.Errorf("the tensors end at byte %d, and the file at %d", begin+next, end)
	}
	return nil
}

// Tensor reads a tensor, plain, of the rank of the world. If that fails, it carries the error.
func (f *File) Tensor(w *sw.World, name string) *sw.Tensor {
	if f == nil {
		return sw.Failed(errors.New("safetensors: the File is nil"))
	}
	at, there := f.byName[name]
	if !there {
		return sw.Failed(fmt.Errorf("%s: there is no tensor '%s'", f.path, name))
	}
	e := f.entries[at]
	switch e.DType {
	case sw.F64:
		return read[float64](w, f, e)
	case sw.F32:
		return read[float32](w, f, e)
	case sw.F16:
		return read[sw.Float16](w, f, e)
	case sw.BF16:
		return read[sw.BFloat16](w, f, e)
	case sw.I64:
		return read[int64](w, f, e)
	case sw.I32:
		return read[int32](w, f, e)
	case sw.I16:
		return read[int16](w, f, e)
	case sw.I8:
		return read[int8](w, f, e)
	case sw.U8:
		return read[uint8](w, f, e)
	case sw.U16:
		return read[uint16](w, f, e)
	case sw.U32:
		return read[uint32](w, f, e)
	case sw.U64:
		return read[uint64](w, f, e)
	case sw.Bool:
		return read[uint8](w, f, e).Ne(0) // whatever the bytes are
	}
	return sw.Failed(fmt.Errorf("%s: '%s' is %v, which Go has no numbers for", f.path, name, e.DType))
}

// read has the bytes as they are: files and the machines that this library is for put the lowest byte first.
func read[T sw.Number](w *sw.World, f *File, e Entry) *sw.Tensor {
	var zero T
	data := make([]T, e.bytes/int64(unsafe.Sizeof(zero)))
	if len(data) > 0 {
		to := unsafe.Slice((*byte)(unsafe.Pointer(&data[0])), e.bytes)
		if _, err := f.file.ReadAt(to, e.at); err != nil {
			return sw.Failed(fmt.Errorf("%s: '%s': %w", f.path, e.Name, err))
		}
	}
	return sw.FromSlice(w, data, e.Shape)
}

// Load writes the tensors of files over the parameters and buffers of a module of the same names, converted to their
// types. The module may be sharded already; then each rank reads all, and keeps its part. What a module has and no file
// does (but for buffers that are transient), what files have and the module does not, and shapes that differ are an
// error that lists them, before anything changes. Of a weight with several names (tied weights) one is enough.
func Load(w *sw.World, m *sw.Module, paths ...string) error {
	files := make([]*File, 0, len(paths))
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	from := map[string]*File{}
	for _, path := range paths {
		f, err := Open(path)
		if err != nil {
			return err
		}
		files = append(files, f)
		for _, e := range f.entries {
			if other, there := from[e.Name]; there {
				return fmt.Errorf("'%s' is in %s and in %s", e.Name, other.path, path)
			}
			from[e.Name] = f
		}
	}
	members, err := m.Parameters()
	if err != nil {
		return err
	}
	buffers, err := m.Buffers()
	if err != nil {
		return err
	}
	members = append(members, buffers...)
	defer func() {
		for _, member := range members {
			member.Close()
		}
	}()
	targets, wrong, err := match(m, members, from)
	if err != nil {
		return err
	}
	if len(wrong) > 0 {
		const most = 20
		if len(wrong) > most {
			wrong = append(wrong[:most], fmt.Sprintf("and %d more", len(wrong)-most))
		}
		return fmt.Errorf("%s: the files do not fit the module: %s", strings.Join(paths, ", "), strings.Join(wrong, "; "))
	}
	for _, f := range files {
		for _, e := range f.entries {
			target := targets[e.Name]
			if target == nil {
				continue
			}
			if err := w.Scope(func() error { return write(target, f.Tensor(w, e.Name)) }); err != nil {
				return fmt.Errorf("'%s': %w", e.Name, err)
			}
		}
	}
	return nil
}

// match finds where each of the files' tensors goes, and what does not fit.
func match(m *sw.Module, members []sw.NamedTensor, from map[string]*File) (targets map[string]*sw.Tensor, wrong []string, err error) {
	targets = map[string]*sw.Tensor{}
	by := map[int]string{} // what a member comes from
	names := make([]string, 0, len(from))
	for name := range from {
		names = append(names, name)
	}
	sort.Strings(names)
	first := map[string]int{}
	for i, member := range members {
		first[member.Name] = i
	}
	for _, name := range names {
		at, there := first[name]
		if !there { // another name of one of them, perhaps
			t := m.Get(name)
			if t.Err() == nil {
				for i, member := range members {
					same, err := member.IsSame(t)
					if err != nil {
						return nil, nil, err
					}
					if same {
						at, there = i, true
					}
				}
			}
			t.Close()
		}
		if !there {
			if !strings.HasSuffix(name, ".rotary_emb.inv_freq") { // which old files of Llama have
				wrong = append(wrong, fmt.Sprintf("the module has no '%s'", name))
			}
			continue
		}
		f := from[name]
		shape, err := members[at].Sizes()
		if err != nil {
			return nil, nil, err
		}
		if got := f.entries[f.byName[name]].Shape; fmt.Sprint(got) != fmt.Sprint(shape) {
			wrong = append(wrong, fmt.Sprintf("'%s' is %v in the file, and %v in the module", name, got, shape))
		}
		if before, there := by[at]; there { // tied weights, of which the files have several
			if same, err := sameBytes(f, name, from[before], before); err != nil || !same {
				wrong = append(wrong, fmt.Sprintf("'%s' and '%s' are one in the module, and differ in the files", before, name))
			}
		}
		by[at] = name
		targets[name] = members[at].Tensor
	}
	for i, member := range members {
		if by[i] == "" && !member.Transient {
			wrong = append(wrong, fmt.Sprintf("no file has '%s'", member.Name))
		}
	}
	return targets, wrong, nil
}

// sameBytes compares tensors of files.
func sameBytes(f *File, name string, g *File, other string) (bool, error) {
	a, b := f.entries[f.byName[name]], g.entries[g.byName[other]]
	if a.DType != b.DType || a.bytes != b.bytes {
		return false, nil
	}
	var left, right [1 << 16]byte
	for at := int64(0); at < a.bytes; at += int64(len(left)) {
		n := a.bytes - at
		if n > int64(len(left)) {
			n = int64(len(left))
		}
		if _, err := f.file.ReadAt(left[:n], a.at+at); err != nil {
			return false, err
		}
		if _, err := g.file.ReadAt(right[:n], b.at+at); err != nil {
			return false, err
		}
		if !bytes.Equal(left[:n], right[:n]) {
			return false, nil
		}
	}
	return true, nil
}

// write makes a plain tensor's elements those of a target, which may be sharded.
func write(target, from *sw.Tensor) error {
	sharded, err := target.IsSharded()
	if err != nil {
		return err
	}
	if sharded {
		mesh, err := target.Mesh()
		if err != nil {
			return err
		}
		defer mesh.Close()
		layout, err := target.Layout()
		if err != nil {
			return err
		}
		from = from.Distribute(mesh, layout, sw.SameEverywhere)
	}
	return target.Assign(from)
}
