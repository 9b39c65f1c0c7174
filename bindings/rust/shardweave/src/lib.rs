//! Sharded training on LibTorch: worlds of ranks, meshes, tensors that lie on them, and what trains
//! with these.
//!
//! Four ranks, a thread each, multiply two tensors that are cut over a mesh, and differentiate:
//!
//! ```
//! use shardweave::{TensorOptions, World};
//!
//! World::threads(4).run(|world| {
//!     let mesh = world.device_mesh(&[("dp", 2), ("tp", 2)])?;
//!     let x = TensorOptions::new().on(&mesh, "[S(0), S(1)]")?.requires_grad(true).randn(&[8, 6])?;
//!     let loss = (&x * &x)?.sum()?; // communicates where it has to
//!     loss.backward()?;
//!     let (gradient, expected) = (x.grad()?.unwrap(), (&x.detach()? * 2.0)?);
//!     assert!(gradient.full_tensor()?.allclose(&expected.full_tensor()?)?);
//!     Ok(())
//! })?;
//! # Ok::<(), shardweave::Error>(())
//! ```
//!
//! - [`World`]: ranks that are threads of this process, processes that it starts, or processes that
//!   a launcher starts.
//! - [`Comm`]: collectives over slices. [`Mesh`], [`Layout`], [`Placement`]: where ranks are, and
//!   what they hold.
//! - [`Tensor`]: plain or sharded. Operators by `std::ops`, by method, or by name ([`Op`]): every
//!   operator of LibTorch.
//! - [`no_grad`], [`gradients`], [`Function`], [`checkpoint`]: autograd.
//! - [`Module`], [`ParameterPlan`], [`AdamW`], [`Sgd`]: models in Rust, sharded by a plan, and
//!   trained.
//! - [`Trace`], [`CommCounters`], [`World::flight_record`]: what happened.
//!
//! Functions that fail return an [`Error`] with its [`Code`]. A panic in a callback, or in the body
//! of a rank, becomes an error of that rank; it never crosses into C++.
//!
//! # Threads
//!
//! A rank is driven by one thread at a time, so [`World`] and what is made from it stay on the
//! thread that they are on: they are neither `Send` nor `Sync`. [`Op`], [`Layout`] and
//! [`ParameterPlan`] belong to no rank, and are both. [`Aborter`] ends a world from any thread. A
//! [`Function`] is both too: LibTorch may run its backward on a thread of its own.
//!
//! ```compile_fail,E0277
//! let tensor = shardweave::Tensor::ones(&[3])?;
//! std::thread::spawn(move || tensor.sum()); // a tensor cannot be sent between threads
//! # Ok::<(), shardweave::Error>(())
//! ```
//!
//! # The library
//!
//! The crate links libshardweave.so, found by `SHARDWEAVE_HOME`, pkg-config, or in the checkout's
//! `bazel-bin`; see the README.
#![warn(missing_debug_implementations, missing_docs, unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

#[macro_use]
mod ffi;

mod autograd;
mod comm;
mod dtype;
mod element;
mod error;
mod layout;
mod mesh;
mod module;
mod names;
mod op;
mod optimizer;
mod plan;
mod spawn;
mod tensor;
mod world;

pub use autograd::{
    apply, checkpoint, gradients, inference, no_grad, with_grad_mode, BackwardOptions, Function,
    FunctionContext, GradMode,
};
pub use comm::{Comm, CommCounter, CommCounters, Pending, OP_NAMES};
pub use dtype::{DType, Device, ReduceOp};
pub use element::{Bf16, Complex, Element, F16};
pub use error::{Code, Error, Result};
pub use layout::{IntoLayout, Layout, LocalExtent, Placement, RedistributionPlan};
pub use mesh::{
    CostModel, DeviceCost, DispatchCounters, LinkCost, Mesh, ModuleScope, RandomScope, RandomState,
    StrictScope, Trace,
};
pub use module::{clip_grad_norm, finish_grad_sync, ClipOptions, Members, Module, ScriptModule};
pub use op::{Arg, Explanation, Flags, FromResults, FromValue, Op, Value};
pub use optimizer::{AdamW, Optimizer, Sgd};
pub use plan::ParameterPlan;
pub use spawn::Spawn;
pub use tensor::{Source, Tensor, TensorOptions};
pub use world::{
    build_info, live_handles, manual_seed, set_num_threads, Aborter, MeetingPoint, Processes,
    Rendezvous, Seat, Threads, World,
};

/// The README's programs are examples that run, too.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
