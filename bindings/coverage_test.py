#!/usr/bin/env python3
"""That the safe layers of Rust and Go offer what the C header does: each of its functions is used by both, or a line below
says why not.

    coverage_test.py ROOT
"""

import os
import re
import sys

SAFE = {"rust": ["bindings/rust/shardweave/src"], "go": ["bindings/go/internal/cshardweave"]}

OWN = "The languages' own threads run the ranks: swv_world_create_local makes their worlds."
SECOND = "Second handles are for hosts that count them by hand."
FILES = "Package safetensors reads and maps these files in Go."
MEMORY = "C would use Go's memory between calls, which cgo allows only for memory that is pinned (Go 1.21; this module wants 1.19)."
TABLE = "A backend moves bytes for all languages alike; it is written against the table, in C or C++."
NO_NEED = {
    "rust": {
        "swv_run_ranks": OWN,
        "swv_status_new": "swv_status_new_of_rank: errors know their rank.",
        "swv_world_create_with_backend": TABLE,
        "swv_comm_coalesce": "Operations between the ends of a coalescing borrow their memory until its end, which nothing here says yet.",
        "swv_coalescing_finish": "As swv_comm_coalesce.",
        "swv_coalescing_free": "As swv_comm_coalesce.",
        "swv_work_share": "A Pending owns its memory, so there is one.",
        "swv_work_wait_on": "Operations here are on slices of the host's memory, for which no stream waits.",
        "swv_code_name": "Code has its names, which need no library.",
        "swv_dtype_size": "DType has its sizes, which need no library; a test compares them.",
        "swv_dtype_name": "As swv_dtype_size.",
        "swv_string_size": "Texts are read up to their NUL.",
        "swv_version": "shardweave-sys compares it.",
        "swv_tensor_buffer": "A slice of a tensor's memory would outlive what frees or resizes it.",
        "swv_layout_share": "A Layout is a Clone by its placements.",
        "swv_op_share": "An Op is used by reference.",
        "swv_module_get": "Names are those of the struct's members.",
        "swv_forward_share": "A Forward is a Clone: an Rc.",
        "swv_module_finish_grad_sync": "swv_finish_grad_sync, for the members.",
        "swv_module_zero_grad": "Each parameter's gradient is set to none.",
        "swv_plan_share": "A ParameterPlan is data, a Clone.",
        "swv_plan_append": "And so are its lines, which ParameterPlan::append joins.",
        "swv_optimizer_share": SECOND,
        "swv_schedule_factor": "A Schedule is computed here; a test compares it with this one.",
        "swv_state_share": SECOND,
        "swv_safetensors_share": SECOND,
        "swv_trace_share": SECOND,
        "swv_token_file_share": SECOND,
        "swv_loader_share": SECOND,
    },
    "go": {
        "swv_run_ranks": OWN,
        "swv_status_new": "swv_status_new_of_rank: errors know their rank.",
        "swv_world_create_with_backend": TABLE,
        "swv_version": "The soname has the minor version, so the loader compares it.",
        "swv_world_share": "A pointer is shared as it is.",
        "swv_comm_share": "A pointer is shared as it is.",
        "swv_comm_coalesce": MEMORY,
        "swv_coalescing_finish": MEMORY,
        "swv_coalescing_free": MEMORY,
        "swv_work_is_done": MEMORY,
        "swv_work_wait": MEMORY,
        "swv_work_wait_on": MEMORY,
        "swv_work_share": MEMORY,
        "swv_work_free": MEMORY,
        "swv_layout_create": "Layouts are texts here: swv_layout_parse and swv_layout_create_named.",
        "swv_mesh_ndim": "The length of swv_mesh_shape.",
        "swv_mesh_size": "The length of swv_mesh_ranks.",
        "swv_tensor_ndim": "The length of swv_tensor_sizes.",
        "swv_tensor_buffer": "A slice of a tensor's memory would outlive what frees or resizes it.",
        "swv_layout_share": "A pointer is shared as it is.",
        "swv_op_share": "A pointer is shared as it is.",
        "swv_forward_share": "A pointer is shared as it is.",
        "swv_plan_share": "A pointer is shared as it is.",
        "swv_optimizer_share": "A pointer is shared as it is.",
        "swv_schedule_factor": "A Schedule is a function of Go; a test compares it with the numbers of the library's.",
        "swv_optimizer_apply_schedule": "Scheduler sets the learning rates.",
        "swv_state_share": "A pointer is shared as it is.",
        **dict.fromkeys(("swv_safetensors_open", "swv_safetensors_share", "swv_safetensors_free", "swv_safetensors_num_tensors",
                         "swv_safetensors_tensor", "swv_safetensors_read"), FILES),
        "swv_trace_share": "A pointer is shared as it is.",
        "swv_token_file_share": "A pointer is shared as it is.",
        "swv_loader_share": "A pointer is shared as it is.",
    },
}


def text_of(folder):
    """Go's, Rust's and C's of a folder, without comments and tests."""
    texts = []
    for name in sorted(os.listdir(folder)):
        if re.search(r"(?<!_test)\.(rs|go|h|c)$", name):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                text = re.sub(r"//[^\n]*", "", file.read())
            texts.append(re.sub(r"#\[cfg\(test\)\]\nmod tests.*", "", text, flags=re.S))
    return "\n".join(texts)


def unused_in_go(root):
    """What the inner package of Go has and the outer one does not use: covered in name only."""
    inner, outer = (text_of(os.path.join(root, "bindings/go", folder)) for folder in ("internal/cshardweave", "shardweave"))
    for name in re.findall(r"^func (?:\(\w+ \*?\w+\) )?([A-Z]\w*)", inner, flags=re.M):
        if not re.search(rf"\.{name}\b", outer) and name != "Dropped":
            yield f"go: nothing uses cshardweave's {name}"


def main():
    root = os.path.abspath(sys.argv[1])
    with open(os.path.join(root, "capi/shardweave.h"), encoding="utf-8") as file:
        header = re.sub(r"/\*.*?\*/", " ", file.read(), flags=re.S)
    functions = re.findall(r"\bSWV_API\b[^;]*?\b(swv_\w+)\s*\(", header)
    wrong = [] if len(functions) > 180 else [f"only {len(functions)} functions were found"]
    for language, folders in SAFE.items():
        text = "\n".join(text_of(os.path.join(root, folder)) for folder in folders)
        used = set(re.findall(r"\bswv_\w+", text))
        for function in functions:
            if (function in used) == (function in NO_NEED[language]):
                wrong.append(f"{language} has {function}, and a line says why not" if function in used else
                             f"{language} has no {function}, and no line of coverage_test.py says why")
        wrong += [f"{language}: there is no {function}" for function in NO_NEED[language] if function not in functions]
    wrong += unused_in_go(root)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
