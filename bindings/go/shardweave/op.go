package shardweave

import (
	"fmt"
	"math"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"unsafe"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Op is an operator of LibTorch, on plain and on sharded tensors. It belongs to no rank.
type Op struct {
	_ noCopy
	*lasting[c.Op]
}

func (op *Op) it() *lasting[c.Op] {
	if op == nil {
		return nil
	}
	return op.lasting
}

var found sync.Map // of *Op by name: looking up is slow

// FindOp looks an operator up. "aten::add.Tensor" is that overload; "aten::add", or "add", is all of
// them: each call takes the first whose arguments fit. NotFound suggests names that are nearly the same.
func FindOp(name string) (*Op, error) {
	if op, there := found.Load(name); there {
		return op.(*Op), nil
	}
	handle, err := c.OpFind(name)
	if err != nil {
		return nil, public(err)
	}
	first, _ := found.LoadOrStore(name, &Op{lasting: last(handle, c.OpFree)})
	return first.(*Op), nil
}

// MustFindOp is FindOp for names in the program, which panics if there is none.
func MustFindOp(name string) *Op {
	op, err := FindOp(name)
	if err != nil {
		panic(err)
	}
	return op
}

// Schema is the schemas of its overloads, a line each.
func (op *Op) Schema() (string, error) {
	return with(op.it(), c.OpSchema)
}

type defaultValue struct{}

// Default is an argument: what the schema says.
var Default = defaultValue{}

type named struct {
	name  string
	value any
}

// Named is an argument by name; all behind it are named too.
func Named(name string, value any) any { return named{name, value} }

// Call calls the operator, and returns its results. Arguments are in the schema's order; those that are
// left out at the end have their defaults. An argument is
//
//	*Tensor, []*Tensor                               nil: none
//	bool, any integer, float32, float64, Float16, BFloat16, complex64, complex128
//	[]bool, []int, []int32, []int64, []float32, []float64
//	string, DType, Device
//	nil, Default, Named(...)
//
// Where the schema wants a Tensor, a number does too; where it wants int[2], a single integer; where
// float, an integer. Results are *Tensor, []*Tensor, bool, int64, float64, complex128, string, DType,
// Device, []bool, []int64, []float64 or nil; tensors among them belong to the rank of `where`. An error
// lists the schemas if no overload fits.
func (op *Op) Call(where Place, args ...any) ([]any, error) {
	if err := op.it().check(); err != nil {
		return nil, err
	}
	return ask(func(r *rank) ([]any, error) {
		handle, err := op.permanent()
		if err != nil {
			return nil, err
		}
		call, err := r.arguments(args)
		if err != nil {
			return nil, err
		}
		defer r.done(call)
		if err := call.Do(handle, int32(r.mode), false); err != nil {
			return nil, err
		}
		return r.results(call), nil
	}, where)
}

// Explain tells why the operator, called with these arguments (none by name), moves what it moves: the
// ways that its sharding rule offers, what each would cost, which would be taken, and what follows; as a
// table, and as JSON. Nothing runs. FailedPrecondition for an operator that is made of others
// (aten::linear): trace those.
func (op *Op) Explain(where Place, args ...any) (table, json string, err error) {
	if err := op.it().check(); err != nil {
		return "", "", err
	}
	err = do(func(r *rank) error {
		handle, err := op.permanent()
		if err != nil {
			return err
		}
		call, err := r.arguments(args)
		if err != nil {
			return err
		}
		defer r.done(call)
		table, json, err = call.Explain(handle)
		return err
	}, where)
	return table, json, err
}

func (r *rank) results(call *c.Call) []any {
	results := make([]any, call.NumResults())
	for i := range results {
		results[i] = r.value(call, i)
	}
	return results
}

// Tensor is Call of an operator with one result, a tensor. One of the arguments may carry an error; then
// so does the result.
func (op *Op) Tensor(where Place, args ...any) *Tensor {
	if where == nil {
		return nowhere.failed(noThing("World or Mesh"))
	}
	r, err := where.home()
	var handle c.Op
	if err == nil {
		handle, err = op.permanent()
	}
	if err == nil {
		err = r.enter()
	}
	if err != nil {
		return orNowhere(r).failed(err)
	}
	defer r.leave()
	if err := where.alive(); err != nil {
		return r.failed(err)
	}
	return r.oneInCall(handle, args)
}

// isNamed is an error if it is not.
func isNamed(arg any) error {
	if _, is := arg.(named); !is {
		return invalid("an argument in order is behind one that is Named")
	}
	return nil
}

func (r *rank) addRare(call *c.Call, arg any) error {
	switch v := arg.(type) {
	case int64:
		call.AddInt(v)
	case int32:
		call.AddInt(int64(v))
	case float32:
		call.AddFloat(float64(v))
	case []float64:
		call.AddFloats(v...)
	case []float32:
		wide := make([]float64, 0, 8)
		for _, number := range v {
			wide = append(wide, float64(number))
		}
		call.AddFloats(wide...)
	case []int32:
		wide := make([]int64, 0, 8)
		for _, number := range v {
			wide = append(wide, int64(number))
		}
		call.AddInts(wide...)
	case int8:
		call.AddInt(int64(v))
	case int16:
		call.AddInt(int64(v))
	case uint8:
		call.AddInt(int64(v))
	case uint16:
		call.AddInt(int64(v))
	case uint32:
		call.AddInt(int64(v))
	case uint:
		return r.addUnsigned(call, uint64(v))
	case uint64:
		return r.addUnsigned(call, v)
	case Float16:
		call.AddFloat(float64(v.Float32()))
	case BFloat16:
		call.AddFloat(float64(v.Float32()))
	case complex64:
		call.AddComplex(complex128(v))
	case []bool:
		call.AddBools(v...)
	case string:
		call.AddString(v)
	case DType:
		call.AddDType(int32(v))
	case Device:
		call.AddDevice(int32(v.Kind), int32(v.Index))
	case complex128:
		call.AddComplex(v)
	case defaultValue:
		call.AddDefault()
	case named:
		if inner, is := v.value.(named); is {
			// (Copies of the names, or the compiler thinks that all arguments escape.)
			return invalid("what is Named '%s' is itself Named '%s'", strings.Clone(v.name), strings.Clone(inner.name))
		}
		if err := r.add(call, v.value); err != nil {
			return err
		}
		return public(call.Name(v.name))
	default:
		return invalid("an operator's argument has the type %s, which none can have", reflect.TypeOf(arg).String())
	}
	return nil
}

func (r *rank) addUnsigned(call *c.Call, v uint64) error {
	if v > math.MaxInt64 {
		return newError(OutOfRange, fmt.Sprintf("an operator's argument is %d, which no int64 holds", v))
	}
	call.AddInt(int64(v))
	return nil
}

func (r *rank) value(call *c.Call, i int) any {
	switch call.Kind(i) {
	case c.ValueTensor:
		return r.tensor(call.TakeTensor(i))
	case c.ValueBool:
		return call.Int(i) != 0
	case c.ValueInt:
		return call.Int(i)
	case c.ValueFloat:
		return call.Float(i)
	case c.ValueComplex:
		return call.Complex(i)
	case c.ValueString:
		return call.String(i)
	case c.ValueDType:
		return DType(call.DType(i))
	case c.ValueDevice:
		kind, index := call.Device(i)
		return Device{DeviceKind(kind), int(index)}
	case c.ValueTensors:
		return r.tensors(call.TakeTensors(i))
	case c.ValueBools:
		return call.Bools(i)
	case c.ValueInts:
		return call.Ints(i)
	case c.ValueFloats:
		return call.Floats(i)
	default:
		return nil
	}
}

// Item is the one element of a tensor, as a number; of a bool 0 or 1. See [ItemOf] for those that a
// float64 does not hold. Collective if it is sharded.
func (t *Tensor) Item() (float64, error) { return ItemOf[float64](t) }

// ItemOf is the one element of a tensor of any type, as a T, which has to hold it; else it is 0, and an error. Complex
// numbers want a complex T, a bool T an element that is one. An integer T holds whole numbers in its range, and nothing
// else. A T of floating point rounds, to infinity what is beyond it. Collective if the tensor is sharded.
func ItemOf[T Number](t *Tensor) (T, error) {
	item, err := ask(func(r *rank) (T, error) { return itemOf[T](r, t.handle) }, t)
	runtime.KeepAlive(t)
	return item, err
}

func itemOf[T Number](r *rank, handle c.Tensor) (T, error) {
	var none T
	dtype, err := c.TensorDType(handle)
	if err != nil {
		return none, err
	}
	if DType(dtype) == U64 { // beyond what C's values have
		item, err := elementOf[uint64](handle)
		if err != nil {
			return none, err
		}
		return numberAs[T](item)
	}
	call := r.newCall()
	defer r.done(call)
	if err := call.Item(handle); err != nil {
		return none, err
	}
	switch call.Kind(0) {
	case c.ValueFloat:
		return numberAs[T](call.Float(0))
	case c.ValueInt:
		return numberAs[T](call.Int(0))
	case c.ValueBool:
		return numberAs[T](call.Int(0) != 0)
	case c.ValueComplex:
		return numberAs[T](call.Complex(0))
	default:
		return none, invalid("the element is no number")
	}
}

// elementOf is the one element of a tensor whose type is T.
func elementOf[T Number](handle c.Tensor) (T, error) {
	var data [1]T
	count, err := c.TensorNumel(handle)
	if err != nil {
		return data[0], err
	}
	if count != 1 {
		return data[0], invalid("the tensor has %d elements; wanted one", count)
	}
	whole, err := c.TensorFullTensor(handle, c.ModeNoGrad)
	if err != nil {
		return data[0], err
	}
	defer c.TensorFree(whole)
	err = c.TensorCopyToHost(whole, unsafe.Pointer(&data), dtypeOf[T]().Size())
	return data[0], err
}

// Apply calls any operator by name, with the tensor as its first argument and one tensor as its result:
// x.Apply("aten::leaky_relu", 0.1). Names are looked up once.
func (t *Tensor) Apply(name string, args ...any) *Tensor {
	r, err := t.home()
	if err != nil {
		return r.failed(err)
	}
	op, err := FindOp(name)
	if err != nil {
		return r.failed(err)
	}
	handle, err := op.permanent()
	if err != nil {
		return r.failed(err)
	}
	return r.one(handle, append([]any{t}, args...))
}
