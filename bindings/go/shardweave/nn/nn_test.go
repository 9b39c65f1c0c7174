package nn_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
	"github.com/shardweave/shardweave/bindings/go/shardweave/nn"
)

// What is compared with stands in numbers that torch 2.11 has computed, of the same arguments: named beside them.

func alone(t *testing.T) *sw.World {
	t.Helper()
	w, err := sw.Alone()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// elements are all of a tensor, on every rank.
func elements(x *sw.Tensor) []float64 {
	all, err := sw.DataAs[float64](x.Full())
	if err != nil {
		panic(err)
	}
	return all
}

func check(t *testing.T, what string, got *sw.Tensor, want []float64) {
	t.Helper()
	if err := got.Err(); err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	if all := elements(got); !near(all, want) {
		t.Errorf("%s: %v, wanted %v", what, all, want)
	}
}

func near(got, want []float64) bool {
	for i := range got {
		if i >= len(want) || !(math.Abs(got[i]-want[i]) <= 2e-6*(1+math.Abs(want[i]))) {
			return false
		}
	}
	return len(got) == len(want)
}

// tenths is 0.1, 0.2, ...
func tenths(w *sw.World, sizes ...int64) *sw.Tensor {
	n := int64(1)
	for _, size := range sizes {
		n *= size
	}
	all := make([]float32, n)
	for i := range all {
		all[i] = 0.1 * float32(i+1)
	}
	return sw.FromSlice(w, all, sizes)
}

func TestFirstValuesAreThoseOfTorch(t *testing.T) {
	w := alone(t)
	seeded := func(make func()) {
		if err := sw.Seeded(7, func() error { make(); return nil }); err != nil {
			t.Fatal(err)
		}
	}
	seeded(func() { // torch.manual_seed(7); torch.nn.Linear(3, 2)
		l := nn.NewLinear(w, 3, 2)
		check(t, "Linear", l.Weight, []float64{0.0403251, -0.3477921, 0.1838418, 0.1811613, -0.3085804, -0.0865316})
		check(t, "its bias", l.Bias, []float64{-0.3382279, 0.1498066})
	})
	seeded(func() { // torch.nn.Conv2d(2, 1, 2)
		c := nn.NewConv2d(w, 2, 1, 2)
		check(t, "Conv2d", c.Weight, []float64{0.024694, -0.2129783, 0.1125797, 0.1109382, -0.1889661, -0.0529896, -0.2071214, 0.0917375})
		check(t, "its bias", c.Bias, []float64{-0.0952359})
	})
	seeded(func() { // torch.nn.Embedding(2, 2)
		check(t, "Embedding", nn.NewEmbedding(w, 2, 2).Weight, []float64{-0.1467951, 0.7861413, 0.9468216, -1.114344})
	})
	seeded(func() { // torch.nn.MultiheadAttention(4, 2, batch_first=True)
		m := nn.NewMultiheadAttention(w, 4, 2)
		check(t, "in_proj_weight", m.InProjWeight.Index(0), []float64{0.4689274, -0.1063413, 0.3149976, 0.2386385})
		check(t, "out_proj.weight", m.OutProj.Weight.Index(0), []float64{0.0349225, -0.3011968, 0.1592117, 0.1568903})
		check(t, "in_proj_bias", m.InProjBias, make([]float64, 12))
		check(t, "out_proj.bias", m.OutProj.Bias, make([]float64, 4))
		x := tenths(w, 2, 3, 4).Sub(1.1) // torch.arange(24.).reshape(2, 3, 4) / 10 - 1
		check(t, "MultiheadAttention", m.Forward(x), []float64{0.064278, 0.059148, 0.061798, -0.014171, 0.066709, 0.060295, 0.060271, -0.012141,
			0.069158, 0.061453, 0.058726, -0.010088, -0.238491, -0.008338, -0.023384, 0.021882, -0.236052, -0.007186, -0.02492, 0.023923,
			-0.233638, -0.006049, -0.026429, 0.025931})
	})
	for what, c := range map[string]struct { // torch.nn.init
		init nn.Init
		want []float64
	}{
		"xavier_normal_(t, 2)":                     {nn.XavierNormal(2), []float64{-0.185683, 0.994399, 1.197645, -1.409546, 2.138699, -1.131878}},
		"xavier_uniform_(t, 2)":                    {nn.XavierUniform(2), []float64{0.153023, -1.319778, 0.697631, 0.687459, -1.17098, -0.328364}},
		"kaiming_uniform_(t, nonlinearity='relu')": {nn.KaimingUniform(math.Sqrt2), []float64{0.098776, -0.851913, 0.450319, 0.443753, -0.755864, -0.211958}},
		"kaiming_normal_(t, nonlinearity='relu')":  {nn.KaimingNormal(math.Sqrt2), []float64{-0.119858, 0.641882, 0.773077, -0.909858, 1.380524, -0.730624}},
		"zeros_":    {nn.Zeros, make([]float64, 6)},
		"constant_": {nn.Constant(2), []float64{2, 2, 2, 2, 2, 2}},
	} {
		x := sw.Ones(w, []int64{2, 3}, sw.RequiresGrad)
		seeded(func() {
			if err := c.init(x); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		})
		check(t, what, x, c.want)
		if leaf, err := x.IsLeaf(); err != nil || !leaf {
			t.Errorf("%s is recorded: %v", what, err)
		}
	}
	seeded(func() { // trunc_normal_(t, 0.5, 2, -1, 1)
		x := sw.Ones(w, []int64{4})
		if err := nn.TruncNormal(0.5, 2, -1, 1)(x); err != nil {
			t.Error(err)
		}
		check(t, "trunc_normal_", x, []float64{0.125135, -0.545364, 0.359042, 0.354701})
	})
	for what, err := range map[string]error{
		"a vector":       nn.XavierUniform(1)(sw.Ones(w, []int64{3})),
		"no deviation":   nn.TruncNormal(0, 0, -1, 1)(sw.Ones(w, []int64{3})),
		"nothing inside": nn.TruncNormal(0, 1, 1, -1)(sw.Ones(w, []int64{3})),
		"nil":            nn.Ones(nil),
		"an order":       nn.Uniform(1, 0)(sw.Ones(w, []int64{3})),
	} {
		if err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	half := nn.NewLinear(w, 2, 2, nn.DType(sw.BF16), nn.WeightInit(nn.Ones), nn.BiasInit(nn.Constant(3)))
	if d, err := half.Weight.DType(); err != nil || d != sw.BF16 {
		t.Error(d, err)
	}
	check(t, "of bf16", half.Forward(sw.Ones(w, []int64{1, 2}, sw.BF16)), []float64{5, 5})
}

func rotary(w *sw.World, scaling *nn.RopeScaling) *nn.RotaryEmbedding {
	return nn.NewRotaryEmbedding(w, 8, 5, 100, scaling)
}

// grouped is grouped-query attention with weights that are sines.
func grouped(w *sw.World, r *nn.RotaryEmbedding) *nn.Attention {
	a := nn.NewAttention(w, 8, 4, nn.KVHeads(2), nn.NoBias, nn.Causal, nn.Rotary(r))
	for i, l := range []*nn.Linear{a.QProj, a.KProj, a.VProj, a.OProj} {
		sizes, err := l.Weight.Sizes()
		if err == nil {
			err = l.Weight.Assign(tenths(w, sizes...).Mul(i + 1).Sin())
		}
		if err != nil {
			panic(err)
		}
	}
	return a
}

func TestValuesAreThoseOfTorch(t *testing.T) {
	w := alone(t)
	conv := nn.NewConv2d(w, 2, 4, 3, nn.Stride(2), nn.Padding(1), nn.Groups(2))
	for _, err := range []error{conv.Weight.Assign(tenths(w, 4, 1, 3, 3).Cos()), conv.Bias.Assign(tenths(w, 4))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	check(t, "Conv2d", conv.Forward(tenths(w, 1, 2, 4, 4).Sin()), []float64{1.036587, 2.19034, 3.775105, 6.374934, 0.040962, 0.068443, 0.466686, 1.115328,
		-2.549445, -3.471493, -1.578856, -1.543764, -3.085013, -4.501306, -2.695642, -3.150062})
	check(t, "LayerNorm", nn.NewLayerNorm(w, 4).Forward(tenths(w, 2, 4).Sin()),
		[]float64{-1.351958, -0.436908, 0.459765, 1.3291, -1.373568, -0.414013, 0.482015, 1.305564})
	check(t, "LayerNorm without bias", nn.NewLayerNorm(w, 4, nn.NoBias, nn.Eps(1e-5)).Forward(tenths(w, 1, 4).Sin()),
		[]float64{-1.351958, -0.436908, 0.459765, 1.3291})
	check(t, "RMSNorm", nn.NewRMSNorm(w, 4).Forward(tenths(w, 2, 4).Sin()),
		[]float64{0.371787, 0.739859, 1.100538, 1.450222, 0.788626, 0.928803, 1.0597, 1.180008})
	// As in transformers: modeling_llama, and modeling_rope_utils with factor 8, 1, 4 and 32.
	x := tenths(w, 1, 1, 3, 8).Sin()
	check(t, "RotaryEmbedding", rotary(w, nil).Forward(x), []float64{0.099833, 0.198669, 0.29552, 0.389418, 0.479426, 0.564642, 0.644218, 0.717356,
		-0.387573, 0.493288, 0.787172, 0.899969, 1.17976, 1.19827, 1.081484, 1.028543, -1.197592, 0.30756, 0.779288, 0.864788, 0.542496, 1.227783, 0.918842, 0.731583})
	if d, err := rotary(w, nil).Forward(x.To(sw.BF16)).DType(); err != nil || d != sw.BF16 {
		t.Error("what a rotary embedding gives of bf16:", d, err)
	}
	llama3 := &nn.RopeScaling{Type: "llama3", Factor: 8, LowFreqFactor: 1, HighFreqFactor: 4, OriginalMaxPositionEmbeddings: 32}
	check(t, "of Llama 3", rotary(w, llama3).Forward(x), []float64{0.099833, 0.198669, 0.29552, 0.389418, 0.479426, 0.564642, 0.644218, 0.717356,
		-0.387573, 0.743308, 0.878669, 0.928081, 1.17976, 1.06145, 1.008557, 1.00325, -1.197592, 0.801987, 0.927364, 0.903929, 0.542496, 0.979215, 0.769127, 0.682631})
	check(t, "grouped queries", grouped(w, nil).Forward(tenths(w, 1, 3, 8).Sin()), []float64{1.364336, -1.290136, 1.211538, -1.128805, 1.042223, -0.952087,
		0.858703, -0.762389, 3.477264, -3.366385, 3.244027, -3.1106, 2.966569, -2.812417, 2.648677, -2.475899, 3.430395, -3.32709, 3.212441, -3.086831,
		2.950696, -2.804497, 2.648736, -2.483937})
	// Across sequences neither positions nor an order count: the memory's tokens may come in any.
	memory := tenths(w, 1, 3, 8).Cos()
	shuffled := memory.Index(sw.All, sw.FromSlice(w, []int64{2, 0, 1}, []int64{3}))
	crossed := grouped(w, rotary(w, nil))
	check(t, "cross attention", crossed.Cross(tenths(w, 1, 5, 8), memory), elements(crossed.Cross(tenths(w, 1, 5, 8), shuffled)))
	linear := &nn.RopeScaling{Type: "linear", Factor: 2}
	third := rotary(w, linear).Forward(x).Index(0, 0, 2) // whose positions are halves: it is turned as the second one is else
	second := rotary(w, nil).Forward(x.Index(sw.All, sw.All, sw.FromSlice(w, []int64{0, 2}, []int64{2}))).Index(0, 0, 1)
	check(t, "a linear scaling", third, elements(second))
}

// vision is a model of all layers with weights.
type vision struct {
	*sw.Module
	Patches *nn.Conv2d
	Kinds   *nn.Embedding
	Blocks  []*visionBlock
	Norm    *nn.RMSNorm
	Head    nn.Sequential
}

type visionBlock struct {
	Norm  *nn.LayerNorm
	Attn  *nn.Attention
	Drop  *nn.Dropout
	Fused *nn.MultiheadAttention
}

func newVision(w *sw.World) (m *vision, err error) {
	return m, sw.Seeded(11, func() error {
		m = &vision{Patches: nn.NewConv2d(w, 3, 12, 2, nn.Stride(2)), Kinds: nn.NewEmbedding(w, 5, 12), Norm: nn.NewRMSNorm(w, 12),
			Head: nn.Sequential{nn.NewLinear(w, 12, 7), nn.GELU, nn.NewDropout(0), nn.NewLinear(w, 7, 4)}}
		r := nn.NewRotaryEmbedding(w, 2, 9, 10000, nil)
		for i := 0; i < 2; i++ {
			m.Blocks = append(m.Blocks, &visionBlock{nn.NewLayerNorm(w, 12), nn.NewAttention(w, 12, 6, nn.KVHeads(3), nn.Rotary(r)), nn.NewDropout(0), nn.NewMultiheadAttention(w, 12, 3, nn.Causal)})
		}
		_, err := w.ModuleOf(m)
		return err
	})
}

func (m *vision) forward(images, kinds *sw.Tensor) *sw.Tensor {
	x := m.Patches.Forward(images).Flatten(2, 3).Transpose(1, 2).Add(m.Kinds.Forward(kinds))
	for _, b := range m.Blocks {
		x = x.Add(b.Drop.Forward(b.Attn.Forward(b.Norm.Forward(x))))
		x = x.Add(b.Fused.Forward(x))
	}
	return m.Head.Forward(m.Norm.Forward(x).Mean(1))
}

// results are the scores and all gradients.
func results(w *sw.World, mesh *sw.Mesh, plan string, batch sw.On) ([][]float64, error) {
	m, err := newVision(w)
	if err != nil {
		return nil, err
	}
	images, kinds := tenths(w, 3, 3, 4, 4).Sin(), sw.FromSlice(w, []int64{4, 1, 0}, []int64{3, 1})
	if mesh != nil {
		p, err := sw.ParsePlan(plan)
		if err != nil {
			return nil, err
		}
		if err := m.Distribute(mesh, p, sw.SameEverywhere); err != nil {
			return nil, err
		}
		images, kinds = images.Distribute(mesh, batch, sw.SameEverywhere), kinds.Distribute(mesh, batch, sw.SameEverywhere)
	}
	scores := m.forward(images, kinds)
	if err := scores.Square().Mean().Backward(); err != nil {
		return nil, err
	}
	if err := m.FinishGradSync(); err != nil {
		return nil, err
	}
	all := [][]float64{elements(scores)}
	parameters, err := m.Parameters()
	if err != nil {
		return nil, err
	}
	for _, p := range parameters {
		grad, err := p.Grad()
		if err != nil || grad == nil {
			return nil, fmt.Errorf("%s has no gradient: %v", p.Name, err)
		}
		all = append(all, elements(grad))
	}
	return all, nil
}

// The scores and the gradients of all layers are those of one rank, on meshes of one, two and three dimensions, where heads
// do not divide, and where ranks have nothing.
func TestLayersOnMeshes(t *testing.T) {
	want, err := results(alone(t), nil, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	const plan = `{"parameter": {"blocks.*.attn.{q,k,v}_proj.*": {"tp": "S(0)"}, "blocks.*.attn.o_proj.weight": {"tp": "S(1)"},
		"blocks.*.fused.in_proj_*": {"tp": "S(0)"}, "blocks.*.fused.out_proj.weight": {"tp": "S(1)"}, "head.0.*": {"tp": "S(0)"}, "head.3.weight": {"tp": "S(1)"}, "kinds.weight": {"tp": "S(0)"}}}`
	for mesh, ranks := range map[string]int{"tp=3": 3, "tp=2": 2, "tp=5": 5, "dp=2,tp=3": 6, "dp=4,tp=1": 4, "dp=2,tp=2,x=2": 8} {
		err := sw.RunRanks(context.Background(), ranks, func(w *sw.World) error {
			m, err := w.ParseMesh(mesh)
			if err != nil {
				return err
			}
			batch := sw.On{}
			if strings.HasPrefix(mesh, "dp") {
				batch["dp"] = "S(0)"
			}
			got, err := results(w, m, plan, batch)
			if err != nil {
				return err
			}
			for i := range want {
				for j := range want[i] {
					if !(math.Abs(got[i][j]-want[i][j]) <= 1e-5*(1+math.Abs(want[i][j]))) {
						return fmt.Errorf("result %d: %v, wanted %v", i, got[i], want[i])
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v", mesh, err)
		}
	}
}

// Layers that are made on a mesh have the same weights for all numbers of ranks.
func TestLayersMadeOnAMesh(t *testing.T) {
	drawn := func(ranks int) (all []float64) {
		err := sw.RunRanks(context.Background(), ranks, func(w *sw.World) error {
			m, err := w.Mesh(sw.Dim("x", ranks))
			if err != nil {
				return err
			}
			if err := m.Seed(9); err != nil {
				return err
			}
			l := nn.NewLinear(m, 4, 3)
			if err := l.Bias.Err(); err != nil {
				return err
			}
			if values := append(elements(l.Weight), elements(l.Bias)...); w.Rank() == ranks-1 {
				all = values
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		return all
	}
	one, three := drawn(1), drawn(3)
	if len(one) != 15 || !reflect.DeepEqual(one, three) {
		t.Errorf("%v and %v", one, three)
	}
}

func TestDropoutOfAttention(t *testing.T) {
	w := alone(t)
	for _, layer := range []interface {
		nn.Layer
		sw.TrainingMode
	}{
		nn.NewAttention(w, 8, 2, nn.AttentionDropout(0.5)), nn.NewMultiheadAttention(w, 8, 2, nn.AttentionDropout(0.5)), nn.NewDropout(0.5),
	} {
		x := tenths(w, 2, 5, 8).Sin()
		same := func() bool { return reflect.DeepEqual(elements(layer.Forward(x)), elements(layer.Forward(x))) }
		if same() {
			t.Errorf("%T drops nothing", layer)
		}
		layer.SetTraining(false)
		if !same() {
			t.Errorf("%T drops while it is not trained", layer)
		}
		layer.SetTraining(true)
		if same() {
			t.Errorf("%T drops nothing any more", layer)
		}
	}
	// Of two results, what is kept is larger, so that the mean stays.
	x := sw.Ones(w, []int64{10000})
	if mean, err := nn.NewDropout(0.25).Forward(x).Mean().Item(); err != nil || math.Abs(mean-1) > 0.05 {
		t.Error(mean, err)
	}
}

// What cannot be made or used carries an error, and is no panic.
func TestLayersThatFail(t *testing.T) {
	w, other := alone(t), alone(t)
	closed := sw.Ones(w, []int64{2, 4, 8})
	closed.Close()
	layers := map[string]nn.Layer{"Linear": nn.NewLinear(w, 8, 8), "Embedding": nn.NewEmbedding(w, 8, 8), "LayerNorm": nn.NewLayerNorm(w, 8), "RMSNorm": nn.NewRMSNorm(w, 8),
		"Conv2d": nn.NewConv2d(w, 8, 8, 1), "Dropout": nn.NewDropout(0.5), "Attention": nn.NewAttention(w, 8, 2), "MultiheadAttention": nn.NewMultiheadAttention(w, 8, 2),
		"RotaryEmbedding": nn.NewRotaryEmbedding(w, 8, 4, 100, nil), "Sequential": nn.Sequential{nn.NewLinear(w, 8, 8), nn.ReLU}, "Func": nn.GELU}
	nils := map[string]nn.Layer{"Linear": (*nn.Linear)(nil), "Embedding": (*nn.Embedding)(nil), "LayerNorm": (*nn.LayerNorm)(nil), "RMSNorm": (*nn.RMSNorm)(nil),
		"Conv2d": (*nn.Conv2d)(nil), "Dropout": (*nn.Dropout)(nil), "Attention": (*nn.Attention)(nil), "MultiheadAttention": (*nn.MultiheadAttention)(nil),
		"RotaryEmbedding": (*nn.RotaryEmbedding)(nil), "Sequential": nn.Sequential{nil}, "Func": nn.Func(nil)}
	empty := map[string]nn.Layer{"Linear": &nn.Linear{}, "Embedding": &nn.Embedding{}, "LayerNorm": &nn.LayerNorm{}, "RMSNorm": &nn.RMSNorm{}, "Conv2d": &nn.Conv2d{},
		"Attention": &nn.Attention{}, "MultiheadAttention": &nn.MultiheadAttention{}, "RotaryEmbedding": &nn.RotaryEmbedding{}}
	x := sw.Ones(w, []int64{2, 4, 8})
	for name, layer := range layers {
		for what, bad := range map[string]*sw.Tensor{"closed": closed, "nil": nil, "not made": new(sw.Tensor), "failed": sw.Failed(sw.DataLoss)} {
			if err := layer.Forward(bad).Err(); err == nil {
				t.Errorf("%s of what is %s: no error", name, what)
			}
		}
		if _, weightless := map[string]bool{"Dropout": true, "Func": true}[name]; !weightless {
			foreign := sw.Ones(other, []int64{2, 8, 4, 8})
			if name == "Embedding" {
				foreign = sw.Ones(other, []int64{2}, sw.I64)
			}
			if err := layer.Forward(foreign).Err(); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "several ranks") {
				if name != "LayerNorm" && name != "RMSNorm" && name != "MultiheadAttention" || err == nil {
					t.Errorf("%s of another rank's: %v", name, err)
				}
			}
		}
		if err := nils[name].Forward(x).Err(); err == nil || !strings.Contains(err.Error(), "nn."+name+".Forward: ") || !strings.Contains(err.Error(), "nil") {
			t.Errorf("a %s that is nil: %v", name, err)
		}
		if empty[name] != nil && empty[name].Forward(x).Err() == nil {
			t.Errorf("a %s without tensors: no error", name)
		}
	}
	for what, c := range map[string]struct {
		t     *sw.Tensor
		words string
	}{
		"a size":            {nn.NewLinear(w, 2, -1).Weight, "Empty: "},
		"a closed world":    {nn.NewLinear(func() *sw.World { w, _ := sw.Alone(); w.Close(); return w }(), 2, 2).Weight, "closed"},
		"a nil world":       {nn.NewLinear(nil, 2, 2).Weight, "nil"},
		"groups":            {nn.NewConv2d(w, 3, 4, 1, nn.Groups(2)).Weight, "2 groups do not divide 3 and 4 channels"},
		"no groups":         {nn.NewConv2d(w, 3, 4, 1, nn.Groups(0)).Weight, "0 groups"},
		"heads":             {nn.NewAttention(w, 8, 3).QProj.Weight, "8 features, 3 heads"},
		"heads of keys":     {nn.NewAttention(w, 8, 4, nn.KVHeads(3)).QProj.Weight, "3 heads of keys"},
		"no heads":          {nn.NewAttention(w, 8, 0).QProj.Weight, "0 heads"},
		"of torch":          {nn.NewMultiheadAttention(w, 8, 4, nn.KVHeads(2)).InProjWeight, "KVHeads"},
		"a drawn one":       {nn.NewLinear(w, 2, 2, nn.WeightInit(nn.Uniform(1, 0))).Weight, "uniform_"},
		"odd features":      {nn.NewRotaryEmbedding(w, 7, 4, 100, nil).Cos, "7 features a head"},
		"too large":         {nn.NewRotaryEmbedding(w, 1<<30, 1<<30, 100, nil).Cos, "features a head"},
		"a scaling":         {nn.NewRotaryEmbedding(w, 8, 4, 100, &nn.RopeScaling{Type: "yarn"}).Cos, "there is no scaling 'yarn'"},
		"a factor":          {nn.NewRotaryEmbedding(w, 8, 4, 100, &nn.RopeScaling{Type: "linear"}).Cos, "factor is 0"},
		"llama3's":          {nn.NewRotaryEmbedding(w, 8, 4, 100, &nn.RopeScaling{Type: "llama3", Factor: 2}).Cos, "low_freq_factor"},
		"a length":          {layers["RotaryEmbedding"].Forward(sw.Ones(w, []int64{1, 1, 5, 8})), "length 5"},
		"three dimensions":  {layers["RotaryEmbedding"].Forward(x), "[batch, heads, length, features]"},
		"a probability":     {nn.NewDropout(1.5).Forward(x), "P is 1.5"},
		"no probability":    {nn.NewDropout(math.NaN()).Forward(x), "P is NaN"},
		"heads of no count": {(&nn.MultiheadAttention{OutProj: nn.NewLinear(w, 8, 8)}).Forward(x), "heads"},
	} {
		if err := c.t.Err(); err == nil || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: %v, wanted %s", what, err, c.words)
		}
	}
	var none *nn.Attention
	none.SetTraining(true)
	(*nn.Dropout)(nil).SetTraining(true)
	(*nn.MultiheadAttention)(nil).SetTraining(true)
}

func Example() {
	type mlp struct {
		*sw.Module
		Up, Down *nn.Linear
	}
	w, err := sw.Alone()
	if err != nil {
		panic(err)
	}
	defer w.Close()
	m := &mlp{Up: nn.NewLinear(w, 4, 16), Down: nn.NewLinear(w, 16, 2, nn.NoBias)}
	if _, err := w.ModuleOf(m); err != nil {
		panic(err)
	}
	y := m.Down.Forward(m.Up.Forward(sw.Ones(w, []int64{3, 4})).Gelu())
	fmt.Println(y.Sizes())
	parameters, err := m.Parameters()
	if err != nil {
		panic(err)
	}
	for _, p := range parameters {
		fmt.Println(p.Name)
	}
	// Output:
	// [3 2] <nil>
	// up.weight
	// up.bias
	// down.weight
}
