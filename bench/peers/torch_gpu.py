"""The figures of gpu_check's dispatch, block and captured-step checks, of PyTorch's DTensor and FSDP2 on one GPU, as JSON.

python torch_gpu.py            (needs torch with CUDA; one process, one GPU)

The same operators, block and sizes as tools/gpu_check: see overhead.cc and transformer.cc there.
"""
import json
import math
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

DISPATCH_BATCHES, DISPATCH_CALLS = 41, 200
DIM, HEADS, BATCH, LENGTH, REPEATS = 4096, 32, 4, 1024, 20
SMALL_DIM, SMALL_HEADS, SMALL_LAYERS, SMALL_BATCH, SMALL_LENGTH, WORDS = 256, 4, 4, 4, 64, 256


class Block(nn.Module):
    def __init__(self, dim, heads, fused_attention=True):
        super().__init__()
        self.heads, self.fused_attention = heads, fused_attention
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        split = lambda t: t.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
        h = self.norm1(x)
        q, k, v = split(self.q(h)), split(self.k(h)), split(self.v(h))
        if self.fused_attention:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = torch.softmax(q @ k.transpose(2, 3) * (1 / math.sqrt(dim // self.heads)), -1) @ v
        y = x + self.o(mixed.transpose(1, 2).reshape(batch, length, dim))
        return y + self.down(nn.functional.gelu(self.up(self.norm2(y))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, SMALL_DIM)
        self.blocks = nn.ModuleList(Block(SMALL_DIM, SMALL_HEADS, False) for _ in range(SMALL_LAYERS))
        self.norm, self.head = nn.LayerNorm(SMALL_DIM), nn.Linear(SMALL_DIM, WORDS)

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def fill(module):
    with torch.no_grad():
        for k, p in enumerate(module.parameters()):
            p.copy_((torch.sin(torch.arange(p.numel(), dtype=torch.float32) * 0.7 + k + 1) * 0.2).view(p.shape))


def host_us(body, calls):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        body()
    end = time.perf_counter()
    torch.cuda.synchronize()
    return (end - start) / calls * 1e6


def dispatch(mesh):
    def operands(place):
        torch.manual_seed(0)
        return [place(t.cuda()) for t in (torch.randn(8, 8), torch.randn(8, 8), torch.randn(2, 8, 8),
                                          torch.randn(8), torch.rand(8, 8) > 0.5, torch.arange(8))]
    aten = torch.ops.aten
    operators = {
        "add": lambda a, b, batch, row, mask, index: torch.add(a, b),
        "add_": lambda a, b, batch, row, mask, index: a.add_(b, alpha=1e-9),
        "mul": lambda a, b, batch, row, mask, index: torch.mul(a, b),
        "mul by a number": lambda a, b, batch, row, mask, index: torch.mul(a, 2.0),
        "mm": lambda a, b, batch, row, mask, index: torch.mm(a, b),
        "bmm": lambda a, b, batch, row, mask, index: torch.bmm(batch, batch),
        "addmm": lambda a, b, batch, row, mask, index: torch.addmm(row, a, b),
        "t": lambda a, b, batch, row, mask, index: a.t(),
        "view": lambda a, b, batch, row, mask, index: batch.view(2, 64),
        "slice": lambda a, b, batch, row, mask, index: aten.slice(a, 1, 2, 6),
        "cat": lambda a, b, batch, row, mask, index: torch.cat([a, b], 1),
        "sum": lambda a, b, batch, row, mask, index: torch.sum(a, [1]),
        "softmax": lambda a, b, batch, row, mask, index: torch._softmax(a, 1, False),
        "layer_norm": lambda a, b, batch, row, mask, index: torch.native_layer_norm(a, [8], row, row, 1e-5),
        "gelu": lambda a, b, batch, row, mask, index: nn.functional.gelu(a),
        "embedding": lambda a, b, batch, row, mask, index: nn.functional.embedding(index, a),
        "where": lambda a, b, batch, row, mask, index: torch.where(mask, a, b),
    }
    plain = operands(lambda t: t)
    sharded = operands(lambda t: distribute_tensor(t, mesh, [Replicate()]))
    result = {}
    with torch.no_grad():
        for name, run in operators.items():
            try:
                before, after = [], []
                for i in range(DISPATCH_BATCHES + 1):
                    a = host_us(lambda: run(*plain), DISPATCH_CALLS)
                    b = host_us(lambda: run(*sharded), DISPATCH_CALLS)
                    if i > 0:
                        before.append(a)
                        after.append(b)
                result[name] = {"plain_us": statistics.median(before),
                                "more_us": statistics.median(after) - statistics.median(before)}
            except Exception as error:  # an operator without a rule there
                result[name] = {"error": str(error)[:200]}
    result["median of more"] = statistics.median(r["more_us"] for r in result.values() if "more_us" in r)
    return result


def block(mesh, fused_attention):
    x = torch.cos(torch.arange(BATCH * LENGTH * DIM, dtype=torch.float32)).view(BATCH, LENGTH, DIM).cuda().bfloat16()

    def make():
        made = Block(DIM, HEADS, fused_attention)
        fill(made)
        return made.cuda().bfloat16()

    ways = {"plain": (make(), x.clone())}
    ways["DTensor"] = (distribute_module(make(), mesh), distribute_tensor(x, mesh, [Replicate()]))
    ways["fully_shard"] = (fully_shard(make(), mesh=mesh), x.clone())
    seconds = {name: [] for name in ways}
    for _, batch in ways.values():
        batch.requires_grad_()
    for i in range(REPEATS + 3):
        for name, (module, batch) in ways.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            module(batch).sum().backward()
            module.zero_grad()
            batch.grad = None
            end.record()
            end.synchronize()
            if i >= 3:
                seconds[name].append(begin.elapsed_time(end))
    result = {name: statistics.median(values) for name, values in seconds.items()}
    return {**{name + "_ms": value for name, value in result.items()},
            "DTensor / plain": result["DTensor"] / result["plain"],
            "fully_shard / plain": result["fully_shard"] / result["plain"]}


def captured(mesh):
    """A step of a small model (AdamW, fused): called, and replayed as a CUDA graph."""
    words = (torch.arange(SMALL_BATCH * SMALL_LENGTH) * 7 % WORDS).view(SMALL_BATCH, SMALL_LENGTH).cuda()
    target = (words + 1) % WORDS

    def make(distributed):
        model = Transformer()
        fill(model)
        model.cuda()
        given, wanted = words, target
        if distributed:
            distribute_module(model, mesh)
            given, wanted = (distribute_tensor(t, mesh, [Replicate()]) for t in (words, target))
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True, capturable=True)

        def step():
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(given).view(-1, WORDS), wanted.view(-1)).backward()
            optimizer.step()
        return step

    def replayed(distributed):
        step = make(distributed)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            step()
        return graph.replay

    ways = {"plain": lambda: make(False), "plain, replayed": lambda: replayed(False),
            "DTensor": lambda: make(True), "DTensor, replayed": lambda: replayed(True)}
    result = {}
    for name, prepare in ways.items():
        try:
            run, seconds = prepare(), []
            for i in range(12):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(10):
                    run()
                torch.cuda.synchronize()
                if i >= 2:
                    seconds.append((time.perf_counter() - begin) / 10)
            result[name + "_ms"] = statistics.median(seconds) * 1e3
        except Exception as error:  # what is not to be captured there
            result[name] = {"error": str(error)[:300]}
    return result


def main():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.cuda.set_device(0)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as gpu_check has it
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (1,))
    print(json.dumps({"torch": torch.__version__, "gpu": torch.cuda.get_device_name(0), "dispatch": dispatch(mesh),
                      "block": block(mesh, True), "block of matmuls": block(mesh, False),
                      "captured step": captured(mesh)}, indent=1))
    dist.destroy_process_group()


main()
