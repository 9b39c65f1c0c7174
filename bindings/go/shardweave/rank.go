package shardweave

import (
	"runtime"
	"sync"
	"sync/atomic"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// rank is what a world and all that is made from it share. One goroutine uses it at a time, except
// for buried.
type rank struct {
	closed bool
	mode   GradMode
	scope  *scope                 // the innermost; nil: none is open
	loose  map[*looseRef]struct{} // tensors in no scope
	things []closer               // meshes, modules, ...

	// What the garbage collector has found. It runs beside the rank, so the rank itself frees them.
	buried      sync.Mutex
	found       []*looseRef
	foundNumber atomic.Int32
}

type closer interface{ release() }

// scope is an open World.Scope.
type scope struct {
	outer   *scope
	tensors []*Tensor
}

// looseRef is the handle of a tensor in no scope, for the time when the tensor itself is gone.
type looseRef struct {
	handle  c.Tensor
	cleanup runtime.Cleanup
}

// tensor takes the handle over.
func (r *rank) tensor(handle c.Tensor) *Tensor {
	t := &Tensor{handle: handle, rank: r}
	r.adopt(t)
	return t
}

func (r *rank) adopt(t *Tensor) {
	if s := r.scope; s != nil {
		s.tensors = append(s.tensors, t)
		return
	}
	ref := &looseRef{handle: t.handle}
	ref.cleanup = runtime.AddCleanup(t, r.bury, ref)
	r.loose[ref] = struct{}{}
	t.loose = ref
}

// result takes over the handle that comes with no error.
func (r *rank) result(handle c.Tensor, err error) *Tensor {
	if err != nil {
		return r.failed(public(err))
	}
	return r.tensor(handle)
}

func (r *rank) failed(err error) *Tensor { return &Tensor{rank: r, err: err} }

// optional is result for handles that may be nil, which gives nil.
func (r *rank) optional(handle c.Tensor, err error) (*Tensor, error) {
	if err != nil || handle == nil {
		return nil, public(err)
	}
	return r.tensor(handle), nil
}

// bury is called by the garbage collector's goroutine.
func (r *rank) bury(ref *looseRef) {
	r.buried.Lock()
	defer r.buried.Unlock()
	r.found = append(r.found, ref)
	r.foundNumber.Store(int32(len(r.found)))
}

// freeBuried frees what the garbage collector has found.
func (r *rank) freeBuried() {
	if r.foundNumber.Load() == 0 {
		return
	}
	r.buried.Lock()
	found := r.found
	r.found = nil
	r.foundNumber.Store(0)
	r.buried.Unlock()
	for _, ref := range found {
		if _, there := r.loose[ref]; there { // else the world was closed before
			delete(r.loose, ref)
			c.TensorFree(ref.handle)
		}
	}
}

// ready comes before every call.
func (r *rank) ready() error {
	if r.closed {
		return &Error{FailedPrecondition, "the world was closed"}
	}
	r.freeBuried()
	return nil
}

// own makes a thing end with the world, at the latest.
func (r *rank) own(thing closer) {
	if len(r.things) == cap(r.things) { // as many may have ended as there are: look before growing
		r.disown(nil)
	}
	r.things = append(r.things, thing)
}

func (r *rank) disown(thing closer) {
	kept := r.things[:0]
	for _, other := range r.things {
		if other != thing {
			kept = append(kept, other)
		}
	}
	clear(r.things[len(kept):])
	r.things = kept
}

func (s *scope) close() {
	handles := make([]c.Tensor, 0, len(s.tensors))
	for _, t := range s.tensors {
		if t.handle != nil {
			handles = append(handles, t.handle)
			t.handle, t.err = nil, errClosed
		}
	}
	c.TensorsFree(handles)
}

// release ends all that the rank has, but not the world.
func (r *rank) release() {
	if r.closed {
		return
	}
	for ; r.scope != nil; r.scope = r.scope.outer {
		r.scope.close()
	}
	for ref := range r.loose {
		ref.cleanup.Stop()
		c.TensorFree(ref.handle)
	}
	clear(r.loose)
	for i := len(r.things) - 1; i >= 0; i-- {
		r.things[i].release()
	}
	r.things = nil
	r.closed = true
}

// GradMode says whether operators are recorded for gradients.
type GradMode int32

// The modes of a rank; see World.With.
const (
	Grad      GradMode = c.Grad      // if an input requires grad; how a rank starts
	NoGrad    GradMode = c.NoGrad    // not
	Inference GradMode = c.Inference // not, ever: results cannot be used with Grad later
)
