"""transformers' GPT-2, adopted in one call. Random weights: nothing is downloaded.

pip install 'transformers>=5.20'
python examples/hf_gpt2.py
"""

import copy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, for `python examples/hf_gpt2.py`

from ablation.adoption import check_parity, measure
from ops import adopt, backend_for

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError:
    raise SystemExit("examples.hf_gpt2: transformers is missing. pip install 'transformers>=5.20'") from None


def main() -> None:
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)  # more threads make so small a model slower
    device, autocast = ("cuda", torch.bfloat16) if gpu else ("cpu", None)
    config = GPT2Config() if gpu else GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    effort = (6, 2) if gpu else (6, 1)
    tokens = torch.randint(config.vocab_size, (16 if gpu else 2, config.n_positions), device=device)
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}

    model = GPT2LMHeadModel(config).to(device)

    fused = copy.deepcopy(model)
    adopt(fused)

    print(f"\nfused norms run as: {backend_for(device)}")
    print(check_parity(model, fused, batch, autocast=autocast))
    print(measure(model, fused, batch, autocast=autocast, cycles=effort[0], block_steps=effort[1]))


if __name__ == "__main__":
    main()
