"""Causal self-attention: multi-head or grouped-query, with optional norms and rotary positions on queries and keys."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import ModelConfig, NormConfig, NormImpl
from model.norm import NormSite
from model.sites import Affine, How, compiled_alone, norm_rows
from ops import rotary_qkv_fn

Normed = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """[B, T, width] -> [B, T, width]; position t sees positions 0..t.

    `kv_heads` below `heads` is grouped-query attention (arXiv:2305.13245): query heads h·g … h·g+g-1, with
    g = heads / kv_heads, share key and value head h.
    """

    def __init__(self, cfg: ModelConfig, norm: NormConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = cfg.heads, cfg.kv_heads or cfg.heads, cfg.width // cfg.heads
        self.rows = [heads * self.head_width for heads in (self.heads, self.kv_heads, self.kv_heads)]  # of q, k and v in qkv
        self.dropout = cfg.dropout if cfg.attention_dropout is None else cfg.attention_dropout
        self.qkv = nn.Linear(cfg.width, sum(self.rows), bias=cfg.bias)
        self.out = nn.Linear(cfg.width, cfg.width, bias=cfg.bias)
        self.query_norm, self.key_norm = None, None
        if cfg.qk_norm:
            norm = replace(norm, kind=cfg.qk_norm_kind or norm.kind)
            self.query_norm = NormSite(self.head_width, norm, bias=cfg.bias, prenorm=False)
            self.key_norm = NormSite(self.head_width, norm, bias=cfg.bias, prenorm=False)
        self.query_key_norm = QueryKeySite(norm, self.heads, self.kv_heads)

    def forward(self, x: Tensor, rotary: Tensor | None = None) -> Tensor:
        """
        Args:
            x: [B, T, width].
            rotary: [2, T, head_width / 2] fp32 from `rotary_table`, or None.
        """
        B, T, width = x.shape
        q, k, v = self.query_key_norm(self.qkv(x), rotary, self.query_norm, self.key_norm)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, heads, T, head_width]

        grouped = self.kv_heads != self.heads
        if grouped and q.dtype not in (torch.bfloat16, torch.float16):
            # Only the 16-bit flash kernels take grouped heads; in fp32 PyTorch would materialise the [T, T] weights.
            k, v = (h.repeat_interleave(self.heads // self.kv_heads, dim=1) for h in (k, v))
            grouped = False
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).reshape(B, T, width))


class QueryKeySite(nn.Module):
    """Splits the projection into queries, keys and values, and normalises and turns queries and keys.

    It has no parameters: those of the norms are attention's.
    """

    def __init__(self, norm: NormConfig, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.impl, self.heads, self.kv_heads = norm.impl, heads, kv_heads

    def forward(
        self, qkv: Tensor, rotary: Tensor | None, query_norm: NormSite | None, key_norm: NormSite | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, (heads + 2·kv_heads)·head_width] -> q [B, T, heads, head_width], k and v [B, T, kv_heads, head_width]."""
        if self.impl == NormImpl.compiled and (rotary is not None or query_norm is not None):
            norms = () if query_norm is None or key_norm is None else (query_norm.as_function(qkv), key_norm.as_function(qkv))
            return compiled_alone(query_key_site)(qkv, rotary, self.heads, self.kv_heads, norms)
        if self.impl != NormImpl.fused or (rotary is None and query_norm is None):
            return unfused_query_key_site(qkv, rotary, self.heads, self.kv_heads, query_norm, key_norm)
        cos, sin = (None, None) if rotary is None else rotary
        if query_norm is None or key_norm is None:
            return rotary_qkv_fn(qkv, cos, sin, self.heads, self.kv_heads)
        return rotary_qkv_fn(
            qkv, cos, sin, self.heads, self.kv_heads, norm=query_norm.kind, eps=query_norm.eps,
            q_weight=query_norm.weight, q_bias=query_norm.bias, k_weight=key_norm.weight, k_bias=key_norm.bias,
            zero_centered_weight=query_norm.zero_centered,
        )  # fmt: skip


def query_key_site(
    qkv: Tensor, rotary: Tensor | None, heads: int, kv_heads: int, norms: tuple[tuple[Affine, How], ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """The site in PyTorch's operators, of tensors alone, so that torch.compile takes it once for all layers. norms: of queries
    and of keys, or none."""
    normed = [partial(norm_rows, affine=affine, how=how) for affine, how in norms]
    return unfused_query_key_site(qkv, rotary, heads, kv_heads, *(normed or (None, None)))


def unfused_query_key_site(
    qkv: Tensor, rotary: Tensor | None, heads: int, kv_heads: int, query_norm: Normed | None, key_norm: Normed | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The norms as they are given, and PyTorch's rotation as people write it."""
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=-2)
    if query_norm is not None and key_norm is not None:
        q, k = query_norm(q), key_norm(k)
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    return q, k, v


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
