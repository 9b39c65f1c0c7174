package nn

import (
	"fmt"
	"math"

	sw "github.com/shardweave/shardweave/bindings/go/shardweave"
)

// Layer makes one tensor of another. If that fails, the result carries the error.
type Layer interface {
	// Forward is for tensors whose last dimensions the layer says.
	Forward(x *sw.Tensor) *sw.Tensor
}

// options are those of all layers; which ones a layer has, the interfaces below say.
type options struct {
	noBias                    bool
	dtype                     sw.DType
	weight, bias              Init
	eps                       float64
	stride, padding, dilation []int64
	groups                    int64
	kvHeads, headDim          int64
	dropout                   float64
	causal                    bool
	rotary                    *RotaryEmbedding
}

// LinearOption is an option of NewLinear: NoBias, WeightInit, BiasInit or DType.
type LinearOption interface{ linear(*options) }

// EmbeddingOption is an option of NewEmbedding: WeightInit or DType.
type EmbeddingOption interface{ embedding(*options) }

// NormOption is an option of NewLayerNorm and NewRMSNorm: Eps, DType; of the former NoBias, too.
type NormOption interface{ norm(*options) }

// ConvOption is an option of NewConv2d: Stride, Padding, Dilation, Groups, NoBias, WeightInit, BiasInit or DType.
type ConvOption interface{ conv(*options) }

// AttentionOption is an option of NewAttention and NewMultiheadAttention: Causal, AttentionDropout, NoBias, WeightInit,
// BiasInit or DType; of the former KVHeads, HeadDim and Rotary, too.
type AttentionOption interface{ attention(*options) }

// anyOption is an option of all layers with weights that are drawn.
type anyOption func(*options)

func (f anyOption) linear(o *options)    { f(o) }
func (f anyOption) embedding(o *options) { f(o) }
func (f anyOption) norm(o *options)      { f(o) }
func (f anyOption) conv(o *options)      { f(o) }
func (f anyOption) attention(o *options) { f(o) }

type convOption func(*options)

func (f convOption) conv(o *options) { f(o) }

type attentionOption func(*options)

func (f attentionOption) attention(o *options) { f(o) }

type normOption func(*options)

func (f normOption) norm(o *options) { f(o) }

// biasOption is an option of layers with weight and bias that are drawn.
type biasOption func(*options)

func (f biasOption) linear(o *options)    { f(o) }
func (f biasOption) conv(o *options)      { f(o) }
func (f biasOption) attention(o *options) { f(o) }

// weightOption is an option of layers with a weight that is drawn.
type weightOption func(*options)

func (f weightOption) linear(o *options)    { f(o) }
func (f weightOption) embedding(o *options) { f(o) }
func (f weightOption) conv(o *options)      { f(o) }
func (f weightOption) attention(o *options) { f(o) }

type noBias struct{}

func (noBias) linear(o *options)    { o.noBias = true }
func (noBias) norm(o *options)      { o.noBias = true }
func (noBias) conv(o *options)      { o.noBias = true }
func (noBias) attention(o *options) { o.noBias = true }

// NoBias leaves the bias out.
var NoBias = noBias{}

// WeightInit says how the weight is drawn, in place of torch.nn's way.
func WeightInit(init Init) weightOption { return func(o *options) { o.weight = init } }

// BiasInit says how the bias is drawn, in place of torch.nn's way.
func BiasInit(init Init) biasOption { return func(o *options) { o.bias = init } }

// DType says the type of the elements, else sw.F32.
func DType(d sw.DType) anyOption { return func(o *options) { o.dtype = d } }

// Eps says what is added to the mean square before its root, else 1e-5 of LayerNorm, 1e-6 of RMSNorm.
func Eps(eps float64) normOption { return func(o *options) { o.eps = eps } }

// Stride says how far apart the windows are, else 1: one number for both dimensions, or one for each. As Padding and
// Dilation.
func Stride(stride ...int64) convOption { return func(o *options) { o.stride = stride } }

// Padding says how many zeros are put around the image, else none.
func Padding(padding ...int64) convOption { return func(o *options) { o.padding = padding } }

// Dilation says how far apart the elements of a window are, else 1.
func Dilation(dilation ...int64) convOption { return func(o *options) { o.dilation = dilation } }

// Groups says into how many groups that do not mix the channels are divided, else 1.
func Groups(groups int64) convOption { return func(o *options) { o.groups = groups } }

func failedLayer(name string) *sw.Tensor {
	return sw.Failed(fmt.Errorf("nn.%s.Forward: the layer is nil", name))
}

// made draws a tensor's first values; if it cannot be made, it carries the error.
func made(where sw.Place, o *options, init Init, sizes ...int64) *sw.Tensor {
	dtype := o.dtype
	if dtype == 0 {
		dtype = sw.F32
	}
	t := sw.Empty(where, sizes, dtype)
	if t.Err() != nil {
		return t
	}
	if err := init(t); err != nil {
		t.Close()
		return sw.Failed(err)
	}
	return t
}

func or(init, otherwise Init) Init {
	if init == nil {
		return otherwise
	}
	return init
}

// Linear is x weight' + bias: torch.nn.Linear.
type Linear struct {
	Weight *sw.Tensor // [out, in]
	Bias   *sw.Tensor // [out]; nil: none
}

// NewLinear draws weight and bias from [-b, b), b = 1 / sqrt(in).
func NewLinear(where sw.Place, in, out int64, opts ...LinearOption) *Linear {
	var o options
	for _, option := range opts {
		if option != nil {
			option.linear(&o)
		}
	}
	bound := 1 / math.Sqrt(math.Max(1, float64(in)))
	l := &Linear{Weight: made(where, &o, or(o.weight, Uniform(-bound, bound)), out, in)}
	if !o.noBias {
		l.Bias = made(where, &o, or(o.bias, Uniform(-bound, bound)), out)
	}
	return l
}

// Forward is for [..., in].
func (l *Linear) Forward(x *sw.Tensor) *sw.Tensor {
	if l == nil {
		return failedLayer("Linear")
	}
	return x.Linear(l.Weight, l.Bias)
}

// Embedding is a table of vectors by number: torch.nn.Embedding.
type Embedding struct {
	Weight *sw.Tensor // [count, features]
}

// NewEmbedding draws from the normal distribution with mean 0 and std 1.
func NewEmbedding(where sw.Place, count, features int64, opts ...EmbeddingOption) *Embedding {
	var o options
	for _, option := range opts {
		if option != nil {
			option.embedding(&o)
		}
	}
	return &Embedding{made(where, &o, or(o.weight, Normal(0, 1)), count, features)}
}

// Forward has a vector for each of these integers.
func (e *Embedding) Forward(indices *sw.Tensor) *sw.Tensor {
	if e == nil {
		return failedLayer("Embedding")
	}
	return e.Weight.Embedding(indices)
}

func normOptions(eps float64, opts []NormOption) options {
	o := options{eps: eps}
	for _, option := range opts {
		if option != nil {
			option.norm(&o)
		}
	}
	return o
}

// LayerNorm normalizes the last dimension: torch.nn.LayerNorm of one dimension.
type LayerNorm struct {
	Weight, Bias *sw.Tensor // [features]; Bias may be nil
	Eps          float64
}

// NewLayerNorm has weights of 1 and biases of 0.
func NewLayerNorm(where sw.Place, features int64, opts ...NormOption) *LayerNorm {
	o := normOptions(1e-5, opts)
	l := &LayerNorm{Weight: made(where, &o, Ones, features), Eps: o.eps}
	if !o.noBias {
		l.Bias = made(where, &o, Zeros, features)
	}
	return l
}

// Forward is for [..., features].
func (l *LayerNorm) Forward(x *sw.Tensor) *sw.Tensor {
	if l == nil {
		return failedLayer("LayerNorm")
	}
	sizes, err := l.Weight.Sizes()
	if err != nil {
		return sw.Failed(err)
	}
	return x.LayerNorm(sizes, l.Weight, l.Bias, l.Eps)
}

// RMSNorm divides by the root of the mean square of the last dimension: torch.nn.RMSNorm, and that of transformers'
// Llama.
type RMSNorm struct {
	Weight *sw.Tensor // [features]
	Eps    float64
}

// NewRMSNorm has weights of 1. There is no bias, whatever the options.
func NewRMSNorm(where sw.Place, features int64, opts ...NormOption) *RMSNorm {
	o := normOptions(1e-6, opts)
	return &RMSNorm{made(where, &o, Ones, features), o.eps}
}

// Forward is for [..., features].
func (n *RMSNorm) Forward(x *sw.Tensor) *sw.Tensor {
	if n == nil {
		return failedLayer("RMSNorm")
	}
	sizes, err := n.Weight.Sizes()
	if err != nil {
		return sw.Failed(err)
	}
	return x.RMSNorm(sizes, n.Weight, n.Eps)
}

// Conv2d is a convolution of images: torch.nn.Conv2d.
type Conv2d struct {
	Weight                    *sw.Tensor // [out, in / groups, height, width]
	Bias                      *sw.Tensor // [out]; nil: none
	Stride, Padding, Dilation []int64
	Groups                    int64
}

// NewConv2d has windows of kernel times kernel. It draws weight and bias from [-b, b), b = 1 / sqrt(in / groups kernel²).
func NewConv2d(where sw.Place, in, out, kernel int64, opts ...ConvOption) *Conv2d {
	o := options{stride: []int64{1}, padding: []int64{0}, dilation: []int64{1}, groups: 1}
	for _, option := range opts {
		if option != nil {
			option.conv(&o)
		}
	}
	c := &Conv2d{Stride: o.stride, Padding: o.padding, Dilation: o.dilation, Groups: o.groups}
	if o.groups < 1 || in%o.groups != 0 || out%o.groups != 0 {
		c.Weight = sw.Failed(fmt.Errorf("nn.NewConv2d: %d groups do not divide %d and %d channels", o.groups, in, out))
		return c
	}
	bound := 1 / math.Sqrt(math.Max(1, float64(in/o.groups*kernel*kernel)))
	c.Weight = made(where, &o, or(o.weight, Uniform(-bound, bound)), out, in/o.groups, kernel, kernel)
	if !o.noBias {
		c.Bias = made(where, &o, or(o.bias, Uniform(-bound, bound)), out)
	}
	return c
}

// Forward is for [batch, in, height, width].
func (c *Conv2d) Forward(x *sw.Tensor) *sw.Tensor {
	if c == nil {
		return failedLayer("Conv2d")
	}
	return x.Conv2d(c.Weight, c.Bias, c.Stride, c.Padding, c.Dilation, c.Groups)
}

// Dropout makes elements 0 with probability P and multiplies the others by 1 / (1 - P), while it is trained:
// torch.nn.Dropout. Module.Train switches that.
type Dropout struct {
	P    float64
	eval bool
}

// NewDropout is in training.
func NewDropout(p float64) *Dropout { return &Dropout{P: p} }

// SetTraining is [shardweave.TrainingMode].
func (d *Dropout) SetTraining(training bool) {
	if d != nil {
		d.eval = !training
	}
}

// Forward is for any tensor.
func (d *Dropout) Forward(x *sw.Tensor) *sw.Tensor {
	switch {
	case d == nil:
		return failedLayer("Dropout")
	case !(d.P >= 0 && d.P <= 1):
		return sw.Failed(fmt.Errorf("nn.Dropout.Forward: P is %v; wanted a probability", d.P))
	case d.eval || d.P == 0:
		return x
	}
	return x.Dropout(d.P, true)
}

// Func is a layer of a function: nn.Func((*sw.Tensor).Gelu).
type Func func(x *sw.Tensor) *sw.Tensor

// Forward calls it.
func (f Func) Forward(x *sw.Tensor) *sw.Tensor {
	if f == nil {
		return failedLayer("Func")
	}
	return f(x)
}

// Layers without weights, for Sequential; elsewhere tensors have methods.
var (
	ReLU    Layer = Func((*sw.Tensor).Relu)
	GELU    Layer = Func((*sw.Tensor).Gelu)
	SiLU    Layer = Func((*sw.Tensor).Silu)
	Tanh    Layer = Func((*sw.Tensor).Tanh)
	Sigmoid Layer = Func((*sw.Tensor).Sigmoid)
)

// Sequential is layers one behind the other, of which each has its index as its name: torch.nn.Sequential.
type Sequential []Layer

// Forward calls each with the result of the one before.
func (s Sequential) Forward(x *sw.Tensor) *sw.Tensor {
	for i, layer := range s {
		if layer == nil {
			return sw.Failed(fmt.Errorf("nn.Sequential.Forward: layer %d is nil", i))
		}
		x = layer.Forward(x)
	}
	return x
}
