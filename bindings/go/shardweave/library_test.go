package shardweave_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// within says whether numbers are equal but for so much of the largest, or of 1.
func within(a, b []float64, tolerance float64) bool {
	largest := 1.0
	for _, x := range b {
		largest = math.Max(largest, math.Abs(x))
	}
	for i := range a {
		if i >= len(b) || !(math.Abs(a[i]-b[i]) <= tolerance*largest) {
			return false
		}
	}
	return len(a) == len(b)
}

// values are all elements of a tensor, on every rank.
func values(t *sw.Tensor) ([]float64, error) { return sw.DataAs[float64](t.Full()) }

// gradients are those of the parameters, and their names.
func gradients(m *sw.Module) (names []string, all [][]float64, err error) {
	parameters, err := m.Parameters()
	if err != nil {
		return nil, nil, err
	}
	for _, p := range parameters {
		grad, err := p.Grad()
		if err != nil {
			return nil, nil, err
		}
		var numbers []float64
		if grad != nil {
			if numbers, err = values(grad); err != nil {
				return nil, nil, err
			}
		}
		names, all = append(names, p.Name), append(all, numbers)
	}
	return names, all, nil
}

// meshes are how many ranks each has.
var meshes = map[string]int{"tp=2": 2, "tp=3": 3, "tp=4": 4, "dp=2,tp=2": 4}

// onMeshes calls body with no mesh, and then on every rank of each.
func onMeshes(t *testing.T, names []string, body func(w *sw.World, m *sw.Mesh, batch sw.On) error) {
	t.Helper()
	if err := body(alone(t), nil, nil); err != nil {
		t.Fatalf("alone: %v", err)
	}
	for _, name := range names {
		run(t, meshes[name], func(w *sw.World) error {
			m, err := w.ParseMesh(name)
			if err != nil {
				return err
			}
			batch := sw.On{}
			if strings.Contains(name, "dp") {
				batch = sw.On{"dp": "S(0)"}
			}
			if err := body(w, m, batch); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		})
	}
}

// placed is a tensor that all ranks have, on a mesh if there is one.
func placed(t *sw.Tensor, m *sw.Mesh, spec sw.On) *sw.Tensor {
	if m == nil {
		return t
	}
	return t.Distribute(m, spec, sw.SameEverywhere)
}

// kind is a module of the library's with these first values.
func kind(w *sw.World, name, options string) (m *sw.Module, err error) {
	err = sw.Seeded(5, func() error {
		m, err = w.ModuleByKind(name, options)
		return err
	})
	return m, err
}

// Values and gradients of modules by kind are those of one rank on every mesh, also where sizes do not divide.
func TestModulesByKind(t *testing.T) {
	type result struct {
		out   []float64
		grads [][]float64
	}
	for what, c := range map[string]struct {
		kind, options, plan string
		inputs              func(w *sw.World) []*sw.Tensor
	}{
		"a linear layer, by its outputs": {"Linear", `{"in_features": 5, "out_features": 7}`, `{"parameter": {"weight": {"tp": "S(0)"}, "bias": {"tp": "S(0)"}}}`,
			func(w *sw.World) []*sw.Tensor { return []*sw.Tensor{counted(w, 6, 5).Cos().To(sw.F32)} }},
		"a linear layer, by its inputs": {"Linear", `{"in_features": 5, "out_features": 7, "bias": false}`, `{"parameter": {"weight": {"tp": "S(1)"}}, "forward": {".output": {"tp": "R"}}}`,
			func(w *sw.World) []*sw.Tensor { return []*sw.Tensor{counted(w, 6, 5).Cos().To(sw.F32)} }},
		"an embedding": {"Embedding", `{"num_embeddings": 11, "embedding_dim": 3}`, `{"parameter": {"weight": {"tp": "S(0)"}}}`,
			func(w *sw.World) []*sw.Tensor {
				return []*sw.Tensor{sw.FromSlice(w, []int64{1, 10, 4, 4, 0, 7, 2, 9}, []int64{4, 2})}
			}},
		"layers one behind the other": {"Sequential", `{"layers": [{"kind": "Linear", "in_features": 5, "out_features": 7}, {"kind": "GELU"},
			{"kind": "LayerNorm", "normalized_shape": [7]}, {"kind": "Linear", "in_features": 7, "out_features": 3}]}`,
			`{"parameter": {"0.*": {"tp": "S(0)"}, "3.weight": {"tp": "S(1)"}}, "forward": {"2.input": {"tp": "R"}, "3.output": {"tp": "R"}}}`,
			func(w *sw.World) []*sw.Tensor { return []*sw.Tensor{counted(w, 6, 5).Cos().To(sw.F32)} }},
	} {
		var want result
		onMeshes(t, []string{"tp=2", "tp=3", "dp=2,tp=2"}, func(w *sw.World, m *sw.Mesh, batch sw.On) error {
			module, err := kind(w, c.kind, c.options)
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			defer module.Close()
			if m != nil {
				plan, err := sw.ParsePlan(c.plan)
				if err != nil {
					return err
				}
				if err := module.Distribute(m, plan, sw.SameEverywhere); err != nil {
					return fmt.Errorf("%s: %w", what, err)
				}
			}
			var args []any
			for _, x := range c.inputs(w) {
				args = append(args, placed(x, m, batch))
			}
			results, err := module.Call("forward", args...)
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			y := results[0].(*sw.Tensor)
			if err := y.Square().Sum().Backward(); err != nil {
				return err
			}
			if err := module.FinishGradSync(); err != nil {
				return err
			}
			var got result
			if got.out, err = values(y); err != nil {
				return err
			}
			names, grads, err := gradients(module)
			if err != nil {
				return err
			}
			got.grads = grads
			if m == nil {
				want = got
				return nil
			}
			if !within(got.out, want.out, 1e-5) {
				return fmt.Errorf("%s gives %v, wanted %v", what, got.out, want.out)
			}
			for i, name := range names {
				if !within(got.grads[i], want.grads[i], 1e-5) {
					return fmt.Errorf("%s: the gradient of %s is %v, wanted %v", what, name, got.grads[i], want.grads[i])
				}
			}
			return nil
		})
	}
	w := alone(t)
	model := mustOf(kind(w, "Sequential", `{"layers": [{"kind": "Linear", "in_features": 2, "out_features": 2}, {"kind": "Dropout", "p": 1.0}]}`))
	x := sw.Ones(w, []int64{1, 2})
	part := mustOf(model.Child("0"))
	if got, err := mustOf(part.Call("forward", x))[0].(*sw.Tensor).Sizes(); err != nil || !reflect.DeepEqual(got, []int64{1, 2}) {
		t.Error(got, err)
	}
	for _, training := range []bool{true, false} { // the library's dropout follows Train
		if err := model.Train(training); err != nil {
			t.Fatal(err)
		}
		any := mustOf(mustOf(model.Call("forward", x))[0].(*sw.Tensor).Abs().Sum().Item())
		if (any == 0) != training {
			t.Errorf("training %v: %v", training, any)
		}
	}
	for what, c := range map[string]struct {
		err   error
		words string
	}{
		"no kind":         {second(w.ModuleByKind("Lineal", "")), "Linear"},
		"no option":       {second(w.ModuleByKind("Linear", `{"in_features": 2, "out_feature": 2}`)), "out_features"},
		"missing":         {second(w.ModuleByKind("Linear", `{"in_features": 2}`)), "out_features"},
		"no JSON":         {second(w.ModuleByKind("Linear", `{`)), ""},
		"a NUL":           {second(w.ModuleByKind("Linear", "{}\x00")), "NUL"},
		"other inputs":    {second(model.Call("forward", x, x)), ""},
		"no such method":  {second(model.Call("backward", x)), "backward"},
		"adding to it":    {model.Parameter("p", sw.Ones(w, []int64{1})).Err(), ""},
		"heads":           {second(w.ModuleByKind("MultiheadAttention", `{"embed_dim": 5, "num_heads": 2}`)), ""},
		"not of the size": {second(part.Call("forward", sw.Ones(w, []int64{1, 3}))), ""},
	} {
		if c.err == nil || !strings.Contains(c.err.Error(), c.words) || strings.Contains(c.err.Error(), "swv_") {
			t.Errorf("%s: %v", what, c.err)
		}
	}
}

// What stays of a module that is larger than a machine is, bit by bit, what one rank makes.
func TestDeferredInit(t *testing.T) {
	const options = `{"layers": [{"kind": "Linear", "in_features": 5, "out_features": 7}, {"kind": "LayerNorm", "normalized_shape": [7]}, {"kind": "Linear", "in_features": 7, "out_features": 3}]}`
	const plan = `{"parameter": {"0.*": {"tp": "S(0)"}, "2.weight": {"tp": "S(1)"}}}`
	given := func(w *sw.World) map[string]*sw.Tensor {
		return map[string]*sw.Tensor{"0.bias": counted(w, 7).To(sw.F32)}
	}
	make := func(w *sw.World) (m *sw.Module, err error) {
		err = sw.DeferredInit(func() error {
			return sw.DeferredInit(func() error { // calls nest
				m, err = w.ModuleByKind("Sequential", options)
				return err
			})
		})
		return m, err
	}
	for what, changes := range map[string]func(w *sw.World) []sw.MaterializeOption{
		"drawn": func(*sw.World) []sw.MaterializeOption { return []sw.MaterializeOption{sw.WithSeed(7)} },
		"and some a value": func(w *sw.World) []sw.MaterializeOption {
			return []sw.MaterializeOption{sw.WithSeed(7), nil, sw.WithValues(given(w))}
		},
	} {
		var want [][]float64
		onMeshes(t, []string{"tp=2", "tp=3", "dp=2,tp=2"}, func(w *sw.World, m *sw.Mesh, _ sw.On) error {
			module, err := make(w)
			if err != nil {
				return err
			}
			defer module.Close()
			for _, deferred := range []bool{true, false} {
				if is, err := module.Get("2.weight").IsDeferred(); err != nil || is != deferred {
					return fmt.Errorf("%s: it is deferred: %v, %v", what, is, err)
				}
				if !deferred {
					break
				}
				if _, err := module.Call("forward", sw.Ones(w, []int64{1, 5})); !errors.Is(err, sw.FailedPrecondition) {
					return fmt.Errorf("%s: values before there are any: %v", what, err)
				}
				if m != nil {
					if err := module.Distribute(m, mustOf(sw.ParsePlan(plan)), sw.SameEverywhere); err != nil {
						return err
					}
				}
				if err := module.Materialize(changes(w)...); err != nil {
					return fmt.Errorf("%s: %w", what, err)
				}
			}
			var got [][]float64
			for _, p := range mustOf(module.Parameters()) {
				all, err := values(p.Tensor)
				if err != nil {
					return err
				}
				got = append(got, all)
			}
			if m == nil {
				want = got
			} else if !reflect.DeepEqual(got, want) {
				return fmt.Errorf("%s: %v, wanted %v", what, got, want)
			}
			return nil
		})
	}
	w := alone(t)
	// Not beyond the end of the body, however it ends, nor on other goroutines.
	failed := errors.New("so")
	func() {
		defer func() { recover() }()
		sw.DeferredInit(func() error { panic("so") })
	}()
	if err := sw.DeferredInit(func() error {
		there := elsewhere(func() bool {
			other, err := sw.Alone()
			if err != nil {
				return true
			}
			defer other.Close()
			return mustOf(sw.Ones(other, []int64{1}).IsDeferred())
		})
		if there {
			t.Error("another goroutine is deferred")
		}
		if !mustOf(sw.Ones(w, []int64{1}).IsDeferred()) || mustOf(sw.FromSlice(w, []float32{1}, nil).IsDeferred()) {
			t.Error("what is made is not deferred, or what is given is")
		}
		return failed
	}); err != failed {
		t.Error(err)
	}
	if mustOf(sw.Ones(w, []int64{1}).IsDeferred()) {
		t.Error("it goes on")
	}
	var x *sw.Tensor
	if err := sw.DeferredInit(func() error { x = sw.Ones(w, []int64{2}).Mul(3); return x.Err() }); err != nil {
		t.Fatal(err)
	}
	if _, err := x.Sum().Item(); !errors.Is(err, sw.FailedPrecondition) {
		t.Error(err)
	}
	module := mustOf(make(w))
	for what, c := range map[string]struct {
		err  error
		code sw.Code
	}{
		"no such name":  {module.Materialize(sw.WithValues(map[string]*sw.Tensor{"0.weights": sw.Ones(w, []int64{7, 5})})), sw.NotFound},
		"another shape": {module.Materialize(sw.WithValues(map[string]*sw.Tensor{"0.weight": sw.Ones(w, []int64{5, 7})})), sw.InvalidArgument},
		"nil":           {module.Materialize(sw.WithValues(map[string]*sw.Tensor{"0.weight": nil})), sw.InvalidArgument},
		"no body":       {sw.DeferredInit(nil), sw.InvalidArgument},
	} {
		if !errors.Is(c.err, c.code) || strings.Contains(c.err.Error(), "swv_") {
			t.Errorf("%s: %v", what, c.err)
		}
	}
	if !mustOf(module.Get("0.weight").IsDeferred()) {
		t.Error("an error has changed something")
	}
	if err := module.Materialize(); err != nil {
		t.Error(err)
	}
	if err := module.Materialize(sw.WithValues(map[string]*sw.Tensor{"0.weight": sw.Ones(w, []int64{7, 5})})); !errors.Is(err, sw.FailedPrecondition) {
		t.Errorf("a value for what has one: %v", err)
	}
}

// elsewhere is what f gives on another goroutine.
func elsewhere(f func() bool) bool {
	result := make(chan bool)
	go func() { result <- f() }()
	return <-result
}

// What runs may close the module that it runs, which was the only handle: of the library's and of Go's own.
func TestAModuleMayBeClosedByWhatItRuns(t *testing.T) {
	const options = `{"layers": [{"kind": "Linear", "in_features": 5, "out_features": 7}, {"kind": "GELU"}, {"kind": "Linear", "in_features": 7, "out_features": 3}]}`
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("tp=2")
		if err != nil {
			return err
		}
		x := counted(w, 4, 5).Cos().To(sw.F32)
		sharded := x.Distribute(m, nil, sw.SameEverywhere)
		own := func(x *sw.Tensor) (*sw.Module, func() *sw.Tensor, error) {
			module, err := w.NewModule()
			if err != nil {
				return nil, nil, err
			}
			numbers := make([]float32, 35)
			for i := range numbers {
				numbers[i] = float32(i%7) - 2.5
			}
			weight := module.Parameter("weight", sw.FromSlice(w, numbers, []int64{7, 5}, sw.RequiresGrad))
			return module, func() *sw.Tensor {
				module.Close()
				return x.Linear(weight, nil).Square()
			}, module.Err()
		}
		library := func(x *sw.Tensor) (*sw.Module, func() *sw.Tensor, error) {
			module, err := kind(w, "Sequential", options)
			return module, func() *sw.Tensor {
				results, err := module.Call("forward", x)
				if err != nil {
					return sw.Failed(err)
				}
				module.Close()
				return results[0].(*sw.Tensor)
			}, err
		}
		cases := map[string]func(*sw.Tensor) (*sw.Module, func() *sw.Tensor, error){"Go's": own, "the library's": library}
		for _, name := range sortedKeys(cases) {
			made := cases[name]
			for what := 0; what < 3; what++ {
				module, runs, err := made(sharded)
				if err != nil {
					return err
				}
				if err := module.Distribute(m, nil, sw.SameEverywhere); err != nil {
					return err
				}
				switch what {
				case 0:
					_, _, err = module.Memory(runs)
				case 1:
					_, _, err = module.ListCommunication(runs)
				default:
					reference, runsReference, failed := made(x)
					if failed != nil {
						return failed
					}
					var same bool
					var table string
					same, table, _, err = module.Verify(runs, reference, runsReference)
					if err == nil && !same {
						err = errors.New(table)
					}
					if failed := reference.ZeroGrad(); !errors.Is(failed, sw.FailedPrecondition) || !strings.Contains(failed.Error(), "closed") {
						return fmt.Errorf("%s, the reference: %v", name, failed)
					}
				}
				if err != nil {
					return fmt.Errorf("%s, %d: %w", name, what, err)
				}
				if err := module.ZeroGrad(); !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "closed") {
					return fmt.Errorf("%s, %d: %v", name, what, err)
				}
			}
		}
		// And the module of a forward; a forward itself ends with an error that says so.
		for _, closesForward := range []bool{false, true} {
			module, runs, err := own(x)
			if err != nil {
				return err
			}
			forward, err := module.Forward("")
			if err != nil {
				return err
			}
			y := forward.Run(func([]*sw.Tensor) *sw.Tensor {
				if closesForward {
					forward.Close()
				}
				return runs()
			}, x)
			if err := y.Err(); closesForward != (err != nil) || closesForward && !strings.Contains(err.Error(), "the forward was closed") {
				return fmt.Errorf("closing the forward, %v: %v", closesForward, err)
			}
		}
		return nil
	})
}

// Reports about a module that is sharded: what it is, holds, sends, and whether it computes what one rank does.
func TestReportsOfModules(t *testing.T) {
	const options = `{"layers": [{"kind": "Linear", "in_features": 5, "out_features": 7}, {"kind": "GELU"}, {"kind": "Linear", "in_features": 7, "out_features": 3}]}`
	plain := mustOf(kind(alone(t), "Sequential", options))
	if _, _, err := plain.ListCommunication(func() *sw.Tensor { return nil }); !errors.Is(err, sw.FailedPrecondition) {
		t.Errorf("of a plain module: %v", err)
	}
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("tp=2")
		if err != nil {
			return err
		}
		module, err := kind(w, "Sequential", options)
		if err != nil {
			return err
		}
		reference, err := kind(w, "Sequential", options)
		if err != nil {
			return err
		}
		plan, err := module.StylesPlan(m, `{"0": "colwise", "2": "rowwise"}`, "")
		if err != nil {
			return err
		}
		if err := module.Distribute(m, plan, sw.SameEverywhere); err != nil {
			return err
		}
		x := counted(w, 4, 5).Cos().To(sw.F32)
		sharded := x.Distribute(m, nil, sw.SameEverywhere)
		forward := func(module *sw.Module, x *sw.Tensor) func() *sw.Tensor {
			return func() *sw.Tensor {
				results, err := module.Call("forward", x)
				if err != nil {
					return sw.Failed(err)
				}
				return results[0].(*sw.Tensor)
			}
		}

		table, text, err := module.Dump()
		var tree struct {
			Modules []struct {
				Name, Type string
				Tensors    []struct {
					Name       string
					Shape      []int64
					LocalShape []int64 `json:"local_shape"`
				}
			}
		}
		if err == nil {
			err = json.Unmarshal([]byte(text), &tree)
		}
		if err != nil || len(tree.Modules) != 3 || len(tree.Modules[0].Tensors) != 2 || !reflect.DeepEqual(tree.Modules[0].Tensors[0].LocalShape, []int64{4 - int64(w.Rank()), 5}) || !strings.Contains(table, "weight") {
			return fmt.Errorf("dump: %v\n%s\n%s", err, table, text)
		}

		var memory []struct {
			Module                                      string
			Parameters, Buffers, Gradients, Activations int64
		}
		for _, measured := range []bool{false, true} {
			var body func() *sw.Tensor
			if measured {
				body = forward(module, sharded)
			}
			table, text, err = module.Memory(body)
			memory = nil
			if err == nil {
				err = json.Unmarshal([]byte(text), &memory)
			}
			var parameters, activations int64
			for _, line := range memory {
				parameters += line.Parameters
				activations += line.Activations
			}
			own := int64(4 - w.Rank())
			if err != nil || parameters != 4*(own*5+own+3*own+3) && len(memory) == 0 || (activations > 0) != measured || table == "" {
				return fmt.Errorf("memory: %v\n%s\n%s", err, table, text)
			}
		}

		table, text, err = module.ListCommunication(func() *sw.Tensor {
			y := forward(module, sharded)().Redistribute(nil)
			if err := y.Square().Sum().Backward(); err != nil {
				return sw.Failed(err)
			}
			return nil
		})
		var sent struct {
			Bytes  int64
			Events []map[string]any
		}
		if err == nil {
			err = json.Unmarshal([]byte(text), &sent)
		}
		if err != nil || sent.Bytes == 0 || len(sent.Events) == 0 || !strings.Contains(text, `"module"`) || !strings.Contains(table, "all_reduce") {
			return fmt.Errorf("communication: %v\n%s\n%s", err, table, text)
		}
		if err := module.ZeroGrad(); err != nil {
			return err
		}

		same, table, text, err := module.Verify(forward(module, sharded), reference, forward(reference, x))
		if err != nil || !same || !strings.Contains(text, `"ok"`) {
			return fmt.Errorf("verify: %v, %v\n%s\n%s", same, err, table, text)
		}
		if same, _, _, err = module.Verify(forward(module, sharded), reference, forward(reference, x), sw.WithoutBackward(), nil, sw.WithTolerance(1e-3), sw.WithCopiedValues()); err != nil || !same {
			return fmt.Errorf("verify forward: %v, %v", same, err)
		}
		if same, table, text, err = module.Verify(func() *sw.Tensor { return forward(module, sharded)().Mul(1.5) }, reference, forward(reference, x)); err != nil || same || table == "" || text == "" {
			return fmt.Errorf("verify of something else: %v, %v\n%s", same, err, table)
		}
		// Errors and panics of what runs come out, on all ranks, and leave nothing behind.
		wrong, other := errors.New("so"), mustOf(sw.Alone())
		defer other.Close()
		misuses := map[string]struct {
			body func() *sw.Tensor
			word string
		}{
			"an error":       {func() *sw.Tensor { return sw.Failed(wrong) }, "so"},
			"a panic":        {func() *sw.Tensor { panic("so") }, "panic: so"},
			"a closed one":   {func() *sw.Tensor { y := sw.Ones(w, nil); y.Close(); return y }, "closed"},
			"of another one": {func() *sw.Tensor { return sw.Ones(other, nil) }, "several ranks"},
		}
		for _, what := range sortedKeys(misuses) { // all ranks in one order
			c := misuses[what]
			if _, _, err := module.Memory(c.body); err == nil || !strings.Contains(err.Error(), c.word) || !strings.Contains(err.Error(), "Module.Memory") {
				return fmt.Errorf("%s: %v", what, err)
			}
			if _, _, err := module.ListCommunication(c.body); err == nil || !strings.Contains(err.Error(), c.word) {
				return fmt.Errorf("%s: %v", what, err)
			}
			if _, _, _, err := module.Verify(forward(module, sharded), reference, c.body); err == nil || !strings.Contains(err.Error(), c.word) {
				return fmt.Errorf("%s of the reference: %v", what, err)
			}
		}
		if _, _, _, err := module.Verify(nil, reference, forward(reference, x)); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("nothing to run: %v", err)
		}
		same, _, _, err = module.Verify(forward(module, sharded), reference, forward(reference, x))
		if err != nil || !same {
			return fmt.Errorf("verify after all: %v, %v", same, err)
		}
		return nil
	})
}

// What a module of the library's computes from its options no file has.
func TestBuffersThatAreComputed(t *testing.T) {
	w := alone(t)
	defer w.Close()
	llama := mustOf(w.ModuleByKind("llama", `{"model_type": "llama", "vocab_size": 7, "hidden_size": 8,
		"intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}`))
	for _, buffer := range mustOf(llama.Buffers()) {
		if !strings.HasSuffix(buffer.Name, "inv_freq") || !buffer.Transient {
			t.Errorf("%s: transient %v", buffer.Name, buffer.Transient)
		}
	}
	for _, parameter := range mustOf(llama.Parameters()) {
		if parameter.Transient {
			t.Error(parameter.Name)
		}
	}
}
