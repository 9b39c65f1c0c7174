"""CUDA kernels as data of a program.

    cuda_object(
        name = "random_kernels",
        src = "random_kernels.cu",
        symbol = "shardweave_random_kernels",
        deps = [":random_kernel"],      # the libraries whose headers it includes
    )

    shardweave_cc_library(
        name = "random_fill",
        srcs = select({
            "//bazel:cuda": ["random_fill.cc"],     # has: extern "C" const unsigned char shardweave_random_kernels[];
            "//conditions:default": ["not_built.cc"],
        }),
        deps = select({
            "//bazel:cuda": [":random_kernels"],
            "//conditions:default": [],
        }),
    )

nvcc makes device code only, a fat binary for the driver (cuLibraryLoadData); it is in the program as an array from `symbol` to
`symbol`_end. So no object of nvcc's and no CUDA runtime is linked, and the program starts where there is no driver.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

_COMPILER = "@shardweave//third_party/cuda:compiler_type"

# One of each generation since 8.0; the PTX of the newest is for those after it.
_ARCHITECTURES = [80, 90, 100]

_OPTIONS = [
    "-std=c++20",
    "-O3",
    # Rounded as on the host: see dtensor/engine/random_arithmetic.h.
    "-fmad=false",
    "-Werror=all-warnings",
]

# The end, too: a fat binary says its size only in a header that NVIDIA has not documented.
_ASSEMBLY = """
    .section .rodata
    .balign 64
    .globl {symbol}
    .hidden {symbol}
{symbol}:
    .incbin "{file}"
    .globl {symbol}_end
    .hidden {symbol}_end
{symbol}_end:
    .byte 0
    .section .note.GNU-stack,"",%progbits
"""

def _compile(ctx, out, arguments, what):
    """Runs nvcc on the source."""
    compiler = ctx.toolchains[_COMPILER]
    cc = find_cpp_toolchain(ctx)
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    all = ctx.actions.args()
    all.add_all(arguments)
    all.add_all(_OPTIONS)
    all.add("-ccbin", cc.compiler_executable)
    all.add_all(context.includes, before_each = "-I")
    all.add_all(context.system_includes, before_each = "-isystem")
    all.add("-o", out)
    all.add(ctx.file.src)
    ctx.actions.run(
        executable = compiler.nvcc,
        arguments = [all],
        inputs = depset([ctx.file.src], transitive = [context.headers, compiler.files, cc.all_files]),
        outputs = [out],
        use_default_shell_env = True,  # nvcc finds the shell and its own parts by PATH
        mnemonic = "CudaCompile",
        progress_message = "Compiling %s %s" % (ctx.file.src.short_path, what),
    )

def _cuda_object_impl(ctx):
    fat_binary = ctx.actions.declare_file(ctx.label.name + ".fatbin")
    newest = _ARCHITECTURES[-1]
    generations = [
        "-gencode=arch=compute_{a},code=sm_{a}".format(a = a)
        for a in _ARCHITECTURES
    ] + ["-gencode=arch=compute_{a},code=compute_{a}".format(a = newest)]
    _compile(ctx, fat_binary, ["-fatbin"] + generations, "for GPUs")

    # For tests.
    ptx = ctx.actions.declare_file(ctx.label.name + ".ptx")
    _compile(ctx, ptx, ["-ptx", "-arch=compute_%d" % newest], "to PTX")

    assembly = ctx.actions.declare_file(ctx.label.name + ".s")
    ctx.actions.write(assembly, _ASSEMBLY.format(file = fat_binary.path, symbol = ctx.attr.symbol))
    object = ctx.actions.declare_file(ctx.label.name + ".o")
    cc = find_cpp_toolchain(ctx)
    ctx.actions.run(
        executable = cc.compiler_executable,
        arguments = ["-c", assembly.path, "-o", object.path],
        inputs = depset([assembly, fat_binary], transitive = [cc.all_files]),
        outputs = [object],
        use_default_shell_env = True,
        mnemonic = "CudaAssemble",
        progress_message = "Assembling %s" % fat_binary.short_path,
    )

    linking_context, _ = cc_common.create_linking_context_from_compilation_outputs(
        actions = ctx.actions,
        name = ctx.label.name,
        feature_configuration = cc_common.configure_features(
            ctx = ctx,
            cc_toolchain = cc,
            requested_features = ctx.features,
            unsupported_features = ctx.disabled_features,
        ),
        cc_toolchain = cc,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = depset([object]),
            pic_objects = depset([object]),
        ),
        disallow_dynamic_library = True,
    )
    return [
        DefaultInfo(files = depset([fat_binary])),
        OutputGroupInfo(ptx = depset([ptx])),
        CcInfo(linking_context = linking_context),
    ]

_cuda_object = rule(
    implementation = _cuda_object_impl,
    attrs = {
        "deps": attr.label_list(providers = [CcInfo], doc = "Libraries whose headers the source includes."),
        "src": attr.label(allow_single_file = [".cu"], mandatory = True),
        "symbol": attr.string(mandatory = True, doc = "The array's name, as C has it."),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = [
        "@bazel_tools//tools/cpp:toolchain_type",
        _COMPILER,
    ],
    doc = "The kernels of a .cu file, for all GPUs that are supported, as an array in a program.",
)

def cuda_object(name, tags = [], **kwargs):
    """Kernels as an array; see above. Not among `//...`, since it wants nvcc: who depends on it does so by select().

    Args:
      name: the target.
      tags: tags.
      **kwargs: src, symbol, deps, visibility.
    """
    _cuda_object(name = name, tags = tags + ["manual"], **kwargs)
