"""Where the GPU time of a step goes, and what any norm kernel could save of it: the figures and a section of the report."""

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median

import torch

from ablation.records import Attribution, Cell
from configs import Config
from configs.schema import BlockLayout, Positions, ResidualDtype
from measure.attribution import Share
from measure.comparison import AGAIN
from measure.tables import NOTHING, capital, label, markdown, number, wrapped
from training.step import MixedPrecision

IDLE = "idle"  # the part of a timed step that is no GPU time of the profile
WAITING = 0.2  # of a step: if the GPU is idle for longer, the CPU is the bound
NOTE = (
    "From a profile of a few steps of each arm. kernels.jsonl has every kernel and the kind of work that it counts as. "
    "Compiled kernels that fuse a norm with other work count as norm. idle: the rest of a timed step, which is longer than "
    "all its GPU time where the step is CPU-bound, or clocks drop under a longer load. Where the power limit sets the clocks, "
    "GPU time that is saved need not all be step time saved."
)


def gpu_time(cells: Sequence[Cell]) -> str:
    """The section for the cells that have an attribution. Empty without such cells."""
    parts = [_section(cell, cell.attribution) for cell in cells if cell.attribution]
    return "\n\n".join([*parts, wrapped(NOTE)]) if parts else ""


def parts_ms(cell: Cell) -> dict[str, dict[str, float]]:
    """By arm: kind of work → milliseconds of a step, and IDLE."""
    assert cell.attribution is not None
    found = {}
    for name, shares in cell.attribution.shares.items():
        if name != AGAIN:
            parts = {share.group: share.ms for share in shares}
            found[name] = parts | {IDLE: max(0.0, median(chain(*cell.arms[name].blocks_ms)) - sum(parts.values()))}
    return found


def _section(cell: Cell, found: Attribution) -> str:
    parts = parts_ms(cell)
    launches = {name: {share.group: f"{share.launches:,}" for share in found.shares[name]} for name in parts}
    rows = []
    for group in dict.fromkeys(chain(*parts.values())):
        cells = ([number(of[group]) if group in of else NOTHING, launches[name].get(group, "")] for name, of in parts.items())
        rows.append([group, *chain(*cells)])
    rows.append(["all", *chain(*([number(sum(of.values())), ""] for of in parts.values()))])
    table = markdown(["ms of a step", *chain(*([name, "launches"] for name in parts))], rows)
    said = [_limit(found, cell, parts)]
    waits = {name: of[IDLE] / sum(of.values()) for name, of in parts.items()}
    if max(waits.values()) > WAITING:
        told = " and ".join(f"{100 * share:.0f} % of a step under {name}" for name, share in waits.items())
        said.append(
            f"The GPU is idle in {told}: this step is CPU-bound. CUDA graphs remove most of the idle time: "
            "ablate.compile=true train.compile_mode=reduce-overhead."
        )
    return f"### {capital(label(cell.overrides, cell.mode))}\n\n{table}\n\n{wrapped(' '.join(said))}"


def _limit(found: Attribution, cell: Cell, parts: Mapping[str, Mapping[str, float]]) -> str:
    """The Amdahl limit over each base, and the part of it that the subject reaches."""
    least = found.norm_bytes / found.copy_gb_per_s / 1e6  # bytes / (10⁹ bytes / s) in ms
    shares = ", ".join(f"{100 * least / ms:.0f} % under {name}" for name, of in parts.items() if (ms := of.get(found.group)))
    limits = " and ".join(
        f"{limit:.3f} × as fast as with {base} ({cell.subject} saves {100 * found.realised[base]:.0f} % of the time between)"
        for base, limit in found.limits.items()
    )
    return (
        f"{'The norm sites' if found.group == 'norm' else 'The loss'} of a step must move {found.norm_bytes / 1e9:.2f} GB, "
        f"which takes {number(least)} ms at the {found.copy_gb_per_s:,.0f} GB/s that a copy reached here; of this copy "
        f"bandwidth they reach {shares or 'nothing'}. Amdahl limit: no {found.group} kernel makes this step more than "
        f"{limits}, unless the step is CPU-bound, where fewer launches may save more, or part of what it takes is in another "
        "group above."
    )


# ---- the bound -------------------------------------------------------------------------------------------------------------


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
    if model.qk_norm or model.positions == Positions.rotary:
        kv_heads = model.kv_heads or model.heads
        heads = (model.heads + kv_heads) * (5 if model.qk_norm else 4) + kv_heads * 2
        per_token += model.layers * heads * (model.width // model.heads) * compute
    return cfg.train.batch_size * model.context * per_token


def loss_bytes(cfg: Config, precision: MixedPrecision, vocabulary: int) -> int:
    """The fewest bytes that the loss must move: each logit is read once, and its gradient is written once."""
    return cfg.train.batch_size * cfg.model.context * vocabulary * 2 * precision.dtype.itemsize


def ms_of(group: str, shares: Sequence[Share]) -> float:
    return next((share.ms for share in shares if share.group == group), 0.0)


def attribute(
    shares: dict[str, list[Share]],
    steps_ms: Mapping[str, float],
    subject: str,
    norm_bytes: int,
    copy_gb_per_s: float,
    group: str = "norm",
) -> Attribution:
    """What norm kernels can gain over each base by its profile, and how much of that the subject gains. So for another group.

    With t the step and n its norm sites, both of the base, and m the time in which the sites' bytes pass at copy bandwidth:

        limit    = t / (t − (n − m))         Amdahl (AFIPS 1967): 1 / ((1 − f) + f / k) with f = n/t and k = n/m
        realised = (n − n_subject) / (n − m)

    Where n ≤ m (sites that stay in cache) there is nothing to gain: limit 1, realised 0. The limit supposes that a step waits
    for the GPU. In a CPU-bound step it does not: GPU time saved is then not step time saved, and fewer launches may save
    more than the limit.

    Args:
        steps_ms: of each base, measured without a profiler.
        copy_gb_per_s: 10^9 bytes a second, read plus written.
    """
    least = norm_bytes / copy_gb_per_s / 1e6
    limits, realised = {}, {}
    for base, step_ms in steps_ms.items():
        norm = ms_of(group, shares[base])
        gain = max(0.0, norm - least)
        # A profiled step is slower than one that is not, and may spend more on norms than that takes; no step beats its sites.
        limits[base] = max(1.0, step_ms / max(step_ms - gain, least)) if gain else 1.0
        realised[base] = (norm - ms_of(group, shares[subject])) / gain if gain else 0.0
    return Attribution(shares, norm_bytes, copy_gb_per_s, limits, realised, group=group)
