"""scikit-learn's digits: 1797 scanned digits of 8 x 8 pixels, from its PyPI wheel or from DIGITS_HOME."""

load("//third_party:packages.bzl", "fetch_wheels", "run", "user_copy")

_WHEELS = {
    "scikit-learn==1.7.2": {
        "x86_64": "89877e19a80c7b11a2891a27c21c4894fb18e2c2e077815bcade10d34287b20d",
        "aarch64": "8da8bf89d4d79aaec192d2bda62f9b56ae4e5b4ef93b6a56b5de4977e375c1f1",
    },
}

def _digits_impl(ctx):
    home = user_copy(ctx, "DIGITS_HOME", "digits.csv.gz")
    if home:
        ctx.symlink(home + "/digits.csv.gz", "digits.csv.gz")
    else:
        fetch_wheels(ctx, _WHEELS, "DIGITS_HOME")
        run(ctx, ["sh", "-c", "unzip -q -o -j wheels/*.whl sklearn/datasets/data/digits.csv.gz && rm -rf wheels"], "cannot unpack scikit-learn's wheel (is unzip there?)")
    ctx.file("BUILD.bazel", "exports_files([\"digits.csv.gz\"])\n", executable = False)

digits_repository = repository_rule(
    implementation = _digits_impl,
    environ = ["DIGITS_HOME"],
    doc = "@digits//:digits.csv.gz. DIGITS_HOME: a folder that holds it, such as sklearn/datasets/data of an installed scikit-learn.",
)
