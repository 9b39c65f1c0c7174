package shardweave

import (
	"runtime"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// RequiresGrad says whether gradients are wanted of the tensor.
func (t *Tensor) RequiresGrad() (bool, error) { return get(t, c.TensorRequiresGrad) }

// SetRequiresGrad says for a leaf whether gradients are wanted of it. false freezes a parameter, before or after it is
// registered and its module is sharded.
func (t *Tensor) SetRequiresGrad(wanted bool) error {
	return t.set(func(*rank) error { return c.TensorSetRequiresGrad(t.handle, wanted) })
}

// IsLeaf says whether the tensor was not computed from others that require grad.
func (t *Tensor) IsLeaf() (bool, error) { return get(t, c.TensorIsLeaf) }

// Detach is the same data without history.
func (t *Tensor) Detach() *Tensor {
	return t.one(func(*rank) (c.Tensor, error) { return c.TensorDetach(t.handle) })
}

// Grad is the gradient that Backward has left, sharded if the tensor is; nil if there is none.
func (t *Tensor) Grad() (*Tensor, error) {
	return ask(func(r *rank) (*Tensor, error) { return r.optional(c.TensorGrad(t.handle)) }, t)
}

// SetGrad replaces the gradient; nil: none.
func (t *Tensor) SetGrad(grad *Tensor) error {
	if grad == nil {
		return t.set(func(*rank) error { return c.TensorSetGrad(t.handle, nil) })
	}
	defer runtime.KeepAlive(grad)
	return t.set(func(*rank) error { return c.TensorSetGrad(t.handle, grad.handle) }, grad)
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
		if option != nil {
			option(&o)
		}
	}
	return o
}

// Backward adds to the gradients of the leaves that the tensor depends on. Collective if it is sharded.
func (t *Tensor) Backward(options ...GradOption) error {
	o := gradOptionsOf(options)
	if len(o.gradients) > 1 {
		return invalid("there is one output, but %d gradients", len(o.gradients))
	}
	if o.lazy {
		return invalid("AllowUnused is an option of Gradients")
	}
	defer runtime.KeepAlive(o.gradients)
	return t.set(func(*rank) error {
		var gradient c.Tensor
		if len(o.gradients) == 1 && o.gradients[0] != nil {
			gradient = o.gradients[0].handle
		}
		return c.TensorBackward(t.handle, gradient, o.retain, o.create)
	}, optional(o.gradients)...)
}

// Gradients is the gradients of the outputs by the inputs. Collective if they are sharded.
func Gradients(outputs, inputs []*Tensor, options ...GradOption) ([]*Tensor, error) {
	o := gradOptionsOf(options)
	if o.gradients != nil && len(o.gradients) != len(outputs) {
		return nil, invalid("there are %d outputs, but %d gradients", len(outputs), len(o.gradients))
	}
	all, err := required(outputs, inputs)
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(all)
	defer runtime.KeepAlive(o.gradients)
	return ask(func(r *rank) ([]*Tensor, error) {
		handles, err := c.Gradients(handlesOf(outputs), handlesOf(inputs), handlesOf(o.gradients), o.retain, o.create, o.lazy)
		if err != nil {
			return nil, err
		}
		return r.tensors(handles), nil
	}, append(all, optional(o.gradients)...)...)
}

// required is the tensors for begin; there is one at least.
func required(lists ...[]*Tensor) ([]used, error) {
	var all []used
	for _, list := range lists {
		for _, t := range list {
			all = append(all, t)
		}
	}
	if len(all) == 0 {
		return nil, invalid("there are no tensors")
	}
	return all, nil
}

// optional is the tensors for begin, without those that are nil.
func optional(tensors []*Tensor) []used {
	var all []used
	for _, t := range tensors {
		if t != nil {
			all = append(all, t)
		}
	}
	return all
}

// optional is a tensor for a handle that may be nil, which gives nil.
func (r *rank) optional(handle c.Tensor, err error) (*Tensor, error) {
	if err != nil || handle == nil {
		return nil, err
	}
	return r.tensor(handle), nil
}

// handlesOf has nil for nil. In a call.
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
