package shardweave_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

const tinyLlama = `{"vocab_size": 13, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2}`

// patchTwice patches both MLPs, and the second one again.
func patchTwice(m *sw.Module) error {
	err := m.Patch("model.layers.*.mlp", func(call *sw.PatchCall) ([]*sw.Tensor, error) {
		if sizes := mustOf(call.Module.Get("gate_proj.weight").Sizes()); fmt.Sprint(sizes) != "[6 8]" {
			return nil, fmt.Errorf("another module: %v", sizes)
		}
		once, err := call.Forward(call.Inputs[0])
		if err != nil {
			return nil, err
		}
		twice, err := call.Forward(once...)
		if err != nil {
			return nil, err
		}
		return []*sw.Tensor{once[0].Add(twice[0])}, nil
	})
	if err != nil {
		return err
	}
	return m.Patch("model.layers.1.mlp", func(call *sw.PatchCall) ([]*sw.Tensor, error) {
		if call.FQN != "model.layers.1.mlp" {
			return nil, fmt.Errorf("another name: %s", call.FQN)
		}
		y, err := call.Forward(call.Inputs[0])
		if err != nil {
			return nil, err
		}
		return []*sw.Tensor{y[0].Mul(0.5)}, nil
	})
}

// Patched modules compute on every mesh what they do on one rank, before a plan or behind it.
func TestPatchesRunUnderPlans(t *testing.T) {
	const plan = `{"parameter": {"*.{gate,up}_proj.weight": {"tp": "S(0)"}, "*.down_proj.weight": {"tp": "S(1)"}},
		"forward": {"model.layers.?.mlp.output": {"tp": "R"}}}`
	var want [][]float64
	for _, behind := range []bool{false, true} {
		onMeshes(t, []string{"tp=2", "tp=3", "dp=2,tp=2"}, func(w *sw.World, mesh *sw.Mesh, batch sw.On) error {
			m, err := kind(w, "llama", tinyLlama)
			if err != nil {
				return err
			}
			defer m.Close()
			if !behind {
				if err := patchTwice(m); err != nil {
					return err
				}
			}
			if mesh != nil {
				if err := m.Distribute(mesh, mustOf(sw.ParsePlan(plan)), sw.FromRank(0)); err != nil {
					return err
				}
			}
			if behind {
				if err := patchTwice(m); err != nil {
					return err
				}
			}
			ids := placed(sw.FromSlice(w, []int64{0, 5, 10, 2, 7, 12, 4, 9, 1, 6, 11, 3}, []int64{4, 3}), mesh, batch)
			outputs, err := m.Call("forward", ids)
			if err != nil {
				return err
			}
			logits := outputs[0].(*sw.Tensor)
			if err := logits.Mul(logits).Sum().Backward(); err != nil {
				return err
			}
			if err := m.FinishGradSync(); err != nil {
				return err
			}
			out, err := values(logits)
			if err != nil {
				return err
			}
			_, grads, err := gradients(m)
			if err != nil {
				return err
			}
			got := append([][]float64{out}, grads...)
			if want == nil {
				want = got
			}
			for i := range want {
				for j := range want[i] {
					if d := math.Abs(got[i][j] - want[i][j]); d > 1e-4*(1+math.Abs(want[i][j])) {
						return fmt.Errorf("%d, %d: %v, wanted %v", i, j, got[i][j], want[i][j])
					}
				}
			}
			return nil
		})
	}
}

// What is wrong with a patch is said where it is known.
func TestWrongPatches(t *testing.T) {
	w := alone(t)
	m := mustOf(kind(w, "llama", tinyLlama))
	defer m.Close()
	same := func(call *sw.PatchCall) ([]*sw.Tensor, error) { return call.Forward(call.Inputs...) }
	for what, c := range map[string]struct {
		err  error
		want error
		says string
	}{
		"no function": {m.Patch("lm_head", nil), sw.InvalidArgument, "argument 'f' is nil"},
		"no module":   {m.Patch("lm_haed", same), sw.NotFound, "did you mean 'lm_head'"},
		"no pattern":  {m.Patch("{a", same), sw.InvalidArgument, "{a"},
		"a layer":     {m.Patch("model.embed_tokens", same), sw.FailedPrecondition, "called where nobody can be in between"},
		"a NUL":       {m.Patch("a\x00", same), sw.InvalidArgument, "NUL"},
	} {
		if !errors.Is(c.err, c.want) || !strings.Contains(c.err.Error(), c.says) || !strings.Contains(c.err.Error(), "Patch") {
			t.Errorf("%s: %v", what, c.err)
		}
	}
	var kept *sw.PatchCall
	for says, f := range map[string]func(*sw.PatchCall) ([]*sw.Tensor, error){
		"f has returned 2 tensors, wanted 1": func(call *sw.PatchCall) ([]*sw.Tensor, error) {
			return []*sw.Tensor{call.Inputs[0], call.Inputs[0]}, nil
		},
		"with 2 inputs; wanted 1": func(call *sw.PatchCall) ([]*sw.Tensor, error) {
			kept = call
			return call.Forward(call.Inputs[0], call.Inputs[0])
		},
		"not today": func(*sw.PatchCall) ([]*sw.Tensor, error) { panic("not today") },
		"as it is":  func(*sw.PatchCall) ([]*sw.Tensor, error) { return nil, errors.New("as it is") },
	} {
		head := mustOf(kind(w, "llama", tinyLlama))
		if err := head.Patch("lm_head", f); err != nil {
			t.Fatal(err)
		}
		if _, err := head.Call("forward", sw.FromSlice(w, []int64{1, 2}, []int64{1, 2})); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
		head.Close()
	}
	if _, err := kept.Forward(); !errors.Is(err, sw.FailedPrecondition) {
		t.Errorf("a call that has returned: %v", err)
	}
	if _, err := kept.Module.Child(""); err == nil {
		t.Error("its module is open")
	}
	if _, err := new(sw.PatchCall).Forward(); !errors.Is(err, sw.InvalidArgument) {
		t.Errorf("no call: %v", err)
	}
}
