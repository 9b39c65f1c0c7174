"""What a C++ program outside of Bazel needs of libraries of this repository, as files."""

def _archives(deps):
    """The archives of `deps` and of what they depend on, for shared libraries where there are two."""
    inputs = depset(transitive = [dep[CcInfo].linking_context.linker_inputs for dep in deps])
    archives = [
        library.pic_static_library or library.static_library
        for linker_input in inputs.to_list()
        for library in linker_input.libraries
    ]
    return [archive for archive in archives if archive]

def _cpp_tree_impl(ctx):
    headers = depset(transitive = [dep[CcInfo].compilation_context.headers for dep in ctx.attr.deps])

    # As they are included; those of other repositories come otherwise.
    files = [
        header
        for header in headers.to_list()
        if "/_virtual_includes/" in header.short_path and not header.short_path.startswith("../")
    ]
    names = ctx.actions.declare_file(ctx.label.name + ".headers")
    ctx.actions.write(names, "".join(["%s\n" % file.short_path.split("/_virtual_includes/")[1].split("/", 1)[1] for file in files]))
    files += [archive for archive in _archives(ctx.attr.deps) if not archive.short_path.startswith("../")]

    # By themselves they would not come: a cc_library among `data` brings along no archive.
    files += _archives(ctx.attr.external_deps)
    return [
        DefaultInfo(files = depset(files), runfiles = ctx.runfiles(files = files)),
        OutputGroupInfo(header_names = depset([names])),
    ]

cpp_tree = rule(
    implementation = _cpp_tree_impl,
    attrs = {
        "deps": attr.label_list(providers = [CcInfo]),
        "external_deps": attr.label_list(providers = [CcInfo]),
    },
    doc = "The headers of `deps` and of what they depend on in this repository, and the archives of all of them; " +
          "of `external_deps`, in other repositories, the archives only. The output group header_names: " +
          "a file that names the headers.",
)

def _cpp_header_names_impl(ctx):
    # Without the run files of the tree, which are all of its libraries.
    names = ctx.attr.tree[OutputGroupInfo].header_names
    return [DefaultInfo(files = names, runfiles = ctx.runfiles(transitive_files = names))]

cpp_header_names = rule(
    implementation = _cpp_header_names_impl,
    attrs = {"tree": attr.label(mandatory = True, doc = "A cpp_tree.")},
    doc = "A file that names the headers of a tree, as they are included.",
)
