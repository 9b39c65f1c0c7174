use std::fmt;

use shardweave_sys as sys;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
#[allow(missing_docs)] // the names say it
pub enum DType {
    F32 = 1,
    F64 = 2,
    F16 = 3,
    Bf16 = 4,
    F8E4m3 = 5,
    F8E5m2 = 6,
    I8 = 7,
    I16 = 8,
    I32 = 9,
    I64 = 10,
    U8 = 11,
    U16 = 12,
    U32 = 13,
    U64 = 14,
    Bool = 15,
    /// Complex: two f32.
    C64 = 16,
    /// Complex: two f64.
    C128 = 17,
    /// Complex: two f16.
    C32 = 18,
}

impl DType {
    pub(crate) const ALL: [DType; 18] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::Bf16,
        DType::F8E4m3,
        DType::F8E5m2,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::Bool,
        DType::C64,
        DType::C128,
        DType::C32,
    ];

    pub(crate) fn from_number(number: i32) -> DType {
        DType::ALL
            .into_iter()
            .find(|dtype| *dtype as i32 == number)
            .expect("the soname names the version: there are no other dtypes")
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        // SAFETY: a function of a number.
        unsafe { sys::swv_dtype_size(self as i32) }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: a function of a number; the text lives as long as the library.
        f.pad(&unsafe { crate::ffi::string_from(sys::swv_dtype_name(*self as i32)) })
    }
}

/// How ranks' values become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
#[allow(missing_docs)] // the names say it
pub enum ReduceOp {
    Sum = 0,
    Avg = 1,
    Min = 2,
    Max = 3,
    Product = 4,
}

impl ReduceOp {
    pub(crate) fn from_number(number: i32) -> ReduceOp {
        [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product]
            .into_iter()
            .find(|op| *op as i32 == number)
            .expect("the soname names the version: there are no other reductions")
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
            Device::Cpu => sys::swv_device { type_: sys::SWV_CPU, index: 0 },
            Device::Cuda(index) => sys::swv_device { type_: sys::SWV_CUDA, index },
        }
    }

    pub(crate) fn from_raw(raw: sys::swv_device) -> Device {
        if raw.type_ == sys::SWV_CUDA {
            Device::Cuda(raw.index)
        } else {
            Device::Cpu
        }
    }
}
