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
//! - [`Tensor`]: plain or sharded. Operators by `std::ops` ([`Operand`]), by method, by index
//!   ([`Tensor::i`]), or by name ([`Op`]): every operator of LibTorch.
//! - [`no_grad`], [`gradients`], [`Function`], [`checkpoint`]: autograd.
//! - [`Module`](trait@Module), [`nn`], [`NativeModule`], [`ParameterPlan`], [`AdamW`], [`Sgd`], [`Schedule`]: models in
//!   Rust, sharded by a plan, and trained. [`deferred_init`], [`materialize`]: those that are larger
//!   than a machine. [`GradSync`]: gradients that leave during backward. [`Module::fully_shard`]:
//!   parameters that are whole only while they are used.
//! - [`TokenFile`], [`TokenLoader`]: what language models are trained on, read ahead; a run goes on where
//!   it was on any number of ranks.
//! - [`MetricsWriter`]: the numbers of a run, for people and TensorBoard. [`Comm::any_rank`]: an end that all ranks
//!   agree on.
//! - [`Trace`], [`CommCounters`], [`World::flight_record`], [`debug`]: what happened, and what a
//!   module is.
//!
//! Functions that fail return an [`Error`] with its [`Code`]. A panic in a callback, or in the body
//! of a rank, becomes an error of that rank; it never crosses into C++.
//!
//! # Threads
//!
//! A rank is driven by one thread at a time, so [`World`] and what is made from it stay on the
//! thread that they are on: they are neither `Send` nor `Sync`. [`Op`], [`Layout`] and
//! [`ParameterPlan`] belong to no rank, and are both. [`Aborter`] ends a world from any thread. A
//! [`Function`] is both too: LibTorch may run its backward on a thread of its own. Between threads
//! goes a [`SendTensor`], the only handle to its memory.
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
//! `bazel-bin`; see the README. Its version is compared with what the crate was made for when it is
//! built and at the first use: a mismatch is an error of that call, with
//! [`FailedPrecondition`](Code::FailedPrecondition).
//!
//! # Features
//!
//! - `derive` (on unless `default-features = false`): `#[derive(Module)]`.
//! - `serde` (on unless `default-features = false`): [`ParameterPlan`], [`Placement`], [`Layout`],
//!   [`DType`] and [`ReduceOp`] as data of any format.
//! - `half`: `half::f16` and `half::bf16` are [`Element`]s, as [`F16`] and [`Bf16`] are.
//! - `load-dynamic`: the library is not linked, but found when the program first needs it, in
//!   `SHARDWEAVE_HOME` or where the loader looks. To build, check and document a crate nothing has to
//!   be installed then; what needs the library where there is none is an error.
#![warn(missing_debug_implementations, missing_docs, unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks)]

#[macro_use]
mod ffi;

mod arithmetic;
mod auto_plan;
mod autograd;
mod captured_step;
mod checkpoint;
mod comm;
mod data;
mod data_parallel;
pub mod debug;
mod deferred;
mod dtype;
mod element;
mod error;
mod field;
mod forward;
mod fully_shard;
#[rustfmt::skip]
mod generated;
mod grad_scaler;
mod grad_sync;
mod index;
mod layout;
mod members;
mod mesh;
mod metrics;
mod module;
mod module_handle;
mod names;
mod native_module;
pub mod nn;
mod op;
#[rustfmt::skip]
mod operators;
mod optimizer;
mod patch;
mod plan;
mod pretrained;
mod process;
mod schedule;
mod script_module;
#[cfg(feature = "serde")]
mod serialize;
mod source;
mod spawn;
mod tensor;
mod world;

pub use arithmetic::{Operand, TensorResult};
pub use auto_plan::{auto_plan, AutoPlan, AutoPlanOptions};
pub use autograd::{
    apply, autocast, checkpoint, gradients, inference, no_grad, with_grad_mode, BackwardOptions,
    Function, FunctionContext, GradMode,
};
pub use captured_step::CapturedStep;
pub use checkpoint::{
    find_checkpoint, list_checkpoints, verify_checkpoint, write_safetensors, Checkpointer,
    CheckpointerOptions, LoadOptions, Loaded, Safetensors, State, StoredTensor,
};
pub use comm::{Comm, CommCounter, CommCounters, Pending};
pub use data::{TokenBatch, TokenFile, TokenLoader, TokenLoaderOptions};
pub use data_parallel::{DataParallelOptions, GradientBucket, GradientHook, JoinedBatch, PowerSgd};
pub use deferred::{deferred_init, materialize, MaterializeOptions};
pub use dtype::{DType, Device, ReduceOp};
pub use element::{Bf16, Complex, Element, F16};
pub use error::{Code, Error, Result};
pub use field::{BufferField, ModuleField};
pub use forward::Forward;
pub use fully_shard::{FullParams, FullParamsOptions, FullyShardCounters, FullyShardOptions};
pub use generated::OP_NAMES;
pub use grad_scaler::{GradScaler, GradScalerOptions};
pub use grad_sync::{GradSync, GradSyncCounts, GradSyncOptions, NoSync};
pub use index::{Ellipsis, IndexItem, NewAxis, TensorIndex};
pub use layout::{IntoLayout, Layout, LocalExtent, Placement, RedistributionPlan};
pub use members::{Members, Training};
pub use mesh::{
    CostModel, DeviceCost, DispatchCounters, LinkCost, Mesh, RandomState, Scope, Trace,
};
pub use metrics::MetricsWriter;
pub use module::{clip_grad_norm, finish_grad_sync, ClipOptions, Module};
pub use native_module::NativeModule;
pub use op::{Arg, Explanation, Flags, FromResults, FromValue, Op, Value};
pub use optimizer::{
    Adafactor, Adam, AdamW, Lion, Muon, Optimizer, OptimizerGroups, Sgd, ZeroOptions,
};
pub use patch::PatchCall;
pub use plan::{ParameterPlan, PlanPlacements, ResolvedPlan, Sharding};
pub use pretrained::{read_pretrained_config, LoadPretrained, LoadedPretrained, SavePretrained};
pub use process::{
    build_info, live_handles, manual_seed, set_handle_checks, set_log, set_num_threads,
    HandleChecks, Log,
};
pub use schedule::{LearningRate, Schedule};
pub use script_module::ScriptModule;
#[cfg(feature = "derive")]
pub use shardweave_derive::Module;
pub use spawn::Spawn;
pub use tensor::{SendTensor, Source, Tensor, TensorOptions};
pub use world::{Aborter, MeetingPoint, Processes, Rendezvous, Seat, Threads, World};

/// The README's programs are examples that run, too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// What sanitizers are there to find: sanitizer.sh shows with these that they do.
#[cfg(test)]
mod faults {
    #[test]
    #[ignore = "for sanitizer.sh"]
    fn freed_memory() {
        let value = Box::into_raw(Box::new(7u64));
        // SAFETY: none in the second line; that is the point.
        unsafe {
            drop(Box::from_raw(value));
            println!("{}", value.read_volatile());
        }
    }

    #[test]
    #[ignore = "for sanitizer.sh"]
    fn a_race() {
        struct Shared(*mut u64);
        // SAFETY: none; that is the point.
        unsafe impl Send for Shared {}
        let mut value = 0u64;
        let write = |shared: Shared| {
            for i in 0..1000 {
                // SAFETY: none; two threads do it at once.
                unsafe { shared.0.write_volatile(i) };
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let shared = Shared(&mut value);
                scope.spawn(move || write(shared));
            }
        });
    }
}
