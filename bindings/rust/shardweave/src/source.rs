//! Where the user's code calls what communicates, for traces. Nothing is done while there is none.

use std::cell::RefCell;
use std::ffi::CString;
use std::panic::Location;

use crate::mesh::{Mesh, Scope};

thread_local! {
    /// Meshes of this thread's ranks with a trace on them; each as often as it has one.
    static TRACED: RefCell<Vec<(u64, Mesh)>> = const { RefCell::new(Vec::new()) };
}

/// While it lives, a mesh has a trace. It belongs to its rank's thread, as its trace does.
pub(crate) struct Traced(u64);

impl Traced {
    pub(crate) fn new(mesh: &Mesh) -> Traced {
        TRACED.with(|traced| {
            let mut traced = traced.borrow_mut();
            let number = traced.last().map_or(0, |(last, _)| last + 1);
            traced.push((number, mesh.clone()));
            Traced(number)
        })
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // Not there any more while the thread ends.
        let _ = TRACED.try_with(|traced| {
            let gone = {
                let mut traced = traced.borrow_mut();
                let at = traced.iter().position(|(number, _)| *number == self.0);
                at.map(|at| traced.remove(at))
            };
            drop(gone);
        });
    }
}

/// Until these end, traces say that what runs was called at the caller of who calls this.
#[track_caller]
pub(crate) fn called_here() -> Vec<Scope> {
    let place = Location::caller(); // not of a closure
    TRACED.with(|traced| {
        let traced = traced.borrow();
        if traced.is_empty() {
            return Vec::new(); // allocates nothing
        }
        let source = CString::new(format!("{}:{}", place.file(), place.line()));
        let source = source.unwrap_or_default();
        // A trace is worth no error.
        traced.iter().filter_map(|(_, mesh)| mesh.enter_source(&source).ok()).collect()
    })
}
