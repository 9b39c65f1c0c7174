"""The same under PyTorch's Distributed Checkpoint: prints the seconds as JSON.

torchrun --nproc-per-node 2 torch_dcp.py DIRECTORY TENSORS

Needs torch==2.11.0. Gloo; files are synced, as is DCP's default. See save_and_load.cc.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def forget_pages(directory):
    for folder, _, names in os.walk(directory):
        for name in names:
            file = os.open(os.path.join(folder, name), os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def seconds(work):
    dist.barrier()
    start = time.perf_counter()
    result = work()
    dist.barrier()
    return time.perf_counter() - start, result


def main():
    directory, tensors = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        "t%d" % i: distribute_tensor(torch.full((1024, 4096), float(i)), mesh, [Shard(0)]) for i in range(tensors)
    }
    report = {}
    beside = dist.new_group()  # its thread's collectives must not meet the barriers here
    report["save"], _ = seconds(lambda: dcp.save(state, checkpoint_id=directory + "/1"))
    dcp.async_save(state, checkpoint_id=directory + "/2", process_group=beside).result()
    report["stall"], future = seconds(lambda: dcp.async_save(state, checkpoint_id=directory + "/3", process_group=beside))
    rest, _ = seconds(future.result)
    report["async"] = report["stall"] + rest
    if dist.get_rank() == 0:
        forget_pages(directory)
    report["load"], _ = seconds(lambda: dcp.load(state, checkpoint_id=directory + "/3"))
    if dist.get_rank() == 0:
        print(json.dumps(report), flush=True)
    dist.barrier()
    os._exit(0)  # destroy_process_group() and Python's end have aborted now and then ("terminate called")


main()
