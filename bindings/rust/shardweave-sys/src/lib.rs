//! Shardweave's C interface, as it is: see `capi/shardweave.h`, whose comments are here too.
//! Everything is unsafe; the crate `shardweave` is for programs.
//!
//! `bindings.rs` is what bindgen makes of the header. After a change of the header run
//! `bindings/rust/generate.sh`; until then `tests/declarations.rs` fails.
#![allow(non_camel_case_types, non_upper_case_globals)]
// The header's comments are no Markdown.
#![allow(rustdoc::broken_intra_doc_links, rustdoc::invalid_html_tags, rustdoc::bare_urls)]

#[rustfmt::skip]
mod bindings;
pub use bindings::*;

use core::mem::size_of;
use core::ptr;

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
        remembered_uses: 0, remembered_bytes: 0,
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
