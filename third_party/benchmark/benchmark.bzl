"""Google Benchmark, from Debian or from BENCHMARK_HOME."""

load("//third_party:packages.bzl", "fetch_debian", "library_directory", "link_headers", "user_copy")

def _benchmark_impl(ctx):
    ctx.symlink(Label("//third_party/benchmark:benchmark.BUILD"), "BUILD.bazel")
    home = user_copy(ctx, "BENCHMARK_HOME", "include/benchmark") or fetch_debian(ctx, ["libbenchmark-dev", "libbenchmark1debian"], "BENCHMARK_HOME")
    link_headers(ctx, home, ["benchmark"])
    ctx.symlink(library_directory(ctx, home, ["libbenchmark_main.a"]), "lib")

benchmark_repository = repository_rule(
    implementation = _benchmark_impl,
    environ = ["BENCHMARK_HOME"],
    doc = "@benchmark//:benchmark, :benchmark_main. BENCHMARK_HOME: a prefix with include/benchmark and lib/libbenchmark{.a or .so.*,_main.a}.",
)
