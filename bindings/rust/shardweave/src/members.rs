//! The names of what a module has.

use std::cell::Cell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::error::Result;
use crate::field::ModuleField;
use crate::forward::Forward;
use crate::module::Module;
use crate::module_handle::ModuleHandle;
use crate::plan::Sharding;
use crate::tensor::Tensor;

/// The parameters and buffers of a module, under all their names: by fully qualified name (FQN,
/// "blocks.0.attn.q.weight"), in the order in which [`Module::members`] gives them.
#[derive(Debug, Default)]
pub struct Members {
    pub(crate) prefix: String,
    pub(crate) parameters: Vec<(String, Tensor)>,
    pub(crate) buffers: Vec<(String, Tensor)>,
    pub(crate) forwards: Vec<(String, Forward)>,
    /// Names of buffers that no checkpoint has.
    pub(crate) non_persistent: Vec<String>,
    pub(crate) training: Vec<Training>,
    pub(crate) shardings: Vec<(String, Sharding)>,
    /// Modules of the library's, with the names of what they are.
    pub(crate) natives: Vec<(String, Rc<ModuleHandle>)>,
    /// Of files, which have a mode of their own, and what is frozen in them.
    pub(crate) scripts: Vec<Rc<ModuleHandle>>,
    pub(crate) frozen: Vec<String>,
    /// While [`Module::initialize`] goes through.
    pub(crate) reset: Option<Result<()>>,
}

impl Members {
    /// A tensor that training changes: a leaf.
    pub fn parameter(&mut self, name: &str, tensor: &Tensor) {
        self.parameters.push((self.fqn(name), tensor.clone()));
    }

    /// A tensor that training does not change.
    pub fn buffer(&mut self, name: &str, tensor: &Tensor) {
        self.buffers.push((self.fqn(name), tensor.clone()));
    }

    /// A buffer that no checkpoint has: a table that is computed, say.
    pub fn non_persistent_buffer(&mut self, name: &str, tensor: &Tensor) {
        self.buffer(name, tensor);
        self.non_persistent.push(self.fqn(name));
    }

    /// A module of the library's, with its own parameters and buffers by their names in it.
    pub(crate) fn native(
        &mut self,
        module: &Rc<ModuleHandle>,
        parameters: &[(String, Tensor)],
        buffers: &[(String, Tensor)],
        non_persistent: &[&str],
    ) {
        for (name, tensor) in parameters {
            self.parameter(name, tensor);
        }
        for (name, tensor) in buffers {
            self.buffer(name, tensor);
        }
        for name in non_persistent {
            self.non_persistent.push(self.fqn(name));
        }
        self.natives.push((self.prefix.clone(), module.clone()));
    }

    /// What [`Module::train`] and [`Module::eval`] switch.
    pub fn training(&mut self, training: &Training) {
        self.training.push(training.clone());
    }

    /// What the forward of this module, the one that names its members, runs within: plans may
    /// speak of its inputs and outputs.
    pub fn forward(&mut self, forward: &Forward) {
        self.forwards.push((self.prefix.clone(), forward.clone()));
    }

    /// The members of a module inside, under its name.
    pub fn child<M: Module + ?Sized>(&mut self, name: &str, module: &M) {
        let length = self.prefix.len();
        self.prefix = self.fqn(name);
        self.visit(module);
        self.prefix.truncate(length);
    }

    /// Those of a module that this one is: of an enum what its variant wraps.
    #[doc(hidden)]
    pub fn wrapped<M: Module + ?Sized>(&mut self, module: &M) {
        self.visit(module);
    }

    /// Those inside first, so that a module may draw anew what these have drawn.
    pub(crate) fn visit<M: Module + ?Sized>(&mut self, module: &M) {
        module.members(self);
        if let Some(sharding) = module.sharding() {
            self.shardings.push((self.prefix.clone(), sharding));
        }
        if let Some(Ok(())) = self.reset {
            let result = module.reset_parameters();
            self.reset = Some(result.map_err(|error| match self.prefix.as_str() {
                "" => error,
                prefix => error.context(format!("'{prefix}'")),
            }));
        }
    }

    pub(crate) fn fqn(&self, name: &str) -> String {
        match self.prefix.as_str() {
            "" => name.to_owned(),
            prefix => format!("{prefix}.{name}"),
        }
    }
}

/// Whether a module is in training, as it is at first: for those that behave otherwise then, as
/// [`Dropout`](crate::nn::Dropout) does. A field of it in a struct with `#[derive(Module)]` is
/// switched by [`Module::train`] and [`Module::eval`] of that module, or of one around it.
///
/// ```
/// use shardweave::{Module, Training};
///
/// #[derive(Module)]
/// struct Model {
///     training: Training,
/// }
///
/// let model = Model { training: Training::new() };
/// model.eval();
/// assert!(!model.training.get());
/// ```
///
/// A clone is the same switch. Neither `Send` nor `Sync`, as the tensors beside it.
#[derive(Clone, Debug)]
pub struct Training(Rc<Cell<bool>>);

impl Training {
    /// In training.
    pub fn new() -> Training {
        Training(Rc::new(Cell::new(true)))
    }

    /// Whether it is.
    pub fn get(&self) -> bool {
        self.0.get()
    }

    pub(crate) fn set(&self, on: bool) {
        self.0.set(on);
    }
}

impl Default for Training {
    fn default() -> Training {
        Training::new()
    }
}

impl ModuleField for Training {
    fn register(&self, _: &str, members: &mut Members) {
        members.training(self);
    }
}

pub(crate) fn members_of<M: Module + ?Sized>(module: &M) -> Members {
    let mut members = Members::default();
    members.visit(module);
    members
}

pub(crate) fn set_training(members: &Members, training: bool) {
    for switch in &members.training {
        switch.set(training);
    }
    for module in members.natives.iter().map(|(_, native)| native).chain(&members.scripts) {
        let switched = call!(swv_module_train(module.as_ptr(), training.into()));
        switched.expect("a module that is there can be switched");
    }
}

/// Each tensor once, by its first name.
pub(crate) fn distinct(named: Vec<(String, Tensor)>) -> Vec<(String, Tensor)> {
    // Only tensors of one shape are compared: models have thousands.
    let mut places: HashMap<Vec<i64>, Vec<usize>> = HashMap::new();
    let mut result: Vec<(String, Tensor)> = Vec::with_capacity(named.len());
    for (name, tensor) in named {
        let alike = places.entry(tensor.sizes().unwrap_or_default()).or_default();
        if !alike.iter().any(|i| result[*i].1.is_same(&tensor) == Ok(true)) {
            alike.push(result.len());
            result.push((name, tensor));
        }
    }
    result
}

/// Names of buffers that no checkpoint has.
pub(crate) fn non_persistent_of<M: Module + ?Sized>(module: &M) -> Vec<String> {
    members_of(module).non_persistent
}
