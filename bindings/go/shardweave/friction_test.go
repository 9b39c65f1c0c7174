package shardweave_test

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// A tensor with two names (tied weights) is one parameter.
func TestTiedWeights(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		module, err := w.NewModule()
		if err != nil {
			return err
		}
		weight := module.Parameter("embedding.weight", sw.Ones(w, []int64{4}))
		if same := module.Parameter("head.weight", weight); same.Err() != nil {
			return same.Err()
		}
		if err := module.Distribute(m, sw.NewPlan().Add("embedding.weight", sw.On{"x": "S(0)"}).Add("head.weight", sw.On{"x": "R"}), sw.SameEverywhere); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("a plan that contradicts itself: %v", err)
		}
		if err := module.Distribute(m, sw.NewPlan().Add("*.weight", sw.On{"x": "S(0)"}), sw.SameEverywhere); err != nil {
			return err
		}
		parameters, err := module.Parameters()
		if err != nil || len(parameters) != 1 || parameters[0].Name != "embedding.weight" {
			return fmt.Errorf("the parameters are %v, %v", parameters, err)
		}
		if same, err := module.Get("head.weight").IsSame(weight); err != nil || !same {
			return fmt.Errorf("the second name: %v, %v", same, err)
		}
		if err := weight.Sum().Backward(); err != nil { // a gradient of four ones
			return err
		}
		if err := module.FinishGradSync(); err != nil {
			return err
		}
		norm, err := sw.ClipGradNorm([]*sw.Tensor{weight, module.Get("head.weight")}, 1)
		if err != nil || math.Abs(norm-2) > 1e-6 {
			return fmt.Errorf("the norm is %v, %v, wanted 2", norm, err)
		}
		grad, err := weight.Grad()
		if err != nil {
			return err
		}
		values, err := sw.Data[float32](grad.Full())
		if err != nil || math.Abs(float64(values[0])-0.5) > 1e-5 {
			return fmt.Errorf("the gradient is %v, %v, wanted 0.5", values, err)
		}
		cases := map[string]func() (*sw.Optimizer, error){
			"SGD":   func() (*sw.Optimizer, error) { return sw.NewSGD([]*sw.Tensor{weight, module.Get("head.weight")}, 1) },
			"AdamW": func() (*sw.Optimizer, error) { return sw.NewAdamW(sw.Tensors(parameters), 1) },
		}
		for _, name := range sortedKeys(cases) {
			make := cases[name]
			if _, err := make(); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		o, err := sw.NewSGD([]*sw.Tensor{weight, module.Get("head.weight")}, 1)
		if err != nil {
			return err
		}
		if err := o.Step(); err != nil { // once: 1 - 0.5
			return err
		}
		values, err = sw.Data[float32](weight.Detach().Full())
		if err != nil || math.Abs(float64(values[3])-0.5) > 1e-5 {
			return fmt.Errorf("after a step %v, %v, wanted 0.5", values, err)
		}
		return nil
	})
}

func TestStateOfOptimizers(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		make := func() (*sw.Tensor, *sw.Optimizer, error) {
			p := sw.Ones(m, []int64{3}, sw.On{"x": "S(0)"}, sw.RequiresGrad)
			o, err := sw.NewAdamW([]*sw.Tensor{p}, 0.1)
			return p, o, err
		}
		step := func(p *sw.Tensor, o *sw.Optimizer) ([]float32, error) {
			if err := p.SetGrad(sw.Full(m, []int64{3}, 2, sw.On{"x": "S(0)"})); err != nil {
				return nil, err
			}
			if err := o.Step(); err != nil {
				return nil, err
			}
			return sw.Data[float32](p.Detach().Full())
		}
		p, o, err := make()
		if err != nil {
			return err
		}
		// There before the first step.
		cases := map[string][]int64{"step": {}, "exp_avg": {3}, "exp_avg_sq": {3}}
		for _, name := range sortedKeys(cases) {
			shape := cases[name]
			state, err := o.State(0, name)
			if err != nil || state == nil {
				return fmt.Errorf("%s: %v, %v", name, state, err)
			}
			if sizes, err := state.Sizes(); err != nil || !reflect.DeepEqual(sizes, shape) {
				return fmt.Errorf("%s: %v, %v", name, sizes, err)
			}
			if sum, err := state.Sum().Item(); err != nil || sum != 0 {
				return fmt.Errorf("%s: %v, %v", name, sum, err)
			}
		}
		if _, err := step(p, o); err != nil {
			return err
		}
		// Another optimizer goes on from it.
		q, again, err := make()
		if err != nil {
			return err
		}
		values, err := sw.Data[float32](p.Detach().Full())
		if err != nil {
			return err
		}
		err = w.With(sw.NoGrad, func() error {
			return q.Apply("aten::copy_", sw.FromSlice(w, values, []int64{3}).Distribute(m, sw.On{"x": "S(0)"}, sw.SameEverywhere)).Err()
		})
		if err != nil {
			return err
		}
		for _, name := range []string{"step", "exp_avg", "exp_avg_sq"} {
			state, err := o.State(0, name)
			if err != nil {
				return err
			}
			if name == "exp_avg" { // laid out otherwise
				state = state.Redistribute(nil)
			}
			if err := again.SetState(0, name, state); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		want, err := step(p, o)
		if err != nil {
			return err
		}
		got, err := step(q, again)
		if err != nil || !reflect.DeepEqual(got, want) {
			return fmt.Errorf("%v, %v, wanted %v", got, err, want)
		}
		for what, err := range map[string]error{
			"no such state":     again.SetState(0, "speed", sw.Ones(w, nil)),
			"no such parameter": again.SetState(1, "step", sw.Ones(w, nil)),
			"negative":          again.SetState(-1, "step", sw.Ones(w, nil)),
			"another shape":     again.SetState(0, "exp_avg", sw.Ones(m, []int64{4})),
		} {
			if err == nil || !strings.Contains(err.Error(), "Optimizer.SetState: ") || strings.Contains(err.Error(), "swv_") {
				return fmt.Errorf("%s: %v", what, err)
			}
		}
		return nil
	})
}

func TestTensorsAsText(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		x := sw.FromSlice(w, []float64{1, 2, 3, 4, 5, 6}, []int64{3, 2})
		y := x.Distribute(m, sw.On{"x": "S(0)"}, sw.SameEverywhere)
		head := strings.SplitN(fmt.Sprintf("%v", y), "\n", 2)
		if len(head) != 1 || !strings.HasPrefix(head[0], "DTensor[3, 2] Double [S(0)] on DeviceMesh(x=2)") {
			return fmt.Errorf("%%v of a DTensor: %v", y)
		}
		if w.Rank() == 0 { // alone: formatting never communicates, whatever the tensor is a part of
			before := mustOf(w.Counters()).Total()
			for _, verb := range []string{"%v", "%+v", "%s", "%#v", "%d"} {
				for _, part := range []any{y, y.Sum(0), []*sw.Tensor{y}, struct{ T *sw.Tensor }{y}, &sw.NamedTensor{Name: "y", Tensor: y}} {
					if text := fmt.Sprintf(verb, part); len(text) < 8 {
						return fmt.Errorf("%s of %T: %s", verb, part, text)
					}
				}
			}
			if text := fmt.Sprintf("%+v", y); text != head[0] {
				return fmt.Errorf("%%+v of a DTensor: %s", text)
			}
			if now := mustOf(w.Counters()).Total(); now != before {
				return fmt.Errorf("formatting has communicated: %v, %v", before, now)
			}
		}
		if text, err := y.ValuesString(); err != nil || !strings.HasPrefix(text, head[0]) || !strings.Contains(text, " 5  6") {
			return fmt.Errorf("the values of a DTensor: %s, %v", text, err)
		}
		if text, err := y.Sum(0).ValuesString(); err != nil || !strings.Contains(text, "9") || !strings.Contains(text, "12") { // a Partial
			return fmt.Errorf("the values of a DTensor: %s, %v", text, err)
		}
		first, second, _ := strings.Cut(fmt.Sprint(x), "\n")
		if strings.TrimSpace(first) != "1  2" || !strings.HasPrefix(strings.TrimSpace(second), "3  4") {
			return fmt.Errorf("%%v of a plain tensor: %v", x)
		}
		if text, err := x.ValuesString(); err != nil || text != x.String() {
			return fmt.Errorf("the values of a plain tensor: %s, %v", text, err)
		}
		if fmt.Sprintf("%+v", x) != fmt.Sprint(x) || fmt.Sprintf("%s", x) != x.String() {
			return fmt.Errorf("%%+v of a plain tensor: %+v", x)
		}
		if text := fmt.Sprintf("%v %+v %d", (*sw.Tensor)(nil), x.Add(sw.Ones(w, []int64{7})), y); !strings.HasPrefix(text, "<nil> Tensor(INVALID_ARGUMENT: Tensor.Add: ") ||
			!strings.Contains(text, "%!d(DTensor") {
			return errors.New(text)
		}
		return nil
	})
}

// Messages name what the program has called, in Go's words.
func TestWordsOfErrors(t *testing.T) {
	w := alone(t)
	m := mustOf(w.ParseMesh("x=1"))
	x, sharded := sw.Ones(w, []int64{2}), sw.Ones(m, []int64{2})
	text := func(_ any, err error) error { return err }
	for want, err := range map[string]error{
		"Ones: argument 'sizes' ":                    sw.Ones(w, []int64{-1}).Err(),
		"Ones: ":                                     sw.Ones(m, []int64{2}, sw.On{"x": "S(5)"}).Err(),
		"Zeros: the dtype among the options ":        sw.Zeros(w, []int64{1}, sw.DType(99)).Err(),
		"FromSlice: argument 'data' has 1 elements":  sw.FromSlice(w, []float32{1}, []int64{2}).Err(),
		"CopyFrom: argument 'data' has 1 elements":   sw.CopyFrom(x, []float32{1}),
		"Data: the elements of the tensor are f32":   text(sw.Data[int8](x)),
		"Data: the tensor is sharded ":               text(sw.Data[float32](sharded)),
		"take Tensor.Local or Tensor.Full":           text(sw.Data[float32](sharded)),
		"Tensor.Add: aten::add.Tensor: ":             x.Add(sw.Ones(w, []int64{3})).Err(),
		"Tensor.Apply: ":                             x.Apply("aten::geluu").Err(),
		"Tensor.Item: the tensor has 2 elements":     text(x.Item()),
		"Tensor.Size: argument 'dim' is 5":           text(x.Size(5)),
		"Tensor.Backward: ":                          x.Backward(),
		"Tensor.Distribute: argument 'source' ":      x.Distribute(m, nil, sw.Source(-2)).Err(),
		"Tensor.ToDLPack: ":                          text(sw.Ones(w, nil, sw.RequiresGrad).ToDLPack()),
		"Tensor.Detach it":                           text(sw.Ones(w, nil, sw.RequiresGrad).ToDLPack()),
		"Tensor.Layout: wanted a DTensor":            text(x.Layout()),
		"Tensor.Local: wanted a DTensor":             x.Local().Err(),
		"Tensor.Redistribute: wanted a DTensor":      x.Redistribute(sw.MustParseLayout("[R]")).Err(),
		"Tensor.Redistribute: [R, R] has 2 ":         sharded.Redistribute(sw.MustParseLayout("[R, R]")).Err(),
		"Tensor.Distribute: [P(sum)] has a Partial":  x.Distribute(m, sw.On{"x": "P"}, sw.SameEverywhere).Err(),
		"it requires grad; distribute it":            sharded.Add(sw.Ones(w, []int64{2}, sw.RequiresGrad)).Err(),
		"NewSGD: lr is -1":                           text(sw.NewSGD([]*sw.Tensor{sw.Ones(w, nil, sw.RequiresGrad)}, -1)),
		"AllToAllV: ":                                sw.AllToAllV(background, w.Comm(), []float32{1}, []int64{2}, []float32{1}, []int64{1}),
		"World.MeshOfRanks: DeviceMesh(x=2): rank 0": text(w.MeshOfRanks([]int64{0, 0}, sw.Dim("x", 2))),
		"Mesh.Flatten: ":                             text(mustOf(w.ParseMesh("a=1,b=1")).Flatten("", "b", "a")),
		"World.Mesh: ":                               text(w.Mesh(sw.Dim("x", 3))),
		"World.ParseMesh: ":                          text(w.ParseMesh("x")),
		"Mesh.Comm: ":                                text(m.Comm("y")),
		"Comm.Split: ":                               text(w.Comm().Split(0, 0, "a\x00")),
		"AllReduce: ":                                sw.AllReduce(background, w.Comm(), []float32{1}, []float32{1, 2}, sw.Sum),
		"NewAdamW: there are no tensors":             text(sw.NewAdamW(nil, 1)),
		"ClipGradNorm: ":                             text(sw.ClipGradNorm([]*sw.Tensor{x}, 1, sw.WithNorm(-1))),
		"ParseLayout: ":                              text(sw.ParseLayout("[X]")),
		"ParsePlan: ":                                text(sw.ParsePlan("{")),
		"FindOp: argument 'name': there is no ":      text(sw.FindOp("aten::geluu")),
		"RunRanks: argument 'ranks' ":                sw.RunRanks(background, 0, func(*sw.World) error { return nil }),
		"Counting: ":                                 text(sw.Counting(5, 2)),
		"Layout.LocalExtent: the mesh has 1":         func() error { _, _, err := sw.MustParseLayout("[R]").LocalExtent([]int64{1}, nil, nil); return err }(),
		"FromEnvironment: ":                          text(sw.FromEnvironment(background)),
		"Module.Get: ":                               mustOf(w.NewModule()).Get("p").Err(),
		"Op.Call: aten::topk: ":                      text(sw.MustFindOp("aten::topk").Call(w, x, "k")),
		"Gradients: there are 1 outputs, but 2 grad": text(sw.Gradients([]*sw.Tensor{x}, []*sw.Tensor{x}, sw.WithGradients(x, x))),
	} {
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "swv") {
			t.Errorf("%q: %v", want, err)
		} else if found := ofCPP.FindString(err.Error()); found != "" {
			t.Errorf("%v: %q is not of Go", err, found)
		}
	}
}

// What is spelled as in C++: f(), A::b, a function of C++ behind Go's.
var ofCPP = regexp.MustCompile(`\w\(\)|[A-Z]\w*::|: (redistribute|from_local|to_local|full_tensor|layout_of|mesh_of|clip_grad_norm|distribute_\w+|init_device_mesh|run_ranks): |FusedOptimizer|int64_t|_tensor\b|\.(slice|flatten)\(`)

func TestItemOfEveryType(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		for _, dtype := range []sw.DType{sw.F32, sw.F64, sw.F16, sw.BF16, sw.F8E4M3, sw.F8E5M2, sw.I8, sw.I16, sw.I32, sw.I64,
			sw.U8, sw.U16, sw.U32, sw.U64, sw.Bool, sw.C32, sw.C64, sw.C128} {
			plain := sw.Ones(w, []int64{1}).To(dtype)
			cases := map[string]*sw.Tensor{"plain": plain, "sharded": plain.Distribute(m, nil, sw.SameEverywhere)}
			for _, where := range sortedKeys(cases) {
				x := cases[where]
				got, err := x.Item()
				if dtype == sw.C32 || dtype == sw.C64 || dtype == sw.C128 {
					if z, err2 := sw.ItemOf[complex128](x); err2 != nil || z != 1 || !errors.Is(err, sw.InvalidArgument) {
						return fmt.Errorf("%v, %s: %v, %v, %v, %v", dtype, where, z, err2, got, err)
					}
				} else if err != nil || got != 1 {
					return fmt.Errorf("%v, %s: %v, %v", dtype, where, got, err)
				}
			}
		}
		return nil
	})
	w := alone(t)
	large := sw.FromSlice(w, []uint64{1<<64 - 1}, nil)
	if got, err := sw.ItemOf[uint64](large); err != nil || got != 1<<64-1 {
		t.Error(got, err)
	}
	if got, err := large.Item(); err != nil || got != 0x1p64 {
		t.Error(got, err)
	}
	odd := sw.FromSlice(w, []int64{1<<53 + 1}, nil)
	if got, err := sw.ItemOf[int64](odd); err != nil || got != 1<<53+1 {
		t.Error(got, err)
	}
	half := sw.FromSlice(w, []float32{-2.5}, nil)
	for what, err := range map[string]error{
		"i32 of 2^53 + 1": second(sw.ItemOf[int32](odd)), "i64 of 2^64 - 1": second(sw.ItemOf[int64](large)),
		"u8 of -2.5": second(sw.ItemOf[uint8](half)), "i8 of -2.5": second(sw.ItemOf[int8](half)), "bool of -2.5": second(sw.ItemOf[bool](half)),
		"u16 of -1":     second(sw.ItemOf[uint16](sw.FromSlice(w, []int8{-1}, nil))),
		"two elements":  second(sw.ItemOf[float32](sw.Ones(w, []int64{2}))),
		"two of u64":    second(sw.ItemOf[uint64](sw.FromSlice(w, []uint64{1, 2}, []int64{2}))),
		"f32 of 1 + 2i": second(sw.ItemOf[float32](sw.FromSlice(w, []complex64{1 + 2i}, nil))),
	} {
		if !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "ItemOf: ") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got, err := sw.ItemOf[int8](sw.FromSlice(w, []int64{300}, nil)); got != 0 || err == nil ||
		!strings.Contains(err.Error(), "which the type int8 does not hold") {
		t.Error(got, err)
	}
	if got, err := sw.ItemOf[uint64](sw.FromSlice(w, []int64{-1}, nil)); got != 0 || err == nil {
		t.Error(got, err)
	}
	if got, err := sw.ItemOf[int32](sw.FromSlice(w, []float64{3e9}, nil)); got != 0 || err == nil {
		t.Error(got, err)
	}
	// Other types of floating point round.
	if got, err := sw.ItemOf[float32](sw.FromSlice(w, []float64{1e300}, nil)); err != nil || !math.IsInf(float64(got), 1) {
		t.Error(got, err)
	}
	if got, err := sw.ItemOf[float32](sw.FromSlice(w, []float64{0.1}, nil)); err != nil || got != 0.1 {
		t.Error(got, err)
	}
	if got, err := sw.ItemOf[int32](sw.FromSlice(w, []float64{2}, nil)); err != nil || got != 2 {
		t.Error(got, err)
	}
	if got, err := sw.ItemOf[complex64](half); err != nil || got != -2.5 {
		t.Error(got, err)
	}
	if got, err := sw.ItemOf[sw.BFloat16](half); err != nil || got.Float32() != -2.5 {
		t.Error(got, err)
	}
	if got, err := sw.ItemOf[int16](sw.FromSlice(w, []bool{true}, nil)); err != nil || got != 1 {
		t.Error(got, err)
	}
}

func second[T any](_ T, err error) error { return err }

// Half precision is what LibTorch has: all bits one way, rounding the other.
func TestHalfPrecision(t *testing.T) {
	w := alone(t)
	bits16, bitsB := make([]sw.Float16, 1<<16), make([]sw.BFloat16, 1<<16)
	for i := range bits16 {
		bits16[i], bitsB[i] = sw.Float16(i), sw.BFloat16(i)
	}
	wide16 := mustOf(sw.Data[float32](sw.FromSlice(w, bits16, []int64{1 << 16}).To(sw.F32)))
	wideB := mustOf(sw.Data[float32](sw.FromSlice(w, bitsB, []int64{1 << 16}).To(sw.F32)))
	same := func(a, b float32) bool {
		return a == b && math.Signbit(float64(a)) == math.Signbit(float64(b)) || a != a && b != b
	}
	for i := range bits16 {
		if got := bits16[i].Float32(); !same(got, wide16[i]) {
			t.Fatalf("f16 %#x is %v, wanted %v", i, got, wide16[i])
		}
		if got := bitsB[i].Float32(); !same(got, wideB[i]) {
			t.Fatalf("bf16 %#x is %v, wanted %v", i, got, wideB[i])
		}
	}
	var all []float32
	for bits := uint64(0); bits < 1<<32; bits += 4099 {
		all = append(all, math.Float32frombits(uint32(bits)))
	}
	for _, f := range wide16 { // and what lies just between two, and beside that
		for _, delta := range []int32{-1, 0, 1} {
			for _, half := range []uint32{0, 1 << 12} {
				all = append(all, math.Float32frombits(uint32(int32(math.Float32bits(f)+half)+delta)))
			}
		}
	}
	x := sw.FromSlice(w, all, []int64{int64(len(all))})
	narrow16, narrowB := mustOf(sw.Data[sw.Float16](x.To(sw.F16))), mustOf(sw.Data[sw.BFloat16](x.To(sw.BF16)))
	for i, f := range all {
		if f != f {
			if h, b := sw.Float16Of(f).Float32(), sw.BFloat16Of(f).Float32(); h == h || b == b {
				t.Fatalf("%v becomes %v and %v", f, h, b)
			}
			continue
		}
		if got := sw.Float16Of(f); got != narrow16[i] {
			t.Fatalf("%v (%#x) as f16 is %#x, wanted %#x", f, math.Float32bits(f), got, narrow16[i])
		}
		if got := sw.BFloat16Of(f); got != narrowB[i] {
			t.Fatalf("%v (%#x) as bf16 is %#x, wanted %#x", f, math.Float32bits(f), got, narrowB[i])
		}
	}
	// To the host and back, and between ranks.
	y := sw.FromSlice(w, []sw.BFloat16{sw.BFloat16Of(1.5), sw.BFloat16Of(-2)}, []int64{2})
	if err := sw.CopyFrom(y, []sw.BFloat16{sw.BFloat16Of(3), sw.BFloat16Of(4)}); err != nil || mustOf(y.Sum().Item()) != 7 {
		t.Error(y, err)
	}
	run(t, 2, func(w *sw.World) error {
		data := []sw.Float16{sw.Float16Of(1.5)}
		err := sw.AllReduce(background, w.Comm(), data, data, sw.Sum)
		if err != nil || data[0].Float32() != 3 {
			return fmt.Errorf("%v, %v", data, err)
		}
		return nil
	})
}

func TestDimensionsFromTheEnd(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		x := sw.Ones(m, []int64{3, 4}, sw.On{"x": "S(-1)"})
		layout, err := x.Layout()
		if err != nil || layout.String() != "[S(1)]" {
			return fmt.Errorf("%v, %v", layout, err)
		}
		return nil
	})
}

func TestEqualMeshesAreOne(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		again, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		x := sw.Ones(m, []int64{3, 4}, sw.On{"x": "S(1)"})
		y := sw.Ones(again, []int64{3, 4}, sw.On{"x": "S(1)"})
		sum, err := x.Add(y).Sum().Item()
		if err != nil || sum != 24 {
			return fmt.Errorf("%v, %v", sum, err)
		}
		return nil
	})
}
