package main

import (
	"encoding/json"
	"fmt"
	"os"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
	"github.com/shardweave/shardweave/bindings/go/shardweave/nn"
)

// llama is LlamaForCausalLM of transformers, written for one device; its fields have the names of the files' tensors.
type llama struct {
	*sw.Module
	Model struct {
		EmbedTokens *nn.Embedding
		Layers      []*layer
		Norm        *nn.RMSNorm
	}
	LMHead *nn.Linear
	config config
}

type layer struct {
	InputLayernorm         *nn.RMSNorm
	SelfAttn               *nn.Attention
	PostAttentionLayernorm *nn.RMSNorm
	MLP                    *mlp
}

type mlp struct{ GateProj, UpProj, DownProj *nn.Linear }

func newLlama(w *sw.World, c config, length int64) (*llama, error) {
	weight := nn.WeightInit(nn.Normal(0, 0.02))
	linear := func(in, out int64, bias bool) *nn.Linear {
		if bias {
			return nn.NewLinear(w, in, out, weight, nn.BiasInit(nn.Zeros))
		}
		return nn.NewLinear(w, in, out, weight, nn.NoBias)
	}
	norm := func() *nn.RMSNorm { return nn.NewRMSNorm(w, c.HiddenSize, nn.Eps(c.RMSNormEps)) }
	rotary := nn.NewRotaryEmbedding(w, c.HeadDim, length, c.RopeTheta, c.RopeScaling)
	attention := []nn.AttentionOption{nn.KVHeads(c.KVHeads), nn.HeadDim(c.HeadDim), nn.Rotary(rotary), nn.Causal, weight, nn.BiasInit(nn.Zeros)}
	if !c.AttentionBias {
		attention = append(attention, nn.NoBias)
	}
	m := &llama{config: c}
	m.Model.EmbedTokens = nn.NewEmbedding(w, c.VocabSize, c.HiddenSize, weight)
	for i := int64(0); i < c.Layers; i++ {
		m.Model.Layers = append(m.Model.Layers, &layer{
			InputLayernorm:         norm(),
			SelfAttn:               nn.NewAttention(w, c.HiddenSize, c.Heads, attention...),
			PostAttentionLayernorm: norm(),
			MLP: &mlp{
				GateProj: linear(c.HiddenSize, c.IntermediateSize, c.MLPBias),
				UpProj:   linear(c.HiddenSize, c.IntermediateSize, c.MLPBias),
				DownProj: linear(c.IntermediateSize, c.HiddenSize, c.MLPBias),
			},
		})
	}
	m.Model.Norm = norm()
	m.LMHead = &nn.Linear{Weight: m.Model.EmbedTokens.Weight}
	if !c.TieWordEmbeddings {
		m.LMHead = linear(c.HiddenSize, c.VocabSize, false)
	}
	_, err := w.ModuleOf(m)
	return m, err
}

// loss is the mean cross entropy of the tokens that follow.
func (m *llama) loss(tokens, targets *sw.Tensor) *sw.Tensor {
	x := m.Model.EmbedTokens.Forward(tokens)
	for _, l := range m.Model.Layers {
		x = x.Add(l.SelfAttn.Forward(l.InputLayernorm.Forward(x)))
		x = x.Add(l.MLP.forward(l.PostAttentionLayernorm.Forward(x)))
	}
	return m.LMHead.Forward(m.Model.Norm.Forward(x)).View(-1, m.config.VocabSize).CrossEntropy(targets.View(-1))
}

func (m *mlp) forward(x *sw.Tensor) *sw.Tensor {
	return m.DownProj.Forward(m.GateProj.Forward(x).Silu().Mul(m.UpProj.Forward(x)))
}

// config is what config.json of transformers says of a Llama.
type config struct {
	ModelType         string          `json:"model_type"`
	HiddenAct         string          `json:"hidden_act"`
	VocabSize         int64           `json:"vocab_size"`
	HiddenSize        int64           `json:"hidden_size"`
	IntermediateSize  int64           `json:"intermediate_size"`
	Layers            int64           `json:"num_hidden_layers"`
	Heads             int64           `json:"num_attention_heads"`
	KVHeads           int64           `json:"num_key_value_heads"`
	HeadDim           int64           `json:"head_dim"`
	MaxPositions      int64           `json:"max_position_embeddings"`
	RMSNormEps        float64         `json:"rms_norm_eps"`
	RopeTheta         float64         `json:"rope_theta"`
	RopeScaling       *nn.RopeScaling `json:"rope_scaling"`
	AttentionBias     bool            `json:"attention_bias"`
	MLPBias           bool            `json:"mlp_bias"`
	TieWordEmbeddings bool            `json:"tie_word_embeddings"`
	// Since transformers 5, in place of rope_theta and rope_scaling.
	RopeParameters *struct {
		Theta float64 `json:"rope_theta"`
		nn.RopeScaling
	} `json:"rope_parameters"`
}

// small is a model with random weights.
var small = config{VocabSize: 256, HiddenSize: 64, IntermediateSize: 160, Layers: 2, Heads: 4, KVHeads: 2, HeadDim: 16, MaxPositions: 2048,
	RMSNormEps: 1e-6, RopeTheta: 10000}

// readConfig has transformers' defaults for what is not there.
func readConfig(path string) (config, error) {
	c := config{HiddenAct: "silu", MaxPositions: 2048, RMSNormEps: 1e-6, RopeTheta: 10000}
	text, err := os.ReadFile(path)
	if err != nil {
		return c, err
	}
	if err := json.Unmarshal(text, &c); err != nil {
		return c, fmt.Errorf("%s: %w", path, err)
	}
	if c.RopeParameters != nil {
		c.RopeTheta, c.RopeScaling = c.RopeParameters.Theta, &c.RopeParameters.RopeScaling
	}
	if c.KVHeads == 0 {
		c.KVHeads = c.Heads
	}
	switch {
	case c.ModelType != "llama":
		return c, fmt.Errorf("%s: model_type is '%s'; wanted llama", path, c.ModelType)
	case c.HiddenAct != "silu":
		return c, fmt.Errorf("%s: hidden_act is '%s'; wanted silu", path, c.HiddenAct)
	case c.VocabSize < 1 || c.HiddenSize < 1 || c.IntermediateSize < 1 || c.Layers < 1 || c.Heads < 1:
		return c, fmt.Errorf("%s: wanted vocab_size, hidden_size, intermediate_size, num_hidden_layers and num_attention_heads of 1 or more", path)
	}
	if c.HeadDim == 0 {
		c.HeadDim = c.HiddenSize / c.Heads
	}
	return c, nil
}
