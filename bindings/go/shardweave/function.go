package shardweave

import (
	"runtime"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Function is a function with a derivative of its own; see [Apply]. Tensors that its methods get, and
// those that they make and do not return, are closed when they return. A panic in them is an error of
// whoever called.
type Function interface {
	// Forward is called once, and returns the outputs.
	Forward(ctx *FunctionContext, inputs []*Tensor) ([]*Tensor, error)
	// Backward is called whenever gradients pass, and returns a gradient for each input, or nil. A
	// gradient of an output that nothing depends on is nil.
	Backward(ctx *FunctionContext, gradOutputs []*Tensor) ([]*Tensor, error)
}

// FunctionContext is what one call of a Function remembers.
type FunctionContext struct {
	rank   *rank
	handle c.Context
}

// Save keeps tensors for Backward (inputs, outputs or others), in place of what was saved before. For
// Forward.
func (ctx *FunctionContext) Save(tensors ...*Tensor) error {
	for _, t := range tensors {
		if t.Err() != nil {
			return t.Err()
		}
	}
	err := c.ContextSave(ctx.handle, handlesOf(tensors))
	runtime.KeepAlive(tensors)
	return public(err)
}

// Saved is what Forward has saved. For Backward.
func (ctx *FunctionContext) Saved(index int) *Tensor {
	return ctx.rank.result(c.ContextSaved(ctx.handle, index))
}

// Apply calls the function on the inputs; it has so many outputs. Errors and graphs call it by name.
func Apply(f Function, name string, outputs int, inputs ...*Tensor) ([]*Tensor, error) {
	r, err := rankOf("Apply", inputs)
	if err != nil {
		return nil, err
	}
	handles, err := c.FunctionApply(&function{r, f}, name, int32(r.mode), handlesOf(inputs), outputs)
	runtime.KeepAlive(inputs)
	if err != nil {
		return nil, r.error(err)
	}
	return r.tensors(handles), nil
}

// function is what the inner package calls.
type function struct {
	rank *rank
	f    Function
}

func (f *function) Dropped() {}

func (f *function) Forward(ctx c.Context, mode int32, inputs, outputs []c.Tensor) error {
	return f.call(ctx, mode, inputs, outputs, "Forward", f.f.Forward)
}

func (f *function) Backward(ctx c.Context, mode int32, gradOutputs, gradInputs []c.Tensor) error {
	return f.call(ctx, mode, gradOutputs, gradInputs, "Backward", f.f.Backward)
}

func (f *function) call(ctx c.Context, mode int32, in, out []c.Tensor, what string,
	body func(*FunctionContext, []*Tensor) ([]*Tensor, error)) (err error) {
	r := f.rank
	s := &scope{outer: r.scope}
	before := r.mode
	r.scope, r.mode = s, GradMode(mode)
	defer func() {
		r.scope, r.mode = s.outer, before
		s.close()
	}()
	inputs := make([]*Tensor, len(in))
	for i, borrowed := range in {
		if borrowed == nil {
			continue
		}
		handle, err := c.TensorShare(borrowed)
		if err != nil {
			return err
		}
		inputs[i] = r.tensor(handle)
	}
	results, err := body(&FunctionContext{r, ctx}, inputs)
	if err != nil {
		return private(err)
	}
	if len(results) != len(out) {
		return private(invalid("%s has returned %d tensors, wanted %d", what, len(results), len(out)))
	}
	for i, t := range results {
		if t == nil {
			continue
		}
		if t.Err() != nil {
			return private(t.Err())
		}
		if out[i], err = c.TensorShare(t.handle); err != nil {
			return err
		}
	}
	runtime.KeepAlive(results)
	return nil
}
