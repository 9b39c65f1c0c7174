"""What benchmarks that time training beside PyTorch and JAX have in common."""

import json
import os
import re
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tools", "python"))
import python_env  # noqa: E402

PACKAGES = [python_env.TORCH, "numpy", "jax"]


def run(command):
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if result.returncode != 0:
        raise SystemExit("%s failed with %d:\n%s%s" % (" ".join(command), result.returncode, result.stdout, result.stderr))
    return result.stdout


def ours(program, backend, mode, sizes, *flags):
    """Milliseconds per step of //bench/gpt:train; sizes: dim, layers, seq, batch (over both ranks), steps, micro-batches (1)."""
    of_sizes = ["--%s=%d" % item for item in zip(("dim", "layers", "seq", "batch", "steps", "micro_batches"), sizes)]
    text = run([program, "--backend=" + backend, "--mode=" + mode, *of_sizes, *flags])
    return json.loads(text.strip().splitlines()[-1])["ms"]


def torch(python, program, mode, sizes):
    """Of a program in PyTorch, on two processes."""
    torchrun = os.path.join(os.path.dirname(python), "torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node", "2", program, mode]
    return float(re.search(r"([\d.]+) ms/step", run(command + [str(s) for s in sizes])).group(1))


def jax(python, mode, sizes):
    """Of jax_gpt.py, on two host devices."""
    program = os.path.join(HERE, "jax_gpt.py")
    return float(re.search(r"median ([\d.]+)", run([python, program, mode, "2"] + [str(s) for s in sizes])).group(1))


def measured(kinds, what, repeat):
    """The medians of functions that take turns, so that a noisy machine is noisy for all."""
    times = {kind: [] for kind in kinds}
    for i in range(repeat):
        for kind, measure in kinds.items():
            print("%s, %s, run %d of %d" % (what, kind, i + 1, repeat), file=sys.stderr, flush=True)
            times[kind].append(measure())
    return {kind: statistics.median(values) for kind, values in times.items()}


def row(size, mode, theirs, ms, bound):
    ratio = ms[theirs] / ms["ours"]
    print("%s, %s: %s %.2f ms, ours %.2f ms, ratio %.2f" % (size, mode, theirs, ms[theirs], ms["ours"], ratio), file=sys.stderr)
    return {"size": size, "mode": mode, "peer": theirs, "peer_ms": ms[theirs], "ours_ms": ms["ours"], "ratio": ratio,
            "bound": bound, "met": ratio >= bound}


NAMES = {"torch": "PyTorch", "jax": "JAX"}


def table(rows):
    for r in rows:
        print("GPT %-6s %-7s: %-7s %8.2f ms, ours (%s) %8.2f ms, ratio %5.2f, wanted %g%s"
              % (r["size"], r["mode"], NAMES.get(r["peer"], r["peer"]), r["peer_ms"],
                 "inproc" if r["peer"] == "jax" else "gloo", r["ours_ms"], r["ratio"], r["bound"],
                 "" if r["met"] else ": missed"))
