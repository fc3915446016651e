"""The prenorm block, cut so that Dropout, Add and Norm stand together.

A textbook prenorm block is Norm → sublayer → Dropout → Add. This block is Dropout → Add → Norm → sublayer. The first three are
bound by memory traffic, and one kernel computes them:

                          ┌─ norm site ─────────┐                ┌─ norm site ─────────┐
    residual stream  ─────┼──────────── + ──┬───┼────────────────┼──────────── + ──┬───┼──────────────── … ──  residual stream
                          │             │   │   │                │             │   │   │
    sublayer output  ─────┼── Dropout ──┘  Norm ┼── Attention ───┼── Dropout ──┘  Norm ┼── MLP ────────── … ──  sublayer output
                          └─────────────────────┘                └─────────────────────┘

A block takes two tensors: the residual stream, and the output of the last sublayer. The next norm site adds that output to the
stream. The first site takes the embeddings as the output of a sublayer, and no stream. After the last block, the final norm
adds the last output. The results are those of the textbook order.

The norm of the picture is that of `norm.placement=pre`. The other placements of a sequential block are the same sites with
other norms in them (`norms_of_site`): inside and sandwich normalise a sublayer's output before it is added, and where norms
stand after the add (post) y is the stream.

A parallel block (GPT-J, PaLM) has one site. Attention and MLP read the same stream through two norm weights. The next site adds
both outputs: x of attention and x1 of the MLP.
"""

from collections.abc import Sequence
from typing import assert_never

from torch import Tensor, nn

from configs.schema import MlpConfig, ModelConfig, NormConfig, Placement, ResidualDtype, ResidualScale
from model.attention import Attention
from model.mlp import MLP
from model.norm import NormSite


class SequentialBlock(nn.Module):
    """Attention, then MLP: two norm sites."""

    sites = 2

    def __init__(self, cfg: ModelConfig, norm: NormConfig, layer: int, mlp: MlpConfig | None = None) -> None:
        super().__init__()
        self.attention_norm = norm_site(cfg, norm, adds=(2 * layer - 1, None))
        self.attention = Attention(cfg, norm)
        self.mlp_norm = norm_site(cfg, norm, adds=(2 * layer, None))
        self.mlp = MLP(cfg, mlp)

    def forward(
        self, x: Tensor, x1: None, residual: Tensor | None, rotary: Tensor | None, seeds: Sequence[Tensor | None]
    ) -> tuple[Tensor, None, Tensor]:
        """Returns the output x of the MLP and the stream, both [B, T, width]. `seeds` are those of the two sites."""
        y, residual = self.attention_norm(x, residual, seed=seeds[0])
        x = self.attention(y, rotary)
        y, residual = self.mlp_norm(x, residual, seed=seeds[1])
        x = self.mlp(y)
        return x, None, residual


class ParallelBlock(nn.Module):
    """Attention and MLP side by side: one norm site with two weights."""

    sites = 1

    def __init__(self, cfg: ModelConfig, norm: NormConfig, layer: int, mlp: MlpConfig | None = None) -> None:
        super().__init__()
        self.norm = norm_site(cfg, norm, adds=(2 * layer - 2, 2 * layer - 1), parallel=True)
        self.attention = Attention(cfg, norm)
        self.mlp = MLP(cfg, mlp)

    def forward(
        self, x: Tensor, x1: Tensor | None, residual: Tensor | None, rotary: Tensor | None, seeds: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns attention's output, the MLP's output and the stream, all [B, T, width]. `seeds` has the seed of its site."""
        y, y1, residual = self.norm(x, residual, x1=x1, seed=seeds[0])
        return self.attention(y, rotary), self.mlp(y1), residual


def norms_of_site(placement: Placement, first: bool, last: bool) -> tuple[bool, bool]:
    """Whether a site normalises the stream, and what it adds to it. The first site adds embeddings, the last feeds the head."""
    match placement:
        case Placement.pre:
            return True, False
        case Placement.post:
            return not first, False
        case Placement.inside:
            return last, not first
        case Placement.sandwich:
            return True, not first
        case _:
            assert_never(placement)


def norm_site(
    cfg: ModelConfig, norm: NormConfig, adds: tuple[int, int | None], parallel: bool = False, prenorm: bool = True
) -> NormSite:
    """The norm site that adds the outputs of the sublayers `adds` (x, x1) to the stream. A negative number is the embeddings.

    Sublayers are attention and MLP of each block, 0 … 2·layers-1. Drop path rises linearly along them from 0 to model.drop_path
    (stochastic depth, arXiv:1603.09382). It never drops the embeddings.
    """
    x, x1 = (0.0 if s is None or s < 0 else cfg.drop_path * s / (2 * cfg.layers - 1) for s in adds)
    return NormSite(
        cfg.width,
        norm,
        norms=norms_of_site(norm.placement, first=adds[0] is not None and adds[0] < 0, last=not prenorm),
        y_is_stream=prenorm and norm.placement == Placement.post,
        residual_scale=(2 * cfg.layers) ** 0.25 if cfg.residual_scale == ResidualScale.deepnorm else 1.0,
        bias=cfg.bias,
        dropout=cfg.dropout,
        drop_path=(x, x1),
        parallel=parallel,
        prenorm=prenorm,
        residual_in_fp32=cfg.residual_dtype == ResidualDtype.fp32,
    )
