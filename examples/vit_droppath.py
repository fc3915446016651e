"""A vision transformer's block with drop path, whose factors go into the norm's kernel as `rowscale`.

    python examples/vit_droppath.py

Drop path skips the branch of a sample with probability p, and scales the branches of other samples by 1 / (1 − p). As modules,
each branch needs a multiplication of [B, T, width] and an addition. The kernel takes one factor per row of x:
factor [B] → rowscale [B, T].
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, for `python examples/vit_droppath.py`

from ablation.adoption import check_parity, measure
from ops import backend_for, layer_norm_fn


def path_factors(x: Tensor, p: float, training: bool) -> Tensor | None:
    """One factor for each sample of x [B, T, width]: 0 or 1 / (1 − p); [B, 1]."""
    if not training or p == 0.0:
        return None
    return torch.bernoulli(torch.full((x.shape[0], 1), 1.0 - p, device=x.device)) / (1.0 - p)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.norm1, self.qkv, self.proj = nn.LayerNorm(width, 1e-6), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width, 1e-6), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Before(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attention(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def drop_path(self, x: Tensor) -> Tensor:
        factors = path_factors(x, self.p, self.training)
        return x if factors is None else (x * factors[..., None]).to(x.dtype)


class After(Block):
    def forward(self, pending: tuple[Tensor, Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor, Tensor | None]:
        """`pending`: the output of the last branch, the stream to which it will be added, and its factors."""
        y, stream = add_norm(self.norm1, *pending)
        branch = self.attention(y)
        y, stream = add_norm(self.norm2, branch, stream, path_factors(branch, self.p, self.training))
        branch = self.mlp(y)
        return branch, stream, path_factors(branch, self.p, self.training)


def add_norm(norm: nn.LayerNorm, x: Tensor, stream: Tensor | None, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    rowscale = None if factors is None else factors.expand(x.shape[:-1])
    return layer_norm_fn(  # type: ignore[return-value]
        x, norm.weight, norm.bias, residual=stream, eps=norm.eps, rowscale=rowscale, prenorm=True
    )


class ViT(nn.Module):
    """Patches [B, T, patch] → classes [B, 10]."""

    def __init__(self, block: type[Block], width: int, heads: int, layers: int, patch: int = 48, p: float = 0.2) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(patch, width), nn.LayerNorm(width, 1e-6), nn.Linear(width, 10)
        # Stochastic depth: rising linearly from 0.
        self.blocks = nn.ModuleList(block(width, heads, p * i / max(1, layers - 1)) for i in range(layers))

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches)
        if isinstance(self.blocks[0], Before):
            for block in self.blocks:
                x = block(x)
            y = self.norm(x)
        else:
            pending = (x, None, None)
            for block in self.blocks:
                pending = block(pending)
            y, _ = add_norm(self.norm, *pending)
        return self.head(y.mean(1))


def main() -> None:
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)  # more threads make so small a model slower
    device, autocast = ("cuda", torch.bfloat16) if gpu else ("cpu", None)
    sizes, effort = ((768, 12, 12), (9, 2)) if gpu else ((32, 4, 3), (6, 1))
    before, after = (ViT(block, *sizes).to(device) for block in (Before, After))
    after.load_state_dict(before.state_dict())
    patches = torch.randn(192 if gpu else 8, 196 if gpu else 32, 48, device=device)
    print(f"fused norms run as: {backend_for(device)}")
    # A seed means training mode. Both models draw the same factors in the same order.
    print(check_parity(before, after, patches, seed=1, autocast=autocast))
    print(measure(before, after, patches, autocast=autocast, cycles=effort[0], block_steps=effort[1]))


if __name__ == "__main__":
    main()
