"""Times data parallel training of a small GPT (DDP, ZeRO, FSDP) beside PyTorch and JAX, and measures what FSDP holds in memory.

    ./bazelw run -c opt //bench:data_parallel              # tables
    ./bazelw run -c opt //bench:data_parallel -- --json    # one line

PyTorch's DistributedDataParallel and fully_shard (FSDP2) and ours run on two Gloo processes, JAX's jit on two host devices
and ours on two rank threads. "fsdp x4": a step of four micro-batches, whose gradients are sent once (no_sync). ZeRO's peer is our own DDP. The peers are installed once, by pip (tools/python). Each figure is
the median of --repeat runs; the runs of ours and theirs alternate, so that a noisy machine is noisy for both. A bound that is
missed is shown, and no failure.

The memory is the most that LibTorch's allocator has given to a rank at a time, over the formula: parameters, gradients and
AdamW's states divided by the ranks, the two largest units whole, and what one device keeps of a forward of its share of the
batch.
"""

import argparse
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PEERS = os.path.join(HERE, "..", "peers")
sys.path.insert(0, PEERS)
from side_by_side import PACKAGES, jax, measured, ours, python_env, row, run, table, torch  # noqa: E402

# name; dim, layers, seq, batch of a rank, steps; at least: FSDP2 / ours, DDP / ours, JAX / ours
SIZES = [("d=64", (64, 4, 32, 4, 60), 5, 1.5, 1), ("d=256", (256, 4, 128, 4, 15), 1.5, 1, 1)]
RANKS = 2
MICRO_BATCHES = 4  # of a step, whose gradients travel once
MEMORY_WITHIN = 0.05


def times(python, train, repeat):
    rows = []
    for name, of_a_rank, fsdp_bound, ddp_bound, jax_bound in SIZES:
        dim, layers, seq, batch, steps = of_a_rank
        of_all = (dim, layers, seq, RANKS * batch, steps)
        theirs = os.path.join(PEERS, "torch_gpt.py")

        def compare(mode, peer, peer_runs, backend, bound, sizes=of_all):
            label = mode if sizes is of_all else "%s x%d" % (mode, MICRO_BATCHES)
            kinds = {peer: peer_runs, "ours": lambda: ours(train, backend, mode, sizes)}
            rows.append(row(name, label, peer, measured(kinds, name + " " + label, repeat), bound))

        for mode, bound in (("fsdp", fsdp_bound), ("ddp", ddp_bound)):
            compare(mode, "torch", lambda: torch(python, theirs, mode, of_a_rank), "gloo", bound)
        for mode in ("fsdp", "ddp"):
            in_micro_batches = [sizes + (MICRO_BATCHES,) for sizes in (of_a_rank, of_all)]
            compare(mode, "torch", lambda: torch(python, theirs, mode, in_micro_batches[0]), "gloo", 1, in_micro_batches[1])
        compare("fsdp", "jax", lambda: jax(python, "fsdp", of_all), "inproc", jax_bound)
        for mode in ("zero1", "zero2"):
            compare(mode, "ddp", lambda: ours(train, "gloo", "ddp", of_all), "gloo", 0.95)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=["time", "memory"], help="one of the two")
    parser.add_argument("--train", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--memory", required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    report = {}
    if args.only != "memory":
        report["data_parallel"] = times(python_env.python_with(PACKAGES), args.train, args.repeat)
    if args.only != "time":
        report["memory"] = json.loads(run([args.memory]).strip().splitlines()[-1])
        for r in report["memory"]:
            r["bound"] = 1 + MEMORY_WITHIN
            r["met"] = r["ratio"] <= r["bound"]
    if args.json:
        print(json.dumps(report))
        return
    table(report.get("data_parallel", []))
    for r in report.get("memory", []):
        print("GPT d=%-3d %-5s on %d ranks: at most %6.2f MB, formula %6.2f MB (%s), ratio %.3f, wanted %g at most%s"
              % (r["dim"], r["mode"], r["ranks"], r["peak_bytes"] / 1e6, r["formula_bytes"] / 1e6,
                 ", ".join("%s %.2f" % (part, r[part + "_bytes"] / 1e6) for part in ("divided", "units", "activations")),
                 r["ratio"], r["bound"], "" if r["met"] else ": missed"))


if __name__ == "__main__":
    main()
