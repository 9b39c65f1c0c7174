#!/usr/bin/env python3
"""Runs of train_llama that begin in one language and go on in another, each on another mesh: the losses are those of a run
that was never broken off.

    llama_moves.py --model=DIRECTORY NAME=PROGRAM ...

Prints a table: who has saved, who has gone on, the last loss, and how far a step's loss was from that of one device.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

STEPS, MIDDLE = 6, 4
MESHES = ["--mesh=tp=2", "--mesh=dp=3", "--mesh=dp=1"]  # that go on
TOLERANCE = 3e-5  # of losses of about 3.4


class Runs:
    def __init__(self, model, folder):
        text = os.path.join(folder, "text")
        with open(text, "wb") as file:
            file.write(bytes((i * i * 7 + 3 * i) % 251 for i in range(500)))
        self.options = [f"--model={model}", f"--data={text}", f"--steps={STEPS}", "--batch=3", "--seq=9", "--lr=0.01", "--json"]
        # A launcher around this test says nothing about the ranks in it.
        launchers = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
        self.environment = {key: value for key, value in os.environ.items() if key not in launchers}

    def train(self, program, *more):
        ran = subprocess.run([program, *self.options, *more], capture_output=True, text=True, env=self.environment, timeout=120)
        if ran.returncode != 0:
            sys.exit(f"{program} {' '.join(more)}: exit code {ran.returncode}\n{ran.stderr}")
        return json.loads(ran.stdout.splitlines()[-1])


def keep_only(directory, step):
    """As if the run had ended after this step."""
    for name in os.listdir(directory):
        if name != f"step-{step:06}":
            path = os.path.join(directory, name)
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.remove(path)


def near(a, b):
    return abs(a - b) <= TOLERANCE


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--model", required=True)
    arguments.add_argument("programs", nargs="+", metavar="NAME=PROGRAM")
    options = arguments.parse_args()
    programs = dict(program.split("=", 1) for program in options.programs)
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(options.model, folder)
        print("saved by  gone on by  first loss  last loss  off by")

        def row(first, second, result):
            print(f"{first:8}  {second:10}  {result['first_loss']:10.6f}  {result['last_loss']:9.6f}  {result.get('max_loss_diff') or 0:.1e}",
                  flush=True)

        whole = {}
        for name, program in programs.items():
            directory = os.path.join(folder, name)
            whole[name] = runs.train(program, "--mesh=dp=2,tp=2", "--check", f"--save={directory}", "--save_every=2")
            row(name, "-", whole[name])
            keep_only(directory, MIDDLE)
        wanted = next(iter(whole.values()))
        for name, result in whole.items():
            if not (near(result["first_loss"], wanted["first_loss"]) and near(result["last_loss"], wanted["last_loss"])):
                wrong.append(f"{name} has other losses: {result}, wanted {wanted}")

        def goes_on(first, second, *more):
            result = runs.train(programs[second], "--check", *more)
            row(first, second, result)
            if not (near(result["last_loss"], wanted["last_loss"]) and result["max_loss_diff"] <= TOLERANCE):
                wrong.append(f"{first}, then {second}: {result}, wanted {wanted}")
            if near(result["first_loss"], wanted["first_loss"]):
                wrong.append(f"{first}, then {second}: it has begun again: {result}")

        for first in programs:
            for second, mesh in zip(programs, MESHES):
                goes_on(first, second, mesh, f"--resume={os.path.join(folder, first)}")
        # Through all of them.
        names = list(programs)
        at = os.path.join(folder, "relay0")
        runs.train(programs[names[0]], "--mesh=dp=2", f"--save={at}", "--save_every=2")
        for i, name in enumerate(names[1:], 1):
            keep_only(at, 2 * i)
            before, at = at, os.path.join(folder, f"relay{i}")
            goes_on(names[i - 1], name, "--mesh=tp=2", f"--resume={before}", f"--save={at}", "--save_every=2")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
