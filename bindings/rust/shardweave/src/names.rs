//! The C interface's names as this crate's: its messages say who was called, and with which
//! argument, in words of C. Only errors come here.

/// Functions and types that do not follow the rule ([`of_rule`]).
const NAMES: [(&str, &str); 126] = [
    ("build_info", "build_info"),
    ("captured_step_create", "CapturedStep::capture"),
    ("checkpoint", "checkpoint"),
    ("checkpointer_create", "CheckpointerOptions::open"),
    ("clip_grad_norm", "clip_grad_norm"),
    ("comm_share", "Comm::with_timeout"),
    ("deferred_init", "deferred_init"),
    ("dtype", "DType"),
    ("find_checkpoint", "find_checkpoint"),
    ("finish_grad_sync", "finish_grad_sync"),
    ("forward", "Forward"),
    ("forward_begin", "Forward::run"),
    ("forward_end", "Forward::run"),
    ("full_params_end", "Module::full_params"),
    ("full_params_get", "FullParams::get"),
    ("function_apply", "apply"),
    ("function_context_original", "PatchCall::forward"),
    ("grad_scaler_create", "GradScaler::new"),
    ("grad_sync", "GradSync"),
    ("grad_sync_counts", "GradSync::counts"),
    ("grad_sync_create", "GradSync::new"),
    ("grad_sync_discard", "GradSync::discard"),
    ("grad_sync_no_sync", "GradSync::no_sync"),
    ("grad_sync_num_states", "GradSync::states"),
    ("grad_sync_set_states", "GradSync::set_states"),
    ("grad_sync_state", "GradSync::states"),
    ("gradients", "gradients"),
    ("layout_create", "Layout::new"),
    ("layout_create_named", "Layout::named"),
    ("layout_equal", "Layout::eq"),
    ("layout_mesh_ndim", "Layout::placements"),
    ("layout_placement", "Layout::placements"),
    ("layout_plan", "Layout::plan_to"),
    ("list_checkpoints", "list_checkpoints"),
    ("live_handles", "live_handles"),
    ("loader_create", "TokenLoader::new"),
    ("loader_next", "TokenLoader::next"),
    ("loader_num_samples", "TokenLoader::num_samples"),
    ("loader_position", "TokenLoader::position"),
    ("loader_set_position", "TokenLoader::set_position"),
    ("mesh_create", "World::device_mesh"),
    ("mesh_create_from_ranks", "World::device_mesh_of"),
    ("mesh_dim_name", "Mesh::dim_names"),
    ("mesh_enter_module", "Mesh::module_scope"),
    ("mesh_enter_source", "Mesh::trace"),
    ("mesh_equal", "Mesh::is_same"),
    ("mesh_ndim", "Mesh::dim_names"),
    ("mesh_parse", "World::parse_mesh"),
    ("mesh_share", "Mesh::clone"),
    ("mesh_use_random_state", "Mesh::random_scope"),
    ("module_buffer_is_persistent", "Module::buffers"),
    ("module_add_buffer", "Members::buffer"),
    ("module_add_child", "Members::forward"),
    ("module_add_parameter", "Members::parameter"),
    ("module_buffer", "ScriptModule::load"),
    ("module_call", "ScriptModule::call"),
    ("module_call_named", "ScriptModule::call_named"),
    ("module_child", "NativeModule::child"),
    ("module_create", "Module::distribute"),
    ("metrics_writer_create_events", "MetricsWriter::events"),
    ("metrics_writer_open_json_lines", "MetricsWriter::json_lines"),
    ("module_create_by_kind", "NativeModule::new"),
    ("module_dump", "debug::dump"),
    ("module_finish_grad_sync", "Module::finish_grad_sync"),
    ("module_forward", "Members::forward"),
    ("module_is_training", "ScriptModule::is_training"),
    ("module_list_communication", "debug::list_communication"),
    ("module_load", "ScriptModule::load"),
    ("module_materialize", "materialize"),
    ("module_memory", "debug::memory"),
    ("module_num_buffers", "ScriptModule::load"),
    ("module_num_parameters", "ScriptModule::load"),
    ("module_set_sharding", "Module::sharding"),
    ("module_parameter", "ScriptModule::load"),
    ("module_patch", "NativeModule::patch"),
    ("module_train", "ScriptModule::train"),
    ("module_verify", "debug::verify"),
    ("optimizer_apply_schedule", "Schedule::apply_to"),
    ("optimizer_create_adafactor", "Adafactor::build"),
    ("optimizer_create_adam", "Adam::build"),
    ("optimizer_create_adamw", "AdamW::build"),
    ("optimizer_create_groups", "Optimizer::of_groups"),
    ("optimizer_create_lion", "Lion::build"),
    ("optimizer_create_muon", "Muon::build"),
    ("optimizer_create_sgd", "Sgd::build"),
    ("optimizer_group_lr", "Optimizer::group_learning_rate"),
    ("optimizer_lr", "Optimizer::learning_rate"),
    ("optimizer_set_group_lr", "Optimizer::set_group_learning_rate"),
    ("optimizer_set_lr", "Optimizer::set_learning_rate"),
    ("plan_add", "ParameterPlan::line"),
    ("plan_add_forward", "ParameterPlan::forward"),
    ("plan_add_forward_layout", "ParameterPlan::forward_layout"),
    ("plan_add_layout", "ParameterPlan::layout_line"),
    ("plan_add_module", "ParameterPlan::module"),
    ("plan_auto", "auto_plan"),
    ("plan_create", "ParameterPlan::new"),
    ("plan_from_hugging_face", "ParameterPlan::from_hugging_face"),
    ("plan_from_json", "ParameterPlan::from_json"),
    ("plan_from_styles", "ParameterPlan::from_styles"),
    ("plan_from_zoo", "ParameterPlan::from_zoo"),
    ("plan_resolve", "ParameterPlan::resolve"),
    ("plan_to_json", "ParameterPlan::from_json"),
    ("read_pretrained_config", "read_pretrained_config"),
    ("reduce_op", "ReduceOp"),
    ("safetensors_num_tensors", "Safetensors::tensors"),
    ("safetensors_tensor", "Safetensors::tensors"),
    ("safetensors_write", "write_safetensors"),
    ("schedule_factor", "Schedule::factor"),
    ("seed", "manual_seed"),
    ("set_handle_checks", "set_handle_checks"),
    ("set_log", "set_log"),
    ("set_num_threads", "set_num_threads"),
    ("state_create", "State::new"),
    ("tensor_clear_requires_grad", "Tensor::set_requires_grad"),
    ("tensor_copy_from_host", "Tensor::copy_from_slice"),
    ("tensor_copy_to_host", "Tensor::to_vec"),
    ("tensor_from_data", "Tensor::from_slice"),
    ("tensor_share", "Tensor::clone"),
    ("trace_create", "Mesh::trace"),
    ("value_kind", "Value"),
    ("verify_checkpoint", "verify_checkpoint"),
    ("work_is_done", "Pending::is_done"),
    ("work_wait", "Pending::wait"),
    ("world_create_counting", "World::counting"),
    ("world_create_local", "World::local"),
    ("world_share", "World::clone"),
];

/// What stands in front of the names of methods.
const TYPES: [(&str, &str); 17] = [
    ("captured_step", "CapturedStep"),
    ("checkpointer", "Checkpointer"),
    ("comm", "Comm"),
    ("function_context", "FunctionContext"),
    ("grad_scaler", "GradScaler"),
    ("layout", "Layout"),
    ("mesh", "Mesh"),
    ("metrics_writer", "MetricsWriter"),
    ("module", "Module"),
    ("op", "Op"),
    ("optimizer", "Optimizer"),
    ("safetensors", "Safetensors"),
    ("state", "State"),
    ("tensor", "Tensor"),
    ("token_file", "TokenFile"),
    ("trace", "Trace"),
    ("world", "World"),
];

/// Arguments that are called otherwise here; of a function, or of all.
const ARGUMENTS: [(&str, &str, &str); 20] = [
    ("", "timeout_ms", "timeout"),
    ("Comm::", "in", "data"),
    ("Layout::new", "dims", "order"),
    ("Layout::placements", "mesh_dim", "dim"),
    ("Members::", "fqn", "name"),
    ("Optimizer::set_learning_rate", "lr", "learning_rate"),
    ("Optimizer::", "index", "parameter"),
    ("TokenFile::open", "plain_dtype", "dtype"),
    ("TokenLoader::set_position", "json", "position"),
    ("Tensor::from_slice", "num_bytes", "data"),
    ("Tensor::copy_from_slice", "num_bytes", "data"),
    ("gradients", "num_inputs", "inputs"),
    ("gradients", "num_outputs", "outputs"),
    ("Adam::", "lr", "learning_rate"),
    ("AdamW::", "lr", "learning_rate"),
    ("Lion::", "lr", "learning_rate"),
    ("Adafactor::", "lr", "learning_rate"),
    ("Muon::", "lr", "learning_rate"),
    ("Optimizer::set_group_learning_rate", "lr", "learning_rate"),
    ("Optimizer::of_groups", "optimizers", "groups"),
];

/// The Rust name of `swv_<name>`; None if it is not of this crate.
pub(crate) fn of(name: &str) -> Option<String> {
    let name = name.strip_prefix("swv_")?;
    match NAMES.iter().find(|(c, _)| *c == name) {
        Some((_, rust)) => Some((*rust).to_owned()),
        None => of_rule(name),
    }
}

/// Whether it is a function of this crate, as errors name it: "Tensor::ones", "clip_grad_norm".
pub(crate) fn is_function(text: &str) -> bool {
    let is_word = |word: &str| {
        !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    match text.split_once("::") {
        // What begins with a small letter is an operator: "aten::mm".
        Some(("debug", method)) => is_word(method),
        Some((of, method)) => {
            of.starts_with(|c: char| c.is_ascii_uppercase()) && is_word(of) && is_word(method)
        }
        None => NAMES.iter().any(|(_, rust)| *rust == text),
    }
}

/// `tensor_ones` is `Tensor::ones`.
fn of_rule(name: &str) -> Option<String> {
    TYPES.iter().find_map(|(c, rust)| match name.strip_prefix(c)?.strip_prefix('_') {
        Some(method) => Some(format!("{rust}::{method}")),
        None => (name == *c).then(|| (*rust).to_owned()),
    })
}

/// A message of the C interface in this crate's words.
pub(crate) fn translate(message: &str) -> String {
    let caller = message.split_once(": ").and_then(|(function, _)| of(function));
    let mut result = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(start) = rest.find("swv_") {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let length = rest[start..].find(|c| !is_name(c)).unwrap_or(rest.len() - start);
        let name = &rest[start..start + length];
        result.push_str(&rest[..start]);
        result.push_str(of(name).as_deref().unwrap_or(name));
        rest = &rest[start + length..];
    }
    result.push_str(rest);
    caller.map_or(result.clone(), |caller| with_arguments(&caller, result))
}

/// `argument 'options.timeout_ms'` is `argument 'timeout'`: options are methods of builders here.
fn with_arguments(caller: &str, message: String) -> String {
    const MARK: &str = "argument '";
    let (before, after) = match message.split_once(MARK) {
        Some(parts) => parts,
        None => return message,
    };
    let (name, after) = match after.split_once('\'') {
        Some(parts) => parts,
        None => return message,
    };
    let name = name.strip_prefix("options.").unwrap_or(name);
    let (head, tail) = name.split_at(name.find(['.', '[']).unwrap_or(name.len()));
    let renamed = ARGUMENTS.iter().find(|(of, c, _)| caller.starts_with(of) && *c == head);
    let head = renamed.map_or(head, |(_, _, rust)| rust);
    // The first one of a method is the value that it is called on.
    let own = TYPES.iter().any(|(c, rust)| *c == head && caller.starts_with(&format!("{rust}::")));
    let head = if own { "self" } else { head };
    format!("{before}{MARK}{head}{tail}'{after}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::{Path, PathBuf};

    /// The sources of this crate, together.
    fn sources() -> String {
        fn below(folder: &Path) -> String {
            let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
            let text = |path: PathBuf| match path.is_dir() {
                true => below(&path),
                false => fs::read_to_string(path).unwrap(),
            };
            entries.map(text).collect()
        }
        below(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src")))
    }

    /// Those that give a status: only their names come up in messages.
    fn fallible_functions() -> Vec<String> {
        let blocks = shardweave_sys::DECLARATIONS.split("extern \"C\" {\n").skip(1);
        let blocks = blocks.map(|block| block.split("\n}").next().unwrap());
        let functions = blocks.filter_map(|block| block.split_once("pub fn "));
        let fallible = functions.filter(|(_, f)| f.ends_with("-> *mut swv_status;"));
        let names = fallible.map(|(_, f)| f.split('(').next().unwrap().to_owned());
        names.filter(|name| !name.starts_with("swv_status_new")).collect()
    }

    /// Every function of C that this crate calls has the name of something that it offers.
    #[test]
    #[cfg_attr(miri, ignore = "minutes of reading sources; nothing here is unsafe")]
    fn every_function_has_a_name() {
        let sources = sources();
        let fallible = fallible_functions();
        let mut called = Vec::new();
        for part in sources.split("swv_").skip(1) {
            let length = part.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap();
            let name = format!("swv_{}", &part[..length]);
            if fallible.contains(&name) && !called.contains(&name) {
                called.push(name);
            }
        }
        assert!(called.len() > 90, "{called:?}");
        for function in called {
            let name = of(&function).unwrap_or_else(|| panic!("{function} has no name here"));
            let last = name.rsplit("::").next().unwrap();
            let known = ["ones", "zeros", "empty", "full", "rand", "randn"]; // by a macro
            let types = TYPES.iter().any(|(_, rust)| *rust == name);
            let traits = ["clone", "eq", "to_string"]; // of the standard library
            assert!(
                known.contains(&last)
                    || types
                    || traits.contains(&last)
                    || sources.contains(&format!("fn {last}(",))
                    || sources.contains(&format!("fn {last}<",)),
                "{function} is said to be {name}, which there is not"
            );
        }
    }

    /// A later version may have more of them.
    #[test]
    fn every_public_enum_can_grow() {
        let sources = sources();
        let mut found = 0;
        for (before, name) in sources.match_indices("\npub enum ").map(|(at, _)| {
            let (before, after) = sources.split_at(at);
            (before, after.split_whitespace().nth(2).unwrap())
        }) {
            let attributes = before.rsplit("\n\n").next().unwrap();
            assert!(attributes.contains("#[non_exhaustive]"), "{name} is not #[non_exhaustive]");
            found += 1;
        }
        assert!(found >= 9, "{found} enums: the sources are not read well");
    }

    #[test]
    fn messages_are_translated() {
        for (c, rust) in [
            (
                "swv_tensor_ones: argument 'sizes' has a negative size, -1",
                "Tensor::ones: argument 'sizes' has a negative size, -1",
            ),
            (
                "swv_world_join: argument 'options.timeout_ms' is -1",
                "World::join: argument 'timeout' is -1",
            ),
            (
                "swv_tensor_copy_to_host: argument 'tensor' is sharded; take swv_tensor_to_local or \
                 swv_tensor_full_tensor of it first",
                "Tensor::to_vec: argument 'self' is sharded; take Tensor::to_local or \
                 Tensor::full_tensor of it first",
            ),
            ("swv_comm_send: argument 'in.dtype' is 3", "Comm::send: argument 'data.dtype' is 3"),
            ("nothing of C", "nothing of C"),
            ("swv_what: no", "swv_what: no"),
        ] {
            assert_eq!(translate(c), rust);
        }
    }
}
