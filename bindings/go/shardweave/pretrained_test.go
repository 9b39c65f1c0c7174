package shardweave_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
	"github.com/shardweave/shardweave/bindings/go/shardweave/nn"
	"github.com/shardweave/shardweave/bindings/go/shardweave/safetensors"
)

// modelReferences is where models lie that transformers has written, and what it has computed of them.
func modelReferences(t *testing.T) string {
	t.Helper()
	folder := os.Getenv("SHARDWEAVE_REFERENCES")
	if folder == "" {
		t.Skip("SHARDWEAVE_REFERENCES does not name the folder modules; Bazel's test does")
	}
	return folder
}

func pretrainedPath(t *testing.T, kind string) string {
	return filepath.Join(modelReferences(t), "hugging_face/references", kind)
}

// asTransformers says whether the logits of forward are those that transformers has computed.
func asTransformers(w *sw.World, t *testing.T, kind string, forward func(inputs *sw.Tensor) *sw.Tensor) error {
	file, err := safetensors.Open(filepath.Join(modelReferences(t), "nn/references", kind+".safetensors"))
	if err != nil {
		return err
	}
	defer file.Close()
	got, err := values(forward(file.Tensor(w, "inputs").Select(0, 0).Contiguous()))
	if err != nil {
		return err
	}
	if wanted, err := values(file.Tensor(w, "logits")); err != nil || !within(got, wanted, 2e-5) {
		return fmt.Errorf("%s: %v, wanted %v (%v)", kind, got, wanted, err)
	}
	return nil
}

// ownLlama is a Llama with biases, whose head is the embedding's table.
type ownLlama struct {
	*sw.Module
	Model struct {
		EmbedTokens *nn.Embedding
		Layers      []*ownBlock
		Norm        *nn.RMSNorm
	}
}

type ownBlock struct {
	InputLayernorm         *nn.RMSNorm
	SelfAttn               *nn.Attention
	PostAttentionLayernorm *nn.RMSNorm
	MLP                    *struct{ GateProj, UpProj, DownProj *nn.Linear }
}

func newOwnLlama(w *sw.World, text string) (*ownLlama, error) {
	var c struct {
		VocabSize        int64   `json:"vocab_size"`
		HiddenSize       int64   `json:"hidden_size"`
		IntermediateSize int64   `json:"intermediate_size"`
		Layers           int64   `json:"num_hidden_layers"`
		Heads            int64   `json:"num_attention_heads"`
		KVHeads          int64   `json:"num_key_value_heads"`
		HeadDim          int64   `json:"head_dim"`
		Positions        int64   `json:"max_position_embeddings"`
		Eps              float64 `json:"rms_norm_eps"`
		Rope             struct {
			Theta float64 `json:"rope_theta"`
			nn.RopeScaling
		} `json:"rope_parameters"`
	}
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return nil, err
	}
	norm := func() *nn.RMSNorm { return nn.NewRMSNorm(w, c.HiddenSize, nn.Eps(c.Eps)) }
	rotary := nn.NewRotaryEmbedding(w, c.HeadDim, c.Positions, c.Rope.Theta, &c.Rope.RopeScaling)
	m := &ownLlama{}
	m.Model.EmbedTokens, m.Model.Norm = nn.NewEmbedding(w, c.VocabSize, c.HiddenSize), norm()
	for i := int64(0); i < c.Layers; i++ {
		b := &ownBlock{InputLayernorm: norm(), PostAttentionLayernorm: norm(),
			SelfAttn: nn.NewAttention(w, c.HiddenSize, c.Heads, nn.KVHeads(c.KVHeads), nn.HeadDim(c.HeadDim), nn.Rotary(rotary), nn.Causal)}
		b.MLP = &struct{ GateProj, UpProj, DownProj *nn.Linear }{nn.NewLinear(w, c.HiddenSize, c.IntermediateSize),
			nn.NewLinear(w, c.HiddenSize, c.IntermediateSize), nn.NewLinear(w, c.IntermediateSize, c.HiddenSize)}
		m.Model.Layers = append(m.Model.Layers, b)
	}
	_, err := w.ModuleOf(m)
	return m, err
}

func (m *ownLlama) forward(tokens *sw.Tensor) *sw.Tensor {
	x := m.Model.EmbedTokens.Forward(tokens)
	for _, b := range m.Model.Layers {
		x = x.Add(b.SelfAttn.Forward(b.InputLayernorm.Forward(x)))
		y := b.PostAttentionLayernorm.Forward(x)
		x = x.Add(b.MLP.DownProj.Forward(b.MLP.GateProj.Forward(y).Silu().Mul(b.MLP.UpProj.Forward(y))))
	}
	return (&nn.Linear{Weight: m.Model.EmbedTokens.Weight}).Forward(m.Model.Norm.Forward(x))
}

// sameFiles says whether two folders have the same tensors; of another type, if there is one.
func sameFiles(t *testing.T, one, other string, dtype sw.DType) {
	t.Helper()
	w := alone(t)
	all := func(folder string) map[string]any {
		found := map[string]any{}
		for _, path := range mustOf(filepath.Glob(filepath.Join(folder, "*.safetensors"))) {
			file := mustOf(safetensors.Open(path))
			for _, e := range file.Entries() {
				if found[e.Name] = e.DType; dtype == 0 {
					found[e.Name] = mustOf(values(file.Tensor(w, e.Name)))
				}
				if dtype != 0 && folder == one && e.DType != dtype {
					t.Errorf("%s is %v", e.Name, e.DType)
				}
			}
			file.Close()
		}
		return found
	}
	a, b := all(one), all(other)
	if len(a) != len(b) || len(a) == 0 || dtype == 0 && !reflect.DeepEqual(a, b) {
		t.Errorf("%s has other tensors than %s", one, other)
	}
}

func TestPretrainedLlamaOfOnesOwn(t *testing.T) {
	path := pretrainedPath(t, "llama")
	config, err := sw.ReadPretrainedConfig(path)
	if err != nil {
		t.Fatal(err)
	}
	plan := `{"parameter": {"*.{q,k,v}_proj.*": {"tp": "S(0)"}, "*.{gate,up}_proj.*": {"tp": "S(0)"}, "*.{o,down}_proj.weight": {"tp": "S(1)"}}}`
	for _, ranks := range []int{1, 2} {
		saved := filepath.Join(t.TempDir(), "saved")
		run(t, ranks, func(w *sw.World) error {
			mesh := mustOf(w.ParseMesh(fmt.Sprintf("tp=%d", ranks)))
			m, err := newOwnLlama(w, config)
			if err != nil {
				return err
			}
			if err := m.Distribute(mesh, mustOf(sw.ParsePlan(plan)), sw.FromRank(0)); err != nil {
				return err
			}
			if asTransformers(w, t, "llama", m.forward) == nil {
				t.Error("the numbers are there before they are read")
			}
			loaded, err := m.LoadPretrained(path, mesh)
			if err != nil {
				return err
			}
			if loaded.Kind != "llama" || len(loaded.Missing)+len(loaded.Unexpected) != 0 || loaded.BytesRead != loaded.BytesKept || loaded.BytesRead == 0 {
				t.Errorf("loaded %+v", loaded)
			}
			if err := asTransformers(w, t, "llama", m.forward); err != nil {
				return err
			}
			return m.SavePretrained(saved, config, mesh)
		})
		sameFiles(t, saved, path, 0)
	}
}

func TestPretrainedModelsOfTheLibrary(t *testing.T) {
	for _, kind := range []string{"llama", "gpt2", "mixtral", "vit"} {
		path := pretrainedPath(t, kind)
		config := mustOf(sw.ReadPretrainedConfig(path))
		for _, ranks := range []int{1, 2} {
			saved, half := filepath.Join(t.TempDir(), "saved"), filepath.Join(t.TempDir(), "half")
			run(t, ranks, func(w *sw.World) error {
				mesh := mustOf(w.ParseMesh(fmt.Sprintf("tp=%d", ranks)))
				m := mustOf(w.ModuleByKind(kind, config))
				if err := m.Distribute(mesh, mustOf(mesh.ZooPlan(kind, config, "")), sw.FromRank(0)); err != nil {
					return err
				}
				if _, err := m.LoadPretrained(path, mesh, nil); err != nil {
					return err
				}
				if err := m.Train(false); err != nil {
					return err
				}
				if err := asTransformers(w, t, kind, func(inputs *sw.Tensor) *sw.Tensor {
					results, err := m.Call("forward", inputs)
					if err != nil {
						return sw.Failed(err)
					}
					return results[0].(*sw.Tensor)
				}); err != nil {
					return err
				}
				if err := m.SavePretrained(half, config, mesh, sw.WithSavedDType(sw.BF16)); err != nil {
					return err
				}
				return m.SavePretrained(saved, config, mesh, sw.WithMaxFileBytes(9000), nil)
			})
			sameFiles(t, saved, path, 0)
			sameFiles(t, half, path, sw.BF16)
		}
	}
}

func TestPretrainedMistakes(t *testing.T) {
	gpt2, llama := pretrainedPath(t, "gpt2"), pretrainedPath(t, "llama")
	config := mustOf(sw.ReadPretrainedConfig(gpt2))
	odd := t.TempDir()
	if err := os.WriteFile(filepath.Join(odd, "config.json"), []byte(strings.Replace(config, "{", `{"quite_new": 1,`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := sw.ReadPretrainedConfig(odd); !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "ReadPretrainedConfig: ") ||
		!strings.Contains(err.Error(), "quite_new") {
		t.Error(err)
	}
	if text, err := sw.ReadPretrainedConfig(odd, sw.AllowUnknownKeys()); err != nil || !strings.Contains(text, "quite_new") {
		t.Error(text, err)
	}
	if _, err := sw.ReadPretrainedConfig(filepath.Join(odd, "none")); !errors.Is(err, sw.NotFound) {
		t.Error(err)
	}
	run(t, 2, func(w *sw.World) error {
		mesh := mustOf(w.ParseMesh("tp=2"))
		m := mustOf(w.ModuleByKind("gpt2", config))
		if err := m.Distribute(mesh, nil, sw.FromRank(0)); err != nil {
			return err
		}
		if _, err := m.LoadPretrained(pretrainedPath(t, "gpt2_bin"), mesh); err != nil { // of torch.save
			return err
		}
		_, err := m.LoadPretrained(llama, mesh)
		if !errors.Is(err, sw.InvalidArgument) || !strings.Contains(err.Error(), "Module.LoadPretrained: ") || !strings.Contains(err.Error(), "missing: ") {
			t.Errorf("another model: %v", err)
		}
		if _, err := m.LoadPretrained(filepath.Join(odd, "none"), mesh); !errors.Is(err, sw.NotFound) {
			t.Errorf("no directory: %v", err)
		}
		loaded, err := m.LoadPretrained(llama, mesh, sw.AllowMissingWeights(), sw.AllowUnexpectedWeights())
		if err != nil || len(loaded.Missing) == 0 || len(loaded.Unexpected) == 0 {
			t.Errorf("%+v, %v", loaded, err)
		}
		if err := m.SavePretrained(odd, config, mesh); !errors.Is(err, sw.AlreadyExists) || !strings.Contains(err.Error(), "Module.SavePretrained: ") {
			t.Errorf("a directory that is there: %v", err)
		}
		if err := m.SavePretrained(filepath.Join(odd, "x"), config, mesh, sw.WithMaxFileBytes(0)); err == nil || !strings.Contains(err.Error(), "WithMaxFileBytes is 0") {
			t.Errorf("files of no bytes: %v", err)
		}
		if err := m.SavePretrained(filepath.Join(odd, "x"), config, mesh, sw.WithSavedDType(sw.I64)); err == nil || !strings.Contains(err.Error(), "WithSavedDType is no") {
			t.Errorf("integers: %v", err)
		}
		if err := m.SavePretrained(filepath.Join(odd, "x"), mustOf(sw.ReadPretrainedConfig(llama)), mesh); err == nil || !strings.Contains(err.Error(), "another model") {
			t.Errorf("another configuration: %v", err)
		}
		return nil
	})
	if _, err := (*sw.Module)(nil).LoadPretrained(gpt2, nil); err == nil {
		t.Error("a nil Module")
	}
}
