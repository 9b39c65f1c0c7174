//! Shardweave's C interface, as it is: see `capi/shardweave.h`, whose comments are here too.
//! Everything is unsafe; the crate `shardweave` is for programs.
//!
//! `bindings.rs` is what bindgen makes of the header. After a change of the header run
//! `bindings/rust/generate.sh`; until then `tests/declarations.rs` fails.
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

#[cfg(feature = "load-dynamic")]
mod dynamic;
#[allow(dead_code)] // the build script has uses for all of it
mod version;

/// The declarations as text, for tests that go over all of them.
#[doc(hidden)]
pub const DECLARATIONS: &str = include_str!("bindings.rs");

use core::mem::size_of;
use core::ptr;

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

/// The header's initializers: each struct as `SWV_..._INIT` leaves it, and the bytes of padding
/// behind its last member, which `struct_size` does not count.
macro_rules! initializers {
    ($(
        $name:ident: $type:ident, padding $padding:literal { $($field:ident: $value:expr),* $(,)? }
    )*) => {
        $(pub const $name: $type = $type {
            struct_size: size_of::<$type>() - $padding,
            $($field: $value),*
        };)*
    };
}

initializers! {
    SWV_WORLD_OPTIONS_INIT: swv_world_options, padding 0 {
        backend: ptr::null(), network_interface: ptr::null(), timeout_ms: 0,
    }
    SWV_RENDEZVOUS_INIT: swv_rendezvous, padding 0 {
        rank: 0, world_size: 1, file: ptr::null(), host: ptr::null(), port: 0, local_rank: -1,
        run: ptr::null(),
    }
    SWV_CALL_OPTIONS_INIT: swv_call_options, padding 0 { timeout_ms: 0, tag: ptr::null() }
    SWV_GROUP_INIT: swv_group, padding 0 {
        name: ptr::null(), rank: 0, num_ranks: 1, world_ranks: ptr::null(),
    }
    SWV_BACKEND_INIT: swv_backend, padding 0 {
        name: ptr::null(), implements: 0, self_: ptr::null_mut(), start: None, done: None,
        wait: None, subgroup: None, abort: None, drop: None,
    }
    SWV_TENSOR_OPTIONS_INIT: swv_tensor_options, padding 0 {
        dtype: 0, requires_grad: 0, mesh: ptr::null(), layout: ptr::null(),
    }
    SWV_DISTRIBUTE_OPTIONS_INIT: swv_distribute_options, padding 0 { source: 0 }
    SWV_BACKWARD_OPTIONS_INIT: swv_backward_options, padding 4 {
        retain_graph: 0, create_graph: 0, allow_unused: 0,
    }
    SWV_FUNCTION_INIT: swv_function, padding 0 {
        name: ptr::null(), user_data: ptr::null_mut(), forward: None, backward: None, drop: None,
    }
    SWV_DEVICE_COST_INIT: swv_device_cost, padding 0 { flops: 5e10, bandwidth: 1e10 }
    SWV_SEGMENT_INIT: swv_segment, padding 0 {
        name: ptr::null(), user_data: ptr::null_mut(), forward: None, drop: None,
    }
    SWV_SGD_OPTIONS_INIT: swv_sgd_options, padding 4 {
        lr: 1e-3, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: 0,
    }
    SWV_ADAMW_OPTIONS_INIT: swv_adamw_options, padding 4 {
        lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2, amsgrad: 0,
    }
    SWV_CLIP_OPTIONS_INIT: swv_clip_options, padding 4 { norm_type: 2.0, error_if_nonfinite: 0 }
    SWV_DISPATCH_COUNTERS_INIT: swv_dispatch_counters, padding 0 {
        operators: 0, cache_misses: 0, implicit_redistributions: 0, gathered_operators: 0,
        remembered_uses: 0, remembered_bytes: 0, unsharded_weights: 0,
    }
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
