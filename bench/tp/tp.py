"""Times tensor and sequence parallel training of a small GPT beside PyTorch and JAX, and prints the ratios and their bounds.

    ./bazelw run -c opt //bench:tp              # a table
    ./bazelw run -c opt //bench:tp -- --json    # one line

PyTorch's parallelize_module and ours run on two Gloo processes, JAX's jit on two host devices and ours on two rank
threads. The peers are installed once, by pip (tools/python). Each figure is the median of --repeat runs; the runs of ours
and theirs alternate, so that a noisy machine is noisy for both. A bound that is missed is shown, and no failure.
"""

import argparse
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

# name, dim, layers, seq, batch, steps; PyTorch / ours at least, JAX / ours at least
SIZES = [("d=64", (64, 4, 32, 4, 60), 10, 1), ("d=256", (256, 4, 128, 4, 15), 2, 1.3)]


def run(command):
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if result.returncode != 0:
        raise SystemExit("%s failed with %d:\n%s%s" % (" ".join(command), result.returncode, result.stdout, result.stderr))
    return result.stdout


def ours(program, backend, mode, sizes):
    flags = ["--%s=%d" % item for item in zip(("dim", "layers", "seq", "batch", "steps"), sizes)]
    text = run([program, "--backend=" + backend, "--mode=" + mode] + flags)
    return json.loads(text.strip().splitlines()[-1])["ms"]


def torch(python, mode, sizes):
    torchrun = os.path.join(os.path.dirname(python), "torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node", "2", os.path.join(HERE, "torch_tp.py"), mode]
    return float(re.search(r"([\d.]+) ms/step", run(command + [str(s) for s in sizes])).group(1))


def jax(python, sizes):
    program = os.path.join(HERE, "..", "peers", "jax_gpt.py")
    return float(re.search(r"median ([\d.]+)", run([python, program, "tp", "2"] + [str(s) for s in sizes])).group(1))


def measured(kinds, what, repeat):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--train", required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    python = python_env.python_with(PACKAGES)
    rows = []
    for name, sizes, torch_bound, jax_bound in SIZES:
        for mode in ("tp", "sp"):
            kinds = {"torch": lambda: torch(python, mode, sizes), "ours": lambda: ours(args.train, "gloo", mode, sizes)}
            rows.append(row(name, mode, "torch", measured(kinds, name + " " + mode, args.repeat), torch_bound))
        kinds = {"jax": lambda: jax(python, sizes), "ours": lambda: ours(args.train, "inproc", "tp", sizes)}
        rows.append(row(name, "tp", "jax", measured(kinds, name + " tp", args.repeat), jax_bound))
    if args.json:
        print(json.dumps({"tp": rows}))
        return
    for r in rows:
        print("GPT %-6s %s: %s %8.2f ms, ours (%s) %8.2f ms, ratio %5.2f, wanted %g%s"
              % (r["size"], r["mode"], "PyTorch" if r["peer"] == "torch" else "JAX    ", r["peer_ms"],
                 "gloo" if r["peer"] == "torch" else "inproc", r["ours_ms"], r["ratio"], r["bound"],
                 "" if r["met"] else ": missed"))


if __name__ == "__main__":
    main()
