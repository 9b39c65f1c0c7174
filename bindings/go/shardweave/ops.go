package shardweave

var (
	opAdd, opAddScalar = builtin{name: "aten::add.Tensor"}, builtin{name: "aten::add.Scalar"}
	opSub, opSubScalar = builtin{name: "aten::sub.Tensor"}, builtin{name: "aten::sub.Scalar"}
	opMul, opMulScalar = builtin{name: "aten::mul.Tensor"}, builtin{name: "aten::mul.Scalar"}
	opDiv, opDivScalar = builtin{name: "aten::div.Tensor"}, builtin{name: "aten::div.Scalar"}
	opLt, opLtScalar   = builtin{name: "aten::lt.Tensor"}, builtin{name: "aten::lt.Scalar"}
	opGt, opGtScalar   = builtin{name: "aten::gt.Tensor"}, builtin{name: "aten::gt.Scalar"}
	opEq, opEqScalar   = builtin{name: "aten::eq.Tensor"}, builtin{name: "aten::eq.Scalar"}
	opGe, opGeScalar   = builtin{name: "aten::ge.Tensor"}, builtin{name: "aten::ge.Scalar"}
	opLe, opLeScalar   = builtin{name: "aten::le.Tensor"}, builtin{name: "aten::le.Scalar"}
	opNe, opNeScalar   = builtin{name: "aten::ne.Tensor"}, builtin{name: "aten::ne.Scalar"}
	opRem, opRemScalar = builtin{name: "aten::remainder.Tensor"}, builtin{name: "aten::remainder.Scalar"}

	opNeg = builtin{name: "aten::neg"}

	opSum     = builtin{name: "aten::sum"}
	opSumDims = builtin{name: "aten::sum.dim_IntList"}
	opMean    = builtin{name: "aten::mean"}
	opMeanDim = builtin{name: "aten::mean.dim"}
	opAMax    = builtin{name: "aten::amax"}
	opAMin    = builtin{name: "aten::amin"}
	opArgMax  = builtin{name: "aten::argmax"}
	opArgMin  = builtin{name: "aten::argmin"}
	opAny     = builtin{name: "aten::any.dims"}
	opAllOf   = builtin{name: "aten::all.dims"}
	opNorm    = builtin{name: "aten::linalg_vector_norm"}
	opVar     = builtin{name: "aten::var.correction"}
	opStd     = builtin{name: "aten::std.correction"}
	opTopK    = builtin{name: "aten::topk"}
	opSort    = builtin{name: "aten::sort"}
	opSplit   = builtin{name: "aten::split_with_sizes"}

	opAttention = builtin{name: "aten::scaled_dot_product_attention"}

	opCat   = builtin{name: "aten::cat"}
	opStack = builtin{name: "aten::stack"}

	opClampIn = builtin{name: "aten::clamp_"}
)

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

// Ge says of each element whether it is greater or equal.
func (t *Tensor) Ge(other any) *Tensor { return t.binary(&opGe, &opGeScalar, other) }

// Le says of each element whether it is less or equal.
func (t *Tensor) Le(other any) *Tensor { return t.binary(&opLe, &opLeScalar, other) }

// Ne says of each element whether it is another.
func (t *Tensor) Ne(other any) *Tensor { return t.binary(&opNe, &opNeScalar, other) }

// Remainder is what is left of t / other, with the sign of other.
func (t *Tensor) Remainder(other any) *Tensor { return t.binary(&opRem, &opRemScalar, other) }

// Neg is -t.
func (t *Tensor) Neg() *Tensor { return t.call(&opNeg, t) }

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

// Min is the smallest element along dimensions, or of all if none is given.
func (t *Tensor) Min(dims ...int) *Tensor { return t.call(&opAMin, t, dims) }

// All says whether all elements along dimensions, or all if none is given, are true or other than 0.
func (t *Tensor) All(dims ...int) *Tensor { return t.overDims(&opAllOf, dims) }

// Any says whether one element along dimensions, or of all if none is given, is true or other than 0.
func (t *Tensor) Any(dims ...int) *Tensor { return t.overDims(&opAny, dims) }

// Norm is the square root of the sum of the squares along dimensions, or of everything if none is given.
func (t *Tensor) Norm(dims ...int) *Tensor {
	if len(dims) == 0 {
		return t.call(&opNorm, t, 2.0)
	}
	return t.call(&opNorm, t, 2.0, dims)
}

// Var is the unbiased variance along dimensions, or of everything if none is given.
func (t *Tensor) Var(dims ...int) *Tensor { return t.overDims(&opVar, dims) }

// Std is the square root of the unbiased variance along dimensions, or of everything if none is given.
func (t *Tensor) Std(dims ...int) *Tensor { return t.overDims(&opStd, dims) }

func (t *Tensor) overDims(b *builtin, dims []int) *Tensor {
	if len(dims) == 0 {
		return t.call(b, t)
	}
	return t.call(b, t, dims)
}

// ArgMin is where along a dimension the smallest element is.
func (t *Tensor) ArgMin(dim int) *Tensor { return t.call(&opArgMin, t, dim) }

// ArgMax is where along a dimension the largest element is.
func (t *Tensor) ArgMax(dim int) *Tensor { return t.call(&opArgMax, t, dim) }

// Attention is softmax(t keys' / sqrt(features)) values, of [..., length, features]. With causal, no
// position sees those behind it.
func (t *Tensor) Attention(keys, values *Tensor, causal bool) *Tensor {
	return t.call(&opAttention, t, keys, values, nil, 0.0, causal)
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
	if len(tensors) > 0 {
		return nowhere.failed(invalid("none of the %d tensors is there: they are nil", len(tensors)))
	}
	return nowhere.failed(invalid("there are no tensors"))
}

// TopK is the k largest elements along a dimension, from the largest on, and where they are.
func (t *Tensor) TopK(k int64, dim int) (values, indices *Tensor) { return t.pair(&opTopK, t, k, dim) }

// Sort is the elements along a dimension in their order, and where they were.
func (t *Tensor) Sort(dim int, descending bool) (values, indices *Tensor) {
	return t.pair(&opSort, t, dim, descending)
}

// pair calls an operator with two results.
func (t *Tensor) pair(b *builtin, args ...any) (first, second *Tensor) {
	results, err := t.several(b, args)
	if err != nil {
		return t.failedBy(err), t.failedBy(err)
	}
	return results[0].(*Tensor), results[1].(*Tensor)
}

func (t *Tensor) several(b *builtin, args []any) ([]any, error) {
	op, err := b.find()
	if err != nil {
		return nil, err
	}
	return ask(func(r *rank) ([]any, error) {
		call, err := r.arguments(args)
		if err != nil {
			return nil, err
		}
		defer r.done(call)
		if err := call.Do(op, int32(r.mode), false); err != nil {
			return nil, err
		}
		return r.results(call), nil
	}, t)
}

// Split is the parts of the tensor, one behind the other along a dimension, with these sizes, which add up to the
// dimension's.
func (t *Tensor) Split(sizes []int64, dim int) ([]*Tensor, error) {
	results, err := t.several(&opSplit, []any{t, sizes, dim})
	if err != nil {
		return nil, err
	}
	return results[0].([]*Tensor), nil
}

// Failed is a tensor that carries the error, as those of this package that could not be made: for functions of the
// program that are used in expressions, too.
func Failed(err error) *Tensor {
	if err == nil {
		err = invalid("argument 'err' is nil: nothing has failed")
	}
	return nowhere.failed(err)
}
