"""What of a step's GPU time belongs to the norm sites, and what that leaves for any norm kernel to gain."""

import torch

from ablation.records import Attribution
from configs import Config
from configs.schema import BlockLayout, ResidualDtype
from training.attribution import Share
from training.precision import Precision


def norm_bytes(cfg: Config, precision: Precision) -> int:
    """The fewest bytes that all norm sites of one step move, forward and backward: each large tensor read or written once.

    With c bytes an element of the compute dtype, s of the residual stream, n branches that a site adds and feeds (2 in parallel
    blocks, else 1), and tokens · width elements:

                 forward                                         backward
        first    x: s, y: n·c, with dropout r: s                 dy: n·c, r: s, dr: s, dx: s
        others   x: n·c, residual: s, r: s, y: n·c               dy: n·c, r: s, dr: s, dresidual: s, dx: n·c or nothing
        final    x: n·c, residual: s, y: c                       dy: c, r, dresidual: s, dx: n·c or nothing

    The first site has no residual, and its x is the embeddings, which have the stream's dtype; without dropout they are the
    stream. dx is dresidual itself where nothing is dropped and the dtypes are equal. The final norm returns no stream: its
    backward gets no dr, and either reads an r that was kept for it (2·s in all) or x and residual again (n·c + s), whichever is
    less. Norms of queries and keys move 5·c an element: x, y, dy, x, dx.

    Weights, their gradients, statistics and dropout masks are not counted: a perfect kernel needs next to nothing for them.
    The accounting is that of benchmarks.cases.minimum_bytes, site by site.
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
    if model.qk_norm:
        heads = model.heads + (model.kv_heads or model.heads)
        per_token += model.layers * heads * (model.width // model.heads) * 5 * compute
    return cfg.train.batch_size * model.context * per_token


def attribute(
    torch_shares: list[Share], fused_shares: list[Share], step_ms_torch: float, norm_bytes: int, copy_gb_per_s: float
) -> Attribution:
    """What the profile says that norm kernels can gain, and how much of it the fused ones have gained.

    With t the step and n its norm sites, both with PyTorch's norms, and m the time in which the sites' bytes pass at copy
    bandwidth:

        bound    = t / (t − (n − m))         Amdahl (AFIPS 1967): 1 / ((1 − f) + f / k) with f = n/t and k = n/m
        realised = (n − n_fused) / (n − m)

    Where n ≤ m (sites that stay in cache) there is nothing to gain: bound 1, realised 0. The bound supposes that a step waits
    for the GPU. In a launch-bound step it does not: GPU time saved is then not step time saved, and fewer launches may save
    more than the bound.

    Args:
        step_ms_torch: ms, measured without a profiler.
        copy_gb_per_s: 10^9 bytes a second, read plus written.

    Raises:
        ValueError: a step time, byte count or bandwidth that is not positive.
    """
    for name, value in (("step_ms_torch", step_ms_torch), ("norm_bytes", norm_bytes), ("copy_gb_per_s", copy_gb_per_s)):
        if not value > 0:
            raise ValueError(f"attribute: {name} must be more than 0, got {value}")
    norm, fused = (next((s.ms for s in table if s.group == "norm"), 0.0) for table in (torch_shares, fused_shares))
    least = norm_bytes / copy_gb_per_s / 1e6
    gain = max(0.0, norm - least)
    # A profiled step is slower than one that is not, and may spend more on norms than that takes; no step beats its norm sites.
    bound = step_ms_torch / max(step_ms_torch - gain, least) if gain else 1.0
    realised = (norm - fused) / gain if gain else 0.0
    return Attribution(torch_shares, fused_shares, norm_bytes, copy_gb_per_s, max(1.0, bound), realised)
