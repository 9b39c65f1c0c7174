//! `x * &w + 1.0`: arithmetic and comparisons, with tensors, numbers and results on both sides.

use std::borrow::Borrow;
use std::ops;

use crate::element::Complex;
use crate::error::{Error, Result};
use crate::op::{Arg, KnownOp};
use crate::source::called_here;
use crate::tensor::Tensor;

/// What stands on the right of an operator, or is compared with: a tensor or a handle to one, a
/// number (`f64`, `f32`, `i64`, `i32`, [`Complex`]), a `bool`, or the `Result` of another operator,
/// whose error is passed on.
///
/// Integers stay integers: `&x * 2` of an `i64` tensor is an `i64` one, `&x * 2.0` is `f32`.
///
/// ```
/// use shardweave::Tensor;
/// let (x, w, b) = (Tensor::arange(3)?, Tensor::full(&[3], 0.5)?, Tensor::ones(&[3])?);
/// assert_eq!((&x * &w + &b)?.to_vec::<f32>()?, [1.0, 1.5, 2.0]); // one `?` for both
/// assert_eq!((&b - &x * 2)?.to_vec::<f32>()?, [1.0, -1.0, -3.0]);
/// assert_eq!((1 + &x)?.to_vec::<i64>()?, [1, 2, 3]);
/// let error = (&x * Tensor::ones(&[2])? + &b).unwrap_err(); // what failed first
/// assert!(error.message().starts_with("Tensor::mul: "));
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// Rust lets a crate give an operator a meaning only if one side is of a type of that crate: between
/// two results, or a result and a number, there is none, so these are joined by
/// [`TensorResult`]'s methods.
pub trait Operand: Sized {
    #[doc(hidden)]
    fn give<R>(self, to: impl FnOnce(Given<'_>) -> Result<R>) -> Result<R>;
}

/// An operand, as an argument of the operator's overload for tensors or of the one for numbers.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Given<'a> {
    Tensor(Arg<'a>),
    Number(Arg<'a>),
}

impl Operand for &Tensor {
    #[inline]
    fn give<R>(self, to: impl FnOnce(Given<'_>) -> Result<R>) -> Result<R> {
        to(Given::Tensor(Arg::from(self)))
    }
}

impl Operand for Tensor {
    #[inline]
    fn give<R>(self, to: impl FnOnce(Given<'_>) -> Result<R>) -> Result<R> {
        to(Given::Tensor(Arg::from(&self)))
    }
}

impl<T: Operand> Operand for Result<T> {
    #[inline]
    fn give<R>(self, to: impl FnOnce(Given<'_>) -> Result<R>) -> Result<R> {
        self?.give(to)
    }
}

macro_rules! numbers {
    ($($type:ty),*) => {
        $(impl Operand for $type {
            #[inline]
            fn give<R>(self, to: impl FnOnce(Given<'_>) -> Result<R>) -> Result<R> {
                to(Given::Number(Arg::from(self)))
            }
        })*
    };
}
numbers!(f64, f32, i64, i32, bool, Complex<f64>);

/// An operator of a tensor and a tensor or a number.
struct Binary {
    of_tensors: KnownOp,
    of_numbers: KnownOp,
}

impl Binary {
    const fn new(tensors: &'static str, numbers: &'static str, caller: &'static str) -> Binary {
        Binary {
            of_tensors: KnownOp::new(tensors, caller),
            of_numbers: KnownOp::new(numbers, caller),
        }
    }

    #[inline]
    #[track_caller]
    fn call<R: crate::op::FromResults>(&self, left: &Tensor, right: impl Operand) -> Result<R> {
        let _here = called_here();
        right.give(|right| match right {
            Given::Tensor(right) => self.of_tensors.call_there(&[Arg::from(left), right]),
            Given::Number(right) => self.of_numbers.call_there(&[Arg::from(left), right]),
        })
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident $binary:ident: $tensors:literal, $numbers:literal;)*) => {
        $(static $binary: Binary =
            Binary::new($tensors, $numbers, concat!("Tensor::", stringify!($method)));

        impl<R: Operand> ops::$trait<R> for &Tensor {
            type Output = Result<Tensor>;

            #[inline]
            #[track_caller]
            fn $method(self, right: R) -> Result<Tensor> {
                $binary.call(self, right)
            }
        }

        impl<R: Operand> ops::$trait<R> for Tensor {
            type Output = Result<Tensor>;

            #[inline]
            #[track_caller]
            fn $method(self, right: R) -> Result<Tensor> {
                $binary.call(&self, right)
            }
        }

        impl<L: Borrow<Tensor>> ops::$trait<&Tensor> for Result<L, Error> {
            type Output = Result<Tensor>;

            #[inline]
            #[track_caller]
            fn $method(self, right: &Tensor) -> Result<Tensor> {
                $binary.call(self?.borrow(), right)
            }
        }

        impl<L: Borrow<Tensor>> ops::$trait<Tensor> for Result<L, Error> {
            type Output = Result<Tensor>;

            #[inline]
            #[track_caller]
            fn $method(self, right: Tensor) -> Result<Tensor> {
                $binary.call(self?.borrow(), right)
            }
        })*
    };
}

operators! {
    Add add ADD: "aten::add.Tensor", "aten::add.Scalar";
    Sub sub SUB: "aten::sub.Tensor", "aten::sub.Scalar";
    Mul mul MUL: "aten::mul.Tensor", "aten::mul.Scalar";
    Div div DIV: "aten::div.Tensor", "aten::div.Scalar";
    Rem rem REM: "aten::remainder.Tensor", "aten::remainder.Scalar";
    BitAnd bitand AND: "aten::bitwise_and.Tensor", "aten::bitwise_and.Scalar";
    BitOr bitor OR: "aten::bitwise_or.Tensor", "aten::bitwise_or.Scalar";
    BitXor bitxor XOR: "aten::bitwise_xor.Tensor", "aten::bitwise_xor.Scalar";
}

/// A number on the left. Not of every type: with one for each kind of literal the compiler knows
/// what `2 * &x` means.
macro_rules! numbers_first {
    ($number:ty: $($trait:ident $method:ident |$left:ident, $right:ident| $result:expr;)*) => {
        $(impl ops::$trait<&Tensor> for $number {
            type Output = Result<Tensor>;

            #[inline]
            #[track_caller]
            fn $method(self, $right: &Tensor) -> Result<Tensor> {
                let $left = self;
                $result
            }
        }

        impl ops::$trait<Tensor> for $number {
            type Output = Result<Tensor>;

            #[inline]
            #[track_caller]
            fn $method(self, right: Tensor) -> Result<Tensor> {
                ops::$trait::$method(self, &right)
            }
        })*
    };
    ($($number:ty),*) => {
        $(numbers_first! { $number:
            Add add |left, right| right + left;
            Sub sub |left, right| {
                static RSUB: KnownOp = KnownOp::new("aten::rsub.Scalar", "Tensor::sub");
                RSUB.call(&[Arg::from(right), Arg::from(left)])
            };
            Mul mul |left, right| right * left;
            Div div |left, right| {
                static RECIPROCAL: KnownOp = KnownOp::new("aten::reciprocal", "Tensor::div");
                let reciprocal: Tensor = RECIPROCAL.call(&[Arg::from(right)])?;
                ops::Mul::mul(reciprocal, left)
            };
        })*
    };
}
numbers_first!(f64, i64, bool);

macro_rules! unary {
    ($($trait:ident $method:ident: $op:literal;)*) => {
        $(impl ops::$trait for &Tensor {
            type Output = Result<Tensor>;

            #[inline]
            #[track_caller]
            fn $method(self) -> Result<Tensor> {
                static OP: KnownOp = KnownOp::new($op, concat!("Tensor::", stringify!($method)));
                OP.call(&[Arg::from(self)])
            }
        }

        impl ops::$trait for Tensor {
            type Output = Result<Tensor>;

            #[inline]
            #[track_caller]
            fn $method(self) -> Result<Tensor> {
                (&self).$method()
            }
        })*
    };
}
unary! {
    Neg neg: "aten::neg";
    Not not: "aten::bitwise_not";
}

/// Operators between results, and between a result and a number, which Rust's own cannot be given
/// here; see [`Operand`].
///
/// ```
/// use shardweave::{Tensor, TensorResult};
/// let (x, y) = (Tensor::full(&[2], 3.0)?, Tensor::full(&[2], 2.0)?);
/// let z = (&x * &x).minus(&y * &y).over(&x + &y).plus(1.0)?;
/// assert_eq!(z.to_vec::<f32>()?, [2.0; 2]);
/// # Ok::<(), shardweave::Error>(())
/// ```
pub trait TensorResult: Sized {
    /// `self + right`.
    fn plus(self, right: impl Operand) -> Result<Tensor>;
    /// `self - right`.
    fn minus(self, right: impl Operand) -> Result<Tensor>;
    /// `self * right`.
    fn times(self, right: impl Operand) -> Result<Tensor>;
    /// `self / right`.
    fn over(self, right: impl Operand) -> Result<Tensor>;
}

impl<T: Borrow<Tensor>> TensorResult for Result<T, Error> {
    #[track_caller]
    fn plus(self, right: impl Operand) -> Result<Tensor> {
        ADD.call(self?.borrow(), right)
    }

    #[track_caller]
    fn minus(self, right: impl Operand) -> Result<Tensor> {
        SUB.call(self?.borrow(), right)
    }

    #[track_caller]
    fn times(self, right: impl Operand) -> Result<Tensor> {
        MUL.call(self?.borrow(), right)
    }

    #[track_caller]
    fn over(self, right: impl Operand) -> Result<Tensor> {
        DIV.call(self?.borrow(), right)
    }
}

macro_rules! methods {
    ($($(#[$doc:meta])* $name:ident -> $result:ty: $tensors:literal, $numbers:literal;)*) => {
        $($(#[$doc])*
        ///
        #[doc = concat!("LibTorch's `", $tensors, "` and `", $numbers, "`.")]
        #[track_caller]
        pub fn $name(&self, other: impl Operand) -> Result<$result> {
            static OP: Binary =
                Binary::new($tensors, $numbers, concat!("Tensor::", stringify!($name)));
            OP.call(self, other)
        })*
    };
}

/// Comparisons with tensors and numbers: tensors of bools.
///
/// ```
/// use shardweave::Tensor;
/// let x = Tensor::arange(4)?;
/// let inner = (x.ge(1)? & x.ne(3.0)?)?;
/// assert_eq!(inner.to_vec::<bool>()?, [false, true, true, false]);
/// # Ok::<(), shardweave::Error>(())
/// ```
impl Tensor {
    methods! {
        /// Where it is less.
        lt -> Tensor: "aten::lt.Tensor", "aten::lt.Scalar";
        /// Where it is less or equal.
        le -> Tensor: "aten::le.Tensor", "aten::le.Scalar";
        /// Where it is greater.
        gt -> Tensor: "aten::gt.Tensor", "aten::gt.Scalar";
        /// Where it is greater or equal.
        ge -> Tensor: "aten::ge.Tensor", "aten::ge.Scalar";
        /// Where they are equal.
        eq -> Tensor: "aten::eq.Tensor", "aten::eq.Scalar";
        /// Where they are not.
        ne -> Tensor: "aten::ne.Tensor", "aten::ne.Scalar";
    }
}

/// Arithmetic that writes to the tensor, which all handles to it see. Of a leaf that requires grad
/// only inside of [`no_grad`](crate::no_grad).
impl Tensor {
    methods! {
        /// Adds another one, or a number.
        add_ -> (): "aten::add_.Tensor", "aten::add_.Scalar";
        /// Subtracts another one, or a number.
        sub_ -> (): "aten::sub_.Tensor", "aten::sub_.Scalar";
        /// Multiplies by another one, or a number.
        mul_ -> (): "aten::mul_.Tensor", "aten::mul_.Scalar";
        /// Divides by another one, or a number.
        div_ -> (): "aten::div_.Tensor", "aten::div_.Scalar";
    }
}
