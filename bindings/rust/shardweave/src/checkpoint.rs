//! Checkpoints: what a run needs to go on, saved by all ranks together and loaded on any mesh; and
//! safetensors files.

use std::path::{Path, PathBuf};
use std::time::Duration;

use shardweave_sys as sys;

use crate::data::TokenLoader;

use crate::dtype::DType;
use crate::error::{Error, Of, Result};
use crate::ffi::{c_path, c_text, milliseconds, take_string};
use crate::mesh::Mesh;
use crate::module::Module;
use crate::module_handle::persistent_handle_of;
use crate::optimizer::Optimizer;
use crate::tensor::Tensor;

handle! {
    /// What a checkpoint saves and brings back, by name: tensors, and values (JSON).
    ///
    /// ```
    /// use shardweave::{AdamW, Checkpointer, Module, ParameterPlan, Source, State, Tensor, World};
    /// #[derive(Module)]
    /// struct Model {
    ///     weight: Tensor,
    /// }
    /// # let directory = std::env::temp_dir().join(format!("shardweave-doc-{}", std::process::id()));
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("dp", 2)])?;
    ///     let model = Model { weight: Tensor::ones(&[4, 2])? };
    ///     model.distribute(&mesh, &ParameterPlan::new(), Source::Same)?;
    ///     let optimizer = AdamW::new(0.1).build(&model)?;
    ///     let state = State::new()?;
    ///     state.add_module(&model)?; // "model.weight"
    ///     state.add_optimizer(&optimizer, &model)?; // "optimizer.weight.exp_avg", ...
    ///     state.set_value("epoch", "3")?;
    ///     let mut checkpointer = Checkpointer::new(&mesh, &directory).keep_last(2).open()?;
    ///     checkpointer.save_async(100, &state)?; // directory/step-000100, beside training
    ///     checkpointer.wait()?;
    ///     assert_eq!(checkpointer.load(&state)?.step, 100);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(&directory).unwrap();
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    ///
    /// It has handles, not copies, and keeps them alive: made once, it saves what is there at each save.
    /// All ranks add the same. Belongs to its rank: neither `Send` nor `Sync`.
    State, swv_state, swv_state_free
}

handle! {
    /// What saves into one directory, and loads from it. Made by [`Checkpointer::new`]. From the first
    /// save on the directory is this one's; dropped, it waits for what is under way. Belongs to its rank:
    /// neither `Send` nor `Sync`.
    Checkpointer, swv_checkpointer, swv_checkpointer_free
}

handle! {
    /// Tensors in a file, or in several with an index, as Hugging Face keeps models: read strictly, and
    /// only what is asked for. Neither `Send` nor `Sync`.
    Safetensors, swv_safetensors, swv_safetensors_free
}

debug_by_name!(State, Checkpointer, Safetensors);

/// Of a [`Checkpointer`], before it is opened.
#[derive(Debug)]
pub struct CheckpointerOptions<'a> {
    mesh: &'a Mesh,
    directory: PathBuf,
    keep_last: i64,
    timeout: Option<Duration>,
    skip_if_busy: bool,
    copy_beside_training: bool,
}

/// Of [`State::load`] and [`Checkpointer::load_with`]: what is no error.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadOptions {
    allow_missing: bool,
    allow_unexpected: bool,
    cast: bool,
    verify: bool,
}

/// What was loaded.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Loaded {
    /// Of the checkpoint.
    pub step: i64,
    /// `{"path": ..., "step": 100, "missing": [], "unexpected": [], "values": {"epoch": 3},
    /// "bytes_read": 96, "bytes_kept": 96}`
    pub json: String,
}

impl State {
    /// Nothing yet.
    pub fn new() -> Result<State> {
        create!(swv_state_create()).map(State)
    }

    /// Parameters and persistent buffers by FQN behind "model.", tied ones once.
    pub fn add_module<M: Module + ?Sized>(&self, module: &M) -> Result<()> {
        self.add_module_as("model.", module).of("State::add_module")
    }

    /// The same behind another prefix.
    pub fn add_module_as<M: Module + ?Sized>(&self, prefix: &str, module: &M) -> Result<()> {
        const NAME: &str = "State::add_module_as";
        let module = persistent_handle_of(module).of(NAME)?;
        let prefix = c_text(prefix, "prefix").of(NAME)?;
        call!(swv_state_add_module(self.as_ptr(), prefix.as_ptr(), module.as_ptr())).of(NAME)
    }

    /// The optimizer's state of each parameter by the parameter's FQN in `module`, behind "optimizer.".
    /// [`Optimizer::use_zero`] comes before.
    pub fn add_optimizer<M: Module + ?Sized>(
        &self,
        optimizer: &Optimizer,
        module: &M,
    ) -> Result<()> {
        self.add_optimizer_as("optimizer.", optimizer, module).of("State::add_optimizer")
    }

    /// The same behind another prefix.
    pub fn add_optimizer_as<M: Module + ?Sized>(
        &self,
        prefix: &str,
        optimizer: &Optimizer,
        module: &M,
    ) -> Result<()> {
        const NAME: &str = "State::add_optimizer_as";
        let module = persistent_handle_of(module).of(NAME)?;
        let prefix = c_text(prefix, "prefix").of(NAME)?;
        call!(swv_state_add_optimizer(
            self.as_ptr(),
            prefix.as_ptr(),
            optimizer.as_ptr(),
            module.as_ptr(),
        ))
        .of(NAME)
    }

    /// Sharded in any layout without `Partial`, or plain: then all ranks have it alike.
    pub fn add_tensor(&self, name: &str, tensor: &Tensor) -> Result<()> {
        let name = c_text(name, "name").of("State::add_tensor")?;
        call!(swv_state_add_tensor(self.as_ptr(), name.as_ptr(), tensor.as_ptr()))
    }

    /// Where the mesh stands in its random numbers, as the value "random".
    pub fn add_random(&self, mesh: &Mesh) -> Result<()> {
        self.add_random_as("random", mesh)
    }

    /// The same under another name: of a second mesh.
    pub fn add_random_as(&self, name: &str, mesh: &Mesh) -> Result<()> {
        let name = c_text(name, "name").of("State::add_random_as")?;
        call!(swv_state_add_random(self.as_ptr(), name.as_ptr(), mesh.as_ptr()))
    }

    /// Where the loader stands, as the value "loader": it goes on there once loaded, on any number of
    /// ranks.
    pub fn add_loader(&self, loader: &TokenLoader) -> Result<()> {
        self.add_loader_as("loader", loader)
    }

    /// The same under another name: of a second loader.
    pub fn add_loader_as(&self, name: &str, loader: &TokenLoader) -> Result<()> {
        let name = c_text(name, "name").of("State::add_loader_as")?;
        call!(swv_state_add_loader(self.as_ptr(), name.as_ptr(), loader.as_ptr()))
    }

    /// JSON of the program's own, the same on all ranks. Loading replaces it, and wants it to be there.
    /// What a checkpoint has beyond the values that are set is in [`Loaded::json`], and not kept for the
    /// next checkpoint.
    pub fn set_value(&self, name: &str, json: &str) -> Result<()> {
        let name = c_text(name, "name").of("State::set_value")?;
        let json = c_text(json, "json").of("State::set_value")?;
        call!(swv_state_set_value(self.as_ptr(), name.as_ptr(), json.as_ptr()))
    }

    /// The JSON of a value.
    pub fn value(&self, name: &str) -> Result<String> {
        let name = c_text(name, "name").of("State::value")?;
        text!(swv_state_value(self.as_ptr(), name.as_ptr()))
    }

    /// Loads a checkpoint in place, or the newest one of a directory, on any mesh. Errors leave
    /// everything as it was, and are the same on all ranks; [`Code::NotFound`](crate::Code::NotFound)
    /// where there is no checkpoint. Collective.
    pub fn load(
        &self,
        path: impl AsRef<Path>,
        mesh: &Mesh,
        options: &LoadOptions,
    ) -> Result<Loaded> {
        let path = c_path(path.as_ref()).of("State::load")?;
        let options = options.to_raw();
        loaded(|step, json| {
            call!(swv_state_load(self.as_ptr(), path.as_ptr(), mesh.as_ptr(), &options, step, json))
        })
    }
}

impl<'a> CheckpointerOptions<'a> {
    /// How many checkpoints stay, after a new one is there; else all.
    pub fn keep_last(mut self, checkpoints: i64) -> CheckpointerOptions<'a> {
        self.keep_last = checkpoints;
        self
    }

    /// How long ranks wait for the slowest to write its part; else an hour.
    pub fn timeout(mut self, timeout: Duration) -> CheckpointerOptions<'a> {
        self.timeout = Some(timeout);
        self
    }

    /// [`Checkpointer::save_async`] saves nothing while a save is under way; else it waits.
    pub fn skip_if_busy(mut self, skip: bool) -> CheckpointerOptions<'a> {
        self.skip_if_busy = skip;
        self
    }

    /// [`Checkpointer::save_async`] copies parameters, and what optimizers keep of them, beside the forward and
    /// backward that follow, if they are DTensors in the CPU's memory; [`Checkpointer::wait_for_copy`] is called before they
    /// are written to. Else before it returns.
    pub fn copy_beside_training(mut self, beside: bool) -> CheckpointerOptions<'a> {
        self.copy_beside_training = beside;
        self
    }

    /// Touches no file: that is for [`Checkpointer::open`], or the first save.
    pub fn open(&self) -> Result<Checkpointer> {
        const NAME: &str = "CheckpointerOptions::open";
        let directory = c_path(&self.directory).of(NAME)?;
        let raw = sys::swv_checkpointer_options {
            keep_last: self.keep_last,
            timeout_ms: milliseconds(self.timeout),
            skip_if_busy: self.skip_if_busy.into(),
            copy_beside_training: self.copy_beside_training.into(),
            ..sys::SWV_CHECKPOINTER_OPTIONS_INIT
        };
        create!(swv_checkpointer_create(self.mesh.as_ptr(), directory.as_ptr(), &raw))
            .map(Checkpointer)
    }
}

impl Checkpointer {
    /// Of this directory, which all ranks share.
    #[allow(clippy::new_ret_no_self)] // a builder, as those of others
    pub fn new(mesh: &Mesh, directory: impl Into<PathBuf>) -> CheckpointerOptions<'_> {
        CheckpointerOptions {
            mesh,
            directory: directory.into(),
            keep_last: 0,
            timeout: None,
            skip_if_busy: false,
            copy_beside_training: false,
        }
    }

    /// Makes the directory, if it is not there, and takes it, as the first save does: a run hears at its
    /// beginning that another one saves there
    /// ([`Code::FailedPrecondition`](crate::Code::FailedPrecondition)), or that it may not write there.
    /// `done` is how many steps are: a checkpoint of a later one is an error then, too. `None`: who
    /// resumes from this directory, before [`load`](Self::load). `DataLoss` if what would be the newest
    /// checkpoint has no manifest. Collective.
    ///
    /// ```
    /// use shardweave::{Checkpointer, Code, World};
    /// # let folder = std::env::temp_dir().join(format!("shardweave-open-{}", std::process::id()));
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("dp", 2)])?;
    ///     let mut checkpointer = Checkpointer::new(&mesh, &folder).open()?;
    ///     checkpointer.open(Some(0))?;
    ///     let mut another = Checkpointer::new(&mesh, &folder).open()?;
    ///     let error = another.open(None).unwrap_err();
    ///     assert_eq!(error.code(), Code::FailedPrecondition);
    ///     Ok(())
    /// })?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn open(&mut self, done: Option<i64>) -> Result<()> {
        call!(swv_checkpointer_open(self.as_ptr(), done.unwrap_or(-1)))
    }

    /// The directory has step-000100 when it returns. An error of a [`save_async`](Self::save_async)
    /// before it is a warning on stderr. [`Code::AlreadyExists`](crate::Code::AlreadyExists) for a step
    /// that is there, which `save_async` may have saved: then [`wait`](Self::wait) ends a run. Collective.
    pub fn save(&mut self, step: i64, state: &State) -> Result<()> {
        call!(swv_checkpointer_save(self.as_ptr(), step, state.as_ptr()))
    }

    /// Returns when this rank's part is copied, and writes it beside training; whether it was not skipped.
    /// An error of it comes out of the next call that is not `save`. Collective.
    pub fn save_async(&mut self, step: i64, state: &State) -> Result<bool> {
        get!(swv_checkpointer_save_async(self.as_ptr(), step, state.as_ptr()) -> sys::swv_bool)
            .map(|saved| saved != 0)
    }

    /// With [`CheckpointerOptions::copy_beside_training`]: until the copy of the save that is under way is there.
    /// Called in each step before parameters are written to, as by `Optimizer::step`, it costs nothing where nothing
    /// is under way. Nothing is on the disk before all ranks have called it, or another method of their checkpointer.
    /// A save whose tensors were written to before it fails with
    /// [`Code::FailedPrecondition`](crate::Code::FailedPrecondition), which comes out where its other errors do. Every
    /// other call does it, too.
    ///
    /// ```
    /// use shardweave::{Checkpointer, Placement::Shard, State, Tensor, World};
    /// # let folder = std::env::temp_dir().join(format!("shardweave-beside-{}", std::process::id()));
    /// World::threads(2).run(|world| {
    ///     let mesh = world.device_mesh(&[("dp", 2)])?;
    ///     let w = Tensor::ones(&[4])?.distribute(&mesh, [("dp", Shard(0))])?;
    ///     w.set_requires_grad(true)?;
    ///     let state = State::new()?;
    ///     state.add_tensor("w", &w)?;
    ///     let mut checkpointer = Checkpointer::new(&mesh, &folder).copy_beside_training(true).open()?;
    ///     checkpointer.save_async(1, &state)?;
    ///     // ... forward, backward ...
    ///     checkpointer.wait_for_copy()?;
    ///     // ... the optimizer's step ...
    ///     checkpointer.wait()
    /// })?;
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), shardweave::Error>(())
    /// ```
    pub fn wait_for_copy(&mut self) -> Result<()> {
        call!(swv_checkpointer_wait_for_copy(self.as_ptr()))
    }

    /// Until what is under way is on the disk. With [`CheckpointerOptions::copy_beside_training`] it waits for the
    /// other ranks to ask for their copies, too, so that none calls it alone before they do.
    pub fn wait(&mut self) -> Result<()> {
        call!(swv_checkpointer_wait(self.as_ptr()))
    }

    /// The newest checkpoint of the directory, in place; [`Code::NotFound`](crate::Code::NotFound) if
    /// it has none, and for nothing else: a run that begins or goes on takes it for step 0. A damaged
    /// one is [`Code::DataLoss`](crate::Code::DataLoss). Collective.
    pub fn load(&mut self, state: &State) -> Result<Loaded> {
        self.load_with(state, &LoadOptions::new()).of("Checkpointer::load")
    }

    /// The same, where something is no error.
    pub fn load_with(&mut self, state: &State, options: &LoadOptions) -> Result<Loaded> {
        let options = options.to_raw();
        loaded(|step, json| {
            call!(swv_checkpointer_load(self.as_ptr(), state.as_ptr(), &options, step, json))
        })
        .of("Checkpointer::load_with")
    }
}

impl LoadOptions {
    /// Everything that differs is an error.
    pub fn new() -> LoadOptions {
        LoadOptions::default()
    }

    /// What the checkpoint has not stays as it is.
    pub fn allow_missing(mut self, allow: bool) -> LoadOptions {
        self.allow_missing = allow;
        self
    }

    /// What the state has not is left out.
    pub fn allow_unexpected(mut self, allow: bool) -> LoadOptions {
        self.allow_unexpected = allow;
        self
    }

    /// Another floating-point type is converted.
    pub fn cast(mut self, cast: bool) -> LoadOptions {
        self.cast = cast;
        self
    }

    /// Every byte of every file is compared with its checksum first; else every byte that is loaded,
    /// while it is.
    pub fn verify(mut self, verify: bool) -> LoadOptions {
        self.verify = verify;
        self
    }

    fn to_raw(self) -> sys::swv_load_options {
        sys::swv_load_options {
            allow_missing: self.allow_missing.into(),
            allow_unexpected: self.allow_unexpected.into(),
            cast: self.cast.into(),
            verify: self.verify.into(),
            ..sys::SWV_LOAD_OPTIONS_INIT
        }
    }
}

fn loaded(load: impl FnOnce(*mut i64, *mut *mut sys::swv_string) -> Result<()>) -> Result<Loaded> {
    let (mut step, mut json) = (0, std::ptr::null_mut());
    load(&mut step, &mut json)?;
    let json = std::ptr::NonNull::new(json).map_or_else(String::new, take_string);
    Ok(Loaded { step, json })
}

/// The steps of a directory's checkpoints, ascending. By one process alone, as the next two.
pub fn list_checkpoints(directory: impl AsRef<Path>) -> Result<Vec<i64>> {
    const NAME: &str = "list_checkpoints";
    let directory = c_path(directory.as_ref()).of(NAME)?;
    crate::ffi::ready("swv_list_checkpoints").of(NAME)?;
    list!(swv_list_checkpoints(directory.as_ptr()) -> i64)
}

/// The checkpoint that [`State::load`] would load: `path` itself, or its newest. `DataLoss` if
/// the directory of a higher step has files of a checkpoint and no manifest.
pub fn find_checkpoint(path: impl AsRef<Path>) -> Result<PathBuf> {
    let path = c_path(path.as_ref()).of("find_checkpoint")?;
    text!(swv_find_checkpoint(path.as_ptr())).map(PathBuf::from)
}

/// Reads all of what [`find_checkpoint`] finds: sizes, headers, checksums.
pub fn verify_checkpoint(path: impl AsRef<Path>) -> Result<()> {
    let path = c_path(path.as_ref()).of("verify_checkpoint")?;
    call!(swv_verify_checkpoint(path.as_ptr()))
}

/// Of [`Safetensors::tensors`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredTensor {
    /// Its name.
    pub name: String,
    /// Of its elements.
    pub dtype: DType,
    /// Its sizes.
    pub sizes: Vec<i64>,
}

impl Safetensors {
    /// A file, an index (model.safetensors.index.json), or a folder with either.
    pub fn open(path: impl AsRef<Path>) -> Result<Safetensors> {
        let path = c_path(path.as_ref()).of("Safetensors::open")?;
        create!(swv_safetensors_open(path.as_ptr())).map(Safetensors)
    }

    /// What is in it, sorted by name. Opens all files of an index.
    pub fn tensors(&self) -> Result<Vec<StoredTensor>> {
        let number = get!(swv_safetensors_num_tensors(self.as_ptr()) -> usize)?;
        (0..number)
            .map(|index| self.tensor(index))
            .collect::<Result<_>>()
            .of("Safetensors::tensors")
    }

    fn tensor(&self, index: usize) -> Result<StoredTensor> {
        let (mut name, mut dtype) = (std::ptr::null_mut(), 0);
        let mut sizes = vec![0; 64]; // no tensor has more
        let mut ndim = 0;
        call!(swv_safetensors_tensor(
            self.as_ptr(),
            index,
            &mut name,
            &mut dtype,
            sizes.as_mut_ptr(),
            sizes.len(),
            &mut ndim,
        ))?;
        sizes.truncate(ndim);
        let name = std::ptr::NonNull::new(name).map_or_else(String::new, take_string);
        Ok(StoredTensor { name, dtype: DType::from_number(dtype)?, sizes })
    }

    /// All of a tensor, plain, on the CPU.
    pub fn read(&self, name: &str) -> Result<Tensor> {
        let name = c_text(name, "name").of("Safetensors::read")?;
        let none = std::ptr::null();
        create!(swv_safetensors_read(self.as_ptr(), name.as_ptr(), none, none, 0))
            .map(Tensor::from_handle)
    }

    /// The part of it of these sizes, from `offset` on: no other byte is read.
    pub fn read_part(&self, name: &str, offset: &[i64], sizes: &[i64]) -> Result<Tensor> {
        const NAME: &str = "Safetensors::read_part";
        let name = c_text(name, "name").of(NAME)?;
        if offset.len() != sizes.len() {
            let (offset, sizes) = (offset.len(), sizes.len());
            return Err(Error::invalid(format!("offset has {offset} numbers, and sizes {sizes}")))
                .of(NAME);
        }
        create!(swv_safetensors_read(
            self.as_ptr(),
            name.as_ptr(),
            offset.as_ptr(),
            sizes.as_ptr(),
            sizes.len(),
        ))
        .map(Tensor::from_handle)
        .of(NAME)
    }
}

/// Writes plain tensors to a file that is not there yet; it is on the disk when this returns.
pub fn write_safetensors(
    path: impl AsRef<Path>,
    tensors: &[(&str, &Tensor)],
    metadata: &[(&str, &str)],
) -> Result<()> {
    const NAME: &str = "write_safetensors";
    let path = c_path(path.as_ref()).of(NAME)?;
    let names = tensors.iter().map(|(name, _)| c_text(name, "name"));
    let names = names.collect::<Result<Vec<_>>>().of(NAME)?;
    let words = metadata.iter().flat_map(|(key, value)| [*key, *value]);
    let words = words.map(|word| c_text(word, "metadata")).collect::<Result<Vec<_>>>().of(NAME)?;
    let name_pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
    let word_pointers: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
    let handles: Vec<_> = tensors.iter().map(|(_, tensor)| tensor.as_const_ptr()).collect();
    call!(swv_safetensors_write(
        path.as_ptr(),
        name_pointers.as_ptr(),
        handles.as_ptr(),
        handles.len(),
        word_pointers.as_ptr(),
        metadata.len(),
    ))
}
