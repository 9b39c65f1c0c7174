"""PyTorch's operator data base on Shardweave's DTensors, against plain tensors: values, gradients, second gradients.

    ./bazelw run -c opt //tests/op_db                       # meshes 2, 2x2 and 3; a table at the end
    ./bazelw run -c opt //tests/op_db -- --mesh=2 --ops='^(add|nn.functional.*)$' --details
    ./bazelw run -c opt //tests/op_db -- --json             # one line

Every operator runs in its own processes, one per rank, so that a crash or a hang is the result of one case and the
next one goes on.
"""

import argparse
import collections
import json
import os
import re
import selectors
import signal
import sys
import tempfile
import time
import traceback

KINDS = ["right", "wrong", "wrong gradient", "wrong second gradient", "error", "gradient error",
         "second gradient error", "hang", "crash"]
MAX_STARTS = 6  # of one operator: then its other cases count as errors


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="2,2x2,3", help="meshes, as 2,2x2,3")
    parser.add_argument("--ops", default="", help="regular expression for the operators' names")
    parser.add_argument("--jobs", type=int, default=2, help="operators at a time")
    parser.add_argument("--cases", type=int, default=48, help="cases per operator and dtype")
    parser.add_argument("--samples", type=int, default=12, help="samples per operator and dtype")
    parser.add_argument("--timeout", type=float, default=20, help="seconds that a rank waits")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--details", action="store_true", help="list every case that is not right")
    parser.add_argument("--write", metavar="FILE", help="every case, a line of JSON each")
    parser.add_argument("--bridge", required=True, help=argparse.SUPPRESS)
    return parser.parse_args()


class Progress:
    """A line that says how far it is, where a person looks; else one every half minute."""

    def __init__(self, total):
        self.total, self.done, self.start, self.last = total, 0, time.time(), 0
        self.terminal = sys.stderr.isatty()

    def show(self, counts, now=""):
        if time.time() - self.last < (0.2 if self.terminal else 30):
            return
        self.last = time.time()
        elapsed = self.last - self.start
        left = elapsed / self.done * (self.total - self.done) if self.done else float("nan")
        cases = sum(counts.values())
        line = "%d of %d operators, %d cases, %.0f/s, %d not right, %s left  %s" % (
            self.done, self.total, cases, cases / max(elapsed, 1e-9),
            cases - counts["right"],
            "?" if left != left else "%d:%02d" % divmod(int(left), 60), now)
        sys.stderr.write("\r\033[K%s" % line[:150] if self.terminal else line + "\n")
        sys.stderr.flush()

    def end(self):
        if self.terminal:
            sys.stderr.write("\r\033[K")


class Operator:
    """The processes that run one operator's cases, and what they have said."""

    def __init__(self, op, mesh, options, directory):
        self.op, self.mesh, self.options, self.directory = op, mesh, options, directory
        self.ranks = 1
        for size in mesh:
            self.ranks *= size
        self.starts = 0
        self.cases = {}  # number -> {"case", "form", "outcomes": {rank: (kind, details, second)}}
        self.results = []
        self.gathers = False
        self.launch(0)

    def launch(self, first):
        from rank import Budget, main

        self.starts += 1
        self.done = set()
        self.current = first
        self.silent_since = time.time()
        store = tempfile.mktemp(dir=self.directory)
        self.pids, self.pipes, self.buffers = [], [], []
        self.errors = []
        for rank in range(self.ranks):
            read, write = os.pipe()
            stderr = tempfile.TemporaryFile(dir=self.directory)
            self.errors.append(stderr)
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    os.close(read)
                    os.dup2(stderr.fileno(), 2)
                    os.dup2(stderr.fileno(), 1)
                    main(self.op, self.mesh, rank, self.ranks, store, first,
                         Budget(self.options.cases, self.options.samples), self.options.timeout,
                         lambda line: os.write(write, line.encode() + b"\n"))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            os.close(write)
            os.set_blocking(read, False)
            self.pids.append(pid)
            self.pipes.append(read)
            self.buffers.append(b"")

    def read(self, rank):
        """False at the end of this rank's lines."""
        try:
            data = os.read(self.pipes[rank], 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        self.silent_since = time.time()
        *lines, self.buffers[rank] = (self.buffers[rank] + data).split(b"\n")
        for line in lines:
            self.hear(rank, *json.loads(line))
        return True

    def hear(self, rank, what, number=None, *rest):
        if what == "start":
            case, form, main_dtype = rest
            self.current = max(self.current, number)
            self.cases.setdefault(number, {"case": case, "form": form, "outcomes": {}})
        elif what == "end":
            outcome, gathered = rest
            self.gathers |= gathered
            self.cases[number]["outcomes"][rank] = outcome
        elif what == "apart":
            self.cases[number].setdefault("apart", rest[0])
        elif what == "done":
            self.done.add(rank)

    def stop(self):
        """Ends the processes that are left. What the first that crashed said, or nothing."""
        crash = ""
        for pid, stderr in zip(self.pids, self.errors):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            elif status != 0 and not crash:
                stderr.seek(0)
                said = stderr.read().decode(errors="replace").strip().splitlines()
                why = ("signal %d" % os.WTERMSIG(status) if os.WIFSIGNALED(status)
                       else "exit code %d" % os.WEXITSTATUS(status))
                crash = "%s: %s" % (why, " | ".join(said[-3:])[-500:])
        for pipe in self.pipes:
            os.close(pipe)
        return crash

    def finish(self, silent):
        """All pipes are at their end, or silent for too long. True if the operator is done."""
        time.sleep(0.01 if len(self.done) == self.ranks else 0.1)  # to be reaped
        crash = self.stop()
        complete = len(self.done) == self.ranks
        if not complete:
            case = self.cases.setdefault(
                self.current, {"case": "before the first case", "form": "function", "outcomes": {}})
            if silent:
                case["hang"] = "nothing for %d s" % (6 * self.options.timeout)
            elif crash:
                case["crash"] = crash
            if self.starts < MAX_STARTS and case["case"] != "before the first case":
                self.launch(self.current + 1)
                return False
        for number in sorted(self.cases):
            found = self.judge(self.cases[number])
            if found is not None:
                self.results.append(found)
        return True

    def judge(self, case):
        outcomes = [case["outcomes"].get(rank) for rank in range(self.ranks)]
        told = [o for o in outcomes if o is not None]
        result = {"op": self.op.full_name, "form": case["form"], "case": case["case"]}
        if "crash" in case:
            return {**result, "kind": "crash", "details": case["crash"]}
        if "hang" in case:
            return {**result, "kind": "hang", "details": case["hang"]}
        if "apart" in case:
            said = "; ".join("rank %d: %s" % (r, " ".join(o) if o else "no answer")
                             for r, o in enumerate(outcomes))
            return {**result, "kind": "hang", "details": "%s (%s)" % (said, case["apart"])}
        if not told:
            return None
        kind, details, second = max(told, key=lambda o: KINDS.index(o[0]))
        return {**result, "kind": kind, "details": details, "second": second}


def run_mesh(ops, mesh, options, directory, write):
    """([result], [operators that gather], {operator: reason})."""
    results, gathers, untested = [], [], []
    counts = collections.Counter()
    progress = Progress(len(ops))
    waiting = collections.deque(ops)
    running = {}
    selector = selectors.DefaultSelector()

    def watch(operator):
        operator.open = set(range(operator.ranks))
        for rank, pipe in enumerate(operator.pipes):
            selector.register(pipe, selectors.EVENT_READ, (operator, rank))

    while waiting or running:
        while waiting and len(running) < options.jobs:
            operator = Operator(waiting.popleft(), mesh, options, directory)
            running[id(operator)] = operator
            watch(operator)
        for key, _ in selector.select(1):
            operator, rank = key.data
            if not operator.read(rank):
                selector.unregister(key.fd)
                operator.open.discard(rank)
        for operator in list(running.values()):
            silent = time.time() - operator.silent_since > 6 * options.timeout
            if operator.open and not silent:
                continue
            for rank in operator.open:
                selector.unregister(operator.pipes[rank])
            if not operator.finish(silent):
                watch(operator)
                continue
            del running[id(operator)]
            progress.done += 1
            if not operator.results:
                untested.append(operator.op.full_name)
            if operator.gathers:
                gathers.append(operator.op.full_name)
            results += operator.results
            for r in operator.results:
                write(r)
            counts.update(r["kind"] for r in operator.results)
        progress.show(counts, ", ".join(o.op.full_name for o in running.values()))
    progress.end()
    return results, gathers, untested


def summary(results, gathers, untested):
    def share(part):
        kinds = collections.Counter(r["kind"] for r in part)
        second = collections.Counter(r.get("second") for r in part)
        return {"cases": len(part), **{kind: kinds[kind] for kind in KINDS},
                "second_gradients": second["compared"], "no_second_derivative": second["none"]}

    operators = collections.defaultdict(set)
    for r in results:
        operators[r["op"]].add(r["kind"])
    return {
        **share(results),
        "operators": len(operators),
        "operators_right": sum(kinds == {"right"} for kinds in operators.values()),
        "operators_that_gather": len(gathers),
        "forms": {form: share([r for r in results if r["form"] == form])
                  for form in ("function", "inplace", "out")},
        "without_cases": sorted(untested),
    }


def table(name, results, totals, details):
    print("mesh %s: %d operators, %d of them right in all cases; %d gather in some case" % (
        name, totals["operators"], totals["operators_right"], totals["operators_that_gather"]))
    for form, share in [("all", totals)] + list(totals["forms"].items()):
        cases = max(1, share["cases"])
        print("  %-9s %6d cases: %s" % (form, share["cases"], ", ".join(
            "%s %d (%.2f %%)" % (kind, share[kind], 100 * share[kind] / cases)
            for kind in KINDS if share[kind])
            + "; second gradients compared in %d, no second derivative in %d" % (
                share["second_gradients"], share["no_second_derivative"])))
    print("  without cases (no dense tensor among the arguments): %s"
          % ", ".join(totals["without_cases"]))
    groups = collections.defaultdict(list)
    for r in results:
        if r["kind"] != "right":
            groups[r["kind"], r["op"]].append(r)
    for (kind, op), group in sorted(groups.items(), key=lambda g: (KINDS.index(g[0][0]), g[0][1])):
        print("  %-21s %4d  %s" % (kind, len(group), op))
        for r in group if details else group[:1]:
            print("      %s\n        %s" % (r["case"], r["details"].replace("\n", "\n        ")))


def main():
    options = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import torch

    torch.ops.load_library(options.bridge)
    from torch.testing._internal import common_methods_invocations
    from torch.testing._internal.common_methods_invocations import op_db

    # Its random operators set a seed before each run, so that they would look repeatable.
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

    ops = [op for op in op_db if re.search(options.ops, op.full_name)]
    if not ops:
        raise SystemExit("no operator's name matches --ops=%s" % options.ops)
    everything = {}
    with tempfile.TemporaryDirectory() as directory, open(
            options.write or os.devnull, "w", buffering=1) as written:
        for name in options.mesh.split(","):
            mesh = [int(size) for size in name.split("x")]
            results, gathers, untested = run_mesh(
                ops, mesh, options, directory,
                lambda r: written.write(json.dumps({"mesh": name, **r}) + "\n"))
            everything[name] = summary(results, gathers, untested)
            if not options.json:
                table(name, results, everything[name], options.details)
    if options.json:
        print(json.dumps(everything))
    return any(t["right"] != t["cases"] for t in everything.values())


if __name__ == "__main__":
    sys.exit(main())
