#!/usr/bin/env python3
"""The header of a version to come: every struct with a struct_size has two members more.

    grown_header.py SHARDWEAVE_H > GROWN_H

A library that is built with it runs programs of today's header, and a program that is built with it runs on today's library
(//capi:struct_size_test). SWV_GROWN is defined.
"""

import re
import sys


def grown(header):
    structs = re.findall(r"typedef struct (swv_\w+) \{\s*size_t struct_size;", header)
    for name in structs:
        header, count = re.subn(rf"\n}} {name};", f"\n  int64_t grown_number;\n  const char* grown_text;\n}} {name};", header)
        assert count == 1, name
        # All but what the library alone fills in has an initializer.
        header = re.sub(rf"(\{{\s*SWV_SIZE_TO\({name}, )\w+(\)(?:[^{{}}]|\{{[^{{}}]*\}})*)\}}", r"\1grown_text\2, 0, NULL}", header)
    assert structs
    return header.replace("#define SHARDWEAVE_H_\n", "#define SHARDWEAVE_H_\n#define SWV_GROWN\n", 1)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        sys.stdout.write(grown(file.read()))
