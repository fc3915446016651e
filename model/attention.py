"""Causal self-attention: multi-head or grouped-query, with optional norms and rotary positions on queries and keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import ModelConfig, NormConfig
from model.norm import PreNorm


class Attention(nn.Module):
    """[B, T, width] -> [B, T, width]; position t sees positions 0..t.

    `kv_heads` below `heads` is grouped-query attention (arXiv:2305.13245): query heads h·g … h·g+g-1, with
    g = heads / kv_heads, share key and value head h.
    """

    def __init__(self, cfg: ModelConfig, norm: NormConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = cfg.heads, cfg.kv_heads or cfg.heads, cfg.width // cfg.heads
        self.dropout = cfg.dropout if cfg.attention_dropout is None else cfg.attention_dropout
        self.qkv = nn.Linear(cfg.width, (self.heads + 2 * self.kv_heads) * self.head_width, bias=cfg.bias)
        self.out = nn.Linear(cfg.width, cfg.width, bias=cfg.bias)
        self.query_norm, self.key_norm = None, None
        if cfg.qk_norm:
            self.query_norm = PreNorm(self.head_width, norm, bias=cfg.bias, prenorm=False)
            self.key_norm = PreNorm(self.head_width, norm, bias=cfg.bias, prenorm=False)

    def forward(self, x: Tensor, rotary: Tensor | None = None) -> Tensor:
        """
        Args:
            x: [B, T, width].
            rotary: [2, T, head_width / 2] fp32 from `rotary_table`, or None.
        """
        B, T, width = x.shape
        q, k, v = (
            self.qkv(x)
            .view(B, T, self.heads + 2 * self.kv_heads, self.head_width)
            .split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, T, head_width]

        grouped = self.kv_heads != self.heads
        if grouped and q.dtype not in (torch.bfloat16, torch.float16):
            # Only the 16-bit flash kernels take grouped heads; in fp32 PyTorch would materialise the [T, T] weights.
            k, v = (h.repeat_interleave(self.heads // self.kv_heads, dim=1) for h in (k, v))
            grouped = False
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).reshape(B, T, width))


def rotary_table(context: int, head_width: int, base: float) -> Tensor:
    """Cosines and sines of rotary positions (Su et al., arXiv:2104.09864): [2, context, head_width / 2] fp32.

    Position t turns pair i by the angle t · base^(-2i / head_width).
    """
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32) / head_width
    angles = torch.outer(torch.arange(context, dtype=torch.float32), base**-pairs)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """x [B, T, heads, head_width] turned by its position, in x's dtype; rotary [2, T, head_width / 2].

    Feature i is paired with feature i + head_width / 2 (the split that Llama checkpoints on the Hub use), not with i + 1.
    Computed in fp32 (fp64 for fp64): bf16 has too few bits for an angle of a thousand turns.
    """
    cos, sin = rotary[:, :, None]  # [T, 1, head_width / 2]
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
