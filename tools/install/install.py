#!/usr/bin/env python3
"""Installs the C header and library with all that they need at run time.

    ./bazelw run //tools:install -- --prefix=/opt/shardweave
    ./bazelw run //tools:install -- --archive=$PWD/shardweave.tar.gz

The tree can be moved: everything in it finds everything else by its own place.

    include/shardweave.h
    lib/libshardweave.so -> libshardweave.so.0.1 -> libshardweave.so.0.1.0
    lib/shardweave/             LibTorch's libraries and the private Gloo, whatever libshardweave.so needs of them
    lib/pkgconfig/shardweave.pc
    lib/cmake/shardweave/       find_package(shardweave)
    share/doc/shardweave/LICENSE
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

# These every machine has of its own.
SYSTEM = re.compile(r"^(ld-linux.*|libc|libm|libdl|librt|libutil|libpthread|libgcc_s|libstdc\+\+)\.so(\.\d+)*$")

PKG_CONFIG = """prefix=${{pcfiledir}}/../..
libdir=${{prefix}}/lib
includedir=${{prefix}}/include

Name: shardweave
Description: Sharded training on LibTorch, C interface
Version: {version}
Cflags: -I${{includedir}}
Libs: -L${{libdir}} -lshardweave -Wl,-rpath,${{libdir}} -Wl,-rpath-link,${{libdir}}/shardweave
"""

CMAKE = """# find_package(shardweave) gives the target shardweave::shardweave.
get_filename_component(_shardweave_prefix "${{CMAKE_CURRENT_LIST_DIR}}/../../.." ABSOLUTE)
if(NOT TARGET shardweave::shardweave)
  add_library(shardweave::shardweave SHARED IMPORTED)
  set_target_properties(shardweave::shardweave PROPERTIES
    IMPORTED_LOCATION "${{_shardweave_prefix}}/lib/libshardweave.so.{version}"
    IMPORTED_SONAME "{soname}"
    INTERFACE_INCLUDE_DIRECTORIES "${{_shardweave_prefix}}/include"
    INTERFACE_LINK_OPTIONS "-Wl,-rpath-link,${{_shardweave_prefix}}/lib/shardweave")
endif()
unset(_shardweave_prefix)
"""

CMAKE_VERSION = """set(PACKAGE_VERSION "{version}")
if(PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION)
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
elseif(PACKAGE_FIND_VERSION_MAJOR VERSION_EQUAL {major} AND PACKAGE_FIND_VERSION_MINOR VERSION_EQUAL {minor})
  set(PACKAGE_VERSION_COMPATIBLE TRUE)
  if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
    set(PACKAGE_VERSION_EXACT TRUE)
  endif()
else()
  set(PACKAGE_VERSION_COMPATIBLE FALSE)
endif()
"""


def dynamic(library):
    """What a library says of itself: its soname and those it needs."""
    text = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    soname = re.search(r"\(SONAME\).*\[(.*)\]", text)
    return soname.group(1) if soname else None, re.findall(r"\(NEEDED\).*\[(.*)\]", text)


def libraries_in(folder):
    found = {}
    for where, _, names in os.walk(folder, followlinks=True):
        for name in names:
            if ".so" in name:
                found.setdefault(name, os.path.join(where, name))
    return found


def closure(library, available):
    """The libraries that `library` needs, and what those need, by name: all that the machine has not of its own."""
    needed, todo = {}, [library]
    while todo:
        user = todo.pop()
        for name in dynamic(user)[1]:
            if name in needed or SYSTEM.match(name):
                continue
            # Else what a package brings along for itself, as LibTorch's OpenMP.
            found = available.get(name) or os.path.join(os.path.dirname(os.path.realpath(user)), name)
            if not os.path.exists(found):
                sys.exit(f"install: {os.path.basename(user)} needs {name}, which is not among what was built")
            needed[name] = found
            todo.append(found)
    return needed


def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def place(source, path, link=False):
    """Copies (or with `link` leads to) a file, in the place of what is there."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        os.remove(path)
    if link:
        os.symlink(os.path.realpath(source), path)
    else:
        shutil.copyfile(source, path)
        os.chmod(path, 0o755 if ".so" in os.path.basename(path) else 0o644)


def lead(name, path):
    if os.path.lexists(path):
        os.remove(path)
    os.symlink(name, path)


def install(runfiles, prefix, link):
    root = os.path.join(runfiles, "shardweave")
    header = os.path.join(root, "capi/shardweave.h")
    library = os.path.join(root, "capi/libshardweave.so")
    with open(header, encoding="utf-8") as file:
        text = file.read()
    major, minor, patch = (re.search(rf"#define SWV_VERSION_{part} (\d+)", text).group(1)
                           for part in ("MAJOR", "MINOR", "PATCH"))
    version = f"{major}.{minor}.{patch}"
    soname = dynamic(library)[0]
    if soname != f"libshardweave.so.{major}.{minor}":
        sys.exit(f"install: the library's soname is {soname}, its header says {version}")

    place(header, f"{prefix}/include/shardweave.h")
    place(library, f"{prefix}/lib/libshardweave.so.{version}")
    lead(f"libshardweave.so.{version}", f"{prefix}/lib/{soname}")
    lead(soname, f"{prefix}/lib/libshardweave.so")
    for name, source in sorted(closure(library, libraries_in(runfiles)).items()):
        place(source, f"{prefix}/lib/shardweave/{name}", link)
    values = {"version": version, "soname": soname, "major": major, "minor": minor}
    write(f"{prefix}/lib/pkgconfig/shardweave.pc", PKG_CONFIG.format(**values))
    write(f"{prefix}/lib/cmake/shardweave/shardweave-config.cmake", CMAKE.format(**values))
    write(f"{prefix}/lib/cmake/shardweave/shardweave-config-version.cmake", CMAKE_VERSION.format(**values))
    place(os.path.join(root, "LICENSE"), f"{prefix}/share/doc/shardweave/LICENSE")
    return version


def main():
    parser = argparse.ArgumentParser(prog="./bazelw run //tools:install --", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", help="the folder to install to; made if it is not there")
    parser.add_argument("--archive", help="a .tar.gz of the same tree, in a folder shardweave-VERSION")
    parser.add_argument("--link-libraries", action="store_true",
                        help="lead to LibTorch's libraries where Bazel has them instead of copying 450 MB: for tests; "
                        "such a tree cannot be moved")
    parser.add_argument("--runfiles", required=True, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.prefix and not arguments.archive:
        parser.error("wanted --prefix=DIR, --archive=FILE or both")
    # Relative to where the user is, not to where Bazel runs this.
    start = os.environ.get("BUILD_WORKING_DIRECTORY", os.getcwd())
    if arguments.prefix:
        prefix = os.path.join(start, arguments.prefix)
        version = install(arguments.runfiles, prefix, arguments.link_libraries)
        print(f"Shardweave {version} is in {prefix}")
    if arguments.archive:
        archive = os.path.join(start, arguments.archive)
        with tempfile.TemporaryDirectory() as folder:
            version = install(arguments.runfiles, folder, link=False)
            with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
                tar.add(folder, arcname=f"shardweave-{version}")
        print(f"Shardweave {version} is in {archive}")


if __name__ == "__main__":
    main()
