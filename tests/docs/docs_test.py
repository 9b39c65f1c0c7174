#!/usr/bin/env python3
"""Checks README.md, CONTRIBUTING.md and docs/*.md of the checkout that WORKSPACE leads to.

Every block of C++ and C stands word for word in the file that the comment before it names:

    <!-- examples/readme_snippet.cc -->
    ```cpp

Every relative link leads to a file or folder, and every //package:target that ./bazelw is given to build, run or
test, or that stands by itself as code, is in that package's BUILD file.
"""

import glob
import os
import re
import sys
import textwrap

ROOT = os.path.dirname(os.path.realpath("WORKSPACE"))


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def code_errors(text):
    for name, block in re.findall(r"(?:<!-- (\S+) -->\n)?```c(?:pp)?\n(.*?)```", text, re.S):
        if not name:
            yield "a block of code does not say which file it is from: " + block.splitlines()[0]
            continue
        lines = [line.strip() for line in block.strip().splitlines()]
        source = [line.strip() for line in read(name).splitlines()]
        starts = range(len(source) - len(lines) + 1)
        if not any(source[i : i + len(lines)] == lines for i in starts):
            yield "this is not in %s:\n%s" % (name, textwrap.indent(block, "    "))


def link_errors(text, folder):
    for target in re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", text, flags=re.S)):
        if not re.match(r"\w+:", target) and not os.path.exists(os.path.join(ROOT, folder, target)):
            yield "there is no " + target


def target_errors(text):
    for package, name in re.findall(r"(?:bazelw [^`\n]*?|`)//([\w/]+)(?::(\w+))?", text):
        name = name or package.split("/")[-1]
        build = os.path.join(package, "BUILD")
        if not os.path.exists(os.path.join(ROOT, build)) or not re.search(r'name = "%s"' % name, read(build)):
            yield "there is no target //%s:%s" % (package, name)


def main():
    files = ["README.md", "CONTRIBUTING.md"] + sorted(os.path.relpath(p, ROOT) for p in glob.glob(ROOT + "/docs/*.md"))
    errors = []
    for path in files:
        text = read(path)
        for error in [*code_errors(text), *link_errors(text, os.path.dirname(path)), *target_errors(text)]:
            errors.append("%s: %s" % (path, error))
    print("\n".join(errors) or "%d files" % len(files))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
