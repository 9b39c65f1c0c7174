use std::fmt;
use std::str::FromStr;

use shardweave_sys as sys;

use crate::error::{Error, Result};

/// The type of a tensor's elements. As text, and for serde: `f32`, `bf16`, `f8e4m3`.
///
/// ```
/// use shardweave::DType;
/// assert_eq!("bf16".parse::<DType>()?, DType::Bf16);
/// assert_eq!((DType::Bf16.to_string().as_str(), DType::Bf16.size()), ("bf16", 2));
/// # Ok::<(), shardweave::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
#[allow(missing_docs)] // the names say it
pub enum DType {
    F32 = sys::SWV_DTYPE_F32,
    F64 = sys::SWV_DTYPE_F64,
    F16 = sys::SWV_DTYPE_F16,
    Bf16 = sys::SWV_DTYPE_BF16,
    F8E4m3 = sys::SWV_DTYPE_F8_E4M3FN,
    F8E5m2 = sys::SWV_DTYPE_F8_E5M2,
    I8 = sys::SWV_DTYPE_I8,
    I16 = sys::SWV_DTYPE_I16,
    I32 = sys::SWV_DTYPE_I32,
    I64 = sys::SWV_DTYPE_I64,
    U8 = sys::SWV_DTYPE_U8,
    U16 = sys::SWV_DTYPE_U16,
    U32 = sys::SWV_DTYPE_U32,
    U64 = sys::SWV_DTYPE_U64,
    Bool = sys::SWV_DTYPE_BOOL,
    /// Complex: two f32.
    C64 = sys::SWV_DTYPE_C64,
    /// Complex: two f64.
    C128 = sys::SWV_DTYPE_C128,
    /// Complex: two f16.
    C32 = sys::SWV_DTYPE_C32,
}

impl DType {
    /// All that this crate knows, with the C interface's names and sizes of an element; here they
    /// need no library.
    pub(crate) const ALL: [(DType, &'static str, usize); 18] = [
        (DType::F32, "f32", 4),
        (DType::F64, "f64", 8),
        (DType::F16, "f16", 2),
        (DType::Bf16, "bf16", 2),
        (DType::F8E4m3, "f8e4m3", 1),
        (DType::F8E5m2, "f8e5m2", 1),
        (DType::I8, "i8", 1),
        (DType::I16, "i16", 2),
        (DType::I32, "i32", 4),
        (DType::I64, "i64", 8),
        (DType::U8, "u8", 1),
        (DType::U16, "u16", 2),
        (DType::U32, "u32", 4),
        (DType::U64, "u64", 8),
        (DType::Bool, "bool", 1),
        (DType::C64, "c64", 8),
        (DType::C128, "c128", 16),
        (DType::C32, "c32", 4),
    ];

    pub(crate) fn from_number(number: i32) -> Result<DType> {
        let all = DType::ALL.into_iter().map(|(dtype, ..)| dtype);
        all.into_iter()
            .find(|dtype| *dtype as i32 == number)
            .ok_or_else(|| Error::newer_library("dtype", number))
    }

    fn entry(self) -> (DType, &'static str, usize) {
        DType::ALL[self as usize - 1] // in the order of the numbers
    }

    pub(crate) fn name(self) -> &'static str {
        self.entry().1
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        self.entry().2
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(text: &str) -> Result<DType> {
        let mut all = DType::ALL.iter();
        all.find(|(_, name, _)| *name == text).map(|(dtype, ..)| *dtype).ok_or_else(|| {
            let names: Vec<&str> = DType::ALL.iter().map(|(_, name, _)| *name).collect();
            Error::invalid(format!(
                "DType::from_str: '{text}' is no dtype; wanted one of {}",
                names.join(", ")
            ))
        })
    }
}

/// How ranks' values become one. As text, and for serde: `sum`, `avg`, `min`, `max`, `product`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
#[allow(missing_docs)] // the names say it
pub enum ReduceOp {
    Sum = sys::SWV_REDUCE_SUM,
    Avg = sys::SWV_REDUCE_AVG,
    Min = sys::SWV_REDUCE_MIN,
    Max = sys::SWV_REDUCE_MAX,
    Product = sys::SWV_REDUCE_PRODUCT,
}

impl ReduceOp {
    pub(crate) const ALL: [(ReduceOp, &'static str); 5] = [
        (ReduceOp::Sum, "sum"),
        (ReduceOp::Avg, "avg"),
        (ReduceOp::Min, "min"),
        (ReduceOp::Max, "max"),
        (ReduceOp::Product, "product"),
    ];

    pub(crate) fn from_number(number: i32) -> Result<ReduceOp> {
        let mut all = ReduceOp::ALL.into_iter().map(|(op, _)| op);
        all.find(|op| *op as i32 == number).ok_or_else(|| Error::newer_library("reduction", number))
    }

    pub(crate) fn name(self) -> &'static str {
        ReduceOp::ALL[self as usize].1 // in the order of the numbers
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    fn from_str(text: &str) -> Result<ReduceOp> {
        let mut all = ReduceOp::ALL.iter();
        all.find(|(_, name)| *name == text).map(|(op, _)| *op).ok_or_else(|| {
            let names: Vec<&str> = ReduceOp::ALL.iter().map(|(_, name)| *name).collect();
            Error::invalid(format!(
                "ReduceOp::from_str: '{text}' is no reduction; wanted one of {}",
                names.join(", ")
            ))
        })
    }
}

/// Where a tensor's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// This machine's memory.
    Cpu,
    /// A GPU of this machine.
    Cuda(i32),
}

impl Device {
    pub(crate) fn to_raw(self) -> sys::swv_device {
        match self {
            Device::Cpu => sys::swv_device { type_: sys::SWV_DEVICE_CPU, index: 0 },
            Device::Cuda(index) => sys::swv_device { type_: sys::SWV_DEVICE_CUDA, index },
        }
    }

    pub(crate) fn from_raw(raw: sys::swv_device) -> Result<Device> {
        match raw.type_ {
            sys::SWV_DEVICE_CPU => Ok(Device::Cpu),
            sys::SWV_DEVICE_CUDA => Ok(Device::Cuda(raw.index)),
            number => Err(Error::newer_library("device type", number)),
        }
    }
}

/// The C interface's; None is its default.
pub(crate) fn number_of(dtype: Option<DType>) -> sys::swv_dtype {
    dtype.map_or(sys::SWV_DTYPE_DEFAULT, |dtype| dtype as i32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    /// The tables are indexed by number.
    #[test]
    fn every_number_has_its_entry() {
        for (i, (dtype, name, _)) in DType::ALL.into_iter().enumerate() {
            assert_eq!((dtype as usize, dtype.name()), (i + 1, name));
            assert_eq!(DType::from_number(dtype as i32), Ok(dtype));
            assert_eq!(name.parse(), Ok(dtype));
        }
        for (i, (op, name)) in ReduceOp::ALL.into_iter().enumerate() {
            assert_eq!((op as usize, op.name()), (i, name));
            assert_eq!(ReduceOp::from_number(op as i32), Ok(op));
            assert_eq!(name.parse(), Ok(op));
        }
        let error = "f33".parse::<DType>().unwrap_err();
        assert!(error
            .message()
            .starts_with("DType::from_str: 'f33' is no dtype; wanted one of f32, "));
        assert_eq!("mean".parse::<ReduceOp>().unwrap_err().code(), Code::InvalidArgument);
    }

    /// What a newer library may add is an error here: no panic, and nothing that it is not.
    #[test]
    fn a_number_of_a_newer_library_is_an_error() {
        let device = |type_| Device::from_raw(sys::swv_device { type_, index: 3 });
        assert_eq!(
            (device(sys::SWV_DEVICE_CPU), device(sys::SWV_DEVICE_CUDA)),
            (Ok(Device::Cpu), Ok(Device::Cuda(3)))
        );
        for (what, result) in [
            ("dtype 77", DType::from_number(77).err()),
            ("dtype 0", DType::from_number(0).err()),
            ("reduction 77", ReduceOp::from_number(77).err()),
            ("device type 77", device(77).err()),
        ] {
            let error = result.unwrap();
            assert_eq!(error.code(), Code::Unimplemented);
            assert!(error.message().contains(what), "{error}");
        }
        assert_eq!(Code::from_number(77), Code::Unknown);
    }
}
