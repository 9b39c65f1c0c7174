//! Models, and what is done to their parameters.

use std::path::Path;

use shardweave_sys as sys;

use crate::autograd::no_grad;
use crate::data_parallel::{self, DataParallelOptions, GradientHook};
use crate::debug::Report;
use crate::error::{Error, Of, Result};
use crate::fully_shard::{self, FullParams, FullParamsOptions, FullyShardOptions};
use crate::grad_sync::GradSync;
use crate::members::{distinct, members_of, set_training, Members};
use crate::mesh::Mesh;
use crate::module_handle::trained_handle_of;
use crate::plan::{ParameterPlan, Sharding};
use crate::pretrained::{self, LoadPretrained, LoadedPretrained, SavePretrained};
use crate::source::called_here;
use crate::tensor::{Source, Tensor};

/// A model, or a part of one: parameters and buffers by name. Its forward is a function of its own.
///
/// `#[derive(Module)]` (the feature `derive`, on by default) names them by the fields of a struct:
///
/// ```
/// use shardweave::{Module, ParameterPlan, Placement::*, Result, Source, Tensor, World};
///
/// #[derive(Module)]
/// struct Mlp {
///     up: Tensor,
///     down: Tensor,
/// }
///
/// impl Mlp {
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         x.linear(&self.up, None)?.relu()?.linear(&self.down, None)
///     }
/// }
///
/// World::threads(2).run(|world| {
///     let mlp = Mlp { up: Tensor::ones(&[8, 3])?, down: Tensor::ones(&[2, 8])? };
///     let mesh = world.device_mesh(&[("tp", 2)])?;
///     let plan =
///         ParameterPlan::new().line("up", &[("tp", Shard(0))]).line("down", &[("tp", Shard(1))]);
///     mlp.distribute(&mesh, &plan, Source::Same)?; // in place: self.up lies on the mesh now
///     let x = Tensor::ones(&[5, 3])?.distribute(&mesh, [("tp", Replicate)])?;
///     mlp.forward(&x)?.sum()?.backward()?;
///     mlp.finish_grad_sync()?;
///     assert_eq!(mlp.up.grad()?.unwrap().to_local()?.sizes()?, [4, 3]);
///     Ok(())
/// })?;
/// # Ok::<(), shardweave::Error>(())
/// ```
///
/// Modules of the library's own are in [`nn`](crate::nn). Without the derive macro:
///
/// ```
/// use shardweave::{nn, Members, Module, Tensor};
///
/// struct Model {
///     scale: Tensor,
///     layers: Vec<nn::Linear>,
/// }
///
/// impl Module for Model {
///     fn members(&self, members: &mut Members) {
///         members.parameter("scale", &self.scale);
///         members.child("layers", &self.layers);
///     }
/// }
///
/// let layers = vec![nn::Linear::without_bias(3, 2)?, nn::Linear::without_bias(2, 2)?];
/// let model = Model { scale: Tensor::ones(&[1])?, layers };
/// let names: Vec<String> = model.parameters().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["scale", "layers.0.weight", "layers.1.weight"]);
/// # Ok::<(), shardweave::Error>(())
/// ```
pub trait Module {
    /// Names the parameters, the buffers, and the modules inside.
    fn members(&self, members: &mut Members);

    /// How it shards, for plans that name it ([`ParameterPlan::module`](crate::ParameterPlan::module)):
    /// the same on every rank. `None`, unless a module says otherwise
    /// (`#[module(sharding = Self::rows)]` with the derive macro).
    fn sharding(&self) -> Option<Sharding> {
        None
    }

    /// Draws the parameters that are this module's own anew, not those of modules inside, and sets
    /// their buffers: what [`initialize`](Module::initialize) calls. Nothing, unless a module says
    /// otherwise (`#[module(reset = Self::draw)]` with the derive macro).
    fn reset_parameters(&self) -> Result<()> {
        Ok(())
    }

    /// Draws all parameters anew, by [`reset_parameters`](Module::reset_parameters) of each module,
    /// those inside first. On a mesh every element is drawn by its global index: after
    /// [`Mesh::seed`](crate::Mesh::seed) the same numbers for every plan and number of ranks, and
    /// each rank draws its own parts alone. Plain ones draw from the process
    /// ([`manual_seed`](crate::manual_seed)), whose one generator rank threads share.
    ///
    /// ```
    /// use shardweave::{nn, Module, ParameterPlan, Placement::*, Source, World};
    /// let sums: Vec<f64> = [1, 2, 3]
    ///     .into_iter()
    ///     .map(|ranks| {
    ///         let sums = World::threads(ranks).run(|world| {
    ///             let mesh = world.device_mesh(&[("tp", ranks as i64)])?;
    ///             let layer = nn::init::skip(|| nn::Linear::new(5, 7))?; // zeros
    ///             let plan = ParameterPlan::new().line("*", &[("tp", Shard(0))]);
    ///             layer.distribute(&mesh, &plan, Source::Same)?;
    ///             mesh.seed(1)?;
    ///             layer.initialize()?;
    ///             layer.weight.detach()?.abs()?.sum()?.item()
    ///         })?;
    ///         Ok(sums[0])
    ///     })
    ///     .collect::<shardweave::Result<_>>()?;
    /// assert!(sums[0] > 0.0 && (sums[1] - sums[0]).abs() < 1e-5 && (sums[2] - sums[0]).abs() < 1e-5);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    fn initialize(&self) -> Result<()> {
        let mut members = Members { reset: Some(Ok(())), ..Members::default() };
        members.visit(&self);
        members.reset.unwrap_or(Ok(())).map_err(|error| error.of("Module::initialize"))
    }

    /// As in training from now on: [`Dropout`](crate::nn::Dropout) drops.
    fn train(&self) {
        set_training(&members_of(self), true);
    }

    /// As it is used after training from now on.
    fn eval(&self) {
        set_training(&members_of(self), false);
    }

    /// Copies over each parameter and each persistent buffer what `get` gives for its name: a tensor
    /// of the same sizes, of any dtype, plain (the whole one, the same on every rank, which each cuts
    /// for itself: ranks compare theirs) or lying on the member's mesh. A tensor with several names is
    /// asked for by the first. What fails is an error that names the member; those before it are loaded
    /// then. Collective for members that lie on a mesh.
    ///
    /// ```
    /// use shardweave::{nn, Error, Code, Module, Tensor};
    /// let layer = nn::Linear::new(2, 2)?;
    /// layer.load(&mut |name| match name {
    ///     "weight" => Tensor::from_slice(&[1.0f64, 2.0, 3.0, 4.0], &[2, 2]),
    ///     "bias" => Tensor::zeros(&[2]),
    ///     _ => Err(Error::new(Code::NotFound, "not in the file")),
    /// })?;
    /// assert_eq!(layer.weight.to_vec::<f32>()?, [1.0, 2.0, 3.0, 4.0]);
    /// let error = layer.load(&mut |_| Tensor::zeros(&[2])).unwrap_err();
    /// let message = "Module::load: 'weight' is [2, 2]; the tensor for it is [2]";
    /// assert_eq!(error.message(), message);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    fn load(&self, get: &mut dyn FnMut(&str) -> Result<Tensor>) -> Result<()> {
        let Members { parameters, mut buffers, non_persistent, .. } = members_of(self);
        buffers.retain(|(name, _)| !non_persistent.contains(name));
        for (name, member) in distinct(parameters).into_iter().chain(distinct(buffers)) {
            let of = |error: Error| error.context(format!("Module::load: '{name}'"));
            let value = get(&name).map_err(of)?;
            let (wanted, given) = (member.sizes()?, value.sizes()?);
            if wanted != given {
                return Err(Error::invalid(format!(
                    "Module::load: '{name}' is {wanted:?}; the tensor for it is {given:?}"
                )));
            }
            load_member(&member, &value).map_err(of)?;
        }
        Ok(())
    }

    /// Values of a model that Hugging Face's transformers has saved, in place, on any mesh under any
    /// plan; each rank reads what it keeps. `path` is a directory of config.json and weights, a file
    /// of weights (safetensors, or what `torch.save` has written), or a directory of PyTorch's
    /// distributed checkpoints. Names are those of the library's models, which are Hugging Face's
    /// nearly everywhere, for [`NativeModule`](crate::NativeModule) and for a program's own modules;
    /// buffers that are not persistent stay as they are. Another floating-point type is converted.
    ///
    /// ```
    /// use shardweave::{read_pretrained_config, LoadPretrained, Module, NativeModule, SavePretrained};
    /// use shardweave::{ParameterPlan, Source, World};
    /// # let folder = std::env::temp_dir().join(format!("shardweave-hf-{}", std::process::id()));
    /// let config = r#"{"model_type": "gpt2", "vocab_size": 9, "n_positions": 4, "n_embd": 4,
    ///                  "n_layer": 1, "n_head": 2}"#;
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("tp", 2)])?;
    ///     let model = NativeModule::new("gpt2", config)?;
    ///     model.distribute(&mesh, &ParameterPlan::new(), Source::default())?;
    ///     model.save_pretrained(&folder, config, &mesh, &SavePretrained::new())?; // collective
    ///     let config = read_pretrained_config(&folder, false)?;
    ///     let again = NativeModule::new("gpt2", &config)?;
    ///     let plan = ParameterPlan::from_zoo("gpt2", &config, &mesh, "")?;
    ///     again.distribute(&mesh, &plan, Source::default())?;
    ///     let loaded = again.load_pretrained(&folder, &mesh, &LoadPretrained::new())?;
    ///     assert!(loaded.json.contains(r#""kind":"gpt2","missing":[]"#));
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    ///
    /// One message has all that is missing, unexpected or of another shape or type. Errors are the
    /// same on all ranks, before anything is changed. Collective.
    #[track_caller]
    fn load_pretrained(
        &self,
        path: &Path,
        mesh: &Mesh,
        options: &LoadPretrained,
    ) -> Result<LoadedPretrained> {
        let _here = called_here();
        pretrained::load(self, path, mesh, options)
    }

    /// Writes a directory, which is not there yet, that transformers loads: `config`, which is the
    /// text of a config.json of this model, and the values in safetensors files under its names. It is
    /// there whole, or not at all. Tensors are gathered one at a time. The configuration of another
    /// model is an error, with all names that differ. Collective.
    #[track_caller]
    fn save_pretrained(
        &self,
        directory: &Path,
        config: &str,
        mesh: &Mesh,
        options: &SavePretrained,
    ) -> Result<()> {
        let _here = called_here();
        pretrained::save(self, directory, config, mesh, options)
    }

    /// The parameters by FQN. A tensor with several names (tied weights) is one parameter, with the
    /// first of them.
    fn parameters(&self) -> Vec<(String, Tensor)> {
        distinct(members_of(self).parameters)
    }

    /// The buffers by FQN, each tensor once.
    fn buffers(&self) -> Vec<(String, Tensor)> {
        distinct(members_of(self).buffers)
    }

    /// Turns every parameter and buffer into a sharded tensor, in place: all handles see it.
    /// Parameters require grad from then on, but those that
    /// [`set_requires_grad(false)`](Tensor::set_requires_grad) has frozen. A line of the plan that matches nothing or that more
    /// specific ones leave nothing to decide, lines that place one tensor differently, and lines
    /// about a forward that cannot be met (see [`Forward`](crate::Forward)) are errors before
    /// anything changes. Collective.
    #[track_caller]
    fn distribute(&self, mesh: &Mesh, plan: &ParameterPlan, source: Source) -> Result<()> {
        let _here = called_here();
        let (module, forwards) = trained_handle_of(self).of("Module::distribute")?;
        let plan = plan.to_handle().of("Module::distribute")?;
        let options = source.to_raw();
        call!(swv_module_distribute(module.as_ptr(), mesh.as_ptr(), plan.as_ptr(), &options))?;
        for (forward, handle) in forwards {
            forward.set(handle);
        }
        Ok(())
    }

    /// Fully shards the parameters that are in no unit yet, in place: each rank keeps a part of them,
    /// of their gradients and of the optimizer's state along one mesh dimension. A unit of them is
    /// whole only while operators use it, in whatever forward; the next one is gathered ahead.
    /// Gradients come to where the parameters rest during backward.
    ///
    /// ```
    /// use shardweave::nn::{self, Layer};
    /// use shardweave::{AdamW, FullyShardOptions, Module, Placement::*, Tensor, World};
    ///
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("dp", 2)])?;
    ///     let model = vec![nn::Linear::new(3, 5)?, nn::Linear::new(5, 3)?];
    ///     let units = model.fully_shard(&mesh, &FullyShardOptions::new().unit("*"))?;
    ///     assert!(units.json.starts_with(r#"[{"module":"0","parameters":["0.weight","0.bias"]"#));
    ///     let optimizer = AdamW::new(1e-2).build(&model)?; // of each rank's parts
    ///     let mut x = Tensor::ones(&[4, 3])?.distribute(&mesh, [("dp", Shard(0))])?;
    ///     for layer in &model {
    ///         x = layer.forward(&x)?;
    ///     }
    ///     x.sum()?.backward()?;
    ///     optimizer.step()?;
    ///     assert!(mesh.fully_shard_counters()?.gathers >= 2);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    ///
    /// Along other mesh dimensions parameters stay as they are:
    /// [`distribute`](Module::distribute) comes first. Numbers (0-dimensional parameters) stay
    /// replicated, and need [`finish_grad_sync`](Module::finish_grad_sync). What
    /// [`set_requires_grad(false)`](Tensor::set_requires_grad) has frozen stays so; other parameters
    /// require grad from then on. Modules that are units within others may be given first, one by
    /// one. The result says what became a unit. A pattern or type that matches no module, a
    /// parameter that is cut along the dimension already, and ranks that differ are errors before
    /// anything changes.
    ///
    /// Of a backward that fails on one rank the others wait for its collectives: that rank returns its
    /// error (or calls [`Comm::abort`](crate::Comm::abort)), and all end at once. Several backwards
    /// before a step: [`Mesh::fully_shard_no_sync`]. Collective.
    #[track_caller]
    fn fully_shard(&self, mesh: &Mesh, options: &FullyShardOptions) -> Result<Report> {
        let _here = called_here();
        fully_shard::shard(self, mesh, options)
    }

    /// Data parallelism: parameters and buffers that are plain become replicated over the mesh, in
    /// place, and gradients leave in buckets while backward goes on, as long as the result lives.
    ///
    /// ```
    /// use shardweave::nn::{self, Layer};
    /// use shardweave::{AdamW, DataParallelOptions, Module, Placement::*, Tensor, World};
    ///
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("dp", 2)])?;
    ///     let model = nn::Linear::new(3, 5)?; // the first rank's values count
    ///     let ddp = model.distributed_data_parallel(&mesh, &DataParallelOptions::new())?;
    ///     let optimizer = AdamW::new(1e-2).build(&model)?;
    ///     for _ in 0..2 {
    ///         let x = Tensor::ones(&[4, 3])?.distribute(&mesh, [("dp", Shard(0))])?;
    ///         model.forward(&x)?.mean()?.backward()?;
    ///         model.finish_grad_sync()?;
    ///         optimizer.step()?;
    ///         optimizer.zero_grad()?;
    ///     }
    ///     assert_eq!(ddp.counts()?.left_in_backward, 1);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    ///
    /// A loss is that of all ranks' input, and nothing is divided by the number of ranks. What tensor
    /// parallelism has cut on the same mesh ([`distribute`](Module::distribute), before this) stays
    /// so, and so does what [`set_requires_grad(false)`](Tensor::set_requires_grad) has frozen. A
    /// parameter that is cut along the dimension, on another mesh, fully sharded, or in another
    /// [`GradSync`], and ranks that differ, are errors on all ranks before anything changes.
    /// Collective.
    #[track_caller]
    fn distributed_data_parallel(
        &self,
        mesh: &Mesh,
        options: &DataParallelOptions,
    ) -> Result<GradSync> {
        let _here = called_here();
        data_parallel::parallel(self, mesh, options)
    }

    /// The same, and the hook reduces buckets: see [`GradSync::with_hook`].
    #[track_caller]
    fn distributed_data_parallel_with_hook<H: GradientHook>(
        &self,
        mesh: &Mesh,
        options: &DataParallelOptions,
        hook: H,
    ) -> Result<GradSync>
    where
        Self: Sized,
    {
        let _here = called_here();
        data_parallel::parallel_with_hook(self, mesh, options, hook)
    }

    /// The half of [`distributed_data_parallel`](Module::distributed_data_parallel) that is not about
    /// gradients, for a [`GradSync`] of one's own. Collective.
    #[track_caller]
    fn pre_dp_transform(&self, mesh: &Mesh, mesh_dim: Option<&str>, source: Source) -> Result<()> {
        let _here = called_here();
        data_parallel::transform(self, mesh, mesh_dim, source)
    }

    /// Every rank gets the buffers of the first one along the dimension (`None`: the mesh's first):
    /// for what a program writes of its own on each rank. Collective.
    #[track_caller]
    fn broadcast_buffers(&self, mesh: &Mesh, mesh_dim: Option<&str>) -> Result<()> {
        let _here = called_here();
        data_parallel::broadcast(self, mesh, mesh_dim)
    }

    /// Between [`distribute`](Module::distribute) and [`fully_shard`](Module::fully_shard): whether the
    /// module is tensor parallel on this mesh and whole along the dimension. The wrong order is an
    /// error on all ranks. Collective.
    #[track_caller]
    fn enable_2d_with_fsdp(&self, mesh: &Mesh, mesh_dim: Option<&str>) -> Result<()> {
        let _here = called_here();
        data_parallel::enable_2d(self, mesh, mesh_dim)
    }

    /// Calls `body` while fully sharded parameters of the module are whole, along the mesh dimension
    /// that cuts them: on every rank, or plain copies of them on [one](FullParamsOptions::rank). With
    /// [`writeback`](FullParamsOptions::writeback) what was written is kept: on every rank each keeps
    /// its part, so all write the same. Without, operators that write parameters fail, and what is
    /// written to the plain tensors of [`FullParams::get`](crate::FullParams::get) is dropped. Where
    /// `body` fails, nothing is kept. Operators on whole parameters that record gradients are errors.
    ///
    /// ```no_run
    /// # use shardweave::{FullParamsOptions, Module};
    /// # fn f(model: &impl Module) -> shardweave::Result<()> {
    /// model.full_params(&FullParamsOptions::new().rank(0), |whole| {
    ///     let weight = whole.get("head.weight")?; // `None` on other ranks
    ///     Ok(())
    /// })
    /// # }
    /// ```
    ///
    /// Collective.
    #[track_caller]
    fn full_params<T>(
        &self,
        options: &FullParamsOptions,
        body: impl FnOnce(&FullParams) -> Result<T>,
    ) -> Result<T>
    where
        Self: Sized,
    {
        fully_shard::full_params(self, options, body)
    }

    /// Brings every gradient into its parameter's layout. Between backward and the optimizer's
    /// step. Collective; nothing to do for plain tensors.
    #[track_caller]
    fn finish_grad_sync(&self) -> Result<()> {
        let members = members_of(self);
        let parameters: Vec<&Tensor> =
            members.parameters.iter().map(|(_, tensor)| tensor).collect();
        finish_grad_sync(&parameters).of("Module::finish_grad_sync")
    }

    /// Multiplies all gradients by a number below 1 if their norm as one vector, wherever they lie,
    /// is above `max_norm` (0 or more), so that it is that; gives the norm before, the same on every
    /// rank.
    /// After [`finish_grad_sync`](Module::finish_grad_sync). Collective.
    #[track_caller]
    fn clip_grad_norm(&self, max_norm: f64) -> Result<f64> {
        let members = members_of(self);
        let parameters: Vec<&Tensor> =
            members.parameters.iter().map(|(_, tensor)| tensor).collect();
        clip_grad_norm(&parameters, max_norm, ClipOptions::default()).of("Module::clip_grad_norm")
    }

    /// Forgets all gradients.
    fn zero_grad(&self) -> Result<()> {
        let members = members_of(self);
        let mut tensors = members.parameters.iter().map(|(_, tensor)| tensor);
        tensors.try_for_each(|tensor| tensor.set_grad(None)).of("Module::zero_grad")
    }
}

/// See [`Module::finish_grad_sync`].
#[track_caller]
pub fn finish_grad_sync(parameters: &[&Tensor]) -> Result<()> {
    let _here = called_here();
    let handles: Vec<_> = parameters.iter().map(|tensor| tensor.as_ptr()).collect();
    call!(swv_finish_grad_sync(handles.as_ptr(), handles.len()))
}

/// Of [`clip_grad_norm`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipOptions {
    /// Which norm: above 0; infinity too.
    pub norm_type: f64,
    /// A norm that is no finite number is [`OutOfRange`](crate::Code::OutOfRange), on every rank.
    pub error_if_nonfinite: bool,
}

impl Default for ClipOptions {
    /// The Euclidean norm.
    fn default() -> ClipOptions {
        ClipOptions { norm_type: sys::SWV_CLIP_OPTIONS_INIT.norm_type, error_if_nonfinite: false }
    }
}

/// See [`Module::clip_grad_norm`].
#[track_caller]
pub fn clip_grad_norm(parameters: &[&Tensor], max_norm: f64, options: ClipOptions) -> Result<f64> {
    let _here = called_here();
    let handles: Vec<_> = parameters.iter().map(|tensor| tensor.as_ptr()).collect();
    let raw = sys::swv_clip_options {
        norm_type: options.norm_type,
        error_if_nonfinite: options.error_if_nonfinite.into(),
        ..sys::SWV_CLIP_OPTIONS_INIT
    };
    get!(swv_clip_grad_norm(handles.as_ptr(), handles.len(), max_norm, &raw) -> f64)
}

/// Copies a tensor over a parameter or a buffer, wherever they lie; a plain one is compared with the
/// other ranks'.
fn load_member(member: &Tensor, value: &Tensor) -> Result<()> {
    no_grad(|| member.copy_(value))
}

/// Modules in a list, by their numbers.
impl<M: Module> Module for [M] {
    fn members(&self, members: &mut Members) {
        for (i, module) in self.iter().enumerate() {
            members.child(&i.to_string(), module);
        }
    }
}

impl<M: Module> Module for Vec<M> {
    fn members(&self, members: &mut Members) {
        self.as_slice().members(members);
    }
}
