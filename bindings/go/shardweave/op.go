package shardweave

import (
	"reflect"
	"runtime"
	"sync"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// Op is an operator of LibTorch, on plain and on sharded tensors. It belongs to no rank.
type Op struct {
	handle c.Op
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
	op := &Op{handle}
	runtime.SetFinalizer(op, func(op *Op) { c.OpFree(op.handle) })
	kept, _ := found.LoadOrStore(name, op)
	return kept.(*Op), nil
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
	text, err := c.OpSchema(op.handle)
	runtime.KeepAlive(op)
	return text, public(err)
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
//	bool, int, int32, int64, float32, float64, complex128, []bool, []int, []int64, []float64
//	string, DType, Device
//	nil, Default, Named(...)
//
// Where the schema wants a Tensor, a number does too; where it wants int[2], a single integer; where
// float, an integer. Results are *Tensor, []*Tensor, bool, int64, float64, complex128, string, DType,
// Device, []bool, []int64, []float64 or nil; tensors among them belong to the rank of `where`. An error
// lists the schemas if no overload fits.
func (op *Op) Call(where Place, args ...any) ([]any, error) {
	r, _ := where.place()
	call, err := r.begin(args)
	if err != nil {
		return nil, err
	}
	defer call.Release()
	err = call.Do(op.handle, int32(r.mode))
	runtime.KeepAlive(op)
	if err != nil {
		return nil, r.error(err)
	}
	return r.results(call), nil
}

// Explain tells why the operator, called with these arguments (none by name), moves what it moves: the
// ways that its sharding rule offers, what each would cost, which would be taken, and what follows; as a
// table, and as JSON. Nothing runs. FailedPrecondition for an operator that is made of others
// (aten::linear): trace those.
func (op *Op) Explain(where Place, args ...any) (table, json string, err error) {
	r, _ := where.place()
	call, err := r.begin(args)
	if err != nil {
		return "", "", err
	}
	defer call.Release()
	table, json, err = call.Explain(op.handle)
	runtime.KeepAlive(op)
	return table, json, r.error(err)
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
	r, _ := where.place()
	return r.one(op, args)
}

// one calls an operator with one tensor as its result. Nothing of args escapes, so that callers have
// them on their stacks.
func (r *rank) one(op *Op, args []any) *Tensor {
	call, err := r.begin(args)
	if err != nil {
		return r.failed(err)
	}
	err = call.Do(op.handle, int32(r.mode))
	runtime.KeepAlive(op)
	var t *Tensor
	switch {
	case err != nil:
		t = r.failed(r.error(err))
	case call.NumResults() != 1 || call.Kind(0) != c.ValueTensor:
		t = r.failed(invalid("the operator's result is not one tensor: use Call"))
	default:
		t = r.tensor(call.TakeTensor(0))
	}
	call.Release()
	return t
}

// begin is a call with these arguments.
func (r *rank) begin(args []any) (*c.Call, error) {
	if err := r.ready(); err != nil {
		return nil, err
	}
	call := c.NewCall()
	for _, arg := range args {
		if err := r.add(call, arg); err != nil {
			call.Release()
			return nil, err
		}
	}
	return call, nil
}

func (r *rank) add(call *c.Call, arg any) error {
	switch v := arg.(type) {
	case *Tensor:
		if v == nil {
			call.AddNone()
			break
		}
		if v.Err() != nil {
			return v.Err()
		}
		if v.rank != r {
			return errOtherRank
		}
		call.AddTensor(v.handle)
	case int:
		call.AddInt(int64(v))
	case int64:
		call.AddInt(v)
	case int32:
		call.AddInt(int64(v))
	case float64:
		call.AddFloat(v)
	case float32:
		call.AddFloat(float64(v))
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
			switch {
			case t == nil:
				handles = append(handles, nil)
			case t.Err() != nil:
				return t.Err()
			case t.rank != r:
				return errOtherRank
			default:
				handles = append(handles, t.handle)
			}
		}
		call.AddTensors(handles...)
	case []float64:
		call.AddFloats(v...)
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
	case nil:
		call.AddNone()
	case defaultValue:
		call.AddDefault()
	case named:
		if err := r.add(call, v.value); err != nil {
			return err
		}
		return public(call.Name(v.name))
	default:
		return &Error{InvalidArgument, "an operator's argument is a " + reflect.TypeOf(arg).String() +
			", which none can be"}
	}
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

// Item is the one element of a tensor, as a number; of a bool 0 or 1. Collective if it is sharded.
func (t *Tensor) Item() (float64, error) {
	if err := t.use(); err != nil {
		return 0, err
	}
	call := c.NewCall()
	defer call.Release()
	err := call.Item(t.handle)
	runtime.KeepAlive(t)
	if err != nil {
		return 0, t.rank.error(err)
	}
	switch call.Kind(0) {
	case c.ValueFloat:
		return call.Float(0), nil
	case c.ValueInt, c.ValueBool:
		return float64(call.Int(0)), nil
	default:
		return 0, invalid("Item: the element is no real number")
	}
}

// Apply calls any operator by name, with the tensor as its first argument and one tensor as its result:
// x.Apply("aten::leaky_relu", 0.1). Names are looked up once.
func (t *Tensor) Apply(name string, args ...any) *Tensor {
	if t.Err() != nil {
		return t
	}
	op, err := FindOp(name)
	if err != nil {
		return t.rank.failed(err)
	}
	return t.rank.one(op, append([]any{t}, args...))
}
