#!/usr/bin/env python3
"""The binary surface is reviewed text.

    abi_test.py LIBRARY FOLDER             checks
    abi_test.py --write FOLDER             writes abi/interface.txt and shardweave.lds from the header

FOLDER is capi/. The header is what abi/interface.txt says: prototypes, places of members, numbers. The library shows these functions
and nothing else, each in the node of the version that brought it; its soname is that of the header's version. A version that was
released is kept in abi/<version>/, whose files have the hashes below: programs of all those with the same soname go on
working. abi_layout.c, where compilers look, knows every struct and every number. With abidiff and a C compiler on the machine the
frozen headers are compared by these, too.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True  # beside the sources
sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "abi"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "abi"))
import interface  # noqa: E402

# What was frozen is never edited. A new version gets new lines (sha256sum).
FROZEN = {
    "0.2/shardweave.h": "ba79b34e02d06dbe30e2715fbce86d50dbc181658cb323a663aadd6c9f168352",
    "0.2/client.c": "50ff78af1fdb28896cd52abbca66329b43edacf263c24cc983497c5773e72150",
    "0.3/shardweave.h": "5c74732c3f21d32e18b5c3517ccdb7d933b2395d6ec1583c12b71332deb80d70",
    "0.3/client.c": "932779cea526607f6580807494bccf28f03d9782f7ef7adb4c3e14b71538c765",
}

# Of a struct that has grown at its end, which abidiff would report.
SUPPRESSION = "[suppress_type]\n  type_kind = struct\n  name = {}\n"


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def without_comments(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def differences(what, have, wanted):
    for name in sorted(set(have) - set(wanted)):
        yield f"{what}: {name} is new"
    for name in sorted(set(wanted) - set(have)):
        yield f"{what}: {name} is gone"


def check_library(library, versions, version):
    """Names, nodes and soname."""
    shown = {}
    for line in output("nm", "--dynamic", "--defined-only", "--with-symbol-versions", library).splitlines():
        _, kind, name = line.split(maxsplit=2)
        name, _, node = name.partition("@@")
        if kind != "A":
            shown[name] = node
    yield from differences("exported, against abi/interface.txt", shown, versions)
    for name in sorted(set(shown) & set(versions)):
        if shown[name] != f"SHARDWEAVE_{versions[name]}":
            yield f"{name} is in the node {shown[name]}; it came with {versions[name]}"
    is_called = re.search(r"SONAME.*\[(.*)\]", output("readelf", "-d", library)).group(1)
    if is_called != interface.soname(version):
        yield f"the soname is {is_called}; wanted {interface.soname(version)} of version {version}"


def check_committed(now, committed, script):
    """That abi/interface.txt and the version script are those of the header."""
    versions = {**dict.fromkeys(now.functions, now.version), **interface.versions_of(committed)}
    versions = {name: versions[name] for name in now.functions}
    wanted = interface.text(now, versions)
    if committed != wanted:
        old, new = set(committed.splitlines()), set(wanted.splitlines())
        yield "abi/interface.txt is not the header's:\n" + "".join(f"  -{line}\n" for line in sorted(old - new)) + \
              "".join(f"  +{line}\n" for line in sorted(new - old))
    if script != interface.version_script(versions, first_version(versions)):
        yield "shardweave.lds is not what abi/interface.txt asks for"


def check_alone(header):
    """That the header, which is installed alone, refers to no file of the sources."""
    for path in re.findall(r"\b\w+(?:/\w+)*/\w+\.(?:h|cc|md|py)\b", header):
        yield f"shardweave.h refers to {path}, which is not installed"


# Pairs of numbers and names that stay as they are, and what only inline functions look at.
FIXED = {"swv_call_options", "swv_comm_counter", "swv_device", "swv_link_cost", "swv_mesh_dim", "swv_named_placement", "swv_value"}
# Of which nobody has a second handle: they end with their _free, or are read and copied.
ALONE = {"swv_captured_step", "swv_checkpointer", "swv_coalescing", "swv_grad_scaler", "swv_grad_sync", "swv_metrics_writer", "swv_scope", "swv_status", "swv_string"}
CHANGES = "set_|add_|abort|clear|copy_from|enter_|finish|forbid_|seed|step(?=\\()|use_|zero_"


def check_rules(header, now):
    """What the header says of all names and types."""
    code = without_comments(header)
    taken = {}
    for kind, names in now.enums.items():
        prefixes = {re.match("SWV_([A-Z0-9]+)_", name + "_").group(1) for name in names}
        noun = min(prefixes)
        if len(prefixes) != 1 or noun.lower() not in kind.split("_") + (["mode"] if kind == "swv_grad_mode" else []):
            yield f"the numbers of {kind} do not all begin with a noun of its name: {', '.join(sorted(prefixes))}"
        if taken.setdefault(noun, kind) != kind:
            yield f"the numbers of {kind} begin as those of {taken[noun]}"
    for kind, name in re.findall(r"\b(u?int\d+_t|size_t)\b[ *]+(?:const )?(?:out_)?(rank|ranks|local_rank|world_ranks|root|peer|source"
                                 r"|members|world_size|num_ranks)\b(?!\.)", code):
        if kind != "int32_t" and not (kind == "size_t" and name == "num_ranks"):
            yield f"a {name} is {kind}; ranks are int32_t"
    for name in re.findall(rf"\b(swv_\w+?_(?:{CHANGES})\w*)\(\s*const swv_\w+\*", code):
        yield f"{name} takes a const handle, and changes what that stands for"
    for name in now.handles:
        frees, shares = f"{name}_free" in now.functions, f"{name}_share" in now.functions
        if frees and shares == (name in ALONE):
            yield f"{name} has {'a' if shares else 'no'} second handle"
    for name, members in now.structs.items():
        if (members[0].name == "struct_size") == (name in FIXED):
            yield f"{name} has {'a' if name in FIXED else 'no'} struct_size"


def first_version(versions):
    return min(versions.values(), key=lambda v: tuple(map(int, v.split("."))))


def check_frozen(now, folder, frozen):
    """That what was frozen still is, and that its programs still work."""
    for path, wanted in frozen.items():
        with open(os.path.join(folder, "abi", path), "rb") as file:
            is_now = hashlib.sha256(file.read()).hexdigest()
        if is_now != wanted:
            yield f"abi/{path} was edited after it was frozen: its hash is {is_now}"
    for version in sorted({path.split("/")[0] for path in frozen}):
        header = interface.parse(read(os.path.join(folder, "abi", version, "shardweave.h")))
        client = without_comments(read(os.path.join(folder, "abi", version, "client.c")))
        for name in sorted(header.structs):
            if not re.search(rf"\b{name}\b", client):
                yield f"abi/{version}/client.c does not use {name}"
        if interface.soname(header.version) == interface.soname(now.version):
            yield from interface.incompatibilities(header, now)


def stub(header_path, folder, name):
    """A library of the header's functions with debug information, for abidiff."""
    source = os.path.join(folder, name + ".c")
    code = re.sub(r"^\s*#.*$", "", without_comments(read(header_path)).replace("\\\n", " "), flags=re.M)
    with open(source, "w", encoding="utf-8") as file:
        file.write(f'#include "{os.path.abspath(header_path)}"\n#include <stdlib.h>\n')
        for text in re.findall(r"^SWV_API ([^;]*);", code, re.M):
            file.write(text.replace("SWV_MUST_USE", "") + " { abort(); }\n")
    library = os.path.join(folder, f"lib{name}.so")
    output("cc", "-g", "-shared", "-fPIC", "-w", "-o", library, source)
    return library


def abidiff(folder, frozen, now):
    """Errors of abidiff, or why it was not asked, as (errors, note)."""
    missing = [tool for tool in ("abidiff", "cc") if shutil.which(tool) is None]
    if missing:
        return [], f"{' and '.join(missing)} not on this machine: prototypes and structs were compared as text only"
    errors = []
    with tempfile.TemporaryDirectory() as scratch:
        suppressions = os.path.join(scratch, "suppressions")
        new = stub(os.path.join(folder, "shardweave.h"), scratch, "now")
        for version in sorted({path.split("/")[0] for path in frozen}):
            path = os.path.join(folder, "abi", version, "shardweave.h")
            header = interface.parse(read(path))
            if interface.soname(header.version) != interface.soname(now.version):
                continue
            grown = [name for name, members in header.structs.items() if name in now.structs
                     and len(now.structs[name]) > len(members) == len([m for m in members if m in now.structs[name]])]
            with open(suppressions, "w", encoding="utf-8") as file:
                file.writelines(SUPPRESSION.format(name) for name in grown)
            old = stub(path, scratch, "frozen")
            result = subprocess.run(["abidiff", "--no-added-syms", "--suppressions", suppressions, old, new], text=True,
                                    capture_output=True, check=False)
            if result.returncode:
                errors.append(f"abidiff against {version}:\n{result.stdout}{result.stderr}")
    return errors, "abidiff agrees" if not errors else ""


def check_layout(now, layout):
    yield from differences("structs, against abi_layout.c", now.structs, re.findall(r"^SIZE\((\w+),", layout, re.M))
    yield from differences("numbers, against abi_layout.c", now.numbers, re.findall(r"^NUMBER\((\w+),", layout, re.M))
    for name, size in re.findall(r"^SIZE\((\w+), (\d+)\)", layout, re.M):
        if name in now.sizes and now.sizes[name] != int(size):
            yield f"{name} has {size} bytes in abi_layout.c, {now.sizes[name]} by abi/interface.py"


def write(folder):
    now = interface.parse(read(os.path.join(folder, "shardweave.h")))
    path = os.path.join(folder, "abi/interface.txt")
    old = interface.versions_of(read(path)) if os.path.exists(path) else {}
    # Where the soname changes, all begins anew.
    old = {name: version for name, version in old.items() if interface.soname(version) == interface.soname(now.version)}
    versions = {name: old.get(name, now.version) for name in now.functions}
    with open(path, "w", encoding="utf-8") as file:
        file.write(interface.text(now, versions))
    with open(os.path.join(folder, "shardweave.lds"), "w", encoding="utf-8") as file:
        file.write(interface.version_script(versions, first_version(versions)))


def main():
    if sys.argv[1] == "--write":
        return write(sys.argv[2])
    library, folder = sys.argv[1:]
    header = read(os.path.join(folder, "shardweave.h"))
    now = interface.parse(header)
    committed = read(os.path.join(folder, "abi/interface.txt"))
    errors = list(check_committed(now, committed, read(os.path.join(folder, "shardweave.lds"))))
    errors += check_alone(header)
    errors += check_rules(header, now)
    errors += check_library(library, interface.versions_of(committed), now.version)
    errors += check_frozen(now, folder, FROZEN)
    errors += check_layout(now, read(os.path.join(folder, "abi_layout.c")))
    found, note = abidiff(folder, FROZEN, now)
    errors += found
    if errors:
        sys.exit("\n".join(errors) + "\nA change of the ABI belongs into abi/interface.txt and shardweave.lds (abi_test.py --write capi), "
                 "abi_layout.c and CHANGELOG.md.")
    print(f"{len(now.functions)} functions, {len(now.structs)} structs, {len(now.numbers)} numbers; {note}")
    return None


if __name__ == "__main__":
    main()
