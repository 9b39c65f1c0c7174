"""The C header as text that can be compared: functions with the version that brought them, structs with the places of their
members, numbers, types and handles. Names of parameters and comments are left out.

    interface = parse(header)                       # {"function": {name: prototype}, "struct": {name: [Member]}, ...}
    text(interface, versions)                       # abi/interface.txt
    incompatibilities(frozen, interface)            # what a program of the frozen one would miss
"""

import re
from typing import NamedTuple

_SIZES = {"char": 1, "int32_t": 4, "uint32_t": 4, "int64_t": 8, "uint64_t": 8, "size_t": 8, "double": 8, "float": 4}


class Member(NamedTuple):
    name: str
    type: str
    offset: int
    size: int


class Interface(NamedTuple):
    version: str        # "0.2"
    functions: dict     # name: prototype
    structs: dict       # name: [Member]
    sizes: dict         # of structs, with padding
    sized: dict         # name: (last member, values behind struct_size) of the initializer
    numbers: dict
    enums: dict         # type: [its numbers' names]
    types: dict         # typedefs
    handles: tuple


def soname(version):
    """Programs look for this: the major version, before 1.0 also the minor one, which may break them."""
    major, minor = version.split(".")
    return "libshardweave.so." + (major if major != "0" else f"0.{minor}")


def _spaces(text):
    text = " ".join(text.split())
    text = re.sub(r"\s*\*\s*", "* ", text)
    return re.sub(r"\s*([(),;\[\]])\s*", r"\1", text).replace(",", ", ").replace("* *", "**").replace("* )", "*)").strip()


def _split(text, at):
    """Splits where no bracket is open."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "({") - (c in ")}")
        if c == at and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return parts + [text[start:]]


def _parameters(text):
    text = text.strip()
    if text in ("", "void"):
        return "void"
    kinds = []
    for parameter in _split(text, ","):
        kind, name = _declaration(parameter)
        kinds.append(kind if name else _spaces(parameter))
    return ", ".join(kinds)


def _declaration(text):
    """("const char*", "tag") of "const char* tag"; also of pointers to functions."""
    text = text.strip()
    function = re.fullmatch(r"(.*?)\(\s*\*\s*(\w*)\s*\)\s*\((.*)\)", text, re.S)
    if function:
        return f"{_spaces(function.group(1))} (*)({_parameters(function.group(3))})", function.group(2)
    plain = re.fullmatch(r"(.*[\s*])(\w+)((?:\[\w+\])*)", text, re.S)
    if not plain:
        return _spaces(text), ""
    return _spaces(plain.group(1)) + plain.group(3), plain.group(2)


def _size(kind, structs, types):
    """(size, alignment)"""
    if kind.endswith("*") or "(*)" in kind:
        return 8, 8
    kind = kind.replace("const ", "")
    kind = types.get(kind, kind)
    if kind in structs:
        return structs[kind]
    if kind.endswith("*") or "(*)" in kind:
        return 8, 8
    return _SIZES[kind], _SIZES[kind]


def _layout(body, structs, types, union=False):
    """[Member], size, alignment"""
    members, end, align = [], 0, 1
    for part in _split(body, ";"):
        if not part.strip():
            continue
        nested = re.fullmatch(r"\s*(struct|union)\s*\{(.*)\}\s*(\w+)\s*", part, re.S)
        if nested:
            inner, size, alignment = _layout(nested.group(2), structs, types, nested.group(1) == "union")
            kind = nested.group(1) + " { " + " ".join(f"{m.offset} {m.type} {m.name};" for m in inner) + " }"
            name = nested.group(3)
        else:
            kind, name = _declaration(part)
            size, alignment = _size(kind, structs, types)
        offset = 0 if union else (end + alignment - 1) // alignment * alignment
        members.append(Member(name, kind, offset, size))
        end, align = max(end, offset + size), max(align, alignment)
    return members, (end + align - 1) // align * align, align


def parse(header):
    header = re.sub(r"/\*.*?\*/", " ", header, flags=re.S)
    header = header.replace("\\\n", " ")
    version = ".".join(re.search(rf"define SWV_VERSION_{part} (\d+)", header).group(1) for part in ("MAJOR", "MINOR"))
    sized = {}
    for name, last, values in re.findall(r"#define SWV_\w+_INIT\s+\{\s*SWV_SIZE_TO\((\w+), (\w+)\)((?:[^{}]|\{[^{}]*\})*)\}",
                                         header):
        sized[name] = (last, [" ".join(value.split()) for value in _split(values, ",")[1:]])
    code = re.sub(r"^\s*#.*$", "", header, flags=re.M)
    types, structs, layouts, sizes = {}, {}, {}, {}
    handles = []
    for kind, name in re.findall(r"\btypedef struct (\w+) (\w+);", code):
        handles.append(name)
    for text in re.findall(r"\btypedef (?!struct\b)([^;{]*);", code):
        kind, name = _declaration(text)
        types[name] = kind
    for name, body, again in re.findall(r"\btypedef struct (\w+) \{(.*?)\n\} (\w+);", code, re.S):
        structs[name], size, align = _layout(body, layouts, types)
        layouts[name], sizes[name] = (size, align), size
    numbers = {name: int(value, 0) for name, value in re.findall(r"\b(SWV_[A-Z0-9_]+) = (-?\w+)", code)}
    enums = {name: re.findall(r"\b(SWV_[A-Z0-9_]+) =", body)
             for name, body in re.findall(r"typedef int32_t (swv_\w+);\s*enum \{(.*?)\};", code, re.S)}
    functions = {}
    for text in re.findall(r"^SWV_API ([^;]*);", code, re.M):
        result, name, parameters = re.fullmatch(r"(?:SWV_MUST_USE\s+)?(.*?)\s*\b(swv_\w+)\((.*)\)\s*", text, re.S).groups()
        functions[name] = f"{_spaces(result)} ({_parameters(parameters)})"
    return Interface(version, functions, structs, sizes, sized, numbers, enums, types, tuple(handles))


def text(interface, versions):
    """Sorted, a line each; `versions`: which version brought which function."""
    lines = [f"handle {name}" for name in sorted(interface.handles)]
    lines += [f"type {name} = {kind}" for name, kind in sorted(interface.types.items())]
    lines += [f"number {name} = {value}" for name, value in sorted(interface.numbers.items())]
    for name, members in sorted(interface.structs.items()):
        lines.append(f"struct {name}, {interface.sizes[name]} bytes")
        lines += [f"  {m.offset} {m.type} {m.name}" for m in members]
    lines += [f"function {versions[name]} {name}: {prototype}" for name, prototype in sorted(interface.functions.items())]
    return "\n".join(lines) + "\n"


def versions_of(committed):
    """Of abi/interface.txt: function -> version that brought it."""
    return {name: version for version, name in re.findall(r"^function (\S+) (\w+):", committed, re.M)}


def version_script(versions, first):
    """One node per version; what an older program needs stays in the node that it was linked to."""
    nodes = []
    for version in sorted(set(versions.values()) | {first}, key=lambda v: tuple(map(int, v.split(".")))):
        if version == first:
            nodes.append(f"SHARDWEAVE_{version} {{\n  global:\n    swv_*;\n  local:\n    *;\n}};\n")
        else:
            names = "".join(f"    {name};\n" for name in sorted(versions) if versions[name] == version)
            nodes.append(f"SHARDWEAVE_{version} {{\n  global:\n{names}}} {nodes[-1].split()[0]};\n")
    return "/* What libshardweave.so shows: its C interface, and nothing of what it is made of. A name that is written\n" \
           " * out wins over the pattern. Written by abi_test.py --write. */\n" + "".join(nodes)


def incompatibilities(frozen, now):
    """What breaks programs of `frozen` that run with `now`."""
    for what in ("functions", "numbers", "types"):
        there, here = getattr(frozen, what), getattr(now, what)
        for name in sorted(there):
            if name not in here:
                yield f"{name} of {frozen.version} is gone"
            elif here[name] != there[name]:
                yield f"{name} was {there[name]} in {frozen.version}, and is {here[name]}"
    for name in sorted(set(frozen.handles) - set(now.handles)):
        yield f"{name} of {frozen.version} is gone"
    for name, members in sorted(frozen.structs.items()):
        here = now.structs.get(name)
        if here is None:
            yield f"struct {name} of {frozen.version} is gone"
            continue
        if here[:len(members)] != members:
            yield f"struct {name} is not what it was in {frozen.version}, with more behind: {members} became {here}"
            continue
        more = here[len(members):]
        if not more:
            continue
        if members[0].name != "struct_size":
            yield f"struct {name} of {frozen.version} has no struct_size, and cannot have more members"
        if more[0].offset < frozen.sizes[name]:
            yield f"{name}.{more[0].name} lies in the padding of {frozen.version}; put a reserved member before it"
        if name in frozen.sized:
            last, values = now.sized.get(name, ("", []))
            if last != here[-1].name:
                yield f"the initializer of {name} ends with {last} instead of {here[-1].name}"
            for member, value in zip(more, values[len(members) - 1:]):
                if value not in ("0", "0.0", "NULL"):
                    yield f"{name}.{member.name} has the default {value}; what comes later has 0, as older libraries say"
