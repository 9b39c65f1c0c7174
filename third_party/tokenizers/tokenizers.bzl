"""Hugging Face's tokenizers, their Rust library behind Python's stable ABI, from PyPI or from TOKENIZERS_HOME."""

load("//third_party:packages.bzl", "machine", "run", "user_copy")

_VERSION = "0.23.3"
_HASHES = {
    "x86_64": "376851d22bcf9d650a5c3090bb83e6cf9e895fbf0595369fa4cd43c1f69b5f87",
    "aarch64": "ec82e80e65a862275b97c3d90b7a523df8d9519ee48aeb4e9625b2cc909274e0",
}

def _tokenizers_impl(ctx):
    home = user_copy(ctx, "TOKENIZERS_HOME", "tokenizers/__init__.py")
    if home:
        ctx.symlink(home + "/tokenizers", "python/tokenizers")
    else:
        advice = "Set TOKENIZERS_HOME to a folder with tokenizers/, such as a site-packages, or make `python3 -m pip download` work (Debian: apt-get install python3-pip)."
        cpu = machine(ctx)
        if cpu not in _HASHES:
            fail("There is no pinned wheel of tokenizers for %s. %s" % (cpu, advice))
        ctx.file("requirements.txt", "tokenizers==%s --hash=sha256:%s\n" % (_VERSION, _HASHES[cpu]), executable = False)

        # The wheel of every Python from 3.10 on.
        command = ["python3", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        command += ["--no-cache-dir", "--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--abi=abi3"]
        command += ["--platform=manylinux_2_17_" + cpu, "--platform=manylinux2014_" + cpu, "--dest=wheels", "-r", "requirements.txt"]
        run(ctx, command, "Cannot fetch tokenizers. " + advice, timeout = 600)
        run(ctx, ["sh", "-c", "unzip -q -o wheels/*.whl 'tokenizers/*' -d python && rm -rf wheels"], "cannot unpack the wheel of tokenizers (is unzip there?)")
    ctx.file("BUILD.bazel", """
filegroup(
    name = "tokenizers",
    srcs = glob(["python/tokenizers/**"], exclude = ["**/*.pyc"]),
    visibility = ["//visibility:public"],
)
""", executable = False)

tokenizers_repository = repository_rule(
    implementation = _tokenizers_impl,
    environ = ["TOKENIZERS_HOME"],
    doc = "@tokenizers//:tokenizers, below external/tokenizers/python. TOKENIZERS_HOME: a folder with tokenizers/, such as a site-packages.",
)
