"""Makes the directories that hugging_face_test reads: what transformers writes of the models of nn's references.

    python3 -m venv venv && venv/bin/pip install torch==2.11.0 transformers==5.23.0
    venv/bin/python modules/hugging_face/references/make_references.py modules/nn/references modules/hugging_face/references

Each is a model by save_pretrained(): the weights before the first step, so that the logits of its first inputs are
in nn/references. Llama's is in several files with an index. Besides, gpt2_bin is GPT-2's by torch.save, and llama_dcp
Llama's by torch.distributed.checkpoint, cut over two ranks. A second run gives the same safetensors files.
"""

import json
import os
import sys

import torch
import transformers
from safetensors import safe_open

CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "vit": (transformers.ViTConfig, transformers.ViTForImageClassification),
}


def save_dcp(rank, directory, out):
    """Rows and columns cut in turn; those that do not divide, unevenly."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    model = transformers.LlamaForCausalLM.from_pretrained(directory)
    state = {}
    for i, (name, parameter) in enumerate(model.named_parameters()):
        cut = [Shard(0), Shard(parameter.dim() - 1), Replicate()][i % 3]
        state[name] = distribute_tensor(parameter.detach(), mesh, [cut])
    dcp.save({"model": state, "step": 3}, checkpoint_id=out)
    dist.destroy_process_group()


def main():
    references, out = sys.argv[1:3]
    torch.set_num_threads(1)
    for kind, (config_class, model_class) in CLASSES.items():
        with safe_open(f"{references}/{kind}.safetensors", "pt") as file:
            config = config_class(**json.loads(file.metadata()["config.json"]))
            if kind == "mixtral":  # grouped products want other sizes
                config._experts_implementation = "eager"
            model = model_class(config).float().eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(file.get_tensor("parameter." + name))
                logits = model(file.get_tensor("inputs")[0]).logits
            print(kind, "logits off by", (logits - file.get_tensor("logits")).abs().max().item())
        shard = {"max_shard_size": "16KB"} if kind == "llama" else {}
        model.save_pretrained(f"{out}/{kind}", **shard)
        for name in os.listdir(f"{out}/{kind}"):
            if name not in ("config.json",) and "safetensors" not in name:
                os.remove(f"{out}/{kind}/{name}")
        if kind == "gpt2":
            os.makedirs(f"{out}/gpt2_bin", exist_ok=True)
            ordered = model.state_dict()
            ordered.pop("lm_head.weight")
            torch.save(ordered, f"{out}/gpt2_bin/pytorch_model.bin")
            config.save_pretrained(f"{out}/gpt2_bin")
    torch.multiprocessing.spawn(save_dcp, (f"{out}/llama", f"{out}/llama_dcp"), nprocs=2)


if __name__ == "__main__":
    main()
