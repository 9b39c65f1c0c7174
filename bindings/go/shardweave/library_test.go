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
	"github.com/shardweave/shardweave/bindings/go/shardweave/nn"
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

func TestGradSync(t *testing.T) {
	const options = `{"layers": [{"kind": "Linear", "in_features": 5, "out_features": 7}, {"kind": "GELU"}, {"kind": "Linear", "in_features": 7, "out_features": 3}]}`
	var want [][]float64
	onMeshes(t, []string{"tp=2", "dp=2,tp=2"}, func(w *sw.World, m *sw.Mesh, batch sw.On) error {
		module, err := kind(w, "Sequential", options)
		if err != nil {
			return err
		}
		defer module.Close()
		var sync *sw.GradSync
		if m != nil {
			if w.Size() == 2 {
				batch = sw.On{"tp": "S(0)"} // data parallel
			}
			if err := module.Distribute(m, nil, sw.SameEverywhere); err != nil {
				return err
			}
			if sync, err = module.GradSync(sw.WithBucketBytes(100)); err != nil {
				return err
			}
			if _, err := module.GradSync(); !errors.Is(err, sw.FailedPrecondition) {
				return fmt.Errorf("a second one: %v", err)
			}
		}
		backward := func(scale float64) error {
			results, err := module.Call("forward", placed(counted(w, 4, 5).Mul(scale).Cos().To(sw.F32), m, batch))
			if err != nil {
				return err
			}
			return results[0].(*sw.Tensor).Square().Sum().Backward()
		}
		var left int64
		var got [][]float64
		for step := 0; step < 4; step++ {
			if err := module.ZeroGrad(); err != nil {
				return err
			}
			first := func() error { return backward(1) }
			if step == 0 { // in which order and how often gradients come: once
				err = nil
			} else if sync != nil {
				err = sync.NoSync(func() error { return sync.NoSync(first) })
				if _, now, wrong := sync.Counts(); err == nil && (wrong != nil || now != left) {
					err = fmt.Errorf("step %d: %d buckets have left meanwhile: %v", step, now-left, wrong)
				}
			} else {
				err = first()
			}
			if err != nil {
				return err
			}
			if err := backward(2); err != nil {
				return err
			}
			if err := module.FinishGradSync(); err != nil {
				return err
			}
			if _, got, err = gradients(module); err != nil {
				return err
			}
			if m == nil {
				want = got
				continue
			}
			for i := range got {
				if step > 0 && !within(got[i], want[i], 1e-5) {
					return fmt.Errorf("step %d: gradient %d is %v, wanted %v", step, i, got[i], want[i])
				}
			}
			buckets, inBackward, err := sync.Counts()
			if err != nil || buckets < 2 || inBackward != buckets*int64(step) {
				return fmt.Errorf("step %d: %d buckets, %d have left in backward: %v", step, buckets, inBackward, err)
			}
			left = inBackward
		}
		if m == nil {
			return nil
		}
		if err := sync.NoSync(nil); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("no body: %v", err)
		}
		if err := sync.Close(); err != nil {
			return err
		}
		if err := sync.NoSync(func() error { return nil }); !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "GradSync.NoSync: the GradSync was closed") {
			return fmt.Errorf("closed: %v", err)
		}
		if again, err := module.GradSync(sw.WithBucketBytes(0)); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("buckets of nothing: %v, %v", again, err)
		}
		return second(module.GradSync()) // which ends with the world
	})
}

// The plan that is found is one device's model, whoever wrote its forward; and what is wrong.
func TestAutoPlan(t *testing.T) {
	type mlp struct {
		*sw.Module
		Up, Down *nn.Linear
	}
	newMLP := func(w *sw.World) (*mlp, error) {
		m := &mlp{Up: nn.NewLinear(w, 5, 9), Down: nn.NewLinear(w, 9, 3)}
		_, err := w.ModuleOf(m)
		return m, err
	}
	run(t, 3, func(w *sw.World) error {
		m, err := w.ParseMesh("tp=3")
		if err != nil {
			return err
		}
		// Computing takes long, so that cutting pays.
		costs := sw.CostModel{Links: []sw.LinkCost{{Latency: 1e-8, Bandwidth: 1e8}}, Device: sw.DeviceCost{Flops: 1e7, Bandwidth: 1e7}}
		if err := m.SetCostModel(costs); err != nil {
			return err
		}
		x := counted(w, 4, 5).Cos().To(sw.F32)
		forward := func(m *mlp, x *sw.Tensor) *sw.Tensor { return m.Down.Forward(m.Up.Forward(x).Relu()) }
		made := 0
		plan, table, text, err := m.AutoPlan(func() (sw.StepModel, error) {
			made++
			model, err := newMLP(w)
			return sw.StepModel{Module: model.Module, Loss: func(on *sw.Mesh) *sw.Tensor {
				return forward(model, x.Distribute(on, nil, sw.SameEverywhere)).Square().Sum()
			}}, err
		}, sw.WithMaxEvaluations(20))
		if err != nil {
			return err
		}
		var found struct {
			Evaluations int
			Groups      []struct{ Modules, Chosen string }
		}
		if err := json.Unmarshal([]byte(text), &found); err != nil || found.Evaluations < 2 || made < found.Evaluations || len(found.Groups) == 0 || !strings.Contains(table, "plans measured") {
			return fmt.Errorf("%d were made: %v\n%s\n%s", made, err, table, text)
		}
		model, err := newMLP(w)
		if err != nil {
			return err
		}
		if err := model.Distribute(m, plan, sw.FromRank(0)); err != nil {
			return err
		}
		if layout, err := model.Up.Weight.Layout(); err != nil || !strings.Contains(layout.String(), "S(") {
			return fmt.Errorf("nothing is cut: %v, %v\n%s", layout, err, table)
		}
		got, err := values(forward(model, x.Distribute(m, nil, sw.SameEverywhere)))
		if err != nil {
			return err
		}
		up, down := model.Up.Weight.Full(), model.Down.Weight.Full()
		want, err := values(x.Linear(up, model.Up.Bias.Full()).Relu().Linear(down, model.Down.Bias.Full()))
		if err != nil || !within(got, want, 1e-5) {
			return fmt.Errorf("%v, wanted %v: %v", got, want, err)
		}
		broken := errors.New("broken")
		fine := func() (sw.StepModel, error) {
			model, err := newMLP(w)
			return sw.StepModel{Module: model.Module, Loss: func(on *sw.Mesh) *sw.Tensor {
				return forward(model, x.Distribute(on, nil, sw.SameEverywhere)).Sum()
			}}, err
		}
		cases := map[string]struct {
			model   func() (sw.StepModel, error)
			options []sw.AutoPlanOption
			is      error
			text    string
		}{
			"nil":          {nil, nil, sw.InvalidArgument, "argument 'model' is nil"},
			"no module":    {func() (sw.StepModel, error) { return sw.StepModel{}, nil }, nil, sw.InvalidArgument, "no Module or no Loss"},
			"its error":    {func() (sw.StepModel, error) { return sw.StepModel{}, broken }, nil, sw.Unknown, "make: broken"},
			"no dimension": {fine, []sw.AutoPlanOption{sw.WithTPMeshDim("dp")}, sw.NotFound, "no dimension \"dp\""},
			"no memory":    {fine, []sw.AutoPlanOption{sw.WithMemoryLimit(10)}, sw.ResourceExhausted, "10"},
			"no plans":     {fine, []sw.AutoPlanOption{sw.WithMaxEvaluations(0)}, sw.InvalidArgument, "max_evaluations is 0"},
			"no heads":     {fine, []sw.AutoPlanOption{sw.WithHeads(-1)}, sw.InvalidArgument, "heads is -1"},
			"no sequence":  {fine, []sw.AutoPlanOption{sw.WithSequenceDim(-1)}, sw.InvalidArgument, "sequence_dim is -1"},
		}
		for _, name := range sortedKeys(cases) {
			wrong := cases[name]
			if _, _, _, err := m.AutoPlan(wrong.model, wrong.options...); !errors.Is(err, wrong.is) || !strings.Contains(err.Error(), wrong.text) {
				return fmt.Errorf("%s: %v", name, err)
			}
		}
		return nil
	})
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

// passes is what it is given; its backward fails where it shall.
type passes struct{ fails bool }

func (p passes) Forward(_ *sw.FunctionContext, in []*sw.Tensor) ([]*sw.Tensor, error) {
	return []*sw.Tensor{in[0].Mul(1)}, nil
}

func (p passes) Backward(_ *sw.FunctionContext, grads []*sw.Tensor) ([]*sw.Tensor, error) {
	if p.fails {
		return nil, errors.New("this rank's")
	}
	return grads, nil
}

// On rank 1 Backward fails when the last layer's gradients have left.
func TestGradSyncDiscardsWhatFailed(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("dp=2")
		if err != nil {
			return err
		}
		module, err := w.NewModule()
		if err != nil {
			return err
		}
		first := module.Parameter("first", sw.FromSlice(w, someNumbers(35, 0), []int64{7, 5}))
		last := module.Parameter("last", sw.FromSlice(w, someNumbers(21, 1), []int64{3, 7}))
		if err := module.Distribute(m, nil, sw.SameEverywhere); err != nil {
			return err
		}
		x := sw.FromSlice(w, someNumbers(20, 2), []int64{4, 5}).Distribute(m, sw.On{"dp": "S(0)"}, sw.SameEverywhere)
		backward := func(fails bool) error {
			middle, err := sw.Apply(passes{fails}, "passes", 1, x.Linear(first, nil))
			if err != nil {
				return err
			}
			return middle[0].Linear(last, nil).Square().Sum().Backward()
		}
		var want [][]float64
		finished := func() error {
			if err := backward(false); err != nil {
				return err
			}
			if err := module.FinishGradSync(); err != nil {
				return err
			}
			_, got, err := gradients(module)
			if err != nil {
				return err
			}
			if want == nil {
				want = got
			}
			for i := range got {
				if !within(got[i], want[i], 1e-9) {
					return fmt.Errorf("gradient %d is %v, wanted %v", i, got[i], want[i])
				}
			}
			return module.ZeroGrad()
		}
		if err := finished(); err != nil {
			return err
		}
		sync, err := module.GradSync(sw.WithBucketBytes(1))
		if err != nil {
			return err
		}
		for i := 0; i < 3; i++ {
			if err := finished(); err != nil {
				return err
			}
			failed := []int64{0}
			if err := backward(w.Rank() == 1); err != nil {
				failed[0] = 1
			}
			if failed[0] != int64(w.Rank()) {
				return fmt.Errorf("backward: %v", failed)
			}
			if err := sw.AllReduce(background, w.Comm(), failed, failed, sw.Max); err != nil || failed[0] != 1 {
				return fmt.Errorf("%v: %w", failed, err)
			}
			if err := sync.Discard(); err != nil {
				return err
			}
			if err := module.ZeroGrad(); err != nil {
				return err
			}
		}
		if err := finished(); err != nil {
			return err
		}
		// Of two, each in a bucket: one on rank 1, where it failed.
		_, left, err := sync.Counts()
		if wanted := int64(2*3 + 3*(2-w.Rank())); err != nil || left != wanted {
			return fmt.Errorf("%d have left, wanted %d: %v", left, wanted, err)
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

const llamaConfig = `{"model_type": "llama", "vocab_size": 37, "hidden_size": 48, "intermediate_size": 50, "num_hidden_layers": 2,
	"num_attention_heads": 12, "num_key_value_heads": 6, "max_position_embeddings": 16, "rms_norm_eps": 1e-6, "hidden_act": "silu"}`

func TestPlansOfTheLibrary(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("dp=1,tp=2")
		if err != nil {
			return err
		}
		model, err := kind(w, "llama", llamaConfig)
		if err != nil {
			return err
		}
		for _, name := range []string{"llama", ""} {
			plan, err := m.ZooPlan(name, llamaConfig, `{"sequence_parallel": true}`)
			if err != nil {
				return err
			}
			table, _, err := plan.Resolve(model, m)
			if err != nil || !strings.Contains(table, "model.layers.1.self_attn.q_proj.weight") {
				return fmt.Errorf("%v\n%s", err, table)
			}
		}
		parts := mustOf(m.ZooPlan("attention", llamaConfig, `{"fqn": "model.layers.*.self_attn"}`)).
			Append(mustOf(m.ZooPlan("mlp", "{}", `{"fqn": "model.layers.*.mlp"}`)))
		table, _, err := parts.Resolve(model, m)
		if err != nil || !strings.Contains(table, "'model.layers.*.mlp.down_proj.weight'") || !strings.Contains(table, "'model.layers.*.self_attn.o_proj.weight'") {
			return fmt.Errorf("%v\n%s", err, table)
		}
		if _, err := parts.Append(nil).MarshalJSON(); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("a plan of nothing appended: %v", err)
		}
		styles, err := model.StylesPlan(m, `{"model.layers.*.mlp": "pairwise"}`, "tp")
		if err != nil {
			return err
		}
		if table, _, err := styles.Resolve(model, m); err != nil || !strings.Contains(table, "down_proj") {
			return fmt.Errorf("%v\n%s", err, table)
		}
		cases := map[string]struct {
			err   error
			words string
		}{
			"no model":        {second(m.ZooPlan("lama", llamaConfig, "")), "llama"},
			"no option":       {second(m.ZooPlan("llama", llamaConfig, `{"sequence": true}`)), "sequence_parallel"},
			"no dimension":    {second(m.ZooPlan("llama", llamaConfig, `{"mesh_dim": "pp"}`)), "pp"},
			"heads":           {second(m.ZooPlan("llama", strings.Replace(llamaConfig, "12", "3", 1), "")), ""},
			"no style":        {second(model.StylesPlan(m, `{"model.norm": "column"}`, "")), "colwise"},
			"no such module":  {second(model.StylesPlan(m, `{"model.nrom": "colwise"}`, "")), "model.norm"},
			"no JSON":         {second(model.StylesPlan(m, `[`, "")), ""},
			"a NUL in it":     {second(model.StylesPlan(m, "{}\x00", "")), "NUL"},
			"no mesh":         {second(model.StylesPlan(nil, `{}`, "")), "nil"},
			"a NUL in a plan": {second(m.ZooPlan("llama", "{}\x00", "")), "NUL"},
		}
		for _, what := range sortedKeys(cases) {
			c := cases[what]
			if c.err == nil || !strings.Contains(c.err.Error(), c.words) || strings.Contains(c.err.Error(), "swv_") {
				return fmt.Errorf("%s: %v", what, c.err)
			}
		}
		return nil
	})
}

// goLlama is the library's Llama, written in Go: the same names.
type goLlama struct {
	*sw.Module
	Model struct {
		EmbedTokens *nn.Embedding
		Layers      []*goLlamaLayer
		Norm        *nn.RMSNorm
	}
	LMHead *nn.Linear
}

type goLlamaLayer struct {
	InputLayernorm         *nn.RMSNorm
	SelfAttn               *nn.Attention
	PostAttentionLayernorm *nn.RMSNorm
	MLP                    *goGatedMLP
	layer, attention, mlp  *sw.Forward
}

type goGatedMLP struct{ GateProj, UpProj, DownProj *nn.Linear }

func newGoLlama(w *sw.World) (*goLlama, error) {
	linear := func(in, out int64) *nn.Linear { return nn.NewLinear(w, in, out, nn.NoBias) }
	norm := func() *nn.RMSNorm { return nn.NewRMSNorm(w, 48, nn.Eps(1e-6)) }
	rotary := nn.NewRotaryEmbedding(w, 4, 16, 10000, nil)
	m := &goLlama{LMHead: linear(48, 37)}
	m.Model.EmbedTokens, m.Model.Norm = nn.NewEmbedding(w, 37, 48), norm()
	for i := 0; i < 2; i++ {
		m.Model.Layers = append(m.Model.Layers, &goLlamaLayer{InputLayernorm: norm(), PostAttentionLayernorm: norm(),
			SelfAttn: nn.NewAttention(w, 48, 12, nn.KVHeads(6), nn.HeadDim(4), nn.Rotary(rotary), nn.Causal, nn.NoBias),
			MLP:      &goGatedMLP{linear(48, 50), linear(48, 50), linear(50, 48)}})
	}
	if _, err := w.ModuleOf(m); err != nil {
		return nil, err
	}
	for i, l := range m.Model.Layers { // which have no weight by which a plan could meet them
		name := fmt.Sprintf("model.layers.%d", i)
		cases := map[string]**sw.Forward{"": &l.layer, ".self_attn": &l.attention, ".mlp": &l.mlp}
		for _, part := range sortedKeys(cases) {
			to := cases[part]
			forward, err := m.Module.Forward(name + part)
			if err != nil {
				return nil, err
			}
			*to = forward
		}
	}
	return m, nil
}

func (m *goLlama) logits(tokens *sw.Tensor) *sw.Tensor {
	x := m.Model.EmbedTokens.Forward(tokens)
	for _, l := range m.Model.Layers {
		x = l.layer.Run(func(in []*sw.Tensor) *sw.Tensor {
			y := in[0].Add(l.attention.Run(func(in []*sw.Tensor) *sw.Tensor { return l.SelfAttn.Forward(in[0]) }, l.InputLayernorm.Forward(in[0])))
			return y.Add(l.mlp.Run(func(in []*sw.Tensor) *sw.Tensor {
				return l.MLP.DownProj.Forward(l.MLP.GateProj.Forward(in[0]).Silu().Mul(l.MLP.UpProj.Forward(in[0])))
			}, l.PostAttentionLayernorm.Forward(y)))
		}, x)
	}
	return m.LMHead.Forward(m.Model.Norm.Forward(x))
}

// trainLlama is the losses of 20 steps of AdamW, and the gradients of the first, by name: of the library's, or of Go's with
// the same first values.
func trainLlama(w *sw.World, mesh *sw.Mesh, batch sw.On, inGo bool, planOptions string) (losses []float64, grads map[string][]float64, err error) {
	library, err := kind(w, "llama", llamaConfig)
	if err != nil {
		return nil, nil, err
	}
	defer library.Close()
	module := library
	logits := func(tokens *sw.Tensor) *sw.Tensor {
		results, err := library.Call("forward", tokens)
		if err != nil {
			return sw.Failed(err)
		}
		return results[0].(*sw.Tensor)
	}
	if inGo {
		var m *goLlama
		if err := sw.Seeded(6, func() (err error) { m, err = newGoLlama(w); return err }); err != nil { // nothing draws beside another rank's Seeded
			return nil, nil, err
		}
		defer m.Close()
		parameters, err := m.Parameters()
		if err != nil {
			return nil, nil, err
		}
		if theirs, err := library.Parameters(); err != nil || len(theirs) != len(parameters) {
			return nil, nil, fmt.Errorf("%d parameters here, %d in the library: %v", len(parameters), len(theirs), err)
		}
		for _, p := range parameters {
			first, err := sw.Data[float32](library.Get(p.Name))
			if err != nil {
				return nil, nil, err
			}
			if err := w.With(sw.NoGrad, func() error { return sw.CopyFrom(p.Tensor, first) }); err != nil {
				return nil, nil, err
			}
		}
		module, logits = m.Module, m.logits
	}
	if mesh != nil {
		plan, err := mesh.ZooPlan("", llamaConfig, planOptions)
		if err != nil {
			return nil, nil, err
		}
		if err := module.Distribute(mesh, plan, sw.SameEverywhere); err != nil {
			return nil, nil, err
		}
	}
	parameters, err := module.Parameters()
	if err != nil {
		return nil, nil, err
	}
	optimizer, err := sw.NewAdamW(sw.Tensors(parameters), 3e-3)
	if err != nil {
		return nil, nil, err
	}
	defer optimizer.Close()
	for step := int64(0); step < 20; step++ {
		err := w.Scope(func() error {
			var tokens, targets []int64
			for i := int64(0); i < 4*6; i++ {
				tokens, targets = append(tokens, (i*i+7*(step%2))%37), append(targets, (i*i+3*i+1)%37)
			}
			x, y := placed(sw.FromSlice(w, tokens, []int64{4, 6}), mesh, batch), placed(sw.FromSlice(w, targets, []int64{4, 6}), mesh, batch)
			loss := logits(x).View(-1, 37).CrossEntropy(y.View(-1))
			if err := loss.Backward(); err != nil {
				return err
			}
			if err := module.FinishGradSync(); err != nil {
				return err
			}
			if step == 0 {
				names, all, err := gradients(module)
				if err != nil {
					return err
				}
				grads = map[string][]float64{}
				for i, name := range names {
					grads[name] = all[i]
				}
			}
			for _, next := range []func() error{optimizer.Step, optimizer.ZeroGrad} {
				if err := next(); err != nil {
					return err
				}
			}
			value, err := loss.Item()
			losses = append(losses, value)
			return err
		})
		if err != nil {
			return nil, nil, fmt.Errorf("step %d: %w", step, err)
		}
	}
	return losses, grads, nil
}

// The library's Llama and the same model written in Go train alike by one plan, on every mesh, and as on one device.
func TestOneFamilyOfModels(t *testing.T) {
	var want []float64
	var wantGrads map[string][]float64
	onMeshes(t, []string{"tp=2", "tp=3", "tp=4", "dp=2,tp=2"}, func(w *sw.World, m *sw.Mesh, batch sw.On) error {
		for _, planOptions := range []string{"", `{"sequence_parallel": true}`} {
			for _, inGo := range []bool{false, true} {
				if planOptions != "" && (m == nil || w.Size() != 4) { // a sequence of 6 on 4 ranks, and beside data parallelism
					continue
				}
				what := fmt.Sprintf("in Go: %v, plan %s", inGo, planOptions)
				losses, grads, err := trainLlama(w, m, batch, inGo, planOptions)
				if err != nil {
					return fmt.Errorf("%s: %w", what, err)
				}
				if want == nil {
					want, wantGrads = losses, grads
					if !(want[19] < 0.9*want[0]) || len(grads) != 21 {
						return fmt.Errorf("it learns nothing: %v; %d gradients", want, len(grads))
					}
					continue
				}
				for i := range losses {
					if !(math.Abs(losses[i]-want[i]) <= 1e-5*math.Abs(want[i])) {
						return fmt.Errorf("%s: losses are %v, wanted %v", what, losses, want)
					}
				}
				for name := range wantGrads {
					if !within(grads[name], wantGrads[name], 1e-5) {
						return fmt.Errorf("%s: the gradient of %s is %v, wanted %v", what, name, grads[name], wantGrads[name])
					}
				}
			}
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
