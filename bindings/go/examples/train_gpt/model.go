package main

import (
	"math"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
	"github.com/shardweave/shardweave/bindings/go/shardweave/nn"
)

const vocabulary = 256 // bytes

// gpt is a byte-level GPT, written for one device: nothing in it knows of ranks or meshes.
type gpt struct {
	*sw.Module
	Tokens, Positions *nn.Embedding
	Blocks            []*block
	Norm              *nn.LayerNorm
	Head              *nn.Linear
	// 0 .. seq-1. A buffer, so that it lies on the mesh with the parameters: plain tensors and sharded
	// ones do not mix.
	Index *sw.Tensor `sw:",buffer"`
}

type block struct {
	Norm1      *nn.LayerNorm
	Q, K, V, O *nn.Linear
	Norm2      *nn.LayerNorm
	Up, Down   *nn.Linear
	headDim    int64
}

// newGPT makes the model with the weights that the seed says: the same on every rank.
func newGPT(w *sw.World, s *settings) (m *gpt, err error) {
	embedding := func(count int64) *nn.Embedding {
		return nn.NewEmbedding(w, count, s.dim, nn.WeightInit(nn.Normal(0, 0.3)))
	}
	linear := func(in, out int64, options ...nn.LinearOption) *nn.Linear {
		weight := nn.WeightInit(nn.Normal(0, 0.5/math.Sqrt(float64(in))))
		return nn.NewLinear(w, in, out, append(options, weight, nn.BiasInit(nn.Zeros))...)
	}
	return m, sw.Seeded(s.seed, func() error {
		m = &gpt{Tokens: embedding(vocabulary), Positions: embedding(s.seq)}
		for i := int64(0); i < s.layers; i++ {
			b := &block{headDim: s.dim / s.heads, Norm1: nn.NewLayerNorm(w, s.dim), Norm2: nn.NewLayerNorm(w, s.dim)}
			b.Q, b.K, b.V, b.O = linear(s.dim, s.dim), linear(s.dim, s.dim), linear(s.dim, s.dim), linear(s.dim, s.dim)
			b.Up, b.Down = linear(s.dim, 4*s.dim), linear(4*s.dim, s.dim)
			m.Blocks = append(m.Blocks, b)
		}
		m.Norm = nn.NewLayerNorm(w, s.dim)
		m.Head = linear(s.dim, vocabulary, nn.NoBias)
		index := make([]int64, s.seq)
		for i := range index {
			index[i] = int64(i)
		}
		m.Index = sw.FromSlice(w, index, []int64{s.seq})
		_, err := w.ModuleOf(m)
		return err
	})
}

// forward gives scores of the next byte, [batch, seq, vocabulary], for tokens [batch, seq].
func (m *gpt) forward(tokens *sw.Tensor) *sw.Tensor {
	x := m.Tokens.Forward(tokens).Add(m.Positions.Forward(m.Index))
	for _, b := range m.Blocks {
		x = b.forward(x)
	}
	return m.Head.Forward(m.Norm.Forward(x))
}

// loss is the mean cross entropy, in nats per byte.
func (m *gpt) loss(tokens, targets *sw.Tensor) *sw.Tensor {
	return m.forward(tokens).View(-1, vocabulary).CrossEntropy(targets.View(-1))
}

func (b *block) forward(x *sw.Tensor) *sw.Tensor {
	x = x.Add(b.attention(b.Norm1.Forward(x)))
	return x.Add(b.Down.Forward(b.Up.Forward(b.Norm2.Forward(x)).Gelu()))
}

func (b *block) attention(x *sw.Tensor) *sw.Tensor {
	heads := func(l *nn.Linear) *sw.Tensor { return nn.SplitHeads(l.Forward(x), b.headDim) }
	// In this order, in which GCC evaluates arguments: it is that in which the gradients are added.
	v, k, q := heads(b.V), heads(b.K), heads(b.Q)
	return b.O.Forward(nn.MergeHeads(q.Attention(k, v, true)))
}
