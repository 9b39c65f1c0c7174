package shardweave

import (
	"fmt"

	c "github.com/shardweave/shardweave/bindings/go/internal/cshardweave"
)

// DType is the type of a tensor's elements. It is an option of factories.
type DType int32

// Types of elements.
const (
	F32    DType = c.DTypeF32
	F64    DType = c.DTypeF64
	F16    DType = c.DTypeF16
	BF16   DType = c.DTypeBF16
	F8E4M3 DType = c.DTypeF8E4m3fn
	F8E5M2 DType = c.DTypeF8E5m2
	I8     DType = c.DTypeI8
	I16    DType = c.DTypeI16
	I32    DType = c.DTypeI32
	I64    DType = c.DTypeI64
	U8     DType = c.DTypeU8
	U16    DType = c.DTypeU16
	U32    DType = c.DTypeU32
	U64    DType = c.DTypeU64
	Bool   DType = c.DTypeBool
	C64    DType = c.DTypeC64 // complex: two F32
	C128   DType = c.DTypeC128
	C32    DType = c.DTypeC32 // complex: two F16
)

// Size is the bytes of one element; 0 for a number that is no type.
func (d DType) Size() int { return c.DTypeSize(int32(d)) }

// String is "f32", "bool", ...
func (d DType) String() string { return c.DTypeName(int32(d)) }

func (d DType) tensorOption(o *tensorOptions) { o.dtype = d }

// Number is what collectives move, and what tensors are made from and copied to.
type Number interface {
	float32 | float64 | Float16 | BFloat16 | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | bool | complex64 | complex128
}

func dtypeOf[T Number]() DType {
	var zero T
	switch any(zero).(type) {
	case float32:
		return F32
	case float64:
		return F64
	case Float16:
		return F16
	case BFloat16:
		return BF16
	case int8:
		return I8
	case int16:
		return I16
	case int32:
		return I32
	case int64:
		return I64
	case uint8:
		return U8
	case uint16:
		return U16
	case uint32:
		return U32
	case uint64:
		return U64
	case bool:
		return Bool
	case complex64:
		return C64
	default:
		return C128
	}
}

// Device says where a tensor's data is. It is an option of factories; one that is not there is Unimplemented.
type Device struct {
	Kind  DeviceKind
	Index int
}

func (d Device) tensorOption(o *tensorOptions) { o.device = d }

func (d Device) inner() c.Device { return c.Device{Kind: int32(d.Kind), Index: int32(d.Index)} }

// DeviceKind is a kind of devices.
type DeviceKind int32

// Kinds of devices.
const (
	CPU  DeviceKind = c.DeviceCPU
	CUDA DeviceKind = c.DeviceCUDA
)

// String is "cpu" or "cuda:0".
func (d Device) String() string {
	switch d.Kind {
	case CPU:
		return "cpu"
	case CUDA:
		return fmt.Sprintf("cuda:%d", d.Index)
	default:
		return fmt.Sprintf("device %d:%d", d.Kind, d.Index)
	}
}
