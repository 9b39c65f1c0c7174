use std::fmt;

use super::{drawn, init, module, zeros, Layer};
use crate::args;
use crate::error::{Error, Of, Result};
use crate::members::{Members, Training};
use crate::module::Module;
use crate::op::KnownOp;
use crate::tensor::Tensor;

/// `x W^T + b`; `torch.nn.Linear`.
#[derive(Debug)]
pub struct Linear {
    /// [outputs, inputs].
    pub weight: Tensor,
    /// Of the outputs.
    pub bias: Option<Tensor>,
}

impl Linear {
    /// Drawn uniformly up to `1 / sqrt(inputs)`.
    pub fn new(inputs: i64, outputs: i64) -> Result<Linear> {
        Linear::with_bias(inputs, outputs, true).of("Linear::new")
    }

    /// The same, of a weight alone.
    pub fn without_bias(inputs: i64, outputs: i64) -> Result<Linear> {
        Linear::with_bias(inputs, outputs, false).of("Linear::without_bias")
    }

    /// With a bias, or without one.
    pub fn with_bias(inputs: i64, outputs: i64, bias: bool) -> Result<Linear> {
        let bias = bias.then(|| zeros(&[outputs])).transpose()?;
        drawn(Linear { weight: zeros(&[outputs, inputs])?, bias })
    }
}

module! {
    Linear { weight, bias }
    draw |m| init::weight_and_bias(&m.weight, m.bias.as_ref(), "Linear::reset_parameters")
}

impl Layer for Linear {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.linear(&self.weight, self.bias.as_ref())
    }
}

/// Rows of a table, by index; `torch.nn.Embedding`.
#[derive(Debug)]
pub struct Embedding {
    /// [rows, dim].
    pub weight: Tensor,
}

impl Embedding {
    /// Drawn from the normal distribution.
    pub fn new(rows: i64, dim: i64) -> Result<Embedding> {
        drawn(Embedding { weight: zeros(&[rows, dim])? }).of("Embedding::new")
    }
}

module!(Embedding { weight } draw |m| init::normal_(&m.weight, 0.0, 1.0));

impl Layer for Embedding {
    /// Indices of any shape; the rows are one dimension more.
    #[track_caller]
    fn forward(&self, indices: &Tensor) -> Result<Tensor> {
        self.weight.embedding(indices)
    }
}

/// Normalizes the last dimensions to mean 0 and variance 1; `torch.nn.LayerNorm`.
#[derive(Debug)]
pub struct LayerNorm {
    /// Of the sizes that are normalized; 1 at first.
    pub weight: Tensor,
    /// The same; 0 at first.
    pub bias: Option<Tensor>,
    sizes: Vec<i64>,
    eps: f64,
}

impl LayerNorm {
    /// Over the last dimension, of this size, with epsilon 1e-5.
    pub fn new(dim: i64) -> Result<LayerNorm> {
        LayerNorm::over(&[dim], 1e-5, true).of("LayerNorm::new")
    }

    /// Over the last dimensions, of these sizes; with a bias, or without one.
    pub fn over(sizes: &[i64], eps: f64, bias: bool) -> Result<LayerNorm> {
        let (weight, bias) = (zeros(sizes)?, bias.then(|| zeros(sizes)).transpose()?);
        let module = LayerNorm { weight, bias, sizes: sizes.to_vec(), eps };
        module.reset_parameters()?; // draws nothing
        Ok(module)
    }
}

module! {
    LayerNorm { weight, bias }
    draw |m| init::ones_(&m.weight).and_then(|()| m.bias.as_ref().map_or(Ok(()), init::zeros_))
}

impl Layer for LayerNorm {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.layer_norm(&self.sizes, Some(&self.weight), self.bias.as_ref(), self.eps)
    }
}

/// Divides by the root of the mean of squares over the last dimension (Zhang and Sennrich, 2019), in
/// `f32`, as Llama's does; `torch.nn.RMSNorm` with an epsilon.
#[derive(Debug)]
pub struct RmsNorm {
    /// 1 at first.
    pub weight: Tensor,
    dim: i64,
    eps: f64,
}

impl RmsNorm {
    /// Over the last dimension, of this size. Llama's epsilon is 1e-6 or 1e-5.
    pub fn new(dim: i64, eps: f64) -> Result<RmsNorm> {
        let module = RmsNorm { weight: zeros(&[dim])?, dim, eps };
        module.reset_parameters().of("RmsNorm::new")?; // draws nothing
        Ok(module)
    }
}

module!(RmsNorm { weight } draw |m| init::ones_(&m.weight));

impl Layer for RmsNorm {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.rms_norm(&[self.dim], Some(&self.weight), self.eps)
    }
}

/// A convolution of images, [batch, channels, height, width]; `torch.nn.Conv2d`.
#[derive(Debug)]
pub struct Conv2d {
    /// [outputs, inputs / groups, kernel height, kernel width].
    pub weight: Tensor,
    /// Of the outputs.
    pub bias: Option<Tensor>,
    options: Conv2dOptions,
}

/// Of [`Conv2d`]: torch's defaults, unless this says otherwise. Pairs are of height and width.
///
/// ```
/// use shardweave::nn::{Conv2dOptions, Layer};
/// use shardweave::Tensor;
/// let patches = Conv2dOptions::new(3, 8, [4, 4]).stride([4, 4]).bias(false).build()?;
/// assert_eq!(patches.forward(&Tensor::ones(&[2, 3, 16, 8])?)?.sizes()?, [2, 8, 4, 2]);
/// # Ok::<(), shardweave::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Conv2dOptions {
    inputs: i64,
    outputs: i64,
    kernel: [i64; 2],
    stride: [i64; 2],
    padding: [i64; 2],
    dilation: [i64; 2],
    groups: i64,
    bias: bool,
}

impl Conv2dOptions {
    /// From so many channels to so many.
    pub fn new(inputs: i64, outputs: i64, kernel: [i64; 2]) -> Conv2dOptions {
        let (stride, padding, dilation) = ([1, 1], [0, 0], [1, 1]);
        Conv2dOptions { inputs, outputs, kernel, stride, padding, dilation, groups: 1, bias: true }
    }

    /// How far it goes from one output to the next.
    pub fn stride(mut self, stride: [i64; 2]) -> Conv2dOptions {
        self.stride = stride;
        self
    }

    /// Zeros on each side.
    pub fn padding(mut self, padding: [i64; 2]) -> Conv2dOptions {
        self.padding = padding;
        self
    }

    /// How far the kernel's elements are apart.
    pub fn dilation(mut self, dilation: [i64; 2]) -> Conv2dOptions {
        self.dilation = dilation;
        self
    }

    /// Groups of channels that do not mix.
    pub fn groups(mut self, groups: i64) -> Conv2dOptions {
        self.groups = groups;
        self
    }

    /// Whether there is a bias.
    pub fn bias(mut self, bias: bool) -> Conv2dOptions {
        self.bias = bias;
        self
    }

    /// The module.
    pub fn build(self) -> Result<Conv2d> {
        let Conv2dOptions { inputs, outputs, kernel, groups, .. } = self;
        if groups < 1 || inputs % groups != 0 || outputs % groups != 0 {
            return Err(Error::invalid(format!(
                "Conv2dOptions::build: {inputs} channels to {outputs} in {groups} groups; wanted \
                 numbers of channels that these divide"
            )));
        }
        let weight = zeros(&[outputs, inputs / groups, kernel[0], kernel[1]]);
        let bias = self.bias.then(|| zeros(&[outputs])).transpose();
        weight
            .and_then(|weight| drawn(Conv2d { weight, bias: bias?, options: self }))
            .of("Conv2dOptions::build")
    }
}

impl Conv2d {
    /// With a square kernel; for others see [`Conv2dOptions`].
    pub fn new(inputs: i64, outputs: i64, kernel: i64) -> Result<Conv2d> {
        Conv2dOptions::new(inputs, outputs, [kernel; 2]).build().of("Conv2d::new")
    }
}

module! {
    Conv2d { weight, bias }
    draw |m| init::weight_and_bias(&m.weight, m.bias.as_ref(), "Conv2d::reset_parameters")
}

impl Layer for Conv2d {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let Conv2dOptions { stride, padding, dilation, groups, .. } = &self.options;
        x.conv2d(&self.weight, self.bias.as_ref(), stride, padding, dilation, *groups)
    }
}

/// In training each element is 0 with probability `p`, and the others grow by `1 / (1 - p)`;
/// `torch.nn.Dropout`. On a mesh by the element's global index: the same ones for every layout.
#[derive(Debug)]
pub struct Dropout {
    p: f64,
    training: Training,
}

impl Dropout {
    /// `p` from 0 to 1; another one is an error of the forward.
    pub fn new(p: f64) -> Dropout {
        Dropout { p, training: Training::new() }
    }
}

module!(Dropout { training });

impl Layer for Dropout {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if self.p == 0.0 || !self.training.get() {
            return Ok(x.clone());
        }
        static DROPOUT: KnownOp = KnownOp::new("aten::dropout", "Dropout::forward");
        DROPOUT.call(args![x, self.p, true])
    }
}

/// Modules one after the other, by their numbers; `torch.nn.Sequential`.
///
/// ```
/// use shardweave::nn::{Layer, LayerNorm, Linear, Sequential};
/// use shardweave::{Module, Tensor};
/// let model = Sequential::new()
///     .with(Linear::new(3, 8)?)
///     .function(|x| x.relu())
///     .with(Linear::new(8, 2)?);
/// assert_eq!(model.forward(&Tensor::ones(&[5, 3])?)?.sizes()?, [5, 2]);
/// let names: Vec<String> = model.parameters().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["0.weight", "0.bias", "2.weight", "2.bias"]);
/// # Ok::<(), shardweave::Error>(())
/// ```
#[derive(Default)]
pub struct Sequential(Vec<Box<dyn Layer>>);

impl Sequential {
    /// Of none: what goes in comes out.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// With a further module.
    pub fn with(mut self, module: impl Layer + 'static) -> Sequential {
        self.0.push(Box::new(module));
        self
    }

    /// With a function; it has a number, too.
    pub fn function(self, function: impl Fn(&Tensor) -> Result<Tensor> + 'static) -> Sequential {
        self.with(Lambda::new(function))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Debug for Sequential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sequential(of {})", self.len())
    }
}

impl Module for Sequential {
    fn members(&self, members: &mut Members) {
        self.0.members(members);
    }
}

impl Layer for Sequential {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(x.clone(), |x, module| module.forward(&x))
    }
}

/// A closure as a layer, without members: what a [`Sequential`] has between its modules.
///
/// ```
/// use shardweave::nn::{Lambda, Layer};
/// use shardweave::Tensor;
/// let double = Lambda::new(|x: &Tensor| x * 2.0);
/// assert_eq!(double.forward(&Tensor::ones(&[2])?)?.to_vec::<f32>()?, [2.0, 2.0]);
/// # Ok::<(), shardweave::Error>(())
/// ```
pub struct Lambda<F = Box<dyn Fn(&Tensor) -> Result<Tensor>>>(F);

impl<F: Fn(&Tensor) -> Result<Tensor>> Lambda<F> {
    /// Of this one.
    pub fn new(function: F) -> Lambda<F> {
        Lambda(function)
    }
}

impl<F> fmt::Debug for Lambda<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lambda")
    }
}

impl<F> Module for Lambda<F> {
    fn members(&self, _: &mut Members) {}
}

impl<F: Fn(&Tensor) -> Result<Tensor>> Layer for Lambda<F> {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        (self.0)(x)
    }
}
