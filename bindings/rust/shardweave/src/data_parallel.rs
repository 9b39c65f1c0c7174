//! Models that every rank has a copy of, and what becomes of their gradients.

use std::ffi::{c_void, CStr, CString};
use std::ptr::{self, NonNull};
use std::slice;
use std::thread::{self, ThreadId};

use shardweave_sys as sys;

use crate::autograd::Mode;
use crate::comm::Comm;
use crate::error::{Code, Error, Of, Result};
use crate::ffi::{c_text, status_of, without_panics};
use crate::grad_sync::{GradSync, GradSyncOptions};
use crate::mesh::Mesh;
use crate::module::Module;
use crate::module_handle::{handle_of, trained_handle_of};
use crate::tensor::{Source, Tensor};

/// Gradients on their way, for a [`GradientHook`]: this rank's summands, one after the other.
#[derive(Debug)]
#[non_exhaustive]
pub struct GradientBucket {
    /// Of those of this iteration, in the order in which they began.
    pub index: i64,
    /// Plain, one-dimensional. What it has in the end is what arrives: written in place.
    pub flat: Tensor,
    /// Views of it, with the shapes of this rank's parts.
    pub gradients: Vec<Tensor>,
    /// Their names; "" where there is none.
    pub parameters: Vec<String>,
    /// The ranks whose summands are to be summed up.
    pub comm: Comm,
    /// [`GradSync::discard`]: nothing comes of it.
    pub is_discarded: bool,
}

/// What reduces buckets of gradients in place of an all-reduce: see [`GradSync::with_hook`].
///
/// [`begin`](GradientHook::begin) is called when a bucket is full, in backward mostly, and
/// [`finish`](GradientHook::finish) of all buckets in [`Module::finish_grad_sync`], after `begin` of
/// all: each rank issues the same operations in the same order. In the first iteration all gradients
/// come at the end, in other buckets than later. For gradients of `F16`, `Bf16`, `F32` and `F64` that
/// an all-reduce would sum; others travel as without it. An error or a panic comes out of
/// `finish_grad_sync`, on all ranks of the mesh, which is lost then.
pub trait GradientHook: 'static {
    /// The ranks compare it; with what the hook does, options and all.
    fn name(&self) -> String;
    /// Nothing, unless a hook says otherwise.
    fn begin(&self, bucket: &GradientBucket) -> Result<()> {
        let _ = bucket;
        Ok(())
    }
    /// What the bucket's `flat` has then is what arrives.
    fn finish(&self, bucket: &GradientBucket) -> Result<()>;
}

/// PowerSGD (Vogels et al., 2019): gradients that are matrices travel as two thin ones, of `rank`
/// columns, in two collectives for a bucket; what is lost is added to the next gradient. See
/// [`GradSyncOptions::power_sgd`].
#[derive(Clone, Copy, Debug)]
pub struct PowerSgd(pub(crate) sys::swv_power_sgd_options);

impl PowerSgd {
    /// With as many columns.
    pub fn new(rank: i64) -> PowerSgd {
        PowerSgd(sys::swv_power_sgd_options { columns: rank, ..sys::SWV_POWER_SGD_OPTIONS_INIT })
    }

    /// So many times a gradient travels whole before it is compressed.
    pub fn start_iteration(mut self, iteration: i64) -> PowerSgd {
        self.0.start_iteration = iteration;
        self
    }

    /// A matrix that would not become so much smaller, 1 or more, travels whole; 2 unless it is said.
    pub fn min_compression_rate(mut self, rate: f64) -> PowerSgd {
        self.0.min_compression_rate = rate;
        self
    }

    /// Of the numbers that it begins with.
    pub fn seed(mut self, seed: u64) -> PowerSgd {
        self.0.seed = seed;
        self
    }

    /// Without what was lost before.
    pub fn without_error_feedback(mut self) -> PowerSgd {
        self.0.error_feedback = 0;
        self
    }

    /// Each step begins with new numbers.
    pub fn without_warm_start(mut self) -> PowerSgd {
        self.0.warm_start = 0;
        self
    }
}

/// Of [`Module::distributed_data_parallel`].
#[derive(Clone, Debug, Default)]
pub struct DataParallelOptions {
    mesh_dim: Option<String>,
    source: Source,
    sync: GradSyncOptions,
}

impl DataParallelOptions {
    /// Along the mesh's first dimension; the first rank's values count.
    pub fn new() -> DataParallelOptions {
        DataParallelOptions::default()
    }

    /// Along which no parameter may be cut.
    pub fn mesh_dim(mut self, name: impl Into<String>) -> DataParallelOptions {
        self.mesh_dim = Some(name.into());
        self
    }

    /// Whose values count, of what is plain.
    pub fn source(mut self, source: Source) -> DataParallelOptions {
        self.source = source;
        self
    }

    /// Of gradients on their way.
    pub fn sync(mut self, sync: GradSyncOptions) -> DataParallelOptions {
        self.sync = sync;
        self
    }
}

/// A hook, and the thread that it belongs to.
struct Held {
    hook: Box<dyn GradientHook>,
    home: ThreadId,
}

/// With the name that it points to.
pub(crate) type RawHook = (sys::swv_gradient_hook, CString);

/// A raw hook, dropped by the library when the call that takes it, or what it makes, has done with it.
/// What comes between this and that call must not fail: nobody would drop it.
pub(crate) fn raw_hook<H: GradientHook>(hook: H) -> Result<RawHook> {
    let name = c_text(&hook.name(), "name")?;
    let held = Box::new(Held { hook: Box::new(hook), home: thread::current().id() });
    let raw = sys::swv_gradient_hook {
        name: name.as_ptr(),
        user_data: Box::into_raw(held).cast(),
        begin: Some(begin_hook),
        finish: Some(finish_hook),
        drop: Some(drop_hook),
        ..sys::SWV_GRADIENT_HOOK_INIT
    };
    Ok((raw, name))
}

/// # Safety
/// What raw_hook() gave the library, and a bucket as the library passes it to callbacks.
unsafe fn call_hook(
    held: *mut c_void,
    bucket: *const sys::swv_gradient_bucket,
    body: impl FnOnce(&dyn GradientHook, &GradientBucket) -> Result<()>,
) -> *mut sys::swv_status {
    status_of(|| {
        let held = held.cast::<Held>();
        // SAFETY: `home` may be read on any thread.
        let home = unsafe { (*held).home };
        if thread::current().id() != home {
            return Err(Error::new(
                Code::FailedPrecondition,
                "a gradient hook runs on its own thread only; LibTorch has left that",
            ));
        }
        // SAFETY: the same, on the hook's thread.
        let hook = unsafe { &*(*held).hook };
        // SAFETY: what the header says of a bucket.
        let raw = unsafe { &*bucket };
        let share = |tensor: *mut sys::swv_tensor| {
            create!(swv_tensor_share(tensor)).map(Tensor::from_handle)
        };
        let (gradients, names) = if raw.num_gradients == 0 {
            (&[][..], &[][..])
        } else {
            // SAFETY: so many of both.
            unsafe {
                (
                    slice::from_raw_parts(raw.gradients, raw.num_gradients),
                    slice::from_raw_parts(raw.parameters, raw.num_gradients),
                )
            }
        };
        let bucket = GradientBucket {
            index: raw.index,
            flat: share(raw.flat)?,
            gradients: gradients.iter().map(|tensor| share(*tensor)).collect::<Result<_>>()?,
            // SAFETY: text that ends with NUL.
            parameters: names
                .iter()
                .map(|name| unsafe { CStr::from_ptr(*name) }.to_string_lossy().into_owned())
                .collect(),
            comm: create!(swv_comm_share(raw.comm)).map(Comm::from_handle)?,
            is_discarded: raw.is_discarded != 0,
        };
        Mode::NO_GRAD.around(|| body(hook, &bucket))
    })
}

unsafe extern "C" fn begin_hook(
    held: *mut c_void,
    bucket: *const sys::swv_gradient_bucket,
) -> *mut sys::swv_status {
    // SAFETY: the library's call.
    unsafe { call_hook(held, bucket, |hook, bucket| hook.begin(bucket)) }
}

unsafe extern "C" fn finish_hook(
    held: *mut c_void,
    bucket: *const sys::swv_gradient_bucket,
) -> *mut sys::swv_status {
    // SAFETY: the library's call.
    unsafe { call_hook(held, bucket, |hook, bucket| hook.finish(bucket)) }
}

unsafe extern "C" fn drop_hook(held: *mut c_void) {
    // A panic has nowhere to go from here.
    let _ = without_panics(|| {
        let held = held.cast::<Held>();
        // SAFETY: as in call_hook().
        let home = unsafe { (*held).home };
        if thread::current().id() == home {
            // SAFETY: raw_hook() made it by Box::into_raw, and the library drops it once.
            drop(unsafe { Box::from_raw(held) });
        } // Else what it holds may be in use on its own thread: it stays.
        Ok(())
    });
}

fn dim_text(mesh_dim: Option<&str>, of: &'static str) -> Result<Option<CString>> {
    mesh_dim.map(|name| c_text(name, "mesh_dim")).transpose().of(of)
}

fn pointer(text: &Option<CString>) -> *const std::os::raw::c_char {
    text.as_ref().map_or(ptr::null(), |text| text.as_ptr())
}

pub(crate) fn parallel<M: Module + ?Sized>(
    module: &M,
    mesh: &Mesh,
    options: &DataParallelOptions,
) -> Result<GradSync> {
    const NAME: &str = "Module::distributed_data_parallel";
    make(module, mesh, options, || Ok(None), NAME)
}

pub(crate) fn parallel_with_hook<M: Module + ?Sized, H: GradientHook>(
    module: &M,
    mesh: &Mesh,
    options: &DataParallelOptions,
    hook: H,
) -> Result<GradSync> {
    const NAME: &str = "Module::distributed_data_parallel_with_hook";
    make(module, mesh, options, || raw_hook(hook).map(Some), NAME)
}

fn make<M: Module + ?Sized>(
    module: &M,
    mesh: &Mesh,
    options: &DataParallelOptions,
    hook: impl FnOnce() -> Result<Option<RawHook>>,
    caller: &'static str,
) -> Result<GradSync> {
    let (module, _forwards) = trained_handle_of(module).of(caller)?;
    let mesh_dim = dim_text(options.mesh_dim.as_deref(), caller)?;
    let power_sgd = options.sync.power_sgd;
    let mut sync = options.sync.raw(power_sgd.as_ref());
    let hook = hook().of(caller)?;
    sync.hook = hook.as_ref().map_or(ptr::null(), |(raw, _name)| raw);
    let raw = sys::swv_data_parallel_options {
        mesh_dim: pointer(&mesh_dim),
        source: options.source.to_raw().source,
        sync: &sync,
        ..sys::SWV_DATA_PARALLEL_OPTIONS_INIT
    };
    let made = create!(swv_module_distributed_data_parallel(module.as_ptr(), mesh.as_ptr(), &raw))?;
    Ok(GradSync::of_handle(made))
}

pub(crate) fn transform<M: Module + ?Sized>(
    module: &M,
    mesh: &Mesh,
    mesh_dim: Option<&str>,
    source: Source,
) -> Result<()> {
    const NAME: &str = "Module::pre_dp_transform";
    let (module, _forwards) = trained_handle_of(module).of(NAME)?;
    let mesh_dim = dim_text(mesh_dim, NAME)?;
    call!(swv_module_pre_dp_transform(
        module.as_ptr(),
        mesh.as_ptr(),
        pointer(&mesh_dim),
        source.to_raw().source
    ))
}

pub(crate) fn broadcast<M: Module + ?Sized>(
    module: &M,
    mesh: &Mesh,
    mesh_dim: Option<&str>,
) -> Result<()> {
    const NAME: &str = "Module::broadcast_buffers";
    let (module, _forwards) = handle_of(module).of(NAME)?;
    let mesh_dim = dim_text(mesh_dim, NAME)?;
    call!(swv_module_broadcast_buffers(module.as_ptr(), mesh.as_ptr(), pointer(&mesh_dim)))
}

pub(crate) fn enable_2d<M: Module + ?Sized>(
    module: &M,
    mesh: &Mesh,
    mesh_dim: Option<&str>,
) -> Result<()> {
    const NAME: &str = "Module::enable_2d_with_fsdp";
    let (module, _forwards) = trained_handle_of(module).of(NAME)?;
    let mesh_dim = dim_text(mesh_dim, NAME)?;
    call!(swv_module_enable_2d_with_fsdp(module.as_ptr(), mesh.as_ptr(), pointer(&mesh_dim)))
}

/// Of [`Mesh::join_batch`].
#[derive(Debug)]
#[non_exhaustive]
pub struct JoinedBatch {
    /// Sharded along their first dimension, as ranks have brought their rows.
    pub tensors: Vec<Tensor>,
    /// How many ranks have brought some.
    pub ranks_with_input: i64,
}

impl Mesh {
    /// Ranks with different numbers of batches, at the end of an epoch: of each rank's rows of the
    /// tensors of a batch, plain, one tensor each, cut between rows as ranks have brought them. A
    /// rank that has no more gives none, and takes part without rows, so that losses and gradients
    /// are those of one device on all rows that there are. `None` once no rank has any.
    ///
    /// ```
    /// use shardweave::{Tensor, World};
    /// World::threads(3).run(|world| {
    ///     let mesh = world.device_mesh(&[("dp", 3)])?;
    ///     let mut left = 1 + world.rank() % 2; // 1, 2 and 1
    ///     let mut rows = vec![];
    ///     loop {
    ///         let mine = if left > 0 { vec![Tensor::ones(&[2, 5])?] } else { vec![] };
    ///         let Some(batch) = mesh.join_batch(&[], &mine)? else { break };
    ///         rows.push(batch.tensors[0].sizes()?[0]);
    ///         left -= usize::from(left > 0);
    ///     }
    ///     assert_eq!(rows, [6, 2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    ///
    /// `mesh_dims`: along which ranks have input of their own; none: the mesh's first. At most eight
    /// tensors. Ranks that differ in their number, types or rows' shapes, and numbers, are errors on
    /// all ranks. Collective.
    pub fn join_batch(&self, mesh_dims: &[&str], mine: &[Tensor]) -> Result<Option<JoinedBatch>> {
        const NAME: &str = "Mesh::join_batch";
        let dims: Vec<CString> = mesh_dims
            .iter()
            .map(|name| c_text(name, "mesh_dims"))
            .collect::<Result<_>>()
            .of(NAME)?;
        let names: Vec<_> = dims.iter().map(|name| name.as_ptr()).collect();
        let given: Vec<_> = mine.iter().map(|tensor| tensor.as_const_ptr()).collect();
        let mut out = [ptr::null_mut(); sys::SWV_MAX_BATCH_TENSORS as usize];
        let (mut count, mut ranks_with_input) = (0, 0);
        call!(swv_mesh_join_batch(
            self.as_ptr(),
            names.as_ptr(),
            names.len(),
            given.as_ptr(),
            given.len(),
            out.as_mut_ptr(),
            &mut count,
            &mut ranks_with_input,
        ))?;
        let tensors: Vec<Tensor> = out[..count]
            .iter()
            .map(|tensor| Tensor::from_handle(NonNull::new(*tensor).expect("one for every output")))
            .collect();
        Ok((!tensors.is_empty()).then_some(JoinedBatch { tensors, ranks_with_input }))
    }
}
