"""clang-format, from PyPI: the same version everywhere, because versions format differently."""

load("//third_party:packages.bzl", "fetch_wheels", "run", "user_copy")

_WHEELS = {
    "clang-format==18.1.8": {
        "x86_64": "2de122b8aa78ba49e326f974131caab2c79f4ae877c227cd4e3e5d82a98d21e5",
        "aarch64": "d2db077523bd4517b41fa6adb2e5ee63fc91bc7b641dc6e28b959fa8050cf41b",
    },
}

def _clang_format_impl(ctx):
    home = user_copy(ctx, "CLANG_FORMAT_HOME", "bin/clang-format")
    if home:
        ctx.symlink(home + "/bin/clang-format", "clang-format")
    else:
        fetch_wheels(ctx, _WHEELS, "CLANG_FORMAT_HOME")
        run(ctx, ["sh", "-c", "unzip -q -o -j wheels/*.whl '*/bin/clang-format' && chmod +x clang-format && rm -rf wheels"], "cannot unpack clang-format's wheel (is unzip there?)")
    ctx.file("BUILD.bazel", "exports_files([\"clang-format\"])\n", executable = False)

clang_format_repository = repository_rule(
    implementation = _clang_format_impl,
    environ = ["CLANG_FORMAT_HOME"],
    doc = "@clang_format//:clang-format. CLANG_FORMAT_HOME: a prefix with bin/clang-format of version 18.",
)
