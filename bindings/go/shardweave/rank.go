package shardweave

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// rank is what a world and all that is made from it share. One goroutine uses it at a time, except
// for buried.
type rank struct {
	ctx    context.Context // of the world
	closed bool
	mode   GradMode
	scope  *scope   // the innermost; nil: none is open
	loose  looseRef // tensors in no scope
	things []closer // meshes, modules, ...

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

// forget takes a tensor out of the scope in which it was made.
func (r *rank) forget(t *Tensor) {
	for s := r.scope; s != nil; s = s.outer {
		for i := len(s.tensors) - 1; i >= 0; i-- {
			if s.tensors[i] == t {
				s.tensors[i] = nil
				return
			}
		}
	}
}

// looseRef is the handle of a tensor in no scope, for the time when the tensor itself is gone. They are a
// ring, which begins in the rank.
type looseRef struct {
	handle         c.Tensor
	previous, next *looseRef // nil: in no ring
}

func (ref *looseRef) unlink() {
	ref.previous.next, ref.next.previous = ref.next, ref.previous
	ref.previous, ref.next = nil, nil
}

// tensor takes the handle over.
func (r *rank) tensor(handle c.Tensor) *Tensor {
	t := &Tensor{handle: handle, rank: r}
	r.adopt(t)
	return t
}

func (r *rank) adopt(t *Tensor) {
	if s := r.scope; s != nil {
		if len(s.tensors) == cap(s.tensors) { // as many may have ended as there are: look before growing
			s.tensors = alive(s.tensors)
		}
		s.tensors = append(s.tensors, t)
		return
	}
	r.loosen(t)
}

// alive removes tensors that were kept or closed.
func alive(tensors []*Tensor) []*Tensor {
	kept := tensors[:0]
	for _, t := range tensors {
		if t != nil && t.handle != nil {
			kept = append(kept, t)
		}
	}
	for i := len(kept); i < len(tensors); i++ {
		tensors[i] = nil
	}
	return kept
}

func (r *rank) loosen(t *Tensor) {
	first := &r.loose
	t.loose = &looseRef{t.handle, first, first.next}
	first.next.previous, first.next = t.loose, t.loose
	runtime.SetFinalizer(t, (*Tensor).bury)
}

// result takes over the handle that comes with no error.
func (r *rank) result(handle c.Tensor, err error) *Tensor {
	if err != nil {
		return r.failed(r.error(err))
	}
	return r.tensor(handle)
}

// error is an error of the inner package, as the user gets it.
func (r *rank) error(err error) error { return because(r.ctx, public(err)) }

func (r *rank) failed(err error) *Tensor {
	t := &Tensor{rank: r, failure: failures.add(err)}
	runtime.SetFinalizer(t, func(t *Tensor) { failures.remove(t.failure) })
	return t
}

// optional is result for handles that may be nil, which gives nil.
func (r *rank) optional(handle c.Tensor, err error) (*Tensor, error) {
	if err != nil || handle == nil {
		return nil, r.error(err)
	}
	return r.tensor(handle), nil
}

// bury is called by the garbage collector's goroutine.
func (t *Tensor) bury() {
	r := t.rank
	r.buried.Lock()
	defer r.buried.Unlock()
	r.found = append(r.found, t.loose)
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
		if ref.next != nil { // else the world was closed before
			ref.unlink()
			c.TensorFree(ref.handle)
		}
	}
}

// ready comes before every call.
func (r *rank) ready() error {
	if r.closed {
		return errWorldClosed
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
	for i := len(kept); i < len(r.things); i++ {
		r.things[i] = nil
	}
	r.things = kept
}

func (s *scope) close() {
	handles := make([]c.Tensor, 0, len(s.tensors))
	for _, t := range s.tensors {
		if t != nil && t.handle != nil { // else it was kept, or closed
			handles = append(handles, t.handle)
			t.handle, t.failure = nil, closed
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
	for r.loose.next != &r.loose {
		ref := r.loose.next
		ref.unlink()
		c.TensorFree(ref.handle)
	}
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

// nowhere is the rank of tensors that could not be made because nothing says whose they are.
var nowhere = &rank{ctx: context.Background(), closed: true}

func newRank(ctx context.Context) *rank {
	r := &rank{ctx: ctx}
	r.loose.previous, r.loose.next = &r.loose, &r.loose
	return r
}
