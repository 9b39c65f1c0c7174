//! Numbers that Rust has no types for, and what may lie in tensors.

use std::cmp::Ordering;
use std::fmt;

use crate::dtype::DType;

/// Types whose values may lie in tensors and travel between ranks.
///
/// # Safety
/// `DTYPE` describes `Self`, and every pattern of bits that a rank may send is a value of it, after
/// [`settle`](Element::settle) at the latest.
pub unsafe trait Element: Copy + Default + Send + 'static {
    /// The type of a tensor with such elements.
    const DTYPE: DType;

    /// Makes values of the bits that the library has written.
    ///
    /// # Safety
    /// `data` points to memory of `len` elements that nobody else uses.
    #[doc(hidden)]
    unsafe fn settle(data: *mut Self, len: usize) {
        let _ = (data, len);
    }
}

macro_rules! elements {
    ($($type:ty: $dtype:ident),* $(,)?) => {
        // SAFETY: the same numbers, and all bits are a value.
        $(unsafe impl Element for $type { const DTYPE: DType = DType::$dtype; })*
    };
}
elements!(f32: F32, f64: F64, F16: F16, Bf16: Bf16);
elements!(i8: I8, i16: I16, i32: I32, i64: I64, u8: U8, u16: U16, u32: U32, u64: U64);
elements!(Complex<F16>: C32, Complex<f32>: C64, Complex<f64>: C128);

#[cfg(feature = "half")]
elements!(half::f16: F16, half::bf16: Bf16, Complex<half::f16>: C32);

/// The feature `half`: the same bits.
#[cfg(feature = "half")]
mod of_half {
    use super::{Bf16, F16};

    macro_rules! same_bits {
        ($($ours:ident = $theirs:ty),*) => {
            $(impl From<$theirs> for $ours {
                fn from(number: $theirs) -> $ours {
                    $ours::from_bits(number.to_bits())
                }
            }

            impl From<$ours> for $theirs {
                fn from(number: $ours) -> $theirs {
                    <$theirs>::from_bits(number.to_bits())
                }
            })*
        };
    }
    same_bits!(F16 = half::f16, Bf16 = half::bf16);
}

// SAFETY: a byte, which `settle` makes 0 or 1.
unsafe impl Element for bool {
    const DTYPE: DType = DType::Bool;

    unsafe fn settle(data: *mut bool, len: usize) {
        // SAFETY: as the caller says; a byte is aligned, and any bits are a value of it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(data.cast::<u8>(), len) };
        for byte in bytes {
            *byte = u8::from(*byte != 0); // as LibTorch and C read it
        }
    }
}

/// A floating-point number of 16 bits, IEEE 754's binary16: 11 bits of precision.
///
/// It is here to go into tensors and to come out of them; compute with `f32`.
///
/// ```
/// use shardweave::{F16, Tensor};
/// let x = Tensor::from_slice(&[F16::from(0.1f32), F16::from(65504.0)], &[2])?;
/// let sum: Vec<F16> = (&x + &x)?.to_vec()?;
/// assert_eq!(f32::from(sum[0]), 0.19995117);
/// assert!(f32::from(sum[1]).is_infinite());
/// assert_eq!(F16::from(1.0f32).to_bits(), 0x3c00); // as half::f16 has them
/// # Ok::<(), shardweave::Error>(())
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct F16(u16);

/// A floating-point number of 16 bits, bfloat16: the upper half of an `f32`, 8 bits of precision.
///
/// It is here to go into tensors and to come out of them; compute with `f32`.
///
/// ```
/// use shardweave::{Bf16, Tensor};
/// let x = Tensor::from_slice(&[1.0f32, 1.01], &[2])?.to_dtype(shardweave::DType::Bf16)?;
/// assert_eq!(x.to_vec::<Bf16>()?.into_iter().map(f32::from).collect::<Vec<_>>(), [1.0, 1.0078125]);
/// # Ok::<(), shardweave::Error>(())
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct Bf16(u16);

macro_rules! small_floats {
    ($($type:ident),*) => {
        $(impl $type {
            /// From its bits.
            pub const fn from_bits(bits: u16) -> $type {
                $type(bits)
            }

            /// Its bits.
            pub const fn to_bits(self) -> u16 {
                self.0
            }
        }

        impl From<$type> for f64 {
            fn from(number: $type) -> f64 {
                f64::from(f32::from(number))
            }
        }

        /// As numbers: NaN is not equal to itself.
        impl PartialEq for $type {
            fn eq(&self, other: &$type) -> bool {
                f32::from(*self) == f32::from(*other)
            }
        }

        impl PartialOrd for $type {
            fn partial_cmp(&self, other: &$type) -> Option<Ordering> {
                f32::from(*self).partial_cmp(&f32::from(*other))
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&f32::from(*self), f)
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&f32::from(*self), f)
            }
        })*
    };
}
small_floats!(F16, Bf16);

/// The nearest one; of two that are equally near, the even one.
impl From<f32> for F16 {
    fn from(number: f32) -> F16 {
        let sign = (number.to_bits() >> 16 & 0x8000) as u16;
        let size = number.to_bits() & 0x7fff_ffff;
        F16(sign
            | if size > 0x7f80_0000 {
                0x7e00 // not a number
            } else if size >= 0x477f_f000 {
                0x7c00 // 65520 and more are nearest to infinity
            } else if size < 0x3880_0000 {
                // Below 2^-14 in steps of 2^-24, which are those of numbers from 0.5 to 1.
                ((f32::from_bits(size) + 0.5).to_bits() - 0.5f32.to_bits()) as u16
            } else {
                let rounded = size + 0xfff + (size >> 13 & 1);
                ((rounded - (112 << 23)) >> 13) as u16
            })
    }
}

impl From<F16> for f32 {
    fn from(number: F16) -> f32 {
        let sign = u32::from(number.0 & 0x8000) << 16;
        let (exponent, mantissa) = (number.0 >> 10 & 0x1f, u32::from(number.0 & 0x3ff));
        let size = match exponent {
            0 => (mantissa as f32 * 2f32.powi(-24)).to_bits(),
            0x1f => 0x7f80_0000 | mantissa << 13,
            _ => (u32::from(exponent) + 112) << 23 | mantissa << 13,
        };
        f32::from_bits(sign | size)
    }
}

/// The nearest one; of two that are equally near, the even one.
impl From<f32> for Bf16 {
    fn from(number: f32) -> Bf16 {
        let bits = number.to_bits();
        if number.is_nan() {
            return Bf16((bits >> 16) as u16 | 0x40);
        }
        Bf16(((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16)
    }
}

impl From<Bf16> for f32 {
    fn from(number: Bf16) -> f32 {
        f32::from_bits(u32::from(number.0) << 16)
    }
}

/// A complex number.
///
/// ```
/// use shardweave::{Complex, Tensor};
/// let x = Tensor::from_slice(&[Complex { re: 1.0f32, im: 2.0 }], &[1])?;
/// assert_eq!((&x * &x)?.item::<Complex<f64>>()?, Complex { re: -3.0, im: 4.0 });
/// # Ok::<(), shardweave::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Complex<T> {
    /// The real part.
    pub re: T,
    /// The imaginary part.
    pub im: T,
}
