"""clang-tidy with the headers of its compiler, from PyPI: versions find different things."""

load("//third_party:packages.bzl", "fetch_wheels", "run", "user_copy")

# From 22 on it does not look into the headers of libraries, and takes a third of the time.
_WHEELS = {
    "clang-tidy==22.1.8": {
        "x86_64": "1a3de07ba82d4403d8b692ae63a5520d4db5c606014c92c24bbcef9259057bf1",
        "aarch64": "1eaddaa7415e8c5e39aeefbfd15174f1ab2a671c86f7ebb200eb523cf9465559",
    },
}

_UNPACK = """
set -e
unzip -q -o wheels/*.whl 'clang_tidy/data/*'
mv clang_tidy/data/bin clang_tidy/data/lib .
chmod +x bin/clang-tidy
rm -rf wheels clang_tidy
"""

_BUILD = """package(default_visibility = ["//visibility:public"])

exports_files(["bin/clang-tidy"])

# <stddef.h> and the like; it finds them by its own place.
filegroup(
    name = "headers",
    srcs = glob(["lib/clang/**"], allow_empty = True),
)
"""

def _clang_tidy_impl(ctx):
    home = user_copy(ctx, "CLANG_TIDY_HOME", "bin/clang-tidy")
    if home:
        ctx.symlink(home + "/bin/clang-tidy", "bin/clang-tidy")
    else:
        fetch_wheels(ctx, _WHEELS, "CLANG_TIDY_HOME")
        run(ctx, ["sh", "-c", _UNPACK], "cannot unpack clang-tidy's wheel (is unzip there?)")
    ctx.file("BUILD.bazel", _BUILD, executable = False)

clang_tidy_repository = repository_rule(
    implementation = _clang_tidy_impl,
    environ = ["CLANG_TIDY_HOME"],
    doc = "@clang_tidy//:bin/clang-tidy. CLANG_TIDY_HOME: a prefix with bin/clang-tidy of version 22 and its lib/clang.",
)
