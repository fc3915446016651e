"""A Triton kernel that the norms are held against: it only moves their tensors.

Copy bandwidth is that of one long copy between two tensors. A cell has two to five tensors, which compete in memory, and may
end after 25 microseconds, whose first and last move little. The traffic kernel reads and writes the tensors of a cell and
computes almost nothing: its time is what there is to reach.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from benchmarks.cases import DTYPES, Inputs, Shape, moved
from ops.launch import device_facts

BLOCK, WARPS = 1024, 4  # of five tried by hand on an H200 the fastest or next to it, whatever the cell


@triton.jit
def traffic_kernel(p_a, p_b, p_c, p_y, p_z, elements, BLOCK: tl.constexpr, EARLY_START: tl.constexpr):
    """y = z = a + b + c; missing tensors are left out. It is launched as the norms are."""
    if EARLY_START:
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.load(p_a + at, inside).to(tl.float32)
    if p_b is not None:
        total += tl.load(p_b + at, inside)
    if p_c is not None:
        total += tl.load(p_c + at, inside)
    tl.store(p_y + at, total, inside)
    if p_z is not None:
        tl.store(p_z + at, total, inside)


def move(shape: Shape, direction: str, inputs: Inputs) -> tuple[Tensor, ...]:
    """Moves the bytes of `cases.minimum_bytes` and no others. Returns what it wrote, for outputs to rotate."""
    there = [t.detach() for t in (*inputs.args[:2], *inputs.upstream) if t is not None]
    read, written = ([DTYPES[dtype] for dtype in dtypes] for dtypes in moved(shape, direction))
    # as many tensors of each dtype as are read; which of them does not matter
    sources = [there.pop([t.dtype for t in there].index(dtype)) for dtype in read]
    x = sources[0]
    outputs = tuple(torch.empty_like(x, dtype=dtype) for dtype in written)
    a, b, c = (*sources, None, None)[:3]
    y, z = (*outputs, None)[:2]
    early = device_facts(x.device).since_sm_90
    options = {"num_warps": WARPS} | ({"launch_pdl": True} if early else {})
    traffic_kernel[(triton.cdiv(x.numel(), BLOCK),)](a, b, c, y, z, x.numel(), BLOCK=BLOCK, EARLY_START=early, **options)
    return outputs
