"""nlohmann's JSON (headers only), from Debian or from JSON_HOME."""

load("//third_party:packages.bzl", "fetch_debian", "link_headers", "user_copy")

def _json_impl(ctx):
    home = user_copy(ctx, "JSON_HOME", "include/nlohmann") or fetch_debian(ctx, ["nlohmann-json3-dev"], "JSON_HOME")
    link_headers(ctx, home, ["nlohmann"])
    ctx.file("BUILD.bazel", """
exports_files(["include/nlohmann/json.hpp"])

cc_library(
    name = "json",
    hdrs = glob(["include/nlohmann/**/*.hpp"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
""", executable = False)

json_repository = repository_rule(
    implementation = _json_impl,
    environ = ["JSON_HOME"],
    doc = "@json//:json. JSON_HOME: a prefix with include/nlohmann.",
)
