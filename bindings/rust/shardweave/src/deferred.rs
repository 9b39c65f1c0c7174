//! Modules that are larger than a machine: constructed without memory, sharded, and then made.

use std::ptr;

use shardweave_sys as sys;

use crate::error::{Of, Result};
use crate::ffi::c_text;
use crate::mesh::Scope;
use crate::module::Module;
use crate::module_handle::handle_of;
use crate::source::called_here;
use crate::tensor::Tensor;

/// Calls `body`; what it makes is deferred: it has a shape and a dtype, and no memory. What is done
/// to it, within the body and after it, is recorded, and [`materialize`] does it, for the part that
/// a rank has. The values are, bit by bit, the parts of what the same calls make on one rank.
///
/// ```
/// use shardweave::{
///     deferred_init, materialize, nn, MaterializeOptions, Module, ParameterPlan, Placement::*,
///     Source, World,
/// };
///
/// let sums = World::threads(2).run(|world| {
///     let mesh = world.device_mesh(&[("tp", 2)])?;
///     let layer = deferred_init(|| nn::Linear::new(3, 1000))?;
///     assert!(layer.weight.is_deferred()?);
///     let plan = ParameterPlan::new().line("*", &[("tp", Shard(0))]);
///     layer.distribute(&mesh, &plan, Source::Same)?;
///     materialize(&layer, &MaterializeOptions::new().seed(7))?;
///     assert_eq!(layer.weight.to_local()?.sizes()?, [500, 3]);
///     layer.weight.detach()?.abs()?.sum()?.item::<f64>()
/// })?;
/// let alone = deferred_init(|| nn::Linear::new(3, 1000))?;
/// materialize(&alone, &MaterializeOptions::new().seed(7))?;
/// assert!((alone.weight.detach()?.abs()?.sum()?.item::<f64>()? - sums[0]).abs() < 1e-2);
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// What needs values is [`FailedPrecondition`](crate::Code::FailedPrecondition) and names the
/// tensor; what is made from Rust's memory ([`Tensor::from_slice`]), and files, have theirs at once.
/// One call within another is part of it. Of this thread alone.
pub fn deferred_init<R>(body: impl FnOnce() -> Result<R>) -> Result<R> {
    let _scope = Scope::from_handle(create!(swv_deferred_init())?);
    body()
}

/// Of [`materialize`].
#[derive(Clone, Debug, Default)]
pub struct MaterializeOptions {
    seed: Option<u64>,
    values: Vec<(String, Tensor)>,
}

impl MaterializeOptions {
    /// What was recorded, with the random numbers of the mesh, or of the process for what is on
    /// none.
    pub fn new() -> MaterializeOptions {
        MaterializeOptions::default()
    }

    /// With random numbers from this seed, the same on every mesh.
    pub fn seed(mut self, seed: u64) -> MaterializeOptions {
        self.seed = Some(seed);
        self
    }

    /// With this value in place of what was recorded: a whole plain tensor, the same on all ranks,
    /// of which each copies its part; or one that lies on the same mesh, in any layout.
    pub fn value(mut self, name: impl Into<String>, value: &Tensor) -> MaterializeOptions {
        self.values.push((name.into(), value.clone()));
        self
    }
}

/// Gives values to the parameters and buffers of a module, a whole or a part, that have none after
/// [`deferred_init`]; what has values is left alone. Collective over the meshes that they are on:
/// one small comparison.
#[track_caller]
pub fn materialize<M: Module + ?Sized>(module: &M, options: &MaterializeOptions) -> Result<()> {
    const NAME: &str = "materialize";
    let _here = called_here();
    let (module, _forwards) = handle_of(module).of(NAME)?;
    let names = options.values.iter().map(|(name, _)| c_text(name, "name"));
    let texts = names.collect::<Result<Vec<_>>>().of(NAME)?;
    let names: Vec<_> = texts.iter().map(|name| name.as_ptr()).collect();
    let values: Vec<_> = options.values.iter().map(|(_, value)| value.as_const_ptr()).collect();
    let raw = sys::swv_materialize_options {
        fqns: if names.is_empty() { ptr::null() } else { names.as_ptr() },
        values: if values.is_empty() { ptr::null() } else { values.as_ptr() },
        num_values: values.len(),
        seed: options.seed.unwrap_or(0),
        has_seed: options.seed.is_some().into(),
        ..sys::SWV_MATERIALIZE_OPTIONS_INIT
    };
    call!(swv_module_materialize(module.as_ptr(), &raw)).of(NAME)
}
