"""Causal self-attention: multi-head or grouped-query, with optional norms and rotary positions on queries and keys."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import ModelConfig, NormConfig, NormImpl
from model.norm import PreNorm, activation_dtype
from ops import Norm, rotary_qkv_fn
from ops.reference import NORMS


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
            norm = replace(norm, kind=cfg.qk_norm_kind or norm.kind)
            self.query_norm = PreNorm(self.head_width, norm, bias=cfg.bias, prenorm=False)
            self.key_norm = PreNorm(self.head_width, norm, bias=cfg.bias, prenorm=False)
        self.query_key_site = QueryKeySite(norm, self.heads, self.kv_heads)

    def forward(self, x: Tensor, rotary: Tensor | None = None) -> Tensor:
        """
        Args:
            x: [B, T, width].
            rotary: [2, T, head_width / 2] fp32 from `rotary_table`, or None.
        """
        B, T, width = x.shape
        q, k, v = self.query_key_site(self.qkv(x), rotary, self.query_norm, self.key_norm)
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

    The second place where norm.impl chooses an operator. It has no parameters: those of the norms are attention's.
    """

    def __init__(self, norm: NormConfig, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.fused, self.heads, self.kv_heads = norm.impl == NormImpl.fused, heads, kv_heads
        self.kind, self.eps = Norm[norm.kind], norm.eps

    def forward(
        self, qkv: Tensor, rotary: Tensor | None, query_norm: PreNorm | None, key_norm: PreNorm | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, (heads + 2·kv_heads)·head_width] -> q [B, T, heads, head_width], k and v [B, T, kv_heads, head_width]."""
        kind, weights = None, (None, None, None, None)
        if query_norm is not None and key_norm is not None:
            kind, weights = self.kind, (query_norm.weight, query_norm.bias, key_norm.weight, key_norm.bias)
        site = fused_query_key_site if self.fused else torch_query_key_site
        return site(qkv, rotary, self.heads, self.kv_heads, kind, self.eps, *weights)


def fused_query_key_site(
    qkv: Tensor, rotary: Tensor | None, heads: int, kv_heads: int, kind: Norm | None, eps: float,
    q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One kernel. Without norm and rotary positions there is nothing to fuse."""
    if kind is None and rotary is None:
        return _split(qkv, heads, kv_heads)
    cos, sin = (None, None) if rotary is None else rotary
    return rotary_qkv_fn(
        qkv, cos, sin, heads, kv_heads, norm=kind, eps=eps,
        q_weight=q_weight, q_bias=q_bias, k_weight=k_weight, k_bias=k_bias,
    )  # fmt: skip


def torch_query_key_site(
    qkv: Tensor, rotary: Tensor | None, heads: int, kv_heads: int, kind: Norm | None, eps: float,
    q_weight: Tensor | None, q_bias: Tensor | None, k_weight: Tensor | None, k_bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """PyTorch's norm and the rotation as people write it. A function of tensors, so that torch.compile can take it whole."""
    q, k, v = _split(qkv, heads, kv_heads)
    if kind is not None and q_weight is not None and k_weight is not None:
        q, k = _normalise(q, kind, eps, q_weight, q_bias), _normalise(k, kind, eps, k_weight, k_bias)
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    return q, k, v


def _split(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=-2)
    return q, k, v


def _normalise(x: Tensor, kind: Norm, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(x.dtype, weight.dtype)  # see PreNorm: autocast does not convert all inputs of all norms
    y = NORMS[kind](x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), eps)
    return y.to(activation_dtype(x))


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
