"""Times tensor and sequence parallel training of a small GPT beside PyTorch and JAX, and prints the ratios and their bounds.

    ./bazelw run -c opt //bench:tp              # a table
    ./bazelw run -c opt //bench:tp -- --json    # one line

PyTorch's parallelize_module and ours run on two Gloo processes, JAX's jit on two host devices and ours on two rank
threads: a step as ever ("tp"), and one whose forward and backward were recorded ("replay": bench/recorded_step). The
peers are installed once, by pip (tools/python). Each figure is the median of --repeat runs; the runs of ours and theirs
alternate, so that a noisy machine is noisy for both. A bound that is missed is shown, and no failure.
"""

import argparse
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "peers"))
from side_by_side import PACKAGES, jax, measured, ours, python_env, row, table, torch  # noqa: E402

# name, dim, layers, seq, batch, steps; PyTorch / ours at least, JAX / ours at least
SIZES = [("d=64", (64, 4, 32, 4, 60), 10, 1), ("d=256", (256, 4, 128, 4, 15), 2, 1.3)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--train", required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    python = python_env.python_with(PACKAGES)
    theirs = os.path.join(HERE, "torch_tp.py")
    rows = []
    for name, sizes, torch_bound, jax_bound in SIZES:
        for mode in ("tp", "sp"):
            kinds = {"torch": lambda: torch(python, theirs, mode, sizes), "ours": lambda: ours(args.train, "gloo", mode, sizes)}
            rows.append(row(name, mode, "torch", measured(kinds, name + " " + mode, args.repeat), torch_bound))
        kinds = {
            "jax": lambda: jax(python, "tp", sizes),
            "step": lambda: ours(args.train, "inproc", "tp", sizes),
            "replayed": lambda: ours(args.train, "inproc", "tp", sizes, "--recorded"),
        }
        ms = measured(kinds, name + " tp", args.repeat)
        rows.append(row(name, "tp", "jax", {**ms, "ours": ms["step"]}, jax_bound))
        rows.append(row(name, "replay", "jax", {**ms, "ours": ms["replayed"]}, jax_bound))
    if args.json:
        print(json.dumps({"tp": rows}))
    else:
        table(rows)


if __name__ == "__main__":
    main()
