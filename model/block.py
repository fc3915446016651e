"""The reordered prenorm block.

A textbook prenorm block is Norm → sublayer → Dropout → Add. Cut between sublayers and norms instead, and Dropout → Add → Norm
stand together; they are all bound by memory traffic, and one kernel can do them:

                          ┌─ norm site ─────────┐                ┌─ norm site ─────────┐
    residual stream  ─────┼──────────── + ──┬───┼────────────────┼──────────── + ──┬───┼──────────────── … ──  residual stream
                          │             │   │   │                │             │   │   │
    sublayer output  ─────┼── Dropout ──┘  Norm ┼── Attention ───┼── Dropout ──┘  Norm ┼── MLP ────────── … ──  sublayer output
                          └─────────────────────┘                └─────────────────────┘

So a block does not take one tensor but two: the stream, and the last sublayer's output that has not been added to it yet. The
first site takes the embeddings as if they were a sublayer's output, with no stream; after the last block one more site, the
final norm, adds what is left. The numbers are those of the textbook order: only the brackets are drawn elsewhere.

A parallel block (GPT-J, PaLM) has one site. Attention and MLP read the same stream, each through its own weight, and the next
site adds both: x is attention's output and x1 the MLP's.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from configs.schema import ModelConfig, NormConfig, ResidualDtype
from model.attention import Attention
from model.mlp import MLP
from model.norm import PreNorm


class SequentialBlock(nn.Module):
    """Attention, then MLP: two norm sites."""

    sites = 2

    def __init__(self, cfg: ModelConfig, norm: NormConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = norm_site(cfg, norm, adds=(2 * layer - 1, None))
        self.attention = Attention(cfg, norm)
        self.mlp_norm = norm_site(cfg, norm, adds=(2 * layer, None))
        self.mlp = MLP(cfg)

    def forward(
        self, x: Tensor, x1: None, residual: Tensor | None, rotary: Tensor | None, seeds: Sequence[Tensor | None]
    ) -> tuple[Tensor, None, Tensor]:
        """The last sublayer's output x and the stream, both [B, T, width], one block on. `seeds` begins with this block's."""
        y, residual = self.attention_norm(x, residual, seed=seeds[0])
        x = self.attention(y, rotary)
        y, residual = self.mlp_norm(x, residual, seed=seeds[1])
        x = self.mlp(y)
        return x, None, residual


class ParallelBlock(nn.Module):
    """Attention and MLP side by side: one norm site with two weights."""

    sites = 1

    def __init__(self, cfg: ModelConfig, norm: NormConfig, layer: int) -> None:
        super().__init__()
        self.norm = norm_site(cfg, norm, adds=(2 * layer - 2, 2 * layer - 1), parallel=True)
        self.attention = Attention(cfg, norm)
        self.mlp = MLP(cfg)

    def forward(
        self, x: Tensor, x1: Tensor | None, residual: Tensor | None, rotary: Tensor | None, seeds: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention's output x, the MLP's x1 and the stream, all [B, T, width], one block on. `seeds` begins with its own."""
        y, y1, residual = self.norm(x, residual, x1=x1, seed=seeds[0])
        return self.attention(y, rotary), self.mlp(y1), residual


def norm_site(
    cfg: ModelConfig, norm: NormConfig, adds: tuple[int, int | None], parallel: bool = False, prenorm: bool = True
) -> PreNorm:
    """The norm site that adds the outputs of these sublayers (x, x1) to the stream; a negative one is the embeddings.

    Sublayers count attention and MLP, 0 … 2·layers-1. Drop path rises linearly along them, from 0 to model.drop_path, in both
    layouts (stochastic depth, arXiv:1603.09382); the embeddings are never dropped whole.
    """
    x, x1 = (0.0 if s is None or s < 0 else cfg.drop_path * s / (2 * cfg.layers - 1) for s in adds)
    return PreNorm(
        cfg.width,
        norm,
        bias=cfg.bias,
        dropout=cfg.dropout,
        drop_path=(x, x1),
        parallel=parallel,
        prenorm=prenorm,
        residual_in_fp32=cfg.residual_dtype == ResidualDtype.fp32,
    )
