"""nvcc as a toolchain. This file stands in @cuda_compiler, too, whose BUILD file loads it there."""

def _cuda_compiler_impl(ctx):
    return [platform_common.ToolchainInfo(
        nvcc = ctx.file.nvcc.path if ctx.file.nvcc else ctx.attr.nvcc_path,
        files = depset(ctx.files.files),
    )]

cuda_compiler = rule(
    implementation = _cuda_compiler_impl,
    attrs = {
        "files": attr.label_list(allow_files = True, doc = "What it reads when it runs, and what tells its version."),
        "nvcc": attr.label(allow_single_file = True, doc = "nvcc, if it is among the files."),
        "nvcc_path": attr.string(doc = "Else: where it is on this machine."),
    },
    doc = "nvcc, for //bazel:cuda.bzl.",
)
