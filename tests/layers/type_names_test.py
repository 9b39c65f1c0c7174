#!/usr/bin/env python3
"""One name, one type: two types of one name in one library are one to the linker, whatever their sizes.

    type_names_test.py WORKSPACE

Reads the C++ sources of the components and fails if
  - two types that the linker sees (in no unnamed namespace) have one name, in whatever namespaces;
  - a header that says that it is internal declares something outside of an internal namespace.
"""

import collections
import os
import re
import subprocess
import sys

COMPONENTS = ("placement", "mesh", "comm", "dtensor", "modules", "capi")
NAMESPACE = re.compile(r"\s*(?:inline )?namespace ?([\w:]*) ?\{")
TYPE = re.compile(r"(?:template ?<.*> )?(class|struct|union|enum class|enum) (?:\[\[\w+\]\] )?(\w+)( final)?(\s*:[^:;]*)?\s*\{")
INTERNAL = re.compile(r"(_internal|testing|capi)\b")


def definitions(text):
    """Yields (namespace, name or None, line) for what stands at the scope of a namespace."""
    text = re.sub(r'R"(\w*)\(.*?\)\1"', '""', text, flags=re.S)
    namespaces, depth, pending = [], 0, ""
    for number, line in enumerate(text.split("\n"), 1):
        code = re.sub(r'"(\\.|[^"\\])*"', '""', line)
        code = re.sub(r"'(\\.|[^'\\])'", "''", re.sub(r"//.*", "", code))
        if code.startswith("#") or not code.strip():
            continue
        opened = NAMESPACE.match(code)
        if opened and "}" not in code:
            namespaces.append((depth, opened.group(1)))
            depth += 1
            continue
        if depth == len(namespaces):
            pending = (pending + " " + code.strip()).strip()
            if pending.endswith((";", "}", "{")) or "{" in code:
                found = TYPE.match(pending)
                scope = "::".join(name or "(unnamed)" for _, name in namespaces)
                if pending != "}":
                    yield scope, found.group(2) if found else None, number
                pending = ""
        depth += code.count("{") - code.count("}")
        while namespaces and depth <= namespaces[-1][0]:
            namespaces.pop()


def main():
    os.chdir(sys.argv[1])
    files = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "--", *COMPONENTS],
        check=True, capture_output=True, text=True).stdout.split()
    files = [f for f in files if f.endswith((".h", ".cc")) and "/abi/" not in f and os.path.exists(f)]
    assert len(files) > 100, files
    places, problems = collections.defaultdict(set), []
    for file in files:
        with open(file, encoding="utf-8") as opened:
            text = opened.read()
        head = text.split("#pragma once")[0]
        internal = file.endswith(".h") and re.search(r"\b[Ii]nternal to\b", head)
        for scope, name, line in definitions(text):
            if internal and scope.startswith("shardweave") and not INTERNAL.search(scope):
                problems.append(f"{file}:{line}: stands in namespace {scope}, but the header is internal")
                internal = False  # one is enough
            if name and "(unnamed)" not in scope and "_test.cc" not in file:
                places[name].add(f"{scope}::{name} in {file}")
    for name, where in sorted(places.items()):
        if len(where) > 1:
            problems.append(f"{name} is {len(where)} types: " + ", ".join(sorted(where)))
    print(f"{len(places)} types in {len(files)} files")
    print("\n".join(problems))
    return 1 if problems or len(places) < 100 else 0


if __name__ == "__main__":
    sys.exit(main())
