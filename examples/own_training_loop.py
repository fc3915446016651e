"""The fused op in a training loop of one's own: torch.compile, AdamW, decay groups done right.

python examples/own_training_loop.py
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, for `python examples/own_training_loop.py`

from ablation.adoption import check_parity, measure
from ops import RMSNorm


class Textbook(nn.Module):
    norm: type[nn.RMSNorm] = nn.RMSNorm

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norms = nn.ModuleList(self.norm(width, eps=1e-5) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + F.gelu(layer(norm(x)))
        return self.norms[-1](x)


class Fused(Textbook):
    norm = RMSNorm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, stream = self.norms[0](x, prenorm=True)
        for layer, norm in zip(self.layers, self.norms[1:], strict=True):
            y, stream = norm(F.gelu(layer(y)), stream, prenorm=True)  # one kernel adds the layer's output and normalises
        return y


def train(model: nn.Module, x: torch.Tensor, steps: int) -> Iterator[float]:
    # Groups by shape: isinstance(m, nn.LayerNorm) would miss norms of other classes.
    decay, rest = ([p for p in model.parameters() if (p.dim() >= 2) == matrices] for matrices in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    # Inductor may find no compiler without a GPU. aot_eager captures the same graph and needs none.
    step = torch.compile(model, fullgraph=True, backend="inductor" if x.is_cuda else "aot_eager")
    for _ in range(steps):
        loss = F.mse_loss(step(x), x.flip(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def main() -> None:
    torch.manual_seed(0)
    rows, width, device = (16384, 1024, "cuda") if torch.cuda.is_available() else (256, 64, "cpu")
    torch.set_num_threads(1)  # more threads make so small a model slower on a CPU
    x = torch.randn(rows, width, device=device)
    textbook, fused = Textbook(width).to(device), Fused(width).to(device)
    fused.load_state_dict(textbook.state_dict())
    print(check_parity(textbook, fused, x))
    print(measure(textbook, fused, x, cycles=9, block_steps=4))
    ours, theirs = (list(train(model, x, steps=20)) for model in (fused, textbook))
    print(f"20 compiled steps: loss {ours[0]:.4f} → {ours[-1]:.4f}; with PyTorch's norms {theirs[0]:.4f} → {theirs[-1]:.4f}")


if __name__ == "__main__":
    main()
