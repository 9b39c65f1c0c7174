// Made by bindings/generate.py from bindings/operators.py. Do not edit.

use crate::args;
use crate::dtype::DType;
use crate::error::Result;
use crate::op::KnownOp;
use crate::tensor::{methods, Tensor};

/// Operators; of the same names in Go. Every other one is there by its name: [`Op`](crate::Op).
impl Tensor {
    methods! {
        /// The product of matrices, or of stacks of them.
        matmul(other: &Tensor) -> Tensor = "aten::matmul";
        /// The product with the transposed weight, plus the bias.
        linear(weight: &Tensor, bias: Option<&Tensor>) -> Tensor = "aten::linear";
        /// The rows of this table that the indices say.
        embedding(indices: &Tensor) -> Tensor = "aten::embedding";
        /// The tensor, normalized over the last dimensions, which have these sizes.
        layer_norm(sizes: &[i64], weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Tensor = "aten::layer_norm";
        /// The mean cross entropy of these scores, [.., classes], where the targets are the classes.
        cross_entropy(targets: &Tensor) -> Tensor = "aten::cross_entropy_loss";
        /// The mean squared difference.
        mse_loss(target: &Tensor) -> Tensor = "aten::mse_loss";

        /// Each element, or 0 where that is larger.
        relu() -> Tensor = "aten::relu";
        /// The Gaussian error linear unit, exact.
        gelu() -> Tensor = "aten::gelu";
        /// Each element times its sigmoid.
        silu() -> Tensor = "aten::silu";
        /// The hyperbolic tangent of each element.
        tanh() -> Tensor = "aten::tanh";
        /// 1 / (1 + exp(-x)) of each element x.
        sigmoid() -> Tensor = "aten::sigmoid";
        /// The exponential of each element.
        exp() -> Tensor = "aten::exp";
        /// The natural logarithm of each element.
        log() -> Tensor = "aten::log";
        /// The square root of each element.
        sqrt() -> Tensor = "aten::sqrt";
        /// 1 / sqrt(x) of each element x.
        rsqrt() -> Tensor = "aten::rsqrt";
        /// The absolute value of each element.
        abs() -> Tensor = "aten::abs";
        /// Each element to the power of a number.
        pow(exponent: f64) -> Tensor = "aten::pow.Tensor_Scalar";
        /// Each element, or the nearest number from min to max.
        clamp(min: f64, max: f64) -> Tensor = "aten::clamp";
        /// Exp(x) of each element x over the sum of these along a dimension.
        softmax(dim: i64) -> Tensor = "aten::softmax.int";
        /// The logarithm of the softmax.
        log_softmax(dim: i64) -> Tensor = "aten::log_softmax.int";
        /// The sum of the elements up to each one along a dimension.
        cumsum(dim: i64) -> Tensor = "aten::cumsum";

        /// The same memory with other sizes; one of them may be -1.
        view(sizes: &[i64]) -> Tensor = "aten::view";
        /// The same data with other sizes; one of them may be -1.
        reshape(sizes: &[i64]) -> Tensor = "aten::reshape";
        /// The tensor with the dimensions from start to end, both included, as one.
        flatten(start: i64, end: i64) -> Tensor = "aten::flatten.using_ints";
        /// A matrix, transposed.
        t() -> Tensor = "aten::t";
        /// The tensor with two dimensions exchanged.
        transpose(dim0: i64, dim1: i64) -> Tensor = "aten::transpose.int";
        /// The tensor with its dimensions in another order.
        permute(dims: &[i64]) -> Tensor = "aten::permute";
        /// The tensor with a new dimension of size 1.
        unsqueeze(dim: i64) -> Tensor = "aten::unsqueeze";
        /// The tensor without a dimension, if its size is 1.
        squeeze(dim: i64) -> Tensor = "aten::squeeze.dim";
        /// The tensor with dimensions of size 1 repeated up to these sizes.
        expand(sizes: &[i64]) -> Tensor = "aten::expand";
        /// So many indices of a dimension, from start on.
        narrow(dim: i64, start: i64, length: i64) -> Tensor = "aten::narrow";
        /// One index of a dimension, which is gone then.
        select(dim: i64, index: i64) -> Tensor = "aten::select.int";
        /// Some indices of a dimension.
        index_select(dim: i64, indices: &Tensor) -> Tensor = "aten::index_select";

        /// The elements of a where this tensor of bools is true, of b elsewhere.
        choose(a: &Tensor, b: &Tensor) -> Tensor = "aten::where.self";
        /// A tensor of its own with the same data.
        copy() -> Tensor = "aten::clone";
        /// The tensor, or a copy whose elements lie row-major.
        contiguous() -> Tensor = "aten::contiguous";
        /// The elements in another type.
        to_dtype(dtype: DType) -> Tensor = "aten::to.dtype";
    }
}
