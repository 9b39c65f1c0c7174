use super::{drawn, init, module, zeros, Layer, Linear};
use crate::args;
use crate::arithmetic::TensorResult;
use crate::error::{Error, Of, Result};
use crate::members::{Members, Training};
use crate::module::Module;
use crate::op::KnownOp;
use crate::tensor::Tensor;

static ATTENTION: KnownOp =
    KnownOp::new("aten::scaled_dot_product_attention", "Attention::forward");

/// Attention of many heads, by LibTorch's scaled_dot_product_attention, with the names that Hugging
/// Face's Llama, Qwen and Mistral have: `q_proj`, `k_proj`, `v_proj`, `o_proj`. Inputs and outputs
/// are [batch, length, dim].
///
/// Tensor parallelism cuts `{q,k,v}_proj` by their outputs (`Shard(0)`) and `o_proj.weight` by its
/// inputs (`Shard(1)`): each rank has some of the heads.
///
/// ```
/// use shardweave::nn::{AttentionOptions, Layer};
/// use shardweave::{Module, Tensor};
/// // 4 heads of queries, 2 of keys and values, each token sees those before it.
/// let attention = AttentionOptions::new(32, 4).kv_heads(2).causal(true).bias(false).build()?;
/// assert_eq!(attention.forward(&Tensor::ones(&[2, 5, 32])?)?.sizes()?, [2, 5, 32]);
/// let (name, weight) = attention.parameters().remove(1);
/// assert_eq!((name.as_str(), weight.sizes()?), ("k_proj.weight", vec![16, 32]));
/// # Ok::<(), shardweave::Error>(())
/// ```
#[derive(Debug)]
pub struct Attention {
    /// Of queries.
    pub q_proj: Linear,
    /// Of keys.
    pub k_proj: Linear,
    /// Of values.
    pub v_proj: Linear,
    /// Of the heads' results.
    pub o_proj: Linear,
    training: Training,
    options: AttentionOptions,
}

/// Of [`Attention`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionOptions {
    dim: i64,
    heads: i64,
    kv_heads: i64,
    head_dim: Option<i64>,
    bias: bool,
    out_bias: bool,
    causal: bool,
    dropout: f64,
}

impl AttentionOptions {
    /// So many heads of `dim / heads` features each, with biases, where every token sees every one.
    pub fn new(dim: i64, heads: i64) -> AttentionOptions {
        AttentionOptions {
            dim,
            heads,
            kv_heads: heads,
            head_dim: None,
            bias: true,
            out_bias: true,
            causal: false,
            dropout: 0.0,
        }
    }

    /// Heads of keys and values, each for several of queries (Ainslie and others, 2023); they divide
    /// the heads.
    pub fn kv_heads(mut self, kv_heads: i64) -> AttentionOptions {
        self.kv_heads = kv_heads;
        self
    }

    /// Features of a head.
    pub fn head_dim(mut self, head_dim: i64) -> AttentionOptions {
        self.head_dim = Some(head_dim);
        self
    }

    /// Whether there are biases.
    pub fn bias(mut self, bias: bool) -> AttentionOptions {
        (self.bias, self.out_bias) = (bias, bias);
        self
    }

    /// Whether `o_proj` has one; after [`bias`](AttentionOptions::bias). Qwen's has none.
    pub fn out_bias(mut self, bias: bool) -> AttentionOptions {
        self.out_bias = bias;
        self
    }

    /// Whether a token sees only those before it and itself.
    pub fn causal(mut self, causal: bool) -> AttentionOptions {
        self.causal = causal;
        self
    }

    /// How much of the attention is dropped in training.
    pub fn dropout(mut self, p: f64) -> AttentionOptions {
        self.dropout = p;
        self
    }

    /// The module.
    pub fn build(self) -> Result<Attention> {
        let AttentionOptions { dim, heads, kv_heads, .. } = self;
        let wrong = |what: String| Err(Error::invalid(format!("AttentionOptions::build: {what}")));
        if heads < 1 || kv_heads < 1 || heads % kv_heads != 0 {
            return wrong(format!(
                "{heads} heads, {kv_heads} of keys and values; wanted a number that divides the heads"
            ));
        }
        if self.head_dim.is_none() && dim % heads != 0 {
            return wrong(format!(
                "{heads} heads of {dim} features; wanted heads that divide these"
            ));
        }
        let head_dim = self.head_dim.unwrap_or(dim / heads);
        let (inner, kv) = (heads * head_dim, kv_heads * head_dim);
        let build = || -> Result<Attention> {
            Ok(Attention {
                q_proj: Linear::with_bias(dim, inner, self.bias)?,
                k_proj: Linear::with_bias(dim, kv, self.bias)?,
                v_proj: Linear::with_bias(dim, kv, self.bias)?,
                o_proj: Linear::with_bias(inner, dim, self.out_bias)?,
                training: Training::new(),
                options: AttentionOptions { head_dim: Some(head_dim), ..self },
            })
        };
        build().of("AttentionOptions::build")
    }
}

module!(Attention { q_proj, k_proj, v_proj, o_proj, training });

impl Attention {
    /// Of so many heads, with biases, without a mask; for others see [`AttentionOptions`].
    pub fn new(dim: i64, heads: i64) -> Result<Attention> {
        AttentionOptions::new(dim, heads).build().of("Attention::new")
    }

    /// With queries and keys turned by their positions, and a mask: of bools, true where a token
    /// (second to last dimension) sees another one (last one), or of numbers that are added to the
    /// scores. A mask takes the place of [`causal`](AttentionOptions::causal).
    #[track_caller]
    pub fn forward_with(
        &self,
        x: &Tensor,
        rotary: Option<&Rotary>,
        mask: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.attend(x, x, rotary, mask, self.options.causal)
    }

    /// Of the tokens of `x`, [batch, length, features], to those of `context`, [batch, other length,
    /// features]: all of them ([`causal`](AttentionOptions::causal) says nothing of another
    /// sequence), or those of the mask, which [batch, heads, length, other length] broadcasts.
    #[track_caller]
    pub fn cross(&self, x: &Tensor, context: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let (sizes, other) = (x.sizes()?, context.sizes()?);
        let dim = self.options.dim;
        let is_of = |sizes: &[i64]| sizes.len() == 3 && sizes[2] == dim;
        if !is_of(&sizes) || !is_of(&other) || sizes[0] != other[0] {
            return Err(Error::invalid(format!(
                "Attention::cross: 'x' is {sizes:?}, 'context' {other:?}; wanted [batch, length, \
                 {dim}], of one batch"
            )));
        }
        self.attend(x, context, None, mask, false).of("Attention::cross")
    }

    #[track_caller]
    fn attend(
        &self,
        x: &Tensor,
        context: &Tensor,
        rotary: Option<&Rotary>,
        mask: Option<&Tensor>,
        causal: bool,
    ) -> Result<Tensor> {
        let options = &self.options;
        let head_dim = options.head_dim.unwrap_or(options.dim / options.heads);
        let heads = |y: Tensor| split_heads(&y, head_dim);
        let (mut q, mut k) =
            (heads(self.q_proj.forward(x)?)?, heads(self.k_proj.forward(context)?)?);
        let v = heads(self.v_proj.forward(context)?)?;
        if let Some(rotary) = rotary {
            (q, k) = (rotary.forward(&q)?, rotary.forward(&k)?);
        }
        let dropout = if self.training.get() { options.dropout } else { 0.0 };
        let grouped = options.kv_heads != options.heads;
        let no_scale: Option<f64> = None;
        let causal = causal && mask.is_none();
        let y: Tensor =
            ATTENTION.call(args![&q, &k, &v, mask, dropout, causal, no_scale, grouped])?;
        self.o_proj.forward(&join_heads(&y)?)
    }
}

impl Layer for Attention {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.attend(x, x, None, None, self.options.causal)
    }
}

/// [batch, length, heads * head_dim] to [batch, heads, length, head_dim].
#[track_caller]
fn split_heads(x: &Tensor, head_dim: i64) -> Result<Tensor> {
    let sizes = x.sizes()?;
    if sizes.len() != 3 {
        return Err(Error::invalid(format!(
            "Attention::forward: the input's sizes are {sizes:?}; wanted [batch, length, features]"
        )));
    }
    x.view(&[sizes[0], sizes[1], -1, head_dim])?.transpose(1, 2)
}

/// And back.
#[track_caller]
fn join_heads(x: &Tensor) -> Result<Tensor> {
    let sizes = x.sizes()?;
    x.transpose(1, 2)?.reshape(&[sizes[0], sizes[2], sizes[1] * sizes[3]])
}

/// Attention with the names and the packed weights of `torch.nn.MultiheadAttention`, where the batch
/// comes first: [batch, length, dim].
///
/// Under a plan that cuts `in_proj_weight` the three parts of it do not lie as the heads do: for
/// tensor parallelism [`Attention`] is the better one.
#[derive(Debug)]
pub struct MultiheadAttention {
    /// Of queries, then keys, then values: [3 dim, dim].
    pub in_proj_weight: Tensor,
    /// Of 3 dim.
    pub in_proj_bias: Option<Tensor>,
    /// Of the heads' results.
    pub out_proj: Linear,
    training: Training,
    heads: i64,
    dropout: f64,
}

impl MultiheadAttention {
    /// With biases, which are 0 at first; heads that divide `dim`.
    pub fn new(dim: i64, heads: i64) -> Result<MultiheadAttention> {
        MultiheadAttention::with_options(dim, heads, 0.0, true).of("MultiheadAttention::new")
    }

    /// With dropout in training; with biases, or without.
    pub fn with_options(
        dim: i64,
        heads: i64,
        dropout: f64,
        bias: bool,
    ) -> Result<MultiheadAttention> {
        if heads < 1 || dim % heads != 0 {
            return Err(Error::invalid(format!(
                "MultiheadAttention::with_options: {heads} heads of {dim} features; wanted heads that \
                 divide these"
            )));
        }
        drawn(MultiheadAttention {
            in_proj_weight: zeros(&[3 * dim, dim])?,
            in_proj_bias: bias.then(|| zeros(&[3 * dim])).transpose()?,
            out_proj: init::skip(|| Linear::with_bias(dim, dim, bias))?,
            training: Training::new(),
            heads,
            dropout,
        })
    }

    /// Each token of `x` attends to all of them, or those of the mask, as
    /// [`Attention::forward_with`] has it.
    #[track_caller]
    pub fn forward_with(&self, x: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
        let head_dim = self.out_proj.weight.size(0)? / self.heads;
        let packed = x.linear(&self.in_proj_weight, self.in_proj_bias.as_ref())?;
        let part = |i: i64| -> Result<Tensor> {
            let dim = self.heads * head_dim;
            split_heads(&packed.narrow(-1, i * dim, dim)?.contiguous()?, head_dim)
        };
        let dropout = if self.training.get() { self.dropout } else { 0.0 };
        let (q, k, v) = (part(0)?, part(1)?, part(2)?);
        let y: Tensor = ATTENTION.call(args![&q, &k, &v, mask, dropout, false])?;
        self.out_proj.forward(&join_heads(&y)?)
    }
}

module! {
    MultiheadAttention { in_proj_weight, in_proj_bias, out_proj, training }
    draw |m| {
        init::xavier_uniform_(&m.in_proj_weight, init::Gain::Linear)?;
        m.in_proj_bias.as_ref().map_or(Ok(()), init::zeros_)?;
        m.out_proj.bias.as_ref().map_or(Ok(()), init::zeros_)
    }
}

impl Layer for MultiheadAttention {
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(x, None)
    }
}

/// Turns pairs of features by the token's position (Su and others, 2021), as Llama pairs them: the
/// first half of a head's features with the second. Its tables are buffers that no checkpoint has.
///
/// ```
/// use shardweave::nn::{Layer, RotaryOptions};
/// use shardweave::Tensor;
/// let rotary = RotaryOptions::new(8, 16).build()?;
/// let queries = Tensor::ones(&[2, 4, 5, 8])?; // [batch, heads, length, head_dim]
/// let turned = rotary.forward(&queries)?;
/// assert!(turned.i((.., .., 0))?.allclose(&Tensor::ones(&[2, 4, 8])?)?); // position 0
/// # Ok::<(), shardweave::Error>(())
/// ```
#[derive(Debug)]
pub struct Rotary {
    cos: Tensor,
    sin: Tensor,
}

/// Of [`Rotary`].
#[derive(Clone, Copy, Debug)]
pub struct RotaryOptions {
    head_dim: i64,
    positions: i64,
    theta: f64,
    scaling: RopeScaling,
}

/// How positions beyond those of the training are reached.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not.
    None,
    /// By turning more slowly: `"rope_type": "linear"`.
    Linear {
        /// By so much.
        factor: f64,
    },
    /// The slow ones more slowly: `"rope_type": "llama3"`.
    Llama3 {
        /// By so much.
        factor: f64,
        /// Features that turn fewer times than this over the original positions are slowed down.
        low_freq_factor: f64,
        /// Those that turn more often than this are not.
        high_freq_factor: f64,
        /// The positions of the training.
        original_max_position_embeddings: f64,
    },
}

impl RopeScaling {
    fn check(self) -> Result<()> {
        let wanted = match self {
            RopeScaling::None => return Ok(()),
            RopeScaling::Linear { factor } => factor > 0.0,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                factor > 0.0
                    && low_freq_factor > 0.0
                    && high_freq_factor > low_freq_factor
                    && original_max_position_embeddings > 0.0
            }
        };
        if wanted {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "RotaryOptions::build: {self:?}; wanted numbers above 0, and low_freq_factor below \
             high_freq_factor"
        )))
    }
}

impl RotaryOptions {
    /// For heads of so many features, an even number, and so many positions; theta is 10000.
    pub fn new(head_dim: i64, positions: i64) -> RotaryOptions {
        RotaryOptions { head_dim, positions, theta: 10000.0, scaling: RopeScaling::None }
    }

    /// `rope_theta` of a Hugging Face configuration.
    pub fn theta(mut self, theta: f64) -> RotaryOptions {
        self.theta = theta;
        self
    }

    /// `rope_scaling` of a Hugging Face configuration.
    pub fn scaling(mut self, scaling: RopeScaling) -> RotaryOptions {
        self.scaling = scaling;
        self
    }

    /// How far the pair of features `i` turns from one position to the next.
    fn frequency(&self, i: i64) -> f64 {
        let frequency = self.theta.powf(-2.0 * i as f64 / self.head_dim as f64);
        match self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let turns =
                    original_max_position_embeddings * frequency / (2.0 * std::f64::consts::PI);
                if turns > high_freq_factor {
                    frequency
                } else if turns < low_freq_factor {
                    frequency / factor
                } else {
                    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }

    /// The module.
    pub fn build(self) -> Result<Rotary> {
        let RotaryOptions { head_dim, positions, theta, .. } = self;
        if head_dim < 2 || head_dim % 2 != 0 || positions < 1 || theta.is_nan() || theta <= 0.0 {
            return Err(Error::invalid(format!(
                "RotaryOptions::build: heads of {head_dim} features, {positions} positions, theta \
                 {theta}; wanted an even number of features, a position and a theta above 0"
            )));
        }
        self.scaling.check()?;
        // Rounded as transformers does, whose frequencies and angles are floats.
        let frequencies: Vec<f32> = (0..head_dim / 2).map(|i| self.frequency(i) as f32).collect();
        let angles = (0..positions)
            .flat_map(|at| frequencies.iter().chain(&frequencies).map(move |f| at as f32 * f));
        let angles: Vec<f64> = angles.map(f64::from).collect();
        let table = |of: fn(f64) -> f64| {
            let numbers: Vec<f32> = angles.iter().map(|angle| of(*angle) as f32).collect();
            Tensor::from_slice(&numbers, &[positions, head_dim]).of("RotaryOptions::build")
        };
        Ok(Rotary { cos: table(f64::cos)?, sin: table(f64::sin)? })
    }
}

impl Module for Rotary {
    fn members(&self, members: &mut Members) {
        members.non_persistent_buffer("cos", &self.cos);
        members.non_persistent_buffer("sin", &self.sin);
    }
}

impl Layer for Rotary {
    /// Of queries or keys, [batch, heads, length, head_dim], at the positions from 0 on.
    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (length, dtype) = (x.size(-2)?, x.dtype()?);
        let half = x.size(-1)? / 2;
        let table = |table: &Tensor| table.narrow(0, 0, length)?.to_dtype(dtype);
        let turned = Tensor::cat(&[(-x.narrow(-1, half, half)?)?, x.narrow(-1, 0, half)?], -1)?;
        (x * table(&self.cos)?).plus(turned * table(&self.sin)?)
    }
}
