"""Headers of CUDA's runtime and driver, from the PyPI wheels or from CUDA_HOME. No library: programs look for those when they run."""

load("//third_party:packages.bzl", "fetch_wheels", "run", "user_copy")

_WHEELS = {
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

_UNPACK = "set -e; for wheel in wheels/*.whl; do unzip -q -o $wheel '*/include/*'; done; rm -rf wheels; mv nvidia/cu13/include include"

def _cuda_impl(ctx):
    home = user_copy(ctx, "CUDA_HOME", "include/cuda_runtime_api.h")
    if home:
        ctx.symlink(home + "/include", "include")
    else:
        fetch_wheels(ctx, _WHEELS, "CUDA_HOME")
        run(ctx, ["sh", "-c", _UNPACK], "cannot unpack CUDA's headers (is unzip there?)")
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
