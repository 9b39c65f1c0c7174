#!/usr/bin/env python3
"""Checks README.md, CONTRIBUTING.md, docs/*.md and the headers of the checkout that WORKSPACE leads to.

Every block of C++ and C stands word for word in the file that the comment before it names:

    <!-- examples/readme_snippet.cc -->
    ```cpp

Every example of code in a comment of a header that is installed (lines that are indented behind the slashes) stands in
a tests/docs/header_examples*.cc, which is compiled; blanks and comments do not count, and "..." stands for anything.

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


# Whose examples are compiled, too.
NOT_INSTALLED = ["modules/nn/attention.h", "placement/layout_samples.h", "placement/simulated_mesh.h"]


def installed_headers(names):
    """The headers in the checkout, of the file with the names by which they are included."""
    with open(names, encoding="utf-8") as file:
        return [line.strip().split("/", 1)[1] for line in file]


def header_examples(text):
    """The blocks of code in comments, as lists of lines."""
    for block in re.findall(r"(?:^ *//  .*\n)+", text, re.M):
        lines = [re.sub(r"^ *//", "", line) for line in block.splitlines()]
        code = [re.sub(r"\s+//.*", "", line).strip() for line in lines]
        is_list = code[0].startswith("- ") or code[0].startswith("{")
        if not is_list and any(line.endswith((";", "{")) for line in code):
            yield lines


def tokens(lines):
    """Without blanks and comments."""
    return re.sub(r"\s+", "", "".join(re.sub(r"(^|\s)//.*", "", line) for line in lines))


def header_errors(text, examples):
    for lines in header_examples(text):
        end = 0
        for piece in tokens(lines).split("..."):
            start = examples.find(piece, end)
            if start < 0:
                yield "this is not in tests/docs/header_examples*.cc:\n" + "\n".join(lines)
                break
            end = start + len(piece)


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
    files_of_examples = sorted(glob.glob(ROOT + "/tests/docs/header_examples*.cc"))
    examples = "\n".join(tokens(read(os.path.relpath(p, ROOT)).splitlines()) for p in files_of_examples)
    headers = sorted(installed_headers(sys.argv[1]) + NOT_INSTALLED)
    for path in headers:
        errors += ["%s: %s" % (path, error) for error in header_errors(read(path), examples)]
    print("\n".join(errors) or "%d files" % len(files + headers))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
