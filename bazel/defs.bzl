"""The rules that all C++ code of this repository is built with.

They put the language version, the warnings, the include prefix and the linking mode in one place:

    load("//bazel:defs.bzl", "shardweave_cc_library", "shardweave_cc_test")

    shardweave_cc_library(
        name = "placement",
        srcs = ["placement.cc"],
        hdrs = ["placement.h"],          # included as "shardweave/placement/placement.h"
        visibility = ["//visibility:public"],
        deps = ["@absl//:absl"],
    )

    shardweave_cc_test(
        name = "placement_test",
        srcs = ["placement_test.cc"],    # GoogleTest and its main are there
        deps = [":placement"],
    )

    shardweave_cc_tests(                 # :layout_test and :plan_test, one program
        name = "tests",
        srcs = ["layout_test.cc", "plan_test.cc"],
        deps = [":placement"],
    )
"""

load("//bazel:cc_interface.bzl", "cc_interface")
load("//bazel:together.bzl", "together")

_COPTS = [
    "-std=c++20",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wnon-virtual-dtor",
    "-Woverloaded-virtual",
    "-Wimplicit-fallthrough",
    "-Werror",
    # Designated initializers leave members out on purpose.
    "-Wno-missing-field-initializers",
    # False alarms of GCC 12 inside std::string (GCC bug 105651).
    "-Wno-restrict",
    # Takes source files that are compiled together for headers.
    "-Wno-subobject-linkage",
]

_C_COPTS = [
    "-std=c11",
    "-Wall",
    "-Wextra",
    "-pedantic",
    "-Werror",
]

# What only tests run is compiled faster: a sixth of a file's time. (-O0 would save as much again, but programs would link its
# copies of inline functions, with which all of them is slower.)
TEST_COPTS = ["-O1"]

_LIBTORCH = "@libtorch"

def _precompiled(deps, header = "libtorch_pch"):
    """The options and dependencies of C++ code with such deps: who names LibTorch gets its headers precompiled."""
    if type(deps) != "list" or _LIBTORCH not in deps:
        return struct(copts = _COPTS, deps = deps)
    return struct(copts = _COPTS + ["-include", "bazel/%s.h" % header], deps = deps + ["//bazel:" + header])

# For the sanitizers; see .bazelrc.
_SUPPRESSIONS = [
    Label("//tools/sanitizers:lsan.supp"),
    Label("//tools/sanitizers:tsan.supp"),
]

def shardweave_c_library(name, **kwargs):
    """A library of C11, as strict as a host's compiler may be.

    Args:
      name: the target.
      **kwargs: further attributes of cc_library.
    """
    native.cc_library(
        name = name,
        copts = _C_COPTS,
        linkstatic = True,
        **kwargs
    )

def shardweave_c_binary(name, **kwargs):
    """A program in C11.

    Args:
      name: the target.
      **kwargs: further attributes of cc_binary.
    """
    native.cc_binary(
        name = name,
        copts = _C_COPTS,
        linkstatic = True,
        **kwargs
    )

def shardweave_c_test(name, data = [], size = "small", **kwargs):
    """A test in C11, with its own main.

    Args:
      name: the target.
      data: files that the test reads.
      size: as of shardweave_cc_test.
      **kwargs: further attributes of cc_test.
    """
    native.cc_test(
        name = name,
        size = size,
        copts = _C_COPTS,
        data = data + _SUPPRESSIONS,
        linkstatic = True,
        **kwargs
    )

def _compiled_together(name, srcs, count, testonly, own_namespaces = False):
    """`srcs`, of which `count` source files at a time are compiled as one, and the options for that; 1: as they are."""
    if count == 1:
        return struct(srcs = srcs, copts = [])
    sources = [src for src in srcs if src.endswith(".cc")]
    together(
        name = name + "_together",
        srcs = sources,
        count = count,
        own_namespaces = own_namespaces,
        testonly = testonly,
    )
    repository = native.repository_name()[1:]
    folder = ("external/%s/" % repository if repository else "") + native.package_name()
    return struct(
        srcs = [src for src in srcs if src not in sources] + select({
            "//bazel:not_together": sources,
            "//conditions:default": [":" + name + "_together"],
        }),
        # What they include from beside themselves.
        copts = ["-iquote", folder],
    )

def shardweave_cc_library(
        name,
        srcs = [],
        hdrs = [],
        deps = [],
        implementation_deps = [],
        copts = [],
        together = 1,
        visibility = ["//visibility:private"],
        **kwargs):
    """A C++ library whose headers are included as "shardweave/<package>/<header>".

    Private by default. With testonly = True only tests and other testonly targets may use it.
    It is linked into programs as an archive: there is one copy of everything in a process.

    Args:
      name: the target.
      srcs: sources, and headers for them alone.
      hdrs: public headers.
      deps: what it uses. Who includes LibTorch's headers names "@libtorch".
      implementation_deps: what only its sources use: who depends on the library alone cannot include headers of these.
      copts: more compiler options for this target only.
      together: how many sources are compiled as one; see together.bzl.
      visibility: who may depend on it; private unless said.
      **kwargs: further attributes of cc_library.
    """
    package = native.package_name()
    testonly = kwargs.get("testonly", False)
    precompiled = _precompiled(deps, "libtorch_test_pch" if testonly else "libtorch_pch")
    compiled = _compiled_together(name, srcs, together, testonly)
    all_copts = precompiled.copts + compiled.copts + (TEST_COPTS if testonly else []) + copts
    headers = dict(
        hdrs = hdrs,
        include_prefix = "shardweave/" + package if hdrs else None,
        strip_include_prefix = "/" + package if hdrs else None,
    )
    if not implementation_deps:
        native.cc_library(
            name = name,
            srcs = compiled.srcs,
            copts = all_copts,
            deps = precompiled.deps,
            linkstatic = True,
            visibility = visibility,
            **dict(headers, **kwargs)
        )
        return
    native.cc_library(
        name = name + "_headers",
        deps = deps,
        # clang-tidy sees them where the sources include them.
        tags = ["headers_of_sources"],
        testonly = testonly,
        **headers
    )
    native.cc_library(
        name = name + "_compiled",
        srcs = compiled.srcs,
        copts = all_copts,
        deps = [":" + name + "_headers"] + precompiled.deps + implementation_deps,
        linkstatic = True,
        **kwargs
    )
    cc_interface(
        name = name,
        headers = ":" + name + "_headers",
        testonly = testonly,
        visibility = visibility,
        deps = [":" + name + "_compiled"],
    )

def shardweave_cc_binary(name, srcs = [], deps = [], copts = [], together = 1, **kwargs):
    """A C++ program (or with linkshared = True a shared library) with the repository's options.

    Args:
      name: the target.
      srcs: sources and headers.
      deps: as of shardweave_cc_library.
      copts: more compiler options for this target only.
      together: as of shardweave_cc_library.
      **kwargs: further attributes of cc_binary.
    """
    precompiled = _precompiled(deps)
    compiled = _compiled_together(name, srcs, together, kwargs.get("testonly", False))
    native.cc_binary(
        name = name,
        srcs = compiled.srcs,
        copts = precompiled.copts + compiled.copts + copts,
        deps = precompiled.deps,
        **kwargs
    )

def shardweave_cc_test(name, deps = [], copts = [], data = [], size = "small", main = "@googletest//:gtest_main", **kwargs):
    """A test, with GoogleTest and its main unless said otherwise.

    Args:
      name: the target.
      deps: what is tested; "@libtorch" as of shardweave_cc_library.
      copts: more compiler options for this target only.
      data: files that the test reads.
      size: "small" (a minute at most), "medium" (five), "large".
      main: the library with main(); "@googletest//:gtest" if a source file has its own, None for no GoogleTest at all.
      **kwargs: further attributes of cc_test.
    """
    precompiled = _precompiled(deps, "libtorch_test_pch" if main else "libtorch_pch")
    native.cc_test(
        name = name,
        size = size,
        copts = precompiled.copts + TEST_COPTS + copts,
        data = data + _SUPPRESSIONS,
        linkstatic = True,
        deps = precompiled.deps + ([main] if main else []),
        **kwargs
    )

def shardweave_cc_tests(name, srcs, deps, hdrs = [], together = 6, size = "small", data = [], **kwargs):
    """Tests with GoogleTest and its main, each named as its file, that are compiled and linked a few at a time.

    A file of LibTorch's templates takes ten seconds, six such files as one take twenty. Each test is a process of its own
    all the same, which runs what is in its file; other files' global variables are there, so what replaces operator new or
    registers operators is a shardweave_cc_test.

    Args:
      name: of the programs, with a number: what one debugs. A test's own name runs it alone.
      srcs: the tests: dir/a_test.cc is a test "a_test".
      deps: what is tested; "@libtorch" as of shardweave_cc_library.
      hdrs: headers for them alone.
      together: how many are one program.
      size: of each, as of shardweave_cc_test.
      data: files that the tests read.
      **kwargs: further attributes of each test.
    """
    precompiled = _precompiled(deps, "libtorch_test_pch")
    for begin in range(0, len(srcs), together):
        part = srcs[begin:begin + together]
        program = "%s_%d" % (name, begin // together)
        compiled = _compiled_together(program, part, together, testonly = True, own_namespaces = True)
        native.cc_binary(
            name = program,
            testonly = True,
            srcs = compiled.srcs + hdrs,
            copts = precompiled.copts + TEST_COPTS + compiled.copts,
            deps = precompiled.deps + [Label("//bazel:test_main")],
        )
        for src in part:
            native.sh_test(
                name = src.split("/")[-1][:-len(".cc")],
                size = size,
                srcs = [":" + program],
                data = data + _SUPPRESSIONS,
                **kwargs
            )

def shardweave_cc_benchmark(name, deps = [], tags = [], **kwargs):
    """A Google Benchmark program with its main: `./bazelw run //mesh:device_mesh_benchmark`.

    Args:
      name: the target.
      deps: what is measured.
      tags: tags.
      **kwargs: further attributes of shardweave_cc_binary.
    """
    shardweave_cc_binary(
        name = name,
        deps = deps + ["@benchmark//:benchmark_main"],
        tags = tags + ["benchmark"],
        **kwargs
    )
