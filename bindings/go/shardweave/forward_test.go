package shardweave_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// block is a module in Go without a weight of its own: relu(x scale up') down'.
type block struct {
	up, down *sw.Tensor
	forward  *sw.Forward
}

func (b *block) run(x, scale *sw.Tensor) *sw.Tensor {
	return b.forward.Run(func(in []*sw.Tensor) *sw.Tensor {
		return in[0].Mul(in[1]).Linear(b.up, nil).Relu().Linear(b.down, nil)
	}, x, scale)
}

// someNumbers are some below and some above zero.
func someNumbers(n, seed int) []float64 {
	all := make([]float64, n)
	for i := range all {
		all[i] = float64((i*7+seed*5)%11-5) / 8
	}
	return all
}

// twoBlocks is a model of two, each a module of its own.
func twoBlocks(w *sw.World) (*sw.Module, []*block, error) {
	model, err := w.NewModule()
	if err != nil {
		return nil, nil, err
	}
	var blocks []*block
	for i := 0; i < 2; i++ {
		child, err := w.NewModule()
		if err != nil {
			return nil, nil, err
		}
		b := &block{up: child.Parameter("up.weight", sw.FromSlice(w, someNumbers(35, i), []int64{7, 5}))}
		name := fmt.Sprintf("blocks.%d", i)
		if err := model.AddChild(name, child); err != nil {
			return nil, nil, err
		}
		// What a child gets later is a part of the whole, too.
		b.down = child.Parameter("down.weight", sw.FromSlice(w, someNumbers(35, i+2), []int64{5, 7}))
		if b.forward, err = model.Forward(name); err != nil {
			return nil, nil, err
		}
		blocks = append(blocks, b)
	}
	return model, blocks, model.Err()
}

// sequenceParallel is a plan in which every rank of tp has a part of the tokens, outside of the blocks.
func sequenceParallel() *sw.Plan {
	return sw.NewPlan().Add("*.up.weight", sw.On{"tp": "S(0)"}).Add("*.down.weight", sw.On{"tp": "S(1)"}).
		AddForward("blocks.?.input", sw.On{"tp": "R"}).AddForward("blocks.?.input.1", sw.On{"tp": "R"}).
		AddForward("blocks.?.output", sw.On{"tp": "S(0)"}).
		Add("*.up.weight", sw.On{"tp": "S(0)"}) // agrees
}

// A block in Go under a plan with forwards is one device's, and so are its gradients.
func TestBlocksFollowAPlan(t *testing.T) {
	for _, mesh := range []string{"tp=2", "tp=3", "dp=2,tp=2"} {
		ranks := map[string]int{"tp=2": 2, "tp=3": 3, "dp=2,tp=2": 4}[mesh]
		run(t, ranks, func(w *sw.World) error {
			m, err := w.ParseMesh(mesh)
			if err != nil {
				return err
			}
			alone, plain, err := twoBlocks(w)
			if err != nil {
				return err
			}
			model, blocks, err := twoBlocks(w)
			if err != nil {
				return err
			}
			table, text, err := sequenceParallel().Resolve(model, m)
			if err != nil || !strings.Contains(table, "blocks.1.down.weight") || !strings.Contains(text, `"module":"blocks.0","value":"input.1"`) {
				return fmt.Errorf("%v: %s\n%s", err, table, text)
			}
			if err := model.Distribute(m, sequenceParallel(), sw.SameEverywhere); err != nil {
				return err
			}
			x, scale := sw.FromSlice(w, someNumbers(45, 1), []int64{9, 5}), sw.FromSlice(w, someNumbers(45, 4), []int64{9, 5})
			rows := sw.On{"tp": "S(0)"}
			trace, err := m.Trace()
			if err != nil {
				return err
			}
			y := x.Distribute(m, rows, sw.SameEverywhere)
			onMesh := scale.Distribute(m, rows, sw.SameEverywhere)
			for _, b := range blocks {
				y = b.run(y, onMesh)
			}
			record, err := json.Marshal(trace)
			if err != nil {
				return err
			}
			for _, part := range []string{`"module":"blocks.1"`, `"collective":"reduce_scatter`} {
				if !strings.Contains(string(record), part) {
					return fmt.Errorf("no %s in %s", part, record)
				}
			}
			if err := trace.Close(); err != nil {
				return err
			}
			layout, err := y.Layout()
			if err != nil || !strings.HasSuffix(layout.String(), "S(0)]") {
				return fmt.Errorf("the output lies as %v, %v", layout, err)
			}
			want := x
			for _, b := range plain {
				want = b.run(want, scale)
			}
			if err := close64(y, want); err != nil {
				return err
			}
			for _, each := range []*sw.Tensor{y, want} {
				if err := each.Mul(each).Sum().Backward(); err != nil {
					return err
				}
			}
			if err := model.FinishGradSync(); err != nil {
				return err
			}
			for i := range blocks {
				for _, pair := range [][2]*sw.Tensor{{blocks[i].up, plain[i].up}, {blocks[i].down, plain[i].down}} {
					a, err := pair[0].Grad()
					if err != nil {
						return err
					}
					b, err := pair[1].Grad()
					if err != nil {
						return err
					}
					if err := close64(a, b); err != nil {
						return fmt.Errorf("gradient of block %d: %w", i, err)
					}
				}
			}
			return alone.Close()
		})
	}
}

// close64 compares a sharded tensor with a plain one.
func close64(a, b *sw.Tensor) error {
	x, err := sw.Data[float64](a.Full())
	if err != nil {
		return err
	}
	y, err := sw.Data[float64](b)
	if err != nil {
		return err
	}
	if len(x) != len(y) {
		return fmt.Errorf("%d and %d elements", len(x), len(y))
	}
	for i := range x {
		if math.Abs(x[i]-y[i]) > 1e-9*math.Max(1, math.Abs(y[i])) {
			return fmt.Errorf("element %d is %v; wanted %v", i, x[i], y[i])
		}
	}
	return nil
}

func TestForwardsThatCannotBeMet(t *testing.T) {
	w := alone(t)
	m := mustOf(w.ParseMesh("tp=1"))
	model := mustOf(w.NewModule())
	model.Parameter("blocks.0.up.weight", sw.FromSlice(w, someNumbers(35, 0), []int64{7, 5}))
	plan := sw.NewPlan().AddForward("blocks.?.input", sw.On{"tp": "R"})
	err := model.Distribute(m, plan, sw.SameEverywhere)
	if !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "announce it by Module.Forward first, and run it by Forward.Run") {
		t.Error(err)
	}
	if _, _, err := plan.Resolve(model, m); !errors.Is(err, sw.FailedPrecondition) || !strings.Contains(err.Error(), "Plan.Resolve: ") {
		t.Error(err)
	}
	if _, err := model.Forward("blocks.7"); !errors.Is(err, sw.NotFound) || !strings.Contains(err.Error(), "did you mean 'blocks.0'") {
		t.Error(err)
	}
	forward := mustOf(model.Forward("blocks.0"))
	if err := model.Distribute(m, sw.NewPlan().AddForward("blocks.0.input.3", sw.On{"tp": "R"}), sw.SameEverywhere); err != nil {
		t.Fatal(err)
	}
	x := sw.Ones(w, []int64{2, 5})
	same := func(in []*sw.Tensor) *sw.Tensor { return in[0] }
	if err := forward.Run(same, x).Err(); err == nil || !strings.Contains(err.Error(), "Forward.Run: the plan's 'blocks.0.input.3': there are only 1 tensors") {
		t.Error(err)
	}
	// Errors of the body, of what it returns, and of the inputs.
	broken := errors.New("broken")
	if _, err := forward.RunSeveral(func([]*sw.Tensor) ([]*sw.Tensor, error) { return nil, broken }, x); !errors.Is(err, broken) {
		t.Error(err)
	}
	if err := forward.Run(func([]*sw.Tensor) *sw.Tensor { return nil }, x).Err(); !errors.Is(err, sw.InvalidArgument) {
		t.Error(err)
	}
	if err := forward.Run(func([]*sw.Tensor) *sw.Tensor { return x.Add(sw.Ones(w, []int64{7})) }, x).Err(); err == nil || !strings.Contains(err.Error(), "Tensor.Add") {
		t.Error(err)
	}
	for _, f := range []func([]*sw.Tensor) *sw.Tensor{nil, same} {
		if err := forward.Run(f, nil).Err(); !errors.Is(err, sw.InvalidArgument) {
			t.Error(err)
		}
	}
	// A panic goes through, and the run ends.
	func() {
		defer func() {
			if p := recover(); p != "oh" {
				t.Error(p)
			}
		}()
		forward.Run(func([]*sw.Tensor) *sw.Tensor { panic("oh") }, x)
	}()
	if err := x.Add(1).Err(); err != nil {
		t.Error(err)
	}
}

func TestPartsOfModules(t *testing.T) {
	checkLeaks(t, func() {
		w := alone(t)
		defer w.Close()
		model, child := mustOf(w.NewModule()), mustOf(w.NewModule())
		for _, err := range []error{model.AddChild("a.b", child), model.AddChild("a.b", child), model.AddChild("c", child),
			child.AddChild("d", model), model.AddChild("", child), model.AddChild("c", nil)}[1:] {
			if !errors.Is(err, sw.AlreadyExists) && !errors.Is(err, sw.InvalidArgument) {
				t.Error(err)
			}
		}
		same := mustOf(model.Child("a.b"))
		same.Parameter("p", sw.Ones(w, []int64{2}))
		if all := mustOf(model.Parameters()); len(all) != 1 || all[0].Name != "a.b.p" {
			t.Error(all)
		}
		if err := model.Train(false); err != nil {
			t.Error(err)
		}
		for _, m := range []*sw.Module{model, child, same} {
			if mustOf(m.IsTraining()) {
				t.Error("it is trained")
			}
		}
		if err := child.Train(true); err != nil || !mustOf(same.IsTraining()) || mustOf(model.IsTraining()) {
			t.Error(err)
		}
		plan := mustOf(model.HuggingFacePlan(`{"a.b.p": "colwise"}`, "tp"))
		if text, err := plan.MarshalJSON(); err != nil || !strings.Contains(string(text), `"tp":"S(`) {
			t.Error(string(text), err)
		}
		if _, err := model.HuggingFacePlan(`{"a.b.p": "cowlise"}`, "tp"); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "cowlise") {
			t.Error(err)
		}
	})
}

func TestPlansByPosition(t *testing.T) {
	run(t, 4, func(w *sw.World) error {
		m, err := w.ParseMesh("dp=2,tp=2")
		if err != nil {
			return err
		}
		model, err := w.NewModule()
		if err != nil {
			return err
		}
		p := model.Parameter("p", sw.Ones(w, []int64{9}))
		plan := sw.NewPlan().Add("p", sw.MustParseLayout("[S(0)@1, S(0)@0]")).AddForward("p.input", sw.MustParseLayout("[R, R]"))
		text, err := plan.MarshalJSON()
		if want := `{"parameter":{"p":"[S(0)@1, S(0)@0]"},"forward":{"p.input":"[R, R]"}}`; err != nil || string(text) != want {
			return fmt.Errorf("%s, %v", text, err)
		}
		if err := model.Distribute(m, sw.NewPlan().Add("p", sw.MustParseLayout("[S(0)@1, S(0)@0]")), sw.SameEverywhere); err != nil {
			return err
		}
		layout, err := p.Layout()
		if err != nil || layout.String() != "[S(0)@1, S(0)@0]" {
			return fmt.Errorf("%v, %v", layout, err)
		}
		return nil
	})
}

// Whatever communicates says which line has called this package; nothing is asked for without a trace.
func TestTracesSayWhereTheCallWas(t *testing.T) {
	run(t, 2, func(w *sw.World) error {
		m, err := w.ParseMesh("x=2")
		if err != nil {
			return err
		}
		x := sw.Ones(m, []int64{5, 3}, sw.On{"x": "S(0)"}, sw.RequiresGrad)
		trace, err := m.Trace()
		if err != nil {
			return err
		}
		_, file, line, _ := runtime.Caller(0)
		calls := map[string]func() error{
			`"op":"full_tensor"`:  func() error { return x.Full().Err() },
			`"op":"redistribute"`: func() error { return x.Redistribute(sw.On{"x": "R"}).Err() },
			`"op":"aten::relu"`:   func() error { return x.Sum().Relu().Err() },
			`"op":"redistribute backward"`: func() error {
				y := x.Redistribute(sw.On{"x": "S(1)"}).Relu().Sum()
				if err := trace.Clear(); err != nil {
					return err
				}
				return y.Backward()
			},
		}
		lines := map[string]int{`"op":"full_tensor"`: line + 2, `"op":"redistribute"`: line + 3, `"op":"aten::relu"`: line + 4, `"op":"redistribute backward"`: line + 10}
		for _, op := range []string{`"op":"full_tensor"`, `"op":"redistribute"`, `"op":"aten::relu"`, `"op":"redistribute backward"`} {
			if err := trace.Clear(); err != nil {
				return err
			}
			if err := calls[op](); err != nil {
				return err
			}
			record, err := json.Marshal(trace)
			if err != nil {
				return err
			}
			where := fmt.Sprintf(`"source":"%s:%d"`, file, lines[op])
			if !strings.Contains(string(record), op) || strings.Count(string(record), where) != strings.Count(string(record), `"source"`) {
				return fmt.Errorf("no %s of %s in %s", where, op, record)
			}
		}
		second, err := m.Trace()
		if err != nil {
			return err
		}
		if err := trace.Close(); err != nil {
			return err
		}
		if err := x.Full().Err(); err != nil {
			return err
		}
		if record, err := json.Marshal(second); err != nil || !strings.Contains(string(record), "forward_test.go:") {
			return fmt.Errorf("%s, %v", record, err)
		}
		if err := second.Close(); err != nil {
			return err
		}
		return x.Full().Err()
	})
}
