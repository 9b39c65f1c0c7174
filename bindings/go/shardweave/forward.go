package shardweave

import (
	"runtime"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Forward is where a plan meets a module without a weight of its own, a block or an attention: its forward,
// which is Go code, runs by Run. See [Module.Forward].
type Forward struct {
	_ noCopy
	*thing[c.Forward]
}

func (f *Forward) home() (*rank, error) {
	if f == nil || f.thing == nil {
		return nil, noThing("Forward")
	}
	return f.rank, nil
}

// Forward is the forward of the module of this name inside of the module; "" is the module itself. Asking
// for it, before [Module.Distribute], says that it runs by [Forward.Run]: plans may speak of its inputs and
// outputs.
func (m *Module) Forward(fqn string) (*Forward, error) {
	return ask(func(r *rank) (*Forward, error) {
		handle, err := c.ModuleForward(m.handle, fqn)
		if err != nil {
			return nil, err
		}
		return &Forward{thing: own(r, "forward", handle, c.ForwardFree)}, nil
	}, m)
}

// Close ends the Forward; what the plan says of the module stays.
func (f *Forward) Close() error {
	if f == nil {
		return nil
	}
	return f.thing.close()
}

// Run calls body with the inputs as the plan wants them, and returns its output as the plan wants that;
// meanwhile traces and errors say that the module runs. Before the module is distributed, or where the plan
// says nothing of it, they are as they come. Collective as what the plan says is.
func (f *Forward) Run(body func(inputs []*Tensor) *Tensor, inputs ...*Tensor) *Tensor {
	var all func([]*Tensor) ([]*Tensor, error)
	if body != nil {
		all = func(inputs []*Tensor) ([]*Tensor, error) { return []*Tensor{body(inputs)}, nil }
	}
	outputs, err := f.RunSeveral(all, inputs...)
	if err != nil {
		r, _ := f.home()
		return orNowhere(r).failed(err)
	}
	return outputs[0]
}

// RunSeveral is Run for a forward with several outputs.
func (f *Forward) RunSeveral(body func(inputs []*Tensor) ([]*Tensor, error), inputs ...*Tensor) (outputs []*Tensor, err error) {
	if body == nil {
		return nil, noBody()
	}
	defer runtime.KeepAlive(inputs)
	var scope c.Scope
	laidOut, err := ask(func(r *rank) ([]*Tensor, error) {
		handles, begun, err := c.ForwardBegin(f.handle, int32(r.mode), handlesOf(inputs))
		if err != nil {
			return nil, err
		}
		scope = begun
		return r.tensors(handles), nil
	}, f.and(inputs)...)
	if err != nil {
		return nil, err
	}
	defer f.rank.finallyOr(&err, func() { c.ScopeFree(scope) })
	results, err := body(laidOut)
	if err != nil {
		return nil, err
	}
	defer runtime.KeepAlive(results)
	return ask(func(r *rank) ([]*Tensor, error) {
		handles, err := c.ForwardEnd(scope, handlesOf(results))
		if err != nil {
			return nil, err
		}
		return r.tensors(handles), nil
	}, f.and(results)...)
}

// and is what a call with these tensors uses.
func (f *Forward) and(tensors []*Tensor) []used {
	all := []used{f}
	for _, t := range tensors {
		all = append(all, t)
	}
	return all
}
