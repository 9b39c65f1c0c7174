"""clang-tidy over C++ libraries, an action for each source file: what it said is kept until the file or a header changes."""

load("//bazel:together.bzl", "TogetherInfo")

TidyInfo = provider(
    doc = "What clang-tidy says.",
    fields = {"reports": "depset of files, one for each source file; empty if there is nothing to say"},
)

# Its answer is a file, not a failure: the test shows all of them, with paths as in the checkout.
_COMMAND = """
report=$1
shift
if "$@" >"$report" 2>&1; then
  : >"$report"
else
  sed -E -i "s#$PWD/##g; s#[^ ]*/_virtual_includes/[^/]*/shardweave/##g" "$report"
  [ -s "$report" ] || echo "failed: $*" >"$report"
fi
"""

def _sees_libtorch(context):
    return any(["/libtorch/" in directory for directory in context.system_includes.to_list()])

def _tidy_file(ctx, context, file):
    report = ctx.actions.declare_file("_tidy/%s/%s.txt" % (ctx.label.name, file.basename))
    arguments = ctx.actions.args()
    arguments.add(report)
    arguments.add(ctx.executable._clang_tidy)
    arguments.add(ctx.file._config, format = "--config-file=%s")
    arguments.add_all(["--quiet", file, "--", "-xc++", "-std=c++20"])

    # Warnings of the compiler are GCC's business.
    arguments.add_all([option for option in ctx.rule.attr.copts if not option.startswith("-W")])
    arguments.add_all(context.defines, format_each = "-D%s")
    arguments.add_all(context.local_defines, format_each = "-D%s")
    arguments.add_all(context.quote_includes, before_each = "-iquote")
    arguments.add_all(context.includes, format_each = "-I%s")
    arguments.add_all(context.system_includes, before_each = "-isystem")
    ctx.actions.run_shell(
        command = _COMMAND,
        arguments = [arguments],
        inputs = depset(
            [file, ctx.file._config] + ctx.rule.files.srcs + ctx.files._headers,
            transitive = [context.headers],
        ),
        tools = [ctx.executable._clang_tidy],
        outputs = [report],
        mnemonic = "ClangTidy",
        use_default_shell_env = True,
        progress_message = "clang-tidy %s" % file.short_path,
    )
    return report

def _tidy_aspect_impl(target, ctx):
    deps = getattr(ctx.rule.attr, "deps", [])
    reports = []
    if ctx.rule.kind in ["cc_binary", "cc_library", "cc_test"] and not ctx.label.workspace_name:
        # Programs have no CcInfo of their own.
        infos = [dep[CcInfo] for dep in [target] + deps if CcInfo in dep]
        context = cc_common.merge_cc_infos(cc_infos = infos).compilation_context
        if not _sees_libtorch(context):
            # Of a library with sources the headers are looked at where these include them, and so are those of a target that has
            # nothing else because their sources are in another one.
            files = []
            for src in ctx.rule.attr.srcs:
                files += src[TogetherInfo].srcs if TogetherInfo in src else src.files.to_list()
            files = [file for file in files if file.extension == "cc"]
            if not files and "headers_of_sources" not in ctx.rule.attr.tags:
                files = getattr(ctx.rule.files, "hdrs", [])
            reports = [_tidy_file(ctx, context, file) for file in files]
    below = [dep[TidyInfo].reports for dep in deps if TidyInfo in dep]
    return [TidyInfo(reports = depset(reports, transitive = below))]

tidy_aspect = aspect(
    implementation = _tidy_aspect_impl,
    attr_aspects = ["deps"],
    attrs = {
        "_clang_tidy": attr.label(
            default = "@clang_tidy//:bin/clang-tidy",
            allow_single_file = True,
            cfg = "exec",
            executable = True,
        ),
        "_config": attr.label(default = "//:.clang-tidy", allow_single_file = True),
        "_headers": attr.label(default = "@clang_tidy//:headers"),
    },
)

def _tidy_test_impl(ctx):
    reports = depset(transitive = [target[TidyInfo].reports for target in ctx.attr.targets])
    paths = ctx.actions.declare_file(ctx.label.name + ".reports")
    ctx.actions.write(paths, "".join([report.short_path + "\n" for report in reports.to_list()]))
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(
        script,
        "#!/bin/sh\nexec %s %s %d '%s'\n" % (ctx.file._check_reports.short_path, paths.short_path, ctx.attr.at_least, " ".join(ctx.attr.finds)),
        is_executable = True,
    )
    return [DefaultInfo(
        executable = script,
        runfiles = ctx.runfiles(files = [paths, ctx.file._check_reports], transitive_files = reports),
    )]

tidy_test = rule(
    implementation = _tidy_test_impl,
    test = True,
    attrs = {
        "at_least": attr.int(default = 1, doc = "how many source files there are at least"),
        "finds": attr.string_list(doc = "the checks that complain; none"),
        "targets": attr.label_list(aspects = [tidy_aspect]),
        "_check_reports": attr.label(default = "//tools/tidy:check_reports.sh", allow_single_file = True),
    },
    doc = "That clang-tidy says nothing, or just what it should, of `targets` and of all that they depend on in this " +
          "repository; not of what sees LibTorch's headers, which take five seconds each time.",
)
