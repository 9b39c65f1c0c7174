#!/usr/bin/env python3
"""Writes compile_commands.json at the root of the checkout, for clangd, clang-tidy and other tools:

    ./bazelw run //tools:compile_commands

Asks Bazel how it compiles each file; builds nothing. "shardweave/mesh/device_mesh.h" then leads to the file in the checkout, by
a link outside of it. Headers that are generated, and those included without "shardweave/" (shardweave.h), are where Bazel makes
them: they are found after a build. Anew after a change of a BUILD file.
"""

import json
import os
import re
import subprocess
import sys

# What Clang does not know, what writes files, and what makes an error of a warning that only Clang has.
NOT_WANTED = ("-fno-canonical-system-headers", "-Wno-restrict", "-Wno-subobject-linkage", "-MD", "-Werror")
WITH_PATH = ("-I", "-iquote", "-isystem", "-c", "-o")


def placed(path, execution_root):
    """A path of Bazel's, as seen from the root of the checkout."""
    if path.startswith("bazel-out/"):
        return f"{execution_root}/{path}"
    if path.startswith("external/"):
        return os.path.normpath(f"{execution_root}/../../{path}")  # where it is before it is built from, too
    return path


def arguments_for_clang(arguments, execution_root, include):
    """The compiler's arguments as Clang understands them, with folders that exist."""
    result, left = [], iter(arguments)
    for argument in left:
        option = "-I" if argument.startswith("-I") else argument
        if option == "-MF":
            next(left)
        elif option == "-include":
            next(left)  # headers that the build has precompiled: files include them themselves
        elif option in WITH_PATH:
            path = argument[len(option):] or next(left)
            # Before the first of Bazel's folders of links to headers: the headers themselves.
            if "/_virtual_includes/" in path and include not in result:
                result += ["-I", include]
            result += [option, placed(path, execution_root)]
        elif argument not in NOT_WANTED and not argument.startswith("-frandom-seed="):
            result.append(argument)
    return result


def compile_commands(actions, workspace, execution_root, include):
    """The entries of compile_commands.json, one for each source file of the checkout.

    Args:
      actions: what `bazel aquery --output=jsonproto` says of compile actions, as Python values.
      workspace: the root of the checkout.
      execution_root: as of `bazel info execution_root`.
      include: a folder in which `shardweave` leads to the root of the checkout.
    """
    entries = {}
    for action in actions.get("actions", []):
        arguments = action["arguments"]
        file = arguments[arguments.index("-c") + 1]
        # Libraries for special purposes compile the same files with more options.
        if file in entries and len(entries[file][0]) <= len(arguments):
            continue
        entries[file] = (arguments, {
            "directory": workspace,
            "file": placed(file, execution_root),
            "arguments": arguments_for_clang(arguments, execution_root, include),
        })
    return [entry for _, (_, entry) in sorted(entries.items())]


def link(path, target):
    """Makes `path` lead to `target`."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(path) and os.readlink(path) == target:
        return
    if os.path.lexists(path):
        os.remove(path)
    os.symlink(target, path)


def bazel(*arguments):
    """What Bazel prints."""
    result = subprocess.run(["./bazelw", *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        sys.exit("compile_commands: this failed: ./bazelw " + " ".join(arguments))
    return result.stdout


def main():
    workspace = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
    if workspace is None:
        sys.exit("compile_commands: run it as ./bazelw run //tools:compile_commands")
    os.chdir(workspace)
    options = sys.argv[1:]
    actions = json.loads(bazel("aquery", "--include_artifacts=false", "--output=jsonproto",
                               "--define=together=no", *options,
                               'mnemonic("CppCompile", //...)'))
    # Beside what bazelw keeps: a link inside of the checkout would lead Bazel round and round.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME") or "/tmp", ".cache")
    include = os.path.join(cache, "shardweave", "include" + workspace.replace("/", "-"))
    link(os.path.join(include, "shardweave"), workspace)
    entries = compile_commands(actions, workspace, bazel("info", "execution_root", *options).strip(), include)
    if not entries:
        sys.exit("compile_commands: Bazel knows of no file to compile")
    with open("compile_commands.json.new", "w", encoding="utf-8") as file:
        json.dump(entries, file, indent=1)
        file.write("\n")
    os.replace("compile_commands.json.new", "compile_commands.json")
    print(f"{len(entries)} files in {workspace}/compile_commands.json")


if __name__ == "__main__":
    main()
