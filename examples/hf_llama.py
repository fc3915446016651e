"""transformers' Llama, adopted in one call. Random weights: nothing is downloaded.

pip install 'transformers>=5.20'
python examples/hf_llama.py        # docs/adopted_models.md lists the models that it works with
"""

import copy
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, for `python examples/hf_llama.py`

from adoption.check import check_parity, measure
from ops import adopt, backend_for


def main() -> None:
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)  # more threads make so small a model slower
    device = "cuda" if gpu else "cpu"
    large = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, num_attention_heads=16)
    tiny = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config, effort = (large, (6, 2)) if gpu else (tiny, (6, 1))
    tokens = torch.randint(config.vocab_size, (8, 1024) if gpu else (2, 32), device=device)
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}

    # Weights and stream in bf16, as Llamas are fine-tuned. transformers also rounds x̂ before the weight.
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)

    fused = copy.deepcopy(model)
    adopt(fused)

    print(f"\nfused norms run as: {backend_for(device)}")
    print(check_parity(model, fused, batch))
    print(check_parity(copy.deepcopy(model).float(), copy.deepcopy(fused).float(), batch))  # fp32 shows errors that bf16 hides
    print(measure(model, fused, batch, cycles=effort[0], block_steps=effort[1]))


if __name__ == "__main__":
    main()
