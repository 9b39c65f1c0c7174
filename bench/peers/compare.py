"""Runs PyTorch's DTensor and JAX next to Shardweave on this machine and prints the ratios.

    ./bazelw run -c opt //bench/peers                 # a table
    ./bazelw run -c opt //bench/peers -- --json       # one line
    ./bazelw run -c opt //bench/peers -- --only=gpt   # or dispatch

The peers are installed once, by pip, into a virtual environment in the user's cache directory (about 5 GB). Each figure
is the median of --repeat runs, and the runs of ours and theirs alternate, so that a noisy machine is noisy for both.
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

# name, dim, layers, seq, batch, steps
SIZES = [("d=64", 64, 4, 32, 4, 60), ("d=256", 256, 4, 128, 4, 15)]


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(command, **env):
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **env}
    )
    if result.returncode != 0:
        raise SystemExit(
            "%s failed with %d:\n%s%s"
            % (" ".join(command), result.returncode, result.stdout, result.stderr)
        )
    return result.stdout


def milliseconds(text):
    return float(re.search(r"([\d.]+) ms/step", text).group(1))


def torch_gpt(python, dim, layers, seq, batch, steps):
    torchrun = os.path.join(os.path.dirname(python), "torchrun")
    sizes = [str(v) for v in (dim, layers, seq, batch, steps)]
    return milliseconds(
        run([torchrun, "--standalone", "--nproc-per-node", "2", HERE + "/torch_gpt.py", "tp"] + sizes)
    )


def jax_gpt(python, dim, layers, seq, batch, steps):
    sizes = [str(v) for v in (2, dim, layers, seq, batch, steps)]
    text = run([python, HERE + "/jax_gpt.py", "tp"] + sizes)
    return float(re.search(r"median ([\d.]+)", text).group(1))


def ours_gpt(binary, backend, dim, layers, seq, batch, steps):
    text = run(
        [binary, "--backend=" + backend, "--mesh=tp=2", "--heads=8", "--json"]
        + ["--dim=%d" % dim, "--layers=%d" % layers, "--seq=%d" % seq]
        + ["--batch=%d" % batch, "--steps=%d" % (steps + 5)]
    )
    return batch * seq / json.loads(text.strip().splitlines()[-1])["tokens_per_second"] * 1e3


def compare_gpt(python, binary, repeat):
    rows = []
    for name, dim, layers, seq, batch, steps in SIZES:
        kinds = {
            "torch gloo": lambda s: torch_gpt(python, *s),
            "jax": lambda s: jax_gpt(python, *s),
            "ours gloo": lambda s: ours_gpt(binary, "gloo", *s),
            "ours inproc": lambda s: ours_gpt(binary, "inproc", *s),
        }
        times = {kind: [] for kind in kinds}
        for i in range(repeat):
            for kind, measure in kinds.items():
                say("gpt %s, %s, run %d of %d" % (name, kind, i + 1, repeat))
                times[kind].append(measure((dim, layers, seq, batch, steps)))
        ms = {kind: statistics.median(values) for kind, values in times.items()}
        rows.append(
            {
                "size": name,
                "ms_per_step": ms,
                "torch_over_ours_gloo": ms["torch gloo"] / ms["ours gloo"],
                "jax_over_ours_inproc": ms["jax"] / ms["ours inproc"],
                "ours_gloo_over_inproc": ms["ours gloo"] / ms["ours inproc"],
            }
        )
    return rows


def compare_dispatch(python, binary):
    theirs = {}
    for line in run([python, HERE + "/torch_dispatch.py"]).splitlines():
        match = re.match(r"(\w+) plain ([\d.]+) dt ([\d.]+)", line)
        if match:
            theirs[match.group(1)] = float(match.group(3)) - float(match.group(2))
    ours = json.loads(run([binary, "--json", "--heap_calls=1000"]).splitlines()[-1])
    overhead = {row["name"]: row["overhead_us"] for row in ours["operators"]}
    return [
        {"operator": name, "torch_us": theirs[name], "ours_us": overhead[name],
         "torch_over_ours": theirs[name] / overhead[name]}
        for name in ("add", "mm", "t")
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--only", choices=["gpt", "dispatch"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--train_gpt", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--dispatch", required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    python = python_env.python_with(PACKAGES)
    result = {}
    if args.only != "gpt":
        result["dispatch"] = compare_dispatch(python, args.dispatch)
    if args.only != "dispatch":
        result["gpt"] = compare_gpt(python, args.train_gpt, args.repeat)
    if args.json:
        print(json.dumps(result))
        return
    for row in result.get("dispatch", []):
        print("%-4s over the plain operator: PyTorch %6.2f us, ours %6.2f us, ratio %.1f"
              % (row["operator"], row["torch_us"], row["ours_us"], row["torch_over_ours"]))
    for row in result.get("gpt", []):
        ms = ", ".join("%s %.2f" % item for item in row["ms_per_step"].items())
        print("GPT %-6s tensor parallel 2, ms per step: %s" % (row["size"], ms))
        print("    PyTorch / ours (both Gloo): %.2f;  JAX / ours (inproc): %.2f;  our Gloo / our inproc: %.2f"
              % (row["torch_over_ours_gloo"], row["jax_over_ours_inproc"], row["ours_gloo_over_inproc"]))


if __name__ == "__main__":
    main()
