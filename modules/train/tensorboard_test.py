#!/usr/bin/env python3
"""TensorBoard's own reader finds what EventFile has written, of a run that went on after a crash each step once."""

import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "../../tools/python"))
import python_env  # noqa: E402

CHECK = """
import sys
from tensorboard.backend.event_processing import event_accumulator
a = event_accumulator.EventAccumulator(sys.argv[1], size_guidance={event_accumulator.SCALARS: 0})
a.Reload()
assert sorted(a.Tags()["scalars"]) == ["loss", "train/lr"], a.Tags()
loss = a.Scalars("loss")
assert [e.step for e in loss] == list(range(200)), loss[:3]
for e in loss:
    assert abs(e.value - (5 if e.step < 120 else 7) / (e.step + 1)) < 1e-6, e
    assert e.wall_time > 1.7e9
lr = a.Scalars("train/lr")
assert abs(lr[199].value - 0.199) < 1e-6, lr[199]
assert a.file_version == 2.0, a.file_version
print("TensorBoard reads", len(loss) + len(lr), "scalars")
"""


def main():
    # Its own requirements, of which the reader needs these two.
    python = python_env.python_with(["tensorboard==2.20.0", "setuptools<81"])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([os.path.realpath(sys.argv[1]), folder], check=True)
        subprocess.run([python, "-c", CHECK, folder], check=True)


if __name__ == "__main__":
    main()
