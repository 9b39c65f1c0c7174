package shardweave

import (
	"fmt"
	"io"
	"runtime"
	"sync/atomic"
	"unsafe"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Tensor is plain (its data is here) or sharded (it has the global shape, and each rank of its mesh
// holds a part). One that could not be made carries the error; see [Tensor.Err]. It is used by pointer.
type Tensor struct {
	_ noCopy
	*value
}

// value is what a Tensor, and whoever copied it, means.
type value struct {
	handle  c.Tensor
	rank    *rank
	failure failure // why it could not be made
	sentry  *sentry // nil: it was made in a scope, or was closed
	closed  atomic.Bool
}

// Place is where a tensor is made: a *World makes plain ones, a *Mesh sharded ones.
type Place interface {
	used
	mesh() *Mesh
}

func (w *World) mesh() *Mesh { return nil }
func (m *Mesh) mesh() *Mesh  { return m }

// TensorOption is an option of factories: a [DType], a [Device], [RequiresGrad], or, on a mesh, a [Spec].
type TensorOption interface {
	tensorOption(o *tensorOptions)
}

type tensorOptions struct {
	dtype        DType
	requiresGrad bool
	device       Device
	spec         Spec
}

type requiresGrad struct{}

func (requiresGrad) tensorOption(o *tensorOptions) { o.requiresGrad = true }
func (l *Layout) tensorOption(o *tensorOptions)    { o.spec = l }
func (o On) tensorOption(to *tensorOptions)        { to.spec = o }

// RequiresGrad makes factories make leaves that gradients are wanted of.
var RequiresGrad TensorOption = requiresGrad{}

func tensorOptionsOf(options []TensorOption) (tensorOptions, error) {
	var o tensorOptions
	for _, option := range options {
		if option == nil {
			return o, invalid("an option is nil")
		}
		option.tensorOption(&o)
	}
	return o, int32s(o.device.Index)
}

func create(factory int32, where Place, sizes []int64, value float64, options []TensorOption) *Tensor {
	r, err := begin(where)
	if err != nil {
		return r.failed(err)
	}
	defer r.leave()
	o, err := tensorOptionsOf(options)
	if err != nil {
		return r.failed(err)
	}
	m := where.mesh()
	var mesh c.Mesh
	var handle c.Layout
	if m != nil {
		mesh = m.handle
		if handle, err = r.layoutOn(o.spec, m); err != nil {
			return r.failed(err)
		}
	} else if o.spec != nil {
		return r.failed(invalid("a layout was given, but no mesh: pass the mesh in place of the world"))
	}
	return r.result(c.TensorCreate(factory, value, sizes, int32(o.dtype), o.requiresGrad, o.device.inner(), mesh, handle))
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

// Scalar makes a plain tensor of one element and no dimensions.
func Scalar[T Number](w *World, value T, options ...TensorOption) *Tensor {
	return FromSlice(w, []T{value}, nil, options...)
}

// FromSlice makes a plain tensor with a copy of row-major data. Its type is that of the elements, or, of floating
// point numbers, another such among the options, to which they are rounded: FromSlice(w, []float32{...}, sizes, BF16).
func FromSlice[T Number](w *World, data []T, sizes []int64, options ...TensorOption) *Tensor {
	r, err := begin(w)
	if err != nil {
		return r.failed(err)
	}
	defer r.leave()
	o, err := tensorOptionsOf(options)
	own := dtypeOf[T]()
	switch {
	case err != nil:
		return r.failed(err)
	case o.spec != nil:
		return r.failed(invalid("plain tensors have no layout; Tensor.Distribute cuts them"))
	case o.dtype != 0 && o.dtype != own && !(floats[own] && floats[o.dtype]):
		return r.failed(invalid("the elements are %v, the option says %v", own, o.dtype))
	}
	needed := int64(1)
	for _, size := range sizes {
		needed *= size
	}
	if needed >= 0 && needed != int64(len(data)) {
		return r.failed(invalid("argument 'data' has %d elements; sizes %v need %d", len(data), sizes, needed))
	}
	if o.dtype == 0 || o.dtype == own {
		return r.result(c.TensorFromData(memory(data), len(data)*own.Size(), sizes, int32(own), o.requiresGrad, o.device.inner()))
	}
	handle, err := c.TensorFromData(memory(data), len(data)*own.Size(), sizes, int32(own), false, o.device.inner())
	if err == nil {
		defer c.TensorFree(handle)
		if handle, err = converted(r, handle, o.dtype); err == nil && o.requiresGrad {
			if err = c.TensorSetRequiresGrad(handle, true); err != nil {
				c.TensorFree(handle)
			}
		}
	}
	return r.result(handle, err)
}

// floats are the types of floating point numbers.
var floats = map[DType]bool{F32: true, F64: true, F16: true, BF16: true, F8E4M3: true, F8E5M2: true}

var opToDevice = builtin{name: "aten::to.dtype_layout"}

// ToDevice is the elements on another device; the tensor itself, if they are there.
func (t *Tensor) ToDevice(device Device) *Tensor { return t.call(&opToDevice, t, nil, nil, device) }

// converted is the elements in another type. In a call.
func converted(r *rank, handle c.Tensor, to DType) (c.Tensor, error) {
	op, err := opTo.find()
	if err != nil {
		return nil, err
	}
	call := r.newCall()
	defer r.done(call)
	call.AddTensor(handle)
	call.AddDType(int32(to))
	if err := call.Do(op, c.ModeNoGrad, false); err != nil {
		return nil, err
	}
	return call.TakeTensor(0), nil
}

// FromDLPack takes over memory of another library, without a copy. managed is a
// DLManagedTensorVersioned (DLPack 1.x) whose deleter nobody else runs, whatever comes of this.
func FromDLPack(w *World, managed unsafe.Pointer) *Tensor { return FromDLPackOn(w, managed, nil) }

// FromDLPackOn is FromDLPack of memory of a GPU that the other library uses on this stream (a cudaStream_t): what is
// under way there is done before the tensor is used. nil is the default one, which is all that there is yet; any
// other is Unimplemented.
func FromDLPackOn(w *World, managed, stream unsafe.Pointer) *Tensor {
	r, closed := begin(w)
	if closed == nil {
		defer r.leave()
	}
	handle, err := c.TensorFromDLPack(managed, stream)
	if closed != nil {
		c.TensorFree(handle)
		return r.failed(closed)
	}
	return r.result(handle, err)
}

// ToDLPack lends the memory of a plain tensor, which does not require grad, to another library: a
// DLManagedTensorVersioned (DLPack 1.x), whose deleter that library runs.
func (t *Tensor) ToDLPack() (unsafe.Pointer, error) { return t.ToDLPackOn(nil) }

// ToDLPackOn is ToDLPack of memory of a GPU for a library that uses it on this stream; as of [FromDLPackOn].
func (t *Tensor) ToDLPackOn(stream unsafe.Pointer) (unsafe.Pointer, error) {
	return get(t, func(handle c.Tensor) (unsafe.Pointer, error) { return c.TensorToDLPack(handle, stream) })
}

// Err is nil, or why the tensor cannot be used.
func (t *Tensor) Err() error {
	r, err := t.home()
	switch {
	case err != nil:
		return err
	case t.closed.Load():
		return errTensorClosed()
	case r.closed.Load():
		return errWorldClosed()
	}
	return nil
}

// Keep takes the tensor out of its [World.Scope], which then does not close it. It returns the tensor.
func (t *Tensor) Keep() *Tensor {
	r, err := begin(t)
	if err != nil {
		return r.failed(err)
	}
	defer r.leave()
	r.keep(t)
	return t
}

// one is what a function of the library makes of t.
func (t *Tensor) one(f func(r *rank) (c.Tensor, error), others ...used) *Tensor {
	r, err := begin(append([]used{t}, others...)...)
	if err != nil {
		return r.failed(err)
	}
	defer r.leave()
	result := r.result(f(r))
	runtime.KeepAlive(t)
	return result
}

func get[T any](t *Tensor, f func(c.Tensor) (T, error)) (T, error) {
	result, err := ask(func(*rank) (T, error) { return f(t.handle) }, t)
	runtime.KeepAlive(t)
	return result, err
}

// set is a call about t with nothing but an error.
func (t *Tensor) set(f func(r *rank) error, others ...used) error {
	err := do(f, append([]used{t}, others...)...)
	runtime.KeepAlive(t)
	return err
}

// Sizes is the global shape.
func (t *Tensor) Sizes() ([]int64, error) { return get(t, c.TensorSizes) }

// Size is the global size of one dimension; a negative one counts from the end.
func (t *Tensor) Size(dim int) (int64, error) {
	sizes, err := t.Sizes()
	if err != nil {
		return 0, err
	}
	at := dim
	if at < 0 {
		at += len(sizes)
	}
	if at < 0 || at >= len(sizes) {
		return 0, newError(OutOfRange, fmt.Sprintf("argument 'dim' is %d, and the tensor has %d dimensions", dim, len(sizes)))
	}
	return sizes[at], nil
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
		d, err := c.TensorDevice(handle)
		return Device{DeviceKind(d.Kind), int(d.Index)}, err
	})
}

// IsSharded says whether the tensor lies on a mesh.
func (t *Tensor) IsSharded() (bool, error) { return get(t, c.TensorIsSharded) }

// IsSame says whether both mean one tensor.
func (t *Tensor) IsSame(other *Tensor) (bool, error) {
	same, err := ask(func(*rank) (bool, error) { return c.TensorIsSame(t.handle, other.handle) }, t, other)
	runtime.KeepAlive(t)
	runtime.KeepAlive(other)
	return same, err
}

// String tells shape, layout and mesh, or the elements of a plain tensor; or the error. It never communicates.
func (t *Tensor) String() string {
	text, err := get(t, c.TensorToString)
	if err != nil {
		return "Tensor(" + err.Error() + ")"
	}
	return text
}

// ValuesString is String, and the elements of the whole tensor behind it if that is sharded. Collective then.
func (t *Tensor) ValuesString() (string, error) { return get(t, c.TensorValuesToString) }

// Format is what fmt's verbs print: %v, %+v and %s as String. It never communicates, so that one rank alone
// may log a tensor, and what has one in it; see [Tensor.ValuesString].
func (t *Tensor) Format(f fmt.State, verb rune) {
	switch {
	case t == nil:
		io.WriteString(f, "<nil>")
	case verb == 'v' || verb == 's':
		io.WriteString(f, t.String())
	default:
		fmt.Fprintf(f, "%%!%c(%s)", verb, t.String())
	}
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
	return ask(func(r *rank) (*Mesh, error) { return newMesh(r)(c.TensorMesh(t.handle)) }, t)
}

// Data copies the elements of a plain tensor out, row-major; T is their type. (Of a sharded one:
// [Tensor.Local] or [Tensor.Full].)
func Data[T Number](t *Tensor) ([]T, error) {
	var data []T
	err := t.set(func(*rank) error {
		n, err := elements[T](t.handle)
		if err != nil {
			return err
		}
		data = make([]T, n)
		return c.TensorCopyToHost(t.handle, memory(data), len(data)*dtypeOf[T]().Size())
	})
	if err != nil {
		return nil, err
	}
	return data, nil
}

// DataAs is Data, converted: T float32 or float64 for tensors of any floating point numbers, integers and bools, which
// are rounded to what T has; int64 for those of integers (but U64) and bools.
func DataAs[T float32 | float64 | int64](t *Tensor) ([]T, error) {
	var data []T
	err := t.set(func(r *rank) error {
		dtype, err := c.TensorDType(t.handle)
		if err != nil {
			return err
		}
		own := dtypeOf[T]()
		whole := false
		switch DType(dtype) {
		case I8, I16, I32, I64, U8, U16, U32, Bool:
			whole = true
		case U64:
			whole = own != I64
		}
		if !whole && !(floats[DType(dtype)] && own != I64) {
			return invalid("the elements of the tensor are %v, which no %v holds", DType(dtype), own)
		}
		if sharded, err := c.TensorIsSharded(t.handle); err != nil || sharded {
			if err == nil {
				err = invalid("the tensor is sharded: Local is this rank's part, Full all of it")
			}
			return err
		}
		handle, err := converted(r, t.handle, own)
		if err != nil {
			return err
		}
		defer c.TensorFree(handle)
		n, err := c.TensorNumel(handle)
		if err != nil {
			return err
		}
		data = make([]T, n)
		return c.TensorCopyToHost(handle, memory(data), len(data)*own.Size())
	})
	if err != nil {
		return nil, err
	}
	return data, nil
}

// CopyFrom writes row-major data into a plain tensor; T is the type of its elements.
func CopyFrom[T Number](t *Tensor, data []T) error {
	return t.set(func(*rank) error {
		n, err := elements[T](t.handle)
		if err != nil {
			return err
		}
		if n != int64(len(data)) {
			return invalid("argument 'data' has %d elements, the tensor %d", len(data), n)
		}
		return c.TensorCopyFromHost(t.handle, memory(data), len(data)*dtypeOf[T]().Size())
	})
}

// elements is how many there are, if T is their type.
func elements[T Number](handle c.Tensor) (int64, error) {
	dtype, err := c.TensorDType(handle)
	if err != nil {
		return 0, err
	}
	if got, wanted := DType(dtype), dtypeOf[T](); got != wanted {
		return 0, invalid("the elements of the tensor are %v, those of the slice %v", got, wanted)
	}
	return c.TensorNumel(handle)
}

// Source says whose data counts when a tensor is distributed; see [FromRank] and [SameEverywhere].
type Source int64

// SameEverywhere: all ranks have the same data already, and nothing is sent. [Tensor.Distribute] does not compare it either:
// other values on a rank go unnoticed. [Module.Distribute] compares all of it.
const SameEverywhere Source = -1

// FromRank is a rank of the mesh, row-major, whose data counts.
func FromRank(number int) Source { return Source(number) }

// Distribute cuts a plain tensor, of the same shape and type on every rank, as spec says; nil is
// replicated. No partial placements. The result is a leaf that requires grad if t does. Collective,
// unless the source is SameEverywhere.
func (t *Tensor) Distribute(m *Mesh, spec Spec, source Source) *Tensor {
	return t.one(func(r *rank) (c.Tensor, error) {
		handle, err := r.layoutOn(orReplicated(spec), m)
		if err != nil {
			return nil, err
		}
		return c.TensorDistribute(t.handle, m.handle, handle, int64(source))
	}, m)
}

// FromLocal makes a sharded tensor from every rank's part. sizes are the global ones; if they are nil
// they are worked out from the parts, and the call is collective. Parts that are not those of an even
// split, 1 + 2 rows, make a Shard a ragged one.
func FromLocal(local *Tensor, m *Mesh, spec Spec, sizes []int64) *Tensor {
	return local.one(func(r *rank) (c.Tensor, error) {
		handle, err := r.layoutOn(orReplicated(spec), m)
		if err != nil {
			return nil, err
		}
		return c.TensorFromLocal(local.handle, m.handle, handle, sizes, int32(r.mode))
	}, m)
}

// Local is this rank's part of a sharded tensor; it shares memory.
func (t *Tensor) Local() *Tensor { return t.LocalWithGrad(nil) }

// LocalWithGrad is Local, and says how the gradients of the parts lie together; nil: as the tensor,
// replicated where that is partial.
func (t *Tensor) LocalWithGrad(grad *Layout) *Tensor {
	return t.one(func(r *rank) (c.Tensor, error) {
		var handle c.Layout
		if grad != nil {
			var err error
			if handle, err = grad.it().lend(r); err != nil {
				return nil, err
			}
		}
		return c.TensorToLocal(t.handle, handle, int32(r.mode))
	})
}

// Redistribute is the same tensor in another layout; nil is replicated. Collective.
func (t *Tensor) Redistribute(spec Spec) *Tensor {
	return t.one(func(r *rank) (c.Tensor, error) {
		var mesh c.Mesh
		if _, given := spec.(*Layout); !given { // names need the mesh
			var err error
			if mesh, err = c.TensorMesh(t.handle); err != nil {
				return nil, err
			}
			defer c.MeshFree(mesh)
		}
		layout, err := orReplicated(spec).on(mesh, nil)
		if err != nil {
			return nil, err
		}
		handle, err := layout.it().lend(r)
		if err != nil {
			return nil, err
		}
		return c.TensorRedistribute(t.handle, handle, int32(r.mode))
	})
}

// Full is the whole tensor, plain, on every rank; of a plain one itself. Collective.
func (t *Tensor) Full() *Tensor {
	return t.one(func(r *rank) (c.Tensor, error) { return c.TensorFullTensor(t.handle, int32(r.mode)) })
}
