#!/usr/bin/env python3
"""What both bindings have, written once: initializers, defaults, numbers and names of the C header; operators of operators.py.

    generate.py ROOT             writes the files below from ROOT/capi/shardweave.h and ROOT/bindings/operators.py
    generate.py --check ROOT     fails if one of them is not what it would write

bindgen writes Rust's declarations (bindings/rust/generate.sh), but no macros; cgo knows both, but Go's constants need names that Go
exports. Numbers of enumerations are taken from C by name in both languages, never written down again.
"""

import os
import re
import sys

sys.dont_write_bytecode = True  # beside the sources
RUST_SYS = "bindings/rust/shardweave-sys/src/initializers.rs"
RUST = "bindings/rust/shardweave/src/generated.rs"
GO = "bindings/go/internal/cshardweave/generated.go"
RUST_OPERATORS = "bindings/rust/shardweave/src/operators.rs"
GO_OPERATORS = "bindings/go/shardweave/operators.go"
NOTE = "Made by bindings/generate.py from capi/shardweave.h. Do not edit."


def _interface(root):
    sys.path.insert(0, os.path.join(root, "capi/abi"))
    import interface  # pylint: disable=import-error,import-outside-toplevel
    return interface


def initializers(root):
    """[(macro, struct, [(Member, value)])] of the header; the value of struct_size is its number."""
    interface = _interface(root)
    with open(os.path.join(root, "capi/shardweave.h"), encoding="utf-8") as file:
        header = re.sub(r"/\*.*?\*/", " ", file.read(), flags=re.S).replace("\\\n", " ")
    now = interface.parse(header)
    found = []
    for macro, body in re.findall(r"#define (SWV_\w+_INIT)\s+\{((?:[^{}]|\{[^{}]*\})*)\}", header):
        struct = macro[:-len("_INIT")].lower()
        values, depth, start = [], 0, 0
        for i, c in enumerate(body + ","):
            depth += (c in "({") - (c in ")}")
            if c == "," and depth == 0:
                values.append(" ".join((body + ",")[start:i].split()))
                start = i + 1
        members = now.structs[struct]
        assert len(values) == len(members), macro
        if members[0].name == "struct_size":
            last = members[-1]
            assert values[0] == f"SWV_SIZE_TO({struct}, {last.name})", macro
            values[0] = str(last.offset + last.size)
        found.append((macro, struct, list(zip(members, values))))
    return now, found


def _rust_name(name):
    return name + "_" if name in ("type", "self", "in", "as") else name


def _rust_value(now, kind, value):
    if value.startswith("{"):
        inner = [part.strip() for part in value.strip("{} ").split(",")]
        fields = ", ".join(f"{_rust_name(m.name)}: {_rust_value(now, m.type, v)}" for m, v in zip(now.structs[kind], inner))
        return f"{kind} {{ {fields} }}"
    if "(*)" in kind:
        return "None"
    if kind.endswith("*"):
        return "ptr::null()" if kind.startswith("const ") and kind.count("*") == 1 or kind.endswith("const*") else "ptr::null_mut()"
    return value if value not in now.numbers else f"{value}"


def rust_sys(now, all_of_them):
    lines = [f"// {NOTE}", "", "//! The header's initializers: each struct as `SWV_..._INIT` leaves it.", "", "use core::ptr;", "",
             "use crate::bindings::*;", ""]
    for macro, struct, members in all_of_them:
        lines.append(f"pub const {macro}: {struct} = {struct} {{")
        lines += [f"    {_rust_name(m.name)}: {_rust_value(now, m.type, value)}," for m, value in members]
        lines += ["};", ""]
    return "\n".join(lines[:-1]) + "\n"


def _words(now, kind):
    """"all_reduce", ... of swv_collective_kind, by number."""
    names = sorted(now.enums[kind], key=now.numbers.get)
    assert [now.numbers[name] for name in names] == list(range(len(names))), kind
    prefix = os.path.commonprefix(names)
    prefix = prefix[:prefix.index("_", len("SWV_")) + 1]
    return [name[len(prefix):].lower() for name in names]


def rust(now):
    words = _words(now, "swv_collective_kind")
    lines = [f"// {NOTE}", "", "/// The kinds of operations, in the order of [`CommCounters::by_op`](crate::CommCounters::by_op).",
             f"pub const OP_NAMES: [&str; {len(words)}] = ["] + [f'    "{word}",' for word in words] + ["];"]
    return "\n".join(lines) + "\n"


def _camel(name):
    special = {"dtype": "DType", "cpu": "CPU", "cuda": "CUDA", "sgd": "SGD", "adamw": "AdamW", "lr": "LR", "bf16": "BF16", "f16": "F16"}
    return "".join(special.get(part, part[:1].upper() + part[1:]) for part in name.lower().split("_"))


def go(now, all_of_them):
    lines = [f"// {NOTE}", "", "package cshardweave", "", '// #include "shim.h"', 'import "C"', ""]
    for kind in sorted(now.enums):
        rows = [(_camel(name[len("SWV_"):]), name) for name in sorted(now.enums[kind], key=now.numbers.get)]
        width = max(len(name) for name, _ in rows)
        lines += [f"// Numbers of {kind}.", "const ("] + [f"\t{name:{width}} = C.{c}" for name, c in rows] + [")", ""]
    rows = []
    for _, struct, members in all_of_them:
        for member, value in members[1:]:
            if re.fullmatch(r"-?[\d.]+(?:e-?\d+)?", value) and float(value) != 0:
                rows.append((f"Default{_camel(struct[len('swv_'):].replace('_options', ''))}{_camel(member.name)}", value))
    width = max(len(name) for name, _ in rows)
    lines += ["// What the initializers of structs set, where that is not 0.", "const ("]
    lines += [f"\t{name:{width}} = {value}" for name, value in rows] + [")", ""]
    words = _words(now, "swv_collective_kind")
    lines += ["// CollectiveNames names swv_collective_kind, by its numbers.", f"var CollectiveNames = [{len(words)}]string{{"]
    lines += [f'\t"{word}",' for word in words] + ["}"]
    return "\n".join(lines) + "\n"


# Kinds of operators' arguments.
RUST_TYPES = {"tensor": "&Tensor", "tensor?": "Option<&Tensor>", "float": "f64", "dim": "i64", "index": "i64", "dims": "&[i64]",
              "sizes": "&[i64]", "dtype": "DType", "bool": "bool"}
GO_TYPES = {"tensor": "*Tensor", "tensor?": "*Tensor", "float": "float64", "dim": "int", "index": "int64", "dims": "[]int",
            "sizes": "[]int64", "dtype": "DType", "bool": "bool"}


def _operators(root):
    """[(name in Rust, in Go, in LibTorch, [(argument, kind)], text)], and None between groups."""
    sys.path.insert(0, os.path.join(root, "bindings"))
    import operators  # pylint: disable=import-error,import-outside-toplevel
    for row in operators.OPERATORS:
        yield row and row[:3] + ([tuple(a.split(": ")) for a in row[3].split(", ") if a], row[4])


def rust_operators(rows):
    note = NOTE.replace("capi/shardweave.h", "bindings/operators.py")
    lines = [f"// {note}", "", "use crate::args;", "use crate::dtype::DType;", "use crate::error::Result;", "use crate::op::KnownOp;",
             "use crate::tensor::{methods, Tensor};", "",
             "/// Operators; of the same names in Go. Every other one is there by its name: [`Op`](crate::Op).", "impl Tensor {", "    methods! {"]
    for row in rows:
        if row is None:
            lines.append("")
            continue
        name, _, op, arguments, text = row
        lines.append(f"        /// {text[0].upper()}{text[1:]}.")
        lines.append(f"        {name}({', '.join(f'{a}: {RUST_TYPES[k]}' for a, k in arguments)}) -> Tensor = \"{op}\";")
    return "\n".join(lines + ["    }", "}"]) + "\n"


def go_operators(rows):
    rows = list(rows)
    note = NOTE.replace("capi/shardweave.h", "bindings/operators.py")
    width = max(len(row[1]) for row in rows if row)
    lines = [f"// {note}", "", "package shardweave", "", "var ("]
    lines += [f"\t{'op' + row[1]:{width + 2}} = builtin{{name: \"{row[2]}\"}}" for row in rows if row] + [")"]
    for name, _, arguments, text in (row[1:] for row in rows if row):
        types = [GO_TYPES[kind] for _, kind in arguments]
        if len(types) == 1 and types[0].startswith("[]"):
            types[0] = "..." + types[0][2:]
        parameters = []
        for i, (argument, _) in enumerate(arguments):
            same = i + 1 < len(types) and types[i + 1] == types[i]
            parameters.append(argument if same else f"{argument} {types[i]}")
        absent = [argument for argument, kind in arguments if kind == "tensor?"]
        text += f"; {' and '.join(absent)} may be nil" if absent else ""
        lines += ["", f"// {name} is {text}.", f"func (t *Tensor) {name}({', '.join(parameters)}) *Tensor {{",
                  f"\treturn t.call(&op{name}, {', '.join(['t'] + [argument for argument, _ in arguments])})", "}"]
    return "\n".join(lines) + "\n"


def files(root):
    now, all_of_them = initializers(root)
    return {RUST_SYS: rust_sys(now, all_of_them), RUST: rust(now), GO: go(now, all_of_them),
            RUST_OPERATORS: rust_operators(_operators(root)), GO_OPERATORS: go_operators(_operators(root))}


def main():
    check = sys.argv[1] == "--check"
    root = os.path.abspath(sys.argv[-1])
    wrong = []
    for path, wanted in files(root).items():
        path = os.path.join(root, path)
        if not check:
            with open(path, "w", encoding="utf-8") as file:
                file.write(wanted)
            continue
        with open(path, encoding="utf-8") as file:
            if file.read() != wanted:
                wrong.append(path)
    if wrong:
        sys.exit("not what bindings/generate.py writes: " + ", ".join(wrong))


if __name__ == "__main__":
    main()
