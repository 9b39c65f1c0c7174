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

	opNeg = builtin{name: "aten::neg"}

	opSum     = builtin{name: "aten::sum"}
	opSumDims = builtin{name: "aten::sum.dim_IntList"}
	opMean    = builtin{name: "aten::mean"}
	opMeanDim = builtin{name: "aten::mean.dim"}
	opAMax    = builtin{name: "aten::amax"}
	opArgMax  = builtin{name: "aten::argmax"}

	opAttention = builtin{name: "aten::scaled_dot_product_attention"}

	opCat   = builtin{name: "aten::cat"}
	opStack = builtin{name: "aten::stack"}
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
	return nowhere.failed(invalid("there are no tensors"))
}
