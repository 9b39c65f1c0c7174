package main

import (
	"fmt"
	"math"
	"sync"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

const vocabulary = 256 // bytes

// gpt is a byte-level GPT, written for one device: nothing in it knows of ranks or meshes.
type gpt struct {
	*sw.Module
	tokens, positions *sw.Tensor
	blocks            []*block
	norm              norm
	head              linear
	// 0 .. seq-1. A buffer, so that it lies on the mesh with the parameters: plain tensors and sharded
	// ones do not mix.
	index *sw.Tensor
}

type block struct {
	headDim              int64
	norm1, norm2         norm
	q, k, v, o, up, down linear
}

type linear struct{ weight, bias *sw.Tensor }

// forward is x.Linear(l.weight, l.bias), by the operators that torch::nn::Linear calls in the C++ example:
// so the losses are the same but for the optimizer's rounding (torch::optim's there, a fused kernel here).
func (l linear) forward(x *sw.Tensor) *sw.Tensor {
	y := x.MatMul(l.weight.T())
	if l.bias != nil {
		y = y.Apply("aten::add_.Tensor", l.bias)
	}
	return y
}

type norm struct {
	weight, bias *sw.Tensor
	dim          int64
}

func (n norm) forward(x *sw.Tensor) *sw.Tensor {
	return x.LayerNorm([]int64{n.dim}, n.weight, n.bias, 1e-5)
}

// seeding guards the generator of the process: ranks that are goroutines would draw from each other's
// numbers.
var seeding sync.Mutex

// newGPT makes the model with the weights that the seed says: the same on every rank.
func newGPT(w *sw.World, s *settings) (*gpt, error) {
	module, err := w.NewModule()
	if err != nil {
		return nil, err
	}
	seeding.Lock()
	defer seeding.Unlock()
	if err := sw.Seed(s.seed); err != nil {
		return nil, err
	}
	m := &gpt{Module: module}
	err = w.With(sw.NoGrad, func() error {
		normal := func(fqn string, std float64, sizes ...int64) *sw.Tensor {
			t := sw.Empty(w, sizes)
			t.Apply("aten::normal_", 0.0, std)
			return m.Parameter(fqn, t)
		}
		newLinear := func(fqn string, in, out int64) linear {
			return linear{
				normal(fqn+".weight", 0.5/math.Sqrt(float64(in)), out, in),
				m.Parameter(fqn+".bias", sw.Zeros(w, []int64{out})),
			}
		}
		newNorm := func(fqn string) norm {
			return norm{
				m.Parameter(fqn+".weight", sw.Ones(w, []int64{s.dim})),
				m.Parameter(fqn+".bias", sw.Zeros(w, []int64{s.dim})),
				s.dim,
			}
		}
		m.tokens = normal("tokens.weight", 0.3, vocabulary, s.dim)
		m.positions = normal("positions.weight", 0.3, s.seq, s.dim)
		for i := int64(0); i < s.layers; i++ {
			b := fmt.Sprintf("blocks.%d.", i)
			m.blocks = append(m.blocks, &block{
				headDim: s.dim / s.heads,
				norm1:   newNorm(b + "norm1"),
				q:       newLinear(b+"q", s.dim, s.dim),
				k:       newLinear(b+"k", s.dim, s.dim),
				v:       newLinear(b+"v", s.dim, s.dim),
				o:       newLinear(b+"o", s.dim, s.dim),
				norm2:   newNorm(b + "norm2"),
				up:      newLinear(b+"up", s.dim, 4*s.dim),
				down:    newLinear(b+"down", 4*s.dim, s.dim),
			})
		}
		m.norm = newNorm("norm")
		m.head = linear{weight: normal("head.weight", 0.5/math.Sqrt(float64(s.dim)), vocabulary, s.dim)}
		index := make([]int64, s.seq)
		for i := range index {
			index[i] = int64(i)
		}
		m.index = m.Buffer("index", sw.FromSlice(w, index, []int64{s.seq}))
		return m.Err()
	})
	return m, err
}

// forward gives scores of the next byte, [batch, seq, vocabulary], for tokens [batch, seq].
func (m *gpt) forward(tokens *sw.Tensor, batch, seq int64) *sw.Tensor {
	x := m.tokens.Embedding(tokens).Add(m.positions.Embedding(m.index.Narrow(0, 0, seq)))
	for _, b := range m.blocks {
		x = b.forward(x, batch, seq)
	}
	return m.head.forward(m.norm.forward(x))
}

// loss is the mean cross entropy, in nats per byte.
func (m *gpt) loss(tokens, targets *sw.Tensor, batch, seq int64) *sw.Tensor {
	return m.forward(tokens, batch, seq).View(-1, vocabulary).CrossEntropy(targets.View(-1))
}

func (b *block) forward(x *sw.Tensor, batch, seq int64) *sw.Tensor {
	y := x.Add(b.attention(b.norm1.forward(x), batch, seq))
	return y.Add(b.down.forward(b.up.forward(b.norm2.forward(y)).Gelu()))
}

func (b *block) attention(x *sw.Tensor, batch, seq int64) *sw.Tensor {
	heads := func(l linear) *sw.Tensor {
		return l.forward(x).View(batch, seq, -1, b.headDim).Transpose(1, 2)
	}
	// In this order, in which GCC evaluates arguments: it is that in which the gradients are added.
	v, k, q := heads(b.v), heads(b.k), heads(b.q)
	y := q.Attention(k, v, true)
	return b.o.forward(y.Transpose(1, 2).Reshape(batch, seq, -1))
}
