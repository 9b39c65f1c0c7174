"""xxHash, used as headers only (XXH_INLINE_ALL), from Debian or from XXHASH_HOME."""

load("//third_party:packages.bzl", "fetch_debian", "user_copy")

def _xxhash_impl(ctx):
    home = user_copy(ctx, "XXHASH_HOME", "include/xxhash.h") or fetch_debian(ctx, ["libxxhash-dev"], "XXHASH_HOME")

    # Single files: the package's include folder is all of /usr/include where a prefix is given.
    ctx.symlink(home + "/include/xxhash.h", "include/xxhash.h")
    ctx.file("BUILD.bazel", """
cc_library(
    name = "xxhash",
    hdrs = ["include/xxhash.h"],
    includes = ["include"],
    visibility = ["//visibility:public"],
)
""", executable = False)

xxhash_repository = repository_rule(
    implementation = _xxhash_impl,
    environ = ["XXHASH_HOME"],
    doc = "@xxhash//:xxhash. XXHASH_HOME: a prefix with include/xxhash.h.",
)
