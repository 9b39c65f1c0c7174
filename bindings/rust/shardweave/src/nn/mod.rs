//! Modules ready made, with the names, defaults and numbers of `torch.nn` and Hugging Face's
//! transformers, so that their checkpoints fit.
//!
//! ```
//! use shardweave::nn::{self, Layer};
//! use shardweave::{AdamW, Module, ParameterPlan, Placement::*, Result, Source, Tensor, World};
//!
//! #[derive(Module)]
//! struct Mlp {
//!     up: nn::Linear,
//!     dropout: nn::Dropout,
//!     down: nn::Linear,
//! }
//!
//! impl Mlp {
//!     fn new(dim: i64) -> Result<Mlp> {
//!         Ok(Mlp {
//!             up: nn::Linear::new(dim, 4 * dim)?,
//!             dropout: nn::Dropout::new(0.1),
//!             down: nn::Linear::new(4 * dim, dim)?,
//!         })
//!     }
//! }
//!
//! impl Layer for Mlp {
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         self.down.forward(&self.dropout.forward(&self.up.forward(x)?.gelu()?)?)
//!     }
//! }
//!
//! World::threads(2).run(|world| {
//!     let mesh = world.device_mesh(&[("tp", 2)])?;
//!     let mlp = Mlp::new(6)?; // as for one device
//!     let plan = ParameterPlan::new()
//!         .line("up.*", &[("tp", Shard(0))])
//!         .line("down.weight", &[("tp", Shard(1))]);
//!     mlp.distribute(&mesh, &plan, Source::default())?;
//!     mlp.eval();
//!     let x = Tensor::ones(&[3, 6])?.distribute(&mesh, [("tp", Replicate)])?;
//!     assert_eq!(mlp.forward(&x)?.sizes()?, [3, 6]);
//!     let optimizer = AdamW::new(1e-3).build(&mlp)?;
//! #   drop(optimizer);
//!     Ok(())
//! })?;
//! # Ok::<(), shardweave::Error>(())
//! ```
//!
//! A module's constructor draws its parameters as torch's does, from the process
//! ([`manual_seed`](crate::manual_seed)), which rank threads share; so ranks may draw different
//! numbers, and [`Source::default`](crate::Source) sends those of one rank to all. To draw the same
//! on every mesh, without sending anything: construct within [`init::skip`], distribute,
//! [`Mesh::seed`](crate::Mesh::seed), [`Module::initialize`].
//!
//! Parameters are `f32`; within [`with_dtype`] others.
//!
//! Modules belong to their rank: they are neither `Send` nor `Sync`, as their tensors. What fails in
//! a forward is the error of the operator, which names what it was given.

#![allow(clippy::declare_interior_mutable_const)] // Clippy 1.63 means thread_local's insides

mod attention;
pub mod init;
mod layers;

use std::cell::Cell;

use crate::dtype::DType;
use crate::error::{Of, Result};
use crate::module::Module;
use crate::tensor::{Tensor, TensorOptions};

pub use attention::{
    Attention, AttentionOptions, MultiheadAttention, RopeScaling, Rotary, RotaryOptions,
};
pub use layers::{
    Conv2d, Conv2dOptions, Dropout, Embedding, Lambda, LayerNorm, Linear, RmsNorm, Sequential,
};

/// A module of one input and one output: its forward is that of the trait. A closure is one as a
/// [`Lambda`].
pub trait Layer: Module {
    /// What it makes of `x`.
    fn forward(&self, x: &Tensor) -> Result<Tensor>;
}

thread_local! {
    static NEW: Cell<New> = const { Cell::new(New { dtype: DType::F32, draws: true }) };
}

/// How new parameters shall be.
#[derive(Clone, Copy)]
struct New {
    dtype: DType,
    draws: bool,
}

impl New {
    fn current() -> New {
        NEW.with(Cell::get)
    }

    /// While `body` runs, also if it panics.
    fn during<R>(self, body: impl FnOnce() -> R) -> R {
        struct Restore(New);
        impl Drop for Restore {
            fn drop(&mut self) {
                NEW.with(|new| new.set(self.0));
            }
        }
        let _restore = Restore(NEW.with(|new| new.replace(self)));
        body()
    }
}

/// Calls `body`, in which new modules have parameters of this dtype. Of this thread alone.
///
/// ```
/// use shardweave::{nn, DType};
/// let layer = nn::with_dtype(DType::Bf16, || nn::Linear::new(3, 2))?;
/// assert_eq!(layer.weight.dtype()?, DType::Bf16);
/// # Ok::<(), shardweave::Error>(())
/// ```
pub fn with_dtype<R>(dtype: DType, body: impl FnOnce() -> R) -> R {
    New { dtype, ..New::current() }.during(body)
}

/// The tensor as a parameter: a leaf that requires grad.
///
/// ```
/// use shardweave::{nn, Tensor};
/// let scale = nn::parameter(Tensor::ones(&[3])?)?;
/// assert!(scale.requires_grad()?);
/// # Ok::<(), shardweave::Error>(())
/// ```
pub fn parameter(tensor: Tensor) -> Result<Tensor> {
    let leaf = if tensor.is_leaf().of("parameter")? { tensor } else { tensor.detach()? };
    leaf.set_requires_grad(true).of("parameter")?;
    Ok(leaf)
}

/// A parameter of zeros, to be drawn.
fn zeros(sizes: &[i64]) -> Result<Tensor> {
    TensorOptions::new().dtype(New::current().dtype).requires_grad(true).zeros(sizes)
}

/// A module as its constructor gives it: drawn, unless that is skipped.
fn drawn<M: Module>(module: M) -> Result<M> {
    if New::current().draws {
        module.initialize()?;
    }
    Ok(module)
}

/// [`Module`] of a struct of this crate: parameters (`Tensor`, `Option<Tensor>`) and fields inside,
/// by name, and how its own are drawn. The derive macro is for crates that use this one.
macro_rules! module {
    ($type:ident { $($field:ident),* $(,)? } $(draw $draw:expr)?) => {
        impl crate::module::Module for $type {
            fn members(&self, members: &mut crate::members::Members) {
                $(crate::field::ModuleField::register(&self.$field, stringify!($field), members);)*
            }

            $(fn reset_parameters(&self) -> crate::error::Result<()> {
                let draw: fn(&$type) -> crate::error::Result<()> = $draw;
                draw(self)
            })?
        }
    };
}
use module;
