"""Whether transformers computes of an exported model what finetune_llama did. By hand: it wants torch and transformers.

    ./bazelw run //examples:finetune_llama -- ... --export=tuned --logits=logits.safetensors
    python3 examples/finetune_llama/compare_logits.py tuned logits.safetensors
"""

import sys

import torch
import transformers
from safetensors.torch import load_file


def main():
    exported, file = sys.argv[1:]
    ours = load_file(file)
    model, said = transformers.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not said[what], (what, said[what])
    with torch.no_grad():
        logits = model.eval()(ours["tokens"]).logits.float()
    largest = logits.abs().max().item()
    off = (logits - ours["logits"].float()).abs().max().item()
    print(f"{type(model).__name__}, {model.dtype}: logits up to {largest:.4g}, off by {off:.3g}")
    sys.exit(off > 1e-4 * max(largest, 1) and model.dtype == torch.float32)


main()
