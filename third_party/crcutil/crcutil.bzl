"""crcutil (headers only), for CRC-32C, from Debian or from CRCUTIL_HOME."""

load("//third_party:packages.bzl", "fetch_debian", "link_headers", "user_copy")

def _crcutil_impl(ctx):
    home = user_copy(ctx, "CRCUTIL_HOME", "include/crcutil") or fetch_debian(ctx, ["libcrcutil-dev"], "CRCUTIL_HOME")
    link_headers(ctx, home, ["crcutil"])
    ctx.file("BUILD.bazel", """
cc_library(
    name = "crcutil",
    hdrs = glob(["include/crcutil/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
""", executable = False)

crcutil_repository = repository_rule(
    implementation = _crcutil_impl,
    environ = ["CRCUTIL_HOME"],
    doc = "@crcutil//:crcutil. CRCUTIL_HOME: a prefix with include/crcutil.",
)
