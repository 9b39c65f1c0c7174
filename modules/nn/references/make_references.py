"""Makes the references that nn's tests compare with: what transformers computes, in one file a model.

    python3 -m venv venv && venv/bin/pip install torch==2.11.0 transformers==5.23.0
    venv/bin/python modules/nn/references/make_references.py modules/nn/references

A file is safetensors: "config.json" among its metadata, and the tensors

    inputs, labels             of every step
    parameter.NAME             before the first step
    logits, loss, gradient.NAME  of the first step
    losses, stepped.NAME       after kSteps steps of AdamW (lr 1e-2, weight decay 0.01)

and ropes.safetensors the frequencies, cosines and sines of every kind of rotary embedding. Models are small
and their sizes odd on purpose. The numbers come from seeds: a second run gives the same files.
"""

import json
import os
import sys

import torch
import transformers
from safetensors.torch import save_file

STEPS = 3

LLAMA = dict(
    vocab_size=29,
    hidden_size=18,
    intermediate_size=23,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=16,
    attention_bias=True,
    mlp_bias=True,
    tie_word_embeddings=True,
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
)
MIXTRAL = dict(
    vocab_size=29,
    hidden_size=18,
    intermediate_size=11,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=4,
    max_position_embeddings=16,
    num_local_experts=5,
    num_experts_per_tok=2,
    experts_implementation="eager",
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
GPT2 = dict(
    vocab_size=29,
    n_positions=11,
    n_embd=18,
    n_layer=2,
    n_head=6,
    n_inner=23,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=1,
    eos_token_id=2,
)
VIT = dict(
    hidden_size=18,
    num_hidden_layers=2,
    num_attention_heads=6,
    intermediate_size=23,
    image_size=7,
    patch_size=2,
    num_channels=3,
    id2label={i: str(i) for i in range(5)},
    label2id={str(i): i for i in range(5)},
)

ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 24,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.7 * i for i in range(8)],
    },
}


def draw(model, seed):
    """Values that no initialiser draws: norms and biases that matter, too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and not name.endswith("bias")
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.3 * noise)


def record(path, model, config, inputs, labels):
    draw(model, 7)
    model.train()
    tensors = {"inputs": inputs, "labels": labels}
    for name, parameter in model.named_parameters():
        tensors["parameter." + name] = parameter.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        out = model(inputs[step], labels=labels[step])
        out.loss.backward()
        losses.append(out.loss.detach())
        if step == 0:
            tensors["logits"] = out.logits.detach().clone()
            for name, parameter in model.named_parameters():
                tensors["gradient." + name] = parameter.grad.clone()
        optimizer.step()
    tensors["losses"] = torch.stack(losses)
    for name, parameter in model.named_parameters():
        tensors["stepped." + name] = parameter.detach().clone()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"config.json": config.to_json_string(use_diff=False)},
    )
    print(path, os.path.getsize(path), [round(x.item(), 4) for x in losses])


def causal_lm(path, config, kind):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, config.vocab_size, (STEPS, 3, 11), generator=generator)
    labels = ids.clone()
    labels[:, 0, 4:7] = -100  # positions that do not count
    record(path, kind(config).float(), config, ids, labels)


def ropes(path):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    tensors, configs = {}, {}
    for name, rope in ROPES.items():
        config = transformers.LlamaConfig(
            hidden_size=32,
            num_attention_heads=2,
            max_position_embeddings=96,
            rope_parameters={"rope_theta": 5000.0, **rope},
        )
        configs[name] = json.loads(config.to_json_string(use_diff=False))
        for length in (9, 150):
            rotary = LlamaRotaryEmbedding(config)
            cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
            keep = slice(None) if length == 9 else slice(length - 3, length)
            tensors[f"{name}.{length}.cos"] = cos[0, keep].contiguous()
            tensors[f"{name}.{length}.sin"] = sin[0, keep].contiguous()
    save_file(tensors, path, metadata={"configs": json.dumps(configs)})
    print(path, os.path.getsize(path))


def main():
    out = sys.argv[1]
    torch.set_num_threads(1)
    causal_lm(
        f"{out}/llama.safetensors",
        transformers.LlamaConfig(**LLAMA),
        transformers.LlamaForCausalLM,
    )
    causal_lm(
        f"{out}/mixtral.safetensors",
        transformers.MixtralConfig(**MIXTRAL),
        transformers.MixtralForCausalLM,
    )
    causal_lm(
        f"{out}/gpt2.safetensors", transformers.GPT2Config(**GPT2), transformers.GPT2LMHeadModel
    )
    generator = torch.Generator().manual_seed(5)
    vit = transformers.ViTConfig(**VIT)
    record(
        f"{out}/vit.safetensors",
        transformers.ViTForImageClassification(vit).float(),
        vit,
        torch.randn((STEPS, 3, 3, 7, 7), generator=generator),
        torch.randint(0, 5, (STEPS, 3), generator=generator),
    )
    ropes(f"{out}/ropes.safetensors")


main()
