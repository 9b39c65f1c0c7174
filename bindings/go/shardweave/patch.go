package shardweave

import (
	"runtime"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// PatchCall is one run of a forward that [Module.Patch] is in place of, until the function that got it
// returns.
type PatchCall struct {
	// FQN is the name of the module whose forward it is, in the one that was patched.
	FQN string
	// Module is that module, open until the function returns: one that the function had from elsewhere would
	// keep it, and so itself.
	Module *Module
	// Inputs are the tensors that its forward takes; nil: one that it is not given.
	Inputs []*Tensor

	context *FunctionContext
	outputs int
}

// Forward is what would have run without the patch, on other inputs or the same, as often as wanted. An input
// may be nil, and those that are left out at the end are.
func (call *PatchCall) Forward(inputs ...*Tensor) ([]*Tensor, error) {
	if call == nil || call.context == nil {
		return nil, noThing("PatchCall")
	}
	defer runtime.KeepAlive(inputs)
	all := append(optional(inputs), call.context)
	return ask(func(r *rank) ([]*Tensor, error) {
		handles := make([]c.Tensor, len(inputs), len(inputs)+len(call.Inputs))
		for i, t := range inputs {
			if t != nil {
				handles[i] = t.handle
			}
		}
		for len(handles) < len(call.Inputs) {
			handles = append(handles, nil)
		}
		results, err := c.ContextOriginal(call.context.handle, int32(r.mode), handles, call.outputs)
		if err != nil {
			return nil, err
		}
		return r.tensors(results), nil
	}, all...)
}

// Patch lets f run in place of the forward of every module of this name in m (a pattern as in plans; "" is m),
// whoever calls it, from now on, between the inputs and outputs of a plan, which may come before or after:
//
//	err := model.Patch("model.layers.*.mlp", func(call *sw.PatchCall) ([]*sw.Tensor, error) {
//		y, err := call.Forward(call.Inputs[0]) // the library's own
//		if err != nil {
//			return nil, err
//		}
//		return []*sw.Tensor{y[0].Mul(0.5)}, nil
//	})
//
// m is the library's ([World.ModuleByKind]) or has such modules. A module that is patched already gives its
// patched forward to f. f returns as many tensors as the forward; those that it gets, and those that it makes and
// does not return, are closed when it returns. A panic in it is an error of whoever called. The same on every rank.
//
// NotFound suggests names that are nearly the same. FailedPrecondition, with nothing changed: one of them is in Go,
// or is a layer of LibTorch's inside of another module, where it is called directly (its Linear, its Embedding):
// patch what calls it.
func (m *Module) Patch(pattern string, f func(call *PatchCall) ([]*Tensor, error)) error {
	if f == nil {
		return invalid("argument 'f' is nil")
	}
	return do(func(r *rank) error {
		return c.ModulePatch(m.handle, pattern, &patch{function{rank: r}, f})
	}, m)
}

// patch is what the inner package calls.
type patch struct {
	function
	f func(*PatchCall) ([]*Tensor, error)
}

func (p *patch) RunPatch(ctx c.Context, module c.Module, fqn string, mode int32, inputs, outputs []c.Tensor) error {
	return p.call(ctx, mode, inputs, outputs, "f", func(context *FunctionContext, tensors []*Tensor) (results []*Tensor, err error) {
		var of *Module
		p.rank.atLast(func() {
			handle, failed := c.ModuleShare(module)
			of, err = newModule(p.rank, handle, failed)
		})
		if err != nil {
			return nil, err
		}
		defer func() {
			if closed := of.Close(); err == nil {
				err = closed
			}
		}()
		return p.f(&PatchCall{FQN: fqn, Module: of, Inputs: tensors, context: context, outputs: len(outputs)})
	})
}
