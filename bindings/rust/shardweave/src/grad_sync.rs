//! Gradients that travel while backward runs.

use std::ffi::CString;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use shardweave_sys as sys;

use crate::data_parallel::{raw_hook, GradientHook, PowerSgd, RawHook};
use crate::dtype::{number_of, DType};
use crate::error::{Of, Result};
use crate::ffi::{c_text, take_string};
use crate::mesh::Scope;
use crate::module::Module;
use crate::module_handle::trained_handle_of;
use crate::tensor::Tensor;

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
#[must_use = "gradients leave during backward, and go through a hook, only while it lives"]
pub struct GradSync(SyncHandle);

debug_by_name!(GradSync);

/// Of [`GradSync::with`].
#[derive(Clone, Copy, Debug)]
pub struct GradSyncOptions {
    bucket_bytes: i64,
    reduce_dtype: Option<DType>,
    pub(crate) power_sgd: Option<PowerSgd>,
}

impl Default for GradSyncOptions {
    fn default() -> GradSyncOptions {
        GradSyncOptions {
            bucket_bytes: sys::SWV_GRAD_SYNC_OPTIONS_INIT.bucket_bytes,
            reduce_dtype: None,
            power_sgd: None,
        }
    }
}

impl GradSyncOptions {
    /// Buckets of 25 MiB, gradients as they are.
    pub fn new() -> GradSyncOptions {
        GradSyncOptions::default()
    }

    /// Buckets of at most so many bytes, as they travel; a larger gradient has one of its own.
    pub fn bucket_bytes(mut self, bytes: i64) -> GradSyncOptions {
        self.bucket_bytes = bytes;
        self
    }

    /// Gradients of `F16`, `Bf16`, `F32` and `F64` travel and are summed up in this one of them.
    /// `Bf16` halves the bytes of `F32`, and keeps eight bits of each rank's part and of each partial
    /// sum. What arrives has the gradient's own type.
    pub fn reduce_dtype(mut self, dtype: DType) -> GradSyncOptions {
        self.reduce_dtype = Some(dtype);
        self
    }

    /// Gradients that are matrices travel as two thin ones. Not together with a hook.
    pub fn power_sgd(mut self, power_sgd: PowerSgd) -> GradSyncOptions {
        self.power_sgd = Some(power_sgd);
        self
    }

    pub(crate) fn raw(&self, power_sgd: Option<&PowerSgd>) -> sys::swv_grad_sync_options {
        sys::swv_grad_sync_options {
            bucket_bytes: self.bucket_bytes,
            reduce_dtype: number_of(self.reduce_dtype),
            power_sgd: power_sgd.map_or(ptr::null(), |options| &options.0),
            ..sys::SWV_GRAD_SYNC_OPTIONS_INIT
        }
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
        GradSync::make(module, &GradSyncOptions::new(), || Ok(None)).of("GradSync::new")
    }

    /// As the options say. With a [`PowerSgd`] collective.
    pub fn with<M: Module + ?Sized>(module: &M, options: &GradSyncOptions) -> Result<GradSync> {
        GradSync::make(module, options, || Ok(None)).of("GradSync::with")
    }

    /// The same, and the hook reduces buckets. It lives as long as this, and runs on this thread
    /// only. Collective; the ranks compare its name.
    ///
    /// ```
    /// use shardweave::nn::{self, Layer};
    /// use shardweave::{
    ///     GradSync, GradSyncOptions, GradientBucket, GradientHook, Module, ParameterPlan,
    ///     Placement::*, ReduceOp, Result, Source, Tensor, World,
    /// };
    ///
    /// /// What an all-reduce does.
    /// struct Sum;
    /// impl GradientHook for Sum {
    ///     fn name(&self) -> String {
    ///         "sum".to_owned()
    ///     }
    ///     fn finish(&self, bucket: &GradientBucket) -> Result<()> {
    ///         let mut sums = bucket.flat.to_vec::<f32>()?;
    ///         bucket.comm.all_reduce(&mut sums, ReduceOp::Sum)?;
    ///         bucket.flat.copy_from_slice(&sums)
    ///     }
    /// }
    ///
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("dp", 2)])?;
    ///     let layer = nn::Linear::new(3, 5)?;
    ///     layer.distribute(&mesh, &ParameterPlan::new(), Source::default())?;
    ///     let x = Tensor::ones(&[4, 3])?.distribute(&mesh, [("dp", Shard(0))])?;
    ///     let _sync = GradSync::with_hook(&layer, &GradSyncOptions::new(), Sum)?;
    ///     layer.forward(&x)?.sum()?.backward()?;
    ///     layer.finish_grad_sync()?;
    ///     assert_eq!(layer.weight.grad()?.unwrap().full_tensor()?.to_vec::<f32>()?, [4.0; 15]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn with_hook<M: Module + ?Sized, H: GradientHook>(
        module: &M,
        options: &GradSyncOptions,
        hook: H,
    ) -> Result<GradSync> {
        GradSync::make(module, options, || raw_hook(hook).map(Some)).of("GradSync::with_hook")
    }

    fn make<M: Module + ?Sized>(
        module: &M,
        options: &GradSyncOptions,
        hook: impl FnOnce() -> Result<Option<RawHook>>,
    ) -> Result<GradSync> {
        let (module, _forwards) = trained_handle_of(module)?;
        let mut raw = options.raw(options.power_sgd.as_ref());
        let hook = hook()?;
        raw.hook = hook.as_ref().map_or(ptr::null(), |(raw, _name)| raw);
        let sync = create!(swv_grad_sync_create(module.as_ptr(), &raw))?;
        Ok(GradSync::of_handle(sync))
    }

    pub(crate) fn of_handle(handle: NonNull<sys::swv_grad_sync>) -> GradSync {
        GradSync(SyncHandle::from_handle(handle))
    }

    /// What PowerSGD has learned on this rank, by name ("weight.error", ".q", ".iteration"): copies.
    /// Each rank keeps its own, for [`set_states`](GradSync::set_states) when it resumes. Under a
    /// `GradScaler` every ".error" is in units of its scale: where `update()` has changed that, they are
    /// to be set to as many times what they were.
    pub fn states(&self) -> Result<Vec<(String, Tensor)>> {
        let count = get!(swv_grad_sync_num_states(self.0.as_ptr()) -> usize)?;
        (0..count)
            .map(|index| {
                let (mut name, mut tensor) = (ptr::null_mut(), ptr::null_mut());
                call!(swv_grad_sync_state(self.0.as_ptr(), index, &mut name, &mut tensor))?;
                let name = take_string(NonNull::new(name).expect("a state has a name"));
                let tensor = NonNull::new(tensor).expect("a state is a tensor");
                Ok((name, Tensor::from_handle(tensor)))
            })
            .collect()
    }

    /// All of it, in place of what there was.
    pub fn set_states(&self, states: &[(String, Tensor)]) -> Result<()> {
        let names: Vec<CString> = states
            .iter()
            .map(|(name, _)| c_text(name, "states"))
            .collect::<Result<_>>()
            .of("GradSync::set_states")?;
        let pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let tensors: Vec<_> = states.iter().map(|(_, tensor)| tensor.as_const_ptr()).collect();
        call!(swv_grad_sync_set_states(
            self.0.as_ptr(),
            pointers.as_ptr(),
            tensors.as_ptr(),
            states.len()
        ))
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

/// See [`GradSync::no_sync`], [`Optimizer::no_sync`](crate::Optimizer::no_sync) and
/// [`Mesh::fully_shard_no_sync`](crate::Mesh::fully_shard_no_sync).
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
