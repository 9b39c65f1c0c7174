use std::path::Path;
use std::rc::Rc;

use crate::autograd::Mode;
use crate::error::{Error, Of, Result};
use crate::ffi::c_text;
use crate::members::Members;
use crate::module::Module;
use crate::module_handle::{members_of_handle, ModuleHandle};
use crate::op::{call_module, Arg, FromResults};
use crate::source::called_here;

/// A model that torch.jit.save has written. It is distributed and trained like any [`Module`].
///
/// ```
/// let error = shardweave::ScriptModule::load("/proc/nowhere/model.pt").unwrap_err();
/// assert!(error.message().contains("/proc/nowhere/model.pt"));
/// ```
///
/// Belongs to its rank: neither `Send` nor `Sync`, as its tensors.
pub struct ScriptModule {
    handle: Rc<ModuleHandle>,
    members: Members,
}

impl std::fmt::Debug for ScriptModule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ScriptModule").field("members", &self.members).finish_non_exhaustive()
    }
}

impl ScriptModule {
    /// From a file.
    pub fn load(path: impl AsRef<Path>) -> Result<ScriptModule> {
        let path = path.as_ref();
        let text =
            path.to_str().ok_or_else(|| Error::invalid(format!("path {path:?} is not UTF-8")));
        let text = text.of("ScriptModule::load")?;
        let text = c_text(text, "path").of("ScriptModule::load")?;
        let handle = ModuleHandle::from_handle(create!(swv_module_load(text.as_ptr()))?);
        let (parameters, buffers) = members_of_handle(&handle)?;
        let members = Members { parameters, buffers, ..Members::default() };
        Ok(ScriptModule { handle: Rc::new(handle), members })
    }

    /// Calls a method, "forward".
    #[track_caller]
    pub fn call<R: FromResults>(&self, method: &str, arguments: &[Arg<'_>]) -> Result<R> {
        call_module(self.handle.as_ptr(), method, arguments)
    }

    /// The same with further arguments by name.
    #[track_caller]
    pub fn call_named<R: FromResults>(
        &self,
        method: &str,
        arguments: &[Arg<'_>],
        named: &[(&str, Arg<'_>)],
    ) -> Result<R> {
        const NAME: &str = "ScriptModule::call_named";
        let _here = called_here();
        let method = c_text(method, "method").of(NAME)?;
        let names = named
            .iter()
            .map(|(name, _)| c_text(name, "argument"))
            .collect::<Result<Vec<_>>>()
            .of(NAME)?;
        let raw_names: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
        let mut all = arguments.to_vec();
        all.extend(named.iter().map(|(_, value)| *value));
        R::receive(|out, capacity, count| {
            call!(swv_module_call_named(
                self.handle.as_ptr(),
                method.as_ptr(),
                Mode::current(),
                all.as_ptr().cast(),
                all.len(),
                raw_names.as_ptr(),
                raw_names.len(),
                out,
                capacity,
                count,
            ))
        })
        .of(NAME)
    }

    /// Training mode or evaluation, of all modules in it: what its dropout and batch norms go by.
    pub fn train(&self, on: bool) -> Result<()> {
        call!(swv_module_train(self.handle.as_ptr(), on.into()))
    }

    /// Whether it is in training mode; at first as it was saved.
    pub fn is_training(&self) -> Result<bool> {
        Ok(get!(swv_module_is_training(self.handle.as_ptr()) -> i32)? == 1)
    }
}

impl Module for ScriptModule {
    fn members(&self, members: &mut Members) {
        for (name, tensor) in &self.members.parameters {
            members.parameter(name, tensor);
            if tensor.requires_grad() == Ok(false) {
                members.frozen.push(members.fqn(name));
            }
        }
        for (name, tensor) in &self.members.buffers {
            members.buffer(name, tensor);
        }
        members.scripts.push(self.handle.clone());
    }
}
