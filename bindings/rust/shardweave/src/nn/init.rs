//! Initial values of parameters, by the names of `torch.nn.init`. They write to the tensor, without
//! recording it for gradients.
//!
//! A sharded tensor draws from its mesh, each element by its global index: the same numbers for
//! every layout and number of ranks, and each rank draws its own part alone
//! ([`Mesh::seed`](crate::Mesh::seed)). A plain one draws from the process
//! ([`manual_seed`](crate::manual_seed)).
//!
//! ```
//! use shardweave::nn::init::{self, Fan, Gain};
//! use shardweave::Tensor;
//! let weight = Tensor::zeros(&[4, 3])?;
//! init::kaiming_uniform_(&weight, Fan::In, Gain::Relu)?;
//! assert!(weight.abs()?.amax(&[], false)?.item::<f64>()? <= 2f64.sqrt());
//! # Ok::<(), shardweave::Error>(())
//! ```

use super::New;
use crate::args;
use crate::autograd::no_grad;
use crate::error::{Error, Of, Result};
use crate::op::KnownOp;
use crate::tensor::Tensor;

/// Calls `body`, in which new modules leave their parameters at 0, of this thread alone: they are
/// loaded then ([`Module::load`](crate::Module::load)), or drawn on a mesh
/// ([`Module::initialize`](crate::Module::initialize)).
pub fn skip<R>(body: impl FnOnce() -> R) -> R {
    New { draws: false, ..New::current() }.during(body)
}

/// What stands behind a layer: by which number its weights grow so that the variance of what goes
/// through stays.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Gain {
    /// Nothing, or a sigmoid: 1.
    Linear,
    /// 5/3.
    Tanh,
    /// The square root of 2.
    Relu,
    /// With this negative slope.
    LeakyRelu(f64),
    /// 3/4.
    Selu,
    /// Any.
    Of(f64),
}

impl Gain {
    /// The number.
    pub fn value(self) -> f64 {
        match self {
            Gain::Linear => 1.0,
            Gain::Tanh => 5.0 / 3.0,
            Gain::Relu => 2f64.sqrt(),
            Gain::LeakyRelu(slope) => (2.0 / (1.0 + slope * slope)).sqrt(),
            Gain::Selu => 0.75,
            Gain::Of(gain) => gain,
        }
    }
}

/// By which side of a layer its weights are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fan {
    /// Its inputs: what goes forward keeps its variance.
    In,
    /// Its outputs: gradients do.
    Out,
}

/// Inputs and outputs of a layer with this weight, [outputs, inputs, ...].
fn fans(tensor: &Tensor, caller: &str) -> Result<(f64, f64)> {
    let sizes = tensor.sizes().of(caller)?;
    if sizes.len() < 2 {
        return Err(Error::invalid(format!(
            "{caller}: the tensor's sizes are {sizes:?}; wanted two dimensions at least"
        )));
    }
    let kernel: i64 = sizes[2..].iter().product();
    Ok(((sizes[1] * kernel) as f64, (sizes[0] * kernel) as f64))
}

fn by_fan(tensor: &Tensor, fan: Fan, gain: Gain, caller: &str) -> Result<f64> {
    let (inputs, outputs) = fans(tensor, caller)?;
    let fan = if fan == Fan::In { inputs } else { outputs };
    // A weight without elements has nothing to draw.
    Ok(gain.value() / fan.max(1.0).sqrt())
}

fn by_both(tensor: &Tensor, gain: f64, caller: &str) -> Result<f64> {
    let (inputs, outputs) = fans(tensor, caller)?;
    Ok(gain * (2.0 / (inputs + outputs).max(1.0)).sqrt())
}

/// Uniform from `-bound` to `bound`, where the standard deviation is this one.
fn uniform_of(tensor: &Tensor, std: f64, caller: &str) -> Result<()> {
    let bound = 3f64.sqrt() * std;
    no_grad(|| tensor.uniform_(-bound, bound)).of(caller)
}

/// All elements are 0.
pub fn zeros_(tensor: &Tensor) -> Result<()> {
    no_grad(|| tensor.zero_()).of("init::zeros_")
}

/// All elements are 1.
pub fn ones_(tensor: &Tensor) -> Result<()> {
    constant_(tensor, 1.0).of("init::ones_")
}

/// All elements are one number.
pub fn constant_(tensor: &Tensor, value: f64) -> Result<()> {
    no_grad(|| tensor.fill_(value)).of("init::constant_")
}

/// Uniform in [from, to).
pub fn uniform_(tensor: &Tensor, from: f64, to: f64) -> Result<()> {
    no_grad(|| tensor.uniform_(from, to)).of("init::uniform_")
}

/// Normal.
pub fn normal_(tensor: &Tensor, mean: f64, std: f64) -> Result<()> {
    no_grad(|| tensor.normal_(mean, std)).of("init::normal_")
}

/// Normal, of which only numbers from `min` to `max` are drawn.
pub fn trunc_normal_(tensor: &Tensor, mean: f64, std: f64, min: f64, max: f64) -> Result<()> {
    let is_wrong = !(min < max && std > 0.0);
    if is_wrong {
        return Err(Error::invalid(format!(
            "init::trunc_normal_: std {std}, from {min} to {max}; wanted a std above 0, and min below \
             max"
        )));
    }
    static ERFINV: KnownOp = KnownOp::new("aten::erfinv", "init::trunc_normal_");
    // By the inverse of the distribution: uniform between the values of it at both ends.
    let below = |x: f64| erf((x - mean) / std / 2f64.sqrt());
    no_grad(|| {
        tensor.uniform_(below(min), below(max))?;
        let normal: Tensor = ERFINV.call(args![tensor])?;
        normal.mul_(std * 2f64.sqrt())?;
        normal.add_(mean)?;
        tensor.copy_(&normal.clamp(min, max)?)
    })
    .of("init::trunc_normal_")
}

/// The error function, by the library's own: Rust has none.
fn erf(x: f64) -> f64 {
    Tensor::from_slice(&[x], &[]).and_then(|x| x.erf()?.item()).unwrap_or(f64::NAN)
}

/// Uniform, for layers that keep the variance of what goes forward as well as of gradients, as far as
/// both can be (Glorot and Bengio, 2010).
pub fn xavier_uniform_(tensor: &Tensor, gain: Gain) -> Result<()> {
    let caller = "init::xavier_uniform_";
    uniform_of(tensor, by_both(tensor, gain.value(), caller)?, caller)
}

/// The same, normal.
pub fn xavier_normal_(tensor: &Tensor, gain: Gain) -> Result<()> {
    let caller = "init::xavier_normal_";
    let std = by_both(tensor, gain.value(), caller)?;
    normal_(tensor, 0.0, std).of(caller)
}

/// Uniform, for layers that keep the variance of what goes through (He and others, 2015). torch's
/// own layers draw by `Fan::In, Gain::LeakyRelu(5f64.sqrt())`.
pub fn kaiming_uniform_(tensor: &Tensor, fan: Fan, gain: Gain) -> Result<()> {
    let caller = "init::kaiming_uniform_";
    uniform_of(tensor, by_fan(tensor, fan, gain, caller)?, caller)
}

/// The same, normal.
pub fn kaiming_normal_(tensor: &Tensor, fan: Fan, gain: Gain) -> Result<()> {
    let caller = "init::kaiming_normal_";
    let std = by_fan(tensor, fan, gain, caller)?;
    normal_(tensor, 0.0, std).of(caller)
}

/// As torch draws weight and bias of [`Linear`](super::Linear) and [`Conv2d`](super::Conv2d).
pub(super) fn weight_and_bias(weight: &Tensor, bias: Option<&Tensor>, caller: &str) -> Result<()> {
    kaiming_uniform_(weight, Fan::In, Gain::LeakyRelu(5f64.sqrt())).of(caller)?;
    if let Some(bias) = bias {
        let bound = 1.0 / fans(weight, caller)?.0.max(1.0).sqrt();
        uniform_(bias, -bound, bound).of(caller)?;
    }
    Ok(())
}
