package shardweave

import (
	"fmt"
	"runtime"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Function is a function with a derivative of its own; see [Apply]. Tensors that its methods get, and
// those that they make and do not return, are closed when they return. A panic in them is an error of
// whoever called. So is an error that they return: an *[Error] that tells it, with its [Code] if it has one and else
// [Unknown], and unwraps to it, for errors.Is and errors.As.
//
// As every function that the library calls, they return an error or panic: runtime.Goexit (testing's FailNow and
// Fatal) would leave the library's own frames without their destructors, and ends the process.
type Function interface {
	// Forward is called once, and returns the outputs.
	Forward(ctx *FunctionContext, inputs []*Tensor) ([]*Tensor, error)
	// Backward is called whenever gradients pass, and returns a gradient for each input, or nil. A
	// gradient of an output that nothing depends on is nil.
	Backward(ctx *FunctionContext, gradOutputs []*Tensor) ([]*Tensor, error)
}

// FunctionContext is what one call of a Function remembers, until that call of it returns.
type FunctionContext struct {
	_ noCopy
	*functionContext
}

// functionContext is what a FunctionContext, and whoever copied it, means.
type functionContext struct {
	rank   *rank
	handle c.Context // nil: the call has returned
}

func (ctx *FunctionContext) home() (*rank, error) {
	if ctx == nil || ctx.functionContext == nil {
		return nil, noThing("FunctionContext")
	}
	return ctx.rank, nil
}

func (ctx *functionContext) alive() error {
	if ctx.handle == nil {
		return notNow("the call of the function has returned, and its FunctionContext ended with it")
	}
	return nil
}

// Save keeps tensors for Backward (inputs, outputs or others), in place of what was saved before. For
// Forward.
func (ctx *FunctionContext) Save(tensors ...*Tensor) error {
	all := []used{ctx}
	for _, t := range tensors {
		all = append(all, t)
	}
	defer runtime.KeepAlive(tensors)
	return do(func(*rank) error { return c.ContextSave(ctx.handle, handlesOf(tensors)) }, all...)
}

// Saved is what Forward has saved. For Backward.
func (ctx *FunctionContext) Saved(index int) *Tensor {
	r, err := begin(ctx)
	if err != nil {
		return r.failed(err)
	}
	defer r.leave()
	return r.result(c.ContextSaved(ctx.handle, index))
}

const maxOutputs = 1 << 16 // more cannot be meant

// Apply calls the function on the inputs; it has so many outputs. Errors and graphs call it by name.
func Apply(f Function, name string, outputs int, inputs ...*Tensor) ([]*Tensor, error) {
	if f == nil {
		return nil, invalid("argument 'f' is nil")
	}
	if outputs < 0 || outputs > maxOutputs {
		return nil, invalid("argument 'outputs' is %d; wanted 0 to %d", outputs, maxOutputs)
	}
	all, err := required(inputs)
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(inputs)
	return ask(func(r *rank) ([]*Tensor, error) {
		handles, err := c.FunctionApply(&function{r, f}, name, int32(r.mode), handlesOf(inputs), outputs)
		if err != nil {
			return nil, err
		}
		return r.tensors(handles), nil
	}, all...)
}

// Checkpoint is activation checkpointing: it calls f on the inputs and keeps nothing of what f computes in
// between; Backward calls f a second time, with the same inputs and the same random numbers of their meshes.
// f must compute the same then. Gradients of what f uses besides its inputs are added to its leaves, so
// Backward gives them and Gradients does not; CreateGraph through it is refused. Tensors that f gets, and
// those that it makes and does not return, are closed when it returns. A panic in it is an error of whoever
// called; so is the error that its result carries, as of a [Function]. Collective as f is, both times.
func Checkpoint(f func(inputs []*Tensor) *Tensor, inputs ...*Tensor) *Tensor {
	var all func([]*Tensor) ([]*Tensor, error)
	if f != nil {
		all = func(inputs []*Tensor) ([]*Tensor, error) { return []*Tensor{f(inputs)}, nil }
	}
	outputs, err := CheckpointSeveral(all, 1, inputs...)
	if err != nil {
		r := nowhere
		if len(inputs) > 0 {
			home, _ := inputs[0].home()
			r = orNowhere(home)
		}
		return r.failed(err)
	}
	return outputs[0]
}

// CheckpointSeveral is Checkpoint for a function with so many outputs.
func CheckpointSeveral(f func(inputs []*Tensor) ([]*Tensor, error), outputs int, inputs ...*Tensor) ([]*Tensor, error) {
	if f == nil {
		return nil, invalid("argument 'f' is nil")
	}
	if outputs < 0 || outputs > maxOutputs {
		return nil, invalid("argument 'outputs' is %d; wanted 0 to %d", outputs, maxOutputs)
	}
	all, err := required(inputs)
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(inputs)
	return ask(func(r *rank) ([]*Tensor, error) {
		handles, err := c.Checkpoint(&segment{function{rank: r}, f}, "f", int32(r.mode), handlesOf(inputs), outputs)
		if err != nil {
			return nil, err
		}
		return r.tensors(handles), nil
	}, all...)
}

// segment is what the inner package calls of a checkpoint.
type segment struct {
	function
	f func([]*Tensor) ([]*Tensor, error)
}

func (s *segment) Run(mode int32, inputs, outputs []c.Tensor) error {
	return s.call(nil, mode, inputs, outputs, "f",
		func(_ *FunctionContext, inputs []*Tensor) ([]*Tensor, error) { return s.f(inputs) })
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
	body func(*FunctionContext, []*Tensor) ([]*Tensor, error)) error {
	r := f.rank
	handles := make([]c.Tensor, len(in))
	for i, borrowed := range in {
		if borrowed == nil {
			continue
		}
		handle, err := c.TensorShare(borrowed)
		if err != nil {
			c.TensorsFree(handles)
			return err
		}
		handles[i] = handle
	}
	context := &FunctionContext{functionContext: &functionContext{r, ctx}}
	return private(r.callback(GradMode(mode), func() error {
		var inputs []*Tensor
		r.atLast(func() { inputs = r.tensors(handles) })
		defer r.atLast(func() { context.handle = nil })
		results, err := body(context, inputs)
		if err != nil {
			return err
		}
		if len(results) != len(out) {
			return &Error{Code: InvalidArgument, Message: fmt.Sprintf("%s has returned %d tensors, wanted %d", what, len(results), len(out))}
		}
		defer runtime.KeepAlive(results)
		if len(optional(results)) == 0 {
			return nil
		}
		return do(func(*rank) error {
			for i, t := range results {
				if t == nil {
					continue
				}
				if t.rank != r {
					return otherRank(r, t.rank)
				}
				var err error
				if out[i], err = c.TensorShare(t.handle); err != nil {
					return err
				}
			}
			return nil
		}, optional(results)...)
	}))
}
