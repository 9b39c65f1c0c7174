package shardweave_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
	"github.com/shardweave/shardweave/bindings/go/shardweave/nn"
)

// train is the losses of a small network, on a mesh or (nil) without.
func train(w *sw.World, m *sw.Mesh, optimizer func([]*sw.Tensor) (*sw.Optimizer, error)) ([]float64, error) {
	module, err := w.NewModule()
	if err != nil {
		return nil, err
	}
	up := module.Parameter("up.weight", sw.FromSlice(w, numbers(35), []int64{7, 5}))
	down := module.Parameter("down.weight", sw.FromSlice(w, numbers(21), []int64{3, 7}))
	offset := module.Buffer("offset", sw.FromSlice(w, numbers(3), []int64{3}))
	if m != nil {
		plan, err := sw.ParsePlan(`{"parameter": {"up.weight": {"x": "S(0)"}, "down.*": {"x": "S(1)"}}}`)
		if err != nil {
			return nil, err
		}
		if err := module.Distribute(m, plan, sw.FromRank(0)); err != nil {
			return nil, err
		}
	}
	parameters, err := module.Parameters()
	if err != nil {
		return nil, err
	}
	o, err := optimizer(sw.Tensors(parameters))
	if err != nil {
		return nil, err
	}
	var losses []float64
	for step := 0; step < 6; step++ {
		err := w.Scope(func() error {
			x := sw.FromSlice(w, numbers(20), []int64{4, 5})
			if m != nil {
				x = x.Distribute(m, sw.On{"x": "R"}, sw.SameEverywhere)
			}
			y := x.Linear(up, nil).Tanh().Linear(down, nil).Add(offset).Sub(1)
			loss := y.Mul(y).Mean()
			if err := loss.Backward(); err != nil {
				return err
			}
			if err := module.FinishGradSync(); err != nil {
				return err
			}
			if err := o.Step(); err != nil {
				return err
			}
			value, err := loss.Item()
			losses = append(losses, value)
			if err != nil {
				return err
			}
			if step%2 == 0 {
				return o.ZeroGrad()
			}
			return module.ZeroGrad()
		})
		if err != nil {
			return nil, err
		}
	}
	return losses, module.Err()
}

func TestTrainingIsThatOfOneRank(t *testing.T) {
	for name, optimizer := range map[string]func([]*sw.Tensor) (*sw.Optimizer, error){
		"SGD": func(p []*sw.Tensor) (*sw.Optimizer, error) {
			return sw.NewSGD(p, 0.05, sw.WithMomentum(0.9, 0), sw.WithNesterov(), sw.WeightDecay(1e-3))
		},
		"AdamW": func(p []*sw.Tensor) (*sw.Optimizer, error) {
			return sw.NewAdamW(p, 0.02, sw.WithBetas(0.8, 0.9), sw.WithEps(1e-6), sw.WithAMSGrad(), sw.WeightDecay(0.1))
		},
	} {
		want, err := train(alone(t), nil, optimizer)
		if err != nil {
			t.Fatal(err)
		}
		if !(want[5] < want[0]) {
			t.Errorf("%s learns nothing: %v", name, want)
		}
		for _, ranks := range []int{2, 3, 4} {
			run(t, ranks, func(w *sw.World) error {
				m, err := w.Mesh(sw.Dim("x", ranks))
				if err != nil {
					return err
				}
				got, err := train(w, m, optimizer)
				if err != nil || !near(got, want) {
					return fmt.Errorf("%s on %d ranks: %v, %v, wanted %v", name, ranks, got, err, want)
				}
				return nil
			})
		}
	}
}

func TestModules(t *testing.T) {
	w := alone(t)
	module := mustOf(w.NewModule())
	var p *sw.Tensor
	w.Scope(func() error {
		p = module.Parameter("block.weight", sw.Ones(w, []int64{2}))
		module.Buffer("block.index", sw.Zeros(w, []int64{2}, sw.I64))
		return nil
	})
	if requires, err := p.RequiresGrad(); err != nil || !requires {
		t.Error(requires, err)
	}
	same := module.Get("block.weight")
	if is, err := p.IsSame(same); err != nil || !is {
		t.Error(is, err)
	}
	if err := module.Get("blok.weight").Err(); !errors.Is(err, sw.NotFound) || !strings.Contains(err.Error(), "block.weight") {
		t.Error(err)
	}
	buffers := mustOf(module.Buffers())
	if len(buffers) != 1 || buffers[0].Name != "block.index" {
		t.Error(buffers)
	}
	if bad := module.Parameter("block.weight", sw.Ones(w, []int64{1})); !errors.Is(bad.Err(), sw.AlreadyExists) && !errors.Is(bad.Err(), sw.InvalidArgument) {
		t.Error(bad.Err())
	}
	if module.Err() == nil {
		t.Error("the module does not tell")
	}
	if err := module.Parameter("none", nil).Err(); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	if err := module.Buffer("other", sw.Ones(alone(t), []int64{1})).Err(); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	if _, err := module.Parameters(); err == nil {
		t.Error("the module can be used")
	}
	if _, err := w.LoadModule("/nonexistent"); err == nil {
		t.Error("no error")
	}
}

// What is frozen before it is registered and sharded is not trained.
func TestFrozenParametersStayFrozen(t *testing.T) {
	type tuned struct {
		Base, Lora *nn.Linear
		Table      *sw.Tensor
	}
	for way, shard := range map[string]func(*sw.Module, *sw.Mesh) error{
		"Distribute": func(module *sw.Module, m *sw.Mesh) error { return module.Distribute(m, nil, sw.FromRank(0)) },
		"FullyShard": func(module *sw.Module, m *sw.Mesh) error {
			_, err := module.FullyShard(m, sw.FromRank(0))
			return err
		},
	} {
		err := sw.RunRanks(background, 2, func(w *sw.World) error {
			m := mustOf(w.ParseMesh("dp=2"))
			model := &tuned{nn.NewLinear(w, 5, 3), nn.NewLinear(w, 5, 3), sw.Ones(w, []int64{3})}
			frozen := []*sw.Tensor{model.Base.Weight, model.Base.Bias, model.Table}
			for _, p := range frozen {
				if err := p.SetRequiresGrad(false); err != nil {
					return err
				}
			}
			module := mustOf(w.ModuleOf(model))
			if err := shard(module, m); err != nil {
				return err
			}
			optimizer := mustOf(sw.NewAdamW(sw.Tensors(mustOf(module.Parameters())), 0.1))
			before := []*sw.Tensor{}
			for _, p := range frozen {
				before = append(before, p.Full().Detach().Mul(1))
			}
			x := sw.Ones(m, []int64{4, 5}, sw.On{"dp": "S(0)"})
			y := x.Linear(model.Base.Weight, model.Base.Bias).Mul(model.Table).Add(x.Linear(model.Lora.Weight, model.Lora.Bias))
			if err := y.Sum().Backward(); err != nil {
				return err
			}
			if err := module.FinishGradSync(); err != nil {
				return err
			}
			if err := optimizer.Step(); err != nil {
				return err
			}
			for i, p := range frozen {
				if requires, err := p.RequiresGrad(); err != nil || requires {
					t.Errorf("%s: parameter %d requires grad: %v", way, i, err)
				}
				if moved := mustOf(p.Full().Sub(before[i]).Abs().Max().Item()); moved != 0 {
					t.Errorf("%s: parameter %d has moved by %v", way, i, moved)
				}
			}
			if requires, err := model.Lora.Weight.RequiresGrad(); err != nil || !requires {
				t.Errorf("%s: what is to be trained is frozen: %v", way, err)
			}
			return nil
		})
		if err != nil {
			t.Error(way, err)
		}
	}
}

func TestPlans(t *testing.T) {
	plan := sw.NewPlan().Add("*.{q,k}.weight", sw.On{"tp": "S(0)"}).Add("*", sw.On{"tp": "R", "dp": "R"})
	text, err := json.Marshal(plan)
	if err != nil {
		t.Fatal(err)
	}
	again, err := sw.ParsePlan(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if second := mustOf(json.Marshal(again)); string(second) != string(text) || !strings.Contains(string(text), "*.{q,k}.weight") {
		t.Errorf("%s and %s", text, second)
	}
	for _, wrong := range []string{"", "{", `{"parameter": 1}`, `{"parameter": {"*": {"tp": "X"}}}`} {
		if _, err := sw.ParsePlan(wrong); !errors.Is(err, sw.InvalidArgument) {
			t.Errorf("%q: %v", wrong, err)
		}
	}
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("tp=2")
		if err != nil {
			return err
		}
		module, err := w.NewModule()
		if err != nil {
			return err
		}
		p := module.Parameter("p", sw.Ones(w, []int64{2}))
		if err := module.Distribute(m, sw.NewPlan().Add("nothing", sw.On{"tp": "S(0)"}), sw.SameEverywhere); err == nil {
			return errors.New("a line that matches nothing is no error")
		}
		if sharded, err := p.IsSharded(); err != nil || sharded {
			return fmt.Errorf("%v, %v", sharded, err)
		}
		if err := module.Distribute(m, sw.NewPlan().Add("p", sw.On{"tp": "S(x)"}), sw.SameEverywhere); !errors.Is(err, sw.InvalidArgument) {
			return fmt.Errorf("a wrong placement: %v", err)
		}
		return module.Distribute(m, nil, sw.SameEverywhere)
	})
}

func TestOptimizers(t *testing.T) {
	w := alone(t)
	p := sw.Ones(w, []int64{2}, sw.RequiresGrad)
	o := mustOf(sw.NewAdamW([]*sw.Tensor{p}, 0.5))
	if lr, err := o.LR(); err != nil || lr != 0.5 {
		t.Error(lr, err)
	}
	if err := o.SetLR(0.25); err != nil {
		t.Error(err)
	}
	if err := p.SetGrad(sw.Full(w, []int64{2}, 3)); err != nil {
		t.Fatal(err)
	}
	if err := sw.FinishGradSync([]*sw.Tensor{p}); err != nil {
		t.Fatal(err)
	}
	norm, err := sw.ClipGradNorm([]*sw.Tensor{p}, 100, sw.WithNorm(math.Inf(1)), sw.WithFiniteNorm())
	if err != nil || norm != 3 {
		t.Error(norm, err)
	}
	if err := o.Step(); err != nil {
		t.Fatal(err)
	}
	// 1 - 0.25 * 0.01, and a step of 0.25.
	if got := mustOf(p.Detach().Select(0, 0).Item()); math.Abs(got-0.7475) > 1e-5 {
		t.Error(got)
	}
	state, err := o.State(0, "exp_avg")
	if err != nil || math.Abs(mustOf(state.Select(0, 0).Item())-0.3) > 1e-6 {
		t.Error(state, err)
	}
	if err := o.ZeroGrad(); err != nil {
		t.Fatal(err)
	}
	if grad, err := p.Grad(); err != nil || grad != nil {
		t.Error(grad, err)
	}
	if _, err := sw.NewSGD(nil, 0.1); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	if _, err := sw.NewSGD([]*sw.Tensor{p}, -1); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	o.Close()
	o.Close()
}

func TestAutograd(t *testing.T) {
	w := alone(t)
	x := sw.FromSlice(w, []float64{2}, []int64{}, sw.RequiresGrad)
	y := x.Mul(x).Mul(x)
	first := mustOf(sw.Gradients([]*sw.Tensor{y}, []*sw.Tensor{x}, sw.CreateGraph()))[0]
	second := mustOf(sw.Gradients([]*sw.Tensor{first}, []*sw.Tensor{x}))[0]
	if a, b := mustOf(first.Item()), mustOf(second.Item()); a != 12 || b != 12 {
		t.Error(a, b)
	}
	unrelated := sw.Ones(w, []int64{}, sw.F64, sw.RequiresGrad)
	grads, err := sw.Gradients([]*sw.Tensor{x.Mul(5)}, []*sw.Tensor{x, unrelated}, sw.AllowUnused(),
		sw.WithGradients(sw.Full(w, []int64{}, 2, sw.F64)))
	if err != nil || mustOf(grads[0].Item()) != 10 || grads[1] != nil {
		t.Error(grads, err)
	}
	if _, err := sw.Gradients([]*sw.Tensor{x.Mul(5)}, []*sw.Tensor{x, unrelated}); err == nil {
		t.Error("an unused input is no error")
	}
	z := x.Mul(x)
	for i := 1; i <= 2; i++ {
		if err := z.Backward(sw.RetainGraph()); err != nil {
			t.Fatal(err)
		}
		if got := mustOf(mustOf(x.Grad()).Item()); got != float64(4*i) {
			t.Error(got)
		}
	}
	x.SetGrad(nil)
	if err := z.Backward(sw.WithGradients(sw.Full(w, []int64{}, 10, sw.F64))); err != nil {
		t.Fatal(err)
	}
	if got := mustOf(mustOf(x.Grad()).Item()); got != 40 {
		t.Error(got)
	}
	err = w.With(sw.NoGrad, func() error {
		if requires, err := x.Mul(2).RequiresGrad(); err != nil || requires {
			t.Error(requires, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if leaf, err := x.Mul(2).IsLeaf(); err != nil || leaf {
		t.Error(leaf, err)
	}
	d := x.Detach()
	if err := d.SetRequiresGrad(true); err != nil {
		t.Error(err)
	}
	if err := sw.Ones(w, []int64{2}, sw.RequiresGrad).Mul(2).Backward(); err == nil {
		t.Error("backward of two elements is no error")
	}
}

// cube has a derivative that is wrong on purpose: 100 times as large.
type cube struct{ fail, panics, noCode bool }

func (f cube) Forward(ctx *sw.FunctionContext, in []*sw.Tensor) ([]*sw.Tensor, error) {
	return []*sw.Tensor{in[0].Mul(in[0]).Mul(in[0])}, ctx.Save(in[0])
}

func (f cube) Backward(ctx *sw.FunctionContext, grads []*sw.Tensor) ([]*sw.Tensor, error) {
	if f.fail {
		return nil, &sw.Error{Code: sw.DataLoss, Message: "the dog ate it"}
	}
	if f.noCode {
		return nil, fmt.Errorf("layer 3: %w", &sw.Error{Message: "the cat sat on it"})
	}
	if f.panics {
		panic("oh")
	}
	x := ctx.Saved(0)
	return []*sw.Tensor{x.Mul(x).Mul(300).Mul(grads[0])}, nil
}

func TestCheckpoints(t *testing.T) { checkLeaks(t, func() { checkpoints(t) }) }

func checkpoints(t *testing.T) {
	run(t, 4, func(w *sw.World) error {
		m, err := w.ParseMesh("dp=2,tp=2")
		if err != nil {
			return err
		}
		x := sw.Randn(m, []int64{7, 5}, sw.On{"dp": "S(0)"}, sw.RequiresGrad)
		weight := sw.Randn(m, []int64{5}, sw.On{"tp": "S(0)"}, sw.RequiresGrad)
		runs := 0
		block := func(in []*sw.Tensor) *sw.Tensor {
			runs++
			return in[0].Apply("aten::gelu").Apply("aten::dropout", 0.5, true).Mul(weight)
		}
		// step is the output, both gradients, and how many operators have drawn by then.
		step := func(forward func(...*sw.Tensor) *sw.Tensor) ([]*sw.Tensor, uint64, error) {
			if err := m.SetRandomState(5, 0); err != nil {
				return nil, 0, err
			}
			y := forward(x)
			if err := y.Mul(y).Sum().Backward(); err != nil {
				return nil, 0, err
			}
			all := []*sw.Tensor{y.Full(), mustOf(x.Grad()).Full(), mustOf(weight.Grad()).Full()}
			x.SetGrad(nil)
			weight.SetGrad(nil)
			_, drawn, err := m.RandomState()
			return all, drawn, err
		}
		wanted, drawn, err := step(func(in ...*sw.Tensor) *sw.Tensor { return block(in) })
		if err != nil || runs != 1 || drawn == 0 {
			return fmt.Errorf("%d runs, %d drawn, %v", runs, drawn, err)
		}
		got, drawnAgain, err := step(func(in ...*sw.Tensor) *sw.Tensor { return sw.Checkpoint(block, in...) })
		if err != nil || runs != 3 || drawnAgain != drawn {
			return fmt.Errorf("%d runs, %d drawn, %v", runs, drawnAgain, err)
		}
		for i := range wanted {
			a, b := mustOf(sw.Data[float32](wanted[i])), mustOf(sw.Data[float32](got[i]))
			for j := range a {
				if math.Abs(float64(a[j]-b[j])) > 1e-5 {
					return fmt.Errorf("%d: %v and %v", i, a, b)
				}
			}
		}
		var again *sw.Tensor
		err = m.WithRandomState(5, 0, func() error {
			return w.With(sw.NoGrad, func() error {
				again = block([]*sw.Tensor{x}).Full()
				return again.Err()
			})
		})
		if err != nil || fmt.Sprint(mustOf(sw.Data[float32](again))) != fmt.Sprint(mustOf(sw.Data[float32](wanted[0]))) {
			return fmt.Errorf("other numbers, %v", err)
		}
		if _, offset, err := m.RandomState(); err != nil || offset != drawn {
			return fmt.Errorf("%d, %v", offset, err)
		}
		return nil
	})
}

func TestCheckpointsThatFail(t *testing.T) { checkLeaks(t, func() { checkpointsThatFail(t) }) }

func checkpointsThatFail(t *testing.T) {
	w := alone(t)
	x := sw.FromSlice(w, []float64{2}, []int64{1}, sw.RequiresGrad)
	// failing fails in that run.
	failing := func(run int, panics bool) func([]*sw.Tensor) ([]*sw.Tensor, error) {
		runs := 0
		return func(in []*sw.Tensor) ([]*sw.Tensor, error) {
			if runs++; runs < run {
				return []*sw.Tensor{in[0].Mul(in[0]), in[0].Mul(3)}, nil
			}
			if panics {
				panic("the dog ate it")
			}
			return nil, &sw.Error{Code: sw.DataLoss, Message: "the dog ate it"}
		}
	}
	for panics, code := range map[bool]sw.Code{false: sw.DataLoss, true: sw.Internal} {
		_, err := sw.CheckpointSeveral(failing(1, panics), 2, x)
		if !errors.Is(err, code) || !strings.Contains(err.Error(), "CheckpointSeveral: f.forward: ") || !strings.Contains(err.Error(), "the dog ate it") {
			t.Error(err)
		}
		y := mustOf(sw.CheckpointSeveral(failing(2, panics), 2, x))
		err = y[0].Add(y[1]).Backward()
		if !errors.Is(err, code) || !strings.Contains(err.Error(), "Tensor.Backward: f.forward, run again in backward: ") || !strings.Contains(err.Error(), "the dog ate it") {
			t.Error(err)
		}
	}
	if err := sw.Checkpoint(func(in []*sw.Tensor) *sw.Tensor { return in[0].Apply("aten::geluu") }, x).Err(); !errors.Is(err, sw.NotFound) {
		t.Error(err)
	}
	for _, f := range []func([]*sw.Tensor) *sw.Tensor{nil, func([]*sw.Tensor) *sw.Tensor { return nil }} {
		if err := sw.Checkpoint(f, x).Mul(2).Err(); !errors.Is(err, sw.InvalidArgument) {
			t.Error(err)
		}
	}
	if err := sw.Checkpoint(func(in []*sw.Tensor) *sw.Tensor { return in[0] }).Err(); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	if _, err := sw.CheckpointSeveral(failing(9, false), 1, x); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "f has returned 2 tensors, wanted 1") {
		t.Error(err)
	}
	w.Close()
}

// owned is an error of the program, of a type of its own.
type owned struct{ rank, step int }

func (o *owned) Error() string {
	return fmt.Sprintf("rank %d, step %d: the dog ate it", o.rank, o.step)
}

// fails is a function whose Backward calls another one, which fails.
type fails struct {
	w      *sw.World
	err    error
	depth  int // of calls of the library within another
	forget bool
}

func (f fails) Forward(ctx *sw.FunctionContext, in []*sw.Tensor) ([]*sw.Tensor, error) {
	return []*sw.Tensor{in[0].Mul(2)}, nil
}

func (f fails) Backward(ctx *sw.FunctionContext, grads []*sw.Tensor) ([]*sw.Tensor, error) {
	if f.depth == 0 {
		return []*sw.Tensor{sw.Failed(f.err)}, nil
	}
	err := f.w.With(sw.Grad, func() error {
		inner := f
		inner.depth--
		y, err := sw.Apply(inner, "inner", 1, sw.Ones(f.w, []int64{1}, sw.RequiresGrad))
		if err != nil {
			return err
		}
		return y[0].Sum().Backward()
	})
	if !errors.Is(err, f.err) {
		return nil, errors.New("the inner function has not failed as it should")
	} else if !f.forget {
		return nil, fmt.Errorf("layer %d: %w", f.depth, err)
	}
	// What has failed and was borne is not the reason of what fails later.
	return []*sw.Tensor{grads[0].Apply("aten::geluu")}, nil
}

// Errors of the program that come through the library are still the program's, each in the call and on the rank that it
// made fail.
func TestErrorsOfTheProgramComeThroughTheLibrary(t *testing.T) {
	checkLeaks(t, func() {
		run(t, 2, func(w *sw.World) error {
			x := sw.FromSlice(w, []float64{2}, []int64{1}, sw.RequiresGrad)
			for step := 0; step < 6; step++ {
				mine := &owned{w.Rank(), step}
				is := func(what string, err error) error {
					var found *owned
					var library *sw.Error
					if !errors.As(err, &found) || found != mine || !errors.As(err, &library) || library.Code != sw.Unknown ||
						!errors.Is(err, sw.Unknown) || !strings.Contains(library.Message, mine.Error()) {
						return fmt.Errorf("%s: %w", what, err)
					}
					return nil
				}
				depth := []int{0, 1, 2, 70}[step%4] // LibTorch goes on in another thread after 60
				y, err := sw.Apply(fails{w: w, err: mine, depth: depth}, "fails", 1, x)
				if err != nil {
					return err
				}
				if err := is("Backward", y[0].Sum().Backward(sw.RetainGraph())); err != nil {
					return err
				}
				if _, err := sw.Gradients([]*sw.Tensor{y[0].Sum()}, []*sw.Tensor{x}); is("Gradients", err) != nil {
					return is("Gradients", err)
				}
				z := sw.Checkpoint(func([]*sw.Tensor) *sw.Tensor { return sw.Failed(mine) }, x)
				if err := is("Checkpoint", z.Mul(2).Err()); err != nil {
					return err
				}
				runs := 0
				z = sw.Checkpoint(func(in []*sw.Tensor) *sw.Tensor {
					if runs++; runs == 2 {
						return sw.Failed(mine)
					}
					return in[0].Mul(2)
				}, x)
				if err := is("Checkpoint, in Backward", z.Sum().Backward()); err != nil {
					return err
				}
				// It is gone with its call.
				if err := x.Apply("aten::geluu").Err(); errors.As(err, new(*owned)) || errors.Unwrap(err) != nil {
					return fmt.Errorf("another call: %w", err)
				}
				y, err = sw.Apply(fails{w: w, err: mine, depth: 1, forget: true}, "forgets", 1, x)
				if err != nil {
					return err
				}
				if err := y[0].Sum().Backward(); !errors.Is(err, sw.NotFound) || errors.As(err, new(*owned)) {
					return fmt.Errorf("an error that was borne: %w", err)
				}
			}
			return nil
		})
	})
}

func TestFunctionsOfTheHost(t *testing.T) { checkLeaks(t, func() { functionsOfTheHost(t) }) }

func functionsOfTheHost(t *testing.T) {
	w := alone(t)
	x := sw.FromSlice(w, []float64{2}, []int64{1}, sw.RequiresGrad)
	y := mustOf(sw.Apply(cube{}, "cube", 1, x))[0]
	if got := mustOf(y.Item()); got != 8 {
		t.Error(got)
	}
	if err := y.Backward(); err != nil {
		t.Fatal(err)
	}
	if got := mustOf(mustOf(x.Grad()).Item()); got != 1200 {
		t.Error(got)
	}
	y = mustOf(sw.Apply(cube{fail: true}, "cube", 1, x))[0]
	if err := y.Backward(); !errors.Is(err, sw.DataLoss) || !strings.Contains(err.Error(), "the dog ate it") {
		t.Error(err)
	}
	y = mustOf(sw.Apply(cube{noCode: true}, "cube", 1, x))[0]
	if err := y.Backward(); !errors.Is(err, sw.Unknown) || !strings.Contains(err.Error(), "layer 3: ") ||
		!strings.Contains(err.Error(), "the cat sat on it") {
		t.Error(err)
	}
	y = mustOf(sw.Apply(cube{panics: true}, "cube", 1, x))[0]
	if err := y.Backward(); !errors.Is(err, sw.Internal) || !strings.Contains(err.Error(), "oh") {
		t.Error(err)
	}
	if _, err := sw.Apply(cube{}, "cube", 2, x); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	w.Close()
	// On a mesh.
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		x := sw.Full(m, []int64{7}, 2, sw.On{"x": "S(0)"}, sw.RequiresGrad)
		y, err := sw.Apply(cube{}, "cube", 1, x)
		if err != nil {
			return err
		}
		if err := y[0].Sum().Backward(); err != nil {
			return err
		}
		grad, err := x.Grad()
		if err != nil {
			return err
		}
		if sum, err := grad.Sum().Item(); err != nil || sum != 7*1200 {
			return fmt.Errorf("%v, %v", sum, err)
		}
		return nil
	})
}
