//! Shardweave's C interface, as it is: see `capi/shardweave.h`, whose comments are here too.
//! Everything is unsafe; the crate `shardweave` is for programs.
//!
//! `bindings.rs` is what bindgen makes of the header, `initializers.rs` what it has of its macros.
//! After a change of the header run `bindings/rust/generate.sh`; until then
//! `tests/declarations.rs` fails.
#![allow(non_camel_case_types, non_upper_case_globals)]
// The header's comments are no Markdown.
#![allow(rustdoc::broken_intra_doc_links, rustdoc::invalid_html_tags, rustdoc::bare_urls)]

#[cfg(not(feature = "load-dynamic"))]
#[rustfmt::skip]
mod bindings;
/// The same declarations, whose functions call through a table: written by build.rs.
#[cfg(feature = "load-dynamic")]
#[allow(clippy::missing_safety_doc, clippy::too_many_arguments)]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}
pub use bindings::*;

#[rustfmt::skip]
mod initializers;
pub use initializers::*;

#[cfg(feature = "load-dynamic")]
mod dynamic;
#[allow(dead_code)] // the build script has uses for all of it
mod version;

/// The declarations as text, for tests that go over all of them.
#[doc(hidden)]
pub const DECLARATIONS: &str = include_str!("bindings.rs");

/// Whether the library is there and of a version that has what is declared here; the error says
/// what is wrong. With the feature `load-dynamic` this is what loads it, the first time, and nothing
/// else may be called before.
pub fn load() -> Result<(), String> {
    #[cfg(feature = "load-dynamic")]
    dynamic::load()?;
    // SAFETY: no arguments; if it had to be loaded, it is.
    let version = unsafe { swv_version() };
    version::mismatch(SWV_VERSION, version, "libshardweave.so").map_or(Ok(()), Err)
}

pub const SWV_NONE: swv_value = swv_value {
    kind: SWV_VALUE_NONE,
    reserved: 0,
    as_: swv_value__bindgen_ty_1 {
        complex_number: swv_value__bindgen_ty_1__bindgen_ty_1 { real: 0.0, imaginary: 0.0 },
    },
};

/// `out_ticket` value of an operation that `start` has finished.
pub const SWV_TICKET_DONE: u64 = 0;

#[cfg(test)]
mod tests {
    use super::version::{is_compatible, mismatch, soname, version_text};

    #[test]
    fn which_versions_go_together() {
        for (declared, library, wanted) in [
            (1_000, 1_000, true),
            (1_000, 1_007, true), // patches fit both ways
            (1_007, 1_000, true),
            (1_000, 2_000, false), // before 1.0 a minor version may break
            (2_000, 1_000, false),
            (1_000_000, 1_003_000, true),
            (1_003_000, 1_002_999, false), // it lacks something
            (1_000_000, 2_000_000, false),
            (1_000, 1_001_000, false),
            (0, 0, false),
            (1_000, -1, false),
        ] {
            assert_eq!(is_compatible(declared, library), wanted, "{declared} and {library}");
            assert_eq!(mismatch(declared, library, "it").is_none(), wanted);
        }
        assert_eq!(version_text(12_034_005), "12.34.5");
        assert_eq!(
            (soname(1_000), soname(2_003_004)),
            ("libshardweave.so.0.1".to_owned(), "libshardweave.so.2".to_owned())
        );
        assert_eq!(
            mismatch(1_000, 2_000, "/lib/libshardweave.so").unwrap(),
            "/lib/libshardweave.so is of version 0.2.0; this crate declares version 0.1.0: wanted \
             0.1.x"
        );
        assert!(mismatch(1_002_000, 1_001_000, "it").unwrap().ends_with("1.2 or a later 1.x"));
    }
}
