"""A GPT written the usual way, adopted step by step.

    python examples/nanogpt_block.py

    0   the model as it was: nn.LayerNorm, dropout and + in every block
    1   adopt: norms, dropout and + are one kernel each; nothing else in the code changes
    2   the same written by hand, for blocks that no tool knows

In your own project `from ops import …` is `from prenorm import …`, or the name of the folder that you copied.
"""

import copy
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, for `python examples/nanogpt_block.py`

from adoption.check import check_parity, measure
from ops import adopt, backend_for, layer_norm_fn

# ---- 0: as it was ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.resid_dropout(self.proj(y.transpose(1, 2).flatten(-2)))


class MLP(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        heads: int,
        layers: int,
        dropout: float = 0.1,
        block: type[Block] = Block,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.drop, self.dropout_p = nn.Dropout(dropout), dropout
        self.blocks = nn.ModuleList(block(width, heads, dropout) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and loss."""
        x = self.drop(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- 2: by hand --------------------------------------------------------------------------------------------------------------


class BlockByHand(Block):
    """hidden: the output of the last sublayer, before dropout and add. residual: the stream to which it will be added."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(width, heads, dropout=0.0)  # the next norm has the dropout
        self.dropout_p = dropout

    def forward(self, hidden: Tensor, residual: Tensor | None, seeds: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        p = self.dropout_p if self.training else 0.0
        # The embeddings start the stream and have had their dropout.
        y, residual = norm(self.ln_1, hidden, residual, 0.0 if residual is None else p, seeds[0])
        y, residual = norm(self.ln_2, self.attn(y), residual, p, seeds[1])
        return self.mlp(y), residual


class GPTByHand(GPT):
    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        hidden, residual = self.drop(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]), None
        # One draw for all norms. In a compiled graph each seed that is not given costs a launch.
        seeds = torch.randint(2**63 - 1, (2 * len(self.blocks) + 1, 1), device=tokens.device)
        for i, block in enumerate(self.blocks):
            hidden, residual = block(hidden, residual, seeds[2 * i : 2 * i + 2])
        y, _ = norm(self.ln_f, hidden, residual, self.dropout_p if self.training else 0.0, seeds[-1])
        logits = self.head(y)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def norm(ln: nn.LayerNorm, hidden: Tensor, residual: Tensor | None, p: float, seed: Tensor) -> tuple[Tensor, Tensor]:
    """Dropout, add and norm in one kernel: y, and the new stream."""
    # y in the dtype of the next Linear. Autocast would need another kernel to convert y.
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    return layer_norm_fn(  # type: ignore[return-value]
        hidden, ln.weight, ln.bias, residual=residual, eps=ln.eps, dropout_p=p, prenorm=True, seed=seed, out_dtype=dtype
    )


def main() -> None:
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    if not gpu:
        torch.set_num_threads(1)  # more threads make so small a model slower
    device, autocast = ("cuda", torch.bfloat16) if gpu else ("cpu", None)
    # vocabulary, context, width, heads, layers, dropout; cycles of the measurement, and steps in their blocks
    sizes, effort = (GPT2_SMALL, (6, 2)) if gpu else (TINY, (6, 1))
    tokens = torch.randint(sizes[0], (16 if gpu else 2, sizes[1] + 1), device=device)
    batch = (tokens[:, :-1], tokens[:, 1:])

    model = GPT(*sizes).to(device)

    fused = copy.deepcopy(model)
    adopt(fused)

    by_hand = GPTByHand(*sizes, block=BlockByHand).to(device)
    by_hand.load_state_dict(model.state_dict())

    print(f"\nfused norms run as: {backend_for(device)}")
    for name, other in (("1: adopted", fused), ("2: by hand", by_hand)):
        print(f"\n{name}")
        print(check_parity(model, other, batch, autocast=autocast))
        print(measure(model, other, batch, autocast=autocast, cycles=effort[0], block_steps=effort[1]))


GPT2_SMALL = (50304, 1024, 768, 12, 12, 0.1)
TINY = (256, 32, 32, 4, 2, 0.1)

if __name__ == "__main__":
    main()
