//! The way into the C interface. Every other module calls it through `call!`, `get!` and `create!`.
//!
//! Why these calls are sound, once for all of them:
//! - A handle that is passed is behind a reference to the Rust value that owns it, so it is alive,
//!   of the right kind, and used by the thread that its type allows (types of a rank are neither
//!   Send nor Sync).
//! - Slices are passed as pointer and length, text as a `CString`; both outlive the call, and the C
//!   interface only borrows them.
//! - Memory of collectives is borrowed for the call, which waits: after it, also if it failed,
//!   nobody touches the memory any more (shardweave.h). What does not wait owns its memory
//!   (`Pending`).
//! - Outputs are locals of the type that the declaration says, and read after success only.

use std::any::Any;
use std::ffi::{CStr, CString};
use std::mem;
use std::os::raw::c_char;
use std::os::unix::ffi::OsStrExt;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use shardweave_sys as sys;

use crate::error::{Code, Error, Result};
use crate::names;

/// Calls a function that only can fail.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        match $crate::ffi::ready(stringify!($function)) {
            // SAFETY: see the top of ffi.rs.
            Ok(()) => $crate::ffi::check(unsafe { shardweave_sys::$function($($argument),*) }),
            Err(error) => Err(error),
        }
    };
}

/// Calls a function with one output of a plain type, and gives that.
macro_rules! get {
    ($function:ident($($argument:expr),* $(,)?) -> $type:ty) => {{
        let mut out = <$type>::default();
        call!($function($($argument,)* &mut out)).map(|()| out)
    }};
}

/// Calls a function whose output is a handle; gives it, owned, or None for NULL.
macro_rules! create_or_none {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        // What comes out is the caller's, once.
        let mut out = std::ptr::null_mut();
        call!($function($($argument,)* &mut out)).map(|()| std::ptr::NonNull::new(out))
    }};
}

/// The same for a function that never gives NULL.
macro_rules! create {
    ($function:ident($($argument:expr),* $(,)?)) => {
        create_or_none!($function($($argument),*))
            .map(|handle| handle.expect(concat!(stringify!($function), " gave no handle")))
    };
}

/// Calls a function whose output is text.
macro_rules! text {
    ($function:ident($($argument:expr),* $(,)?)) => {
        create!($function($($argument),*)).map($crate::ffi::take_string)
    };
}

/// Calls a function that copies numbers into memory of the caller and says how many there are.
macro_rules! list {
    ($function:ident($($argument:expr),* $(,)?) -> $type:ty) => {
        $crate::ffi::list(|out: *mut $type, capacity, count| {
            // SAFETY: see the top of ffi.rs; `out` has room for `capacity` numbers.
            unsafe { shardweave_sys::$function($($argument,)* out, capacity, count) }
        })
    };
}

/// A type that owns a handle. It is neither Send nor Sync unless an `unsafe impl` beside it says
/// so, with the reason.
macro_rules! handle {
    ($(#[$doc:meta])* $name:ident, $raw:ident, $free:ident) => {
        $(#[$doc])*
        #[repr(transparent)]
        pub struct $name(std::ptr::NonNull<shardweave_sys::$raw>);

        #[allow(dead_code)] // not every one needs both
        impl $name {
            /// Takes over a handle that nobody else will free.
            pub(crate) fn from_handle(handle: std::ptr::NonNull<shardweave_sys::$raw>) -> Self {
                $name(handle)
            }

            pub(crate) fn as_ptr(&self) -> *mut shardweave_sys::$raw {
                self.0.as_ptr()
            }
        }

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: this value owns the handle, and ends here.
                unsafe { shardweave_sys::$free(self.0.as_ptr()) }
            }
        }
    };
}

/// Debug for types that say no more than their name.
macro_rules! debug_by_name {
    ($($name:ident $(<$parameter:ident: $bound:ident>)?),* $(,)?) => {
        $(impl $(<$parameter: $bound>)? std::fmt::Debug for $name $(<$parameter>)? {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        })*
    };
}

/// Whether the library can be called: at the first use it is loaded, if that was left to run time,
/// and its version compared. What cannot fail is called with a handle, which it has made.
#[inline]
pub(crate) fn ready(function: &str) -> Result<()> {
    static IS_READY: AtomicBool = AtomicBool::new(false);
    #[cold]
    fn get_ready(function: &str) -> Result<()> {
        sys::load().map_err(|what| {
            let name = names::of(function);
            let name = name.as_deref().unwrap_or(function);
            Error::new(Code::FailedPrecondition, format!("{name}: {what}"))
        })?;
        IS_READY.store(true, Ordering::Release);
        Ok(())
    }
    if IS_READY.load(Ordering::Acquire) {
        Ok(())
    } else {
        get_ready(function)
    }
}

#[inline]
pub(crate) fn check(status: *mut sys::swv_status) -> Result<()> {
    if status.is_null() {
        Ok(())
    } else {
        Err(take_error(status))
    }
}

#[cold]
fn take_error(status: *mut sys::swv_status) -> Error {
    // SAFETY: the status is ours; its message lives until it is freed.
    unsafe {
        let code = Code::from_number(sys::swv_status_code(status));
        let message = string_from(sys::swv_status_message(status));
        let rank = usize::try_from(sys::swv_status_rank(status));
        sys::swv_status_free(status);
        let error = Error::new(code, names::translate(&message));
        match rank {
            Ok(rank) => error.of_rank(rank),
            Err(_) => error, // -1
        }
    }
}

/// # Safety
/// `text` ends with NUL.
pub(crate) unsafe fn string_from(text: *const c_char) -> String {
    // SAFETY: as the caller says.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

pub(crate) fn take_string(string: ptr::NonNull<sys::swv_string>) -> String {
    // SAFETY: the string is ours, and its text lives until it is freed.
    unsafe {
        let text = string_from(sys::swv_string_data(string.as_ptr()));
        sys::swv_string_free(string.as_ptr());
        text
    }
}

pub(crate) fn c_text(text: &str, what: &str) -> Result<CString> {
    CString::new(text)
        .map_err(|_| Error::invalid(format!("{what} {text:?} has a NUL in it; wanted none")))
}

/// Of a file or a folder.
pub(crate) fn c_path(path: &Path) -> Result<CString> {
    let text = std::str::from_utf8(path.as_os_str().as_bytes())
        .map_err(|_| Error::invalid(format!("the path {path:?} is no UTF-8")))?;
    c_text(text, "the path")
}

pub(crate) fn list<T: Copy + Default>(
    fill: impl Fn(*mut T, usize, *mut usize) -> *mut sys::swv_status,
) -> Result<Vec<T>> {
    // Most lists are the sizes of a tensor or a mesh: one call, one allocation.
    let mut few = [T::default(); 8];
    let mut count = 0;
    check(fill(few.as_mut_ptr(), few.len(), &mut count))?;
    if count <= few.len() {
        return Ok(few[..count].to_vec());
    }
    let mut all = vec![T::default(); count];
    check(fill(all.as_mut_ptr(), all.len(), &mut count))?;
    all.truncate(count);
    Ok(all)
}

/// In milliseconds; 0, which the C interface takes for its default, is only None's.
pub(crate) fn milliseconds(timeout: Option<Duration>) -> i64 {
    timeout.map_or(0, |t| i64::try_from(t.as_millis()).unwrap_or(i64::MAX).max(1))
}

/// What a callback gives back to the library: NULL, or the error, or the panic as an error. A panic
/// must not cross the border.
pub(crate) fn status_of(body: impl FnOnce() -> Result<()>) -> *mut sys::swv_status {
    match without_panics(body) {
        Ok(()) => ptr::null_mut(),
        Err(error) => new_status(&error),
    }
}

/// An error as the library's own; it is the library's then.
pub(crate) fn new_status(error: &Error) -> *mut sys::swv_status {
    let message = CString::new(error.message().replace('\0', "\\0")).expect("no NUL is left");
    // SAFETY: the message is borrowed for the call; the status goes to the library.
    unsafe {
        sys::swv_status_new_of_rank(
            error.code() as i32,
            message.as_ptr(),
            error.rank().map_or(-1, |rank| rank as i32),
        )
    }
}

/// Calls `body`, whose panic becomes an error.
pub(crate) fn without_panics<R>(body: impl FnOnce() -> Result<R>) -> Result<R> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| Err(panic_error(payload)))
}

/// What somebody panicked with, as an error.
pub(crate) fn panic_error(payload: Box<dyn Any + Send>) -> Error {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("with a value that is no text");
    let error = Error::new(Code::Internal, format!("panicked: {text}"));
    // The value's own end may panic too, with a value whose end may panic too; so that one stays.
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        mem::forget(another);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::panic::panic_any;

    /// Its end panics, with one more as long as there are some left.
    struct Bomb(usize);

    impl Drop for Bomb {
        fn drop(&mut self) {
            match self.0 {
                0 => panic!("at last"),
                left => panic_any(Bomb(left - 1)),
            }
        }
    }

    #[test]
    fn a_panic_ends_here_whatever_it_panics_with() {
        for left in 0..4 {
            let error = without_panics::<()>(|| panic_any(Bomb(left))).unwrap_err();
            assert_eq!(error, Error::new(Code::Internal, "panicked: with a value that is no text"));
        }
        let text = without_panics::<()>(|| panic!("{}, {}", 1, 2)).unwrap_err();
        assert_eq!(text.message(), "panicked: 1, 2");
        let text = without_panics::<()>(|| panic!("as it is")).unwrap_err();
        assert_eq!(text.message(), "panicked: as it is");
        // What the body has taken with it may panic at its end, too.
        let bomb = Bomb(2);
        let error = without_panics(|| {
            let _bomb = bomb;
            Ok(())
        });
        assert_eq!(error.unwrap_err().code(), Code::Internal);
        let bomb = Bomb(2);
        let panic = without_panics(move || {
            let bomb = bomb;
            mem::forget(bomb);
            Ok(7)
        });
        assert_eq!(panic, Ok(7));
    }

    #[test]
    fn lists_of_any_length() {
        // As the C interface fills them: as many as there is room for, and how many there are.
        for length in [0, 1, 7, 8, 9, 100] {
            let calls = Cell::new(0);
            let all = list(|out: *mut i64, capacity, count| {
                calls.set(calls.get() + 1);
                for i in 0..capacity.min(length) {
                    // SAFETY: there is room for `capacity`.
                    unsafe { *out.add(i) = i as i64 };
                }
                // SAFETY: a local of list().
                unsafe { *count = length };
                ptr::null_mut()
            });
            assert_eq!(all.unwrap(), (0..length as i64).collect::<Vec<_>>());
            assert_eq!(calls.get(), if length > 8 { 2 } else { 1 });
        }
    }

    #[test]
    fn times_in_milliseconds() {
        assert_eq!(milliseconds(None), 0);
        assert_eq!(milliseconds(Some(Duration::ZERO)), 1); // 0 is C's word for the default
        assert_eq!(milliseconds(Some(Duration::from_secs(2))), 2000);
        assert_eq!(milliseconds(Some(Duration::MAX)), i64::MAX);
        assert_eq!(c_text("a\0b", "name").unwrap_err().code(), Code::InvalidArgument);
    }
}
