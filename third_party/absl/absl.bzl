"""Abseil, from Debian or from ABSL_HOME."""

load("//third_party:packages.bzl", "fetch_debian", "library_directory", "link_headers", "run", "user_copy")

# One archive: the linker then resolves the libraries' references to each other in any order.
_MERGE = """
set -e
{ echo "create libabsl.a"; for archive in "$1"/libabsl_*.a; do echo "addlib $archive"; done; echo save; echo end; } | ar -M
"""

def _absl_impl(ctx):
    home = user_copy(ctx, "ABSL_HOME", "include/absl") or fetch_debian(ctx, ["libabsl-dev"], "ABSL_HOME")
    link_headers(ctx, home, ["absl"])
    libraries = library_directory(ctx, home, ["libabsl_base.a"])
    run(ctx, ["sh", "-c", _MERGE, "sh", libraries], "cannot merge Abseil's archives (is ar of binutils there?)")
    ctx.symlink(Label("//third_party/absl:absl.BUILD"), "BUILD.bazel")

absl_repository = repository_rule(
    implementation = _absl_impl,
    environ = ["ABSL_HOME"],
    doc = "@absl//:absl. ABSL_HOME: a prefix with include/absl and lib/libabsl_*.a.",
)
