package shardweave

// Here is all that an operator passes through, from its method to Close of its result, in this order. One
// file, because the linker puts the functions of a file side by side: in few pages. A larger operator of LibTorch
// runs through more pages of code than the processor knows the addresses of, and then each more, of Go or C,
// costs it several nanoseconds.

import (
	"runtime"
	"sync"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// builtin is an operator that a method calls.
type builtin struct {
	name   string
	once   sync.Once
	handle c.Op
	err    error
}

func (b *builtin) find() (c.Op, error) {
	b.once.Do(func() {
		var op *Op
		if op, b.err = FindOp(b.name); b.err == nil {
			b.handle, b.err = op.permanent()
		}
	})
	return b.handle, b.err
}

// binary takes a tensor or a number on the right.
func (t *Tensor) binary(tensor, scalar *builtin, other any) *Tensor {
	if u, is := other.(*Tensor); is {
		return t.call(tensor, t, u)
	}
	return t.call(scalar, t, other)
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

func (t *Tensor) home() (*rank, error) {
	if t == nil || t.value == nil {
		return nowhere, noThing("Tensor")
	}
	if t.failure != 0 {
		err := failures.of(t.failure)
		runtime.KeepAlive(t)
		return t.rank, err
	}
	return t.rank, nil
}

// one calls an operator with one tensor as its result. Nothing of args escapes, so that callers have
// them on their stacks.
func (r *rank) one(op c.Op, args []any) *Tensor {
	if err := r.enter(); err != nil {
		for _, arg := range args { // what they carry came before
			if t, is := arg.(*Tensor); is && t != nil && t.value != nil && t.failure != 0 {
				return r.failed(t.Err())
			}
		}
		return r.failed(err)
	}
	t := r.oneInCall(op, args)
	r.leave()
	return t
}

func (r *rank) oneInCall(op c.Op, args []any) *Tensor {
	call, err := r.arguments(args)
	if err != nil {
		return r.failed(err)
	}
	err = call.Do(op, int32(r.mode), r.scope == nil)
	var t *Tensor
	switch {
	case err != nil:
		t = r.failed(r.error(err))
	case call.NumResults() != 1 || call.Kind(0) != c.ValueTensor:
		t = r.failed(invalid("the operator's result is not one tensor: use Op.Call"))
	default:
		t = r.tensorOf(call.TakeTensor(0), call.Bytes())
	}
	r.done(call)
	return t
}

// enter begins a call.
func (r *rank) enter() error {
	if !r.busy.CompareAndSwap(false, true) {
		return errBusy(r)
	}
	if r.closed.Load() {
		r.leave()
		return errWorldClosed()
	}
	if r.graves.number.Load() != 0 {
		r.freeBuried()
	}
	if r.owedCalls.Load() != 0 {
		r.pay()
	}
	if len(r.traced) > 0 {
		r.sayWhere()
	}
	return nil
}

// arguments is a call with these arguments. In a call of the rank.
func (r *rank) arguments(args []any) (*c.Call, error) {
	call := r.newCall()
	for _, arg := range args {
		err := error(nil)
		if call.NumNames() > 0 {
			err = isNamed(arg)
		}
		if err == nil {
			err = r.add(call, arg)
		}
		if err != nil {
			r.done(call)
			return nil, err
		}
	}
	return call, nil
}

// newCall is for one call of an operator, until r.done. In a call.
func (r *rank) newCall() *c.Call {
	call := r.spare
	if call == nil { // it is the first, or is in use, and a function of the host runs in it
		return c.NewCall()
	}
	r.spare = nil
	return call
}

// add adds what is given most; addRare the rest.
func (r *rank) add(call *c.Call, arg any) error {
	switch v := arg.(type) {
	case *Tensor:
		if v == nil {
			call.AddNone()
			break
		}
		handle, err := r.handle(v)
		if err != nil {
			return err
		}
		call.AddTensor(handle)
	case int:
		call.AddInt(int64(v))
	case float64:
		call.AddFloat(v)
	case bool:
		call.AddBool(v)
	case []int64:
		call.AddInts(v...)
	case []int:
		wide := make([]int64, 0, 8)
		for _, number := range v {
			wide = append(wide, int64(number))
		}
		call.AddInts(wide...)
	case []*Tensor:
		handles := make([]c.Tensor, 0, 8)
		for _, t := range v {
			if t == nil {
				handles = append(handles, nil)
				continue
			}
			handle, err := r.handle(t)
			if err != nil {
				return err
			}
			handles = append(handles, handle)
		}
		call.AddTensors(handles...)
	case nil:
		call.AddNone()
	default:
		return r.addRare(call, arg)
	}
	return nil
}

// handle is for begin in calls of operators, whose arguments are of any kind. In a call.
func (r *rank) handle(t *Tensor) (c.Tensor, error) {
	if t.value == nil {
		return nil, noThing("Tensor")
	}
	if t.failure != 0 {
		return nil, t.Err()
	}
	if t.rank != r {
		return nil, otherRank(r, t.rank)
	}
	return t.value.handle, t.alive()
}

// tensorOf is tensor, and told what this rank holds of it, which only tensors in no scope are asked for.
func (r *rank) tensorOf(handle c.Tensor, bytes int64) *Tensor {
	made := new(struct { // one allocation
		tensor Tensor
		value  value
	})
	v := &made.value
	made.tensor.value = v
	v.handle = handle
	v.rank = r
	if s := r.scope; s == nil {
		r.loosen(v, bytes)
	} else {
		if len(s.tensors) == cap(s.tensors) { // as many may have ended as there are: look before growing
			s.tensors = stillAlive(s.tensors)
		}
		s.tensors = append(s.tensors, v)
	}
	return &made.tensor
}

// loosen makes a tensor, of which this rank holds so much, one in no scope.
func (r *rank) loosen(v *value, bytes int64) {
	s := r.nextSentry()
	v.sentry = s
	r.loose[s.slot] = looseTensor{v.handle, bytes}
	r.looseBytes += bytes
	if r.looseBytes > r.collectAt {
		r.collect()
	}
}

// nextSentry is the sentry of an empty slot.
func (r *rank) nextSentry() *sentry {
	if last := len(r.idle) - 1; last >= 0 {
		s := r.idle[last]
		r.idle[last] = nil // or it would be found never
		r.idle = r.idle[:last]
		return s
	}
	return r.newSentry()
}

// done frees what was not taken.
func (r *rank) done(call *c.Call) {
	call.Clear()
	r.spare = call
}

// leave ends it.
func (r *rank) leave() {
	if r.untidy {
		r.tidy()
	}
	r.busy.Store(false)
}

// Close ends the tensor. What was computed from it stays.
func (t *Tensor) Close() error {
	if t == nil || t.value == nil || t.failure != 0 {
		return nil
	}
	v := t.value
	r := v.rank
	if entered, err := r.enterIfOpen(); !entered {
		return err
	}
	if v.alive() == nil {
		if v.sentry != nil {
			r.takeFrom(v)
		}
		if r.callbacks > 0 {
			r.late = append(r.late, v.handle)
			r.untidy = true
		} else {
			c.TensorFree(v.handle)
		}
		v.end()
	}
	r.leave()
	return nil
}

// enterIfOpen begins a call; not if the world was closed, or another goroutine is in a call.
func (r *rank) enterIfOpen() (entered bool, err error) {
	if r == nil || r.closed.Load() {
		return false, nil
	}
	if err := r.enter(); err != nil {
		if r.closed.Load() {
			return false, nil
		}
		return false, err
	}
	return true, nil
}

func (v *value) alive() error {
	if v.closed.Load() {
		return errTensorClosed()
	}
	return nil
}

// takeFrom takes the handle of a tensor in no scope out of its slot.
func (r *rank) takeFrom(v *value) {
	r.takeLoose(v.sentry.slot)
	r.idle = append(r.idle, v.sentry)
	v.sentry = nil
}

// takeLoose empties a slot.
func (r *rank) takeLoose(slot int) c.Tensor {
	loose := r.loose[slot]
	r.loose[slot] = looseTensor{}
	r.looseBytes -= loose.bytes
	return loose.handle
}

// end is when the handle goes.
func (v *value) end() {
	v.handle = nil
	v.closed.Store(true)
}
