"""Abseil, from Debian or from ABSL_HOME."""

load("//third_party:packages.bzl", "fetch_debian", "fetch_debian_source", "library_directory", "link_headers", "run", "user_copy")

# One archive: the linker then resolves the libraries' references to each other in any order.
_MERGE = """
set -e
{ echo "create libabsl.a"; for archive in "$1"/libabsl_*.a; do echo "addlib $archive"; done; echo save; echo end; } | ar -M
"""

def _absl_impl(ctx):
    ctx.symlink(Label("//third_party/absl:absl.BUILD"), "BUILD.bazel")
    home = user_copy(ctx, "ABSL_HOME", "include/absl") or fetch_debian(ctx, ["libabsl-dev"], "ABSL_HOME")
    link_headers(ctx, home, ["absl"])
    libraries = library_directory(ctx, home, ["libabsl_base.a"])
    run(ctx, ["sh", "-c", _MERGE, "sh", libraries], "cannot merge Abseil's archives (is ar of binutils there?)")

absl_repository = repository_rule(
    implementation = _absl_impl,
    environ = ["ABSL_HOME"],
    doc = "@absl//:absl. ABSL_HOME: a prefix with include/absl and lib/libabsl_*.a.",
)

def _absl_source_impl(ctx):
    ctx.symlink(Label("//third_party/absl:absl_source.BUILD"), "BUILD.bazel")
    source = user_copy(ctx, "ABSL_SOURCE_HOME", "absl/base") or fetch_debian_source(ctx, "abseil", "ABSL_SOURCE_HOME")

    # Without its BUILD files it is one package. One level down: what lies in a repository's root its files see, declared or
    # not, and :position_independent is to see the headers of @absl.
    run(
        ctx,
        ["sh", "-c", "mkdir abseil && cp -rL \"$1/absl\" abseil && find abseil -name BUILD.bazel -delete", "sh", source],
        "cannot copy Abseil's source",
    )

absl_source_repository = repository_rule(
    implementation = _absl_source_impl,
    environ = ["ABSL_SOURCE_HOME"],
    doc = "@absl_source//:absl, which takes the place of @absl//:absl under --config=tsan. ABSL_SOURCE_HOME: Abseil's source tree.",
)
