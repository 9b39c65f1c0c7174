package shardweave

import (
	"fmt"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

var (
	opNewEmpty     = builtin{name: "aten::new_empty"}
	opSlice        = builtin{name: "aten::slice.Tensor"}
	opIndexTensors = builtin{name: "aten::index.Tensor"}
	opIndexPut     = builtin{name: "aten::index_put_"}
	opCopyIn       = builtin{name: "aten::copy_"}
	opFillIn       = builtin{name: "aten::fill_.Scalar"}
)

// span is some indices of a dimension.
type span struct {
	from, to, step int64
	hasFrom, hasTo bool
}

// All is an index: the whole dimension.
var All = span{step: 1}

// Range is an index: from up to, but without, to. Negative numbers count from the end, and what is beyond the dimension
// is left out, as in Python; so in From and To.
func Range(from, to int64) span { return span{from, to, 1, true, true} }

// From is an index: from here to the end.
func From(from int64) span { return span{from: from, step: 1, hasFrom: true} }

// To is an index: from the beginning up to, but without, to.
func To(to int64) span { return span{to: to, step: 1, hasTo: true} }

// Step is every step-th of these indices; step is 1 or more.
func (s span) Step(step int64) span {
	s.step = step
	return s
}

type newDim struct{}

// NewDim is an index: a new dimension of size 1.
var NewDim = newDim{}

type rest struct{}

// Rest is an index: as many dimensions, whole, as the other indices leave.
var Rest = rest{}

// Index is a part of the tensor. An index for each dimension, from the first on (those behind are whole), is
//
//	int, int64              one index; the dimension is gone then. Negative: from the end
//	Range, From, To, All    some; .Step(n): every n-th of them
//	NewDim, Rest            a new dimension of size 1; all that the others leave
//	*Tensor                 of integers: these indices; of bools: where it is true, along as many dimensions as it has
//
//	x.Index(0, sw.All, sw.Range(2, 5)) // x[0, :, 2:5] of Python
//	x.Index(sw.Rest, -1)               // x[..., -1]
//	x.Index(sw.From(1).Step(2))        // x[1::2]
//
// The result shares memory with the tensor where no index is a tensor and, if it is sharded, nothing had to move.
// Of a sharded tensor, indices that are tensors lie on its mesh.
func (t *Tensor) Index(at ...any) *Tensor {
	view, indices, err := t.basic(at)
	if err != nil {
		return t.failedBy(err)
	}
	if indices == nil {
		return view
	}
	result := view.call(&opIndexTensors, view, indices)
	view.Close()
	return result
}

// SetIndex writes over the elements that Index has: another tensor's, converted and with dimensions of size 1 repeated,
// or a number. The tensor is plain; nothing is recorded for gradients.
func (t *Tensor) SetIndex(value any, at ...any) error {
	sharded, err := t.IsSharded()
	if err != nil {
		return err
	}
	if sharded {
		return newError(Unimplemented, "the tensor is sharded, and what Index gives may be a copy: use Choose, or write to what Local gives")
	}
	target := t.Detach()
	defer target.Close()
	view, indices, err := target.basic(at)
	if err != nil {
		return err
	}
	defer view.Close()
	if indices == nil {
		return view.assign(value)
	}
	like, is := value.(*Tensor)
	if is {
		dtype, err := t.DType()
		if err != nil {
			return err
		}
		like = like.To(dtype)
	} else {
		like = view.call(&opNewEmpty, view, []int64{})
	}
	defer like.Close()
	if !is {
		if err := like.assign(value); err != nil {
			return err
		}
	}
	return view.call(&opIndexPut, view, indices, like).Err()
}

// Assign writes another tensor's elements over the tensor's, converted and with dimensions of size 1 repeated, or a
// number over all. Nothing is recorded for gradients. Both are sharded, or none; collective if they lie differently.
func (t *Tensor) Assign(value any) error {
	target := t.Detach()
	defer target.Close()
	return target.assign(value)
}

func (t *Tensor) assign(value any) error {
	var written *Tensor
	if value == nil {
		return invalid("argument 'value' is nil; wanted a *Tensor or a number")
	}
	if u, is := value.(*Tensor); is {
		if u == nil {
			return noThing("Tensor")
		}
		u = u.Detach()
		defer u.Close()
		written = t.call(&opCopyIn, t, u)
	} else {
		written = t.call(&opFillIn, t, value)
	}
	defer written.Close()
	return written.Err()
}

// failedBy is a tensor of t's rank that carries the error.
func (t *Tensor) failedBy(err error) *Tensor {
	r, first := t.home()
	if first != nil {
		err = first
	}
	return r.failed(err)
}

// basic is the view that all indices but tensors give, another than t, and those that are tensors by the view's
// dimensions.
func (t *Tensor) basic(at []any) (view *Tensor, indices []*Tensor, err error) {
	sizes, err := t.Sizes()
	if err != nil {
		return nil, nil, err
	}
	used, rests := 0, 0
	for i, index := range at {
		switch v := index.(type) {
		case int, int64, span:
			used++
		case newDim:
		case rest:
			rests++
		case *Tensor:
			n, err := v.indexed()
			if err != nil {
				return nil, nil, err
			}
			used += n
		default:
			return nil, nil, invalid("argument 'at[%d]' has the type %T; wanted an int, a Range, From, To, All, NewDim, Rest or a *Tensor", i, index)
		}
	}
	switch {
	case rests > 1:
		return nil, nil, invalid("argument 'at' has Rest more than once")
	case used > len(sizes):
		return nil, nil, newError(OutOfRange, fmt.Sprintf("argument 'at' has indices of %d dimensions, and the tensor has %d", used, len(sizes)))
	}
	view = t.one(func(*rank) (c.Tensor, error) { return c.TensorShare(t.handle) })
	step := func(next *Tensor) {
		view.Close()
		view = next
	}
	dim, covered := 0, 0 // of the view; by indices
	for _, index := range at {
		switch v := index.(type) {
		case int:
			step(view.call(&opSelect, view, dim, v))
		case int64:
			step(view.call(&opSelect, view, dim, v))
		case span:
			if v != All {
				var from, to any
				if v.hasFrom {
					from = v.from
				}
				if v.hasTo {
					to = v.to
				}
				step(view.call(&opSlice, view, dim, from, to, v.step))
			}
			dim++
		case newDim:
			step(view.call(&opUnsqueeze, view, dim))
			dim++
		case rest:
			dim += len(sizes) - used
		case *Tensor:
			for ; covered < dim; covered++ {
				indices = append(indices, nil)
			}
			indices = append(indices, v)
			n, err := v.indexed()
			if err != nil {
				view.Close()
				return nil, nil, err
			}
			dim += n
			covered = dim
		}
	}
	if err := view.Err(); err != nil {
		view.Close()
		return nil, nil, err
	}
	return view, indices, nil
}

// indexed is of how many dimensions this tensor is an index.
func (t *Tensor) indexed() (int, error) {
	dtype, err := t.DType()
	if err != nil || dtype != Bool {
		return 1, err
	}
	sizes, err := t.Sizes()
	return len(sizes), err
}
