#!/usr/bin/env python3
"""Installs the C header and library with all that they need at run time, and the launcher; with --cpp for C++, too.

    ./bazelw run //tools:install -- --prefix=/opt/shardweave
    ./bazelw run //tools:install -- --prefix=/opt/shardweave --cpp
    ./bazelw run //tools:install -- --archive=$PWD/shardweave.tar.gz

The tree can be moved: everything in it finds everything else by its own place.

    bin/shardweave-launch       starts the ranks of any program
    include/shardweave.h
    lib/libshardweave.so -> libshardweave.so.0.4 -> libshardweave.so.0.4.0
    lib/shardweave/             LibTorch's libraries and the private Gloo, whatever libshardweave.so needs of them
    lib/pkgconfig/shardweave.pc
    lib/cmake/shardweave/       find_package(shardweave)
    share/doc/shardweave/LICENSE

With --cpp:

    include/shardweave/<component>/*.h
    include/shardweave/third_party/     LibTorch's headers and Abseil's
    lib/libshardweave_cpp.so -> libshardweave_cpp.so.0.4.0, whose ABI is that version's alone
    lib/pkgconfig/shardweave-cpp.pc
    lib/cmake/shardweave/shardweave-cpp.cmake, the target shardweave::cpp
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
# And shardweave::cpp, if it was installed.
include("${{CMAKE_CURRENT_LIST_DIR}}/shardweave-cpp.cmake" OPTIONAL)
unset(_shardweave_prefix)
"""

CPP_PKG_CONFIG = """prefix=${{pcfiledir}}/../..
libdir=${{prefix}}/lib
includedir=${{prefix}}/include
parts=${{includedir}}/shardweave/third_party

Name: shardweave-cpp
Description: Sharded training on LibTorch, C++ interface
Version: {version}
Cflags: -std=c++20 -pthread -I${{includedir}} -isystem ${{parts}}/absl -isystem ${{parts}}/libtorch -isystem ${{parts}}/libtorch/torch/csrc/api/include
Libs: -L${{libdir}} -L${{libdir}}/shardweave -pthread -Wl,--no-as-needed -lshardweave_cpp -ltorch_cpu -lc10 -Wl,-rpath,${{libdir}}:${{libdir}}/shardweave -Wl,-rpath-link,${{libdir}}/shardweave
"""

CPP_CMAKE = """# The target shardweave::cpp: headers, LibTorch, Abseil and compiler options.
if(NOT TARGET shardweave::cpp)
  add_library(shardweave::cpp SHARED IMPORTED)
  set(_shardweave_parts "${{_shardweave_prefix}}/include/shardweave/third_party")
  set_target_properties(shardweave::cpp PROPERTIES
    IMPORTED_LOCATION "${{_shardweave_prefix}}/lib/{library}"
    IMPORTED_SONAME "{library}"
    INTERFACE_COMPILE_FEATURES cxx_std_20
    INTERFACE_COMPILE_OPTIONS -pthread
    INTERFACE_INCLUDE_DIRECTORIES
      "${{_shardweave_prefix}}/include;${{_shardweave_parts}}/absl;${{_shardweave_parts}}/libtorch;${{_shardweave_parts}}/libtorch/torch/csrc/api/include"
    INTERFACE_LINK_LIBRARIES
      "-Wl,--no-as-needed;${{_shardweave_prefix}}/lib/shardweave/libtorch_cpu.so;${{_shardweave_prefix}}/lib/shardweave/libc10.so"
    INTERFACE_LINK_OPTIONS "-pthread;-Wl,-rpath-link,${{_shardweave_prefix}}/lib/shardweave")
  unset(_shardweave_parts)
endif()
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


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def place(source, path, link=False, mode=0o644):
    """Copies (or with `link` leads to) a file or a folder, in the place of what is there."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    remove(path)
    if link:
        os.symlink(os.path.realpath(source), path)
    elif os.path.isdir(source):
        shutil.copytree(source, path, copy_function=place)
    else:
        shutil.copyfile(source, path)
        os.chmod(path, 0o755 if ".so" in os.path.basename(path) else mode)


def lead(name, path):
    remove(path)
    os.symlink(name, path)


def compiled(root):
    """Of what the target :cpp brings along: its headers by how they are included, and its archives."""
    headers, archives = {}, []
    for where, folders, names in os.walk(root):
        if where == root and "external" in folders:
            folders.remove("external")  # the same again
        for name in names:
            path = os.path.join(where, name)
            _, _, included = path.partition("/_virtual_includes/")
            if included:
                headers[included.partition("/")[2]] = path
            elif name.endswith((".a", ".lo")):
                archives.append(path)
    return headers, sorted(archives)


def install_cpp(runfiles, prefix, version, link):
    root = os.path.join(runfiles, "shardweave")
    headers, archives = compiled(root)
    # Abseil's code that may stand in a shared library; the archive in @absl may not.
    # Bazel may put it in either place, or in both.
    places = [os.path.join(runfiles, "absl_source"), os.path.join(root, "external/absl_source")]
    absl = next(filter(None, (compiled(place)[1] for place in places)), None)
    if absl is None:
        sys.exit("install: there is no archive of Abseil in " + " or ".join(places))
    archives += absl
    remove(f"{prefix}/include/shardweave")  # no header of an older version stays
    for included, source in sorted(headers.items()):
        place(source, f"{prefix}/include/{included}")
    parts = f"{prefix}/include/shardweave/third_party"
    place(os.path.join(runfiles, "absl/include/absl"), f"{parts}/absl/absl", link)
    place(os.path.join(runfiles, "libtorch/torch/include"), f"{parts}/libtorch", link)

    # Directly, as the C library: what finds one of these is then this library's run path.
    needed = [name for name in dynamic(f"{prefix}/lib/libshardweave.so.{version}")[1] if not SYSTEM.match(name)]
    library = f"libshardweave_cpp.so.{version}"
    output = f"{prefix}/lib/{library}"
    remove(output)
    # All of each archive: what registers itself is referred to by nobody, and Abseil's code is here for the programs.
    command = [os.environ.get("CXX", "c++"), "-shared", "-o", output, f"-Wl,-soname,{library}", "-Wl,-z,defs", "-pthread",
               "-Wl,--whole-archive", *archives, "-Wl,--no-whole-archive", f"-L{prefix}/lib/shardweave", "-Wl,--no-as-needed",
               *(f"-l:{name}" for name in needed), f"-Wl,-rpath-link,{prefix}/lib/shardweave", "-Wl,-rpath,$ORIGIN/shardweave"]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit("install: the C++ library was not linked; its command was: " + " ".join(command))
    lead(library, f"{prefix}/lib/libshardweave_cpp.so")
    values = {"version": version, "library": library}
    write(f"{prefix}/lib/pkgconfig/shardweave-cpp.pc", CPP_PKG_CONFIG.format(**values))
    write(f"{prefix}/lib/cmake/shardweave/shardweave-cpp.cmake", CPP_CMAKE.format(**values))


def install(runfiles, prefix, link, cpp):
    root = os.path.join(runfiles, "shardweave")
    header = os.path.join(root, "capi/shardweave.h")
    library = os.path.join(root, "capi/libshardweave.so")
    with open(header, encoding="utf-8") as file:
        text = file.read()
    major, minor, patch = (re.search(rf"#define SWV_VERSION_{part} (\d+)", text).group(1)
                           for part in ("MAJOR", "MINOR", "PATCH"))
    version = f"{major}.{minor}.{patch}"
    soname = dynamic(library)[0]
    if soname != "libshardweave.so." + (f"0.{minor}" if major == "0" else major):
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
    place(os.path.join(root, "tools/launch/launch"), f"{prefix}/bin/shardweave-launch", mode=0o755)
    if cpp:
        install_cpp(runfiles, prefix, version, link)
    return version


def of_nobody(member):
    """A member of an archive as anybody may unpack it, and everybody read it."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode |= 0o755 if member.isdir() else 0o444
    return member


def main():
    parser = argparse.ArgumentParser(prog="./bazelw run //tools:install --", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", help="the folder to install to; made if it is not there")
    parser.add_argument("--archive", help="a .tar.gz of the same tree, in a folder shardweave-VERSION")
    parser.add_argument("--cpp", action="store_true", help="the C++ headers and library, too, with LibTorch's and Abseil's")
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
        version = install(arguments.runfiles, prefix, arguments.link_libraries, arguments.cpp)
        print(f"Shardweave {version} is in {prefix}")
    if arguments.archive:
        archive = os.path.join(start, arguments.archive)
        with tempfile.TemporaryDirectory() as folder:
            version = install(arguments.runfiles, folder, False, arguments.cpp)
            with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
                tar.add(folder, arcname=f"shardweave-{version}", filter=of_nobody)
        print(f"Shardweave {version} is in {archive}")


if __name__ == "__main__":
    main()
