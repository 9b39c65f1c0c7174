//! Plans that are searched for.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::os::raw::c_void;
use std::ptr;

use shardweave_sys as sys;

use crate::autograd::{with_grad_mode, GradMode};
use crate::debug::{report, Report};
use crate::error::{Of, Result};
use crate::ffi::{c_text, status_of};
use crate::mesh::Mesh;
use crate::module::Module;
use crate::module_handle::trained_handle_of;
use crate::plan::{ParameterPlan, PlanHandle};
use crate::tensor::Tensor;

/// What [`auto_plan`] has found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AutoPlan {
    /// For [`Module::distribute`].
    pub plan: ParameterPlan,
    /// What each choice costs, and what the next best was.
    pub report: Report,
}

/// Of [`auto_plan`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AutoPlanOptions {
    tp_mesh_dim: Option<String>,
    memory_limit: i64,
    optimizer_states: i64,
    heads: i64,
    max_evaluations: i64,
    sequence_dim: i32,
}

impl AutoPlanOptions {
    /// Modules may be cut along the mesh's only dimension, or "tp" of several; a rank has as much
    /// memory as it takes; the optimizer is Adam; 120 plans are measured at most.
    pub fn new() -> AutoPlanOptions {
        let raw = sys::SWV_PLAN_AUTO_OPTIONS_INIT;
        AutoPlanOptions {
            tp_mesh_dim: None,
            memory_limit: raw.memory_limit,
            optimizer_states: raw.optimizer_states,
            heads: raw.heads,
            max_evaluations: raw.max_evaluations,
            sequence_dim: raw.sequence_dim,
        }
    }

    /// Along which dimension of the mesh modules may be cut.
    pub fn tp_mesh_dim(mut self, name: impl Into<String>) -> AutoPlanOptions {
        self.tp_mesh_dim = Some(name.into());
        self
    }

    /// Bytes that a rank has; 0: as many as it takes.
    pub fn memory_limit(mut self, bytes: i64) -> AutoPlanOptions {
        self.memory_limit = bytes;
        self
    }

    /// Numbers that the optimizer keeps for each parameter.
    pub fn optimizer_states(mut self, numbers: i64) -> AutoPlanOptions {
        self.optimizer_states = numbers;
        self
    }

    /// Of attentions; 0: not known.
    pub fn heads(mut self, heads: i64) -> AutoPlanOptions {
        self.heads = heads;
        self
    }

    /// Plans that are measured at most, each about a step of one rank.
    pub fn max_evaluations(mut self, plans: i64) -> AutoPlanOptions {
        self.max_evaluations = plans;
        self
    }

    /// Of the activations.
    pub fn sequence_dim(mut self, dim: i32) -> AutoPlanOptions {
        self.sequence_dim = dim;
        self
    }
}

impl Default for AutoPlanOptions {
    fn default() -> AutoPlanOptions {
        AutoPlanOptions::new()
    }
}

/// Searches for a plan: which modules are worth cutting on the mesh, and how, by the mesh's
/// [`CostModel`](crate::CostModel). Every plan that is looked at is measured: `make` makes the model
/// (the same every time; within [`deferred_init`](crate::deferred_init), without memory), and one
/// rank's part of a step really runs, on the CPU. `loss` is what the step minimises, a number, on
/// the mesh that it is given, whose other ranks are not there; it brings the batch there as a real
/// step does, and calls no backward. Local; every rank finds the same.
///
/// ```
/// use shardweave::nn::{self, Layer};
/// use shardweave::{
///     auto_plan, AutoPlanOptions, Module, Placement::*, Source, Tensor, World,
/// };
///
/// World::threads(2).run(|world| {
///     let mesh = world.device_mesh(&[("tp", 2)])?;
///     let make =
///         || Ok(nn::Sequential::new().with(nn::Linear::new(3, 8)?).with(nn::Linear::new(8, 3)?));
///     let found = auto_plan(
///         &mesh,
///         make,
///         |model, on| {
///             let x = Tensor::ones(&[4, 3])?;
///             model.forward(&x.distribute_from(Source::Same, on, [("tp", Replicate)])?)?.sum()
///         },
///         &AutoPlanOptions::new(),
///     )?;
///     assert!(found.report.table.contains("plans measured"), "{}", found.report);
///     make()?.distribute(&mesh, &found.plan, Source::default())
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
pub fn auto_plan<M: Module>(
    mesh: &Mesh,
    mut make: impl FnMut() -> Result<M>,
    mut loss: impl FnMut(&M, &Mesh) -> Result<Tensor>,
    options: &AutoPlanOptions,
) -> Result<AutoPlan> {
    const NAME: &str = "auto_plan";
    let made = RefCell::new(None);
    let mut make = || {
        let model = make()?;
        let (module, forwards) = trained_handle_of(&model)?;
        for (forward, handle) in forwards {
            forward.set(handle);
        }
        *made.borrow_mut() = Some(model);
        Ok(ManuallyDrop::new(module).as_ptr())
    };
    let mut loss = |on: &Mesh| loss(made.borrow().as_ref().expect("it was made before"), on);
    let mut search = Search { make: &mut make, loss: &mut loss };
    let dim = options.tp_mesh_dim.as_ref().map(|dim| c_text(dim, "tp_mesh_dim"));
    let dim = dim.transpose().of(NAME)?;
    let raw = sys::swv_plan_auto_options {
        tp_mesh_dim: dim.as_ref().map_or(ptr::null(), |dim| dim.as_ptr()),
        memory_limit: options.memory_limit,
        optimizer_states: options.optimizer_states,
        heads: options.heads,
        max_evaluations: options.max_evaluations,
        sequence_dim: options.sequence_dim,
        ..sys::SWV_PLAN_AUTO_OPTIONS_INIT
    };
    let mut plan = ptr::null_mut();
    let report = report(|table, json| {
        call!(swv_plan_auto(
            mesh.as_ptr(),
            Some(make_model),
            Some(loss_of_model),
            ptr::addr_of_mut!(search).cast(),
            &raw,
            &mut plan,
            table,
            json,
        ))
    })?;
    let plan = PlanHandle::from_handle(ptr::NonNull::new(plan).expect("it succeeded"));
    Ok(AutoPlan { plan: ParameterPlan::of_handle(&plan).of(NAME)?, report })
}

/// What a search calls, on the thread of the call and while it lasts.
struct Search<'a> {
    make: &'a mut dyn FnMut() -> Result<*mut sys::swv_module>,
    loss: &'a mut dyn FnMut(&Mesh) -> Result<Tensor>,
}

unsafe extern "C" fn make_model(
    search: *mut c_void,
    out_module: *mut *mut sys::swv_module,
) -> *mut sys::swv_status {
    status_of(|| {
        // SAFETY: what auto_plan() gave the library, which calls back from within it.
        let search = unsafe { &mut *search.cast::<Search<'_>>() };
        let module = (search.make)()?;
        // SAFETY: there is room for one; the library takes the handle over.
        unsafe { *out_module = module };
        Ok(())
    })
}

unsafe extern "C" fn loss_of_model(
    search: *mut c_void,
    _: *mut sys::swv_module,
    mesh: *mut sys::swv_mesh,
    out_loss: *mut *mut sys::swv_tensor,
) -> *mut sys::swv_status {
    status_of(|| {
        // SAFETY: as in make_model().
        let search = unsafe { &mut *search.cast::<Search<'_>>() };
        let mesh = Mesh::from_handle(create!(swv_mesh_share(mesh))?);
        let loss = with_grad_mode(GradMode::Grad, || (search.loss)(&mesh))?;
        // SAFETY: the same.
        unsafe { *out_loss = loss.into_raw() };
        Ok(())
    })
}
