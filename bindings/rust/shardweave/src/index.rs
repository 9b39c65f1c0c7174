//! `x.i((0, .., 1..3))`: parts of tensors.

use std::ops::{Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

use crate::args;
use crate::error::{Code, Error, Result};
use crate::op::{Arg, KnownOp};
use crate::tensor::Tensor;

/// In an index: a new dimension of size 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewAxis;

/// In an index: as many whole dimensions as the others leave; once at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ellipsis;

/// One place of an index; made by `From`, see [`Tensor::i`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum IndexItem<'a> {
    /// One index of a dimension, which is gone then.
    At(i64),
    /// From the first one up to the second one, which is not in it; None: from the beginning, or to
    /// the end.
    Range(Option<i64>, Option<i64>),
    /// See [`NewAxis`].
    NewAxis,
    /// See [`Ellipsis`].
    Ellipsis,
    /// The indices in a tensor of integers, or those where a tensor of bools is true.
    Tensor(&'a Tensor),
}

impl From<RangeFull> for IndexItem<'_> {
    fn from(_: RangeFull) -> Self {
        IndexItem::Range(None, None)
    }
}

impl From<NewAxis> for IndexItem<'_> {
    fn from(_: NewAxis) -> Self {
        IndexItem::NewAxis
    }
}

impl From<Ellipsis> for IndexItem<'_> {
    fn from(_: Ellipsis) -> Self {
        IndexItem::Ellipsis
    }
}

impl<'a> From<&'a Tensor> for IndexItem<'a> {
    fn from(indices: &'a Tensor) -> IndexItem<'a> {
        IndexItem::Tensor(indices)
    }
}

/// After the index `last`: None behind the last of all, which is -1.
fn after(last: i64) -> Option<i64> {
    match last {
        -1 => None,
        last => Some(last.saturating_add(1)),
    }
}

macro_rules! integers {
    ($($type:ty: $convert:expr),*) => {
        $(impl From<$type> for IndexItem<'_> {
            fn from(index: $type) -> Self {
                IndexItem::At($convert(index))
            }
        }

        impl From<Range<$type>> for IndexItem<'_> {
            fn from(range: Range<$type>) -> Self {
                IndexItem::Range(Some($convert(range.start)), Some($convert(range.end)))
            }
        }

        impl From<RangeInclusive<$type>> for IndexItem<'_> {
            fn from(range: RangeInclusive<$type>) -> Self {
                let (start, last) = range.into_inner();
                IndexItem::Range(Some($convert(start)), after($convert(last)))
            }
        }

        impl From<RangeFrom<$type>> for IndexItem<'_> {
            fn from(range: RangeFrom<$type>) -> Self {
                IndexItem::Range(Some($convert(range.start)), None)
            }
        }

        impl From<RangeTo<$type>> for IndexItem<'_> {
            fn from(range: RangeTo<$type>) -> Self {
                IndexItem::Range(None, Some($convert(range.end)))
            }
        }

        impl From<RangeToInclusive<$type>> for IndexItem<'_> {
            fn from(range: RangeToInclusive<$type>) -> Self {
                IndexItem::Range(None, after($convert(range.end)))
            }
        })*
    };
}
integers!(
    i64: i64::from,
    i32: i64::from,
    usize: |index| i64::try_from(index).unwrap_or(i64::MAX)
);

/// What [`Tensor::i`] takes: one place, a tuple of up to six, or a slice of [`IndexItem`]s.
pub trait TensorIndex<'a> {
    /// Its places, from the first dimension on.
    fn items(self) -> Vec<IndexItem<'a>>;
}

impl<'a, T: Into<IndexItem<'a>>> TensorIndex<'a> for T {
    fn items(self) -> Vec<IndexItem<'a>> {
        vec![self.into()]
    }
}

impl<'a> TensorIndex<'a> for &[IndexItem<'a>] {
    fn items(self) -> Vec<IndexItem<'a>> {
        self.to_vec()
    }
}

macro_rules! tuples {
    ($($($name:ident)*;)*) => {
        $(impl<'a, $($name: Into<IndexItem<'a>>),*> TensorIndex<'a> for ($($name,)*) {
            #[allow(non_snake_case)]
            fn items(self) -> Vec<IndexItem<'a>> {
                let ($($name,)*) = self;
                vec![$($name.into()),*]
            }
        })*
    };
}
tuples! {
    A;
    A B;
    A B C;
    A B C D;
    A B C D E;
    A B C D E F;
}

impl Tensor {
    /// A part of the tensor, as Python's brackets give it: dimension by dimension an integer (the
    /// dimension is gone then), a range, `..` (all of it), [`NewAxis`], [`Ellipsis`], or a tensor of
    /// indices or of bools. Negative numbers count from the end; a range beyond the end stops there,
    /// an integer beyond it is [`OutOfRange`](crate::Code::OutOfRange). Dimensions that are not named
    /// stay whole. It shares the tensor's memory, unless there is a tensor in the index.
    ///
    /// ```
    /// use shardweave::{Ellipsis, NewAxis, Tensor};
    /// let x = Tensor::arange(24)?.view(&[2, 3, 4])?;
    /// assert_eq!(x.i((1, 0, 2))?.item::<i64>()?, 14);
    /// assert_eq!(x.i((.., 1..))?.sizes()?, [2, 2, 4]);
    /// assert_eq!(x.i((0, -1, ..=2))?.to_vec::<i64>()?, [8, 9, 10]);
    /// assert_eq!(x.i((Ellipsis, NewAxis, ..-1))?.sizes()?, [2, 3, 1, 3]);
    /// let rows = Tensor::from_slice(&[2i64, 0], &[2])?;
    /// assert_eq!(x.i((0, &rows, 0))?.to_vec::<i64>()?, [8, 0]);
    /// assert_eq!(x.i(&x.gt(20)?)?.to_vec::<i64>()?, [21, 22, 23]);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    #[track_caller]
    pub fn i<'a>(&self, index: impl TensorIndex<'a>) -> Result<Tensor> {
        static SELECT: KnownOp = KnownOp::new("aten::select.int", "Tensor::i");
        static SLICE: KnownOp = KnownOp::new("aten::slice.Tensor", "Tensor::i");
        static UNSQUEEZE: KnownOp = KnownOp::new("aten::unsqueeze", "Tensor::i");
        static INDEX: KnownOp = KnownOp::new("aten::index.Tensor", "Tensor::i");
        let items = index.items();
        let whole = whole_dims(self, &items)?;
        let mut result = self.clone();
        let mut dim: i64 = 0;
        let mut more = 0; // dimensions of masks beyond their first: a mask is one entry
        let mut tensors: Vec<Option<Tensor>> = Vec::new();
        for item in items {
            match item {
                IndexItem::At(at) => {
                    result = SELECT.call(args![&result, dim, at])?;
                    continue;
                }
                IndexItem::Range(None, None) => {}
                IndexItem::Range(start, end) => {
                    result = SLICE.call(args![&result, dim, start, end])?;
                }
                IndexItem::NewAxis => result = UNSQUEEZE.call(args![&result, dim])?,
                IndexItem::Ellipsis => {
                    dim += whole;
                    continue;
                }
                IndexItem::Tensor(indices) => {
                    tensors.resize((dim - more) as usize, None);
                    tensors.push(Some(indices.clone()));
                    let mask = dims_of(indices)? - 1;
                    dim += mask;
                    more += mask;
                }
            }
            dim += 1;
        }
        if tensors.is_empty() {
            return Ok(result);
        }
        INDEX.call(&[Arg::from(&result), Arg::from(tensors.as_slice())])
    }
}

/// How many dimensions of the tensor a tensor in an index stands for: as many as a mask has.
fn dims_of(indices: &Tensor) -> Result<i64> {
    Ok(match indices.dtype()? {
        crate::DType::Bool => indices.ndim()? as i64,
        _ => 1,
    })
}

/// How many dimensions an [`Ellipsis`] stands for.
fn whole_dims(tensor: &Tensor, items: &[IndexItem<'_>]) -> Result<i64> {
    let (mut named, mut ellipses) = (0, 0);
    for item in items {
        match item {
            IndexItem::Ellipsis => ellipses += 1,
            IndexItem::NewAxis => {}
            IndexItem::Tensor(indices) => named += dims_of(indices)?,
            IndexItem::At(_) | IndexItem::Range(..) => named += 1,
        }
    }
    let ndim = tensor.ndim()? as i64;
    if ellipses > 1 || named > ndim {
        let (sizes, what) = (tensor.sizes()?, if ellipses > 1 { "Ellipsis" } else { "dimensions" });
        let given = if ellipses > 1 { ellipses } else { named };
        let wanted = if ellipses > 1 { 1 } else { ndim };
        return Err(Error::new(
            if ellipses > 1 { Code::InvalidArgument } else { Code::OutOfRange },
            format!(
                "Tensor::i: the index has {given} {what}; wanted {wanted} at most: the tensor's \
                 sizes are {sizes:?}"
            ),
        ));
    }
    Ok(ndim - named)
}
