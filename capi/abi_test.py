#!/usr/bin/env python3
"""The binary surface is a reviewed file.

    abi_test.py LIBRARY HEADER SYMBOLS LAYOUT FUZZER...

Exported symbols, declared functions and symbols.txt are the same; the soname and the version node say the header's version;
no symbol of LibTorch, Abseil or Gloo is shown; abi_layout.c knows every struct and every number of the header, and the fuzzer calls every function.
With abidiff on the machine and SWV_ABI_BASELINE=LIBRARY in the environment that library is compared too.
"""

import os
import re
import shutil
import subprocess
import sys


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def differences(what, have, wanted):
    for name in sorted(set(have) - set(wanted)):
        yield f"{what}: {name} is new"
    for name in sorted(set(wanted) - set(have)):
        yield f"{what}: {name} is gone"


def main():
    library, header_path, symbols_path, layout_path, *fuzzer_paths = sys.argv[1:]
    with open(header_path, encoding="utf-8") as file:
        header = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S)
    with open(symbols_path, encoding="utf-8") as file:
        symbols = file.read().split()
    with open(layout_path, encoding="utf-8") as file:
        layout = file.read()
    fuzzed = set()
    for path in fuzzer_paths:
        with open(path, encoding="utf-8") as file:
            fuzzed.update(re.findall(r"\bswv_\w+", file.read()))

    errors = []
    version = ".".join(re.search(rf"define SWV_VERSION_{p} (\d+)", header).group(1) for p in ("MAJOR", "MINOR"))
    exported = {}
    for line in output("nm", "--dynamic", "--defined-only", "--with-symbol-versions", library).splitlines():
        _, kind, name = line.split(maxsplit=2)
        name, _, node = name.partition("@@")
        if kind != "A":
            exported[name] = node
    declared = re.findall(r"^SWV_API [^;]*?\b(swv_\w+)\(", header, re.M)
    errors += differences("exported, against symbols.txt", exported, symbols)
    errors += differences("declared, against symbols.txt", declared, symbols)
    if symbols != sorted(symbols):
        errors.append("symbols.txt is not sorted")
    errors += [f"the fuzzer does not call {name}" for name in symbols if name not in fuzzed]
    nodes = set(exported.values())
    if nodes != {f"SHARDWEAVE_{version}"}:
        errors.append(f"the symbols' versions are {sorted(nodes)}, the header's is {version}")
    soname = re.search(r"SONAME.*\[(.*)\]", output("readelf", "-d", library)).group(1)
    if soname != f"libshardweave.so.{version}":
        errors.append(f"the soname is {soname}, the header's version {version}")

    structs = re.findall(r"^} (swv_\w+);", header, re.M)
    errors += differences("structs, against abi_layout.c", structs, re.findall(r"^SIZE\((\w+),", layout, re.M))
    numbers = re.findall(r"\b(SWV_[A-Z0-9_]+) = -?\d+", header)
    errors += differences("numbers, against abi_layout.c", numbers, re.findall(r"^NUMBER\((\w+),", layout, re.M))

    baseline = os.environ.get("SWV_ABI_BASELINE")
    if baseline and shutil.which("abidiff"):
        result = subprocess.run(["abidiff", "--no-added-syms", baseline, library], text=True, capture_output=True)
        if result.returncode:
            errors.append(f"abidiff {baseline}:\n{result.stdout}{result.stderr}")
    if errors:
        sys.exit("\n".join(errors) + "\nA change of the ABI belongs into capi/symbols.txt, abi_layout.c and CHANGELOG.md.")
    print(f"{len(symbols)} functions, {len(structs)} structs, {len(numbers)} numbers")


if __name__ == "__main__":
    main()
