package safetensors_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
	"github.com/shardweave/shardweave/bindings/go/shardweave/nn"
	"github.com/shardweave/shardweave/bindings/go/shardweave/safetensors"
)

// write makes a file of a header and what is behind it.
func write(t *testing.T, header string, data []byte) string {
	t.Helper()
	var b bytes.Buffer
	binary.Write(&b, binary.LittleEndian, uint64(len(header)))
	b.WriteString(header)
	b.Write(data)
	path := filepath.Join(t.TempDir(), "model.safetensors")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func little(values ...any) []byte {
	var b bytes.Buffer
	for _, v := range values {
		if err := binary.Write(&b, binary.LittleEndian, v); err != nil {
			panic(err)
		}
	}
	return b.Bytes()
}

func alone(t *testing.T) *sw.World {
	t.Helper()
	w, err := sw.Alone()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

func elements(x *sw.Tensor) []float64 {
	all, err := sw.DataAs[float64](x.Full())
	if err != nil {
		panic(err)
	}
	return all
}

func TestAFile(t *testing.T) {
	w := alone(t)
	// In another order than their bytes; numbers of every kind; a scalar; one of no elements.
	path := write(t, `{"b": {"dtype": "BF16", "shape": [2], "data_offsets": [8, 12]}, "__metadata__": {"format": "pt"},`+
		`"a": {"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}, "none": {"dtype":"F64","shape":[3,0],"data_offsets":[12,12]},`+
		`"s": {"dtype":"I64","shape":[],"data_offsets":[12,20]}, "t": {"dtype":"BOOL","shape":[2],"data_offsets":[20,22]}, "h": {"dtype":"F16","shape":[1],"data_offsets":[22,24]},`+
		`"e": {"dtype":"F8_E4M3","shape":[1],"data_offsets":[24,25]}}   `,
		little([]float32{1.5, -2}, []uint16{0x3f80, 0xc000}, int64(-7), []uint8{1, 0}, uint16(0x3c00), uint8(0)))
	f, err := safetensors.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if f.Metadata()["format"] != "pt" {
		t.Error(f.Metadata())
	}
	var names []string
	for _, e := range f.Entries() {
		names = append(names, fmt.Sprint(e.Name, e.DType, e.Shape))
	}
	if got := strings.Join(names, " "); got != "af32 [1 2] bbf16 [2] nonef64 [3 0] si64 [] tbool [2] hf16 [1] ef8e4m3 [1]" {
		t.Error(got)
	}
	for name, want := range map[string][]float64{"a": {1.5, -2}, "b": {1, -2}, "none": {}, "s": {-7}, "t": {1, 0}, "h": {1}} {
		x := f.Tensor(w, name)
		if err := x.Err(); err != nil {
			t.Error(err)
		} else if got := elements(x); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v", name, got)
		}
	}
	if d, err := f.Tensor(w, "t").DType(); err != nil || d != sw.Bool {
		t.Error(d, err)
	}
	for _, name := range []string{"c", "e"} {
		if f.Tensor(w, name).Err() == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if f.Tensor(nil, "a").Err() == nil || (*safetensors.File)(nil).Tensor(w, "a").Err() == nil {
		t.Error("no error")
	}
	for i := 0; i < 2; i++ {
		if err := f.Close(); err != nil {
			t.Error("Close", i, err)
		}
	}
	if f.Tensor(w, "a").Err() == nil {
		t.Error("a closed file is read")
	}
}

func TestBadFiles(t *testing.T) {
	entry := func(dtype, shape, offsets string) string {
		return `{"a": {"dtype": "` + dtype + `", "shape": ` + shape + `, "data_offsets": ` + offsets + `}}`
	}
	eight := make([]byte, 8)
	two := func(a, b string) string {
		return `{"a": {"dtype":"U8","shape":[4],"data_offsets":` + a + `}, "b": {"dtype":"U8","shape":[4],"data_offsets":` + b + `}}`
	}
	for what, c := range map[string]struct {
		header string
		data   []byte
		words  string
	}{
		"no JSON":          {`{"a`, nil, "the header: "},
		"a list":           {`[]`, nil, "does not begin with '{'"},
		"nothing":          {``, nil, "does not begin with '{'"},
		"more behind":      {`{} {}`, nil, "3 bytes follow its end"},
		"cut off":          {`{"a": {"dtype": "F32"`, nil, "the header: "},
		"a name twice":     {`{"a": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}, "a": {"dtype":"U8","shape":[4],"data_offsets":[4,8]}}`, eight, "'a' is there twice"},
		"a dtype":          {entry("F31", "[2]", "[0, 8]"), eight, "there is no dtype 'F31'"},
		"no dtype":         {`{"a": {"shape": [2], "data_offsets": [0, 8]}}`, eight, "wanted dtype, shape and data_offsets"},
		"a shape":          {entry("F32", "[-2]", "[0, 8]"), eight, "the shape is [-2]"},
		"a large shape":    {entry("F32", "[4611686018427387904, 4]", "[0, 8]"), eight, "the shape is"},
		"a shape of text":  {entry("F32", `"x"`, "[0, 8]"), eight, "the header: 'a'"},
		"fractions":        {entry("F32", "[1.5]", "[0, 8]"), eight, "the header: 'a'"},
		"another size":     {entry("F32", "[3]", "[0, 8]"), eight, "8 bytes between them; F32 of shape [3] needs 12"},
		"below 0":          {entry("F32", "[2]", "[-8, 0]"), eight, "data_offsets are -8 and 0"},
		"backwards":        {entry("F32", "[2]", "[8, 0]"), eight, "data_offsets are 8 and 0"},
		"beyond the end":   {entry("F32", "[4]", "[0, 16]"), eight, "the tensors end at byte"},
		"more data":        {entry("F32", "[1]", "[0, 4]"), eight, "the tensors end at byte"},
		"an overlap":       {two("[0,4]", "[3,7]"), eight, "'b': data_offsets begin at 3, which overlaps with what is before it; wanted 4"},
		"the same bytes":   {two("[0,4]", "[0,4]"), eight[:4], "overlaps"},
		"a hole":           {two("[0,4]", "[5,9]"), make([]byte, 9), "'b': data_offsets begin at 5, which leaves bytes out before it; wanted 4"},
		"a late beginning": {entry("F32", "[1]", "[4, 8]"), eight, "leaves bytes out"},
		"metadata":         {`{"__metadata__": {"a": 1}}`, nil, "__metadata__"},
	} {
		_, err := safetensors.Open(write(t, c.header, c.data))
		if err == nil || !strings.Contains(err.Error(), c.words) || !strings.Contains(err.Error(), "model.safetensors: ") {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, all := range map[string][]byte{"empty": nil, "seven": make([]byte, 7), "too long": little(uint64(1<<63), uint64(0)), "longer than the file": little(uint64(9), uint64(0))} {
		path := filepath.Join(t.TempDir(), "model.safetensors")
		if err := os.WriteFile(path, all, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := safetensors.Open(path); err == nil || !strings.Contains(err.Error(), "bytes") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := safetensors.Open("/nonexistent"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

type model struct {
	*sw.Module
	Tokens *nn.Embedding
	Head   *nn.Linear
	Count  *sw.Tensor `sw:",buffer"`
	Cache  *sw.Tensor `sw:",transient"`
}

func newModel(w *sw.World, tied bool) (*model, error) {
	var m *model
	err := sw.Seeded(1, func() error {
		m = &model{Tokens: nn.NewEmbedding(w, 3, 2), Head: nn.NewLinear(w, 2, 3, nn.NoBias), Count: sw.Zeros(w, nil, sw.I64), Cache: sw.Ones(w, []int64{1})}
		if tied {
			m.Head.Weight = m.Tokens.Weight
		}
		_, err := w.ModuleOf(m)
		return err
	})
	return m, err
}

const tokens = `"tokens.weight": {"dtype":"F16","shape":[3,2],"data_offsets":[0,12]}`
const head = `"head.weight": {"dtype":"F16","shape":[3,2],"data_offsets":[0,12]}`
const count = `"count": {"dtype":"I64","shape":[],"data_offsets":[12,20]}`

var sixes = little([]uint16{0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600}) // 1 .. 6

func TestLoad(t *testing.T) {
	first := write(t, "{"+tokens+", "+count+"}", append(append([]byte(nil), sixes...), little(int64(9))...))
	second := write(t, "{"+head+"}", sixes)
	want := []float64{1, 2, 3, 4, 5, 6}
	check := func(w *sw.World, m *model) error {
		for i, x := range []*sw.Tensor{m.Tokens.Weight, m.Head.Weight} {
			if err := x.Err(); err != nil {
				return err
			}
			if got := elements(x); !reflect.DeepEqual(got, want) {
				return fmt.Errorf("weight %d: %v", i, got)
			}
			if requires, err := x.RequiresGrad(); err != nil || !requires {
				return fmt.Errorf("weight %d: %v, %v", i, requires, err)
			}
		}
		if got := elements(m.Count); got[0] != 9 {
			return fmt.Errorf("the buffer: %v", got)
		}
		return nil
	}
	// Plain; and sharded before and after: what is cut unevenly, and of which ranks have nothing.
	w := alone(t)
	m, err := newModel(w, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := safetensors.Load(w, m.Module, first, second); err != nil {
		t.Fatal(err)
	}
	if err := check(w, m); err != nil {
		t.Error(err)
	}
	for _, before := range []bool{true, false} {
		err := sw.RunRanks(context.Background(), 4, func(w *sw.World) error {
			mesh, err := w.ParseMesh("x=4")
			if err != nil {
				return err
			}
			m, err := newModel(w, false)
			if err != nil {
				return err
			}
			plan := sw.NewPlan().Add("tokens.weight", sw.On{"x": "S(0)"}).Add("head.weight", sw.On{"x": "S(1)"})
			for _, load := range []bool{before, !before} {
				if load {
					err = safetensors.Load(w, m.Module, first, second)
				} else {
					err = m.Distribute(mesh, plan, sw.SameEverywhere)
				}
				if err != nil {
					return err
				}
			}
			return check(w, m)
		})
		if err != nil {
			t.Errorf("loaded before it is sharded: %v: %v", before, err)
		}
	}
	// Tied weights: one name is enough, both have to agree.
	for _, files := range [][]string{{first}, {first, second}} {
		m, err := newModel(w, true)
		if err == nil {
			err = safetensors.Load(w, m.Module, files...)
		}
		if err == nil {
			err = check(w, m)
		}
		if err != nil {
			t.Error(err)
		}
	}
}

func TestFilesThatDoNotFit(t *testing.T) {
	w := alone(t)
	good := write(t, "{"+tokens+", "+count+"}", append(append([]byte(nil), sixes...), little(int64(9))...))
	goodHead := write(t, "{"+head+"}", sixes)
	otherHead := write(t, "{"+head+"}", append(append([]byte(nil), sixes[:11]...), 0x47))
	for what, c := range map[string]struct {
		tied  bool
		files []string
		words []string
	}{
		"no file":      {false, nil, []string{"no file has 'tokens.weight'", "no file has 'head.weight'", "no file has 'count'"}},
		"one missing":  {false, []string{good}, []string{"no file has 'head.weight'"}},
		"one too many": {false, []string{good, goodHead, write(t, `{"other": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`, nil)}, []string{"the module has no 'other'"}},
		"a shape":      {false, []string{good, write(t, strings.Replace("{"+head+"}", "[3,2]", "[2,3]", 1), sixes)}, []string{"'head.weight' is [2 3] in the file, and [3 2] in the module"}},
		"twice":        {false, []string{good, goodHead, goodHead}, []string{"'head.weight' is in "}},
		"two weights":  {true, []string{good, otherHead}, []string{"are one in the module, and differ"}},
		"no such file": {false, []string{"/nonexistent"}, []string{"/nonexistent"}},
	} {
		m, err := newModel(w, c.tied)
		if err != nil {
			t.Fatal(err)
		}
		before := elements(m.Tokens.Weight)
		err = safetensors.Load(w, m.Module, c.files...)
		for _, words := range c.words {
			if err == nil || !strings.Contains(err.Error(), words) {
				t.Errorf("%s: %v, wanted %s", what, err, words)
			}
		}
		if !reflect.DeepEqual(elements(m.Tokens.Weight), before) {
			t.Errorf("%s: something was loaded", what)
		}
	}
	m, err := newModel(w, false)
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
	if err := safetensors.Load(w, m.Module, good); !errors.Is(err, sw.FailedPrecondition) {
		t.Error(err)
	}
	if err := safetensors.Load(w, nil, good); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	// Older files of Llama have what is computed.
	old := write(t, `{"model.layers.0.self_attn.rotary_emb.inv_freq": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}}`, nil)
	m, err = newModel(w, false)
	if err == nil {
		err = safetensors.Load(w, m.Module, good, goodHead, old)
	}
	if err != nil {
		t.Error(err)
	}
}

// Whatever a file has, it is an error or what it says, and never a panic or memory without end.
func FuzzOpen(f *testing.F) {
	f.Add([]byte("{" + tokens + ", " + count + "}"))
	f.Add([]byte(`{"__metadata__": {"a": "b"}, "a": {"dtype":"BOOL","shape":[],"data_offsets":[0,1]}} `))
	f.Fuzz(func(t *testing.T, header []byte) {
		file, err := safetensors.Open(write(t, string(header), make([]byte, 20)))
		if err != nil {
			return
		}
		defer file.Close()
		total := int64(0)
		for _, e := range file.Entries() {
			n := int64(e.DType.Size())
			for _, size := range e.Shape {
				n *= size
			}
			total += n
		}
		if total != 20 {
			t.Errorf("%q has %d bytes", header, total)
		}
	})
}
