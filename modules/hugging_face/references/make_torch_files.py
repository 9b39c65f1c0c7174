"""Makes what torch_files_test reads beside models: tensors as they seldom lie, by torch.save and by DCP.

    python3 -m venv venv && venv/bin/pip install torch==2.11.0 numpy safetensors
    venv/bin/python modules/hugging_face/references/make_torch_files.py modules/hugging_face/references

odd/odd.pt and odd_dcp hold the same tensors as odd/odd.safetensors, which has them row-major. Besides, odd.pt has values
that are no tensors.
"""

import collections
import os
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file


def tensors():
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10) / 4 - 3
    return {
        "transposed": base.t(),
        "sliced": base[1:5, 2:9:3],
        "column": base[:, 7],
        "permuted": torch.arange(120, dtype=torch.int16).reshape(2, 3, 4, 5).permute(3, 1, 0, 2),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "bf16": base.bfloat16()[::2],
        "number": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(3, 0, 2).permute(2, 0, 1),
        "empty_ids": torch.zeros(0, dtype=torch.int64),
        "e4m3": base.to(torch.float8_e4m3fn),
        "e4m3_transposed": base.to(torch.float8_e4m3fn).t(),
        "e5m2": base.to(torch.float8_e5m2)[2:, 1::2],
        "u16": torch.arange(7).to(torch.uint16),
        "u32": torch.arange(7).to(torch.uint32)[3:],
        "u64": torch.arange(7).to(torch.uint64),
        "flags": torch.tensor([[True, False, True], [False, False, True]]).t(),
    }


def main():
    torch.manual_seed(1)
    out = os.path.join(sys.argv[1], "odd")
    os.makedirs(out, exist_ok=True)
    state = tensors()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, f"{out}/odd.safetensors")
    dcp.save(dict(state), checkpoint_id=f"{out}_dcp", no_dist=True)
    parameter = torch.nn.Parameter(state["transposed"])
    parameter.partition_dim = 1  # as Megatron does: the parameter is pickled with a state
    state["transposed"] = parameter
    state["column"] = torch.nn.Parameter(state["column"])
    tagged = state["sliced"].as_subclass(torch.Tensor)
    tagged.origin = "somewhere"
    state["sliced"] = tagged
    state["seed"] = 2**70
    state["history"] = collections.deque([1.5, 2.5], maxlen=4)
    state["blob"] = bytearray(b"bytes")
    torch.save(state, f"{out}/odd.pt")


if __name__ == "__main__":
    main()
