"""What the repository rules share: fetching packages through their ordinary clients.

A dependency is taken from the user's copy when an environment variable names one, else fetched with
pip or apt-get, else the build stops and says what to set or do.

A rule begins with the files of ours that it links: if Bazel has not read their package yet, it runs the rule once more
from its beginning.
"""

def run(ctx, arguments, failure, timeout = 600):
    """Runs a command in the repository's directory; stops the build with `failure` if it fails."""
    result = ctx.execute(arguments, timeout = timeout)
    if result.return_code != 0:
        fail("%s\n--- %s\n%s%s" % (failure, " ".join([str(a) for a in arguments]), result.stdout, result.stderr))
    return result.stdout

def machine(ctx):
    """The processor of this machine as the kernel names it: x86_64, aarch64, ..."""
    return run(ctx, ["uname", "-m"], "cannot tell this machine's architecture").strip()

def user_copy(ctx, variable, needs):
    """The user's copy of a dependency.

    Args:
      ctx: the repository context.
      variable: the environment variable that names the copy.
      needs: a path that must exist below it.

    Returns:
      The path of the copy, or None if the variable is not set.
    """
    home = ctx.os.environ.get(variable, "")
    if not home:
        return None
    if not ctx.path(home + "/" + needs).exists:
        fail("%s=%s has no %s. Point it to the folder that holds %s, or unset it to fetch the package." %
             (variable, home, needs, needs))
    return home

def library_directory(ctx, home, names):
    """The directory below `home` that holds one of the files `names`."""
    triplet = machine(ctx) + "-linux-gnu"
    for candidate in ["lib/" + triplet, "lib64", "lib"]:
        for name in names:
            if ctx.path("%s/%s/%s" % (home, candidate, name)).exists:
                return "%s/%s" % (home, candidate)
    fail("%s: none of %s in lib/%s, lib64 or lib" % (home, ", ".join(names), triplet))

def fetch_wheels(ctx, wheels, variable):
    """Downloads wheels, pinned by version and SHA-256, into wheels/.

    They are chosen for CPython 3.11 whatever Python runs here: no Python code of theirs is used.

    Args:
      ctx: the repository context.
      wheels: {requirement: {machine: sha256}}.
      variable: the environment variable to mention when this fails.
    """
    cpu = machine(ctx)
    advice = "Set %s to a copy that you have, or make `python3 -m pip download` work (Debian: apt-get install python3-pip)." % variable
    lines = []
    for requirement, hashes in wheels.items():
        if cpu not in hashes:
            fail("There is no pinned wheel of %s for %s. %s" % (requirement, cpu, advice))
        lines.append("%s --hash=sha256:%s" % (requirement, hashes[cpu]))
    ctx.file("requirements.txt", "\n".join(lines) + "\n", executable = False)
    python = ctx.which("python3")
    if not python:
        fail("python3 is not there. " + advice)
    command = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    command += ["--no-cache-dir", "--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--abi=cp311", "--abi=none"]
    for tag in ["manylinux_2_28", "manylinux_2_27", "manylinux_2_25", "manylinux_2_18", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1"]:
        command.append("--platform=%s_%s" % (tag, cpu))
    run(ctx, command + ["--dest=wheels", "-r", "requirements.txt"], "Cannot fetch %s. %s" % (", ".join(wheels.keys()), advice), timeout = 3600)

# Unprivileged: package lists that are missing or stale are fetched into the repository's own directory.
_APT_SCRIPT = """
set -eu
mkdir -p debs && cd debs
if ! apt-get download -q "$@" >log 2>&1; then
  mkdir -p lists/partial cache/archives/partial
  private="-o Dir::State::Lists=$PWD/lists -o Dir::Cache=$PWD/cache -o Debug::NoLocking=1 -o APT::Sandbox::User="
  apt-get $private update -q >>log 2>&1 && apt-get $private download -q "$@" >>log 2>&1 || { cat log >&2; exit 1; }
fi
for deb in *.deb; do dpkg-deb -x "$deb" ../debian; done
cd .. && rm -rf debs
"""

def fetch_debian(ctx, packages, variable):
    """Unpacks Debian packages into debian/. Needs no root.

    Args:
      ctx: the repository context.
      packages: names of Debian packages.
      variable: the environment variable to mention when this fails.

    Returns:
      The prefix in which the packages' files lie.
    """
    advice = "Set %s to a prefix (include/, lib/) that holds it, or make `apt-get download %s` work." % (variable, " ".join(packages))
    if not ctx.which("apt-get") or not ctx.which("dpkg-deb"):
        fail("This is no Debian (no apt-get, dpkg-deb). " + advice)
    run(ctx, ["sh", "-c", _APT_SCRIPT, "sh"] + packages, "Cannot fetch Debian's %s. %s" % (", ".join(packages), advice))
    return "debian/usr"

# Unprivileged as well: source lists made from the system's own, in the repository's own directory.
_APT_SOURCE_SCRIPT = """
set -eu
mkdir -p apt/lists/partial apt/cache/archives/partial apt/parts && cd apt
cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | sed -n 's/^deb /deb-src /p' >sources.list || true
for file in /etc/apt/sources.list.d/*.sources; do
  if [ -e "$file" ]; then sed 's/^Types:.*/Types: deb-src/' "$file" >"parts/${file##*/}"; fi
done
private="-o Dir::Etc::SourceList=$PWD/sources.list -o Dir::Etc::SourceParts=$PWD/parts -o Dir::State::Lists=$PWD/lists"
private="$private -o Dir::Cache=$PWD/cache -o Debug::NoLocking=1 -o APT::Sandbox::User="
{ apt-get $private update -q && apt-get $private source -q "$1"; } >log 2>&1 || { cat log >&2; exit 1; }
mv "$1"-*/ ../source
cd .. && rm -rf apt
"""

def fetch_debian_source(ctx, package, variable):
    """Unpacks the source of a Debian package, with Debian's patches, into source/. Needs no root.

    Args:
      ctx: the repository context.
      package: the name of a Debian source package.
      variable: the environment variable to mention when this fails.

    Returns:
      The directory.
    """
    advice = "Set %s to its source tree, or make `apt-get source %s` work (it needs dpkg-dev)." % (variable, package)
    if not ctx.which("apt-get") or not ctx.which("dpkg-source"):
        fail("There is no apt-get or dpkg-source. " + advice)
    run(ctx, ["sh", "-c", _APT_SOURCE_SCRIPT, "sh", package], "Cannot fetch the source of Debian's %s. %s" % (package, advice))
    return "source"

def link_headers(ctx, home, directories):
    """Makes single header directories of `home` appear in include/ (never all of it: /usr/include breaks <cstdlib>)."""
    for directory in directories:
        ctx.symlink("%s/include/%s" % (home, directory), "include/" + directory)
