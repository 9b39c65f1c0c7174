//! Compares every declaration with the header, and every layout and number with what the C compiler
//! makes of it. After a change of the header: `bindings/rust/generate.sh`.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write;
use std::fs;
use std::mem::{size_of, MaybeUninit};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::addr_of;
use std::slice;

use shardweave_sys::*;

const BINDINGS: &str = DECLARATIONS;

fn header_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../capi")
}

/// Without comments and preprocessor lines.
fn header() -> String {
    let text = fs::read_to_string(header_folder().join("shardweave.h")).unwrap();
    let mut code = String::new();
    for (i, part) in text.split("/*").enumerate() {
        code += if i == 0 { part } else { part.split_once("*/").expect("comments end").1 };
    }
    let lines = code.lines().map(|line| line.split("//").next().unwrap());
    lines.filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n")
}

fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

// --- version -----------------------------------------------------------------------------------

/// A crate X.Y.Z is for the library X.Y.
#[test]
fn the_crates_are_of_the_version_that_they_declare() {
    let declared = format!("{SWV_VERSION_MAJOR}.{SWV_VERSION_MINOR}.");
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for name in ["shardweave-sys", "shardweave"] {
        let text = fs::read_to_string(crates.join(name).join("Cargo.toml")).unwrap();
        let line = text.lines().find(|line| line.starts_with("version = ")).unwrap();
        assert!(line.starts_with(&format!("version = \"{declared}")), "{name}: {line}");
    }
    let wanted = format!("path = \"../shardweave-sys\", version = \"{declared}");
    let text = fs::read_to_string(crates.join("shardweave/Cargo.toml")).unwrap();
    assert!(text.contains(&wanted), "shardweave: wanted {wanted}");
}

// --- functions ----------------------------------------------------------------------------------

/// "const swv_tensor* const* inputs" -> ("inputs", "*const *const swv_tensor").
fn rust_parameter(c: &str) -> (String, String) {
    let spaced = c.replace('*', " * ");
    let mut tokens: Vec<&str> =
        spaced.split_whitespace().filter(|token| *token != "struct").collect();
    let name = match tokens.pop().expect("a parameter has a name") {
        keyword @ ("type" | "self" | "in" | "as") => format!("{keyword}_"),
        name => name.to_owned(),
    };
    (name, rust_type(&tokens))
}

fn rust_type(tokens: &[&str]) -> String {
    let mut result = String::new();
    let mut is_const = false;
    for token in tokens {
        match *token {
            "const" => is_const = true,
            "*" => {
                result = format!("*{} {result}", if is_const { "const" } else { "mut" });
                is_const = false;
            }
            "int32_t" => result = "i32".into(),
            "int64_t" => result = "i64".into(),
            "uint64_t" => result = "u64".into(),
            "size_t" => result = "usize".into(),
            "double" => result = "f64".into(),
            "char" => result = "::std::os::raw::c_char".into(),
            "void" => result = "::std::os::raw::c_void".into(),
            name => result = name.into(),
        }
    }
    result
}

/// "(a: i32, b: *mut swv_mesh) -> *mut swv_status", from the tokens of the result and the
/// parameters.
fn rust_signature(result: &[&str], parameters: &str) -> String {
    // Without the parenthesis that ends them.
    let parameters = parameters.trim();
    let parameters = parameters.strip_suffix(')').unwrap_or(parameters).trim();
    let parameters: Vec<String> = match parameters {
        "void" => Vec::new(),
        list => {
            list.split(',').map(rust_member).map(|(name, rust)| format!("{name}: {rust}")).collect()
        }
    };
    let result = match rust_type(result).as_str() {
        "::std::os::raw::c_void" => String::new(),
        other => format!(" -> {other}"),
    };
    format!("({}){result}", parameters.join(", "))
}

/// By name: the declaration in Rust, with "must_use" if it is.
fn functions_of_header() -> BTreeMap<String, String> {
    let code = header();
    let declarations =
        code.split("SWV_API ").skip(1).map(|rest| words(rest.split(';').next().unwrap()));
    let mut functions = BTreeMap::new();
    for declaration in declarations {
        let must_use = declaration.starts_with("SWV_MUST_USE ");
        let declaration = declaration.trim_start_matches("SWV_MUST_USE ");
        let (front, parameters) = declaration.split_once('(').unwrap();
        let front = front.replace('*', " * ");
        let mut front: Vec<&str> = front.split_whitespace().collect();
        let name = front.pop().unwrap().to_owned();
        let signature = rust_signature(&front, parameters);
        let must_use = if must_use { "must_use " } else { "" };
        let rust = format!("{must_use}fn {name}{signature}");
        functions.insert(name, rust);
    }
    functions
}

fn functions_of_bindings() -> BTreeMap<String, String> {
    let mut functions = BTreeMap::new();
    for block in BINDINGS.split("extern \"C\" {\n").skip(1) {
        let block = block.split("\n}").next().unwrap();
        // Types of callbacks look like such a block, but declare nothing.
        let (attributes, declaration) = match block.split_once("pub fn ") {
            Some(parts) => parts,
            None => continue,
        };
        let declaration =
            words(declaration.trim_end_matches(';')).replace("( ", "(").replace(", )", ")");
        let name = declaration.split('(').next().unwrap().to_owned();
        let must_use = if attributes.contains("#[must_use]") { "must_use " } else { "" };
        functions.insert(name, format!("{must_use}fn {declaration}"));
    }
    functions
}

#[test]
fn functions_are_those_of_the_header() {
    let (header, bindings) = (functions_of_header(), functions_of_bindings());
    assert!(header.len() > 150, "{} functions: the header is not read well", header.len());
    for (name, declaration) in &header {
        assert_eq!(Some(declaration), bindings.get(name), "{name}: run bindings/rust/generate.sh");
    }
    for name in bindings.keys() {
        assert!(header.contains_key(name), "{name} is not in the header");
    }
}

// --- types of members and callbacks -----------------------------------------------------------

/// "swv_status* (*start)(void* self)" -> ("start", "Option<unsafe extern "C" fn(...) -> ...>").
fn rust_member(c: &str) -> (String, String) {
    let (result, rest) = match c.split_once("(*") {
        Some(parts) => parts,
        None => return rust_parameter(c),
    };
    let (name, parameters) = rest.split_once(")(").unwrap();
    let result = result.replace('*', " * ");
    let signature = rust_signature(&result.split_whitespace().collect::<Vec<_>>(), parameters);
    (name.to_owned(), format!("::std::option::Option<unsafe extern \"C\" fn{signature}>"))
}

/// Without blanks and the commas that rustfmt adds.
fn dense(text: &str) -> String {
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    text.trim_end_matches([',', ';']).replace(",)", ")").replace(",>", ">")
}

#[test]
fn members_have_the_types_of_the_header() {
    let code = header();
    let mut compared = 0;
    for block in code.split("typedef struct ").skip(1) {
        let (name, members) = match block.split_once(" {") {
            Some((name, rest)) if !name.contains(';') => {
                (name, rest.split("} swv_").next().unwrap())
            }
            _ => continue, // an opaque one
        };
        let start = format!("pub struct {name} {{\n");
        let rust =
            BINDINGS.split(&start).nth(1).unwrap_or_else(|| panic!("{name} is not declared"));
        let lines = rust.split("\n}").next().unwrap().lines();
        let rust: String = lines.filter(|line| !line.trim().starts_with("#[")).collect();
        let rust: Vec<(String, String)> = rust
            .split("pub ")
            .skip(1)
            .filter_map(|member| member.split_once(": "))
            .map(|(name, rust)| (name.to_owned(), dense(rust)))
            .collect();
        // The union in the middle of swv_value has layouts_are_those_of_c.
        let members = members.split("union {").next().unwrap();
        let c = members.split(';').map(words).filter(|member| !member.is_empty());
        let c: Vec<String> = c.collect();
        if !block.split("} swv_").next().unwrap().contains("union {") {
            assert_eq!(c.len(), rust.len(), "members of {name}");
        }
        for (member, (rust_name, rust)) in c.into_iter().zip(rust) {
            let (name_here, wanted) = rust_member(&member);
            assert_eq!(
                (name_here.trim_end_matches('_'), dense(&wanted)),
                (rust_name.trim_end_matches('_'), rust),
                "{name}"
            );
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared} members: the header is not read well");
    // The callbacks with a name.
    for name in ["swv_rank_fn", "swv_log_fn", "swv_run_fn"] {
        let start = format!("(*{name})");
        let line = code.split("typedef ").find(|text| text.contains(&start)).unwrap();
        let (_, wanted) = rust_member(&words(line.split(';').next().unwrap()));
        let start = format!("pub type {name} = ");
        let rust = BINDINGS.split(&start).nth(1).unwrap().split(';').next().unwrap();
        assert_eq!(dense(&wanted), dense(rust));
    }
}

// --- structs ------------------------------------------------------------------------------------

/// "struct.field" -> offset and size; "struct" -> 0 and its size.
type Layouts = BTreeMap<String, (usize, usize)>;

macro_rules! layouts {
    ($($type:ident { $($field:ident),* })*) => {
        fn layouts_of_rust() -> Layouts {
            let mut all = Layouts::new();
            $({
                let value = MaybeUninit::<$type>::uninit();
                let base = value.as_ptr();
                all.insert(stringify!($type).to_owned(), (0, size_of::<$type>()));
                $(
                    // SAFETY: takes an address inside of `value`, and reads nothing.
                    let field = unsafe { addr_of!((*base).$field) };
                    let name = format!("{}.{}", stringify!($type), stringify!($field));
                    all.insert(name, (field as usize - base as usize, size_behind(field)));
                )*
            })*
            all
        }
    };
}

fn size_behind<T>(_: *const T) -> usize {
    size_of::<T>()
}

layouts! {
    swv_device { type_, index }
    swv_world_options {
        struct_size, backend, network_interface, timeout_ms, device, device_backend
    }
    swv_rendezvous { struct_size, rank, world_size, file, host, port, local_rank, run }
    swv_buffer { struct_size, data, count, dtype, device, reserved, stream }
    swv_collective {
        struct_size, kind, reduce_op, peer, message_tag, in_, out, in_counts, out_counts,
        num_counts, timeout_ms, tag
    }
    swv_call_options { timeout_ms, tag }
    swv_backend_call {
        struct_size, kind, reduce_op, peer, message_tag, in_, out, in_counts, out_counts, sequence,
        timeout_ms, tag, fingerprint, coalesced
    }
    swv_group { struct_size, name, rank, num_ranks, world_ranks }
    swv_backend {
        struct_size, name, implements, self_, start, done, wait, subgroup, abort, drop, device,
        can_reduce, wait_on, copy_to_host, copy_to_device, begin_coalescing, end_coalescing
    }
    swv_device_backend { struct_size, self_, connect, drop }
    swv_mesh_dim { name, size }
    swv_placement {
        struct_size, kind, dim, reduce_op, reserved, split_factor, sizes, num_sizes
    }
    swv_named_placement { mesh_dim, placement }
    swv_tensor_options { struct_size, dtype, requires_grad, device, mesh, layout }
    swv_distribute_options { struct_size, source, reserved }
    swv_value { kind, reserved, as_ }
    swv_value__bindgen_ty_1 {
        tensor, integer, number, complex_number, string, dtype, device, tensors, bools, ints, floats
    }
    swv_value__bindgen_ty_1__bindgen_ty_1 { real, imaginary }
    swv_value__bindgen_ty_1__bindgen_ty_2 { data, size }
    swv_value__bindgen_ty_1__bindgen_ty_3 { data, size }
    swv_value__bindgen_ty_1__bindgen_ty_4 { data, size }
    swv_value__bindgen_ty_1__bindgen_ty_5 { data, size }
    swv_value__bindgen_ty_1__bindgen_ty_6 { data, size }
    swv_backward_options { struct_size, retain_graph, create_graph, allow_unused }
    swv_function_call {
        struct_size, context, mode, reserved, inputs, num_inputs, outputs, num_outputs,
        module, fqn
    }
    swv_function { struct_size, name, user_data, forward, backward, drop }
    swv_link_cost { latency, bandwidth }
    swv_device_cost { struct_size, flops, bandwidth }
    swv_segment { struct_size, name, user_data, forward, drop }
    swv_patch { struct_size, name, user_data, forward, drop }
    swv_random_state { struct_size, seed, offset }
    swv_sgd_options { struct_size, lr, momentum, dampening, weight_decay, nesterov }
    swv_adam_options { struct_size, lr, beta1, beta2, eps, weight_decay, amsgrad }
    swv_adamw_options { struct_size, lr, beta1, beta2, eps, weight_decay, amsgrad }
    swv_lion_options { struct_size, lr, beta1, beta2, weight_decay }
    swv_adafactor_options {
        struct_size, lr, beta2_decay, eps1, eps2, clip_threshold, weight_decay
    }
    swv_muon_options {
        struct_size, lr, weight_decay, momentum, ns_a, ns_b, ns_c, eps, ns_steps, ns_dtype,
        lr_scale, nesterov
    }
    swv_schedule { struct_size, steps, decay, warmup, gamma, floor, shape }
    swv_grad_scaler_options {
        struct_size, init_scale, growth_factor, backoff_factor, growth_interval
    }
    swv_zero_options { struct_size, mesh_dim, stage, bucket_bytes }
    swv_clip_options { struct_size, norm_type, error_if_nonfinite }
    swv_materialize_options { struct_size, fqns, values, num_values, seed, has_seed }
    swv_fully_shard_options {
        struct_size, mesh_dim, units, num_units, unit_types, num_unit_types, min_numel, source,
        reshard_after_forward, param_dtype, reduce_dtype, output_dtype, equal_segments,
        reshard_after_forward_ranks, compute_device
    }
    swv_fully_shard_counters {
        struct_size, gathers, prefetches, wrong_prefetches, reduce_scatters, gathered_bytes,
        peak_gathered_bytes
    }
    swv_gradient_bucket {
        struct_size, index, flat, gradients, parameters, num_gradients, comm, is_discarded
    }
    swv_gradient_hook { struct_size, name, user_data, begin, finish, drop }
    swv_power_sgd_options {
        struct_size, columns, start_iteration, min_compression_rate, seed, error_feedback,
        warm_start
    }
    swv_grad_sync_options { struct_size, bucket_bytes, reduce_dtype, hook, power_sgd }
    swv_data_parallel_options { struct_size, mesh_dim, source, reserved, sync }
    swv_verify_options { struct_size, tolerance, forward_only, copy_values }
    swv_plan_auto_options {
        struct_size, tp_mesh_dim, memory_limit, optimizer_states, heads, max_evaluations,
        sequence_dim
    }
    swv_loader_options {
        struct_size, seq, batch, seed, epochs, mesh, layout, part, num_parts, prefetch, in_order,
        drop_last, reserved
    }
    swv_checkpointer_options { struct_size, keep_last, timeout_ms, skip_if_busy, copy_beside_training }
    swv_load_options { struct_size, allow_missing, allow_unexpected, cast, verify }
    swv_load_pretrained_options {
        struct_size, ignored, num_ignored, allow_missing, allow_unexpected, allow_unknown
    }
    swv_save_pretrained_options { struct_size, ignored, num_ignored, max_file_bytes, dtype }
    swv_comm_counter { calls, bytes }
    swv_dispatch_counters {
        struct_size, operators, cache_misses, implicit_redistributions, gathered_operators,
        remembered_uses, remembered_bytes, unsharded_weights
    }
}

/// How C calls a type or a field that bindgen had to name itself.
fn in_c(name: &str) -> String {
    let (kind, field) = name.split_once('.').unwrap_or((name, ""));
    let field = match field {
        "type_" | "self_" | "in_" | "as_" => field.trim_end_matches('_'),
        _ => field,
    };
    let members = ["complex_number", "string", "tensors", "bools", "ints", "floats"];
    let kind = match kind.strip_prefix("swv_value__bindgen_ty_1") {
        None => kind.to_owned(),
        Some("") => "__typeof__(((swv_value*)NULL)->as)".to_owned(),
        Some(rest) => {
            let number: usize = rest.trim_start_matches("__bindgen_ty_").parse().unwrap();
            format!("__typeof__(((swv_value*)NULL)->as.{})", members[number - 1])
        }
    };
    match field {
        "" => format!("0, sizeof({kind})"),
        field => format!("offsetof({kind}, {field}), sizeof((({kind}*)NULL)->{field})"),
    }
}

/// What a C program with this body of main() prints.
fn run_c(name: &str, body: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (source, program) = (folder.join(format!("{name}.c")), folder.join(name));
    let text = format!(
        "#include <shardweave.h>\n#include <stdio.h>\nint main(void) {{\n{body}return 0;\n}}\n"
    );
    fs::write(&source, text).unwrap();
    let compiler = env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let compiled = Command::new(compiler)
        .args(["-std=gnu11", "-I"])
        .arg(header_folder())
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .status()
        .expect("there is a C compiler");
    assert!(compiled.success(), "{} does not compile", source.display());
    let output = Command::new(&program).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn layouts_are_those_of_c() {
    let rust = layouts_of_rust();
    let mut body = String::new();
    for name in rust.keys() {
        writeln!(body, "printf(\"{name} %zu %zu\\n\", {});", in_c(name)).unwrap();
    }
    let mut c = Layouts::new();
    for line in run_c("layouts", &body).lines() {
        let mut fields = line.split(' ');
        let mut next = || fields.next().unwrap();
        c.insert(next().to_owned(), (next().parse().unwrap(), next().parse().unwrap()));
    }
    assert_eq!(rust, c);
}

#[test]
fn the_table_has_every_struct_and_field() {
    let table = layouts_of_rust();
    let mut found = 0;
    for kind in ["pub struct ", "pub union "] {
        for block in BINDINGS.split(kind).skip(1) {
            let (name, rest) = block.split_once(" {").unwrap();
            let fields = rest.split("\n}").next().unwrap();
            for line in fields.lines().map(str::trim) {
                if let Some((field, _)) = line.strip_prefix("pub ").and_then(|f| f.split_once(':'))
                {
                    let field = format!("{name}.{field}");
                    assert!(table.contains_key(&field), "{field} is not compared");
                    found += 1;
                }
            }
        }
    }
    assert_eq!(table.keys().filter(|name| name.contains('.')).count(), found);
    // Opaque ones have no fields; one of these, DLPack's, is no typedef of the header.
    let opaque = BINDINGS.matches("_unused: [u8; 0]").count() - 1;
    let structs = table.keys().filter(|name| !name.contains('.') && !name.contains("__"));
    assert_eq!(structs.count() + opaque, header().matches("typedef struct swv_").count());
}

// --- numbers ------------------------------------------------------------------------------------

#[test]
fn numbers_are_those_of_c() {
    let mut rust = BTreeMap::new();
    for line in BINDINGS.lines() {
        if let Some((name, value)) =
            line.strip_prefix("pub const SWV_").and_then(|rest| rest.split_once(": i32 = "))
        {
            rust.insert(format!("SWV_{name}"), value.trim_end_matches(';').to_owned());
        }
    }
    // Every enumerator of the header is there.
    let code = header();
    let mut enumerators = 0;
    for block in code.split("enum {").skip(1) {
        for entry in block.split('}').next().unwrap().split(',') {
            let name = words(entry.split('=').next().unwrap());
            if !name.is_empty() {
                assert!(rust.contains_key(&name), "{name} is not declared");
                enumerators += 1;
            }
        }
    }
    assert!(enumerators > 70, "{enumerators} enumerators: the header is not read well");
    let mut body = String::new();
    for name in rust.keys() {
        writeln!(body, "printf(\"{name} %d\\n\", (int)({name}));").unwrap();
    }
    let c: BTreeMap<String, String> = run_c("numbers", &body)
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    assert_eq!(rust, c);
    // What is no int is compared as what it is.
    let body = "printf(\"%d\", _Generic(SWV_TICKET_DONE, uint64_t: 1, default: 0));\n\
                printf(\" %llu\", (unsigned long long)SWV_TICKET_DONE);\n";
    assert_eq!(run_c("ticket", body), format!("1 {SWV_TICKET_DONE}"));
    // SAFETY: no arguments.
    assert_eq!(unsafe { swv_version() }, SWV_VERSION, "the library is of another version");
}

// --- initializers -------------------------------------------------------------------------------

/// The bytes of each field, without the padding between them.
fn bytes_of<T>(value: &T, name: &str) -> String {
    let start = (value as *const T).cast::<u8>();
    let mut text = String::new();
    for (field, (offset, size)) in layouts_of_rust() {
        if field.strip_prefix(name).map_or(false, |rest| rest.starts_with('.')) {
            // SAFETY: a field of `value`, all of whose bytes are initialized.
            let bytes = unsafe { slice::from_raw_parts(start.add(offset), size) };
            write!(text, " {offset}:").unwrap();
            bytes.iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
        }
    }
    text
}

macro_rules! initializers {
    ($($name:ident: $type:ident),* $(,)?) => {{
        let mut rust = String::new();
        let mut body = String::from("const unsigned char* p;\n");
        $(
            writeln!(rust, "{}{}", stringify!($name), bytes_of(&$name, stringify!($type))).unwrap();
            let (kind, name) = (stringify!($type), stringify!($name));
            writeln!(body, "static {kind} {name}_value = {name};").unwrap();
            writeln!(body, "p = (const unsigned char*)&{name}_value;\nprintf(\"{name}\");").unwrap();
            for (field, (offset, size)) in layouts_of_rust() {
                if field.starts_with(concat!(stringify!($type), ".")) {
                    writeln!(body, "printf(\" {offset}:\");").unwrap();
                    write!(body, "for (int i = 0; i < {size}; ++i) ").unwrap();
                    writeln!(body, "printf(\"%02x\", p[{offset} + i]);").unwrap();
                }
            }
            body += "printf(\"\\n\");\n";
        )*
        let count = [$(stringify!($name)),*].len();
        (rust, body, count)
    }};
}

#[test]
fn initializers_are_those_of_c() {
    let (rust, body, count) = initializers!(
        SWV_WORLD_OPTIONS_INIT: swv_world_options,
        SWV_RENDEZVOUS_INIT: swv_rendezvous,
        SWV_BUFFER_INIT: swv_buffer,
        SWV_COLLECTIVE_INIT: swv_collective,
        SWV_CALL_OPTIONS_INIT: swv_call_options,
        SWV_PLACEMENT_INIT: swv_placement,
        SWV_RANDOM_STATE_INIT: swv_random_state,
        SWV_GROUP_INIT: swv_group,
        SWV_BACKEND_INIT: swv_backend,
        SWV_DEVICE_BACKEND_INIT: swv_device_backend,
        SWV_TENSOR_OPTIONS_INIT: swv_tensor_options,
        SWV_DISTRIBUTE_OPTIONS_INIT: swv_distribute_options,
        SWV_BACKWARD_OPTIONS_INIT: swv_backward_options,
        SWV_FUNCTION_INIT: swv_function,
        SWV_DEVICE_COST_INIT: swv_device_cost,
        SWV_SEGMENT_INIT: swv_segment,
        SWV_PATCH_INIT: swv_patch,
        SWV_SGD_OPTIONS_INIT: swv_sgd_options,
        SWV_ADAM_OPTIONS_INIT: swv_adam_options,
        SWV_ADAMW_OPTIONS_INIT: swv_adamw_options,
        SWV_LION_OPTIONS_INIT: swv_lion_options,
        SWV_ADAFACTOR_OPTIONS_INIT: swv_adafactor_options,
        SWV_MUON_OPTIONS_INIT: swv_muon_options,
        SWV_SCHEDULE_INIT: swv_schedule,
        SWV_GRAD_SCALER_OPTIONS_INIT: swv_grad_scaler_options,
        SWV_ZERO_OPTIONS_INIT: swv_zero_options,
        SWV_CLIP_OPTIONS_INIT: swv_clip_options,
        SWV_DISPATCH_COUNTERS_INIT: swv_dispatch_counters,
        SWV_MATERIALIZE_OPTIONS_INIT: swv_materialize_options,
        SWV_FULLY_SHARD_OPTIONS_INIT: swv_fully_shard_options,
        SWV_FULLY_SHARD_COUNTERS_INIT: swv_fully_shard_counters,
        SWV_GRADIENT_HOOK_INIT: swv_gradient_hook,
        SWV_POWER_SGD_OPTIONS_INIT: swv_power_sgd_options,
        SWV_GRAD_SYNC_OPTIONS_INIT: swv_grad_sync_options,
        SWV_DATA_PARALLEL_OPTIONS_INIT: swv_data_parallel_options,
        SWV_VERIFY_OPTIONS_INIT: swv_verify_options,
        SWV_PLAN_AUTO_OPTIONS_INIT: swv_plan_auto_options,
        SWV_LOADER_OPTIONS_INIT: swv_loader_options,
        SWV_CHECKPOINTER_OPTIONS_INIT: swv_checkpointer_options,
        SWV_LOAD_OPTIONS_INIT: swv_load_options,
        SWV_LOAD_PRETRAINED_OPTIONS_INIT: swv_load_pretrained_options,
        SWV_SAVE_PRETRAINED_OPTIONS_INIT: swv_save_pretrained_options,
    );
    assert_eq!(rust, run_c("initializers", &body));
    // All bytes of an empty value are 0, as those of a static object that is not initialized.
    let none = "static swv_value none = SWV_NONE;\n\
                const unsigned char* p = (const unsigned char*)&none;\n\
                for (size_t i = 0; i < sizeof none; ++i) printf(\"%02x\", p[i]);\n";
    // SAFETY: no padding: a kind, `reserved` and two doubles, all of which are set.
    let rust = unsafe {
        slice::from_raw_parts((&SWV_NONE as *const swv_value).cast::<u8>(), size_of::<swv_value>())
    };
    let rust: String = rust.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(rust, run_c("none", none));
    let text = fs::read_to_string(header_folder().join("shardweave.h")).unwrap();
    let defined = text.lines().filter(|line| {
        line.strip_prefix("#define SWV_")
            .map_or(false, |l| l.split(' ').next().unwrap().ends_with("_INIT"))
    });
    assert_eq!(defined.count(), count, "initializers of the header");
}
