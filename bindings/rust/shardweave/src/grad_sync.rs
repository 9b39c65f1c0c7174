//! Gradients that travel while backward runs.

use std::fmt;
use std::marker::PhantomData;

use shardweave_sys as sys;

use crate::dtype::{number_of, DType};
use crate::error::{Of, Result};
use crate::mesh::Scope;
use crate::module::{handle_of, Module};

handle! {
    /// The C interface's own.
    SyncHandle, swv_grad_sync, swv_grad_sync_free
}

/// While it lives, gradients of a module's sharded parameters leave in buckets during backward, and
/// [`Module::finish_grad_sync`] sends the rest and waits for all. The first iteration shows in which
/// order they come, and sends at its end. All ranks make it alike.
///
/// ```
/// use shardweave::nn::{self, Layer};
/// use shardweave::{GradSync, Module, ParameterPlan, Placement::*, Source, Tensor, World};
///
/// World::threads(2).run(|world| {
///     let mesh = world.device_mesh(&[("dp", 2)])?;
///     let layer = nn::Linear::new(3, 5)?;
///     layer.distribute(&mesh, &ParameterPlan::new(), Source::default())?;
///     let x = Tensor::ones(&[4, 3])?.distribute(&mesh, [("dp", Shard(0))])?;
///     let sync = GradSync::new(&layer)?;
///     for _ in 0..3 {
///         {
///             let _accumulate = sync.no_sync()?; // nothing is sent
///             layer.forward(&x)?.sum()?.backward()?;
///         }
///         layer.forward(&x)?.sum()?.backward()?;
///         layer.finish_grad_sync()?;
///         layer.zero_grad()?;
///     }
///     assert_eq!(sync.counts()?.left_in_backward, 2);
///     Ok(())
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// A parameter is in one of them at a time. After a backward that failed, on any rank, all ranks call
/// [`GradSync::discard`]. Neither `Send` nor `Sync`, as the parameters.
pub struct GradSync(SyncHandle);

debug_by_name!(GradSync);

/// Of [`GradSync::with`].
#[derive(Clone, Copy, Debug)]
pub struct GradSyncOptions(sys::swv_grad_sync_options);

impl Default for GradSyncOptions {
    fn default() -> GradSyncOptions {
        GradSyncOptions(sys::SWV_GRAD_SYNC_OPTIONS_INIT)
    }
}

impl GradSyncOptions {
    /// Buckets of 25 MiB, gradients as they are.
    pub fn new() -> GradSyncOptions {
        GradSyncOptions::default()
    }

    /// Buckets of at most so many bytes, as they travel; a larger gradient has one of its own.
    pub fn bucket_bytes(mut self, bytes: i64) -> GradSyncOptions {
        self.0.bucket_bytes = bytes;
        self
    }

    /// Gradients of `F16`, `Bf16`, `F32` and `F64` travel and are summed up in this one of them.
    /// `Bf16` halves the bytes of `F32`, and keeps eight bits of each rank's part and of each partial
    /// sum. What arrives has the gradient's own type.
    pub fn reduce_dtype(mut self, dtype: DType) -> GradSyncOptions {
        self.0.reduce_dtype = number_of(Some(dtype));
        self
    }
}

/// What a [`GradSync`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GradSyncCounts {
    /// How many buckets there are; 0 before the first iteration's end.
    pub buckets: i64,
    /// How many have left before [`Module::finish_grad_sync`], in all iterations.
    pub left_in_backward: i64,
}

impl GradSync {
    /// With buckets of 25 MiB.
    pub fn new<M: Module + ?Sized>(module: &M) -> Result<GradSync> {
        GradSync::make(module, &GradSyncOptions::new()).of("GradSync::new")
    }

    /// As the options say.
    pub fn with<M: Module + ?Sized>(module: &M, options: &GradSyncOptions) -> Result<GradSync> {
        GradSync::make(module, options).of("GradSync::with")
    }

    fn make<M: Module + ?Sized>(module: &M, options: &GradSyncOptions) -> Result<GradSync> {
        let (module, _forwards) = handle_of(module)?;
        let sync = create!(swv_grad_sync_create(module.as_ptr(), &options.0))?;
        Ok(GradSync(SyncHandle::from_handle(sync)))
    }

    /// While it lives, backward sends nothing: gradients of several are summed up first.
    pub fn no_sync(&self) -> Result<NoSync<'_>> {
        let scope = create!(swv_grad_sync_no_sync(self.0.as_ptr()))?;
        Ok(NoSync::until_the_end_of(Scope::from_handle(scope)))
    }

    /// In place of [`Module::finish_grad_sync`], after a backward that failed on some rank: what has
    /// left in it comes to nothing, and the next iteration is one as any. Gradients stay as they are,
    /// for the caller to zero. The ranks agree that it failed on a communicator that is not the
    /// mesh's, where something may be under way ([`World::comm`](crate::World::comm)); one that calls
    /// `finish_grad_sync` instead gets NaN. Collective.
    pub fn discard(&self) -> Result<()> {
        call!(swv_grad_sync_discard(self.0.as_ptr()))
    }

    /// What it did so far.
    pub fn counts(&self) -> Result<GradSyncCounts> {
        let mut counts = GradSyncCounts::default();
        call!(swv_grad_sync_counts(
            self.0.as_ptr(),
            &mut counts.buckets,
            &mut counts.left_in_backward
        ))?;
        Ok(counts)
    }
}

/// See [`GradSync::no_sync`] and [`Optimizer::no_sync`](crate::Optimizer::no_sync).
#[must_use = "backward sends nothing until this ends"]
pub struct NoSync<'a> {
    _scope: Scope,
    of: PhantomData<&'a ()>,
}

impl NoSync<'_> {
    pub(crate) fn until_the_end_of(scope: Scope) -> Self {
        NoSync { _scope: scope, of: PhantomData }
    }
}

impl fmt::Debug for NoSync<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _ = self.of;
        f.debug_struct("NoSync").finish_non_exhaustive()
    }
}
