"""TCMalloc of gperftools, from Debian or from TCMALLOC_HOME."""

load("//third_party:packages.bzl", "fetch_debian", "library_directory", "link_headers", "user_copy")

def _tcmalloc_impl(ctx):
    ctx.symlink(Label("//third_party/tcmalloc:tcmalloc.BUILD"), "BUILD.bazel")
    home = user_copy(ctx, "TCMALLOC_HOME", "include/gperftools") or fetch_debian(ctx, ["libgoogle-perftools-dev"], "TCMALLOC_HOME")
    link_headers(ctx, home, ["gperftools"])

    # Without the profilers, which need libunwind.
    ctx.symlink(library_directory(ctx, home, ["libtcmalloc_minimal.a"]) + "/libtcmalloc_minimal.a", "lib/libtcmalloc_minimal.a")

tcmalloc_repository = repository_rule(
    implementation = _tcmalloc_impl,
    environ = ["TCMALLOC_HOME"],
    doc = "@tcmalloc//:tcmalloc. TCMALLOC_HOME: a prefix with include/gperftools and lib/libtcmalloc_minimal.a.",
)
