#!/usr/bin/env python3
"""Kills a run at random moments of its saves, and resumes it: never a torn checkpoint, never a step lost that was there.

Every second run is four threads of one process; the others are two processes over Gloo, of which one is killed: the other
has to end by itself.

    kill_test.py KILL_LOOP [--kills=5] [--seed=N]

Prints a table: which step was the newest before and after each kill, and what it had left behind. 50 kills:
    ./bazelw run //tests/checkpoint:kill -- --kills=50
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time


def newest(program, directory):
    checked = subprocess.run([program, directory, "--check"], capture_output=True, text=True)
    if checked.returncode != 0:
        sys.exit("TORN: " + checked.stderr)
    return int(checked.stdout)


def ended(run):
    return any(process.poll() is not None for process in run)


def start(command, environment, processes):
    if processes == 1:
        return [subprocess.Popen(command, env=environment)]
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    launched = dict(environment, WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return [
        subprocess.Popen(command, env=dict(launched, RANK=str(rank), LOCAL_RANK=str(rank)), stderr=subprocess.DEVNULL)
        for rank in range(processes)
    ]


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("program")
    arguments.add_argument("--kills", type=int, default=5)
    arguments.add_argument("--seed", type=int, default=int(time.time()))
    options = arguments.parse_args()
    chance = random.Random(options.seed)
    print(f"seed {options.seed}")
    print("kill  processes  after ms  newest before  newest after  left behind")
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        directory = os.path.join(folder, "run")
        before = 0
        for kill in range(1, options.kills + 1):
            run = start([options.program, directory], environment, 2 - kill % 2)
            # Not before it has saved something of its own.
            deadline = time.time() + 60
            step = before
            while step <= before and not ended(run) and time.time() < deadline:
                names = os.listdir(directory) if os.path.isdir(directory) else []
                steps = [int(name[5:]) for name in names if name.startswith("step-") and ".tmp-" not in name]
                step = max(steps, default=0)
                time.sleep(0.001)
            wait = chance.uniform(0, 0.15)
            time.sleep(wait)
            if ended(run):
                sys.exit("the run has ended by itself")
            chance.choice(run).send_signal(signal.SIGKILL)
            for process in run:
                try:
                    process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    sys.exit("HANGS: a rank goes on without the other")
            left = [name for name in os.listdir(directory) if ".tmp-" in name]
            after = newest(options.program, directory)
            print(f"{kill:4}  {len(run):9}  {wait * 1000:8.1f}  {before:13}  {after:12}  {', '.join(left) or '-'}", flush=True)
            if after < step:
                sys.exit(f"LOST: step {step} was there, and the newest is {after}")
            before = after
    print(f"{options.kills} kills, {before} steps: no torn checkpoint, no step lost")


if __name__ == "__main__":
    main()
