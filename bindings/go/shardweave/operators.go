// Made by bindings/generate.py from bindings/operators.py. Do not edit.

package shardweave

var (
	opMatMul            = builtin{name: "aten::matmul"}
	opLinear            = builtin{name: "aten::linear"}
	opEmbedding         = builtin{name: "aten::embedding"}
	opLayerNorm         = builtin{name: "aten::layer_norm"}
	opCrossEntropy      = builtin{name: "aten::cross_entropy_loss"}
	opMSELoss           = builtin{name: "aten::mse_loss"}
	opRelu              = builtin{name: "aten::relu"}
	opGelu              = builtin{name: "aten::gelu"}
	opSilu              = builtin{name: "aten::silu"}
	opTanh              = builtin{name: "aten::tanh"}
	opSigmoid           = builtin{name: "aten::sigmoid"}
	opExp               = builtin{name: "aten::exp"}
	opLog               = builtin{name: "aten::log"}
	opSqrt              = builtin{name: "aten::sqrt"}
	opRsqrt             = builtin{name: "aten::rsqrt"}
	opAbs               = builtin{name: "aten::abs"}
	opPow               = builtin{name: "aten::pow.Tensor_Scalar"}
	opClamp             = builtin{name: "aten::clamp"}
	opSoftmax           = builtin{name: "aten::softmax.int"}
	opLogSoftmax        = builtin{name: "aten::log_softmax.int"}
	opCumSum            = builtin{name: "aten::cumsum"}
	opView              = builtin{name: "aten::view"}
	opReshape           = builtin{name: "aten::reshape"}
	opFlatten           = builtin{name: "aten::flatten.using_ints"}
	opT                 = builtin{name: "aten::t"}
	opTranspose         = builtin{name: "aten::transpose.int"}
	opPermute           = builtin{name: "aten::permute"}
	opUnsqueeze         = builtin{name: "aten::unsqueeze"}
	opSqueeze           = builtin{name: "aten::squeeze.dim"}
	opExpand            = builtin{name: "aten::expand"}
	opNarrow            = builtin{name: "aten::narrow"}
	opSelect            = builtin{name: "aten::select.int"}
	opIndexSelect       = builtin{name: "aten::index_select"}
	opChoose            = builtin{name: "aten::where.self"}
	opClone             = builtin{name: "aten::clone"}
	opContiguous        = builtin{name: "aten::contiguous"}
	opTo                = builtin{name: "aten::to.dtype"}
	opAdaptiveAvgPool2d = builtin{name: "aten::adaptive_avg_pool2d"}
	opAvgPool2d         = builtin{name: "aten::avg_pool2d"}
	opBCEWithLogits     = builtin{name: "aten::binary_cross_entropy_with_logits"}
	opBmm               = builtin{name: "aten::bmm"}
	opCeil              = builtin{name: "aten::ceil"}
	opConv1d            = builtin{name: "aten::conv1d"}
	opConv2d            = builtin{name: "aten::conv2d"}
	opCos               = builtin{name: "aten::cos"}
	opDiagonal          = builtin{name: "aten::diagonal"}
	opDropout           = builtin{name: "aten::dropout"}
	opElu               = builtin{name: "aten::elu"}
	opErf               = builtin{name: "aten::erf"}
	opExp2              = builtin{name: "aten::exp2"}
	opExpm1             = builtin{name: "aten::expm1"}
	opFlip              = builtin{name: "aten::flip"}
	opFloor             = builtin{name: "aten::floor"}
	opGather            = builtin{name: "aten::gather"}
	opGlu               = builtin{name: "aten::glu"}
	opGroupNorm         = builtin{name: "aten::group_norm"}
	opHardswish         = builtin{name: "aten::hardswish"}
	opIsFinite          = builtin{name: "aten::isfinite"}
	opIsInf             = builtin{name: "aten::isinf"}
	opIsNaN             = builtin{name: "aten::isnan"}
	opL1Loss            = builtin{name: "aten::l1_loss"}
	opLeakyRelu         = builtin{name: "aten::leaky_relu"}
	opLerp              = builtin{name: "aten::lerp.Scalar"}
	opLog10             = builtin{name: "aten::log10"}
	opLog1p             = builtin{name: "aten::log1p"}
	opLog2              = builtin{name: "aten::log2"}
	opLogSigmoid        = builtin{name: "aten::log_sigmoid"}
	opAnd               = builtin{name: "aten::logical_and"}
	opNot               = builtin{name: "aten::logical_not"}
	opOr                = builtin{name: "aten::logical_or"}
	opXor               = builtin{name: "aten::logical_xor"}
	opLogSumExp         = builtin{name: "aten::logsumexp"}
	opMaskedFill        = builtin{name: "aten::masked_fill.Scalar"}
	opMaskedSelect      = builtin{name: "aten::masked_select"}
	opMaxPool2d         = builtin{name: "aten::max_pool2d"}
	opMaximum           = builtin{name: "aten::maximum"}
	opMinimum           = builtin{name: "aten::minimum"}
	opMish              = builtin{name: "aten::mish"}
	opNanToNum          = builtin{name: "aten::nan_to_num"}
	opNonZero           = builtin{name: "aten::nonzero"}
	opOneHot            = builtin{name: "aten::one_hot"}
	opOuter             = builtin{name: "aten::outer"}
	opProd              = builtin{name: "aten::prod"}
	opReciprocal        = builtin{name: "aten::reciprocal"}
	opRepeat            = builtin{name: "aten::repeat"}
	opRepeatInterleave  = builtin{name: "aten::repeat_interleave.self_int"}
	opRMSNorm           = builtin{name: "aten::rms_norm"}
	opRoll              = builtin{name: "aten::roll"}
	opRound             = builtin{name: "aten::round"}
	opScatter           = builtin{name: "aten::scatter.src"}
	opScatterAdd        = builtin{name: "aten::scatter_add"}
	opSign              = builtin{name: "aten::sign"}
	opSin               = builtin{name: "aten::sin"}
	opSmoothL1Loss      = builtin{name: "aten::smooth_l1_loss"}
	opSoftplus          = builtin{name: "aten::softplus"}
	opSquare            = builtin{name: "aten::square"}
	opTan               = builtin{name: "aten::tan"}
	opTril              = builtin{name: "aten::tril"}
	opTriu              = builtin{name: "aten::triu"}
	opTrunc             = builtin{name: "aten::trunc"}
	opUnflatten         = builtin{name: "aten::unflatten.int"}
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

// CrossEntropy is the mean cross entropy of these scores, [rows, classes], where the targets are the classes.
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

// AdaptiveAvgPool2d is the means of as many equal parts of an image as these sizes say.
func (t *Tensor) AdaptiveAvgPool2d(sizes ...int64) *Tensor {
	return t.call(&opAdaptiveAvgPool2d, t, sizes)
}

// AvgPool2d is the means of the windows of an image.
func (t *Tensor) AvgPool2d(kernel, stride, padding []int64) *Tensor {
	return t.call(&opAvgPool2d, t, kernel, stride, padding)
}

// BCEWithLogits is the mean binary cross entropy of the sigmoid of these scores.
func (t *Tensor) BCEWithLogits(target *Tensor) *Tensor {
	return t.call(&opBCEWithLogits, t, target)
}

// Bmm is the products of two stacks of matrices, [n, ., .].
func (t *Tensor) Bmm(other *Tensor) *Tensor {
	return t.call(&opBmm, t, other)
}

// Ceil is each element rounded up.
func (t *Tensor) Ceil() *Tensor {
	return t.call(&opCeil, t)
}

// Conv1d is the convolution of [batch, channels, length] with the weight, [out, in / groups, width]; bias may be nil.
func (t *Tensor) Conv1d(weight, bias *Tensor, stride, padding, dilation []int64, groups int64) *Tensor {
	return t.call(&opConv1d, t, weight, bias, stride, padding, dilation, groups)
}

// Conv2d is the convolution of [batch, channels, height, width] with the weight, [out, in / groups, height, width]; bias may be nil.
func (t *Tensor) Conv2d(weight, bias *Tensor, stride, padding, dilation []int64, groups int64) *Tensor {
	return t.call(&opConv2d, t, weight, bias, stride, padding, dilation, groups)
}

// Cos is the cosine of each element.
func (t *Tensor) Cos() *Tensor {
	return t.call(&opCos, t)
}

// Diagonal is a diagonal of two dimensions, as the last dimension; offset 0 is the main one.
func (t *Tensor) Diagonal(offset int64, dim0, dim1 int) *Tensor {
	return t.call(&opDiagonal, t, offset, dim0, dim1)
}

// Dropout is the elements, each 0 with probability p, the others times 1 / (1 - p); all as they are if it is not to train.
func (t *Tensor) Dropout(p float64, train bool) *Tensor {
	return t.call(&opDropout, t, p, train)
}

// Elu is each element x, or alpha (exp(x) - 1) below 0.
func (t *Tensor) Elu(alpha float64) *Tensor {
	return t.call(&opElu, t, alpha)
}

// Erf is the error function of each element.
func (t *Tensor) Erf() *Tensor {
	return t.call(&opErf, t)
}

// Exp2 is 2 to the power of each element.
func (t *Tensor) Exp2() *Tensor {
	return t.call(&opExp2, t)
}

// Expm1 is exp(x) - 1 of each element x, exact near 0.
func (t *Tensor) Expm1() *Tensor {
	return t.call(&opExpm1, t)
}

// Flip is the elements in the reverse order along some dimensions.
func (t *Tensor) Flip(dims ...int) *Tensor {
	return t.call(&opFlip, t, dims)
}

// Floor is each element rounded down.
func (t *Tensor) Floor() *Tensor {
	return t.call(&opFloor, t)
}

// Gather is for each of the indices the element at that place along a dimension.
func (t *Tensor) Gather(dim int, indices *Tensor) *Tensor {
	return t.call(&opGather, t, dim, indices)
}

// Glu is the first half along a dimension times the sigmoid of the second.
func (t *Tensor) Glu(dim int) *Tensor {
	return t.call(&opGlu, t, dim)
}

// GroupNorm is [batch, channels, ...], normalized over each of the groups of channels; weight and bias may be nil.
func (t *Tensor) GroupNorm(groups int64, weight, bias *Tensor, eps float64) *Tensor {
	return t.call(&opGroupNorm, t, groups, weight, bias, eps)
}

// Hardswish is x min(max(x + 3, 0), 6) / 6 of each element x.
func (t *Tensor) Hardswish() *Tensor {
	return t.call(&opHardswish, t)
}

// IsFinite is whether each element is a finite number.
func (t *Tensor) IsFinite() *Tensor {
	return t.call(&opIsFinite, t)
}

// IsInf is whether each element is infinite.
func (t *Tensor) IsInf() *Tensor {
	return t.call(&opIsInf, t)
}

// IsNaN is whether each element is no number.
func (t *Tensor) IsNaN() *Tensor {
	return t.call(&opIsNaN, t)
}

// L1Loss is the mean absolute difference.
func (t *Tensor) L1Loss(target *Tensor) *Tensor {
	return t.call(&opL1Loss, t, target)
}

// LeakyRelu is each element, times the slope below 0.
func (t *Tensor) LeakyRelu(slope float64) *Tensor {
	return t.call(&opLeakyRelu, t, slope)
}

// Lerp is the tensor plus weight times what end is more than it.
func (t *Tensor) Lerp(end *Tensor, weight float64) *Tensor {
	return t.call(&opLerp, t, end, weight)
}

// Log10 is the logarithm to the base 10 of each element.
func (t *Tensor) Log10() *Tensor {
	return t.call(&opLog10, t)
}

// Log1p is the natural logarithm of 1 + x of each element x, exact near 0.
func (t *Tensor) Log1p() *Tensor {
	return t.call(&opLog1p, t)
}

// Log2 is the logarithm to the base 2 of each element.
func (t *Tensor) Log2() *Tensor {
	return t.call(&opLog2, t)
}

// LogSigmoid is the logarithm of the sigmoid of each element.
func (t *Tensor) LogSigmoid() *Tensor {
	return t.call(&opLogSigmoid, t)
}

// And is whether both elements are true, or other than 0.
func (t *Tensor) And(other *Tensor) *Tensor {
	return t.call(&opAnd, t, other)
}

// Not is whether each element is false, or 0.
func (t *Tensor) Not() *Tensor {
	return t.call(&opNot, t)
}

// Or is whether one of both elements is true, or other than 0.
func (t *Tensor) Or(other *Tensor) *Tensor {
	return t.call(&opOr, t, other)
}

// Xor is whether just one of both elements is true, or other than 0.
func (t *Tensor) Xor(other *Tensor) *Tensor {
	return t.call(&opXor, t, other)
}

// LogSumExp is the logarithm of the sum of exp(x) of the elements x along some dimensions.
func (t *Tensor) LogSumExp(dims ...int) *Tensor {
	return t.call(&opLogSumExp, t, dims)
}

// MaskedFill is the elements, or the value where the mask is true.
func (t *Tensor) MaskedFill(mask *Tensor, value float64) *Tensor {
	return t.call(&opMaskedFill, t, mask, value)
}

// MaskedSelect is the elements where the mask is true, as a vector.
func (t *Tensor) MaskedSelect(mask *Tensor) *Tensor {
	return t.call(&opMaskedSelect, t, mask)
}

// MaxPool2d is the largest elements of the windows of an image.
func (t *Tensor) MaxPool2d(kernel, stride, padding []int64) *Tensor {
	return t.call(&opMaxPool2d, t, kernel, stride, padding)
}

// Maximum is the larger one of both elements.
func (t *Tensor) Maximum(other *Tensor) *Tensor {
	return t.call(&opMaximum, t, other)
}

// Minimum is the smaller one of both elements.
func (t *Tensor) Minimum(other *Tensor) *Tensor {
	return t.call(&opMinimum, t, other)
}

// Mish is x tanh(log(1 + exp(x))) of each element x.
func (t *Tensor) Mish() *Tensor {
	return t.call(&opMish, t)
}

// NanToNum is each element, or a number where it is none; infinite ones are the largest there are.
func (t *Tensor) NanToNum(nan float64) *Tensor {
	return t.call(&opNanToNum, t, nan)
}

// NonZero is where the elements are other than 0: a row of indices for each.
func (t *Tensor) NonZero() *Tensor {
	return t.call(&opNonZero, t)
}

// OneHot is for each of these integers a row of as many zeros as there are classes, with a 1 at its place.
func (t *Tensor) OneHot(classes int64) *Tensor {
	return t.call(&opOneHot, t, classes)
}

// Outer is the products of each element of one vector with each of another.
func (t *Tensor) Outer(other *Tensor) *Tensor {
	return t.call(&opOuter, t, other)
}

// Prod is the product of all elements.
func (t *Tensor) Prod() *Tensor {
	return t.call(&opProd, t)
}

// Reciprocal is 1 / x of each element x.
func (t *Tensor) Reciprocal() *Tensor {
	return t.call(&opReciprocal, t)
}

// Repeat is the tensor so many times along each dimension.
func (t *Tensor) Repeat(counts ...int64) *Tensor {
	return t.call(&opRepeat, t, counts)
}

// RepeatInterleave is each index of a dimension so many times.
func (t *Tensor) RepeatInterleave(count int64, dim int) *Tensor {
	return t.call(&opRepeatInterleave, t, count, dim)
}

// RMSNorm is the tensor over the root of the mean of its squares over the last dimensions, which have these sizes, times the weight; weight may be nil.
func (t *Tensor) RMSNorm(sizes []int64, weight *Tensor, eps float64) *Tensor {
	return t.call(&opRMSNorm, t, sizes, weight, eps)
}

// Roll is the elements moved so far along some dimensions; what leaves at the end comes in at the beginning.
func (t *Tensor) Roll(shifts []int64, dims []int) *Tensor {
	return t.call(&opRoll, t, shifts, dims)
}

// Round is each element rounded to the nearest integer, of two to the even one.
func (t *Tensor) Round() *Tensor {
	return t.call(&opRound, t)
}

// Scatter is a copy in which each element of the source is at the place along a dimension that the indices say.
func (t *Tensor) Scatter(dim int, indices, source *Tensor) *Tensor {
	return t.call(&opScatter, t, dim, indices, source)
}

// ScatterAdd is a copy to which each element of the source is added at the place along a dimension that the indices say.
func (t *Tensor) ScatterAdd(dim int, indices, source *Tensor) *Tensor {
	return t.call(&opScatterAdd, t, dim, indices, source)
}

// Sign is -1, 0 or 1: the sign of each element.
func (t *Tensor) Sign() *Tensor {
	return t.call(&opSign, t)
}

// Sin is the sine of each element.
func (t *Tensor) Sin() *Tensor {
	return t.call(&opSin, t)
}

// SmoothL1Loss is the mean of half the square of each difference, or, from 1 on, of the difference less a half.
func (t *Tensor) SmoothL1Loss(target *Tensor) *Tensor {
	return t.call(&opSmoothL1Loss, t, target)
}

// Softplus is log(1 + exp(x)) of each element x.
func (t *Tensor) Softplus() *Tensor {
	return t.call(&opSoftplus, t)
}

// Square is the square of each element.
func (t *Tensor) Square() *Tensor {
	return t.call(&opSquare, t)
}

// Tan is the tangent of each element.
func (t *Tensor) Tan() *Tensor {
	return t.call(&opTan, t)
}

// Tril is the elements on and below a diagonal, and 0 elsewhere; 0 is the main one, 1 the one above.
func (t *Tensor) Tril(diagonal int64) *Tensor {
	return t.call(&opTril, t, diagonal)
}

// Triu is the elements on and above a diagonal, and 0 elsewhere; 0 is the main one, 1 the one above.
func (t *Tensor) Triu(diagonal int64) *Tensor {
	return t.call(&opTriu, t, diagonal)
}

// Trunc is each element rounded towards 0.
func (t *Tensor) Trunc() *Tensor {
	return t.call(&opTrunc, t)
}

// Unflatten is the tensor with one dimension as several of these sizes; one of them may be -1.
func (t *Tensor) Unflatten(dim int, sizes []int64) *Tensor {
	return t.call(&opUnflatten, t, dim, sizes)
}
