"""transformers' Qwen3 with norms and rotary positions of queries and keys in one kernel. Random weights, nothing is downloaded.

pip install 'transformers>=5.20'
python examples/hf_qwen3.py
"""

import copy
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, for `python examples/hf_qwen3.py`

from ablation.adoption import check_parity, measure
from ops import backend_for, rotary_qk_fn


class RotaryTables(nn.Module):
    """In place of Qwen3's rotary embedding: tables of all positions in fp32, and the row of each token, for every layer."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rotary: Any, positions: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(positions, device=rotary.inv_freq.device), rotary.inv_freq.float())
        self.register_buffer("cos", angles.cos() * rotary.attention_scaling, persistent=False)
        self.register_buffer("sin", angles.sin() * rotary.attention_scaling, persistent=False)

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.cos, self.sin, position_ids


def fused_attention(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
    """Qwen3Attention.forward, in which one call stands for q_norm, k_norm and apply_rotary_pos_emb."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (projection(hidden_states).view(shape) for projection in (self.q_proj, self.k_proj, self.v_proj))
    cos, sin, positions = position_embeddings
    q, k = rotary_qk_fn(
        q, k, cos, sin, positions=positions, norm="rmsnorm", eps=self.q_norm.variance_epsilon,
        q_weight=self.q_norm.weight, k_weight=self.k_norm.weight,
    )  # fmt: skip
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, self.layer_idx)
    attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    y, weights = attention(self, q, k, v, attention_mask, scaling=self.scaling, sliding_window=self.sliding_window, **kwargs)
    return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), weights


def fuse_rotary(model: Qwen3ForCausalLM) -> None:
    model.model.rotary_emb = RotaryTables(model.model.rotary_emb, model.config.max_position_embeddings)
    for layer in model.model.layers:
        layer.self_attn.forward = MethodType(fused_attention, layer.self_attn)


def main() -> None:
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)  # more threads make so small a model slower
    device = "cuda" if gpu else "cpu"
    large = Qwen3Config(
        vocab_size=32768, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=2048,
    )  # fmt: skip
    tiny = Qwen3Config(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    config, effort = (large, (6, 2)) if gpu else (tiny, (6, 1))
    tokens = torch.randint(config.vocab_size, (8, 1024) if gpu else (2, 32), device=device)
    batch = {"input_ids": tokens, "labels": tokens, "use_cache": False}

    # Weights and stream in bf16. transformers rounds x̂ before the weight, the norm before the turn, and its tables.
    model = Qwen3ForCausalLM(config).to(device, torch.bfloat16)
    fused = copy.deepcopy(model)
    fuse_rotary(fused)

    print(f"\nfused rotary positions run as: {backend_for(device)}")
    print(check_parity(model, fused, batch))
    print(check_parity(copy.deepcopy(model).float(), copy.deepcopy(fused).float(), batch))  # fp32 shows errors that bf16 hides
    print(measure(model, fused, batch, cycles=effort[0], block_steps=effort[1]))


if __name__ == "__main__":
    main()
