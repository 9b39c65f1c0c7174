"""A library as those who depend on it see it: all of its code, and no headers but its users'.

    cc_interface(
        name = "mesh",
        headers = ":mesh_headers",      # a cc_library of headers, with what these include
        deps = [":mesh_compiled"],      # what is linked; it may depend on what no user is to include
    )

What newer Bazels have as `implementation_deps`. See shardweave_cc_library in defs.bzl.
"""

def _cc_interface_impl(ctx):
    compiled = ctx.attr.deps[0]
    return [
        DefaultInfo(files = compiled[DefaultInfo].files, runfiles = compiled[DefaultInfo].default_runfiles),
        CcInfo(
            compilation_context = ctx.attr.headers[CcInfo].compilation_context,
            linking_context = compiled[CcInfo].linking_context,
        ),
    ]

cc_interface = rule(
    implementation = _cc_interface_impl,
    attrs = {
        "headers": attr.label(mandatory = True, providers = [CcInfo], doc = "The library of headers that users include."),
        "deps": attr.label_list(mandatory = True, providers = [CcInfo], doc = "The one library that is linked."),
    },
    doc = "What includes `headers` and is linked with `deps`.",
)
