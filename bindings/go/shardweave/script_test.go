package shardweave_test

import (
	"archive/zip"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// scriptModule is a TorchScript file, written by hand: a module without parameters, and its methods.
func scriptModule(t *testing.T, methods string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "model.pt")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	archive := zip.NewWriter(file)
	for _, part := range [][2]string{
		{"data.pkl", "\x80\x02c__torch__\nM\n)\x81}X\x08\x00\x00\x00training\x89sb."}, // an M with training = False
		{"code/__torch__.py", "class M(Module):\n  __parameters__ = []\n  __buffers__ = []\n  training : bool\n" + methods},
		{"constants.pkl", "\x80\x02)."},
		{"version", "3\n"},
	} {
		writer, err := archive.CreateHeader(&zip.FileHeader{Name: "model/" + part[0], Method: zip.Store})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := writer.Write([]byte(part[1])); err != nil {
			t.Fatal(err)
		}
	}
	if err := archive.Close(); err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

// Every kind of result comes out as what Op.Call says, and goes in again.
func TestWhatModulesReturn(t *testing.T) {
	w := alone(t)
	kinds := []struct {
		name, kind, python string
		want               any
	}{
		{"a_bool", "bool", "True", true},
		{"an_int", "int", "-7", int64(-7)},
		{"a_float", "float", "2.5", 2.5},
		{"a_complex", "complex", "torch.mul(1.0j, 3)", 3i},
		{"a_string", "str", `"Größe"`, "Größe"},
		{"ints", "List[int]", "[3, -1]", []int64{3, -1}},
		{"floats", "List[float]", "[0.5]", []float64{0.5}},
		{"bools", "List[bool]", "[True, False]", []bool{true, false}},
		{"a_device", "Device", `torch.device("cpu")`, sw.Device{Kind: sw.CPU}},
		{"nothing", "NoneType", "None", nil},
	}
	methods := "  def forward(self: __torch__.M, x: Tensor) -> Tuple[Tensor, int]:\n    return (torch.neg(x), 5)\n" +
		"  def tensors(self: __torch__.M, x: List[Tensor]) -> List[Tensor]:\n    return x\n"
	for _, k := range kinds {
		methods += "  def " + k.name + "(self: __torch__.M) -> " + k.kind + ":\n    return " + k.python + "\n"
		if k.want != nil {
			methods += "  def take_" + k.name + "(self: __torch__.M, x: " + k.kind + ") -> " + k.kind + ":\n    return x\n"
		}
	}
	m, err := w.LoadModule(scriptModule(t, methods))
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range kinds {
		got, err := m.Call(k.name)
		if err != nil || len(got) != 1 || !reflect.DeepEqual(got[0], k.want) {
			t.Errorf("%s: %#v, %v", k.name, got, err)
		}
		if k.want == nil {
			continue
		}
		got, err = m.Call("take_"+k.name, k.want)
		if err != nil || len(got) != 1 || !reflect.DeepEqual(got[0], k.want) {
			t.Errorf("take_%s: %#v, %v", k.name, got, err)
		}
	}
	x := sw.FromSlice(w, []float64{1, 2}, []int64{2})
	got, err := m.Call("forward", x)
	if err != nil || len(got) != 2 || !near(mustOf(sw.Data[float64](got[0].(*sw.Tensor))), []float64{-1, -2}) || got[1] != int64(5) {
		t.Errorf("forward: %#v, %v", got, err)
	}
	if got, err = m.Call("tensors", []*sw.Tensor{x, x}); err != nil || len(got) != 1 || len(got[0].([]*sw.Tensor)) != 2 {
		t.Errorf("tensors: %#v, %v", got, err)
	}
	if got, err = m.Call("forward", sw.Named("x", x)); err != nil || len(got) != 2 {
		t.Errorf("by name: %#v, %v", got, err)
	}
	if _, err := m.Call("forward", sw.Named("y", x)); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "Module.Call: forward: ") {
		t.Error(err)
	}
	if mustOf(m.IsTraining()) {
		t.Error("the file was saved in evaluation")
	}
	if err := m.Train(true); err != nil || !mustOf(m.IsTraining()) {
		t.Error(err)
	}
	if _, err := m.Call("backward"); !errors.Is(err, sw.NotFound) || !strings.Contains(err.Error(), "Module.Call: argument 'method': ") {
		t.Error(err)
	}
	if _, err := m.Call("take_an_int", "x"); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "Module.Call: ") {
		t.Error(err)
	}
}
