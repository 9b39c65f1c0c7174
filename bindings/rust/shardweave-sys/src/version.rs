// Versions as SWV_VERSION has them; for the crate and for its build script.

/// "0.1.0".
pub(crate) fn version_text(version: i32) -> String {
    format!("{}.{}.{}", version / 1_000_000, version / 1000 % 1000, version % 1000)
}

/// Whether a library of version `library` has all that declarations of version `declared` say. A
/// minor version adds, and before 1.0 it may also break; a patch does neither.
pub(crate) fn is_compatible(declared: i32, library: i32) -> bool {
    let parts = |version: i32| (version / 1_000_000, version / 1000 % 1000);
    let ((major, minor), (library_major, library_minor)) = (parts(declared), parts(library));
    library > 0
        && library_major == major
        && if major == 0 { library_minor == minor } else { library_minor >= minor }
}

/// None if they fit together; else what is wrong.
pub(crate) fn mismatch(declared: i32, library: i32, place: &str) -> Option<String> {
    if is_compatible(declared, library) {
        return None;
    }
    let (major, minor) = (declared / 1_000_000, declared / 1000 % 1000);
    let wanted = match major {
        0 => format!("0.{minor}.x"),
        _ => format!("{major}.{minor} or a later {major}.x"),
    };
    Some(format!(
        "{place} is of version {}; this crate declares version {}: wanted {wanted}",
        version_text(library),
        version_text(declared)
    ))
}

/// What the loader looks for: before 1.0 every minor version is an interface of its own.
pub(crate) fn soname(declared: i32) -> String {
    match (declared / 1_000_000, declared / 1000 % 1000) {
        (0, minor) => format!("libshardweave.so.0.{minor}"),
        (major, _) => format!("libshardweave.so.{major}"),
    }
}
