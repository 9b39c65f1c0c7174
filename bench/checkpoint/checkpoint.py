"""Times saving and loading of sharded tensors beside the disk's own speed (dd) and PyTorch's DCP, and prints the ratios.

    ./bazelw run -c opt //bench:checkpoint                          # a table
    ./bazelw run -c opt //bench:checkpoint -- --json                # one line
    ./bazelw run -c opt //bench:checkpoint -- --directory=/scratch  # on that disk instead of the temporary folder's

All have two writers: two Gloo processes each of ours and of PyTorch's, two of dd. dd writes with fsync and reads with
O_DIRECT; what ours and PyTorch load has left the memory before. Each figure is the median of --repeat runs, which
alternate, so that a noisy disk is noisy for all. A bound that is missed is shown, and no failure.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "peers"))
from side_by_side import python_env, run  # noqa: E402

MIB = 16  # of a tensor


def together(commands):
    start = time.perf_counter()
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in processes:
        _, errors = process.communicate()
        if process.returncode != 0:
            raise SystemExit("dd failed with %d:\n%s" % (process.returncode, errors))
    return time.perf_counter() - start


def disk(folder, tensors):
    """Seconds of dd, with two writers, and two readers."""
    files = [os.path.join(folder, "dd%d" % i) for i in range(2)]
    count = "count=%d" % (tensors * MIB // 2 // 4)
    written = together([["dd", "if=/dev/zero", "of=" + file, "bs=4M", count, "conv=fsync"] for file in files])
    read = together([["dd", "if=" + file, "of=/dev/null", "bs=4M", "iflag=direct"] for file in files])
    return {"save": written, "load": read}


def last_line(text):
    return json.loads(text.strip().splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=32, help="of 16 MiB")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="of the disk that is measured")
    parser.add_argument("--ours", required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    python = python_env.python_with([python_env.TORCH, "numpy"])
    torchrun = os.path.join(os.path.dirname(python), "torchrun")
    theirs = [torchrun, "--standalone", "--nproc-per-node", "2", os.path.join(HERE, "torch_dcp.py")]
    kinds = {
        "dd": lambda folder: disk(folder, args.tensors),
        "ours": lambda folder: last_line(run([args.ours, "--directory=" + folder + "/new", "--tensors=%d" % args.tensors])),
        "torch": lambda folder: last_line(run(theirs + [folder, str(args.tensors)])),
    }
    runs = {kind: [] for kind in kinds}
    for i in range(args.repeat):
        for kind, measure in kinds.items():
            print("%s, run %d of %d" % (kind, i + 1, args.repeat), file=sys.stderr, flush=True)
            folder = tempfile.mkdtemp(prefix="bench_checkpoint_", dir=args.directory)
            try:
                runs[kind].append(measure(folder))
            finally:
                shutil.rmtree(folder)
    s = {kind: {key: statistics.median(r[key] for r in all_of) for key in all_of[0]} for kind, all_of in runs.items()}
    ours, torch = s["ours"], s["torch"]
    rows = [
        ("save: share of the disk's speed", s["dd"]["save"] / ours["save"], 0.8),
        ("load: share of the disk's speed", s["dd"]["load"] / ours["load"], 0.8),
        ("async: blocking save / stall", ours["save"] / ours["stall"], 20),
        ("save: PyTorch / ours", torch["save"] / ours["save"], 1),
        ("stall: PyTorch / ours", torch["stall"] / ours["stall"], 1),
        ("stall, all copied at once: PyTorch / ours", torch["stall"] / ours["at_once"], 1),
        ("async: PyTorch / ours", torch["async"] / ours["async"], 1),
        ("load: PyTorch / ours", torch["load"] / ours["load"], 1),
    ]
    if args.json:
        report = [{"what": what, "ratio": ratio, "bound": bound, "met": ratio >= bound} for what, ratio, bound in rows]
        print(json.dumps({"megabytes": args.tensors * MIB, "seconds": s, "checkpoint": report}))
        return
    for kind, of in s.items():
        print("%-5s seconds for %d MiB: %s" % (kind, args.tensors * MIB, ", ".join("%s %.3f" % item for item in of.items())))
    for what, ratio, bound in rows:
        print("%-42s %6.2f, wanted %g%s" % (what, ratio, bound, "" if ratio >= bound else ": missed"))


if __name__ == "__main__":
    main()
