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
