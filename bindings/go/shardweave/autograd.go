package shardweave

import (
	"runtime"
	"strconv"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

func itoa(n int) string { return strconv.Itoa(n) }

// RequiresGrad says whether gradients are wanted of the tensor.
func (t *Tensor) RequiresGrad() (bool, error) { return get(t, c.TensorRequiresGrad) }

// SetRequiresGrad says for a leaf whether gradients are wanted of it.
func (t *Tensor) SetRequiresGrad(wanted bool) error {
	_, err := get(t, func(handle c.Tensor) (struct{}, error) {
		return struct{}{}, c.TensorSetRequiresGrad(handle, wanted)
	})
	return err
}

// IsLeaf says whether the tensor was not computed from others that require grad.
func (t *Tensor) IsLeaf() (bool, error) { return get(t, c.TensorIsLeaf) }

// Detach is the same data without history.
func (t *Tensor) Detach() *Tensor {
	return t.one(func() (c.Tensor, error) { return c.TensorDetach(t.handle) })
}

// Grad is the gradient that Backward has left, sharded if the tensor is; nil if there is none.
func (t *Tensor) Grad() (*Tensor, error) {
	handle, err := get(t, c.TensorGrad)
	return t.rank.optional(handle, err)
}

// SetGrad replaces the gradient; nil: none.
func (t *Tensor) SetGrad(grad *Tensor) error {
	var handle c.Tensor
	if grad != nil {
		if grad.Err() != nil {
			return grad.Err()
		}
		handle = grad.handle
	}
	_, err := get(t, func(to c.Tensor) (struct{}, error) { return struct{}{}, c.TensorSetGrad(to, handle) })
	runtime.KeepAlive(grad)
	return err
}

// GradOption is an option of Backward and Gradients.
type GradOption func(*gradOptions)

type gradOptions struct {
	gradients            []*Tensor
	retain, create, lazy bool
}

// RetainGraph keeps the graph for another Backward through it.
func RetainGraph() GradOption { return func(o *gradOptions) { o.retain = true } }

// CreateGraph makes the gradients differentiable. It implies RetainGraph.
func CreateGraph() GradOption { return func(o *gradOptions) { o.create = true } }

// AllowUnused lets Gradients give nil for an input that the outputs do not depend on.
func AllowUnused() GradOption { return func(o *gradOptions) { o.lazy = true } }

// WithGradients is where the differentiation starts: a gradient for each output, nil for 1. Without,
// the outputs have one element each.
func WithGradients(gradients ...*Tensor) GradOption {
	return func(o *gradOptions) { o.gradients = gradients }
}

func gradOptionsOf(options []GradOption) gradOptions {
	var o gradOptions
	for _, option := range options {
		option(&o)
	}
	return o
}

// Backward adds to the gradients of the leaves that the tensor depends on. Collective if it is sharded.
func (t *Tensor) Backward(options ...GradOption) error {
	if err := t.use(); err != nil {
		return err
	}
	o := gradOptionsOf(options)
	if len(o.gradients) > 1 {
		return invalid("Backward: there is one output, but %d gradients", len(o.gradients))
	}
	if o.lazy {
		return invalid("Backward: AllowUnused is an option of Gradients")
	}
	var gradient c.Tensor
	if len(o.gradients) == 1 && o.gradients[0] != nil {
		if o.gradients[0].Err() != nil {
			return o.gradients[0].Err()
		}
		gradient = o.gradients[0].handle
	}
	err := c.TensorBackward(t.handle, gradient, o.retain, o.create)
	runtime.KeepAlive(t)
	runtime.KeepAlive(o.gradients)
	return t.rank.error(err)
}

// Gradients is the gradients of the outputs by the inputs. Collective if they are sharded.
func Gradients(outputs, inputs []*Tensor, options ...GradOption) ([]*Tensor, error) {
	o := gradOptionsOf(options)
	if o.gradients != nil && len(o.gradients) != len(outputs) {
		return nil, invalid("Gradients: there are %d outputs, but %d gradients", len(outputs), len(o.gradients))
	}
	r, err := rankOf("Gradients", outputs, inputs, o.gradients)
	if err != nil {
		return nil, err
	}
	handles, err := c.Gradients(handlesOf(outputs), handlesOf(inputs), handlesOf(o.gradients), o.retain, o.create, o.lazy)
	runtime.KeepAlive(outputs)
	runtime.KeepAlive(inputs)
	runtime.KeepAlive(o.gradients)
	if err != nil {
		return nil, r.error(err)
	}
	return r.tensors(handles), nil
}

// rankOf is whose the tensors are; nil ones are skipped.
func rankOf(what string, lists ...[]*Tensor) (*rank, error) {
	var r *rank
	for _, list := range lists {
		for _, t := range list {
			if t == nil {
				continue
			}
			if t.Err() != nil {
				return nil, t.Err()
			}
			if r == nil {
				r = t.rank
			}
			if t.rank != r {
				return nil, errOtherRank
			}
		}
	}
	if r == nil {
		return nil, invalid("%s: there are no tensors", what)
	}
	return r, r.ready()
}

// handlesOf has nil for nil.
func handlesOf(tensors []*Tensor) []c.Tensor {
	if tensors == nil {
		return nil
	}
	handles := make([]c.Tensor, len(tensors))
	for i, t := range tensors {
		if t != nil {
			handles[i] = t.handle
		}
	}
	return handles
}

// tensors takes the handles over; those that are nil give nil.
func (r *rank) tensors(handles []c.Tensor) []*Tensor {
	tensors := make([]*Tensor, len(handles))
	for i, handle := range handles {
		if handle != nil {
			tensors[i] = r.tensor(handle)
		}
	}
	return tensors
}
