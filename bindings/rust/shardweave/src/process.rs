//! What holds in the whole process: where the library speaks, checks of handles, random numbers, threads.

use std::os::raw::{c_char, c_void};
use std::ptr;

use shardweave_sys as sys;

use crate::error::{Of, Result};
use crate::ffi::{ready, string_from, without_panics};
use crate::world::{count, say};

/// What [`set_log`] takes.
pub type Log = Box<dyn Fn(&str) + Send + Sync>;

/// Where the library speaks while no call fails (who is waited for, which operator gathers), in the
/// whole process from now on; None, as without this call: stderr, with "shardweave: " in front.
///
/// `log` gets one line, without an end of line, on any thread, on several at once. It calls nothing of
/// this crate: what it calls may want to say something, too. What was set before is dropped when no
/// thread is in it any more. What it panics with is written to stderr.
///
/// ```
/// use std::sync::mpsc;
/// let (sender, lines) = mpsc::channel();
/// let sender = std::sync::Mutex::new(sender);
/// shardweave::set_log(Some(Box::new(move |line: &str| {
///     sender.lock().unwrap().send(line.to_owned()).ok();
/// })))?;
/// // ... train ...
/// shardweave::set_log(None)?;
/// assert_eq!(lines.try_iter().count(), 0); // all went well
/// # Ok::<(), shardweave::Error>(())
/// ```
pub fn set_log(log: Option<Log>) -> Result<()> {
    ready("swv_set_log")?; // before it is given away
    let log = match log {
        None => return call!(swv_set_log(None, ptr::null_mut(), None)),
        Some(log) => Box::into_raw(Box::new(log)),
    };
    call!(swv_set_log(Some(forward), log.cast(), Some(drop_log)))
}

unsafe extern "C" fn forward(log: *mut c_void, message: *const c_char) {
    // SAFETY: the library gives what set_log has given it and has not dropped yet; others that use it
    // now only read it, too.
    let log = unsafe { &*log.cast::<Log>() };
    // SAFETY: it ends with NUL, and lives during the call.
    let message = unsafe { string_from(message) };
    if let Err(error) = without_panics(|| {
        log(&message);
        Ok(())
    }) {
        say(&format!(
            "shardweave: {message}\nshardweave: the function that set_log was given {}",
            error.message()
        ));
    }
}

unsafe extern "C" fn drop_log(log: *mut c_void) {
    without_panics(|| {
        // SAFETY: the library drops what set_log has made once, when nobody uses it any more.
        drop(unsafe { Box::from_raw(log.cast::<Log>()) });
        Ok(())
    })
    .ok();
}

/// Whether the library looks every handle up before it uses it; see [`set_handle_checks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum HandleChecks {
    /// Not; only its kind is looked at.
    Off = sys::SWV_CHECKS_OFF,
    /// One that was freed, is of another kind or never was one is an error. As SWV_CHECK_HANDLES=1 in
    /// the environment.
    Report = sys::SWV_CHECKS_REPORT,
    /// It ends the process there. As SWV_CHECK_HANDLES=abort.
    Abort = sys::SWV_CHECKS_ABORT,
}

/// Whether handles are looked up, from now on, in the whole process. This crate's own types cannot get
/// it wrong; this is for programs that use the C interface besides, and for
/// [`live_handles`](crate::live_handles). Of a handle that was made without checks only the kind is
/// looked at.
///
/// ```
/// use shardweave::{live_handles, set_handle_checks, HandleChecks, Tensor};
/// set_handle_checks(HandleChecks::Report)?;
/// let before = live_handles().unwrap();
/// let x = Tensor::ones(&[2])?;
/// assert_eq!(live_handles(), Some(before + 1));
/// drop(x);
/// assert_eq!(live_handles(), Some(before));
/// # Ok::<(), shardweave::Error>(())
/// ```
pub fn set_handle_checks(checks: HandleChecks) -> Result<()> {
    call!(swv_set_handle_checks(checks as i32))
}

/// Seeds the random numbers of plain tensors: one generator for the process, whatever the rank.
pub fn manual_seed(seed: u64) -> Result<()> {
    call!(swv_seed(seed))
}

/// Threads that one operator may use, from now on, in every thread of the process.
pub fn set_num_threads(num_threads: usize) -> Result<()> {
    call!(swv_set_num_threads(count(num_threads).of("set_num_threads")?))
}

/// "0.4.0; LibTorch 2.11.0; backends inproc, gloo, counting". An error if there is no library that
/// this crate can use.
pub fn build_info() -> Result<String> {
    ready("swv_build_info")?;
    // SAFETY: no arguments; the text lives as long as the library.
    Ok(unsafe { string_from(sys::swv_build_info()) })
}

/// How many handles there are of those that were made with checks ([`set_handle_checks`]); None
/// without checks. For tests that look for leaks.
pub fn live_handles() -> Option<i64> {
    // Without a library there are none.
    ready("swv_live_handles").ok()?;
    // SAFETY: no arguments.
    let live = unsafe { sys::swv_live_handles() };
    (live >= 0).then_some(live)
}
