"""Headers that a compiler has parsed once, for all who include them.

LibTorch's take four fifths of the time that a source file of ours takes. GCC and Clang use what they have made of a
header in an earlier run if it is what a source file includes first:

    cc_precompiled_header(
        name = "libtorch_pch",
        includes = ["ATen/ATen.h"],     # what it holds
        deps = ["@libtorch"],
    )

    cc_library(
        srcs = ["a.cc"],
        copts = ["-include", "bazel/libtorch_pch.h"],  # the package and the name
        deps = ["//bazel:libtorch_pch"],
    )

It is compiled with the options that every C++ file gets, whichever the configuration. Where these are not a file's own,
the compiler says nothing and reads the headers.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

_ACTION = "c++-compile"

def _cc_precompiled_header_impl(ctx):
    header = ctx.actions.declare_file(ctx.label.name + ".h")
    ctx.actions.write(header, "".join(["#include <%s>\n" % name for name in ctx.attr.includes]))

    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    context = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    precompiled = ctx.actions.declare_file(header.basename + ".gch")
    variables = cc_common.create_compile_variables(
        feature_configuration = features,
        cc_toolchain = toolchain,
        source_file = header.path,
        output_file = precompiled.path,
        user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts + ["-w", "-x", "c++-header"],
        include_directories = context.includes,
        quote_include_directories = context.quote_includes,
        system_include_directories = context.system_includes,
        preprocessor_defines = context.defines,
        use_pic = True,
    )
    ctx.actions.run(
        executable = cc_common.get_tool_for_action(feature_configuration = features, action_name = _ACTION),
        arguments = cc_common.get_memory_inefficient_command_line(
            feature_configuration = features,
            action_name = _ACTION,
            variables = variables,
        ),
        env = cc_common.get_environment_variables(
            feature_configuration = features,
            action_name = _ACTION,
            variables = variables,
        ),
        inputs = depset([header], transitive = [context.headers, toolchain.all_files]),
        outputs = [precompiled],
        mnemonic = "CppPrecompile",
        progress_message = "Precompiling %s" % header.short_path,
    )
    own = cc_common.create_compilation_context(headers = depset([header, precompiled]))
    return [
        DefaultInfo(files = depset([header, precompiled])),
        cc_common.merge_cc_infos(
            direct_cc_infos = [CcInfo(compilation_context = own)],
            cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
        ),
    ]

cc_precompiled_header = rule(
    implementation = _cc_precompiled_header_impl,
    attrs = {
        "includes": attr.string_list(mandatory = True, doc = "What it includes, in this order."),
        "copts": attr.string_list(doc = "More compiler options, which a file that uses it has as well."),
        "deps": attr.label_list(providers = [CcInfo], doc = "The libraries whose headers these are."),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
    doc = "A header that includes others, precompiled: <package>/<name>.h.",
)
