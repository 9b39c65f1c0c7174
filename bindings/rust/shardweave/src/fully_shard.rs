//! Modules whose parameters are whole only while they are used.

use std::ffi::CString;
use std::fmt;
use std::ptr::{self, NonNull};

use shardweave_sys as sys;

use crate::debug::{self, Report};
use crate::dtype::{number_of, DType, Device};
use crate::error::{Of, Result};
use crate::ffi::c_text;
use crate::mesh::{Mesh, Scope};
use crate::module::Module;
use crate::module_handle::{handle_of, trained_handle_of};
use crate::source::called_here;
use crate::tensor::{Source, Tensor};

/// Of [`Module::fully_shard`]: what is a unit, and how it lives.
#[derive(Clone, Debug)]
pub struct FullyShardOptions {
    mesh_dim: Option<String>,
    units: Vec<String>,
    unit_types: Vec<String>,
    min_numel: i64,
    source: Source,
    reshard_after_forward: bool,
    param_dtype: Option<DType>,
    reduce_dtype: Option<DType>,
    output_dtype: Option<DType>,
    equal_segments: bool,
    reshard_after_forward_ranks: i64,
    compute_device: Device,
}

impl Default for FullyShardOptions {
    fn default() -> FullyShardOptions {
        FullyShardOptions::new()
    }
}

impl FullyShardOptions {
    /// All is one unit, along the mesh's first dimension.
    pub fn new() -> FullyShardOptions {
        FullyShardOptions {
            mesh_dim: None,
            units: Vec::new(),
            unit_types: Vec::new(),
            min_numel: 0,
            source: Source::default(),
            reshard_after_forward: true,
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            equal_segments: false,
            reshard_after_forward_ranks: 0,
            compute_device: Device::Cpu,
        }
    }

    /// Along this mesh dimension.
    pub fn mesh_dim(mut self, name: impl Into<String>) -> FullyShardOptions {
        self.mesh_dim = Some(name.into());
        self
    }

    /// Modules whose FQN this pattern matches, "blocks.*", are units: of modules within each other
    /// the outermost; another pattern may name some in those. What is in no other unit is one with
    /// the module itself.
    pub fn unit(mut self, pattern: impl Into<String>) -> FullyShardOptions {
        self.units.push(pattern.into());
        self
    }

    /// The same by type, of modules of the library's ([`NativeModule`](crate::NativeModule)):
    /// "Linear".
    pub fn unit_type(mut self, name: impl Into<String>) -> FullyShardOptions {
        self.unit_types.push(name.into());
        self
    }

    /// Modules with fewer elements belong to the unit around them. Without patterns and types every
    /// module is a unit that has so many outside of units within it.
    pub fn min_numel(mut self, elements: i64) -> FullyShardOptions {
        self.min_numel = elements;
        self
    }

    /// Whose values count, of what is plain.
    pub fn source(mut self, source: Source) -> FullyShardOptions {
        self.source = source;
        self
    }

    /// With `false` what forward has gathered stays for backward: more memory, fewer collectives.
    pub fn reshard_after_forward(mut self, reshard: bool) -> FullyShardOptions {
        self.reshard_after_forward = reshard;
        self
    }

    /// Mixed precision, `F16`, `Bf16`, `F32` or `F64`: what operators see of parameters, as units are
    /// gathered. What an operator takes beside them or views of them is cast, too, but buffers and
    /// numbers. What rests, its gradient, and so what optimizers work on, keeps its type.
    pub fn param_dtype(mut self, dtype: DType) -> FullyShardOptions {
        self.param_dtype = Some(dtype);
        self
    }

    /// In what gradients are summed over ranks; else as operators see the parameters.
    pub fn reduce_dtype(mut self, dtype: DType) -> FullyShardOptions {
        self.reduce_dtype = Some(dtype);
        self
    }

    /// Of what operators give that take parameters and an input; else as it comes.
    pub fn output_dtype(mut self, dtype: DType) -> FullyShardOptions {
        self.output_dtype = Some(dtype);
        self
    }

    /// Ranks keep as much as each other, with gaps between parameters ("padding" of the report), for
    /// backends whose collectives want that.
    pub fn equal_segments(mut self, equal: bool) -> FullyShardOptions {
        self.equal_segments = equal;
        self
    }

    /// After forward a unit stays divided among so many neighbours, from whom backward gathers it: a
    /// divisor of the ranks along the mesh dimension; 0: among all of them.
    pub fn reshard_after_forward_ranks(mut self, ranks: i64) -> FullyShardOptions {
        self.reshard_after_forward_ranks = ranks;
        self
    }

    /// CPU offload: parameters rest on the CPU, as gradients and optimizers' states do, and operators
    /// see them on this device, a unit at a time. Buffers and numbers move to it; inputs belong on it.
    pub fn compute_device(mut self, device: Device) -> FullyShardOptions {
        self.compute_device = device;
        self
    }
}

/// What fully sharded modules on a mesh did, of one rank since the mesh was made; the same on all
/// ranks but for the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FullyShardCounters {
    /// Of units.
    pub gathers: i64,
    /// Of these, begun before the unit was touched.
    pub prefetches: i64,
    /// After which another one was touched.
    pub wrong_prefetches: i64,
    /// Of gradients, a unit's at once.
    pub reduce_scatters: i64,
    /// That units which are whole take up now.
    pub gathered_bytes: i64,
    /// The most that they ever took up.
    pub peak_gathered_bytes: i64,
}

const NAME: &str = "Module::fully_shard";

pub(crate) fn shard<M: Module + ?Sized>(
    module: &M,
    mesh: &Mesh,
    options: &FullyShardOptions,
) -> Result<Report> {
    // Those of plans stay as they are.
    let (module, _forwards) = trained_handle_of(module).of(NAME)?;
    let mesh_dim = options.mesh_dim.as_deref().map(|name| c_text(name, "mesh_dim"));
    let mesh_dim = mesh_dim.transpose().of(NAME)?;
    let units = texts(&options.units, "unit")?;
    let unit_types = texts(&options.unit_types, "unit_type")?;
    let (units, unit_types) = (pointers(&units), pointers(&unit_types));
    let raw = sys::swv_fully_shard_options {
        mesh_dim: mesh_dim.as_ref().map_or(ptr::null(), |name| name.as_ptr()),
        units: units.as_ptr(),
        num_units: units.len(),
        unit_types: unit_types.as_ptr(),
        num_unit_types: unit_types.len(),
        min_numel: options.min_numel,
        source: options.source.to_raw().source,
        reshard_after_forward: options.reshard_after_forward.into(),
        param_dtype: number_of(options.param_dtype),
        reduce_dtype: number_of(options.reduce_dtype),
        output_dtype: number_of(options.output_dtype),
        equal_segments: options.equal_segments.into(),
        reshard_after_forward_ranks: options.reshard_after_forward_ranks,
        compute_device: options.compute_device.to_raw(),
        ..sys::SWV_FULLY_SHARD_OPTIONS_INIT
    };
    debug::report(|table, json| {
        call!(swv_module_fully_shard(module.as_ptr(), mesh.as_ptr(), &raw, table, json))
    })
}

fn texts(all: &[String], what: &str) -> Result<Vec<CString>> {
    all.iter().map(|text| c_text(text, what)).collect::<Result<_>>().of(NAME)
}

fn pointers(texts: &[CString]) -> Vec<*const std::os::raw::c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}

/// Of [`Module::full_params`]: to read parameters on every rank, or as it says.
#[derive(Clone, Debug, Default)]
pub struct FullParamsOptions {
    writeback: bool,
    rank: Option<u32>,
}

impl FullParamsOptions {
    /// To read them, on every rank.
    pub fn new() -> FullParamsOptions {
        FullParamsOptions::default()
    }

    /// What is written is kept.
    pub fn writeback(mut self, writeback: bool) -> FullParamsOptions {
        self.writeback = writeback;
        self
    }

    /// The rank at this place along the mesh dimension has plain copies, and no other; parameters
    /// rest as ever.
    pub fn rank(mut self, place: u32) -> FullParamsOptions {
        self.rank = Some(place);
        self
    }
}

/// Whole parameters, while the body of [`Module::full_params`] runs.
pub struct FullParams {
    scope: Scope,
}

impl FullParams {
    /// A plain tensor, of the parameter with this name in the outermost module that was sharded;
    /// `None` on a rank that has none. What it holds is the parameter's until the body ends, and
    /// nobody's afterwards.
    #[track_caller]
    pub fn get(&self, fqn: &str) -> Result<Option<Tensor>> {
        const NAME: &str = "FullParams::get";
        let _here = called_here();
        let fqn = c_text(fqn, "fqn").of(NAME)?;
        let mut tensor = ptr::null_mut();
        call!(swv_full_params_get(self.scope.as_ptr(), fqn.as_ptr(), &mut tensor)).of(NAME)?;
        Ok(NonNull::new(tensor).map(Tensor::from_handle))
    }
}

impl fmt::Debug for FullParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FullParams").finish_non_exhaustive()
    }
}

#[track_caller]
pub(crate) fn full_params<M: Module + ?Sized, T>(
    module: &M,
    options: &FullParamsOptions,
    body: impl FnOnce(&FullParams) -> Result<T>,
) -> Result<T> {
    const NAME: &str = "Module::full_params";
    let here = called_here();
    let (module, _forwards) = handle_of(module).of(NAME)?;
    let scope = create!(swv_module_full_params(
        module.as_ptr(),
        options.writeback.into(),
        options.rank.map_or(-1, |place| i32::try_from(place).unwrap_or(i32::MAX)),
    ))
    .of(NAME)?;
    drop(here);
    let whole = FullParams { scope: Scope::from_handle(scope) };
    let result = body(&whole)?;
    let _here = called_here();
    call!(swv_full_params_end(whole.scope.as_ptr())).of(NAME)?;
    Ok(result)
}
