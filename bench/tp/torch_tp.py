"""The same small GPT under PyTorch's parallelize_module: prints milliseconds per training step, the median.

torchrun --nproc-per-node 2 torch_tp.py tp|sp D LAYERS SEQ BATCH STEPS

Needs torch==2.11.0. One thread per rank; Gloo. sp: activations are cut along the sequence outside of attention and MLP.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY, HEADS = 256, 8


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.head_dim = dim // HEADS

    def forward(self, x):
        batch, length, _ = x.shape

        def heads(layer):
            return layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2)

        y = F.scaled_dot_product_attention(heads(self.q), heads(self.k), heads(self.v), is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.a = nn.LayerNorm(dim), Attention(dim)
        self.n2, self.m = nn.LayerNorm(dim), Mlp(dim)

    def forward(self, x):
        x = x + self.a(self.n1(x))
        return x + self.m(self.n2(x))


class Embeddings(nn.Module):
    def __init__(self, dim, length):
        super().__init__()
        self.e, self.p = nn.Embedding(VOCABULARY, dim), nn.Embedding(length, dim)
        self.length = length

    def forward(self, tokens):
        return self.e(tokens) + self.p(torch.arange(self.length))


class Gpt(nn.Module):
    def __init__(self, dim, layers, length):
        super().__init__()
        self.embeddings = Embeddings(dim, length)
        self.b = nn.ModuleList(Block(dim) for _ in range(layers))
        self.n, self.h = nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embeddings(tokens)
        for block in self.b:
            x = block(x)
        return self.h(self.n(x))


class ShardSequence(nn.Module):
    """The embeddings' result, of which each rank goes on with its part of the sequence."""

    def __init__(self, embeddings, mesh):
        super().__init__()
        self.embeddings, self.mesh = embeddings, mesh

    def forward(self, tokens):
        x = self.embeddings(tokens)
        parts, rank = self.mesh.size(), self.mesh.get_local_rank()
        return x.chunk(parts, 1)[rank]


def parallelize(model, mesh, mode):
    for block in model.b:
        plan = {name: ColwiseParallel() for name in ("a.q", "a.k", "a.v", "m.w1")}
        plan.update({name: RowwiseParallel() for name in ("a.o", "m.w2")})
        if mode == "sp":
            whole = dict(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan.update({"n1": SequenceParallel(), "n2": SequenceParallel()})
            plan.update({"a": PrepareModuleInput(**whole), "m": PrepareModuleInput(**whole)})
            plan.update({name: RowwiseParallel(output_layouts=Shard(1)) for name in ("a.o", "m.w2")})
        parallelize_module(block, mesh, plan)
    if mode == "sp":
        parallelize_module(
            model,
            mesh,
            {"n": SequenceParallel(), "h": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())},
        )
        model.embeddings = ShardSequence(model.embeddings, mesh)


def main():
    mode = sys.argv[1]
    dim, layers, length, batch, steps = map(int, sys.argv[2:7])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = Gpt(dim, layers, length)
    parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)), mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(0)
    times = []
    for _ in range(steps + 5):
        start = time.perf_counter()
        tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print("%.4f ms/step" % (sorted(times[5:])[steps // 2] * 1e3), flush=True)
    dist.barrier()
    os._exit(0)  # destroy_process_group() and Python's end have aborted now and then ("terminate called")


main()
