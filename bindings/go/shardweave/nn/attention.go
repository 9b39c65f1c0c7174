package nn

import (
	"fmt"
	"math"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// Causal lets no position see those behind it.
var Causal attentionOption = func(o *options) { o.causal = true }

// KVHeads says how many heads keys and values have, else as many as queries: grouped-query attention.
func KVHeads(heads int64) attentionOption { return func(o *options) { o.kvHeads = heads } }

// HeadDim says how many features a head has, else those of the model over the heads.
func HeadDim(features int64) attentionOption { return func(o *options) { o.headDim = features } }

// AttentionDropout says with which probability weights of attention are 0 while it is trained, else 0.
func AttentionDropout(p float64) attentionOption { return func(o *options) { o.dropout = p } }

// Rotary turns queries and keys by their positions. Layers may share one.
func Rotary(r *RotaryEmbedding) attentionOption { return func(o *options) { o.rotary = r } }

// SplitHeads makes [batch, heads, length, features of a head] of [batch, length, features].
func SplitHeads(x *sw.Tensor, headDim int64) *sw.Tensor {
	return x.Unflatten(-1, []int64{-1, headDim}).Transpose(1, 2)
}

// MergeHeads is the reverse of SplitHeads.
func MergeHeads(x *sw.Tensor) *sw.Tensor { return x.Transpose(1, 2).Flatten(2, 3) }

// Attention is multi-head or grouped-query attention, with the names of transformers' models: q_proj, k_proj, v_proj,
// o_proj.
type Attention struct {
	QProj, KProj, VProj, OProj *Linear
	Rotary                     *RotaryEmbedding // layers may share one; nil: none
	HeadDim                    int64
	Causal                     bool
	Dropout                    float64
	eval                       bool
}

// NewAttention is for so many features, of which each of the heads has its share.
func NewAttention(where sw.Place, features, heads int64, opts ...AttentionOption) *Attention {
	var o options
	for _, option := range opts {
		if option != nil {
			option.attention(&o)
		}
	}
	if o.kvHeads == 0 {
		o.kvHeads = heads
	}
	if heads < 1 || o.kvHeads < 1 || heads%o.kvHeads != 0 || o.headDim == 0 && features%heads != 0 || o.headDim < 0 {
		err := fmt.Errorf("nn.NewAttention: %d features, %d heads, %d heads of keys and values, %d features a head; "+
			"wanted heads that divide the features, and heads of keys and values that divide the heads", features, heads, o.kvHeads, o.headDim)
		return &Attention{QProj: &Linear{Weight: sw.Failed(err)}}
	}
	if o.headDim == 0 {
		o.headDim = features / heads
	}
	linear := func(in, out int64) *Linear {
		options := []LinearOption{anyOption(func(to *options) { to.dtype, to.weight, to.bias, to.noBias = o.dtype, o.weight, o.bias, o.noBias })}
		return NewLinear(where, in, out, options...)
	}
	return &Attention{
		QProj: linear(features, heads*o.headDim), KProj: linear(features, o.kvHeads*o.headDim),
		VProj: linear(features, o.kvHeads*o.headDim), OProj: linear(heads*o.headDim, features),
		Rotary: o.rotary, HeadDim: o.headDim, Causal: o.causal, Dropout: o.dropout,
	}
}

// SetTraining is [shardweave.TrainingMode].
func (a *Attention) SetTraining(training bool) {
	if a != nil {
		a.eval = !training
	}
}

// Forward is for [batch, length, features].
func (a *Attention) Forward(x *sw.Tensor) *sw.Tensor {
	if a == nil {
		return failedLayer("Attention")
	}
	return a.attend(x, x, a.Rotary, a.Causal)
}

// Cross has the queries of one tensor and the keys and values of another, of which each token sees all: positions are
// those of different sequences, so that Rotary and Causal say nothing here.
func (a *Attention) Cross(x, memory *sw.Tensor) *sw.Tensor {
	if a == nil {
		return failedLayer("Attention")
	}
	return a.attend(x, memory, nil, false)
}

func (a *Attention) attend(x, memory *sw.Tensor, rotary *RotaryEmbedding, causal bool) *sw.Tensor {
	q := SplitHeads(a.QProj.Forward(x), a.HeadDim)
	k := SplitHeads(a.KProj.Forward(memory), a.HeadDim)
	v := SplitHeads(a.VProj.Forward(memory), a.HeadDim)
	if rotary != nil {
		q, k = rotary.Forward(q), rotary.Forward(k)
	}
	return a.OProj.Forward(MergeHeads(attend(q, k, v, causal, a.Dropout, a.eval)))
}

// attend is attention of heads, of which keys and values may have fewer.
func attend(q, k, v *sw.Tensor, causal bool, dropout float64, eval bool) *sw.Tensor {
	if eval {
		dropout = 0
	}
	return q.Apply("aten::scaled_dot_product_attention", k, v, nil, dropout, causal, sw.Named("enable_gqa", true))
}

// MultiheadAttention is attention with the names of torch.nn.MultiheadAttention: queries, keys and values have one
// weight. [batch, length, features], as with batch_first.
type MultiheadAttention struct {
	InProjWeight *sw.Tensor // [3 features, features]
	InProjBias   *sw.Tensor // [3 features]; nil: none
	OutProj      *Linear
	Heads        int64
	Causal       bool
	Dropout      float64
	eval         bool
}

// NewMultiheadAttention draws as torch.nn does: Xavier's uniform for in_proj_weight, 0 for the biases.
func NewMultiheadAttention(where sw.Place, features, heads int64, opts ...AttentionOption) *MultiheadAttention {
	var o options
	for _, option := range opts {
		if option != nil {
			option.attention(&o)
		}
	}
	m := &MultiheadAttention{Heads: heads, Causal: o.causal, Dropout: o.dropout}
	if heads < 1 || features%heads != 0 || o.kvHeads != 0 && o.kvHeads != heads || o.headDim != 0 && o.headDim != features/heads || o.rotary != nil {
		m.InProjWeight = sw.Failed(fmt.Errorf("nn.NewMultiheadAttention: %d features, %d heads; wanted heads that divide the features, "+
			"and none of KVHeads, HeadDim and Rotary, which NewAttention has", features, heads))
		return m
	}
	bound := 1 / math.Sqrt(float64(features))
	// In the order in which torch.nn draws.
	m.OutProj = &Linear{Weight: made(where, &o, or(o.weight, Uniform(-bound, bound)), features, features)}
	if !o.noBias {
		m.OutProj.Bias = made(where, &o, func(t *sw.Tensor) error {
			if err := Uniform(-bound, bound)(t); err != nil { // which torch.nn draws, too
				return err
			}
			return or(o.bias, Zeros)(t)
		}, features)
		m.InProjBias = made(where, &o, or(o.bias, Zeros), 3*features)
	}
	m.InProjWeight = made(where, &o, or(o.weight, XavierUniform(1)), 3*features, features)
	return m
}

// SetTraining is [shardweave.TrainingMode].
func (m *MultiheadAttention) SetTraining(training bool) {
	if m != nil {
		m.eval = !training
	}
}

// Forward is self-attention of [batch, length, features].
func (m *MultiheadAttention) Forward(x *sw.Tensor) *sw.Tensor {
	if m == nil {
		return failedLayer("MultiheadAttention")
	}
	features, err := m.OutProj.features()
	if err == nil && (m.Heads < 1 || features%m.Heads != 0) {
		err = fmt.Errorf("nn.MultiheadAttention.Forward: %d heads do not divide %d features", m.Heads, features)
	}
	if err != nil {
		return sw.Failed(err)
	}
	parts, err := x.Linear(m.InProjWeight, m.InProjBias).Split([]int64{features, features, features}, -1)
	if err != nil {
		return sw.Failed(err)
	}
	for i, part := range parts {
		parts[i] = SplitHeads(part, features/m.Heads)
	}
	return m.OutProj.Forward(MergeHeads(attend(parts[0], parts[1], parts[2], m.Causal, m.Dropout, m.eval)))
}

func (l *Linear) features() (int64, error) {
	if l == nil {
		return 0, fmt.Errorf("nn: a Linear is nil")
	}
	return l.Weight.Size(0)
}

// RopeScaling stretches rotary embeddings for texts that are longer than those of the training: rope_scaling of
// transformers' configurations.
type RopeScaling struct {
	Type                          string  `json:"rope_type"` // "default", "linear" or "llama3"
	Factor                        float64 `json:"factor"`
	LowFreqFactor                 float64 `json:"low_freq_factor"`  // of llama3, as all that follow
	HighFreqFactor                float64 `json:"high_freq_factor"` //
	OriginalMaxPositionEmbeddings float64 `json:"original_max_position_embeddings"`
}

// RotaryEmbedding turns pairs of features by an angle that grows with the position, as transformers does: the first half
// of a head's features with the second. Its tensors are buffers that checkpoints do not have.
type RotaryEmbedding struct {
	Cos *sw.Tensor `sw:"cos,transient"` // [length, features of a head]
	Sin *sw.Tensor `sw:"sin,transient"`
}

// NewRotaryEmbedding is for texts up to a length. scaling may be nil.
func NewRotaryEmbedding(where *sw.World, headDim, length int64, theta float64, scaling *RopeScaling) *RotaryEmbedding {
	half := headDim / 2
	failed := func(format string, args ...any) *RotaryEmbedding {
		return &RotaryEmbedding{Cos: sw.Failed(fmt.Errorf("nn.NewRotaryEmbedding: "+format, args...))}
	}
	if half < 1 || headDim%2 != 0 || length < 1 || !(theta > 0) || headDim > 1<<20 || length > 1<<32/headDim {
		return failed("%d features a head, length %d, theta %v; wanted an even number, and numbers above 0", headDim, length, theta)
	}
	frequencies := make([]float32, half)
	for i := range frequencies {
		frequencies[i] = float32(1 / math.Pow(theta, float64(2*i)/float64(headDim)))
	}
	if scaling != nil {
		if err := scaling.scale(frequencies); err != nil {
			return failed("%v", err)
		}
	}
	cos, sin := make([]float32, 0, length*headDim), make([]float32, 0, length*headDim)
	for position := int64(0); position < length; position++ {
		for i := int64(0); i < headDim; i++ {
			s, c := math.Sincos(float64(float32(position) * frequencies[i%half]))
			cos, sin = append(cos, float32(c)), append(sin, float32(s))
		}
	}
	return &RotaryEmbedding{sw.FromSlice(where, cos, []int64{length, headDim}), sw.FromSlice(where, sin, []int64{length, headDim})}
}

// scale changes the frequencies as transformers' modeling_rope_utils does.
func (s *RopeScaling) scale(frequencies []float32) error {
	switch s.Type {
	case "", "default":
		return nil
	case "linear", "llama3":
		if !(s.Factor > 0) {
			return fmt.Errorf("the scaling's factor is %v; wanted one above 0", s.Factor)
		}
	default:
		return fmt.Errorf("there is no scaling '%s' here; there are default, linear and llama3", s.Type)
	}
	if s.Type == "llama3" && !(s.LowFreqFactor > 0 && s.HighFreqFactor > s.LowFreqFactor && s.OriginalMaxPositionEmbeddings > 0) {
		return fmt.Errorf("the scaling's low_freq_factor is %v, high_freq_factor %v, original_max_position_embeddings %v; wanted numbers above 0, the first below the second",
			s.LowFreqFactor, s.HighFreqFactor, s.OriginalMaxPositionEmbeddings)
	}
	for i, frequency := range frequencies {
		f := float64(frequency)
		scaled := f / s.Factor
		if s.Type == "llama3" {
			turns := s.OriginalMaxPositionEmbeddings * f / (2 * math.Pi) // over the length of the training
			switch {
			case turns > s.HighFreqFactor:
				scaled = f
			case turns >= s.LowFreqFactor:
				smooth := (turns - s.LowFreqFactor) / (s.HighFreqFactor - s.LowFreqFactor)
				scaled = (1-smooth)*f/s.Factor + smooth*f
			}
		}
		frequencies[i] = float32(scaled)
	}
	return nil
}

// Forward turns [batch, heads, length, features of a head], whose positions begin at 0.
func (r *RotaryEmbedding) Forward(x *sw.Tensor) *sw.Tensor {
	if r == nil {
		return failedLayer("RotaryEmbedding")
	}
	sizes, err := x.Sizes()
	if err != nil {
		return sw.Failed(err)
	}
	if len(sizes) != 4 {
		return sw.Failed(fmt.Errorf("nn.RotaryEmbedding.Forward: the sizes are %v; wanted [batch, heads, length, features]", sizes))
	}
	most, err := r.Cos.Sizes()
	if err != nil {
		return sw.Failed(err)
	}
	length, features := sizes[2], sizes[3]
	if length > most[0] || features != most[1] {
		return sw.Failed(fmt.Errorf("nn.RotaryEmbedding.Forward: length %d, %d features a head; this one is for length %d, %d features", length, features, most[0], most[1]))
	}
	halves, err := x.Split([]int64{features / 2, features / 2}, -1)
	if err != nil {
		return sw.Failed(err)
	}
	dtype, err := x.DType()
	if err != nil {
		return sw.Failed(err)
	}
	table := func(t *sw.Tensor) *sw.Tensor { return t.Narrow(0, 0, length).To(dtype) }
	turned := sw.Cat([]*sw.Tensor{halves[1].Neg(), halves[0]}, -1)
	return x.Mul(table(r.Cos)).Add(turned.Mul(table(r.Sin)))
}
