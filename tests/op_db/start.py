"""Starts op_db.py in the Python that has PyTorch."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "tools", "python"))
import python_env  # noqa: E402

python = python_env.python_with([python_env.TORCH, "numpy", "expecttest"])
os.execv(python, [python, os.path.join(HERE, "op_db.py")] + sys.argv[1:])
