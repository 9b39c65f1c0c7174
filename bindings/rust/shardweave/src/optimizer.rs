//! Optimizers. Steps work on each rank's parts; the state is sharded as its parameter is. Call
//! [`Module::finish_grad_sync`](crate::Module::finish_grad_sync) before. Steps of [`AdamW`],
//! [`Adam`], [`Lion`] and [`Sgd`] communicate nothing, unless [`Optimizer::use_zero`] divides state
//! and work among ranks.

use shardweave_sys as sys;

use crate::dtype::{number_of, DType};
use crate::error::{Of, Result};
use crate::ffi::c_text;
use crate::grad_sync::NoSync;
use crate::mesh::Scope;
use crate::module::Module;
use crate::tensor::Tensor;

handle! {
    /// Changes parameters by their gradients. Made by [`AdamW`], [`Adam`], [`Adafactor`],
    /// [`Lion`], [`Muon`] or [`Sgd`].
    ///
    /// ```
    /// use shardweave::{AdamW, TensorOptions};
    /// let x = TensorOptions::new().requires_grad(true).full(&[3], 1.0)?;
    /// let optimizer = AdamW::new(0.1).weight_decay(0.0).build_for(&[&x])?;
    /// (&x * &x)?.sum()?.backward()?;
    /// optimizer.step()?;
    /// optimizer.zero_grad()?;
    /// assert!((x.detach()?.to_vec::<f32>()?[0] - 0.9).abs() < 1e-6);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    ///
    /// Belongs to its rank: neither `Send` nor `Sync`, as the parameters that it changes.
    Optimizer, swv_optimizer, swv_optimizer_free
}

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
#[derive(Clone, Copy, Debug)]
pub struct AdamW(sys::swv_adamw_options);

/// Adam (Kingma and Ba, 2015).
#[derive(Clone, Copy, Debug)]
pub struct Adam(sys::swv_adam_options);

/// Steps by the sign alone (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023).
#[derive(Clone, Copy, Debug)]
pub struct Lion(sys::swv_lion_options);

/// Keeps the squares of gradients as the means of rows and of columns (Shazeer and Stern, 2018), with
/// PyTorch's numbers. A step is collective over the meshes of parameters that are cut.
#[derive(Clone, Copy, Debug)]
pub struct Adafactor(sys::swv_adafactor_options);

/// Momentum of matrices that is made orthogonal (Jordan et al., 2024), with PyTorch's numbers. For
/// parameters of two dimensions alone; [`Optimizer::of_groups`] puts one for the others beside it. A
/// step is collective over the meshes of parameters that are cut.
#[derive(Clone, Copy, Debug)]
pub struct Muon(sys::swv_muon_options);

/// Stochastic gradient descent.
#[derive(Clone, Copy, Debug)]
pub struct Sgd(sys::swv_sgd_options);

impl AdamW {
    /// Betas 0.9 and 0.999, epsilon 1e-8, weight decay 0.01.
    pub fn new(learning_rate: f64) -> AdamW {
        AdamW(sys::swv_adamw_options { lr: learning_rate, ..sys::SWV_ADAMW_OPTIONS_INIT })
    }

    /// How slowly the means of gradients and of their squares move.
    pub fn betas(mut self, beta1: f64, beta2: f64) -> AdamW {
        (self.0.beta1, self.0.beta2) = (beta1, beta2);
        self
    }

    /// Added to what is divided by.
    pub fn eps(mut self, eps: f64) -> AdamW {
        self.0.eps = eps;
        self
    }

    /// How much of itself a parameter loses, times the learning rate.
    pub fn weight_decay(mut self, weight_decay: f64) -> AdamW {
        self.0.weight_decay = weight_decay;
        self
    }

    /// Divides by the largest mean of squares so far (Reddi et al., 2018).
    pub fn amsgrad(mut self, amsgrad: bool) -> AdamW {
        self.0.amsgrad = amsgrad.into();
        self
    }
}

impl Adam {
    /// Betas 0.9 and 0.999, epsilon 1e-8, no weight decay.
    pub fn new(learning_rate: f64) -> Adam {
        Adam(sys::swv_adam_options { lr: learning_rate, ..sys::SWV_ADAM_OPTIONS_INIT })
    }

    /// How slowly the means of gradients and of their squares move.
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Adam {
        (self.0.beta1, self.0.beta2) = (beta1, beta2);
        self
    }

    /// Added to what is divided by.
    pub fn eps(mut self, eps: f64) -> Adam {
        self.0.eps = eps;
        self
    }

    /// Added to the gradient, times the parameter.
    pub fn weight_decay(mut self, weight_decay: f64) -> Adam {
        self.0.weight_decay = weight_decay;
        self
    }

    /// Divides by the largest mean of squares so far (Reddi et al., 2018).
    pub fn amsgrad(mut self, amsgrad: bool) -> Adam {
        self.0.amsgrad = amsgrad.into();
        self
    }
}

impl Lion {
    /// Betas 0.9 and 0.99, no weight decay.
    pub fn new(learning_rate: f64) -> Lion {
        Lion(sys::swv_lion_options { lr: learning_rate, ..sys::SWV_LION_OPTIONS_INIT })
    }

    /// How slowly the direction of a step and the mean of gradients move.
    pub fn betas(mut self, beta1: f64, beta2: f64) -> Lion {
        (self.0.beta1, self.0.beta2) = (beta1, beta2);
        self
    }

    /// How much of itself a parameter loses, times the learning rate.
    pub fn weight_decay(mut self, weight_decay: f64) -> Lion {
        self.0.weight_decay = weight_decay;
        self
    }
}

impl Adafactor {
    /// Beta2's decay -0.8, the type's epsilon and 1e-3, updates with a root mean square of at most 1,
    /// no weight decay.
    pub fn new(learning_rate: f64) -> Adafactor {
        Adafactor(sys::swv_adafactor_options {
            lr: learning_rate,
            ..sys::SWV_ADAFACTOR_OPTIONS_INIT
        })
    }

    /// Means forget 1 - t ^ decay of themselves in step t; below 0.
    pub fn beta2_decay(mut self, decay: f64) -> Adafactor {
        self.0.beta2_decay = decay;
        self
    }

    /// The smallest root of a mean square (0: the element type's epsilon), and the smallest root mean
    /// square of a parameter, by which steps are scaled.
    pub fn eps(mut self, eps1: f64, eps2: f64) -> Adafactor {
        (self.0.eps1, self.0.eps2) = (eps1, eps2);
        self
    }

    /// The largest root mean square of an update before it is scaled.
    pub fn clip_threshold(mut self, threshold: f64) -> Adafactor {
        self.0.clip_threshold = threshold;
        self
    }

    /// How much of itself a parameter loses, times the learning rate.
    pub fn weight_decay(mut self, weight_decay: f64) -> Adafactor {
        self.0.weight_decay = weight_decay;
        self
    }
}

impl Muon {
    /// Momentum 0.95 with Nesterov's, weight decay 0.1, five steps of the iteration in `Bf16`.
    pub fn new(learning_rate: f64) -> Muon {
        Muon(sys::swv_muon_options { lr: learning_rate, ..sys::SWV_MUON_OPTIONS_INIT })
    }

    /// How much of itself the momentum keeps.
    pub fn momentum(mut self, momentum: f64) -> Muon {
        self.0.momentum = momentum;
        self
    }

    /// Nesterov's momentum.
    pub fn nesterov(mut self, nesterov: bool) -> Muon {
        self.0.nesterov = nesterov.into();
        self
    }

    /// How much of itself a parameter loses, times the learning rate.
    pub fn weight_decay(mut self, weight_decay: f64) -> Muon {
        self.0.weight_decay = weight_decay;
        self
    }

    /// Of the Newton-Schulz iteration X <- a X + (b A + c A A) X, where A = X X^T: how many steps, and
    /// a, b, c.
    pub fn iteration(mut self, steps: i32, [a, b, c]: [f64; 3]) -> Muon {
        (self.0.ns_steps, self.0.ns_a, self.0.ns_b, self.0.ns_c) = (steps, a, b, c);
        self
    }

    /// In which the iteration computes, and matrices travel: `Bf16`, `F32` or `F64`.
    pub fn dtype(mut self, dtype: DType) -> Muon {
        self.0.ns_dtype = number_of(Some(dtype));
        self
    }

    /// The smallest norm that a matrix is divided by.
    pub fn eps(mut self, eps: f64) -> Muon {
        self.0.eps = eps;
        self
    }

    /// Multiplies the learning rate by 0.2 sqrt(max(rows, columns)), so that one of AdamW's fits, in
    /// place of sqrt(max(1, rows / columns)).
    pub fn match_rms_adamw(mut self) -> Muon {
        self.0.lr_scale = sys::SWV_MUON_MATCH_RMS_ADAMW;
        self
    }
}

impl Sgd {
    /// Without momentum and weight decay.
    pub fn new(learning_rate: f64) -> Sgd {
        Sgd(sys::swv_sgd_options { lr: learning_rate, ..sys::SWV_SGD_OPTIONS_INIT })
    }

    /// How much of the last step goes into the next.
    pub fn momentum(mut self, momentum: f64) -> Sgd {
        self.0.momentum = momentum;
        self
    }

    /// How much less of a gradient goes into the momentum.
    pub fn dampening(mut self, dampening: f64) -> Sgd {
        self.0.dampening = dampening;
        self
    }

    /// Added to the gradient, times the parameter.
    pub fn weight_decay(mut self, weight_decay: f64) -> Sgd {
        self.0.weight_decay = weight_decay;
        self
    }

    /// Nesterov's momentum.
    pub fn nesterov(mut self, nesterov: bool) -> Sgd {
        self.0.nesterov = nesterov.into();
        self
    }
}

/// What all kinds of options have: how an optimizer is made of them, and when two are the same.
macro_rules! builds {
    ($options:ident, $create:ident, $($field:ident)*) => {
        impl $options {
            /// For all parameters of a module. They may be distributed until the first step.
            pub fn build(&self, module: &(impl Module + ?Sized)) -> Result<Optimizer> {
                let parameters = module.parameters();
                self.build_for(&parameters.iter().map(|(_, tensor)| tensor).collect::<Vec<_>>())
                    .of(concat!(stringify!($options), "::build"))
            }

            /// For all parameters of a module, each with options of its own: `options` makes them
            /// from the name, the parameter and these ones. Parameters with the same options are
            /// one group.
            ///
            /// ```
            /// use shardweave::{nn, AdamW};
            /// let layer = nn::Linear::new(3, 2)?;
            /// let adamw = AdamW::new(1e-3).weight_decay(0.1);
            /// let optimizer = adamw.build_groups(&layer, |name, _, base| {
            ///     Ok(if name.ends_with("bias") { base.weight_decay(0.0) } else { base })
            /// })?;
            /// assert_eq!(optimizer.groups().len(), 2);
            /// # Ok::<(), shardweave::Error>(())
            /// ```
            pub fn build_groups(
                &self,
                module: &(impl Module + ?Sized),
                mut options: impl FnMut(&str, &Tensor, $options) -> Result<$options>,
            ) -> Result<OptimizerGroups> {
                let name = concat!(stringify!($options), "::build_groups");
                let parameters = module.parameters();
                let groups = group(&parameters, |name, tensor| options(name, tensor, *self));
                let build = |(its, tensors): &($options, Vec<&Tensor>)| {
                    Ok((its.build_for(tensors)?, times(its.0.lr, self.0.lr)))
                };
                let groups = groups.of(name)?;
                groups.iter().map(build).collect::<Result<_>>().map(OptimizerGroups).of(name)
            }

            /// For some parameters.
            pub fn build_for(&self, parameters: &[&Tensor]) -> Result<Optimizer> {
                let handles = handles(parameters);
                create!($create(handles.as_ptr(), handles.len(), &self.0))
                    .map(Optimizer)
                    .of(concat!(stringify!($options), "::build_for"))
            }
        }

        impl PartialEq for $options {
            fn eq(&self, other: &$options) -> bool {
                true $(&& self.0.$field == other.0.$field)*
            }
        }
    };
}

builds! { AdamW, swv_optimizer_create_adamw, lr beta1 beta2 eps weight_decay amsgrad }
builds! { Adam, swv_optimizer_create_adam, lr beta1 beta2 eps weight_decay amsgrad }
builds! { Lion, swv_optimizer_create_lion, lr beta1 beta2 weight_decay }
builds! {
    Adafactor, swv_optimizer_create_adafactor,
    lr beta2_decay eps1 eps2 clip_threshold weight_decay
}
builds! {
    Muon, swv_optimizer_create_muon,
    lr weight_decay momentum ns_a ns_b ns_c eps ns_steps ns_dtype lr_scale nesterov
}
builds! { Sgd, swv_optimizer_create_sgd, lr momentum dampening weight_decay nesterov }

/// How [`Optimizer::use_zero`] divides.
#[derive(Clone, Debug)]
pub struct ZeroOptions {
    mesh_dim: Option<String>,
    stage: i32,
    bucket_bytes: i64,
}

impl Default for ZeroOptions {
    fn default() -> ZeroOptions {
        let raw = sys::SWV_ZERO_OPTIONS_INIT;
        ZeroOptions { mesh_dim: None, stage: raw.stage, bucket_bytes: raw.bucket_bytes }
    }
}

impl ZeroOptions {
    /// Along the mesh's first dimension, stage 1, buckets of 25 MiB.
    pub fn new() -> ZeroOptions {
        ZeroOptions::default()
    }

    /// The mesh dimension along which the optimizer is divided.
    pub fn mesh_dim(mut self, name: impl Into<String>) -> ZeroOptions {
        self.mesh_dim = Some(name.into());
        self
    }

    /// 1: gradients are whole until [`Module::finish_grad_sync`](crate::Module::finish_grad_sync). 2:
    /// they leave in backward, in buckets, and only a rank's part of them stays.
    pub fn stage(mut self, stage: i32) -> ZeroOptions {
        self.stage = stage;
        self
    }

    /// Of parameters that travel together, 1 or more; a larger one travels alone.
    pub fn bucket_bytes(mut self, bytes: i64) -> ZeroOptions {
        self.bucket_bytes = bytes;
        self
    }
}

/// How many times the base a group's learning rate is.
fn times(learning_rate: f64, base: f64) -> f64 {
    if learning_rate == base {
        1.0 // of 0 too
    } else {
        learning_rate / base
    }
}

/// Parameters with equal options together, in the order of the first of each.
fn group<O: PartialEq>(
    parameters: &[(String, Tensor)],
    mut options: impl FnMut(&str, &Tensor) -> Result<O>,
) -> Result<Vec<(O, Vec<&Tensor>)>> {
    let mut groups: Vec<(O, Vec<&Tensor>)> = Vec::new();
    for (name, tensor) in parameters {
        let wanted = options(name, tensor).map_err(|error| error.context(format!("'{name}'")))?;
        match groups.iter_mut().find(|(options, _)| *options == wanted) {
            Some((_, tensors)) => tensors.push(tensor),
            None => groups.push((wanted, vec![tensor])),
        }
    }
    Ok(groups)
}

/// Optimizers of the groups of a module's parameters, driven as one. Made by
/// [`AdamW::build_groups`] and those of the others; belongs to its rank, as they do.
#[derive(Debug)]
pub struct OptimizerGroups(Vec<(Optimizer, f64)>);

impl OptimizerGroups {
    /// Changes the parameters of all groups. Those without a gradient stay as they are.
    pub fn step(&self) -> Result<()> {
        self.each("OptimizerGroups::step", |optimizer, _| optimizer.step())
    }

    /// Forgets all gradients.
    pub fn zero_grad(&self) -> Result<()> {
        self.each("OptimizerGroups::zero_grad", |optimizer, _| optimizer.zero_grad())
    }

    /// Each group's [`Optimizer::use_zero`], one after the other: behind one that is refused the
    /// others are as they were.
    pub fn use_zero(&self, options: &ZeroOptions) -> Result<()> {
        self.each("OptimizerGroups::use_zero", |optimizer, _| optimizer.use_zero(options))
    }

    /// From the next step on: of a group whose options had k times the learning rate that they were
    /// made from, k times this one.
    pub fn set_learning_rate(&self, learning_rate: f64) -> Result<()> {
        self.each("OptimizerGroups::set_learning_rate", |optimizer, times| {
            optimizer.set_learning_rate(times * learning_rate)
        })
    }

    /// The groups' own, in the order of their first parameters.
    pub fn groups(&self) -> Vec<&Optimizer> {
        self.0.iter().map(|(optimizer, _)| optimizer).collect()
    }

    fn each(&self, name: &str, of: impl Fn(&Optimizer, f64) -> Result<()>) -> Result<()> {
        self.0.iter().try_for_each(|(optimizer, times)| of(optimizer, *times)).of(name)
    }
}

fn handles(tensors: &[&Tensor]) -> Vec<*mut sys::swv_tensor> {
    tensors.iter().map(|tensor| tensor.as_ptr()).collect()
}

impl Optimizer {
    /// One of several: each becomes a group, with its options and its learning rate, and parameters
    /// are numbered group by group. The given ones are only read, and have made no steps. A parameter
    /// is in one group.
    ///
    /// ```
    /// use shardweave::{AdamW, Muon, Optimizer, TensorOptions};
    /// let parameter = TensorOptions::new().requires_grad(true);
    /// let (weight, bias) = (parameter.ones(&[3, 2])?, parameter.ones(&[3])?);
    /// let muon = Muon::new(0.02).build_for(&[&weight])?;
    /// let adamw = AdamW::new(3e-4).build_for(&[&bias])?;
    /// let optimizer = Optimizer::of_groups(&[&muon, &adamw])?;
    /// optimizer.set_group_learning_rate(1, 1e-4)?;
    /// assert_eq!(optimizer.group_learning_rate(0)?, 0.02);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn of_groups(groups: &[&Optimizer]) -> Result<Optimizer> {
        let handle = |group: &&Optimizer| -> *const sys::swv_optimizer { group.as_ptr() };
        let handles: Vec<_> = groups.iter().map(handle).collect();
        create!(swv_optimizer_create_groups(handles.as_ptr(), handles.len())).map(Optimizer)
    }

    /// 1, but for one made by [`Optimizer::of_groups`].
    pub fn num_groups(&self) -> Result<usize> {
        get!(swv_optimizer_num_groups(self.as_ptr()) -> usize)
    }

    /// How far a step of this group goes.
    pub fn group_learning_rate(&self, group: usize) -> Result<f64> {
        get!(swv_optimizer_group_lr(self.as_ptr(), group) -> f64)
    }

    /// From the next step on.
    pub fn set_group_learning_rate(&self, group: usize, learning_rate: f64) -> Result<()> {
        call!(swv_optimizer_set_group_lr(self.as_ptr(), group, learning_rate))
    }

    /// ZeRO (Rajbhandari et al., 2020): from now on, along one mesh dimension, the state and its work
    /// are divided among ranks, while parameters are whole on each, as in data parallelism. Before
    /// the first step or look at the state; parameters get other memory. All ranks do it alike, and
    /// step together: collective.
    ///
    /// ```
    /// use shardweave::nn::{self, Layer};
    /// use shardweave::{AdamW, Module, ParameterPlan, Placement::*, Source, Tensor, World, ZeroOptions};
    ///
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("dp", 2)])?;
    ///     let layer = nn::Linear::new(3, 5)?;
    ///     layer.distribute(&mesh, &ParameterPlan::new(), Source::default())?;
    ///     let optimizer = AdamW::new(1e-3).build(&layer)?;
    ///     optimizer.use_zero(&ZeroOptions::new().mesh_dim("dp").stage(2))?;
    ///     let x = Tensor::ones(&[4, 3])?.distribute(&mesh, [("dp", Shard(0))])?;
    ///     layer.forward(&x)?.sum()?.backward()?;
    ///     layer.finish_grad_sync()?; // a rank has its part of each gradient
    ///     optimizer.step()?; // steps its part, and gets the others'
    ///     let state = optimizer.state(0, "exp_avg")?.unwrap();
    ///     assert!(state.to_local()?.numel()? < 15);
    ///     assert_eq!(state.full_tensor()?.sizes()?, [5, 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn use_zero(&self, options: &ZeroOptions) -> Result<()> {
        let name = options.mesh_dim.as_deref().map(|name| c_text(name, "mesh_dim"));
        let name = name.transpose().of("Optimizer::use_zero")?;
        let raw = sys::swv_zero_options {
            mesh_dim: name.as_ref().map_or(std::ptr::null(), |name| name.as_ptr()),
            stage: options.stage,
            bucket_bytes: options.bucket_bytes,
            ..sys::SWV_ZERO_OPTIONS_INIT
        };
        call!(swv_optimizer_use_zero(self.as_ptr(), &raw))
    }

    /// While it lives, backward sends nothing in stage 2 of [`use_zero`](Optimizer::use_zero) either:
    /// gradients of several are summed up first. Without it an error.
    pub fn no_sync(&self) -> Result<NoSync<'_>> {
        let scope = create!(swv_optimizer_no_sync(self.as_ptr()))?;
        Ok(NoSync::until_the_end_of(Scope::from_handle(scope)))
    }

    /// After a backward in stage 2 of [`use_zero`](Optimizer::use_zero) that failed on this rank, at
    /// once, for others may wait in theirs for buckets that this rank owes them; and, when the ranks
    /// have agreed that it failed, on a communicator that is not the mesh's
    /// ([`World::comm`](crate::World::comm)), on the others in place of `finish_grad_sync`. What has
    /// left comes to nothing, and the next iteration is one as any. Gradients stay as they are, for
    /// the caller to zero. One that calls `finish_grad_sync` instead gets NaN, or waits for what nobody
    /// sends. With several optimizers that use ZeRO in one backward the mesh is lost.
    pub fn discard(&self) -> Result<()> {
        call!(swv_optimizer_discard(self.as_ptr()))
    }

    /// Changes the parameters. Those without a gradient stay as they are.
    pub fn step(&self) -> Result<()> {
        call!(swv_optimizer_step(self.as_ptr()))
    }

    /// Forgets all gradients.
    pub fn zero_grad(&self) -> Result<()> {
        call!(swv_optimizer_zero_grad(self.as_ptr()))
    }

    /// How far a step goes; of the first group.
    pub fn learning_rate(&self) -> Result<f64> {
        get!(swv_optimizer_lr(self.as_ptr()) -> f64)
    }

    /// From the next step on, of all groups.
    pub fn set_learning_rate(&self, learning_rate: f64) -> Result<()> {
        call!(swv_optimizer_set_lr(self.as_ptr(), learning_rate))
    }

    /// The state of a parameter, laid out as it is, zeros before the first step: "step" (one plain
    /// `f32` number); of [`AdamW`] and [`Adam`] "exp_avg", "exp_avg_sq" and, with `amsgrad`,
    /// "max_exp_avg_sq"; of [`Lion`] "exp_avg"; of [`Sgd`] with a momentum and of [`Muon`]
    /// "momentum_buffer"; of [`Adafactor`] "variance" or, from two dimensions on, "row_var" and
    /// "col_var", which are whole where a mean was taken. With
    /// [`use_zero`](Optimizer::use_zero) it is laid out as the rank's part is, in rows that are cut
    /// unevenly, and [`Tensor::full_tensor`] makes it whole. None for what these options do not use.
    /// Writing to it writes the state.
    pub fn state(&self, parameter: usize, name: &str) -> Result<Option<Tensor>> {
        let name = c_text(name, "state").of("Optimizer::state")?;
        let state = create_or_none!(swv_optimizer_state(self.as_ptr(), parameter, name.as_ptr()))?;
        Ok(state.map(Tensor::from_handle))
    }

    /// Copies a tensor over the state of a parameter, to resume from what was saved: of any
    /// floating-point type and the parameter's shape; sharded over the same mesh if that is, else
    /// plain ("step" always). Collective if a sharded one lies otherwise than the parameter.
    ///
    /// The first step of [`Sgd`] takes the gradient for its momentum: it is the first as long as
    /// "step" is 0, unless "momentum_buffer" was set and "step" never.
    ///
    /// ```
    /// use shardweave::{AdamW, Tensor, TensorOptions};
    /// let x = TensorOptions::new().requires_grad(true).ones(&[3])?;
    /// let optimizer = AdamW::new(0.1).build_for(&[&x])?;
    /// optimizer.set_state(0, "step", &Tensor::full(&[], 7.0)?)?;
    /// optimizer.set_state(0, "exp_avg", &Tensor::full(&[3], 0.5)?)?;
    /// let average = optimizer.state(0, "exp_avg")?.unwrap();
    /// assert_eq!(average.to_vec::<f32>()?, [0.5; 3]);
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn set_state(&self, parameter: usize, name: &str, tensor: &Tensor) -> Result<()> {
        let name = c_text(name, "state").of("Optimizer::set_state")?;
        let tensor = tensor.as_const_ptr();
        call!(swv_optimizer_set_state(self.as_ptr(), parameter, name.as_ptr(), tensor))
    }
}

debug_by_name!(Optimizer);
