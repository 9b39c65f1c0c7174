use std::ffi::{CStr, CString};
use std::fmt;

use shardweave_sys as sys;

use crate::comm::{widened, Comm};
use crate::error::{Of, Result};
use crate::ffi::c_text;
use crate::fully_shard::FullyShardCounters;
use crate::grad_sync::NoSync;
use crate::source::Traced;

handle! {
    /// An n-dimensional grid of ranks with names for its dimensions, as one rank sees it.
    /// Communicators along the dimensions are made on first use.
    ///
    /// ```
    /// use shardweave::World;
    /// World::threads(4).run(|world| {
    ///     let mesh = world.device_mesh(&[("dp", 2), ("tp", 2)])?;
    ///     assert_eq!(mesh.coordinate()?, [world.rank() as i64 / 2, world.rank() as i64 % 2]);
    ///     assert_eq!(mesh.slice(&["tp"])?.shape()?, [2]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    ///
    /// Belongs to its rank: neither `Send` nor `Sync`, because what is kept per mesh
    /// (communicators, caches, random state) is used by one thread at a time.
    Mesh, swv_mesh, swv_mesh_free
}

handle! {
    /// What holds on a mesh while it lives: [`Mesh::forbid_communication`], [`Mesh::module_scope`],
    /// [`Mesh::random_scope`]. Scopes end in any order; of one kind the innermost counts. Belongs to
    /// its mesh's rank: neither `Send` nor `Sync`.
    #[must_use = "it holds until this ends"]
    Scope, swv_scope, swv_scope_free
}

handle! {
    /// The C interface's own.
    TraceHandle, swv_trace, swv_trace_free
}

/// A record of every collective that tensors of a mesh start while it lives: what moves, how far,
/// and who wanted it. Belongs to its mesh's rank: neither `Send` nor `Sync`.
pub struct Trace {
    handle: TraceHandle,
    _traced: Traced,
}

/// Of one rank since its mesh was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DispatchCounters {
    /// On sharded tensors.
    pub operators: i64,
    /// Of the cache of sharding decisions.
    pub cache_misses: i64,
    /// With communication, that nobody asked for by name.
    pub implicit_redistributions: i64,
    /// Calls of operators without a sharding rule.
    pub gathered_operators: i64,
    /// Redistributions that an earlier one's result made needless.
    pub remembered_uses: i64,
    /// That such results take up now.
    pub remembered_bytes: i64,
    /// Times that a weight that the user had cut was brought elsewhere.
    pub unsharded_weights: i64,
}

/// Seed and position of the random numbers of a mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomState {
    /// What the numbers are a function of, together with the element's global index.
    pub seed: u64,
    /// Operators drawn so far.
    pub offset: u64,
}

impl RandomState {
    fn to_raw(self) -> sys::swv_random_state {
        sys::swv_random_state { seed: self.seed, offset: self.offset, ..sys::SWV_RANDOM_STATE_INIT }
    }
}

/// What communication and computation cost, by which operators choose among the strategies of their
/// sharding rules, and redistributions their steps. See [`Mesh::set_cost_model`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostModel {
    /// One for each mesh dimension.
    pub links: Vec<LinkCost>,
    /// Of a rank.
    pub device: DeviceCost,
}

/// What a collective along a mesh dimension costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkCost {
    /// Seconds per collective; 0 or more.
    pub latency: f64,
    /// Bytes per second and rank.
    pub bandwidth: f64,
}

/// What a rank computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceCost {
    /// Multiplications and additions per second, in matrix products.
    pub flops: f64,
    /// Bytes per second that are read or written.
    pub bandwidth: f64,
}

/// That of rank threads on a CPU.
impl Default for DeviceCost {
    fn default() -> DeviceCost {
        let raw = sys::SWV_DEVICE_COST_INIT;
        DeviceCost { flops: raw.flops, bandwidth: raw.bandwidth }
    }
}

/// Dimensions as the C interface takes them, with the texts that they point to.
pub(crate) struct MeshDims {
    pub(crate) raw: Vec<sys::swv_mesh_dim>,
    _names: Vec<CString>,
}

impl MeshDims {
    pub(crate) fn new<N: AsRef<str>>(dims: &[(N, i64)]) -> Result<MeshDims> {
        let names = dims
            .iter()
            .map(|(name, _)| c_text(name.as_ref(), "mesh dimension"))
            .collect::<Result<Vec<_>>>()?;
        let raw = names
            .iter()
            .zip(dims)
            .map(|(name, (_, size))| sys::swv_mesh_dim { name: name.as_ptr(), size: *size })
            .collect();
        Ok(MeshDims { raw, _names: names })
    }
}

impl Mesh {
    /// The sub-mesh of the named dimensions, in that order, with this rank in it.
    pub fn slice(&self, names: &[&str]) -> Result<Mesh> {
        let names = Names::new(names, "mesh dimension").of("Mesh::slice")?;
        create!(swv_mesh_slice(self.as_ptr(), names.raw.as_ptr(), names.raw.len())).map(Mesh)
    }

    /// Merges neighbouring dimensions into one, named as they are, joined by `_`; all of them if
    /// `names` is empty.
    pub fn flatten(&self, names: &[&str]) -> Result<Mesh> {
        self.flatten_to(names, None).of("Mesh::flatten")
    }

    /// The same, and the dimension that comes of them is named.
    ///
    /// ```
    /// use shardweave::World;
    ///
    /// World::threads(4).run(|world| {
    ///     let mesh = world.device_mesh(&[("hosts", 2), ("gpus", 2)])?;
    ///     assert_eq!(mesh.flatten(&[])?.dim_names()?, ["hosts_gpus"]);
    ///     assert_eq!(mesh.flatten_as("dp", &["hosts", "gpus"])?.dim_names()?, ["dp"]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn flatten_as(&self, new_name: &str, names: &[&str]) -> Result<Mesh> {
        self.flatten_to(names, Some(new_name)).of("Mesh::flatten_as")
    }

    fn flatten_to(&self, names: &[&str], new_name: Option<&str>) -> Result<Mesh> {
        let names = Names::new(names, "mesh dimension")?;
        let new_name = new_name.map(|name| c_text(name, "new_name")).transpose()?;
        create!(swv_mesh_flatten(
            self.as_ptr(),
            names.raw.as_ptr(),
            names.raw.len(),
            new_name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr()),
        ))
        .map(Mesh)
    }

    /// Splits one dimension into several, row-major.
    pub fn unflatten<N: AsRef<str>>(&self, name: &str, dims: &[(N, i64)]) -> Result<Mesh> {
        let name = c_text(name, "mesh dimension").of("Mesh::unflatten")?;
        let dims = MeshDims::new(dims).of("Mesh::unflatten")?;
        create!(
            swv_mesh_unflatten(self.as_ptr(), name.as_ptr(), dims.raw.as_ptr(), dims.raw.len(),)
        )
        .map(Mesh)
    }

    /// The size of each dimension.
    pub fn shape(&self) -> Result<Vec<i64>> {
        list!(swv_mesh_shape(self.as_ptr()) -> i64)
    }

    /// The name of each dimension.
    pub fn dim_names(&self) -> Result<Vec<String>> {
        (0..self.ndim()? as i32).map(|dim| text!(swv_mesh_dim_name(self.as_ptr(), dim))).collect()
    }

    fn ndim(&self) -> Result<usize> {
        Ok(get!(swv_mesh_ndim(self.as_ptr()) -> i32)? as usize)
    }

    /// The number of ranks.
    pub fn size(&self) -> Result<i64> {
        Ok(i64::from(get!(swv_mesh_size(self.as_ptr()) -> i32)?))
    }

    /// The index of a dimension; an error lists the names that there are.
    pub fn find_dim(&self, name: &str) -> Result<i32> {
        let name = c_text(name, "mesh dimension").of("Mesh::find_dim")?;
        get!(swv_mesh_find_dim(self.as_ptr(), name.as_ptr()) -> i32)
    }

    /// Where this rank is.
    pub fn coordinate(&self) -> Result<Vec<i64>> {
        list!(swv_mesh_coordinate(self.as_ptr()) -> i64)
    }

    /// All world ranks, row-major.
    pub fn ranks(&self) -> Result<Vec<i64>> {
        Ok(widened(list!(swv_mesh_ranks(self.as_ptr()) -> i32)?))
    }

    /// This rank's group along a dimension. Collective the first time.
    pub fn comm(&self, dim: &str) -> Result<Comm> {
        let dim = self.find_dim(dim).of("Mesh::comm")?;
        create!(swv_mesh_comm(self.as_ptr(), dim)).map(Comm::from_handle)
    }

    /// Makes the groups of all dimensions now. Collective.
    pub fn connect(&self) -> Result<()> {
        call!(swv_mesh_connect(self.as_ptr()))
    }

    /// The same names, sizes and ranks.
    pub fn is_same(&self, other: &Mesh) -> Result<bool> {
        Ok(get!(swv_mesh_equal(self.as_ptr(), other.as_ptr()) -> i32)? == 1)
    }

    /// Seeds the random numbers of tensors on this mesh: the same seed on every rank.
    pub fn seed(&self, seed: u64) -> Result<()> {
        call!(swv_mesh_seed(self.as_ptr(), seed))
    }

    /// Where the random numbers are, to go on from there another time.
    pub fn random_state(&self) -> Result<RandomState> {
        let mut raw = sys::SWV_RANDOM_STATE_INIT;
        call!(swv_mesh_random_state(self.as_ptr(), &mut raw))?;
        Ok(RandomState { seed: raw.seed, offset: raw.offset })
    }

    /// Goes on from a state. Local: the same on every rank.
    pub fn set_random_state(&self, state: RandomState) -> Result<()> {
        let raw = state.to_raw();
        call!(swv_mesh_set_random_state(self.as_ptr(), &raw))
    }

    /// Until the scope ends the mesh draws from `state`; then it goes on where it was. What is
    /// computed a second time draws its numbers a second time. Of several the innermost counts, and
    /// they end in any order. Local: the same on every rank.
    pub fn random_scope(&self, state: RandomState) -> Result<Scope> {
        let raw = state.to_raw();
        create!(swv_mesh_use_random_state(self.as_ptr(), &raw)).map(Scope)
    }

    /// What communication and computation cost here, by which operators choose.
    pub fn cost_model(&self) -> Result<CostModel> {
        let mut links = vec![sys::swv_link_cost { latency: 0.0, bandwidth: 0.0 }; self.ndim()?];
        let (mut count, mut device) = (0, sys::SWV_DEVICE_COST_INIT);
        call!(swv_mesh_cost_model(
            self.as_ptr(),
            links.as_mut_ptr(),
            links.len(),
            &mut count,
            &mut device,
        ))?;
        Ok(CostModel {
            links: links
                .iter()
                .map(|link| LinkCost { latency: link.latency, bandwidth: link.bandwidth })
                .collect(),
            device: DeviceCost { flops: device.flops, bandwidth: device.bandwidth },
        })
    }

    /// How an operator shards on this mesh: one of a library that the process has loaded
    /// (`TORCH_LIBRARY`), or one of LibTorch's, `"mylib::swiglu"` with all its overloads or
    /// `"aten::add.Tensor"`. Each way says, along one mesh dimension, how the tensor arguments lie
    /// and how the results lie then, where nothing has to be sent; `"pointwise"` alone: element by
    /// element. A derivative is an operator of its own, with a rule of its own.
    ///
    /// Every rank adds the same, before or between operators.
    ///
    /// ```
    /// use shardweave::World;
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("x", 2)])?;
    ///     mesh.add_rule("aten::bucketize.Tensor", &["S(0), R -> S(0)", "S(1), R -> S(1)"])?;
    ///     mesh.add_rule("aten::bucketize.Tensor", &["pointwise"]).unwrap_err(); // has one
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn add_rule(&self, name: &str, ways: &[&str]) -> Result<()> {
        let name = c_text(name, "name").of("Mesh::add_rule")?;
        let ways = Names::new(ways, "a way").of("Mesh::add_rule")?;
        call!(swv_mesh_add_rule(self.as_ptr(), name.as_ptr(), ways.raw.as_ptr(), ways.raw.len()))
    }

    /// From now on, on this mesh; its slices have models of their own. What was decided before is
    /// forgotten. Collective, once: ranks that are not all given the same, or one of which is given
    /// what is none, all get an error and keep what they had.
    ///
    /// ```
    /// use shardweave::{CostModel, LinkCost, World};
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("x", 2)])?;
    ///     let mut model = mesh.cost_model()?;
    ///     model.links[0] = LinkCost { latency: 3e-5, bandwidth: 2e10 };
    ///     mesh.set_cost_model(&model)?;
    ///     assert_eq!(mesh.cost_model()?, model);
    ///     mesh.set_cost_model(&CostModel::default()).unwrap_err(); // has no links
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn set_cost_model(&self, model: &CostModel) -> Result<()> {
        let links: Vec<_> = model
            .links
            .iter()
            .map(|link| sys::swv_link_cost { latency: link.latency, bandwidth: link.bandwidth })
            .collect();
        let device = sys::swv_device_cost {
            flops: model.device.flops,
            bandwidth: model.device.bandwidth,
            ..sys::SWV_DEVICE_COST_INIT
        };
        call!(swv_mesh_set_cost_model(self.as_ptr(), links.as_ptr(), links.len(), &device))
    }

    /// The same from JSON, as [`measure_cost_model`](Mesh::measure_cost_model) gives it.
    pub fn set_cost_model_from_json(&self, text: &str) -> Result<()> {
        // The library refuses it on every rank; an error here would leave the others waiting.
        let text = CString::new(text).unwrap_or_default();
        call!(swv_mesh_set_cost_model_from_json(self.as_ptr(), text.as_ptr()))
    }

    /// What communication and computation cost here and now, the same text on every rank: links by
    /// collectives of a few bytes and of many, the device by a matrix product and a copy, medians of
    /// the slowest rank. Nothing is set by it; a program keeps the text for the runs that follow.
    ///
    /// Of the host: its memory and its processor, whatever GPUs there are, whose costs are to be set.
    /// A second or two. Collective.
    ///
    /// ```
    /// use shardweave::World;
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("x", 2)])?;
    ///     let text = mesh.measure_cost_model()?; // {"links": {"x": {"latency": ...
    ///     mesh.set_cost_model_from_json(&text)
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn measure_cost_model(&self) -> Result<String> {
        text!(swv_mesh_measure_cost_model(self.as_ptr()))
    }

    /// Until the scope ends, operators on this mesh's tensors that would communicate by themselves
    /// fail with [`FailedPrecondition`](crate::Code::FailedPrecondition), naming operator and
    /// tensors.
    pub fn forbid_communication(&self) -> Result<Scope> {
        create!(swv_mesh_forbid_communication(self.as_ptr())).map(Scope)
    }

    /// Until the scope ends, traces and errors say that `name` ("blocks.0.attn") runs. The
    /// innermost scope counts.
    pub fn module_scope(&self, name: &str) -> Result<Scope> {
        let name = c_text(name, "name").of("Mesh::module_scope")?;
        create!(swv_mesh_enter_module(self.as_ptr(), name.as_ptr())).map(Scope)
    }

    /// What operators on this mesh's tensors did so far.
    pub fn dispatch_counters(&self) -> Result<DispatchCounters> {
        let mut raw = sys::SWV_DISPATCH_COUNTERS_INIT;
        call!(swv_mesh_dispatch_counters(self.as_ptr(), &mut raw))?;
        Ok(DispatchCounters {
            operators: raw.operators,
            cache_misses: raw.cache_misses,
            implicit_redistributions: raw.implicit_redistributions,
            gathered_operators: raw.gathered_operators,
            remembered_uses: raw.remembered_uses,
            remembered_bytes: raw.remembered_bytes,
            unsharded_weights: raw.unsharded_weights,
        })
    }

    /// What fully sharded modules on this mesh did so far.
    pub fn fully_shard_counters(&self) -> Result<FullyShardCounters> {
        let mut raw = sys::SWV_FULLY_SHARD_COUNTERS_INIT;
        call!(swv_mesh_fully_shard_counters(self.as_ptr(), &mut raw))?;
        Ok(FullyShardCounters {
            gathers: raw.gathers,
            prefetches: raw.prefetches,
            wrong_prefetches: raw.wrong_prefetches,
            reduce_scatters: raw.reduce_scatters,
            gathered_bytes: raw.gathered_bytes,
            peak_gathered_bytes: raw.peak_gathered_bytes,
        })
    }

    /// Empties what is whole of fully sharded modules on this mesh: what evaluation used last stays
    /// so until another unit is touched. Sends nothing, but waits for what is under way.
    pub fn reshard(&self) -> Result<()> {
        call!(swv_mesh_reshard(self.as_ptr()))
    }

    /// While it lives, backward leaves the gradients of fully sharded parameters as they are: sums
    /// that are still to be reduced, whole on each rank, which take memory as in a model that is not
    /// sharded. The next backward that runs without one sends them with its own, one reduce-scatter
    /// for a unit; [`Module::finish_grad_sync`](crate::Module::finish_grad_sync) sends what is left,
    /// and [`Optimizer::step`](crate::Optimizer::step) refuses it. A parameter
    /// that had its gradient before has it reduced in each backward, as without; so has what rests on
    /// the CPU (`compute_device`). All ranks have it around the same backwards, and zero gradients
    /// alike. Fails where nothing on the mesh is fully sharded.
    ///
    /// ```
    /// use shardweave::nn::{self, Layer};
    /// use shardweave::{FullyShardOptions, Module, Placement::*, Tensor, World};
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("dp", 2)])?;
    ///     let net = nn::Linear::new(3, 2)?;
    ///     net.fully_shard(&mesh, &FullyShardOptions::new())?;
    ///     let backward = || -> shardweave::Result<()> {
    ///         let x = Tensor::ones(&[4, 3])?.distribute(&mesh, [("dp", Shard(0))])?;
    ///         net.forward(&x)?.sum()?.backward()
    ///     };
    ///     for _ in 0..3 {
    ///         let _held = mesh.fully_shard_no_sync()?; // nothing is sent
    ///         backward()?;
    ///     }
    ///     backward()?; // the sum of all four
    ///     assert_eq!(mesh.fully_shard_counters()?.reduce_scatters, 1);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn fully_shard_no_sync(&self) -> Result<NoSync<'_>> {
        let scope = create!(swv_mesh_fully_shard_no_sync(self.as_ptr()))?;
        Ok(NoSync::until_the_end_of(Scope::from_handle(scope)))
    }

    /// Records what tensors of this mesh send from now on.
    ///
    /// ```
    /// use shardweave::{Placement::*, Tensor, World};
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("x", 2)])?;
    ///     let x = Tensor::ones(&[4])?.distribute(&mesh, [("x", Shard(0))])?;
    ///     let trace = mesh.trace()?;
    ///     x.full_tensor()?; // this line
    ///     let here = format!("{}:{}", file!(), line!() - 1);
    ///     assert!(trace.to_json()?.contains(&here));
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn trace(&self) -> Result<Trace> {
        let handle = create!(swv_trace_create(self.as_ptr())).map(TraceHandle)?;
        Ok(Trace { handle, _traced: Traced::new(self) })
    }

    /// Until the scope ends, traces that live now say that what runs was called there.
    pub(crate) fn enter_source(&self, source: &CStr) -> Result<Scope> {
        create!(swv_mesh_enter_source(self.as_ptr(), source.as_ptr())).map(Scope)
    }
}

/// A second handle to the same mesh.
impl Clone for Mesh {
    fn clone(&self) -> Mesh {
        Mesh(create!(swv_mesh_share(self.as_ptr())).expect("a live handle can be shared"))
    }
}

/// "DeviceMesh(dp=2, tp=2)".
impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&text!(swv_mesh_to_string(self.as_ptr())).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Trace {
    /// How many collectives there were.
    pub fn num_events(&self) -> Result<usize> {
        get!(swv_trace_num_events(self.handle.as_ptr()) -> usize)
    }

    /// That a rank sends, as planned.
    pub fn bytes(&self) -> Result<i64> {
        get!(swv_trace_bytes(self.handle.as_ptr()) -> i64)
    }

    /// Forgets what was recorded.
    pub fn clear(&self) -> Result<()> {
        call!(swv_trace_clear(self.handle.as_ptr()))
    }

    /// As JSON: what `swv_trace_to_json` in the C header shows. `"source"` is where a function was
    /// called that communicates by its name, "src/model.rs:53": [`Tensor::redistribute`](crate::Tensor::redistribute), also in
    /// backward ([`Tensor::backward`](crate::Tensor::backward)), [`Module::distribute`](crate::Module::distribute), ... What
    /// tells where an operator was is `"module"`, of the innermost [`Mesh::module_scope`] or
    /// [`Forward`](crate::Forward), and `"parameters"`.
    pub fn to_json(&self) -> Result<String> {
        text!(swv_trace_to_json(self.handle.as_ptr()))
    }
}

/// A table.
impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&text!(swv_trace_to_string(self.handle.as_ptr())).map_err(|_| fmt::Error)?)
    }
}

struct Names {
    raw: Vec<*const std::os::raw::c_char>,
    _texts: Vec<CString>,
}

impl Names {
    fn new(names: &[&str], what: &str) -> Result<Names> {
        let texts = names.iter().map(|name| c_text(name, what)).collect::<Result<Vec<_>>>()?;
        Ok(Names { raw: texts.iter().map(|text| text.as_ptr()).collect(), _texts: texts })
    }
}

debug_by_name!(Scope, Trace);
