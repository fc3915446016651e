"""Where the GPU time of a step goes, and what any kernel of a norm, or of the loss, could save of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from ablation.records import Attribution, Cell
from configs import Config
from configs.schema import BlockLayout, Positions, ResidualDtype
from measure.attribution import LOSS_SITE, NORM_SITE, Share
from measure.comparison import is_twin
from model import loss as losses
from model.attention import QueryKeySite
from model.norm import NormSite
from training.precision import MixedPrecision

IDLE = "idle"  # the part of a timed step that is no GPU time of the profile
WAITING = 0.2  # of a step: if the GPU is idle for longer, the CPU is the bound


@contextmanager
def marked_sites(model: nn.Module) -> Iterator[None]:
    """A range named NORM_SITE around each forward of the model's norm sites, and LOSS_SITE around its loss."""
    sites = [module for module in model.modules() if isinstance(module, NormSite | QueryKeySite)]
    own = losses.cross_entropy
    losses.cross_entropy = record_function(LOSS_SITE)(own)
    for site in sites:
        site.forward = _marked(site)  # type: ignore[method-assign]
    try:
        yield
    finally:
        losses.cross_entropy = own
        for site in sites:
            del site.forward  # that of its class is left


def _marked(site: nn.Module) -> Callable[..., Any]:
    own, marked = site.forward, record_function(NORM_SITE)(site.forward)

    def query_key_forward(qkv: Tensor, rotary: Tensor | None, query_norm: nn.Module | None, key_norm: nn.Module | None) -> Any:
        split_alone = rotary is None and query_norm is None
        return (own if split_alone else marked)(qkv, rotary, query_norm, key_norm)

    return query_key_forward if isinstance(site, QueryKeySite) else marked


def turns(cfg: Config) -> bool:
    """Whether queries and keys are normed or turned."""
    return cfg.model.qk_norm or cfg.model.positions == Positions.rotary


def parts_ms(cell: Cell) -> dict[str, dict[str, float]]:
    """By arm: kind of work → milliseconds of a step, and IDLE."""
    assert cell.attribution is not None
    found = {}
    for name, shares in cell.attribution.shares.items():
        if not is_twin(name):
            parts = {share.group: share.ms for share in shares}
            found[name] = parts | {IDLE: max(0.0, median(chain(*cell.arms[name].blocks_ms)) - sum(parts.values()))}
    return found


def norm_bytes(cfg: Config, precision: MixedPrecision) -> int:
    """The fewest bytes that all norm sites of a step must move, forward and backward: each large tensor once.

    With c bytes an element of the compute dtype, s of the residual stream, n branches that a site adds and feeds (2 in parallel
    blocks, else 1), and tokens · width elements:

                 forward                                         backward
        first    x: s, y: n·c, with dropout r: s                 dy: n·c, r: s, dr: s, dx: s
        others   x: n·c, residual: s, r: s, y: n·c               dy: n·c, r: s, dr: s, dresidual: s, dx: n·c or nothing
        final    x: n·c, residual: s, y: c                       dy: c, r, dresidual: s, dx: n·c or nothing

    The first site has no residual, and its x is the embeddings, which have the stream's dtype; without dropout they are the
    stream. dx is dresidual itself where nothing is dropped and the dtypes are equal. The final norm returns no stream: its
    backward gets no dr, and either reads an r that was kept for it (2·s in all) or x and residual again (n·c + s), whichever is
    less. Queries and keys that are normalised move 5·c an element, turned or not: x, y, dy, x, dx. Those that are only turned
    move 4·c, since their backward needs no x. Values move 2·c in backward, where their gradient joins that of queries and keys.

    Weights, their gradients, statistics and dropout masks are not counted: a perfect kernel needs next to nothing for them.
    benchmarks.cases.minimum_bytes counts one site in the same way.
    """
    model = cfg.model
    compute = precision.dtype.itemsize
    stream = torch.float32.itemsize if model.residual_dtype == ResidualDtype.fp32 else compute
    parallel = model.block == BlockLayout.parallel
    branches = (2 if parallel else 1) * compute
    dx = branches if model.dropout or model.drop_path or compute != stream else 0

    first = (stream + branches + (stream if model.dropout else 0)) + (branches + 3 * stream)
    other = (2 * branches + 2 * stream) + (branches + 3 * stream + dx)
    final = (branches + stream + compute) + (compute + min(2 * stream, branches + stream) + stream + dx)
    sites = model.layers * (1 if parallel else 2)  # and the final norm
    per_token = model.width * (first + (sites - 1) * other + final)
    if turns(cfg):
        kv_heads = model.kv_heads or model.heads
        heads = (model.heads + kv_heads) * (5 if model.qk_norm else 4) + kv_heads * 2
        per_token += model.layers * heads * (model.width // model.heads) * compute
    return cfg.train.batch_size * model.context * per_token


def loss_bytes(cfg: Config, precision: MixedPrecision, vocabulary: int) -> int:
    """The fewest bytes that the loss must move: each logit is read once, and its gradient is written once."""
    return cfg.train.batch_size * cfg.model.context * vocabulary * 2 * precision.dtype.itemsize


def attribute(
    shares: dict[str, list[Share]],
    steps_ms: Mapping[str, float],
    subject: str,
    fewest_bytes: int,
    copy_gb_per_s: float,
    group: str = "norm",
) -> Attribution:
    """What kernels of the group can gain over each base by its profile, and how much of that the subject gains.

    With t the step and n its norm sites, both of the base, and m the time in which the sites' bytes pass at copy bandwidth:

        limit    = t / (t − (n − m))         Amdahl (AFIPS 1967): 1 / ((1 − f) + f / k) with f = n/t and k = n/m
        realised = (n − n_subject) / (n − m)

    Where n ≤ m (sites that stay in cache) there is nothing to gain: limit 1, realised 0. A base whose step is CPU-bound has
    neither: GPU time saved is not step time saved, and fewer launches save more.

    Args:
        steps_ms: of each base, measured without a profiler.
        copy_gb_per_s: 10^9 bytes a second, read plus written.
    """
    spent = {name: sum(share.ms for share in of if share.group == group) for name, of in shares.items()}
    least = fewest_bytes / copy_gb_per_s / 1e6
    bound = {base: ms for base, ms in steps_ms.items() if sum(share.ms for share in shares[base]) >= (1 - WAITING) * ms}
    gains = {base: max(0.0, spent[base] - least) for base in bound}
    # A profiled step is slower than one that is not, and may spend more on norms than that takes; no step beats its sites.
    limits = {base: max(1.0, ms / max(ms - gains[base], least)) if gains[base] else 1.0 for base, ms in bound.items()}
    realised = {base: (spent[base] - spent[subject]) / gain if gain else 0.0 for base, gain in gains.items()}
    return Attribution(shares, fewest_bytes, copy_gb_per_s, limits, realised, group=group)
