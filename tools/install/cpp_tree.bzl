"""What a C++ program outside of Bazel needs of libraries of this repository, as files."""

def _cpp_tree_impl(ctx):
    headers = depset(transitive = [dep[CcInfo].compilation_context.headers for dep in ctx.attr.deps])
    inputs = depset(transitive = [dep[CcInfo].linking_context.linker_inputs for dep in ctx.attr.deps])

    # As they are included; those of other repositories come otherwise.
    files = [
        header
        for header in headers.to_list()
        if "/_virtual_includes/" in header.short_path and not header.short_path.startswith("../")
    ]
    for linker_input in inputs.to_list():
        for library in linker_input.libraries:
            archive = library.pic_static_library or library.static_library
            if archive and not archive.short_path.startswith("../"):
                files.append(archive)
    return [DefaultInfo(files = depset(files), runfiles = ctx.runfiles(files = files))]

cpp_tree = rule(
    implementation = _cpp_tree_impl,
    attrs = {"deps": attr.label_list(providers = [CcInfo])},
    doc = "The headers of `deps` and of what they depend on in this repository, and the archives of all of them.",
)
