package shardweave_test

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"sort"
	"strings"
	"testing"
	"unsafe"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// operations are computed on one rank and on several, values and gradients.
var operations = map[string]func(x, y *sw.Tensor) *sw.Tensor{
	"add":         func(x, y *sw.Tensor) *sw.Tensor { return x.Add(y).Add(1.5) },
	"sub":         func(x, y *sw.Tensor) *sw.Tensor { return x.Sub(y).Sub(2) },
	"mul":         func(x, y *sw.Tensor) *sw.Tensor { return x.Mul(y).Mul(3.0) },
	"div":         func(x, y *sw.Tensor) *sw.Tensor { return x.Div(y).Div(2) },
	"unary":       func(x, y *sw.Tensor) *sw.Tensor { return x.Neg().Exp().Add(y.Log().Tanh()).Abs().Sqrt() },
	"activations": func(x, y *sw.Tensor) *sw.Tensor { return x.Gelu().Add(y.Silu()).Relu().Sigmoid() },
	"pow":         func(x, y *sw.Tensor) *sw.Tensor { return x.Pow(3).Add(y.Pow(0.5)) },
	"softmax":     func(x, y *sw.Tensor) *sw.Tensor { return x.Softmax(1).Add(y.LogSoftmax(0)) },
	"matmul":      func(x, y *sw.Tensor) *sw.Tensor { return x.MatMul(y.Transpose(0, 1)).Add(y.MatMul(x.T())) },
	"linear":      func(x, y *sw.Tensor) *sw.Tensor { return x.Linear(y, nil) },
	"layer norm":  func(x, y *sw.Tensor) *sw.Tensor { return x.LayerNorm([]int64{5}, nil, nil, 1e-5).Mul(y) },
	"sums":        func(x, y *sw.Tensor) *sw.Tensor { return x.Sum(1).Add(y.Mean(1)).Add(x.Sum()).Add(y.Mean()) },
	"max":         func(x, y *sw.Tensor) *sw.Tensor { return x.Max(0).Add(y.CumSum(0).Sum(0)) },
	"shapes": func(x, y *sw.Tensor) *sw.Tensor {
		return x.Unsqueeze(0).Permute(1, 2, 0).Squeeze(2).Add(y.Reshape(7, 5, 1).Select(2, 0))
	},
	"narrow":   func(x, y *sw.Tensor) *sw.Tensor { return sw.Cat([]*sw.Tensor{x.Narrow(0, 2, 3), y}, 0) },
	"stack":    func(x, y *sw.Tensor) *sw.Tensor { return sw.Stack([]*sw.Tensor{x, y}, 1) },
	"compared": func(x, y *sw.Tensor) *sw.Tensor { return x.Mul(x.Lt(0.5).To(sw.F64)).Add(y.Mul(y.Gt(1).To(sw.F64))) },
	"copies":   func(x, y *sw.Tensor) *sw.Tensor { return x.Clone().Add(y.Contiguous()) },
	"new":      func(x, y *sw.Tensor) *sw.Tensor { return x.Rsqrt().Add(y.Clamp(0.4, 2)).Mul(x.Lt(1).Choose(x, y)) },
	"new shapes": func(x, y *sw.Tensor) *sw.Tensor {
		return x.Flatten(0, 1).Reshape(7, 5).Add(y.Sum(1).Unsqueeze(1).Expand(7, 5)).Mul(x.MSELoss(y))
	},
	"by name": func(x, y *sw.Tensor) *sw.Tensor { return x.Apply("aten::leaky_relu", 0.1).Apply("hypot", y) },
}

// computed is the value and both gradients.
func computed(w *sw.World, m *sw.Mesh, spec sw.Spec, f func(x, y *sw.Tensor) *sw.Tensor) ([3][]float64, error) {
	var out [3][]float64
	leaf := func(offset float64) *sw.Tensor {
		values := numbers(35)
		for i := range values {
			values[i] += offset * float64(i%3)
		}
		t := sw.FromSlice(w, values, []int64{7, 5}, sw.RequiresGrad)
		if m == nil {
			return t
		}
		return t.Distribute(m, spec, sw.FromRank(0))
	}
	x, y := leaf(0.01), leaf(0.1)
	z := f(x, y)
	if err := z.Mul(z).Sum().Backward(); err != nil {
		return out, err
	}
	gx, err := x.Grad()
	if err != nil {
		return out, err
	}
	gy, err := y.Grad()
	if err != nil {
		return out, err
	}
	for i, t := range []*sw.Tensor{z.Detach(), gx, gy} {
		if out[i], err = whole(t); err != nil {
			return out, err
		}
	}
	return out, nil
}

func sortedNames() []string {
	var names []string
	for name := range operations {
		names = append(names, name)
	}
	sort.Strings(names)
	return names
}

func TestOperatorsAreThoseOfOneRank(t *testing.T) {
	w := alone(t)
	want := map[string][3][]float64{}
	for name, f := range operations {
		values, err := computed(w, nil, nil, f)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		want[name] = values
	}
	for _, layout := range []struct {
		mesh, text string
		ranks      int
	}{{"a=2", "[S(0)]", 2}, {"a=3", "[S(1)]", 3}, {"a=4", "[R]", 4}, {"a=2,b=2", "[S(0), S(1)]", 4}, {"a=8", "[S(0)]", 8}} {
		t.Run(layout.mesh+" "+layout.text, func(t *testing.T) {
			run(t, layout.ranks, func(w *sw.World) error {
				m, err := w.ParseMesh(layout.mesh)
				if err != nil {
					return err
				}
				for _, name := range sortedNames() { // all ranks in the same order
					err := w.Scope(func() error {
						got, err := computed(w, m, sw.MustParseLayout(layout.text), operations[name])
						if err != nil {
							return fmt.Errorf("%s: %w", name, err)
						}
						for i, what := range []string{"value", "gradient of x", "gradient of y"} {
							if !near(got[i], want[name][i]) {
								return fmt.Errorf("%s, %s: %v, wanted %v", name, what, got[i], want[name][i])
							}
						}
						return nil
					})
					if err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
}

func TestFactoriesAndShapes(t *testing.T) {
	run(t, 3, func(w *sw.World) error {
		m, err := w.Mesh(sw.Dim("x", 3))
		if err != nil {
			return err
		}
		if err := m.Seed(7); err != nil {
			return err
		}
		on := sw.On{"x": "S(0)"}
		for _, c := range []struct {
			tensor *sw.Tensor
			sum    float64
		}{
			{sw.Zeros(m, []int64{7, 5}, on, sw.F64), 0},
			{sw.Ones(m, []int64{7, 5}, on), 35},
			{sw.Full(m, []int64{7, 5}, 2, sw.I64), 70},
			{sw.Full(w, []int64{7, 5}, 3, sw.F16), 105},
			{sw.Empty(m, []int64{0, 5}, on), 0},
		} {
			if sum, err := c.tensor.Sum().Item(); err != nil || sum != c.sum {
				return fmt.Errorf("%v: the sum is %v, %v", c.tensor, sum, err)
			}
		}
		ones := sw.Ones(m, []int64{7, 5}, on, sw.F64)
		part, err := ones.Local().Sizes()
		if err != nil {
			return err
		}
		if want := [][]int64{{3, 5}, {3, 5}, {1, 5}}[w.Rank()]; !reflect.DeepEqual(part, want) {
			return fmt.Errorf("rank %d has %v, wanted %v", w.Rank(), part, want)
		}
		// The same random numbers in every layout.
		a := sw.Randn(m, []int64{7, 5}, on, sw.F64)
		if err := m.SetRandomState(7, 0); err != nil {
			return err
		}
		b := sw.Randn(m, []int64{7, 5}, sw.MustParseLayout("[S(1)]"), sw.F64)
		if largest, err := a.Sub(b.Redistribute(on)).Abs().Max().Item(); err != nil || largest != 0 {
			return fmt.Errorf("random numbers differ by %v, %v", largest, err)
		}
		uniform := sw.Rand(m, []int64{100}, on)
		if least, err := uniform.Lt(0).Sum().Item(); err != nil || least != 0 {
			return fmt.Errorf("%v numbers are below 0, %v", least, err)
		}
		// From parts, with sizes and without.
		local := sw.Full(w, []int64{int64(w.Rank()), 2}, float64(w.Rank()), sw.F64)
		ragged := sw.FromLocal(local, m, sw.MustParseLayout("[S(0, sizes=[0,1,2])]"), nil)
		if sizes, err := ragged.Sizes(); err != nil || !reflect.DeepEqual(sizes, []int64{3, 2}) {
			return fmt.Errorf("%v, %v", sizes, err)
		}
		values, err := whole(ragged)
		if err != nil || !near(values, []float64{1, 1, 2, 2, 2, 2}) {
			return fmt.Errorf("%v, %v", values, err)
		}
		layout, err := ragged.Layout()
		if err != nil || !layout.Equal(sw.MustParseLayout("[S(0, sizes=[0,1,2])]")) {
			return fmt.Errorf("%v, %v", layout, err)
		}
		mesh, err := ragged.Mesh()
		if err != nil {
			return err
		}
		if equal, err := mesh.Equal(m); err != nil || !equal {
			return fmt.Errorf("the mesh is %v, %v", mesh, err)
		}
		return mesh.Close()
	})
}

func TestDataOfEveryType(t *testing.T) {
	w := alone(t)
	check(t, w, sw.F32, []float32{1.5, -2})
	check(t, w, sw.F64, []float64{1.5, -2})
	check(t, w, sw.I8, []int8{1, -2})
	check(t, w, sw.I16, []int16{1, -2})
	check(t, w, sw.I32, []int32{1, -2})
	check(t, w, sw.I64, []int64{1, -2})
	check(t, w, sw.U8, []uint8{1, 255})
	check(t, w, sw.U16, []uint16{1, 65535})
	check(t, w, sw.U32, []uint32{1, 1 << 31})
	check(t, w, sw.U64, []uint64{1, 1 << 63})
	check(t, w, sw.Bool, []bool{true, false})
	check(t, w, sw.C64, []complex64{1 + 2i, -3})
	check(t, w, sw.C128, []complex128{1 + 2i, -3})
}

func check[T sw.Number](t *testing.T, w *sw.World, dtype sw.DType, data []T) {
	t.Helper()
	x := sw.FromSlice(w, data, []int64{2, 1})
	if got := mustOf(x.DType()); got != dtype {
		t.Errorf("the type is %v, wanted %v", got, dtype)
	}
	got, err := sw.Data[T](x)
	if err != nil || !reflect.DeepEqual(got, data) {
		t.Errorf("%v: %v, %v", dtype, got, err)
	}
	other := []T{data[1], data[0]}
	if err := sw.CopyFrom(x, other); err != nil {
		t.Errorf("%v: %v", dtype, err)
	}
	if got, err := sw.Data[T](x); err != nil || !reflect.DeepEqual(got, other) {
		t.Errorf("%v: %v, %v", dtype, got, err)
	}
	var wrong *sw.Error
	if _, err := sw.Data[T](x.To(sw.BF16)); !errors.As(err, &wrong) || !strings.Contains(err.Error(), "bf16") {
		t.Errorf("%v: %v", dtype, err)
	}
}

func TestDLPackSharesMemory(t *testing.T) {
	w := alone(t)
	x := sw.FromSlice(w, []float32{1, 2, 3, 4, 5, 6}, []int64{2, 3})
	managed, err := x.ToDLPack()
	if err != nil {
		t.Fatal(err)
	}
	y := sw.FromDLPack(w, managed)
	if err := x.Apply("aten::mul_.Scalar", 2).Err(); err != nil {
		t.Fatal(err)
	}
	x.Close() // what was lent stays
	if got, err := sw.Data[float32](y); err != nil || !reflect.DeepEqual(got, []float32{2, 4, 6, 8, 10, 12}) {
		t.Error(got, err)
	}
	var wrong *sw.Error
	learns := sw.Ones(w, []int64{2}, sw.RequiresGrad)
	if _, err := learns.ToDLPack(); !errors.As(err, &wrong) || wrong.Code != sw.InvalidArgument {
		t.Error(err)
	}
	if err := sw.FromDLPack(w, nil).Err(); !errors.As(err, &wrong) || wrong.Code != sw.InvalidArgument {
		t.Error(err)
	}
}

// A stream goes to the library, which says that a CPU has none; memory that is taken over ends then, too.
func TestDLPackWithAStream(t *testing.T) {
	w := alone(t)
	stream := unsafe.Pointer(new(int64)) // of which only the address is looked at
	x := sw.Ones(w, []int64{2})
	if _, err := x.ToDLPackOn(stream); err == nil || err.Error() != "INVALID_ARGUMENT: Tensor.ToDLPackOn: argument 'stream' is given; a CPU has no streams" {
		t.Error(err)
	}
	checkLeaks(t, func() {
		managed := mustOf(sw.Ones(w, []int64{2}).ToDLPackOn(nil))
		if err := sw.FromDLPackOn(w, managed, stream).Err(); err == nil || err.Error() != "INVALID_ARGUMENT: FromDLPackOn: argument 'stream' is given; a CPU has no streams" {
			t.Error(err)
		}
	})
}

func TestTensorsOnADevice(t *testing.T) {
	w := alone(t)
	m := mustOf(w.ParseMesh("x=1"))
	here, nowhere := sw.Device{Kind: sw.CPU}, sw.Device{Kind: sw.CUDA, Index: 99} // which every machine lacks
	for _, x := range []*sw.Tensor{sw.Zeros(w, []int64{2}, here), sw.Zeros(m, []int64{2}, here), sw.FromSlice(w, []int64{1, 2}, []int64{2}, here)} {
		if device, err := x.Device(); err != nil || device != here {
			t.Error(device, err)
		}
	}
	for name, x := range map[string]*sw.Tensor{"Zeros": sw.Zeros(w, []int64{2}, nowhere), "Ones": sw.Ones(m, []int64{2}, nowhere),
		"FromSlice": sw.FromSlice(w, []int64{1, 2}, []int64{2}, nowhere)} {
		if err, want := x.Err(), "UNIMPLEMENTED: "+name+": the device among the options is cuda:99, which is not there"; err == nil || !strings.HasPrefix(err.Error(), want) { // and why
			t.Errorf("%v, wanted %s", err, want)
		}
	}
	if err := sw.Ones(w, []int64{2}, sw.Device{Kind: sw.CUDA, Index: 1 << 40}).Err(); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
}

func TestErrorsOfTensors(t *testing.T) {
	w, other := alone(t), alone(t)
	x, y := sw.Ones(w, []int64{2, 3}), sw.Ones(w, []int64{4})
	bad := x.Add(y)
	for what, c := range map[string]struct {
		err  error
		code sw.Code
		part string
	}{
		"shapes":          {bad.Err(), sw.InvalidArgument, "aten::add"},
		"carried":         {bad.Mul(2).Sum().Err(), sw.InvalidArgument, "aten::add"},
		"carried right":   {x.Mul(bad).Err(), sw.InvalidArgument, "aten::add"},
		"backward":        {bad.Backward(), sw.InvalidArgument, "aten::add"},
		"no operator":     {x.Apply("aten::geluu").Err(), sw.NotFound, "gelu"},
		"no such kind":    {x.Apply("aten::gelu", struct{}{}).Err(), sw.InvalidArgument, "struct {}"},
		"two results":     {x.Apply("aten::topk", 1).Err(), sw.InvalidArgument, "not one tensor"},
		"other rank":      {x.Add(sw.Ones(other, []int64{2, 3})).Err(), sw.InvalidArgument, "several ranks"},
		"layout, no mesh": {sw.Ones(w, []int64{2}, sw.On{"x": "R"}).Err(), sw.InvalidArgument, "mesh"},
		"no data":         {sw.FromSlice(w, []float32{1}, []int64{2}).Err(), sw.InvalidArgument, "'data' has 1 elements; sizes [2] need 2"},
		"dtype":           {sw.FromSlice(w, []float32{1}, []int64{1}, sw.I64).Err(), sw.InvalidArgument, "i64"},
		"nothing to join": {sw.Cat(nil, 0).Err(), sw.InvalidArgument, "no tensors"},
	} {
		var asError *sw.Error
		if !errors.Is(c.err, c.code) || !errors.As(c.err, &asError) || !strings.Contains(c.err.Error(), c.part) {
			t.Errorf("%s: %v", what, c.err)
		}
	}
	if _, err := x.Size(2); !errors.Is(err, sw.OutOfRange) {
		t.Error(err)
	}
	if size, err := x.Size(-1); err != nil || size != 3 {
		t.Error(size, err)
	}
	x.Close()
	x.Close()
	if err := x.Add(1).Err(); !errors.Is(err, sw.FailedPrecondition) {
		t.Error(err)
	}
	other.Close()
	if err := sw.Ones(other, []int64{1}).Err(); !errors.Is(err, sw.FailedPrecondition) {
		t.Error(err)
	}
}

func TestScopesAndTheGarbageCollector(t *testing.T) {
	w := alone(t)
	// Operators are looked up once, and kept. In a scope, for garbage of this rank would end when it is next used.
	if err := w.Scope(func() error { return sw.Ones(w, nil).Add(1).Mul(2).Err() }); err != nil {
		t.Fatal(err)
	}
	before := settledHandles()
	if before < 0 {
		t.Fatal("handles are not checked")
	}
	var inside, kept *sw.Tensor
	err := w.Scope(func() error {
		inside = sw.Ones(w, []int64{3})
		for i := 0; i < 100; i++ {
			inside = inside.Add(1)
		}
		return w.Scope(func() error {
			kept = inside.Mul(2).Keep()
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	if now := sw.LiveHandles(); now != before+1 {
		t.Errorf("%d handles are left, wanted 1", now-before)
	}
	if err := inside.Add(1).Err(); !errors.Is(err, sw.FailedPrecondition) {
		t.Error(err)
	}
	if got, err := sw.Data[float32](kept); err != nil || got[0] != 202 {
		t.Error(got, err)
	}
	kept.Close()
	// Outside of scopes the garbage collector finds them.
	for i := 0; i < 50; i++ {
		sw.Ones(w, []int64{3}).Add(1)
	}
	found := func(most int64) {
		t.Helper()
		for i := 0; i < 100 && sw.LiveHandles() > most; i++ {
			runtime.GC()
			runtime.Gosched()
			w.Counters() // a use of the rank
		}
		if now := sw.LiveHandles(); now > most {
			t.Errorf("%d handles are left", now-before)
		}
	}
	found(before + 2)
	// Also those that follow tensors which were closed, but no tensor that is still in use.
	var alive []*sw.Tensor
	for round := 0; round < 3; round++ {
		var closed []*sw.Tensor
		for i := 0; i < 50; i++ {
			closed = append(closed, sw.Full(w, []int64{3}, 7))
		}
		for _, x := range closed {
			if err := x.Close(); err != nil {
				t.Fatal(err)
			}
		}
		for i := 0; i < 50; i++ {
			x := sw.Full(w, []int64{3}, float64(i))
			if i%10 == round {
				alive = append(alive, x)
			}
		}
		closed[0].Close() // again: it means no other tensor
		found(before + 2 + int64(len(alive)))
		for _, x := range closed {
			if err := x.Err(); !errors.Is(err, sw.FailedPrecondition) {
				t.Fatal(err)
			}
		}
	}
	for i, x := range alive {
		if got, err := sw.Data[float32](x); err != nil || got[0] != float32(i%5*10+i/5) {
			t.Error(i, got, err)
		}
	}
	runtime.KeepAlive(kept)
}

func TestEverythingEndsWithTheWorld(t *testing.T) {
	checkLeaks(t, func() {
		run(t, 2, func(w *sw.World) error {
			m, err := w.ParseMesh("x=2")
			if err != nil {
				return err
			}
			if _, err := m.Comm("x"); err != nil {
				return err
			}
			if _, err := m.Trace(); err != nil {
				return err
			}
			module, err := w.NewModule()
			if err != nil {
				return err
			}
			p := module.Parameter("p", sw.Ones(w, []int64{4}))
			if _, err := sw.NewSGD([]*sw.Tensor{p}, 0.1); err != nil {
				return err
			}
			return sw.Ones(m, []int64{2}).Err()
		})
	})
}

func TestARankMovesBetweenGoroutines(t *testing.T) {
	w := alone(t)
	x := sw.FromSlice(w, numbers(3), []int64{3}, sw.RequiresGrad)
	steps := []func() error{
		func() error { x = x.Mul(2); return x.Err() },
		func() error { return w.With(sw.NoGrad, func() error { return x.Clone().Err() }) },
		func() error { return x.Sum().Backward() },
	}
	for _, step := range steps {
		done := make(chan error)
		go func(step func() error) {
			runtime.LockOSThread() // a thread that ends with the goroutine
			done <- step()
		}(step)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
}

func TestCallsOfOperators(t *testing.T) {
	w := alone(t)
	x := sw.FromSlice(w, []float64{3, 1, 2}, []int64{3})
	topk := sw.MustFindOp("aten::topk")
	results, err := topk.Call(w, x, 2, sw.Named("sorted", true))
	if err != nil {
		t.Fatal(err)
	}
	values := mustOf(sw.Data[float64](results[0].(*sw.Tensor)))
	indices := mustOf(sw.Data[int64](results[1].(*sw.Tensor)))
	if !near(values, []float64{3, 2}) || !reflect.DeepEqual(indices, []int64{0, 2}) {
		t.Error(values, indices)
	}
	if schema, err := topk.Schema(); err != nil || !strings.Contains(schema, "aten::topk(Tensor self") {
		t.Error(schema, err)
	}
	chunks, err := sw.MustFindOp("aten::split.Tensor").Call(w, x, 2)
	if err != nil || len(chunks) != 1 || len(chunks[0].([]*sw.Tensor)) != 2 {
		t.Error(chunks, err)
	}
	// Every kind of argument.
	for _, c := range []struct {
		op   string
		args []any
		want []float64
	}{
		{"aten::full", []any{[]int{2}, 1.5, sw.F64}, []float64{1.5, 1.5}},
		{"aten::full", []any{[]int64{1}, int32(2), sw.Named("dtype", sw.F64), sw.Named("device", sw.Device{})}, []float64{2}},
		{"aten::clamp", []any{x, nil, float32(2)}, []float64{2, 1, 2}},
		{"aten::div.Tensor_mode", []any{x, x.Mul(0.4), sw.Named("rounding_mode", "floor")}, []float64{2, 2, 2}},
		{"aten::roll", []any{x, 1, 0}, []float64{2, 3, 1}},
		{"aten::add.Tensor", []any{x, x, sw.Default}, []float64{6, 2, 4}},
		{"aten::cat", []any{[]*sw.Tensor{x, x}}, []float64{3, 1, 2, 3, 1, 2}},
		{"aten::arange", []any{int64(3), sw.Named("dtype", sw.F64)}, []float64{0, 1, 2}},
		{"aten::index.Tensor", []any{x, []*sw.Tensor{results[1].(*sw.Tensor)}}, []float64{3, 2}},
	} {
		op, err := sw.FindOp(c.op)
		if err != nil {
			t.Error(err)
			continue
		}
		got, err := sw.Data[float64](op.Tensor(w, c.args...))
		if err != nil || !near(got, c.want) {
			t.Errorf("%s%v: %v, %v", c.op, c.args, got, err)
		}
	}
	// Results that are no tensors; of operators that every LibTorch has. (Other kinds: TestWhatModulesReturn.)
	for _, c := range []struct {
		op   string
		args []any
		want any
	}{
		{"aten::equal", []any{x, x}, true},
		{"aten::size.int", []any{x, 0}, int64(3)},
		{"aten::stride.int", []any{x, 0}, int64(1)},
		{"aten::item", []any{x.Select(0, 0)}, 3.0},
		{"aten::item", []any{x.Select(0, 0).To(sw.I8)}, int64(3)},
		{"aten::item", []any{x.Select(0, 0).To(sw.C64)}, complex(3, 0)},
		{"aten::item", []any{x.Select(0, 0).To(sw.Bool)}, true},
		{"aten::result_type.Tensor", []any{x, 2}, sw.F64},
		{"aten::can_cast", []any{sw.F64, sw.I64}, false},
	} {
		op, err := sw.FindOp(c.op)
		if err != nil {
			t.Errorf("%s: %v", c.op, err)
			continue
		}
		got, err := op.Call(w, c.args...)
		if err != nil || len(got) != 1 || !reflect.DeepEqual(got[0], c.want) {
			t.Errorf("%s: %#v, %v", c.op, got, err)
		}
	}
	if _, err := sw.FindOp("aten::ad\x00d"); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
}

func TestNothingIsAllocatedOnTheWayIn(t *testing.T) {
	if !countsAllocations {
		t.Skip("the race detector allocates too, and old compilers know less of what escapes")
	}
	w := alone(t)
	x := sw.Ones(w, []int64{2, 2})
	op := sw.MustFindOp("aten::addcmul")
	n := 2.5
	results := testing.AllocsPerRun(200, func() {
		x.Add(x).Close()
	})
	for what, f := range map[string]func(){
		"4 arguments": func() { n += 0.5; op.Tensor(w, x, x, x, n).Close() },
		"a number":    func() { n += 0.5; x.Mul(n).Close() },
		"lists":       func() { x.Sum(0, 1).Close() },
		"tensors":     func() { sw.Cat([]*sw.Tensor{x, x, x, x}, 1).Close() },
		"8 arguments": func() { x.Attention(x, x, true).Close() },
	} {
		if got := testing.AllocsPerRun(200, f); got != results {
			t.Errorf("%s: %v allocations, and of x.Add(x) %v", what, got, results)
		}
	}
	if results != 1 { // the tensor
		t.Errorf("%v allocations for a result", results)
	}
}

func TestPlacements(t *testing.T) {
	for text, want := range map[string][]sw.Placement{
		"[S(1), R]": {{Kind: sw.PlacementShard, Dim: 1}, {Kind: sw.PlacementReplicate}},
		"[P(max)]":  {{Kind: sw.PlacementPartial, ReduceOp: sw.Max}},
		"[S(-1, sf=3), S(0, sizes=[3,0,4])]": {{Kind: sw.PlacementStridedShard, Dim: -1, SplitFactor: 3},
			{Kind: sw.PlacementRaggedShard, Sizes: []int64{3, 0, 4}}},
	} {
		if got, err := sw.MustParseLayout(text).Placements(); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v, wanted %+v", text, got, err, want)
		}
	}
}
