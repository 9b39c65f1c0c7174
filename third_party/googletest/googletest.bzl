"""GoogleTest and GoogleMock, from Debian or from GTEST_HOME."""

load("//third_party:packages.bzl", "fetch_debian", "library_directory", "link_headers", "user_copy")

def _googletest_impl(ctx):
    ctx.symlink(Label("//third_party/googletest:googletest.BUILD"), "BUILD.bazel")
    home = user_copy(ctx, "GTEST_HOME", "include/gtest") or fetch_debian(ctx, ["libgtest-dev", "libgmock-dev"], "GTEST_HOME")
    link_headers(ctx, home, ["gtest", "gmock"])
    ctx.symlink(library_directory(ctx, home, ["libgmock.a"]), "lib")

googletest_repository = repository_rule(
    implementation = _googletest_impl,
    environ = ["GTEST_HOME"],
    doc = "@googletest//:gtest, :gtest_main. GTEST_HOME: a prefix with include/{gtest,gmock} and lib/lib{gtest,gmock,gmock_main}.a.",
)
