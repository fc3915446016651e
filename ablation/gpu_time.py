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
from measure.tables import capital, label, markdown, number, wrapped
from training.precision import Precision

WAITING = 0.2  # of a step: if the GPU is idle for longer, the CPU is the bound
AT_LIMIT = 0.97  # of the power limit: of a GPU that is held there nvidia-smi tells a little more or less


def gpu_time(cells: Sequence[Cell]) -> str:
    """The section for cells that have an attribution. Empty without such cells."""
    note = (
        "From a profile of a few steps of each arm. kernels.jsonl has every kernel and the kind of work that it counts as. "
        "Compiled kernels that fuse a norm with other work count as norm. "
        "A timed step is longer than all its GPU time where the step is CPU-bound, or clocks drop under a longer load."
    )
    return "\n\n".join([*map(_attribution, cells), wrapped(note)]) if cells else ""


def _attribution(cell: Cell) -> str:
    found = cell.attribution
    assert found is not None
    shares = {name: of for name, of in found.shares.items() if name != AGAIN}
    totals = {name: sum(share.ms for share in of) for name, of in shares.items()}
    steps = {name: median(chain(*cell.arms[name].blocks_ms)) for name in shares}
    idle = {name: max(0.0, steps[name] - totals[name]) for name in shares}
    rows = []
    for group in dict.fromkeys(share.group for of in shares.values() for share in of):
        by_arm = [next((share for share in of if share.group == group), None) for of in shares.values()]
        rows.append([group, *chain(*([number(one.ms), f"{one.launches:,}"] if one else ["–"] * 2 for one in by_arm))])
    launches = [f"{sum(share.launches for share in of):,}" for of in shares.values()]
    rows.append(["all", *chain(*zip(map(number, totals.values()), launches, strict=True))])
    rows += [
        [title, *chain(*((number(ms), "") for ms in of.values()))] for title, of in (("idle", idle), ("a timed step", steps))
    ]
    header = ["GPU time", *chain(*([f"{name} ms", "launches"] for name in shares))]
    words = _limit(found, cell)
    for base, limit in found.limits.items():
        if cell.against(base).speedup.low > limit:
            words += (
                f" The step is {cell.against(base).speedup.median:.3f} × as fast as with {base}, which is more: part of what "
                "its norms take is not in their group above, or the step is CPU-bound."
            )
    parts = {name: idle[name] / steps[name] for name in shares}
    if max(parts.values()) > WAITING:
        told = " and ".join(f"{100 * share:.0f} % of a step under {name}" for name, share in parts.items())
        words += (
            f" The GPU is idle in {told}: this step is CPU-bound. CUDA graphs remove most of the idle time: "
            "ablate.compile=true train.compile_mode=reduce-overhead."
        )
    title = f"### {capital(label(cell.overrides, cell.mode))}"
    return f"{title}\n\n{markdown(header, rows)}\n\n{wrapped(words + _power(cell.gpu))}"


def _limit(found: Attribution, cell: Cell) -> str:
    """The Amdahl limit over each base, and the part of it that the subject reaches."""
    least = found.norm_bytes / found.copy_gb_per_s / 1e6  # bytes / (10⁹ bytes / s) in ms
    norms = {name: ms_of(found.group, shares) for name, shares in found.shares.items() if name != AGAIN}
    sites = "The norm sites of a step" if found.group == "norm" else "The loss of a step"
    taken = ", ".join(
        f"{number(ms)} ms under {name} ({100 * least / ms:.0f} % of copy bandwidth)" if ms else f"nothing under {name}"
        for name, ms in norms.items()
    )
    limits = " and ".join(
        f"{limit:.3f} × as fast as with {base} ({cell.subject} saves {100 * found.realised[base]:.0f} % of the time between)"
        for base, limit in found.limits.items()
    )
    return (
        f"{sites} must move {found.norm_bytes / 1e9:.2f} GB, which takes {number(least)} ms at the {found.copy_gb_per_s:,.0f} "
        f"GB/s that a copy reached here. In a profile: {taken}. Amdahl limit: no {found.group} kernel makes this step more "
        f"than {limits}, unless the step is CPU-bound, where fewer launches may save more."
    )


def _power(gpu: Mapping[str, Sequence[Mapping[str, str]]]) -> str:
    """Clocks and power under each arm, and what follows if the power limit sets the clocks."""
    told, limited = [], []
    for name, readings in gpu.items():
        try:
            fields = ("clocks.sm", "clocks.max.sm", "power.draw", "power.limit")
            values = [[float(state[field].split()[0]) for field in fields] for state in readings]
        except (KeyError, ValueError):  # nvidia-smi was not there, or does not know it of this GPU
            continue
        clocks, draws = (" and ".join(f"{value[at]:.0f}" for value in values) for at in (0, 2))
        told.append(f"{clocks} of {values[0][1]:.0f} MHz and {draws} of {values[0][3]:.0f} W under {name}")
        limited += [name] if all(draw > AT_LIMIT * limit for _, _, draw, limit in values) else []
    words = f" Read while it took steps, the GPU was at {', '.join(told)}." if told else ""
    if limited:
        words += (
            f" Under {' and '.join(limited)} that is its power limit: clocks follow what the kernels draw, and GPU time that "
            "is saved need not all be step time saved."
        )
    return words


# ---- the bound -------------------------------------------------------------------------------------------------------------


def norm_bytes(cfg: Config, precision: Precision) -> int:
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


def loss_bytes(cfg: Config, precision: Precision, vocabulary: int) -> int:
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
