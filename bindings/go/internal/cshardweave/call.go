package cshardweave

// #include "shim.h"
import "C"

import "unsafe"

func OpFind(name string) (Op, error) {
	if err := checkText("name", name); err != nil {
		return nil, err
	}
	var a arena
	defer a.free()
	var out Op
	err := result(C.swv_op_find(a.text(name), &out))
	return out, err
}

func OpFree(op Op) { C.swv_op_free(op) }

func OpSchema(op Op) (string, error) {
	var out *C.swv_string
	if err := result(C.swv_op_schema(op, &out)); err != nil {
		return "", err
	}
	return text(out), nil
}

const maxResults = 32 // no operator has as many

// Call is a call of an operator: its arguments, and then its results. It is made for being used
// again, one call behind the other, so that a call allocates nothing:
//
//	c := NewCall()
//	c.AddTensor(t)
//	c.AddInts(1, 2)
//	if err := c.Do(op, ModeGrad, false); err == nil {
//		sum := c.TakeTensor(0)
//	}
//	c.Clear()
//
// What arguments point to is copied to data, and found there by its offset (shim.h).
type Call struct {
	arguments  []C.swv_value
	numNames   int
	data       []uint64
	numResults C.size_t
	bytes      C.int64_t
	few        [16]C.swv_value // arguments, beside the rest, as long as there is room
	results    [maxResults]C.swv_value
}

func NewCall() *Call {
	c := &Call{data: make([]uint64, 0, 64)}
	c.arguments = c.few[:0]
	return c
}

// Do calls the operator. weigh says whether Bytes will be asked for.
func (c *Call) Do(op Op, mode int32, weigh bool) error {
	if err := c.check(true); err != nil {
		return err
	}
	status := C.swvgo_call(C.uintptr_t(uintptr(unsafe.Pointer(op))), C.swv_grad_mode(mode), first(c.arguments), C.size_t(len(c.arguments)),
		C.size_t(c.numNames), (*C.char)(unsafe.Pointer(first(c.data))), &c.results[0], maxResults, &c.numResults,
		flag(weigh), &c.bytes)
	if status != nil {
		c.numResults = 0
		return result(status)
	}
	return nil
}

// check is for the shims, which have arrays on C's stack, and a name for each that is counted.
func (c *Call) check(names bool) error {
	if len(c.arguments) <= mostArguments && c.numNames == 0 {
		return nil
	}
	return c.checkAll(names)
}

// Clear makes it a new one; results that were not taken are freed.
func (c *Call) Clear() {
	for i := range c.results[:c.numResults] {
		if c.results[i].kind != ValueNone {
			C.swv_value_clear(&c.results[i])
		}
	}
	c.arguments, c.numNames, c.data, c.numResults = c.arguments[:0], 0, c.data[:0], 0
}

// TensorFree is beside Do because both are called for each operator (hot_path.go).
func TensorFree(t Tensor) { C.swvgo_tensor_free(C.uintptr_t(uintptr(unsafe.Pointer(t)))) }

func (c *Call) add(kind C.swv_value_kind) *[2]uint64 {
	n := len(c.arguments)
	if n == cap(c.arguments) {
		c.grow()
	}
	c.arguments = c.arguments[:n+1]
	c.arguments[n] = C.swv_value{kind: kind}
	return words(&c.arguments[n])
}

// grow is apart, so that add, which is copied to where it is called, is small.
//
//go:noinline
func (c *Call) grow() {
	c.arguments = append(make([]C.swv_value, 0, 2*cap(c.arguments)), c.arguments...)
}

// words is the union as two numbers: nothing in it is a pointer for Go.
func words(v *C.swv_value) *[2]uint64 { return (*[2]uint64)(unsafe.Pointer(&v.as)) }

// list copies count elements to the data.
func (c *Call) list(kind C.swv_value_kind, from unsafe.Pointer, count, size int) {
	w := c.add(kind)
	w[0], w[1] = c.append(from, count*size), uint64(count)
}

func (c *Call) append(from unsafe.Pointer, bytes int) (offset uint64) {
	offset = uint64(len(c.data)) * 8
	if bytes > 0 {
		start := len(c.data)
		c.data = append(c.data, make([]uint64, (bytes+7)/8)...)
		to := unsafe.Slice((*byte)(unsafe.Pointer(&c.data[start])), bytes)
		copy(to, unsafe.Slice((*byte)(from), bytes))
	}
	return offset
}

func (c *Call) AddNone()    { c.add(C.SWV_VALUE_NONE) }
func (c *Call) AddDefault() { c.add(C.SWV_VALUE_DEFAULT) }

func (c *Call) AddTensor(t Tensor) {
	*(*Tensor)(unsafe.Pointer(c.add(C.SWV_VALUE_TENSOR))) = t
}

func (c *Call) AddBool(b bool) { c.add(C.SWV_VALUE_BOOL)[0] = uint64(flag(b)) }

func (c *Call) AddInt(i int64) { c.add(C.SWV_VALUE_INT)[0] = uint64(i) }

func (c *Call) AddFloat(f float64) { *(*float64)(unsafe.Pointer(c.add(C.SWV_VALUE_FLOAT))) = f }

func (c *Call) AddComplex(z complex128) {
	*(*complex128)(unsafe.Pointer(c.add(C.SWV_VALUE_COMPLEX))) = z
}

func (c *Call) AddDType(d int32) { *(*int32)(unsafe.Pointer(c.add(C.SWV_VALUE_DTYPE))) = d }

func (c *Call) AddDevice(kind, index int32) {
	*(*[2]int32)(unsafe.Pointer(c.add(C.SWV_VALUE_DEVICE))) = [2]int32{kind, index}
}

// textData is where the bytes of a string lie.
func textData(s string) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&s)) }

func (c *Call) AddString(s string) {
	c.list(C.SWV_VALUE_STRING, textData(s), len(s), 1)
}

func (c *Call) AddInts(all ...int64) {
	c.list(C.SWV_VALUE_INTS, unsafe.Pointer(first(all)), len(all), 8)
}

func (c *Call) AddFloats(all ...float64) {
	c.list(C.SWV_VALUE_FLOATS, unsafe.Pointer(first(all)), len(all), 8)
}

func (c *Call) AddBools(all ...bool) {
	flags := make([]C.swv_bool, len(all))
	for i, b := range all {
		flags[i] = flag(b)
	}
	c.list(C.SWV_VALUE_BOOLS, unsafe.Pointer(first(flags)), len(flags), 4)
}

// AddTensors: an element that is nil is none.
func (c *Call) AddTensors(all ...Tensor) {
	c.list(C.SWV_VALUE_TENSORS, unsafe.Pointer(first(all)), len(all), 8)
}

// Name names the argument that was added last, once; all behind it are named too.
func (c *Call) Name(name string) error {
	if err := checkText("a name", name); err != nil {
		return err
	}
	last := &c.arguments[len(c.arguments)-1]
	if last.reserved != 0 {
		return invalid("an argument has two names; the second is '" + name + "'")
	}
	zero := name + "\x00"
	last.reserved = C.int32_t(c.append(textData(zero), len(zero)) + 1)
	c.numNames++
	return nil
}

// NumNames is how many arguments have a name.
func (c *Call) NumNames() int { return c.numNames }

const mostArguments = 256 // as the library says

func (c *Call) checkAll(names bool) error {
	if len(c.arguments) > mostArguments {
		return invalid("256 arguments at most")
	}
	if !names && c.numNames > 0 {
		return invalid("arguments are given in order here, not by name")
	}
	for i := len(c.arguments) - c.numNames; i < len(c.arguments); i++ {
		if c.arguments[i].reserved == 0 {
			return invalid("an argument in order is behind one by name")
		}
	}
	return nil
}

func invalid(message string) error {
	return &Error{Code: CodeInvalidArgument, Message: message, Rank: -1}
}

// Explain tells why the operator would move what it moves, as a table and as JSON. Nothing runs.
func (c *Call) Explain(op Op) (table, json string, err error) {
	if err := c.check(false); err != nil {
		return "", "", err
	}
	var outText, outJSON *C.swv_string
	if err := result(C.swvgo_explain(op, first(c.arguments), C.size_t(len(c.arguments)),
		(*C.char)(unsafe.Pointer(first(c.data))), &outText, &outJSON)); err != nil {
		return "", "", err
	}
	return text(outText), text(outJSON), nil
}

// Item is the number in a tensor, as the only result.
func (c *Call) Item(t Tensor) error {
	err := result(C.swv_tensor_item(t, &c.results[0]))
	if err == nil {
		c.numResults = 1
	}
	return err
}

func (c *Call) NumResults() int { return int(c.numResults) }

// Bytes is TensorLocalBytes of the first result, a tensor.
func (c *Call) Bytes() int64 { return int64(c.bytes) }

// Kind of a result.
func (c *Call) Kind(i int) int32 { return int32(c.results[i].kind) }

// TakeTensor is a result that is a tensor, and the caller's from now on.
func (c *Call) TakeTensor(i int) Tensor {
	t := *(*Tensor)(unsafe.Pointer(&c.results[i].as))
	c.results[i].kind = ValueNone
	return t
}

// TakeTensors is the same for a list; nil elements are none.
func (c *Call) TakeTensors(i int) []Tensor {
	from := elements[Tensor](c, i)
	all := append([]Tensor(nil), from...)
	for k := range from {
		from[k] = nil
	}
	return all
}

func (c *Call) Int(i int) int64 { return int64(words(&c.results[i])[0]) }

func (c *Call) Float(i int) float64 { return *(*float64)(unsafe.Pointer(&c.results[i].as)) }

func (c *Call) Complex(i int) complex128 { return *(*complex128)(unsafe.Pointer(&c.results[i].as)) }

func (c *Call) DType(i int) int32 { return *(*int32)(unsafe.Pointer(&c.results[i].as)) }

func (c *Call) Device(i int) (kind, index int32) {
	d := *(*[2]int32)(unsafe.Pointer(&c.results[i].as))
	return d[0], d[1]
}

func (c *Call) String(i int) string { return string(elements[byte](c, i)) }

func (c *Call) Ints(i int) []int64 { return append([]int64{}, elements[int64](c, i)...) }

func (c *Call) Floats(i int) []float64 { return append([]float64{}, elements[float64](c, i)...) }

func (c *Call) Bools(i int) []bool {
	from := elements[int32](c, i)
	all := make([]bool, len(from))
	for k := range from {
		all[k] = from[k] != 0
	}
	return all
}

// elements of a result that is a list, in C's memory.
func elements[T any](c *Call, i int) []T {
	data := *(**T)(unsafe.Pointer(&c.results[i].as))
	return unsafe.Slice(data, int(words(&c.results[i])[1]))
}

// ModuleCall calls a method of a module that was loaded, with the arguments of the call.
func (c *Call) ModuleCall(m Module, method string, mode int32) error {
	if err := checkText("method", method); err != nil {
		return err
	}
	if err := c.check(true); err != nil {
		return err
	}
	var a arena
	defer a.free()
	status := C.swvgo_module_call(m, a.text(method), C.swv_grad_mode(mode), first(c.arguments),
		C.size_t(len(c.arguments)), C.size_t(c.numNames), (*C.char)(unsafe.Pointer(first(c.data))), &c.results[0], maxResults, &c.numResults)
	if status != nil {
		c.numResults = 0
	}
	return result(status)
}
