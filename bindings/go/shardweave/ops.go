package shardweave

import "sync"

// builtin is an operator that a method calls.
type builtin struct {
	name string
	once sync.Once
	op   *Op
	err  error
}

func (b *builtin) find() (*Op, error) {
	b.once.Do(func() { b.op, b.err = FindOp(b.name) })
	return b.op, b.err
}

func (t *Tensor) call(b *builtin, args ...any) *Tensor {
	r, err := t.home()
	if err != nil {
		return r.failed(err)
	}
	op, err := b.find()
	if err != nil {
		return r.failed(err)
	}
	return r.one(op, args)
}

var (
	opAdd, opAddScalar = builtin{name: "aten::add.Tensor"}, builtin{name: "aten::add.Scalar"}
	opSub, opSubScalar = builtin{name: "aten::sub.Tensor"}, builtin{name: "aten::sub.Scalar"}
	opMul, opMulScalar = builtin{name: "aten::mul.Tensor"}, builtin{name: "aten::mul.Scalar"}
	opDiv, opDivScalar = builtin{name: "aten::div.Tensor"}, builtin{name: "aten::div.Scalar"}
	opLt, opLtScalar   = builtin{name: "aten::lt.Tensor"}, builtin{name: "aten::lt.Scalar"}
	opGt, opGtScalar   = builtin{name: "aten::gt.Tensor"}, builtin{name: "aten::gt.Scalar"}
	opEq, opEqScalar   = builtin{name: "aten::eq.Tensor"}, builtin{name: "aten::eq.Scalar"}

	opPow        = builtin{name: "aten::pow.Tensor_Scalar"}
	opNeg        = builtin{name: "aten::neg"}
	opAbs        = builtin{name: "aten::abs"}
	opExp        = builtin{name: "aten::exp"}
	opLog        = builtin{name: "aten::log"}
	opSqrt       = builtin{name: "aten::sqrt"}
	opTanh       = builtin{name: "aten::tanh"}
	opSigmoid    = builtin{name: "aten::sigmoid"}
	opRelu       = builtin{name: "aten::relu"}
	opGelu       = builtin{name: "aten::gelu"}
	opSilu       = builtin{name: "aten::silu"}
	opSoftmax    = builtin{name: "aten::softmax.int"}
	opLogSoftmax = builtin{name: "aten::log_softmax.int"}

	opSum     = builtin{name: "aten::sum"}
	opSumDims = builtin{name: "aten::sum.dim_IntList"}
	opMean    = builtin{name: "aten::mean"}
	opMeanDim = builtin{name: "aten::mean.dim"}
	opAMax    = builtin{name: "aten::amax"}
	opArgMax  = builtin{name: "aten::argmax"}
	opCumSum  = builtin{name: "aten::cumsum"}

	opMatMul    = builtin{name: "aten::matmul"}
	opLinear    = builtin{name: "aten::linear"}
	opEmbedding = builtin{name: "aten::embedding"}
	opLayerNorm = builtin{name: "aten::layer_norm"}
	opCross     = builtin{name: "aten::cross_entropy_loss"}
	opAttention = builtin{name: "aten::scaled_dot_product_attention"}

	opT          = builtin{name: "aten::t"}
	opTranspose  = builtin{name: "aten::transpose.int"}
	opPermute    = builtin{name: "aten::permute"}
	opView       = builtin{name: "aten::view"}
	opReshape    = builtin{name: "aten::reshape"}
	opUnsqueeze  = builtin{name: "aten::unsqueeze"}
	opSqueeze    = builtin{name: "aten::squeeze.dim"}
	opSelect     = builtin{name: "aten::select.int"}
	opNarrow     = builtin{name: "aten::narrow"}
	opCat        = builtin{name: "aten::cat"}
	opStack      = builtin{name: "aten::stack"}
	opClone      = builtin{name: "aten::clone"}
	opContiguous = builtin{name: "aten::contiguous"}
	opTo         = builtin{name: "aten::to.dtype"}
)

// binary takes a tensor or a number on the right.
func (t *Tensor) binary(tensor, scalar *builtin, other any) *Tensor {
	if u, is := other.(*Tensor); is {
		return t.call(tensor, t, u)
	}
	return t.call(scalar, t, other)
}

// Add is t + other; other is a *Tensor or a number, here and below.
func (t *Tensor) Add(other any) *Tensor { return t.binary(&opAdd, &opAddScalar, other) }

// Sub is t - other.
func (t *Tensor) Sub(other any) *Tensor { return t.binary(&opSub, &opSubScalar, other) }

// Mul is t * other, element by element.
func (t *Tensor) Mul(other any) *Tensor { return t.binary(&opMul, &opMulScalar, other) }

// Div is t / other.
func (t *Tensor) Div(other any) *Tensor { return t.binary(&opDiv, &opDivScalar, other) }

// Lt says of each element whether it is less.
func (t *Tensor) Lt(other any) *Tensor { return t.binary(&opLt, &opLtScalar, other) }

// Gt says of each element whether it is greater.
func (t *Tensor) Gt(other any) *Tensor { return t.binary(&opGt, &opGtScalar, other) }

// Eq says of each element whether it is equal.
func (t *Tensor) Eq(other any) *Tensor { return t.binary(&opEq, &opEqScalar, other) }

// Pow raises each element to a power.
func (t *Tensor) Pow(exponent float64) *Tensor { return t.call(&opPow, t, exponent) }

// Neg is -t.
func (t *Tensor) Neg() *Tensor { return t.call(&opNeg, t) }

// Abs is |t|.
func (t *Tensor) Abs() *Tensor { return t.call(&opAbs, t) }

// Exp is e to the power of each element.
func (t *Tensor) Exp() *Tensor { return t.call(&opExp, t) }

// Log is the natural logarithm of each element.
func (t *Tensor) Log() *Tensor { return t.call(&opLog, t) }

// Sqrt is the square root of each element.
func (t *Tensor) Sqrt() *Tensor { return t.call(&opSqrt, t) }

// Tanh is the hyperbolic tangent of each element.
func (t *Tensor) Tanh() *Tensor { return t.call(&opTanh, t) }

// Sigmoid is 1 / (1 + exp(-t)).
func (t *Tensor) Sigmoid() *Tensor { return t.call(&opSigmoid, t) }

// Relu is max(t, 0).
func (t *Tensor) Relu() *Tensor { return t.call(&opRelu, t) }

// Gelu is the Gaussian error linear unit, exact.
func (t *Tensor) Gelu() *Tensor { return t.call(&opGelu, t) }

// Silu is t * sigmoid(t).
func (t *Tensor) Silu() *Tensor { return t.call(&opSilu, t) }

// Softmax makes the elements along a dimension positive, with the sum 1.
func (t *Tensor) Softmax(dim int) *Tensor { return t.call(&opSoftmax, t, dim) }

// LogSoftmax is the logarithm of Softmax.
func (t *Tensor) LogSoftmax(dim int) *Tensor { return t.call(&opLogSoftmax, t, dim) }

// Sum adds up along dimensions, or everything if none is given.
func (t *Tensor) Sum(dims ...int) *Tensor {
	if len(dims) == 0 {
		return t.call(&opSum, t)
	}
	return t.call(&opSumDims, t, dims)
}

// Mean is the mean along dimensions, or of everything if none is given.
func (t *Tensor) Mean(dims ...int) *Tensor {
	if len(dims) == 0 {
		return t.call(&opMean, t)
	}
	return t.call(&opMeanDim, t, dims)
}

// Max is the largest element along dimensions, or of all if none is given.
func (t *Tensor) Max(dims ...int) *Tensor { return t.call(&opAMax, t, dims) }

// ArgMax is where along a dimension the largest element is.
func (t *Tensor) ArgMax(dim int) *Tensor { return t.call(&opArgMax, t, dim) }

// CumSum is the sum of the elements up to each one along a dimension.
func (t *Tensor) CumSum(dim int) *Tensor { return t.call(&opCumSum, t, dim) }

// MatMul is the product of matrices, or of stacks of them.
func (t *Tensor) MatMul(other *Tensor) *Tensor { return t.call(&opMatMul, t, other) }

// Linear is t times the transposed weight, plus the bias; a nil bias is none.
func (t *Tensor) Linear(weight, bias *Tensor) *Tensor { return t.call(&opLinear, t, weight, bias) }

// Embedding takes the rows of t that indices say.
func (t *Tensor) Embedding(indices *Tensor) *Tensor { return t.call(&opEmbedding, t, indices) }

// LayerNorm normalizes over the last dimensions, of these sizes; weight and bias may be nil.
func (t *Tensor) LayerNorm(sizes []int64, weight, bias *Tensor, eps float64) *Tensor {
	return t.call(&opLayerNorm, t, sizes, weight, bias, eps)
}

// CrossEntropy is the mean of the negative logarithms of the probabilities that the scores t, [n,
// classes], give to the targets, [n].
func (t *Tensor) CrossEntropy(targets *Tensor) *Tensor { return t.call(&opCross, t, targets) }

// Attention is softmax(t keys' / sqrt(features)) values, of [..., length, features]. With causal, no
// position sees those behind it.
func (t *Tensor) Attention(keys, values *Tensor, causal bool) *Tensor {
	return t.call(&opAttention, t, keys, values, nil, 0.0, causal)
}

// Transpose swaps two dimensions.
func (t *Tensor) Transpose(a, b int) *Tensor { return t.call(&opTranspose, t, a, b) }

// T is a matrix, transposed.
func (t *Tensor) T() *Tensor { return t.call(&opT, t) }

// Permute orders the dimensions anew.
func (t *Tensor) Permute(dims ...int) *Tensor { return t.call(&opPermute, t, dims) }

// View is the same elements in another shape; one size may be -1. It shares memory.
func (t *Tensor) View(sizes ...int64) *Tensor { return t.call(&opView, t, sizes) }

// Reshape is View, or a copy where that is impossible.
func (t *Tensor) Reshape(sizes ...int64) *Tensor { return t.call(&opReshape, t, sizes) }

// Unsqueeze inserts a dimension of size 1.
func (t *Tensor) Unsqueeze(dim int) *Tensor { return t.call(&opUnsqueeze, t, dim) }

// Squeeze removes a dimension if its size is 1.
func (t *Tensor) Squeeze(dim int) *Tensor { return t.call(&opSqueeze, t, dim) }

// Select takes one index of a dimension, which disappears.
func (t *Tensor) Select(dim int, index int64) *Tensor { return t.call(&opSelect, t, dim, index) }

// Narrow takes length indices of a dimension, from start.
func (t *Tensor) Narrow(dim int, start, length int64) *Tensor {
	return t.call(&opNarrow, t, dim, start, length)
}

// Cat puts tensors one behind the other along a dimension.
func Cat(tensors []*Tensor, dim int) *Tensor { return joined(&opCat, tensors, dim) }

// Stack puts tensors of one shape side by side along a new dimension.
func Stack(tensors []*Tensor, dim int) *Tensor { return joined(&opStack, tensors, dim) }

func joined(b *builtin, tensors []*Tensor, dim int) *Tensor {
	for _, t := range tensors {
		if t != nil {
			return t.call(b, tensors, dim)
		}
	}
	return nowhere.failed(invalid("there are no tensors"))
}

// Clone is a copy.
func (t *Tensor) Clone() *Tensor { return t.call(&opClone, t) }

// Contiguous is the tensor, or a copy whose elements lie row-major.
func (t *Tensor) Contiguous() *Tensor { return t.call(&opContiguous, t) }

// To converts the elements.
func (t *Tensor) To(dtype DType) *Tensor { return t.call(&opTo, t, dtype) }
