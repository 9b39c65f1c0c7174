//! The feature `load-dynamic`: the library is looked for when it is first needed.

use std::env;
use std::ffi::{CStr, CString, OsStr};
use std::os::raw::{c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::bindings::{FUNCTIONS, NUM_FUNCTIONS, SWV_VERSION};
use crate::version::{mismatch, soname};

#[link(name = "dl")]
extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlclose(library: *mut c_void) -> c_int;
    fn dlerror() -> *const c_char;
}
const RTLD_NOW: c_int = 2;

#[allow(clippy::declare_interior_mutable_const)] // to fill the array
const NONE: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
/// Where the functions are, in the order of their names; all of them are set, or none.
static ADDRESSES: [AtomicPtr<c_void>; NUM_FUNCTIONS] = [NONE; NUM_FUNCTIONS];

/// The address of a function, for the definitions that the build script has written.
#[inline]
pub(crate) fn function(index: usize) -> *mut c_void {
    let address = ADDRESSES[index].load(Ordering::Acquire);
    if address.is_null() {
        not_loaded(index)
    }
    address
}

/// A function that cannot fail has no other way to say it, and a panic must not cross its `extern
/// "C"`. The crate `shardweave` never comes here: it calls load() first.
#[cold]
fn not_loaded(index: usize) -> ! {
    if let Err(error) = load() {
        eprintln!("shardweave-sys: {error}");
    }
    eprintln!(
        "shardweave-sys: {} was called before shardweave_sys::load() had succeeded",
        FUNCTIONS[index].trim_end_matches('\0')
    );
    process::abort()
}

pub(crate) fn load() -> Result<(), String> {
    static IS_LOADED: AtomicBool = AtomicBool::new(false);
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    if IS_LOADED.load(Ordering::Acquire) {
        return Ok(());
    }
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    if !IS_LOADED.load(Ordering::Acquire) {
        let (library, place) = open()?;
        if let Err(error) = fill(library, &place) {
            // SAFETY: nothing of it is used.
            unsafe { dlclose(library) };
            return Err(error);
        }
        IS_LOADED.store(true, Ordering::Release);
    }
    Ok(())
}

/// The library, from a folder that the user names, or from where the loader finds it.
fn open() -> Result<(*mut c_void, String), String> {
    let name = soname(SWV_VERSION);
    let place = match env::var_os("SHARDWEAVE_HOME") {
        None => PathBuf::from(&name),
        Some(home) => {
            let home = PathBuf::from(home);
            let plain = "libshardweave.so";
            let places = [home.join("lib").join(&name), home.join("lib").join(plain)];
            let places = places.into_iter().chain([home.join(&name), home.join(plain)]);
            places.into_iter().find(|path| path.exists()).ok_or_else(|| {
                format!(
                    "SHARDWEAVE_HOME is '{}'; wanted a folder with lib/{name} or {plain} in it",
                    home.display()
                )
            })?
        }
    };
    let path = c_text(place.as_os_str())?;
    // SAFETY: text that ends with NUL.
    let library = unsafe { dlopen(path.as_ptr(), RTLD_NOW) };
    if library.is_null() {
        return Err(format!(
            "cannot load {name}: {}. Set SHARDWEAVE_HOME to a prefix that ./bazelw run \
             //tools:install has filled, or LD_LIBRARY_PATH to the folder that it is in",
            last_error()
        ));
    }
    Ok((library, place.display().to_string()))
}

fn fill(library: *mut c_void, place: &str) -> Result<(), String> {
    let mut addresses = Vec::with_capacity(NUM_FUNCTIONS);
    let mut missing = Vec::new();
    for name in FUNCTIONS.iter().copied() {
        // SAFETY: a library that is open, and text that ends with NUL.
        let address = unsafe { dlsym(library, name.as_ptr().cast()) };
        if address.is_null() {
            missing.push(name.trim_end_matches('\0'));
        }
        addresses.push(address);
        if name == "swv_version\0" && !address.is_null() {
            // SAFETY: that function has no arguments, in every version.
            let version = unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> i32>(address)()
            };
            if let Some(error) = mismatch(SWV_VERSION, version, place) {
                return Err(error);
            }
        }
    }
    if let Some(first) = missing.first() {
        return Err(format!("{place} lacks {first} and {} more", missing.len() - 1));
    }
    for (to, address) in ADDRESSES.iter().zip(addresses) {
        to.store(address, Ordering::Release);
    }
    Ok(())
}

fn c_text(text: &OsStr) -> Result<CString, String> {
    CString::new(text.as_bytes()).map_err(|_| format!("{text:?} has a NUL in it"))
}

fn last_error() -> String {
    // SAFETY: the text lives until this thread's next call of dl...().
    unsafe {
        let text = dlerror();
        if text.is_null() {
            return "no reason given".to_owned();
        }
        CStr::from_ptr(text).to_string_lossy().into_owned()
    }
}
