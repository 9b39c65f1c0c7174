//! What a module is, and what it does when it runs.

use std::fmt;
use std::os::raw::c_void;
use std::ptr::{self, NonNull};

use shardweave_sys as sys;

use crate::autograd::{with_grad_mode, GradMode};
use crate::error::{Of, Result};
use crate::ffi::{status_of, take_string};
use crate::module::Module;
use crate::module_handle::handle_of;
use crate::tensor::Tensor;

/// What [`dump`], [`memory`], [`list_communication`] and [`Module::fully_shard`] tell; as a text it
/// is the table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// For people.
    pub table: String,
    /// For programs.
    pub json: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.table)
    }
}

/// What [`verify`] has found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verification {
    /// Whether they compute the same.
    pub same: bool,
    /// Where they differ first, or what was compared.
    pub report: Report,
}

/// Of [`verify`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VerifyOptions {
    /// What may be between the largest difference of a tensor and its largest element; 0: by its
    /// dtype, of `f32` 1e-4.
    pub tolerance: f64,
    /// No backward, no gradients.
    pub forward_only: bool,
    /// The reference gets the module's values first.
    pub copy_values: bool,
}

/// A tree of a module's modules with their tensors: shapes, parts, placements, bytes, and which line
/// of a plan decided. Of the inputs and outputs of a [`Forward`](crate::Forward) it says nothing: those the
/// plan knows ([`ParameterPlan::resolve`](crate::ParameterPlan::resolve)). Sends nothing.
///
/// ```
/// use shardweave::{debug, nn};
/// let report = debug::dump(&nn::Linear::new(3, 5)?)?;
/// assert!(report.table.contains("weight"), "{report}");
/// # Ok::<(), shardweave::Error>(())
/// ```
pub fn dump<M: Module + ?Sized>(module: &M) -> Result<Report> {
    let (module, _forwards) = handle_of(module).of("debug::dump")?;
    report(|table, json| call!(swv_module_dump(module.as_ptr(), table, json)))
}

/// The memory of this rank by modules, in bytes: of parameters, buffers and gradients.
pub fn memory<M: Module + ?Sized>(module: &M) -> Result<Report> {
    let (module, _forwards) = handle_of(module).of("debug::memory")?;
    report(|table, json| {
        call!(swv_module_memory(module.as_ptr(), None, ptr::null_mut(), table, json))
    })
}

/// [`memory`] with activations, which are measured: `run` is the module's forward, and is called
/// once. Collective if that is.
///
/// ```
/// use shardweave::nn::{self, Layer};
/// use shardweave::{debug, Tensor};
/// let layer = nn::Linear::new(3, 5)?;
/// let report = debug::memory_of_run(&layer, || layer.forward(&Tensor::ones(&[4, 3])?))?;
/// assert!(report.table.contains("activations"), "{report}");
/// # Ok::<(), shardweave::Error>(())
/// ```
pub fn memory_of_run<M: Module + ?Sized>(
    module: &M,
    mut run: impl FnMut() -> Result<Tensor>,
) -> Result<Report> {
    let (module, _forwards) = handle_of(module).of("debug::memory_of_run")?;
    let mut run = || run().map(Some);
    let mut runs = Runs { run: &mut run, reference: None };
    let result = report(|table, json| {
        let runs = ptr::addr_of_mut!(runs).cast();
        call!(swv_module_memory(module.as_ptr(), Some(run_it), runs, table, json))
    });
    result.of("debug::memory_of_run")
}

/// Every collective of one `run`, a forward or a whole step, in order, with the module that needs
/// it. Something of the module is sharded. Collective as the run is.
///
/// ```
/// use shardweave::nn::{self, Layer};
/// use shardweave::{debug, Module, ParameterPlan, Placement::*, Source, Tensor, World};
/// World::threads(2).run(|world| {
///     let mesh = world.device_mesh(&[("tp", 2)])?;
///     let layer = nn::Linear::new(4, 5)?;
///     let plan = ParameterPlan::new()
///         .line("weight", &[("tp", Shard(1))])
///         .forward("output", &[("tp", Replicate)]);
///     layer.distribute(&mesh, &plan, Source::default())?;
///     let x = Tensor::ones(&[2, 4])?.distribute(&mesh, [("tp", Replicate)])?;
///     let report = debug::list_communication(&layer, || layer.forward(&x).map(drop))?;
///     assert!(report.table.contains("all_reduce"), "{report}");
///     Ok(())
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
pub fn list_communication<M: Module + ?Sized>(
    module: &M,
    mut run: impl FnMut() -> Result<()>,
) -> Result<Report> {
    let (module, _forwards) = handle_of(module).of("debug::list_communication")?;
    let mut run = || run().map(|()| None);
    let mut runs = Runs { run: &mut run, reference: None };
    report(|table, json| {
        let runs = ptr::addr_of_mut!(runs).cast();
        call!(swv_module_list_communication(module.as_ptr(), Some(run_it), runs, table, json))
    })
}

/// Whether a sharded module is still right: runs it, and a plain one with the same modules and
/// values, and compares parameters, what every operator gives, and gradients. What fails in `run` is
/// a difference, what fails in `run_reference` an error. No dropout: it draws other numbers on a
/// mesh. All ranks get the same answer. Collective.
///
/// ```
/// use shardweave::debug::{verify, VerifyOptions};
/// use shardweave::nn::{self, Layer};
/// use shardweave::{Module, ParameterPlan, Placement::*, Source, Tensor, World};
/// World::threads(2).run(|world| {
///     let mesh = world.device_mesh(&[("tp", 2)])?;
///     let (layer, plain) = (nn::Linear::new(4, 5)?, nn::Linear::new(4, 5)?);
///     let plan = ParameterPlan::new().line("*", &[("tp", Shard(0))]);
///     layer.distribute(&mesh, &plan, Source::default())?;
///     let x = Tensor::ones(&[2, 4])?;
///     let options = VerifyOptions { copy_values: true, ..VerifyOptions::default() };
///     let found =
///         verify(&layer, || layer.forward(&x), &plain, || plain.forward(&x), options)?;
///     assert!(found.same, "{}", found.report);
///     Ok(())
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
pub fn verify<M: Module + ?Sized, R: Module + ?Sized>(
    module: &M,
    mut run: impl FnMut() -> Result<Tensor>,
    reference: &R,
    mut run_reference: impl FnMut() -> Result<Tensor>,
    options: VerifyOptions,
) -> Result<Verification> {
    const NAME: &str = "debug::verify";
    let (module, _forwards) = handle_of(module).of(NAME)?;
    let (reference, _others) = handle_of(reference).of(NAME)?;
    // Gradients are compared, whatever mode the caller is in.
    let mut run = || with_grad_mode(GradMode::Grad, &mut run).map(Some);
    let mut other = || with_grad_mode(GradMode::Grad, &mut run_reference).map(Some);
    let mut runs = Runs { run: &mut run, reference: Some(&mut other) };
    let raw = sys::swv_verify_options {
        tolerance: options.tolerance,
        forward_only: options.forward_only.into(),
        copy_values: options.copy_values.into(),
        ..sys::SWV_VERIFY_OPTIONS_INIT
    };
    let mut same = 0;
    let report = report(|table, json| {
        call!(swv_module_verify(
            module.as_ptr(),
            Some(run_it),
            reference.as_ptr(),
            Some(run_reference_of),
            ptr::addr_of_mut!(runs).cast(),
            &raw,
            &mut same,
            table,
            json,
        ))
    })?;
    Ok(Verification { same: same == 1, report })
}

pub(crate) fn report(
    call: impl FnOnce(*mut *mut sys::swv_string, *mut *mut sys::swv_string) -> Result<()>,
) -> Result<Report> {
    let (mut table, mut json) = (ptr::null_mut(), ptr::null_mut());
    call(&mut table, &mut json)?;
    let text = |string| take_string(NonNull::new(string).expect("it was asked for"));
    Ok(Report { table: text(table), json: text(json) })
}

type Run<'a> = &'a mut dyn FnMut() -> Result<Option<Tensor>>;

/// What a call's callbacks are, on the thread of the call and while it lasts.
struct Runs<'a> {
    run: Run<'a>,
    reference: Option<Run<'a>>,
}

unsafe extern "C" fn run_it(
    runs: *mut c_void,
    out_result: *mut *mut sys::swv_tensor,
) -> *mut sys::swv_status {
    status_of(|| {
        // SAFETY: what the functions above gave the library, which calls back from within them.
        let runs = unsafe { &mut *runs.cast::<Runs<'_>>() };
        let result = (runs.run)()?;
        // SAFETY: there is room for one; the library takes the handle over.
        unsafe { *out_result = result.map_or(ptr::null_mut(), Tensor::into_raw) };
        Ok(())
    })
}

unsafe extern "C" fn run_reference_of(
    runs: *mut c_void,
    out_result: *mut *mut sys::swv_tensor,
) -> *mut sys::swv_status {
    status_of(|| {
        // SAFETY: as in run_it().
        let runs = unsafe { &mut *runs.cast::<Runs<'_>>() };
        let result = runs.reference.as_mut().map_or(Ok(None), |run| run())?;
        // SAFETY: the same.
        unsafe { *out_result = result.map_or(ptr::null_mut(), Tensor::into_raw) };
        Ok(())
    })
}
