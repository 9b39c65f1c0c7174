"""LibTorch, from the PyPI wheel or from LIBTORCH_HOME."""

load("//third_party:packages.bzl", "fetch_wheels", "run", "user_copy")

# libtorch_cpu.so needs nothing else from outside than these two NVIDIA libraries.
_WHEELS = {
    "torch==2.11.0": {
        "x86_64": "7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a",
        "aarch64": "d91aac77f24082809d2c5a93f52a5f085032740a1ebc9252a7b052ef5a4fddc6",
    },
    "nvidia-cuda-runtime==13.0.96": {
        "x86_64": "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
        "aarch64": "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",
    },
    "nvidia-cuda-cupti==13.0.85": {
        "x86_64": "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
        "aarch64": "796bd679890ee55fb14a94629b698b6db54bcfd833d391d5e94017dd9d7d3151",
    },
}

# The CUDA half of the wheel cannot be loaded without 2 GB of further wheels; a machine with GPUs sets LIBTORCH_HOME.
_UNPACK = """
set -e
for wheel in wheels/*.whl; do
  case "$wheel" in
    wheels/torch*) unzip -q -o "$wheel" 'torch/lib/*' 'torch/include/*' -x '*/libtorch_python*' '*/libtorch_cuda*' '*/libtorch_nvshmem*' ;;
    *) unzip -q -o "$wheel" 'nvidia/*' -x '*.a' ;;
  esac
done
rm -rf wheels
"""

def _libtorch_impl(ctx):
    ctx.symlink(Label("//third_party/libtorch:libtorch.BUILD"), "BUILD.bazel")
    home = user_copy(ctx, "LIBTORCH_HOME", "lib/libtorch_cpu.so")
    if home:
        ctx.symlink(home + "/lib", "torch/lib")
        ctx.symlink(home + "/include", "torch/include")
        nvidia = ctx.path(home + "/../nvidia")
        if nvidia.exists:
            ctx.symlink(nvidia, "nvidia")
    else:
        fetch_wheels(ctx, _WHEELS, "LIBTORCH_HOME")
        run(ctx, ["sh", "-c", _UNPACK], "cannot unpack LibTorch's wheels (is unzip there?)")

libtorch_repository = repository_rule(
    implementation = _libtorch_impl,
    environ = ["LIBTORCH_HOME"],
    doc = "@libtorch//:libtorch. LIBTORCH_HOME: a folder with lib/ and include/, such as the torch folder of an installed wheel; NVIDIA's libraries are taken from ../nvidia beside it if they are there.",
)
