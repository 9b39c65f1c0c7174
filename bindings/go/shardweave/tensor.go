package shardweave

import (
	"runtime"
	"unsafe"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Tensor is plain (its data is here) or sharded (it has the global shape, and each rank of its mesh
// holds a part). One that could not be made carries the error; see [Tensor.Err].
type Tensor struct {
	handle  c.Tensor
	rank    *rank
	failure failure
	loose   *looseRef // of a tensor in no scope
}

// Place is where a tensor is made: a *World makes plain ones, a *Mesh sharded ones.
type Place interface {
	place() (*rank, c.Mesh)
}

func (w *World) place() (*rank, c.Mesh) { return w.rank, nil }
func (m *Mesh) place() (*rank, c.Mesh)  { return m.rank, m.handle }

// TensorOption is an option of factories: a [DType], [RequiresGrad], or, on a mesh, a [Spec].
type TensorOption interface {
	tensorOption(o *tensorOptions)
}

type tensorOptions struct {
	dtype        DType
	requiresGrad bool
	spec         Spec
}

type requiresGrad struct{}

func (requiresGrad) tensorOption(o *tensorOptions) { o.requiresGrad = true }
func (l *Layout) tensorOption(o *tensorOptions)    { o.spec = l }
func (o On) tensorOption(to *tensorOptions)        { to.spec = o }

// RequiresGrad makes factories make leaves that gradients are wanted of.
var RequiresGrad TensorOption = requiresGrad{}

func tensorOptionsOf(options []TensorOption) tensorOptions {
	var o tensorOptions
	for _, option := range options {
		option.tensorOption(&o)
	}
	return o
}

func create(factory int32, where Place, sizes []int64, value float64, options []TensorOption) *Tensor {
	r, mesh := where.place()
	if err := r.ready(); err != nil {
		return r.failed(err)
	}
	o := tensorOptionsOf(options)
	var layout *Layout
	var handle c.Layout
	if o.spec != nil {
		m, sharded := where.(*Mesh)
		if !sharded {
			return r.failed(invalid("a layout was given, but no mesh: pass the mesh in place of the world"))
		}
		var err error
		if layout, handle, err = layoutOn(o.spec, m); err != nil {
			return r.failed(err)
		}
	}
	t := r.result(c.TensorCreate(factory, value, sizes, int32(o.dtype), o.requiresGrad, mesh, handle))
	runtime.KeepAlive(layout)
	return t
}

// Empty makes a tensor whose elements are whatever was in its memory.
func Empty(where Place, sizes []int64, options ...TensorOption) *Tensor {
	return create(c.Empty, where, sizes, 0, options)
}

// Zeros makes a tensor of zeros.
func Zeros(where Place, sizes []int64, options ...TensorOption) *Tensor {
	return create(c.Zeros, where, sizes, 0, options)
}

// Ones makes a tensor of ones.
func Ones(where Place, sizes []int64, options ...TensorOption) *Tensor {
	return create(c.Ones, where, sizes, 0, options)
}

// Full makes a tensor of one value.
func Full(where Place, sizes []int64, value float64, options ...TensorOption) *Tensor {
	return create(c.Full, where, sizes, value, options)
}

// Rand draws uniformly from [0, 1). On a mesh element i is drawn by its global index: the same numbers
// for every layout and number of ranks ([Mesh.Seed]). Plain tensors draw from the process ([Seed]).
func Rand(where Place, sizes []int64, options ...TensorOption) *Tensor {
	return create(c.Rand, where, sizes, 0, options)
}

// Randn draws from the normal distribution; otherwise as [Rand].
func Randn(where Place, sizes []int64, options ...TensorOption) *Tensor {
	return create(c.Randn, where, sizes, 0, options)
}

// FromSlice makes a plain tensor with a copy of row-major data. Its type is that of the elements.
func FromSlice[T Number](w *World, data []T, sizes []int64, options ...TensorOption) *Tensor {
	r := w.rank
	if err := r.ready(); err != nil {
		return r.failed(err)
	}
	o, own := tensorOptionsOf(options), dtypeOf[T]()
	if o.spec != nil {
		return r.failed(invalid("FromSlice: makes plain tensors; Distribute cuts them"))
	}
	if o.dtype != 0 && o.dtype != own {
		return r.failed(invalid("FromSlice: the elements are %v, the option says %v", own, o.dtype))
	}
	return r.result(c.TensorFromData(memory(data), len(data)*own.Size(), sizes, int32(own), o.requiresGrad))
}

// FromDLPack takes over memory of another library, without a copy. managed is a
// DLManagedTensorVersioned (DLPack 1.x) whose deleter nobody else runs, whatever comes of this.
func FromDLPack(w *World, managed unsafe.Pointer) *Tensor {
	handle, err := c.TensorFromDLPack(managed)
	if closed := w.rank.ready(); closed != nil && err == nil {
		c.TensorFree(handle)
		return w.rank.failed(closed)
	}
	return w.rank.result(handle, err)
}

// ToDLPack lends the memory of a plain tensor, which does not require grad, to another library: a
// DLManagedTensorVersioned (DLPack 1.x), whose deleter that library runs.
func (t *Tensor) ToDLPack() (unsafe.Pointer, error) { return get(t, c.TensorToDLPack) }

// Err is nil, or why the tensor could not be made.
func (t *Tensor) Err() error {
	if t.failure == 0 {
		return nil
	}
	err := failures.of(t.failure)
	runtime.KeepAlive(t)
	return err
}

// Close ends the tensor. What was computed from it stays.
func (t *Tensor) Close() error {
	if t.handle == nil || t.rank.closed {
		return nil
	}
	if t.loose != nil {
		runtime.SetFinalizer(t, nil)
		t.loose.unlink()
		t.loose = nil
	}
	c.TensorFree(t.handle)
	t.handle, t.failure = nil, closed
	return nil
}

// Keep takes the tensor out of its [World.Scope], which then does not close it. It returns the tensor.
func (t *Tensor) Keep() *Tensor {
	if t.handle != nil && t.loose == nil && !t.rank.closed {
		t.rank.forget(t)
		t.rank.loosen(t)
	}
	return t
}

// use comes before the one call that a method makes of the library, and then t must not be its last
// user: what is not in use may be freed at the next use of the rank.
func (t *Tensor) use() error {
	if t.Err() != nil {
		return t.Err()
	}
	return t.rank.ready()
}

// one is what a function of the library makes of t.
func (t *Tensor) one(f func() (c.Tensor, error)) *Tensor {
	if err := t.use(); err != nil {
		return t.rank.failed(err)
	}
	result := t.rank.result(f())
	runtime.KeepAlive(t)
	return result
}

func get[T any](t *Tensor, f func(c.Tensor) (T, error)) (T, error) {
	if err := t.use(); err != nil {
		var zero T
		return zero, err
	}
	result, err := f(t.handle)
	runtime.KeepAlive(t)
	return result, t.rank.error(err)
}

// Sizes is the global shape.
func (t *Tensor) Sizes() ([]int64, error) { return get(t, c.TensorSizes) }

// Size is the global size of one dimension; a negative one counts from the end.
func (t *Tensor) Size(dim int) (int64, error) {
	sizes, err := t.Sizes()
	if err != nil {
		return 0, err
	}
	if dim < 0 {
		dim += len(sizes)
	}
	if dim < 0 || dim >= len(sizes) {
		return 0, &Error{OutOfRange, "Size: there is no such dimension of a tensor with " + itoa(len(sizes))}
	}
	return sizes[dim], nil
}

// Strides is the strides, in elements.
func (t *Tensor) Strides() ([]int64, error) { return get(t, c.TensorStrides) }

// Len is the number of elements, of all ranks.
func (t *Tensor) Len() (int64, error) { return get(t, c.TensorNumel) }

// DType is the type of the elements.
func (t *Tensor) DType() (DType, error) {
	d, err := get(t, c.TensorDType)
	return DType(d), err
}

// Device is where the data is.
func (t *Tensor) Device() (Device, error) {
	return get(t, func(handle c.Tensor) (Device, error) {
		kind, index, err := c.TensorDevice(handle)
		return Device{DeviceKind(kind), int(index)}, err
	})
}

// IsSharded says whether the tensor lies on a mesh.
func (t *Tensor) IsSharded() (bool, error) { return get(t, c.TensorIsSharded) }

// IsSame says whether both mean one tensor.
func (t *Tensor) IsSame(other *Tensor) (bool, error) {
	if other.Err() != nil {
		return false, other.Err()
	}
	same, err := get(t, func(handle c.Tensor) (bool, error) { return c.TensorIsSame(handle, other.handle) })
	runtime.KeepAlive(other)
	return same, err
}

// String tells shape, layout and mesh, or the elements of a plain tensor; or the error.
func (t *Tensor) String() string {
	text, err := get(t, c.TensorToString)
	if err != nil {
		return "Tensor(" + err.Error() + ")"
	}
	return text
}

// Picture shows which rank holds which part, in characters.
func (t *Tensor) Picture() (string, error) { return get(t, c.TensorPicture) }

// Layout is how a sharded tensor lies on its mesh.
func (t *Tensor) Layout() (*Layout, error) {
	handle, err := get(t, c.TensorLayout)
	if err != nil {
		return nil, err
	}
	return newLayout(handle, nil)
}

// Mesh is where a sharded tensor lies.
func (t *Tensor) Mesh() (*Mesh, error) {
	handle, err := get(t, c.TensorMesh)
	if err != nil {
		return nil, err
	}
	return newMesh(t.rank, handle, nil)
}

// Data copies the elements of a plain tensor out, row-major; T is their type. (Of a sharded one:
// [Tensor.Local] or [Tensor.Full].)
func Data[T Number](t *Tensor) ([]T, error) {
	if err := t.typed(dtypeOf[T]()); err != nil {
		return nil, err
	}
	n, err := t.Len()
	if err != nil {
		return nil, err
	}
	data := make([]T, n)
	return data, t.copyTo(memory(data), len(data)*dtypeOf[T]().Size())
}

// CopyFrom writes row-major data into a plain tensor; T is the type of its elements.
func CopyFrom[T Number](t *Tensor, data []T) error {
	if err := t.typed(dtypeOf[T]()); err != nil {
		return err
	}
	_, err := get(t, func(handle c.Tensor) (struct{}, error) {
		return struct{}{}, c.TensorCopyFromHost(handle, memory(data), len(data)*dtypeOf[T]().Size())
	})
	return err
}

func (t *Tensor) typed(wanted DType) error {
	got, err := t.DType()
	if err == nil && got != wanted {
		err = invalid("the elements of the tensor are %v, those of the slice %v", got, wanted)
	}
	return err
}

func (t *Tensor) copyTo(data unsafe.Pointer, bytes int) error {
	_, err := get(t, func(handle c.Tensor) (struct{}, error) {
		return struct{}{}, c.TensorCopyToHost(handle, data, bytes)
	})
	return err
}

// Source says whose data counts when a tensor is distributed; see [FromRank] and [SameEverywhere].
type Source int64

// SameEverywhere: all ranks have the same data already, and nothing is sent.
const SameEverywhere Source = -1

// FromRank is a rank of the mesh, row-major, whose data counts.
func FromRank(number int) Source { return Source(number) }

// Distribute cuts a plain tensor, of the same shape and type on every rank, as spec says; nil is
// replicated. No partial placements. The result is a leaf that requires grad if t does. Collective,
// unless the source is SameEverywhere.
func (t *Tensor) Distribute(m *Mesh, spec Spec, source Source) *Tensor {
	if t.Err() != nil {
		return t
	}
	if spec == nil {
		spec = On{}
	}
	layout, handle, err := layoutOn(spec, m)
	if err != nil {
		return t.rank.failed(err)
	}
	result := t.one(func() (c.Tensor, error) { return c.TensorDistribute(t.handle, m.handle, handle, int64(source)) })
	runtime.KeepAlive(layout)
	return result
}

// FromLocal makes a sharded tensor from every rank's part. sizes are the global ones; if they are nil
// they are worked out from the parts, and the call is collective. Parts that are not those of an even
// split, 1 + 2 rows, make a Shard a ragged one.
func FromLocal(local *Tensor, m *Mesh, spec Spec, sizes []int64) *Tensor {
	if local.Err() != nil {
		return local
	}
	if spec == nil {
		spec = On{}
	}
	layout, handle, err := layoutOn(spec, m)
	if err != nil {
		return local.rank.failed(err)
	}
	result := local.one(func() (c.Tensor, error) {
		return c.TensorFromLocal(local.handle, m.handle, handle, sizes, int32(local.rank.mode))
	})
	runtime.KeepAlive(layout)
	return result
}

// Local is this rank's part of a sharded tensor; it shares memory.
func (t *Tensor) Local() *Tensor { return t.LocalWithGrad(nil) }

// LocalWithGrad is Local, and says how the gradients of the parts lie together; nil: as the tensor,
// replicated where that is partial.
func (t *Tensor) LocalWithGrad(grad *Layout) *Tensor {
	var handle c.Layout
	if grad != nil {
		handle = grad.handle
	}
	result := t.one(func() (c.Tensor, error) { return c.TensorToLocal(t.handle, handle, int32(t.rank.mode)) })
	runtime.KeepAlive(grad)
	return result
}

// Redistribute is the same tensor in another layout; nil is replicated. Collective.
func (t *Tensor) Redistribute(spec Spec) *Tensor {
	if t.Err() != nil {
		return t
	}
	if spec == nil {
		spec = On{}
	}
	layout, given := spec.(*Layout)
	if !given { // names need the mesh
		m, err := t.Mesh()
		if err != nil {
			return t.rank.failed(err)
		}
		defer m.Close()
		if layout, err = spec.on(m); err != nil {
			return t.rank.failed(err)
		}
	}
	result := t.one(func() (c.Tensor, error) {
		return c.TensorRedistribute(t.handle, layout.handle, int32(t.rank.mode))
	})
	runtime.KeepAlive(layout)
	return result
}

// Full is the whole tensor, plain, on every rank; of a plain one itself. Collective.
func (t *Tensor) Full() *Tensor {
	return t.one(func() (c.Tensor, error) { return c.TensorFullTensor(t.handle, int32(t.rank.mode)) })
}
