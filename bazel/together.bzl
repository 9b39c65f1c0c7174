"""Source files that are compiled a few at a time.

Of the five seconds that a file of ours takes, LibTorch's templates take three, precompiled or not: they are instantiated at
the end of each. So files that see the same headers are compiled as one, which halves what a build from nothing takes:

    together(
        name = "engine_together",
        srcs = ["cache.cc", "decide.cc", "dispatch.cc"],
        count = 2,              # two files to compile: the first two, and the third
    )

A name in an unnamed namespace is thus one name in a library, but not in tests, which know nothing of each other:
`own_namespaces` gives each file's unnamed namespaces the file's name. Messages, debuggers and std::source_location speak
of the files as they are. `--define=together=no` compiles each by itself.
"""

TogetherInfo = provider(
    doc = "What a file to compile is made of.",
    fields = {"srcs": "list of files"},
)

_COMMAND = """
out=$1
shift
for file in "$@"; do
  printf '#line 1 "%s"\\n' "$file"
  name=${file##*/}
  sed "s/^namespace {\\$/namespace ${OWN_NAMESPACES:+${name%.cc} }{/" "$file"
done >"$out"
"""

def _together_impl(ctx):
    srcs = ctx.files.srcs
    outs = []
    for begin in range(0, len(srcs), ctx.attr.count):
        part = srcs[begin:begin + ctx.attr.count]
        out = ctx.actions.declare_file("%s/%s" % (ctx.label.name, part[0].basename))
        arguments = ctx.actions.args()
        arguments.add(out)
        arguments.add_all(part)
        ctx.actions.run_shell(
            command = _COMMAND,
            arguments = [arguments],
            inputs = part,
            outputs = [out],
            env = {"OWN_NAMESPACES": "yes"} if ctx.attr.own_namespaces else {},
            mnemonic = "Together",
            progress_message = "Putting together %s and what follows" % part[0].short_path,
        )
        outs.append(out)
    return [DefaultInfo(files = depset(outs)), TogetherInfo(srcs = srcs)]

together = rule(
    implementation = _together_impl,
    attrs = {
        "count": attr.int(mandatory = True, doc = "how many are compiled as one"),
        "own_namespaces": attr.bool(doc = "whether unnamed namespaces are each file's own; they get its name"),
        "srcs": attr.label_list(mandatory = True, allow_files = [".cc"]),
    },
    doc = "C++ files, each of which is several of `srcs`, in their order.",
)
