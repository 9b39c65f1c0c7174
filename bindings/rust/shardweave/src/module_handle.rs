//! Modules as C has them.

use std::ptr::{self, NonNull};

use shardweave_sys as sys;

use crate::error::{Error, Result};
use crate::ffi::{c_text, check, take_string};
use crate::forward::{check_distinct, forward_of, Forward, ForwardHandle};
use crate::members::{members_of, Members};
use crate::module::Module;
use crate::tensor::Tensor;

handle! {
    /// The C interface's own.
    ModuleHandle, swv_module, swv_module_free
}

debug_by_name!(ModuleHandle);

impl ModuleHandle {
    pub(crate) fn new() -> Result<ModuleHandle> {
        create!(swv_module_create()).map(ModuleHandle)
    }
}

/// The module as C has it, and handles of the forwards in it. What is frozen stays so.
pub(crate) fn handle_of<M: Module + ?Sized>(
    module: &M,
) -> Result<(ModuleHandle, Vec<(Forward, ForwardHandle)>)> {
    handle_of_members(members_of(module), Frozen::Stay)
}

/// The same for what begins to train it: parameters that are plain tensors require grad from then on,
/// but those that `set_requires_grad(false)` has frozen.
pub(crate) fn trained_handle_of<M: Module + ?Sized>(
    module: &M,
) -> Result<(ModuleHandle, Vec<(Forward, ForwardHandle)>)> {
    handle_of_members(members_of(module), Frozen::StayIfSharded)
}

/// Parameters that do not require grad.
#[derive(Clone, Copy, PartialEq)]
enum Frozen {
    Stay,
    /// Since the module was distributed.
    StayIfSharded,
}

/// The names that a checkpoint has of it: without buffers that are not persistent. Of a struct all
/// are buffers here: a parameter would require grad from now on, and one that is frozen would not
/// stay so.
pub(crate) fn persistent_handle_of<M: Module + ?Sized>(module: &M) -> Result<ModuleHandle> {
    let mut members = members_of(module);
    if !members.natives.iter().any(|(fqn, _)| fqn.is_empty()) {
        let Members { parameters, buffers, non_persistent, .. } = &mut members;
        buffers.retain(|(name, _)| !non_persistent.contains(name));
        parameters.append(buffers);
        std::mem::swap(parameters, buffers);
    }
    members.forwards.clear();
    members.shardings.clear();
    handle_of_members(members, Frozen::Stay).map(|(module, _)| module)
}

fn handle_of_members(
    members: Members,
    frozen: Frozen,
) -> Result<(ModuleHandle, Vec<(Forward, ForwardHandle)>)> {
    if let [(fqn, native)] = members.natives.as_slice() {
        if fqn.is_empty() {
            // The whole is one of the library's.
            let whole = ModuleHandle(create!(swv_module_share(native.as_ptr()))?);
            let (parameters, buffers) = members_of_handle(&whole)?;
            if members.parameters.len() != parameters.len()
                || members.buffers.len() != buffers.len()
                || !members.forwards.is_empty()
            {
                return Err(Error::invalid(
                    "a NativeModule without a name of its own has other members beside it; give it \
                     a name with Members::child",
                ));
            }
            return Ok((whole, Vec::new()));
        }
    }
    let module = ModuleHandle::new()?;
    for (fqn, native) in &members.natives {
        let fqn = c_text(fqn, "module")?;
        call!(swv_module_add_child(module.as_ptr(), fqn.as_ptr(), native.as_ptr()))?;
    }
    let is_native = |fqn: &str| {
        let mut natives = members.natives.iter();
        natives.any(
            |(of, _)| matches!(fqn.strip_prefix(of.as_str()), Some(rest) if rest.starts_with('.')),
        )
    };
    for (fqn, tensor) in members.parameters.iter().filter(|(fqn, _)| !is_native(fqn)) {
        // It requires grad from then on, if nobody has frozen it.
        let stays =
            frozen == Frozen::Stay || members.frozen.contains(fqn) || tensor.is_sharded()?;
        let fqn = c_text(fqn, "parameter")?;
        let is_off = stays && !tensor.requires_grad()?;
        call!(swv_module_add_parameter(module.as_ptr(), fqn.as_ptr(), tensor.as_ptr()))?;
        if is_off && tensor.requires_grad()? {
            call!(swv_tensor_clear_requires_grad(tensor.as_ptr()))?;
        }
    }
    for (fqn, tensor) in members.buffers.iter().filter(|(fqn, _)| !is_native(fqn)) {
        let fqn = c_text(fqn, "buffer")?;
        call!(swv_module_add_buffer(module.as_ptr(), fqn.as_ptr(), tensor.as_ptr()))?;
    }
    let all = members.parameters.iter().chain(&members.buffers);
    for (fqn, sharding) in &members.shardings {
        // (One without tensors is no module there.)
        let inside = |name: &str| match name.strip_prefix(fqn.as_str()) {
            Some(rest) => fqn.is_empty() || rest.starts_with('.'),
            None => false,
        };
        if !all.clone().any(|(name, _)| inside(name)) {
            continue;
        }
        let fqn = c_text(fqn, "module")?;
        let json = c_text(&sharding.to_json(), "sharding")?;
        let part = ModuleHandle(create!(swv_module_child(module.as_ptr(), fqn.as_ptr()))?);
        call!(swv_module_set_sharding(part.as_ptr(), json.as_ptr()))?;
    }
    check_distinct(&members.forwards)?;
    let mut forwards = Vec::new();
    for (fqn, forward) in members.forwards {
        forwards.push((forward, forward_of(&module, &fqn)?));
    }
    Ok((module, forwards))
}

type Named = Vec<(String, Tensor)>;

/// The parameters and the buffers of what the library has made.
pub(crate) fn members_of_handle(module: &ModuleHandle) -> Result<(Named, Named)> {
    let (mut parameters, mut buffers) = (Named::new(), Named::new());
    for i in 0..get!(swv_module_num_parameters(module.as_ptr()) -> usize)? {
        parameters.push(member(module, i, sys::swv_module_parameter)?);
    }
    for i in 0..get!(swv_module_num_buffers(module.as_ptr()) -> usize)? {
        buffers.push(member(module, i, sys::swv_module_buffer)?);
    }
    Ok((parameters, buffers))
}

type GetMember = unsafe extern "C" fn(
    *const sys::swv_module,
    usize,
    *mut *mut sys::swv_string,
    *mut *mut sys::swv_tensor,
) -> *mut sys::swv_status;

fn member(module: &ModuleHandle, index: usize, get: GetMember) -> Result<(String, Tensor)> {
    let (mut name, mut tensor) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: see the top of ffi.rs.
    check(unsafe { get(module.as_ptr(), index, &mut name, &mut tensor) })?;
    let name = take_string(NonNull::new(name).expect("a member has a name"));
    Ok((name, Tensor::from_handle(NonNull::new(tensor).expect("and is a tensor"))))
}
