package shardweave

import "math"

// Float16 is an element of an [F16] tensor, bit by bit: IEEE 754's half precision.
type Float16 uint16

// BFloat16 is an element of a [BF16] tensor, bit by bit: the upper half of a float32.
type BFloat16 uint16

// BFloat16Of rounds to the nearest, of two to the even one.
func BFloat16Of(f float32) BFloat16 {
	bits := math.Float32bits(f)
	if f != f {
		return BFloat16(bits>>16 | 0x40) // still no number if the upper half has no other bit
	}
	return BFloat16((bits + 0x7fff + bits>>16&1) >> 16)
}

// Float32 is the same number.
func (b BFloat16) Float32() float32 { return math.Float32frombits(uint32(b) << 16) }

// Float16Of rounds to the nearest, of two to the even one; what is too large becomes infinite.
func Float16Of(f float32) Float16 {
	bits := math.Float32bits(f)
	sign := Float16(bits >> 16 & 0x8000)
	bits &= 0x7fffffff
	switch {
	case bits > 0x7f800000: // no number
		return sign | 0x7e00 | Float16(bits>>13&0x3ff)
	case bits >= 0x477ff000: // rounds to 65536, or is more
		return sign | 0x7c00
	case bits < 0x38800000: // below the normal numbers, which begin at 2^-14: in units of 2^-24, as float32 rounds
		sum := math.Float32frombits(bits) + math.Float32frombits(0x3f000000) // 0.5, whose last bit is 2^-24
		return sign | Float16(math.Float32bits(sum)-0x3f000000)
	default:
		return sign | Float16((bits-0x38000000+0xfff+bits>>13&1)>>13)
	}
}

// Float32 is the same number.
func (h Float16) Float32() float32 {
	sign := uint32(h&0x8000) << 16
	exponent, fraction := uint32(h>>10&0x1f), uint32(h&0x3ff)
	switch exponent {
	case 0: // fraction * 2^-24
		return math.Float32frombits(math.Float32bits(float32(fraction)*0x1p-24) | sign)
	case 31:
		return math.Float32frombits(sign | 0x7f800000 | fraction<<13)
	default:
		return math.Float32frombits(sign | (exponent+112)<<23 | fraction<<13)
	}
}

// numberAs converts a bool, int64, uint64, float64 or complex128.
func numberAs[T Number](from any) (T, error) {
	var to T
	fits := false
	f, isFloat := floatOf(from)
	z, isComplex := complexOf(from)
	switch p := any(&to).(type) {
	case *bool:
		*p, fits = from.(bool)
	case *complex64:
		*p, fits = complex64(z), isComplex
	case *complex128:
		*p, fits = z, isComplex
	case *float32:
		*p, fits = float32(f), isFloat
	case *float64:
		*p, fits = f, isFloat
	case *Float16:
		*p, fits = Float16Of(float32(f)), isFloat
	case *BFloat16:
		*p, fits = BFloat16Of(float32(f)), isFloat
	case *int8:
		fits = setInteger(p, from)
	case *int16:
		fits = setInteger(p, from)
	case *int32:
		fits = setInteger(p, from)
	case *int64:
		fits = setInteger(p, from)
	case *uint8:
		fits = setInteger(p, from)
	case *uint16:
		fits = setInteger(p, from)
	case *uint32:
		fits = setInteger(p, from)
	case *uint64:
		fits = setInteger(p, from)
	}
	if !fits {
		var none T
		return none, invalid("the element is %v, which the type %T does not hold", from, to)
	}
	return to, nil
}

func complexOf(from any) (complex128, bool) {
	if z, is := from.(complex128); is {
		return z, true
	}
	f, is := floatOf(from)
	return complex(f, 0), is
}

func floatOf(from any) (float64, bool) {
	switch v := from.(type) {
	case float64:
		return v, true
	case int64:
		return float64(v), true
	case uint64:
		return float64(v), true
	case bool:
		if v {
			return 1, true
		}
		return 0, true
	default:
		return 0, false
	}
}

// setInteger says whether `to` holds the number.
func setInteger[I int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64](to *I, from any) bool {
	switch v := from.(type) {
	case bool:
		if v {
			*to = 1
		}
		return true
	case int64:
		*to = I(v)
		return int64(*to) == v && (*to < 0) == (v < 0)
	case uint64:
		*to = I(v)
		return uint64(*to) == v && *to >= 0
	case float64:
		if v != math.Trunc(v) || v < -0x1p63 || v >= 0x1p64 {
			return false
		}
		if v < 0 {
			return setInteger(to, int64(v))
		}
		return setInteger(to, uint64(v))
	default:
		return false
	}
}
