"""NCCL's header, from the PyPI wheel or from NCCL_HOME. No library: programs look for it when they run."""

load("//third_party:packages.bzl", "fetch_wheels", "run", "user_copy")

_WHEELS = {
    "nvidia-nccl-cu13==2.28.9": {
        "x86_64": "e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42",
        "aarch64": "01c873ba1626b54caa12272ed228dc5b2781545e0ae8ba3f432a8ef1c6d78643",
    },
}

_UNPACK = "set -e; mkdir include; unzip -q -o -j wheels/*.whl '*/include/nccl.h' -d include; rm -rf wheels"

def _nccl_impl(ctx):
    home = user_copy(ctx, "NCCL_HOME", "include/nccl.h")
    if home:
        ctx.symlink(home + "/include/nccl.h", "include/nccl.h")
    else:
        fetch_wheels(ctx, _WHEELS, "NCCL_HOME")
        run(ctx, ["sh", "-c", _UNPACK], "cannot unpack NCCL's header (is unzip there?)")
    ctx.file("BUILD.bazel", """
cc_library(
    name = "headers",
    hdrs = ["include/nccl.h"],
    includes = ["include"],
    visibility = ["//visibility:public"],
    deps = ["@cuda//:headers"],
)
""", executable = False)

nccl_repository = repository_rule(
    implementation = _nccl_impl,
    environ = ["NCCL_HOME"],
    doc = "@nccl//:headers. NCCL_HOME: a prefix with include/nccl.h.",
)
