"""A DiT with adaLN-zero blocks (arXiv:2212.09748), and the same with each site in one kernel.

    python examples/dit_block.py

    0   as it was: nn.LayerNorm without weights, scale and shift, gate and + in every block
    1   each gated sum goes into the norm behind it: `modulated_norm_fn`

In your own project `from ops import …` is `from prenorm import …`, or the name of the folder that you copied.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, for `python examples/dit_block.py`

from adoption.check import check_parity, measure
from ops import backend_for, modulated_norm_fn

# ---- 0: as it was ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def modulate(y: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return y * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6, elementwise_affine=False) for _ in range(2))
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))  # in training its weights start at zero

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        x = x + gate1[:, None] * self.attn(modulate(self.norm1(x), shift1, scale1))
        x = x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))
        return x


class DiT(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self, tokens: int, channels: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.patches, self.positions = nn.Linear(channels, width), nn.Parameter(0.02 * torch.randn(tokens, width))
        self.blocks = nn.ModuleList(self.block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, channels)

    def forward(self, latents: Tensor, condition: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """latents, noise [B, tokens, channels]; condition [B, width], of time and class. The predicted noise, and the loss."""
        x = self.patches(latents) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        prediction = self.head(modulate(self.norm(x), shift, scale))
        return prediction, F.mse_loss(prediction, noise)


# ---- 1: each site in one kernel ----------------------------------------------------------------------------------------------


class FusedBlock(Block):
    """hidden: the output of the last sublayer. residual, gate: the stream, and what hidden is multiplied by before it is added;
    None at the start."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, residual: Tensor | None, gate: Tensor | None, condition: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        y, residual = site(hidden, scale1, shift1, residual, gate)
        y, residual = site(self.attn(y), scale2, shift2, residual, gate1)
        return self.mlp(y), residual, gate2


class FusedDiT(DiT):
    block = FusedBlock

    def forward(self, latents: Tensor, condition: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        hidden, residual, gate = self.patches(latents) + self.positions, None, None
        for block in self.blocks:
            hidden, residual, gate = block(hidden, residual, gate, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        prediction = self.head(site(hidden, scale, shift, residual, gate)[0])
        return prediction, F.mse_loss(prediction, noise)


def site(hidden: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """y, and the new stream."""
    # y in the dtype of the next Linear. Autocast would need another kernel to convert y.
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return modulated_norm_fn(hidden, scale, shift, residual, gate, prenorm=True, out_dtype=dtype)  # type: ignore[return-value]


def main() -> None:
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)  # more threads make so small a model slower
    device, autocast = ("cuda", torch.bfloat16) if gpu else ("cpu", None)
    # tokens, channels, width, heads, layers; samples
    sizes, samples = (DIT_B2, 64) if gpu else (TINY, 2)
    tokens, channels, width, *_ = sizes
    latents, noise = (torch.randn(samples, tokens, channels, device=device) for _ in range(2))
    batch = (latents, torch.randn(samples, width, device=device), noise)

    model = DiT(*sizes).to(device)
    fused = FusedDiT(*sizes).to(device)
    fused.load_state_dict(model.state_dict())

    print(f"\nfused norms run as: {backend_for(device)}")
    print(check_parity(model, fused, batch, autocast=autocast))
    print(measure(model, fused, batch, autocast=autocast, cycles=6, block_steps=2 if gpu else 1))


DIT_B2 = (256, 16, 768, 12, 12)
TINY = (16, 8, 32, 4, 2)

if __name__ == "__main__":
    main()
