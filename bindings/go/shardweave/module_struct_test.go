package shardweave_test

import (
	"context"
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

// names of parameters, and of buffers.
func names(all []sw.NamedTensor, err error) []string {
	if err != nil {
		return []string{err.Error()}
	}
	var names []string
	for _, t := range all {
		name := t.Name
		if t.Transient {
			name += " (transient)"
		}
		names = append(names, name)
	}
	return names
}

// tenths is 0.1, 0.2, ...
func tenths(w *sw.World, rows, columns int64) *sw.Tensor {
	return sw.FromSlice(w, numbers(rows*columns), []int64{rows, columns})
}

// fused is an MLP that says itself how it shards.
type fused struct {
	Up, Down *sw.Tensor
}

func (m *fused) Sharding() sw.ModuleSharding {
	return sw.ModuleSharding{Parameter: map[string]string{"up": "S(0)", "down": "S(1)"},
		Styles: map[string]sw.ModuleSharding{"columns": {Parameter: map[string]string{"*": "S(1)"}}}}
}

func (m *fused) forward(x *sw.Tensor) *sw.Tensor {
	return x.Linear(m.Up, nil).Gelu().Linear(m.Down, nil)
}

func TestModulesSayHowTheyShard(t *testing.T) {
	type model struct {
		*sw.Module
		Blocks []*fused
	}
	make := func(w *sw.World) (*model, *sw.Tensor) {
		m := &model{}
		for i := 0; i < 2; i++ {
			m.Blocks = append(m.Blocks, &fused{tenths(w, 6, 4).Sin(), tenths(w, 4, 6).Cos()})
		}
		return m, tenths(w, 3, 4)
	}
	loss := func(m *model, x *sw.Tensor) (float64, error) {
		for _, block := range m.Blocks {
			x = block.forward(x)
		}
		return x.Square().Mean().Item()
	}
	whole, x := make(alone(t))
	want, err := loss(whole, x)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct{ style, up string }{{"", "[S(0)]"}, {"columns", "[S(1)]"}} {
		run(t, 3, func(w *sw.World) error {
			mesh, err := w.ParseMesh("tp=3")
			if err != nil {
				return err
			}
			m, x := make(w)
			if _, err := w.ModuleOf(m); err != nil {
				return err
			}
			plan := sw.NewPlan().AddModule("blocks.*", map[string]string{"tp": test.style})
			if text := string(mustOf(json.Marshal(plan))); !strings.Contains(text, `"module":{"blocks.*":`) {
				return errors.New(text)
			}
			if err := m.Distribute(mesh, plan, sw.SameEverywhere); err != nil {
				return err
			}
			if l, err := m.Blocks[1].Up.Layout(); err != nil || l.String() != test.up {
				return fmt.Errorf("%v, %v; wanted %s", l, err, test.up)
			}
			got, err := loss(m, x.Distribute(mesh, sw.On{}, sw.SameEverywhere))
			if err != nil || math.Abs(got-want) > 1e-5*want {
				return fmt.Errorf("%v, %v; wanted %v", got, err, want)
			}
			return nil
		})
	}
	w := alone(t)
	mesh := mustOf(w.ParseMesh("tp=1"))
	other := mustOf(w.NewModule())
	other.Parameter("mlp.up", sw.Ones(w, []int64{2}))
	if err := other.Distribute(mesh, sw.NewPlan().AddModule("mlp", map[string]string{"tp": ""}), 0); !errors.Is(err, sw.NotFound) {
		t.Error("of a module that does not say it:", err)
	}
	if err := other.SetSharding(sw.ModuleSharding{Parameter: map[string]string{"mlp.up": "S(x)"}}); !errors.Is(err, sw.InvalidArgument) {
		t.Error("of no placement:", err)
	}
	if err := other.SetSharding(sw.ModuleSharding{Parameter: map[string]string{"mlp.up": "S(0)"}}); err != nil {
		t.Fatal(err)
	}
	if err := other.Distribute(mesh, sw.NewPlan().AddModule("", map[string]string{"tp": ""}), 0); err != nil {
		t.Error(err)
	}
}

type base struct {
	Scale *sw.Tensor
}

type structBlock struct {
	InputLayerNorm *nn.LayerNorm
	Up             *nn.Linear `sw:"mlp.up_proj"`
	Drop           *nn.Dropout
	Absent         *nn.Linear
	count          int
}

type structModel struct {
	*sw.Module
	base
	Blocks  []*structBlock
	LMHead  *nn.Linear
	Body    nn.Sequential
	Pair    [2]*sw.Tensor
	Any     any
	Value   nn.RMSNorm
	Mean    *sw.Tensor `sw:",buffer"`
	Cache   *sw.Tensor `sw:"cos_cached,transient"`
	Left    *nn.Linear `sw:"-"`
	Sizes   []int64
	Options map[string]any
	Call    func() *sw.Tensor
	World   *sw.World
	hidden  *nn.Linear
}

func newStructModel(w sw.Place) *structModel {
	one := func() *sw.Tensor { return sw.Ones(w, []int64{2}) }
	return &structModel{
		base:   base{one()},
		Blocks: []*structBlock{{InputLayerNorm: nn.NewLayerNorm(w, 4), Up: nn.NewLinear(w, 4, 4), Drop: nn.NewDropout(0.5)}, nil, {Up: nn.NewLinear(w, 4, 4, nn.NoBias), count: 1}},
		LMHead: nn.NewLinear(w, 4, 2, nn.NoBias),
		Body:   nn.Sequential{nn.NewLinear(w, 4, 4, nn.NoBias), nn.ReLU, nn.NewLinear(w, 4, 4, nn.NoBias)},
		Pair:   [2]*sw.Tensor{one(), one()}, Any: nn.NewRMSNorm(w, 3), Value: *nn.NewRMSNorm(w, 3),
		Mean: sw.Zeros(w, []int64{1}, sw.I64), Cache: one(), Left: nn.NewLinear(w, 1, 1),
		Options: map[string]any{"a": 1}, Call: one,
	}
}

func TestAStructIsAModule(t *testing.T) {
	w := alone(t)
	var m *structModel
	var module *sw.Module
	err := w.Scope(func() (err error) {
		m = newStructModel(w)
		module, err = w.ModuleOf(m)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if m.Module != module || m.hidden != nil {
		t.Error("the field was not set")
	}
	want := []string{"scale", "blocks.0.input_layer_norm.weight", "blocks.0.input_layer_norm.bias", "blocks.0.mlp.up_proj.weight", "blocks.0.mlp.up_proj.bias",
		"blocks.2.mlp.up_proj.weight", "lm_head.weight", "body.0.weight", "body.2.weight", "pair.0", "pair.1", "any.weight", "value.weight"}
	got := names(m.Parameters())
	known := map[string]bool{}
	for _, name := range got {
		known[name] = true
	}
	for _, name := range want {
		if !known[name] {
			t.Errorf("there is no %s among %v", name, got)
		}
	}
	if len(got) != len(want) {
		t.Errorf("%v, wanted %v", got, want)
	}
	if got := names(m.Buffers()); !reflect.DeepEqual(got, []string{"mean", "cos_cached (transient)"}) {
		t.Error(got)
	}
	// They have left the scope, and require grad.
	for _, p := range mustOf(m.Parameters()) {
		if requires, err := p.RequiresGrad(); err != nil || !requires {
			t.Error(p.Name, requires, err)
		}
	}
	if err := m.Blocks[0].Up.Weight.Err(); err != nil {
		t.Error(err)
	}
	if _, err := w.ModuleOf(m); !errors.Is(err, sw.AlreadyExists) || !strings.Contains(err.Error(), "structModel.Module is set") {
		t.Error(err)
	}
	// Training and evaluation.
	x := sw.Ones(w, []int64{100})
	zeros := func() float64 { return mustOf(m.Blocks[0].Drop.Forward(x).Eq(0).Sum().Item()) }
	if n := zeros(); n == 0 || n == 100 {
		t.Error(n)
	}
	if err := m.Train(false); err != nil || zeros() != 0 {
		t.Error(err)
	}
	if err := m.Train(true); err != nil || zeros() == 0 {
		t.Error(err)
	}
	// Of a part; and as a part of another module.
	part := mustOf(m.Child("blocks.0"))
	if err := part.Train(false); err != nil || zeros() != 0 {
		t.Error(err)
	}
	if err := mustOf(m.Child("lm_head")).Train(true); err != nil || zeros() != 0 {
		t.Error(err)
	}
	outer := mustOf(w.NewModule())
	if err := outer.AddChild("inner", m.Module); err != nil {
		t.Fatal(err)
	}
	if err := outer.Train(true); err != nil || zeros() == 0 {
		t.Error(err)
	}
	if got := names(outer.Buffers()); !reflect.DeepEqual(got, []string{"inner.mean", "inner.cos_cached (transient)"}) {
		t.Error(got)
	}
	if got := names(mustOf(outer.Child("inner")).Buffers()); !reflect.DeepEqual(got, []string{"mean", "cos_cached (transient)"}) {
		t.Error(got)
	}
	// What is no struct, but holds some.
	body, err := w.ModuleOf(nn.Sequential{nn.NewLinear(w, 2, 2, nn.NoBias), nn.Tanh, nn.NewDropout(0.1)})
	if err != nil || !reflect.DeepEqual(names(body.Parameters()), []string{"0.weight"}) {
		t.Error(names(body.Parameters()), err)
	}
}

func TestStructsThatTieWeights(t *testing.T) {
	w := alone(t)
	type model struct {
		*sw.Module
		Tokens *nn.Embedding
		Head   *nn.Linear
	}
	m := &model{Tokens: nn.NewEmbedding(w, 5, 3)}
	m.Head = &nn.Linear{Weight: m.Tokens.Weight}
	if _, err := w.ModuleOf(m); err != nil {
		t.Fatal(err)
	}
	if got := names(m.Parameters()); !reflect.DeepEqual(got, []string{"tokens.weight"}) {
		t.Error(got)
	}
	if same, err := m.Get("head.weight").IsSame(m.Tokens.Weight); err != nil || !same {
		t.Error(same, err)
	}
}

type ring struct {
	Weight *sw.Tensor
	Next   *ring
}

// Types that go on for ever.
type (
	branches map[string]branches
	rows     []rows
	endless  *endless
)

func TestStructsThatAreNoModules(t *testing.T) {
	w, other := alone(t), alone(t)
	one := func() *sw.Tensor { return sw.Ones(w, []int64{2}) }
	circle := &ring{Weight: one()}
	circle.Next = &ring{Weight: one(), Next: circle}
	closed := one()
	closed.Close()
	type tagged struct {
		A *sw.Tensor `sw:"a b"`
	}
	type optioned struct {
		A *sw.Tensor `sw:"a,parameter"`
	}
	type twice struct {
		A *sw.Tensor
		B *sw.Tensor `sw:"a"`
	}
	type lower struct {
		Blocks []struct{ weight *sw.Tensor }
	}
	type mapped struct{ Heads map[string]*nn.Linear }
	type anyMapped struct {
		A    *sw.Tensor
		More map[string]any
	}
	type integers struct{ Index *sw.Tensor }
	type deep struct{ Blocks []*nn.Linear }
	type byValue struct{ A sw.Tensor }
	type nested struct{ Inner *sw.Module }
	type branched struct {
		A, B *sw.Tensor `sw:"a"`
		More branches
		Rows rows
		To   endless
	}
	within := []any{nil}
	within[0] = within
	type slices struct{ Parts []any }
	first := one()
	type clash struct {
		A *sw.Tensor `sw:"a"`
		B *sw.Tensor `sw:"a.b"`
	}
	for what, c := range map[string]struct {
		model any
		code  sw.Code
		words string
	}{
		"nil":            {nil, sw.InvalidArgument, "argument 'model' is nil"},
		"a nil pointer":  {(*structModel)(nil), sw.InvalidArgument, "argument 'model' is nil"},
		"a struct":       {structModel{}, sw.InvalidArgument, "argument 'model' is a struct, of type shardweave_test.structModel; wanted a pointer to it, &model"},
		"nothing in it":  {struct{ N int }{1}, sw.InvalidArgument, "leads to no tensors"},
		"a number":       {7, sw.InvalidArgument, "argument 'model', of type int, leads to no tensors"},
		"a tensor":       {one(), sw.InvalidArgument, "leads to no tensors"},
		"no tensors":     {&struct{ N int }{1}, sw.InvalidArgument, "leads to no tensors"},
		"all nil":        {&deep{}, sw.InvalidArgument, "all fields that lead to them are nil"},
		"a circle":       {circle, sw.InvalidArgument, "ring.Next.Next leads back to ring"},
		"itself":         {&slices{within}, sw.InvalidArgument, "slices.Parts[0] leads back to slices.Parts"},
		"endless types":  {&branched{A: one(), B: one()}, sw.AlreadyExists, "branched.A and branched.B are both a"},
		"endless alone":  {new(endless), sw.InvalidArgument, "leads to no tensors"},
		"a clash":        {&clash{first, one()}, sw.AlreadyExists, "clash.B (a.b): "},
		"a bad tag":      {&tagged{one()}, sw.InvalidArgument, "tagged.A: its tag \"a b\" is no name"},
		"a bad option":   {&optioned{one()}, sw.InvalidArgument, "optioned.A: its tag \"a,parameter\" has the option 'parameter'"},
		"one name":       {&twice{one(), one()}, sw.AlreadyExists, "twice.A and twice.B are both a: tag one"},
		"not exported":   {&lower{[]struct{ weight *sw.Tensor }{{one()}}}, sw.InvalidArgument, "lower.Blocks[0].weight leads to tensors, but is not exported"},
		"a map":          {&mapped{map[string]*nn.Linear{"a": nn.NewLinear(w, 1, 1)}}, sw.InvalidArgument, "mapped.Heads is a map"},
		"a map of any":   {&anyMapped{one(), map[string]any{"a": nn.NewLinear(w, 1, 1)}}, sw.InvalidArgument, "anyMapped.More is a map"},
		"integers":       {&integers{sw.Ones(w, []int64{1}, sw.I64)}, sw.InvalidArgument, "integers.Index (index): its elements are no floating point numbers"},
		"closed":         {&integers{closed}, sw.FailedPrecondition, "integers.Index (index): the tensor was closed"},
		"another rank's": {&integers{sw.Ones(other, []int64{1})}, sw.InvalidArgument, "integers.Index (index): what is used together belongs to several ranks"},
		"not made":       {&deep{[]*nn.Linear{nn.NewLinear(w, 1, 1), nn.NewLinear(w, -2, 1)}}, sw.InvalidArgument, "deep.Blocks[1].Weight (blocks.1.weight): Empty: "},
		"bad options":    {&struct{ A *nn.Attention }{nn.NewAttention(w, 7, 2)}, sw.InvalidArgument, "model.A.QProj.Weight (a.q_proj.weight): nn.NewAttention: 7 features, 2 heads"},
		"by value":       {&byValue{}, sw.InvalidArgument, "byValue.A is a Tensor; wanted a pointer"},
		"a module":       {&nested{mustOf(w.NewModule())}, sw.InvalidArgument, "nested.Inner is a module of its own"},
		"an empty name": {&struct {
			A struct{ B *sw.Tensor } `sw:"a..b"`
		}{struct{ B *sw.Tensor }{one()}}, sw.InvalidArgument, "model.A: its tag"},
	} {
		before := sw.LiveHandles()
		m, err := w.ModuleOf(c.model)
		if m != nil || !errors.Is(err, c.code) || !strings.Contains(fmt.Sprint(err), "World.ModuleOf: ") || !strings.Contains(err.Error(), c.words) ||
			strings.Count(err.Error(), "World.ModuleOf") != 1 {
			t.Errorf("%s: %v, wanted %v: %s", what, err, c.code, c.words)
		}
		if now := sw.LiveHandles(); now != before {
			t.Errorf("%s: %d handles are left", what, now-before)
		}
	}
	if requires, err := first.RequiresGrad(); err != nil || requires {
		t.Error("what was not registered requires grad", err)
	}
	if requires, err := circle.Weight.RequiresGrad(); err != nil || requires {
		t.Error("something was registered", err)
	}
	if requires, err := mustOf(w.NewModule()).Parameter("first", first).RequiresGrad(); err != nil || !requires {
		t.Error("what was not registered is frozen", err)
	}
}

// mlp is what a user writes.
type mlp struct {
	*sw.Module
	Norm     *nn.LayerNorm
	Up, Down *nn.Linear
}

func newMLP(w *sw.World) (m *mlp, err error) {
	return m, sw.Seeded(3, func() error {
		m = &mlp{Norm: nn.NewLayerNorm(w, 5), Up: nn.NewLinear(w, 5, 7), Down: nn.NewLinear(w, 7, 3, nn.NoBias)}
		_, err := w.ModuleOf(m)
		return err
	})
}

// trainMLP is losses, and at last the gradients of a step.
func trainMLP(w *sw.World, mesh *sw.Mesh, plan string, batch sw.On) (losses []float64, grads [][]float64, err error) {
	m, err := newMLP(w)
	if err != nil {
		return nil, nil, err
	}
	if mesh != nil {
		p, err := sw.ParsePlan(plan)
		if err != nil {
			return nil, nil, err
		}
		if err := m.Distribute(mesh, p, sw.SameEverywhere); err != nil {
			return nil, nil, err
		}
	}
	parameters, err := m.Parameters()
	if err != nil {
		return nil, nil, err
	}
	optimizer, err := sw.NewAdamW(sw.Tensors(parameters), 0.05)
	if err != nil {
		return nil, nil, err
	}
	scheduler, err := sw.NewScheduler(sw.CosineSchedule(2, 20, 0.1), optimizer)
	if err != nil {
		return nil, nil, err
	}
	for step := 0; step < 20; step++ {
		err := w.Scope(func() error {
			x := sw.FromSlice(w, numbers(30), []int64{6, 5}).To(sw.F32)
			if mesh != nil {
				x = x.Distribute(mesh, batch, sw.SameEverywhere)
			}
			loss := m.Down.Forward(m.Up.Forward(m.Norm.Forward(x.Mul(float32(step)).Cos())).Gelu()).Square().Mean()
			if err := loss.Backward(); err != nil {
				return err
			}
			if err := m.FinishGradSync(); err != nil {
				return err
			}
			if step == 19 {
				for _, p := range parameters {
					grad, err := p.Grad()
					if err != nil {
						return err
					}
					all, err := sw.DataAs[float64](grad.Full())
					if err != nil {
						return err
					}
					grads = append(grads, all)
				}
			}
			if _, err := sw.ClipGradNorm(sw.Tensors(parameters), 0.5); err != nil {
				return err
			}
			if err := optimizer.Step(); err != nil {
				return err
			}
			if err := scheduler.Step(); err != nil {
				return err
			}
			if err := optimizer.ZeroGrad(); err != nil {
				return err
			}
			value, err := loss.Item()
			losses = append(losses, value)
			return err
		})
		if err != nil {
			return nil, nil, err
		}
	}
	return losses, grads, nil
}

// Values and gradients of a struct's module are those of one rank on every mesh, also where sizes do not divide, and
// parts are empty.
func TestAStructTrainsAsOnOneRank(t *testing.T) {
	want, wantGrads, err := trainMLP(alone(t), nil, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if !(want[19] < 0.2*want[1]) { // the first has a rate of 0
		t.Errorf("it learns nothing: %v", want)
	}
	close := func(a, b []float64) bool {
		for i := range a {
			if !(math.Abs(a[i]-b[i]) <= 1e-5*(1+math.Abs(b[i]))) {
				return false
			}
		}
		return len(a) == len(b)
	}
	for _, mesh := range []string{"tp=2", "tp=3", "tp=8", "dp=2,tp=2", "dp=2,tp=1,x=2"} {
		ranks := map[string]int{"tp=2": 2, "tp=3": 3, "tp=8": 8}[mesh]
		batch := sw.On{}
		if ranks == 0 {
			ranks, batch = 4, sw.On{"dp": "S(0)"}
		}
		err := sw.RunRanks(context.Background(), ranks, func(w *sw.World) error {
			m, err := w.ParseMesh(mesh)
			if err != nil {
				return err
			}
			for _, forward := range []string{`{}`, `{"up.input": {"tp": "R"}, "down.output": {"tp": "R"}}`} {
				got, grads, err := trainMLP(w, m, `{"parameter": {"up.*": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}}, "forward": `+forward+`}`, batch)
				if err != nil || !close(got, want) {
					return fmt.Errorf("%s, forward %s: %v, %v, wanted %v", mesh, forward, got, err, want)
				}
				for i := range grads {
					if !close(grads[i], wantGrads[i]) {
						return fmt.Errorf("%s, forward %s: gradient %d is %v, wanted %v", mesh, forward, i, grads[i], wantGrads[i])
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

func TestStructsLeakNothing(t *testing.T) {
	checkLeaks(t, func() {
		w := mustOf(sw.Alone())
		m := mustOf(newMLP(w))
		if err := m.Up.Forward(sw.Ones(w, []int64{2, 5})).Err(); err != nil {
			t.Error(err)
		}
		w.Close()
	})
}
