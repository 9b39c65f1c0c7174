//! Models of Hugging Face's transformers: directories of config.json and weights.

use std::ffi::CString;
use std::path::Path;

use shardweave_sys as sys;

use crate::dtype::{number_of, DType};
use crate::error::{Of, Result};
use crate::ffi::{c_path, c_text, take_string};
use crate::members::non_persistent_of;
use crate::mesh::Mesh;
use crate::module::Module;
use crate::module_handle::handle_of;

/// Of [`Module::load_pretrained`]: what is no error.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadPretrained {
    allow_missing: bool,
    allow_unexpected: bool,
    allow_unknown: bool,
}

impl LoadPretrained {
    /// Everything that differs is an error.
    pub fn new() -> LoadPretrained {
        LoadPretrained::default()
    }

    /// What the files have not stays as it is: a classifier that is new.
    pub fn allow_missing(mut self, allow: bool) -> LoadPretrained {
        self.allow_missing = allow;
        self
    }

    /// What the module has not is left out.
    pub fn allow_unexpected(mut self, allow: bool) -> LoadPretrained {
        self.allow_unexpected = allow;
        self
    }

    /// Keys of config.json that the library does not know are passed over.
    pub fn allow_unknown(mut self, allow: bool) -> LoadPretrained {
        self.allow_unknown = allow;
        self
    }
}

/// Of [`Module::save_pretrained`].
#[derive(Clone, Copy, Debug)]
pub struct SavePretrained {
    max_file_bytes: i64,
    dtype: Option<DType>,
}

impl Default for SavePretrained {
    fn default() -> SavePretrained {
        SavePretrained::new()
    }
}

impl SavePretrained {
    /// Files of up to 5 GB, of the types that the tensors have.
    pub fn new() -> SavePretrained {
        SavePretrained {
            max_file_bytes: sys::SWV_SAVE_PRETRAINED_OPTIONS_INIT.max_file_bytes,
            dtype: None,
        }
    }

    /// A file ends before a tensor with which it would have more.
    pub fn max_file_bytes(mut self, bytes: i64) -> SavePretrained {
        self.max_file_bytes = bytes;
        self
    }

    /// Floating-point tensors are written as this.
    pub fn dtype(mut self, dtype: DType) -> SavePretrained {
        self.dtype = Some(dtype);
        self
    }
}

/// What [`Module::load_pretrained`] has done: `{"kind": "llama", "missing": [], "unexpected": [],
/// "bytes_read": 96, "bytes_kept": 96}`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadedPretrained {
    /// As above; bytes are of tensors, by this rank.
    pub json: String,
}

/// A directory's config.json as it stands there, if it describes what a model of the library's
/// computes, [`NativeModule`](crate::NativeModule) or one that a program writes; the error says line
/// and key else. With `allow_unknown` keys that the library does not know are passed over. Sends
/// nothing.
pub fn read_pretrained_config(directory: impl AsRef<Path>, allow_unknown: bool) -> Result<String> {
    let directory = c_path(directory.as_ref()).of("read_pretrained_config")?;
    text!(swv_read_pretrained_config(directory.as_ptr(), allow_unknown.into()))
}

// Tables that are computed are in no file.
fn ignored_of<M: Module + ?Sized>(module: &M, name: &'static str) -> Result<Vec<CString>> {
    let names = non_persistent_of(module);
    names.iter().map(|fqn| c_text(fqn, "buffer")).collect::<Result<_>>().of(name)
}

pub(crate) fn load<M: Module + ?Sized>(
    module: &M,
    path: &Path,
    mesh: &Mesh,
    options: &LoadPretrained,
) -> Result<LoadedPretrained> {
    const NAME: &str = "Module::load_pretrained";
    let path = c_path(path).of(NAME)?;
    let ignored = ignored_of(module, NAME)?;
    let ignored: Vec<_> = ignored.iter().map(|fqn| fqn.as_ptr()).collect();
    let (module, _forwards) = handle_of(module).of(NAME)?;
    let raw = sys::swv_load_pretrained_options {
        ignored: ignored.as_ptr(),
        num_ignored: ignored.len(),
        allow_missing: options.allow_missing.into(),
        allow_unexpected: options.allow_unexpected.into(),
        allow_unknown: options.allow_unknown.into(),
        ..sys::SWV_LOAD_PRETRAINED_OPTIONS_INIT
    };
    let mut json = std::ptr::null_mut();
    call!(swv_module_load_pretrained(
        module.as_ptr(),
        path.as_ptr(),
        mesh.as_ptr(),
        &raw,
        &mut json,
    ))?;
    let json = std::ptr::NonNull::new(json).map_or_else(String::new, take_string);
    Ok(LoadedPretrained { json })
}

pub(crate) fn save<M: Module + ?Sized>(
    module: &M,
    directory: &Path,
    config: &str,
    mesh: &Mesh,
    options: &SavePretrained,
) -> Result<()> {
    const NAME: &str = "Module::save_pretrained";
    let directory = c_path(directory).of(NAME)?;
    let config = c_text(config, "config").of(NAME)?;
    let ignored = ignored_of(module, NAME)?;
    let ignored: Vec<_> = ignored.iter().map(|fqn| fqn.as_ptr()).collect();
    let (module, _forwards) = handle_of(module).of(NAME)?;
    let raw = sys::swv_save_pretrained_options {
        ignored: ignored.as_ptr(),
        num_ignored: ignored.len(),
        max_file_bytes: options.max_file_bytes,
        dtype: number_of(options.dtype),
        ..sys::SWV_SAVE_PRETRAINED_OPTIONS_INIT
    };
    call!(swv_module_save_pretrained(
        module.as_ptr(),
        directory.as_ptr(),
        config.as_ptr(),
        mesh.as_ptr(),
        &raw,
    ))
}
