// Made by bindings/generate.py from bindings/operators.py. Do not edit.

package shardweave

var (
	opMatMul       = builtin{name: "aten::matmul"}
	opLinear       = builtin{name: "aten::linear"}
	opEmbedding    = builtin{name: "aten::embedding"}
	opLayerNorm    = builtin{name: "aten::layer_norm"}
	opCrossEntropy = builtin{name: "aten::cross_entropy_loss"}
	opMSELoss      = builtin{name: "aten::mse_loss"}
	opRelu         = builtin{name: "aten::relu"}
	opGelu         = builtin{name: "aten::gelu"}
	opSilu         = builtin{name: "aten::silu"}
	opTanh         = builtin{name: "aten::tanh"}
	opSigmoid      = builtin{name: "aten::sigmoid"}
	opExp          = builtin{name: "aten::exp"}
	opLog          = builtin{name: "aten::log"}
	opSqrt         = builtin{name: "aten::sqrt"}
	opRsqrt        = builtin{name: "aten::rsqrt"}
	opAbs          = builtin{name: "aten::abs"}
	opPow          = builtin{name: "aten::pow.Tensor_Scalar"}
	opClamp        = builtin{name: "aten::clamp"}
	opSoftmax      = builtin{name: "aten::softmax.int"}
	opLogSoftmax   = builtin{name: "aten::log_softmax.int"}
	opCumSum       = builtin{name: "aten::cumsum"}
	opView         = builtin{name: "aten::view"}
	opReshape      = builtin{name: "aten::reshape"}
	opFlatten      = builtin{name: "aten::flatten.using_ints"}
	opT            = builtin{name: "aten::t"}
	opTranspose    = builtin{name: "aten::transpose.int"}
	opPermute      = builtin{name: "aten::permute"}
	opUnsqueeze    = builtin{name: "aten::unsqueeze"}
	opSqueeze      = builtin{name: "aten::squeeze.dim"}
	opExpand       = builtin{name: "aten::expand"}
	opNarrow       = builtin{name: "aten::narrow"}
	opSelect       = builtin{name: "aten::select.int"}
	opIndexSelect  = builtin{name: "aten::index_select"}
	opChoose       = builtin{name: "aten::where.self"}
	opClone        = builtin{name: "aten::clone"}
	opContiguous   = builtin{name: "aten::contiguous"}
	opTo           = builtin{name: "aten::to.dtype"}
)

// MatMul is the product of matrices, or of stacks of them.
func (t *Tensor) MatMul(other *Tensor) *Tensor {
	return t.call(&opMatMul, t, other)
}

// Linear is the product with the transposed weight, plus the bias; bias may be nil.
func (t *Tensor) Linear(weight, bias *Tensor) *Tensor {
	return t.call(&opLinear, t, weight, bias)
}

// Embedding is the rows of this table that the indices say.
func (t *Tensor) Embedding(indices *Tensor) *Tensor {
	return t.call(&opEmbedding, t, indices)
}

// LayerNorm is the tensor, normalized over the last dimensions, which have these sizes; weight and bias may be nil.
func (t *Tensor) LayerNorm(sizes []int64, weight, bias *Tensor, eps float64) *Tensor {
	return t.call(&opLayerNorm, t, sizes, weight, bias, eps)
}

// CrossEntropy is the mean cross entropy of these scores, [.., classes], where the targets are the classes.
func (t *Tensor) CrossEntropy(targets *Tensor) *Tensor {
	return t.call(&opCrossEntropy, t, targets)
}

// MSELoss is the mean squared difference.
func (t *Tensor) MSELoss(target *Tensor) *Tensor {
	return t.call(&opMSELoss, t, target)
}

// Relu is each element, or 0 where that is larger.
func (t *Tensor) Relu() *Tensor {
	return t.call(&opRelu, t)
}

// Gelu is the Gaussian error linear unit, exact.
func (t *Tensor) Gelu() *Tensor {
	return t.call(&opGelu, t)
}

// Silu is each element times its sigmoid.
func (t *Tensor) Silu() *Tensor {
	return t.call(&opSilu, t)
}

// Tanh is the hyperbolic tangent of each element.
func (t *Tensor) Tanh() *Tensor {
	return t.call(&opTanh, t)
}

// Sigmoid is 1 / (1 + exp(-x)) of each element x.
func (t *Tensor) Sigmoid() *Tensor {
	return t.call(&opSigmoid, t)
}

// Exp is the exponential of each element.
func (t *Tensor) Exp() *Tensor {
	return t.call(&opExp, t)
}

// Log is the natural logarithm of each element.
func (t *Tensor) Log() *Tensor {
	return t.call(&opLog, t)
}

// Sqrt is the square root of each element.
func (t *Tensor) Sqrt() *Tensor {
	return t.call(&opSqrt, t)
}

// Rsqrt is 1 / sqrt(x) of each element x.
func (t *Tensor) Rsqrt() *Tensor {
	return t.call(&opRsqrt, t)
}

// Abs is the absolute value of each element.
func (t *Tensor) Abs() *Tensor {
	return t.call(&opAbs, t)
}

// Pow is each element to the power of a number.
func (t *Tensor) Pow(exponent float64) *Tensor {
	return t.call(&opPow, t, exponent)
}

// Clamp is each element, or the nearest number from min to max.
func (t *Tensor) Clamp(min, max float64) *Tensor {
	return t.call(&opClamp, t, min, max)
}

// Softmax is exp(x) of each element x over the sum of these along a dimension.
func (t *Tensor) Softmax(dim int) *Tensor {
	return t.call(&opSoftmax, t, dim)
}

// LogSoftmax is the logarithm of the softmax.
func (t *Tensor) LogSoftmax(dim int) *Tensor {
	return t.call(&opLogSoftmax, t, dim)
}

// CumSum is the sum of the elements up to each one along a dimension.
func (t *Tensor) CumSum(dim int) *Tensor {
	return t.call(&opCumSum, t, dim)
}

// View is the same memory with other sizes; one of them may be -1.
func (t *Tensor) View(sizes ...int64) *Tensor {
	return t.call(&opView, t, sizes)
}

// Reshape is the same data with other sizes; one of them may be -1.
func (t *Tensor) Reshape(sizes ...int64) *Tensor {
	return t.call(&opReshape, t, sizes)
}

// Flatten is the tensor with the dimensions from start to end, both included, as one.
func (t *Tensor) Flatten(start, end int) *Tensor {
	return t.call(&opFlatten, t, start, end)
}

// T is a matrix, transposed.
func (t *Tensor) T() *Tensor {
	return t.call(&opT, t)
}

// Transpose is the tensor with two dimensions exchanged.
func (t *Tensor) Transpose(dim0, dim1 int) *Tensor {
	return t.call(&opTranspose, t, dim0, dim1)
}

// Permute is the tensor with its dimensions in another order.
func (t *Tensor) Permute(dims ...int) *Tensor {
	return t.call(&opPermute, t, dims)
}

// Unsqueeze is the tensor with a new dimension of size 1.
func (t *Tensor) Unsqueeze(dim int) *Tensor {
	return t.call(&opUnsqueeze, t, dim)
}

// Squeeze is the tensor without a dimension, if its size is 1.
func (t *Tensor) Squeeze(dim int) *Tensor {
	return t.call(&opSqueeze, t, dim)
}

// Expand is the tensor with dimensions of size 1 repeated up to these sizes.
func (t *Tensor) Expand(sizes ...int64) *Tensor {
	return t.call(&opExpand, t, sizes)
}

// Narrow is so many indices of a dimension, from start on.
func (t *Tensor) Narrow(dim int, start, length int64) *Tensor {
	return t.call(&opNarrow, t, dim, start, length)
}

// Select is one index of a dimension, which is gone then.
func (t *Tensor) Select(dim int, index int64) *Tensor {
	return t.call(&opSelect, t, dim, index)
}

// IndexSelect is some indices of a dimension.
func (t *Tensor) IndexSelect(dim int, indices *Tensor) *Tensor {
	return t.call(&opIndexSelect, t, dim, indices)
}

// Choose is the elements of a where this tensor of bools is true, of b elsewhere.
func (t *Tensor) Choose(a, b *Tensor) *Tensor {
	return t.call(&opChoose, t, a, b)
}

// Clone is a tensor of its own with the same data.
func (t *Tensor) Clone() *Tensor {
	return t.call(&opClone, t)
}

// Contiguous is the tensor, or a copy whose elements lie row-major.
func (t *Tensor) Contiguous() *Tensor {
	return t.call(&opContiguous, t)
}

// To is the elements in another type.
func (t *Tensor) To(dtype DType) *Tensor {
	return t.call(&opTo, t, dtype)
}
