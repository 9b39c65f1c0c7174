"""A virtual environment in the user's cache with the Python packages that comparisons need.

    python = python_env.python_with(["torch==2.11.0", "numpy"])   # its python; installs what is missing, by pip

One environment for all programs of this repository that want one (PyTorch with what it needs is about 5 GB).
"""

import fcntl
import os
import subprocess
import sys

_VENV = os.path.join(
    os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "shardweave", "peers"
)

# PyTorch as third_party/libtorch pins it: a library of ours runs in its Python too.
TORCH = "torch==2.11.0"


def _run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise SystemExit(
            "%s failed with %d:\n%s%s"
            % (" ".join(command), result.returncode, result.stdout, result.stderr)
        )


def python_with(packages):
    os.makedirs(os.path.dirname(_VENV), exist_ok=True)
    with open(_VENV + ".lock", "w") as lock:  # another program may be installing
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _python_with(packages)


def _python_with(packages):
    python = os.path.join(_VENV, "bin", "python")
    ready = os.path.join(_VENV, "ready")  # what is installed, a line each
    there = open(ready).read().split() if os.path.exists(ready) else []
    missing = [package for package in packages if package not in there]
    if missing:
        print("installing %s into %s" % (", ".join(missing), _VENV), file=sys.stderr, flush=True)
        if not os.path.exists(python):
            _run([sys.executable, "-m", "venv", _VENV])
        _run([python, "-m", "pip", "install", "-q"] + missing)
        with open(ready, "w") as f:
            f.write("\n".join(there + missing) + "\n")
    return python
