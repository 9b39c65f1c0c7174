"""CUDA from the PyPI wheels or from CUDA_HOME: headers of its runtime and driver, and the compiler. No library: programs look for
those when they run."""

load("//third_party:packages.bzl", "fetch_wheels", "run", "user_copy")

_HEADERS = {
    "nvidia-cuda-runtime==13.0.96": {
        "x86_64": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
        "aarch64": "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",
    },
    # Of which the runtime's headers include some.
    "nvidia-cuda-crt==13.0.88": {
        "x86_64": "2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4",
        "aarch64": "ee2ea2a97073e02ee62bb27841f437332be2c248e3eac013df07997ada39c003",
    },
}

_COMPILER = {
    "nvidia-cuda-nvcc==13.0.88": {
        "x86_64": "56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03",
        "aarch64": "c7ff28f86a24effdc6c034fa15230c549a273e4771b10a7fec14996f8cf3307f",
    },
    # Its device half: cicc and libdevice.
    "nvidia-nvvm==13.0.88": {
        "x86_64": "c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0",
        "aarch64": "c4376a291d72d22a315d9d2f69bdae8f8cd83a627f75bad395cee49a0fe65dc1",
    },
}

# The first for compute capability 10.0.
_OLDEST_COMPILER = (12, 8)

_UNPACK_HEADERS = "set -e; for wheel in wheels/*.whl; do unzip -q -o $wheel '*/include/*'; done; rm -rf wheels; mv nvidia/cu13/include include"

def _cuda_impl(ctx):
    home = user_copy(ctx, "CUDA_HOME", "include/cuda_runtime_api.h")
    if home:
        ctx.symlink(home + "/include", "include")
    else:
        fetch_wheels(ctx, _HEADERS, "CUDA_HOME")
        run(ctx, ["sh", "-c", _UNPACK_HEADERS], "cannot unpack CUDA's headers (is unzip there?)")
    ctx.file("BUILD.bazel", """
cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
""", executable = False)

cuda_repository = repository_rule(
    implementation = _cuda_impl,
    environ = ["CUDA_HOME"],
    doc = "@cuda//:headers. CUDA_HOME: a CUDA Toolkit, with include/cuda_runtime_api.h.",
)

_UNPACK_COMPILER = """
set -e
for wheel in wheels/*.whl; do unzip -q -o $wheel 'nvidia/cu13/*' -x '*/lib/*'; done
rm -rf wheels
mv nvidia/cu13/* .
rm -rf nvidia
"""

def _check_version(ctx, nvcc):
    """Stops the build if nvcc is too old for the kernels; returns what it says of itself."""
    said = run(ctx, [nvcc, "--version"], "cannot run %s" % nvcc)
    release = said.partition("release ")[2].partition(",")[0].split(".")
    if len(release) < 2 or not release[0].isdigit() or not release[1].isdigit():
        fail("%s --version does not say which release it is:\n%s" % (nvcc, said))
    if (int(release[0]), int(release[1])) < _OLDEST_COMPILER:
        fail("%s is of CUDA %s; kernels for compute capability 10.0 want %d.%d or newer. Point CUDA_HOME to a newer Toolkit, or unset it to fetch the compiler." %
             (nvcc, ".".join(release), _OLDEST_COMPILER[0], _OLDEST_COMPILER[1]))
    return said

def _cuda_compiler_impl(ctx):
    ctx.symlink(Label("//third_party/cuda:compiler.bzl"), "compiler.bzl")
    home = user_copy(ctx, "CUDA_HOME", "bin/nvcc")
    if home:
        # Where it is: a Toolkit has gigabytes that nvcc does not read.
        nvcc = "nvcc_path = \"%s/bin/nvcc\"" % home
        files = "[\"version.txt\"]"
        said = _check_version(ctx, home + "/bin/nvcc")
    else:
        fetch_wheels(ctx, dict(_HEADERS, **_COMPILER), "CUDA_HOME")
        run(ctx, ["sh", "-c", _UNPACK_COMPILER], "cannot unpack CUDA's compiler (is unzip there?)")
        nvcc = "nvcc = \"bin/nvcc\""
        files = "[\"version.txt\"] + glob([\"bin/**\", \"include/**\", \"nvvm/**\"])"
        said = _check_version(ctx, ctx.path("bin/nvcc"))
    ctx.file("version.txt", said, executable = False)
    ctx.file("BUILD.bazel", """
load(":compiler.bzl", "cuda_compiler")

cuda_compiler(
    name = "compiler",
    files = %s,
    %s,
    visibility = ["//visibility:public"],
)
""" % (files, nvcc), executable = False)

cuda_compiler_repository = repository_rule(
    implementation = _cuda_compiler_impl,
    environ = ["CUDA_HOME"],
    doc = "@cuda_compiler//:compiler, fetched by --config=cuda only. CUDA_HOME: a CUDA Toolkit, with bin/nvcc.",
)
