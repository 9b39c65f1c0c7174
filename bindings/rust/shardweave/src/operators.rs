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
        /// The mean cross entropy of these scores, [rows, classes], where the targets are the classes.
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

        /// The means of as many equal parts of an image as these sizes say.
        adaptive_avg_pool2d(sizes: &[i64]) -> Tensor = "aten::adaptive_avg_pool2d";
        /// The means of the windows of an image.
        avg_pool2d(kernel: &[i64], stride: &[i64], padding: &[i64]) -> Tensor = "aten::avg_pool2d";
        /// The mean binary cross entropy of the sigmoid of these scores.
        binary_cross_entropy_with_logits(target: &Tensor) -> Tensor = "aten::binary_cross_entropy_with_logits";
        /// The products of two stacks of matrices, [n, ., .].
        bmm(other: &Tensor) -> Tensor = "aten::bmm";
        /// Each element rounded up.
        ceil() -> Tensor = "aten::ceil";
        /// The convolution of [batch, channels, length] with the weight, [out, in / groups, width].
        conv1d(weight: &Tensor, bias: Option<&Tensor>, stride: &[i64], padding: &[i64], dilation: &[i64], groups: i64) -> Tensor = "aten::conv1d";
        /// The convolution of [batch, channels, height, width] with the weight, [out, in / groups, height, width].
        conv2d(weight: &Tensor, bias: Option<&Tensor>, stride: &[i64], padding: &[i64], dilation: &[i64], groups: i64) -> Tensor = "aten::conv2d";
        /// The cosine of each element.
        cos() -> Tensor = "aten::cos";
        /// A diagonal of two dimensions, as the last dimension; offset 0 is the main one.
        diagonal(offset: i64, dim0: i64, dim1: i64) -> Tensor = "aten::diagonal";
        /// The elements, each 0 with probability p, the others times 1 / (1 - p); all as they are if it is not to train.
        dropout(p: f64, train: bool) -> Tensor = "aten::dropout";
        /// Each element x, or alpha (exp(x) - 1) below 0.
        elu(alpha: f64) -> Tensor = "aten::elu";
        /// The error function of each element.
        erf() -> Tensor = "aten::erf";
        /// 2 to the power of each element.
        exp2() -> Tensor = "aten::exp2";
        /// Exp(x) - 1 of each element x, exact near 0.
        expm1() -> Tensor = "aten::expm1";
        /// The elements in the reverse order along some dimensions.
        flip(dims: &[i64]) -> Tensor = "aten::flip";
        /// Each element rounded down.
        floor() -> Tensor = "aten::floor";
        /// For each of the indices the element at that place along a dimension.
        gather(dim: i64, indices: &Tensor) -> Tensor = "aten::gather";
        /// The first half along a dimension times the sigmoid of the second.
        glu(dim: i64) -> Tensor = "aten::glu";
        /// [batch, channels, ...], normalized over each of the groups of channels.
        group_norm(groups: i64, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Tensor = "aten::group_norm";
        /// X min(max(x + 3, 0), 6) / 6 of each element x.
        hardswish() -> Tensor = "aten::hardswish";
        /// Whether each element is a finite number.
        isfinite() -> Tensor = "aten::isfinite";
        /// Whether each element is infinite.
        isinf() -> Tensor = "aten::isinf";
        /// Whether each element is no number.
        isnan() -> Tensor = "aten::isnan";
        /// The mean absolute difference.
        l1_loss(target: &Tensor) -> Tensor = "aten::l1_loss";
        /// Each element, times the slope below 0.
        leaky_relu(slope: f64) -> Tensor = "aten::leaky_relu";
        /// The tensor plus weight times what end is more than it.
        lerp(end: &Tensor, weight: f64) -> Tensor = "aten::lerp.Scalar";
        /// The logarithm to the base 10 of each element.
        log10() -> Tensor = "aten::log10";
        /// The natural logarithm of 1 + x of each element x, exact near 0.
        log1p() -> Tensor = "aten::log1p";
        /// The logarithm to the base 2 of each element.
        log2() -> Tensor = "aten::log2";
        /// The logarithm of the sigmoid of each element.
        log_sigmoid() -> Tensor = "aten::log_sigmoid";
        /// Whether both elements are true, or other than 0.
        logical_and(other: &Tensor) -> Tensor = "aten::logical_and";
        /// Whether each element is false, or 0.
        logical_not() -> Tensor = "aten::logical_not";
        /// Whether one of both elements is true, or other than 0.
        logical_or(other: &Tensor) -> Tensor = "aten::logical_or";
        /// Whether just one of both elements is true, or other than 0.
        logical_xor(other: &Tensor) -> Tensor = "aten::logical_xor";
        /// The logarithm of the sum of exp(x) of the elements x along some dimensions.
        logsumexp(dims: &[i64]) -> Tensor = "aten::logsumexp";
        /// The elements, or the value where the mask is true.
        masked_fill(mask: &Tensor, value: f64) -> Tensor = "aten::masked_fill.Scalar";
        /// The elements where the mask is true, as a vector.
        masked_select(mask: &Tensor) -> Tensor = "aten::masked_select";
        /// The largest elements of the windows of an image.
        max_pool2d(kernel: &[i64], stride: &[i64], padding: &[i64]) -> Tensor = "aten::max_pool2d";
        /// The larger one of both elements.
        maximum(other: &Tensor) -> Tensor = "aten::maximum";
        /// The smaller one of both elements.
        minimum(other: &Tensor) -> Tensor = "aten::minimum";
        /// X tanh(log(1 + exp(x))) of each element x.
        mish() -> Tensor = "aten::mish";
        /// Each element, or a number where it is none; infinite ones are the largest there are.
        nan_to_num(nan: f64) -> Tensor = "aten::nan_to_num";
        /// Where the elements are other than 0: a row of indices for each.
        nonzero() -> Tensor = "aten::nonzero";
        /// For each of these integers a row of as many zeros as there are classes, with a 1 at its place.
        one_hot(classes: i64) -> Tensor = "aten::one_hot";
        /// The products of each element of one vector with each of another.
        outer(other: &Tensor) -> Tensor = "aten::outer";
        /// The product of all elements.
        prod() -> Tensor = "aten::prod";
        /// 1 / x of each element x.
        reciprocal() -> Tensor = "aten::reciprocal";
        /// The tensor so many times along each dimension.
        repeat(counts: &[i64]) -> Tensor = "aten::repeat";
        /// Each index of a dimension so many times.
        repeat_interleave(count: i64, dim: i64) -> Tensor = "aten::repeat_interleave.self_int";
        /// The tensor over the root of the mean of its squares over the last dimensions, which have these sizes, times the weight.
        rms_norm(sizes: &[i64], weight: Option<&Tensor>, eps: f64) -> Tensor = "aten::rms_norm";
        /// The elements moved so far along some dimensions; what leaves at the end comes in at the beginning.
        roll(shifts: &[i64], dims: &[i64]) -> Tensor = "aten::roll";
        /// Each element rounded to the nearest integer, of two to the even one.
        round() -> Tensor = "aten::round";
        /// A copy in which each element of the source is at the place along a dimension that the indices say.
        scatter(dim: i64, indices: &Tensor, source: &Tensor) -> Tensor = "aten::scatter.src";
        /// A copy to which each element of the source is added at the place along a dimension that the indices say.
        scatter_add(dim: i64, indices: &Tensor, source: &Tensor) -> Tensor = "aten::scatter_add";
        /// -1, 0 or 1: the sign of each element.
        sign() -> Tensor = "aten::sign";
        /// The sine of each element.
        sin() -> Tensor = "aten::sin";
        /// The mean of half the square of each difference, or, from 1 on, of the difference less a half.
        smooth_l1_loss(target: &Tensor) -> Tensor = "aten::smooth_l1_loss";
        /// Log(1 + exp(x)) of each element x.
        softplus() -> Tensor = "aten::softplus";
        /// The square of each element.
        square() -> Tensor = "aten::square";
        /// The tangent of each element.
        tan() -> Tensor = "aten::tan";
        /// The elements on and below a diagonal, and 0 elsewhere; 0 is the main one, 1 the one above.
        tril(diagonal: i64) -> Tensor = "aten::tril";
        /// The elements on and above a diagonal, and 0 elsewhere; 0 is the main one, 1 the one above.
        triu(diagonal: i64) -> Tensor = "aten::triu";
        /// Each element rounded towards 0.
        trunc() -> Tensor = "aten::trunc";
        /// The tensor with one dimension as several of these sizes; one of them may be -1.
        unflatten(dim: i64, sizes: &[i64]) -> Tensor = "aten::unflatten.int";
    }
}
