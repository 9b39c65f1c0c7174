//! Operators by name, their arguments and results.

use std::ffi::CString;
use std::fmt;
use std::marker::PhantomData;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

use shardweave_sys as sys;

use crate::autograd::Mode;
use crate::dtype::{DType, Device};
use crate::element::{Bf16, Complex, F16};
use crate::error::{Code, Error, Of, Result};
use crate::ffi::{c_text, take_string};
use crate::source::called_here;
use crate::tensor::Tensor;

handle! {
    /// An operator of LibTorch, of those on plain and on sharded tensors.
    ///
    /// `aten::add.Tensor` is that overload; `aten::add`, or `add`, is all of them: each call takes
    /// the first whose arguments fit. Looking one up is slow, calling it is not.
    ///
    /// ```
    /// use shardweave::{args, Op, Tensor};
    /// let topk = Op::find("aten::topk")?;
    /// let x = Tensor::from_slice(&[3.0f32, 1.0, 2.0], &[3])?;
    /// let (values, indices): (Tensor, Tensor) = topk.call(args![&x, 2])?;
    /// assert_eq!(values.to_vec::<f32>()?, [3.0, 2.0]);
    /// assert_eq!(indices.to_vec::<i64>()?, [0, 2]);
    /// let error = Op::find("aten::topc").unwrap_err();
    /// assert!(error.message().contains("topk")); // near misses are suggested
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    Op, swv_op, swv_op_free
}

// SAFETY: the header says that operators belong to no rank and may be used by several threads at
// once.
unsafe impl Send for Op {}
// SAFETY: the same.
unsafe impl Sync for Op {}

/// An argument of an operator: a tensor, a number, text, a list, ...; made by `From`, mostly
/// through [`args!`](crate::args). Borrows what it is made from.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Arg<'a>(sys::swv_value, PhantomData<&'a Tensor>);

impl fmt::Debug for Arg<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arg(kind {})", self.0.kind)
    }
}

/// The arguments of a call: `op.call(args![&x, 2, &[0, 1]])`.
#[macro_export]
macro_rules! args {
    ($($value:expr),* $(,)?) => { &[$($crate::Arg::from($value)),*] };
}

impl<'a> Arg<'a> {
    /// None, where the schema has an optional argument.
    pub const NONE: Arg<'static> = Arg(sys::SWV_NONE, PhantomData);

    /// What the schema says, where an argument in the middle is left out.
    pub const DEFAULT: Arg<'static> =
        Arg(sys::swv_value { kind: sys::SWV_VALUE_DEFAULT, ..sys::SWV_NONE }, PhantomData);

    const fn new(kind: i32, value: sys::swv_value__bindgen_ty_1) -> Arg<'a> {
        Arg(sys::swv_value { kind, reserved: 0, as_: value }, PhantomData)
    }

    fn number(kind: i32, integer: i64) -> Arg<'a> {
        Arg::new(kind, sys::swv_value__bindgen_ty_1 { integer })
    }

    /// A complex number.
    pub fn complex(real: f64, imaginary: f64) -> Arg<'static> {
        let complex_number = sys::swv_value__bindgen_ty_1__bindgen_ty_1 { real, imaginary };
        Arg::new(sys::SWV_VALUE_COMPLEX, sys::swv_value__bindgen_ty_1 { complex_number })
    }
}

impl<'a> From<&'a Tensor> for Arg<'a> {
    #[inline]
    fn from(tensor: &'a Tensor) -> Arg<'a> {
        Arg::new(sys::SWV_VALUE_TENSOR, sys::swv_value__bindgen_ty_1 { tensor: tensor.as_ptr() })
    }
}

macro_rules! integers {
    ($($type:ty),*) => {
        $(impl From<$type> for Arg<'_> {
            #[inline]
            fn from(number: $type) -> Self {
                Arg::number(sys::SWV_VALUE_INT, i64::from(number))
            }
        })*
    };
}
integers!(i8, i16, i32, i64, u8, u16, u32);

/// The kind of a number that the library has no type for, which it refuses.
const TOO_LARGE: i32 = -1;

/// What is wrong with the arguments, if that is it.
fn too_large(arguments: &[Arg<'_>]) -> Option<Error> {
    let place = arguments.iter().position(|argument| argument.0.kind == TOO_LARGE)?;
    let message =
        format!("argument {place} is more than {}, the largest integer there is", i64::MAX);
    Some(Error::new(Code::OutOfRange, message))
}

macro_rules! wide_integers {
    ($($type:ty),*) => {
        $(impl From<$type> for Arg<'_> {
            #[inline]
            fn from(number: $type) -> Self {
                match i64::try_from(number) {
                    Ok(number) => Arg::number(sys::SWV_VALUE_INT, number),
                    Err(_) => Arg::number(TOO_LARGE, 0),
                }
            }
        })*
    };
}
wide_integers!(isize, u64, usize);

macro_rules! floats {
    ($($type:ty),*) => {
        $(impl From<$type> for Arg<'_> {
            #[inline]
            fn from(number: $type) -> Self {
                let number = f64::from(number);
                Arg::new(sys::SWV_VALUE_FLOAT, sys::swv_value__bindgen_ty_1 { number })
            }
        })*
    };
}
floats!(f32, f64);

impl From<Complex<f64>> for Arg<'_> {
    fn from(number: Complex<f64>) -> Self {
        Arg::complex(number.re, number.im)
    }
}

impl From<bool> for Arg<'_> {
    fn from(flag: bool) -> Self {
        Arg::number(sys::SWV_VALUE_BOOL, i64::from(flag))
    }
}

impl From<DType> for Arg<'_> {
    fn from(dtype: DType) -> Self {
        Arg::new(sys::SWV_VALUE_DTYPE, sys::swv_value__bindgen_ty_1 { dtype: dtype as i32 })
    }
}

impl From<Device> for Arg<'_> {
    fn from(device: Device) -> Self {
        let device = device.to_raw();
        Arg::new(sys::SWV_VALUE_DEVICE, sys::swv_value__bindgen_ty_1 { device })
    }
}

impl<'a> From<&'a str> for Arg<'a> {
    fn from(text: &'a str) -> Arg<'a> {
        let string = sys::swv_value__bindgen_ty_1__bindgen_ty_2 {
            data: text.as_ptr().cast(),
            size: text.len(),
        };
        Arg::new(sys::SWV_VALUE_STRING, sys::swv_value__bindgen_ty_1 { string })
    }
}

impl<'a> From<&'a [i64]> for Arg<'a> {
    fn from(list: &'a [i64]) -> Arg<'a> {
        let ints =
            sys::swv_value__bindgen_ty_1__bindgen_ty_5 { data: list.as_ptr(), size: list.len() };
        Arg::new(sys::SWV_VALUE_INTS, sys::swv_value__bindgen_ty_1 { ints })
    }
}

impl<'a> From<&'a [f64]> for Arg<'a> {
    fn from(list: &'a [f64]) -> Arg<'a> {
        let floats =
            sys::swv_value__bindgen_ty_1__bindgen_ty_6 { data: list.as_ptr(), size: list.len() };
        Arg::new(sys::SWV_VALUE_FLOATS, sys::swv_value__bindgen_ty_1 { floats })
    }
}

impl<'a> From<&'a [Tensor]> for Arg<'a> {
    fn from(list: &'a [Tensor]) -> Arg<'a> {
        // A Tensor is a pointer to its handle and nothing else.
        let data = list.as_ptr() as *mut *mut sys::swv_tensor;
        let tensors = sys::swv_value__bindgen_ty_1__bindgen_ty_3 { data, size: list.len() };
        Arg::new(sys::SWV_VALUE_TENSORS, sys::swv_value__bindgen_ty_1 { tensors })
    }
}

impl<'a> From<&'a [Option<Tensor>]> for Arg<'a> {
    fn from(list: &'a [Option<Tensor>]) -> Arg<'a> {
        // The same, and None is NULL: a Tensor is a NonNull.
        let data = list.as_ptr() as *mut *mut sys::swv_tensor;
        let tensors = sys::swv_value__bindgen_ty_1__bindgen_ty_3 { data, size: list.len() };
        Arg::new(sys::SWV_VALUE_TENSORS, sys::swv_value__bindgen_ty_1 { tensors })
    }
}

impl<'a, T, const COUNT: usize> From<&'a [T; COUNT]> for Arg<'a>
where
    Arg<'a>: From<&'a [T]>,
{
    fn from(list: &'a [T; COUNT]) -> Arg<'a> {
        Arg::from(list.as_slice())
    }
}

impl<'a, T> From<&'a Vec<T>> for Arg<'a>
where
    Arg<'a>: From<&'a [T]>,
{
    fn from(list: &'a Vec<T>) -> Arg<'a> {
        Arg::from(list.as_slice())
    }
}

/// A list of flags, as the C interface has them.
#[derive(Clone, Debug)]
pub struct Flags(Vec<sys::swv_bool>);

impl<const COUNT: usize> From<[bool; COUNT]> for Flags {
    fn from(flags: [bool; COUNT]) -> Flags {
        Flags(flags.into_iter().map(i32::from).collect())
    }
}

impl<'a> From<&'a Flags> for Arg<'a> {
    fn from(list: &'a Flags) -> Arg<'a> {
        let bools = sys::swv_value__bindgen_ty_1__bindgen_ty_4 {
            data: list.0.as_ptr(),
            size: list.0.len(),
        };
        Arg::new(sys::SWV_VALUE_BOOLS, sys::swv_value__bindgen_ty_1 { bools })
    }
}

impl<'a, T> From<Option<T>> for Arg<'a>
where
    Arg<'a>: From<T>,
{
    fn from(value: Option<T>) -> Arg<'a> {
        value.map_or(Arg::NONE, Arg::from)
    }
}

/// A result of an operator, of whatever type it is.
#[derive(Debug)]
#[non_exhaustive]
#[allow(missing_docs)] // the names say it
pub enum Value {
    None,
    Tensor(Tensor),
    Bool(bool),
    Int(i64),
    Float(f64),
    Complex(f64, f64),
    Text(String),
    DType(DType),
    Device(Device),
    Tensors(Vec<Option<Tensor>>),
    Bools(Vec<bool>),
    Ints(Vec<i64>),
    Floats(Vec<f64>),
}

/// What the library has written as results, until it is taken.
struct Outputs<const COUNT: usize>([sys::swv_value; COUNT]);

impl<const COUNT: usize> Outputs<COUNT> {
    const fn new() -> Outputs<COUNT> {
        Outputs([sys::SWV_NONE; COUNT])
    }
}

impl<const COUNT: usize> Drop for Outputs<COUNT> {
    #[inline]
    fn drop(&mut self) {
        for value in &mut self.0 {
            if value.kind != sys::SWV_VALUE_NONE {
                // SAFETY: the library wrote it, as a result.
                unsafe { sys::swv_value_clear(value) }
            }
        }
    }
}

/// Takes a tensor out of a result; it is the caller's then.
#[inline]
fn take_tensor(value: &mut sys::swv_value) -> Option<Tensor> {
    if value.kind != sys::SWV_VALUE_TENSOR {
        return None;
    }
    // SAFETY: the kind says which member is there.
    let handle = unsafe { value.as_.tensor };
    value.kind = sys::SWV_VALUE_NONE;
    NonNull::new(handle).map(Tensor::from_handle)
}

/// # Safety
/// `data` has `size` elements, or is NULL if there are none.
unsafe fn to_vec<T: Copy>(data: *const T, size: usize) -> Vec<T> {
    if size == 0 {
        return Vec::new();
    }
    // SAFETY: as the caller says.
    unsafe { std::slice::from_raw_parts(data, size) }.to_vec()
}

impl Value {
    /// What is not taken stays for [`Outputs`] to free.
    fn take(value: &mut sys::swv_value) -> Result<Value> {
        // SAFETY: the kind says which member of the union is there, and the library wrote both.
        unsafe {
            let contents = &value.as_;
            Ok(match value.kind {
                sys::SWV_VALUE_NONE => Value::None,
                sys::SWV_VALUE_TENSOR => take_tensor(value).map_or(Value::None, Value::Tensor),
                sys::SWV_VALUE_BOOL => Value::Bool(contents.integer != 0),
                sys::SWV_VALUE_INT => Value::Int(contents.integer),
                sys::SWV_VALUE_FLOAT => Value::Float(contents.number),
                sys::SWV_VALUE_COMPLEX => {
                    Value::Complex(contents.complex_number.real, contents.complex_number.imaginary)
                }
                sys::SWV_VALUE_STRING => {
                    let text = to_vec(contents.string.data.cast::<u8>(), contents.string.size);
                    Value::Text(String::from_utf8_lossy(&text).into_owned())
                }
                sys::SWV_VALUE_DTYPE => Value::DType(DType::from_number(contents.dtype)?),
                sys::SWV_VALUE_DEVICE => Value::Device(Device::from_raw(contents.device)?),
                sys::SWV_VALUE_TENSORS => {
                    let list = contents.tensors;
                    let take = |i| {
                        let handle = mem::replace(&mut *list.data.add(i), ptr::null_mut());
                        NonNull::new(handle).map(Tensor::from_handle)
                    };
                    Value::Tensors((0..list.size).map(take).collect())
                }
                sys::SWV_VALUE_BOOLS => {
                    let flags = to_vec(contents.bools.data, contents.bools.size);
                    Value::Bools(flags.into_iter().map(|flag| flag != 0).collect())
                }
                sys::SWV_VALUE_INTS => Value::Ints(to_vec(contents.ints.data, contents.ints.size)),
                sys::SWV_VALUE_FLOATS => {
                    Value::Floats(to_vec(contents.floats.data, contents.floats.size))
                }
                number => return Err(Error::newer_library("value kind", number)),
            })
        }
    }
}

/// A type that a result can be taken as.
pub trait FromValue: Sized {
    /// Mismatches are [`InvalidArgument`](crate::Code::InvalidArgument).
    fn from_value(value: Value) -> Result<Self>;
}

macro_rules! from_value {
    ($($type:ty: $wanted:literal, $($pattern:pat => $result:expr),* ;)*) => {
        $(impl FromValue for $type {
            fn from_value(value: Value) -> Result<Self> {
                match value {
                    $($pattern => Ok($result),)*
                    other => Err(Error::invalid(format!(
                        concat!("the result is {:?}; wanted ", $wanted), other
                    ))),
                }
            }
        })*
    };
}

from_value! {
    Tensor: "a tensor", Value::Tensor(tensor) => tensor;
    Option<Tensor>: "a tensor or none", Value::Tensor(tensor) => Some(tensor), Value::None => None;
    bool: "a bool", Value::Bool(flag) => flag;
    i64: "an integer", Value::Int(number) => number;
    f64: "a number", Value::Float(number) => number, Value::Int(number) => number as f64;
    f32: "a number", Value::Float(number) => number as f32, Value::Int(number) => number as f32;
    F16: "a number", Value::Float(number) => F16::from(number as f32);
    Bf16: "a number", Value::Float(number) => Bf16::from(number as f32);
    Complex<f64>: "a number",
        Value::Complex(re, im) => Complex { re, im },
        Value::Float(re) => Complex { re, im: 0.0 },
        Value::Int(number) => Complex { re: number as f64, im: 0.0 };
    String: "text", Value::Text(text) => text;
    DType: "a dtype", Value::DType(dtype) => dtype;
    Vec<i64>: "integers", Value::Ints(list) => list;
    Vec<f64>: "numbers", Value::Floats(list) => list;
    Vec<bool>: "bools", Value::Bools(list) => list;
    Vec<Option<Tensor>>: "tensors", Value::Tensors(list) => list;
}

#[cfg(feature = "half")]
from_value! {
    half::f16: "a number", Value::Float(number) => half::f16::from_f32(number as f32);
    half::bf16: "a number", Value::Float(number) => half::bf16::from_f32(number as f32);
}

macro_rules! from_integer {
    ($($type:ty),*) => {
        $(impl FromValue for $type {
            /// A number that does not fit is [`OutOfRange`](crate::Code::OutOfRange).
            fn from_value(value: Value) -> Result<Self> {
                let number = i64::from_value(value)?;
                <$type>::try_from(number).map_err(|_| {
                    let wanted = stringify!($type);
                    Error::new(Code::OutOfRange, format!("the result is {number}; wanted {wanted}"))
                })
            }
        })*
    };
}
from_integer!(i8, i16, i32, u8, u16, u32, u64, usize);

impl FromValue for Vec<Tensor> {
    fn from_value(value: Value) -> Result<Self> {
        let list = Vec::<Option<Tensor>>::from_value(value)?;
        list.into_iter()
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| Error::invalid("a tensor of the results is none; wanted all of them"))
    }
}

impl FromValue for Value {
    fn from_value(value: Value) -> Result<Self> {
        Ok(value)
    }
}

/// Types that the results of a call can be taken as: `()`, which drops them, one [`FromValue`], a
/// tuple of them for operators with several results, or `Vec<Value>` for all that there are.
pub trait FromResults: Sized {
    #[doc(hidden)]
    fn receive(
        call: impl FnOnce(*mut sys::swv_value, usize, *mut usize) -> Result<()>,
    ) -> Result<Self>;
}

impl FromResults for () {
    fn receive(
        call: impl FnOnce(*mut sys::swv_value, usize, *mut usize) -> Result<()>,
    ) -> Result<Self> {
        call(ptr::null_mut(), 0, ptr::null_mut())
    }
}

impl FromResults for Tensor {
    /// The common case, without a detour.
    #[inline]
    fn receive(
        call: impl FnOnce(*mut sys::swv_value, usize, *mut usize) -> Result<()>,
    ) -> Result<Self> {
        let mut outputs = Outputs::<1>::new();
        call(outputs.0.as_mut_ptr(), 1, ptr::null_mut())?;
        match take_tensor(&mut outputs.0[0]) {
            Some(tensor) => Ok(tensor),
            None => Tensor::from_value(Value::take(&mut outputs.0[0])?),
        }
    }
}

macro_rules! one_result {
    ($($type:ty),*) => {
        $(impl FromResults for $type {
            fn receive(
                call: impl FnOnce(*mut sys::swv_value, usize, *mut usize) -> Result<()>,
            ) -> Result<Self> {
                let mut outputs = Outputs::<1>::new();
                call(outputs.0.as_mut_ptr(), 1, ptr::null_mut())?;
                FromValue::from_value(Value::take(&mut outputs.0[0])?)
            }
        })*
    };
}
one_result!(
    Value,
    Option<Tensor>,
    bool,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
    usize,
    f32,
    f64,
    F16,
    Bf16,
    Complex<f64>,
    String,
    DType,
    Vec<Tensor>,
    Vec<Option<Tensor>>,
    Vec<i64>,
    Vec<f64>,
    Vec<bool>
);

#[cfg(feature = "half")]
one_result!(half::f16, half::bf16);

macro_rules! several_results {
    ($count:literal: $($type:ident)*) => {
        impl<$($type: FromValue),*> FromResults for ($($type,)*) {
            fn receive(
                call: impl FnOnce(*mut sys::swv_value, usize, *mut usize) -> Result<()>,
            ) -> Result<Self> {
                let mut outputs = Outputs::<$count>::new();
                let mut count = 0;
                call(outputs.0.as_mut_ptr(), $count, &mut count)?;
                if count != $count {
                    return Err(Error::invalid(format!(
                        "the operator has {count} results; wanted {}", $count
                    )));
                }
                let mut values = outputs.0.iter_mut().map(Value::take);
                Ok(($($type::from_value(values.next().expect("counted")?)?,)*))
            }
        }
    };
}
several_results!(2: A B);
several_results!(3: A B C);
several_results!(4: A B C D);
several_results!(5: A B C D E);

impl FromResults for Vec<Value> {
    fn receive(
        call: impl FnOnce(*mut sys::swv_value, usize, *mut usize) -> Result<()>,
    ) -> Result<Self> {
        let mut outputs = Outputs::<32>::new();
        let mut count = 0;
        call(outputs.0.as_mut_ptr(), 32, &mut count)?;
        outputs.0.iter_mut().take(count).map(Value::take).collect()
    }
}

/// The ways that an operator's sharding rule offers, what each would cost, which would be taken,
/// and what follows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// For people.
    pub table: String,
    /// For programs.
    pub json: String,
}

impl Op {
    /// Looks an operator up. [`NotFound`](crate::Code::NotFound) suggests names that are nearly the
    /// same.
    pub fn find(name: &str) -> Result<Op> {
        let name = c_text(name, "operator").of("Op::find")?;
        create!(swv_op_find(name.as_ptr())).map(Op)
    }

    /// Calls it with arguments in the schema's order; those that are left out at the end have their
    /// defaults. Where the schema wants a tensor, a number does too. Recorded for gradients unless
    /// inside of [`no_grad`](crate::no_grad) or [`inference`](crate::inference).
    #[inline]
    #[track_caller]
    pub fn call<R: FromResults>(&self, arguments: &[Arg<'_>]) -> Result<R> {
        let _here = called_here();
        call_op(self.0, arguments).of("Op::call")
    }

    /// The same with further arguments by name.
    ///
    /// ```
    /// use shardweave::{args, Op, Tensor};
    /// let x = Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0], &[2, 2])?;
    /// let sum = Op::find("aten::sum")?;
    /// let rows: Tensor = sum.call_named(args![&x, &[1]], &[("keepdim", true.into())])?;
    /// assert_eq!(rows.sizes()?, [2, 1]);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    #[track_caller]
    pub fn call_named<R: FromResults>(
        &self,
        arguments: &[Arg<'_>],
        named: &[(&str, Arg<'_>)],
    ) -> Result<R> {
        let _here = called_here();
        let names = named
            .iter()
            .map(|(name, _)| c_text(name, "argument"))
            .collect::<Result<Vec<CString>>>()
            .of("Op::call_named")?;
        let names: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let mut all = arguments.to_vec();
        all.extend(named.iter().map(|(_, value)| *value));
        let mode = Mode::current();
        R::receive(|out, capacity, count| {
            call!(swv_op_call_named(
                self.as_ptr(),
                mode,
                all.as_ptr().cast(),
                all.len(),
                names.as_ptr(),
                names.len(),
                out,
                capacity,
                count,
            ))
        })
        .of("Op::call_named")
    }

    /// Why a call on sharded tensors would move what it moves. Nothing runs.
    /// [`FailedPrecondition`](crate::Code::FailedPrecondition) for an operator that is made of
    /// others (aten::linear): trace those.
    pub fn explain(&self, arguments: &[Arg<'_>]) -> Result<Explanation> {
        let (mut table, mut json) = (ptr::null_mut(), ptr::null_mut());
        call!(swv_op_explain(
            self.as_ptr(),
            arguments.as_ptr().cast(),
            arguments.len(),
            &mut table,
            &mut json,
        ))?;
        let text = |string| take_string(NonNull::new(string).expect("it was asked for"));
        Ok(Explanation { table: text(table), json: text(json) })
    }

    /// The schemas of its overloads, a line each.
    pub fn schema(&self) -> Result<String> {
        text!(swv_op_schema(self.as_ptr()))
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Op({})", self.schema().map_err(|_| fmt::Error)?)
    }
}

/// Calls a method of a TorchScript module; see module.rs.
#[track_caller]
pub(crate) fn call_module<R: FromResults>(
    module: *mut sys::swv_module,
    method: &str,
    arguments: &[Arg<'_>],
) -> Result<R> {
    let _here = called_here();
    let method = c_text(method, "method").of("ScriptModule::call")?;
    let mode = Mode::current();
    R::receive(|out, capacity, count| {
        call!(swv_module_call(
            module,
            method.as_ptr(),
            mode,
            arguments.as_ptr().cast(),
            arguments.len(),
            out,
            capacity,
            count,
        ))
    })
    .of("ScriptModule::call")
}

/// The one element of a tensor.
pub(crate) fn item(tensor: &Tensor) -> Result<Value> {
    let mut output = Outputs([sys::SWV_NONE]);
    call!(swv_tensor_item(tensor.as_ptr(), &mut output.0[0]))?;
    Value::take(&mut output.0[0])
}

/// An operator that is looked up when it is first called, and then stays for as long as the
/// process.
pub(crate) struct KnownOp {
    name: &'static str,
    /// The function of this crate that calls it, which errors name.
    caller: &'static str,
    op: AtomicPtr<sys::swv_op>,
}

impl KnownOp {
    pub(crate) const fn new(name: &'static str, caller: &'static str) -> KnownOp {
        KnownOp { name, caller, op: AtomicPtr::new(ptr::null_mut()) }
    }

    #[inline]
    #[track_caller]
    pub(crate) fn call<R: FromResults>(&self, arguments: &[Arg<'_>]) -> Result<R> {
        let _here = called_here();
        self.call_there(arguments)
    }

    /// The same where the caller has said from where it is called: a closure cannot.
    #[inline]
    pub(crate) fn call_there<R: FromResults>(&self, arguments: &[Arg<'_>]) -> Result<R> {
        let result = match NonNull::new(self.op.load(Ordering::Acquire)) {
            Some(handle) => call_op(handle, arguments),
            None => self.find().and_then(|handle| call_op(handle, arguments)),
        };
        result.of(self.caller)
    }

    #[cold]
    fn find(&self) -> Result<NonNull<sys::swv_op>> {
        let op = Op::find(self.name)?;
        let none = ptr::null_mut();
        match self.op.compare_exchange(none, op.as_ptr(), Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => Ok(mem::ManuallyDrop::new(op).0),
            Err(first) => Ok(NonNull::new(first).expect("another thread has set it")),
        }
    }
}

#[inline]
fn call_op<R: FromResults>(op: NonNull<sys::swv_op>, arguments: &[Arg<'_>]) -> Result<R> {
    let mode = Mode::current();
    R::receive(|out, capacity, count| {
        call!(swv_op_call(
            op.as_ptr(),
            mode,
            arguments.as_ptr().cast(),
            arguments.len(),
            out,
            capacity,
            count,
        ))
    })
    .map_err(|error| too_large(arguments).unwrap_or(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(kind: i32, integer: i64) -> sys::swv_value {
        sys::swv_value { kind, reserved: 0, as_: sys::swv_value__bindgen_ty_1 { integer } }
    }

    #[test]
    fn values_of_the_library() {
        let take = |kind, integer| Value::take(&mut raw(kind, integer));
        assert!(matches!(take(sys::SWV_VALUE_NONE, 0), Ok(Value::None)));
        assert!(matches!(take(sys::SWV_VALUE_INT, -3), Ok(Value::Int(-3))));
        assert!(matches!(take(sys::SWV_VALUE_BOOL, 1), Ok(Value::Bool(true))));
        assert!(matches!(take(sys::SWV_VALUE_DTYPE, 4), Ok(Value::DType(DType::Bf16))));
        let list = [1i64, 2, 3];
        let Arg(mut value, _) = Arg::from(&list);
        assert!(matches!(Value::take(&mut value), Ok(Value::Ints(ints)) if ints == list));
        let Arg(mut value, _) = Arg::from("text");
        assert!(matches!(Value::take(&mut value), Ok(Value::Text(text)) if text == "text"));
        // An empty list may be NULL.
        let ints = sys::swv_value__bindgen_ty_1__bindgen_ty_5 { data: ptr::null(), size: 0 };
        let mut value = raw(sys::SWV_VALUE_INTS, 0);
        value.as_.ints = ints;
        assert!(matches!(Value::take(&mut value), Ok(Value::Ints(ints)) if ints.is_empty()));
    }

    /// Not None, which an operator may give too.
    #[test]
    fn a_value_of_a_newer_library_is_an_error() {
        let mut value = raw(77, 0);
        let error = Value::take(&mut value).unwrap_err();
        assert_eq!(error.code(), Code::Unimplemented);
        assert!(error.message().contains("value kind 77"), "{error}");
        assert_eq!(value.kind, 77, "it is still there to be freed");
        assert!(Value::take(&mut raw(sys::SWV_VALUE_DTYPE, 77)).is_err());
    }
}
