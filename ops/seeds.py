"""Seeds of dropout masks that the caller does not give.

Each is a function of the state that torch's generator for the device is in, seed and offset, and moves the offset on: so
`torch.manual_seed` governs them, and what saves and restores the state, such as activation checkpointing, gets the same masks
again. Drawing each with torch.randint would do that too, and be a launch beside the norm's. Here many are computed at once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

AHEAD = 1024  # seeds computed at once
STEP = 4  # by which a draw moves the offset: CUDA's generators take no other than multiples of it


def draw_seed(device: torch.device, eager: bool) -> Tensor:
    """One int64 element on the device.

    Args:
        eager: whether nothing records the call. A graph, of torch.compile or of CUDA, has to draw anew when it is run again.
    """
    if eager and device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        return _next(torch.cuda.default_generators[device.index], device, torch.cuda.current_stream(device).cuda_stream)
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


class _Pool(NamedTuple):
    seed: int  # of the generator
    first: int  # offset
    seeds: Tensor  # [AHEAD]: of the offsets from `first` on


# By device and stream: work on another stream could come before the seeds are there, or after their memory is another's.
_pools: dict[tuple[torch.device, int], _Pool] = {}


def _next(generator: Any, device: torch.device, stream: int) -> Tensor:
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + STEP)
    pool = _pools.get((device, stream))
    if pool is None or pool.seed != seed or not 0 <= offset - pool.first < AHEAD * STEP:
        pool = _pools[device, stream] = _Pool(seed, offset, seeds_from(seed, offset, AHEAD, device))
    at = (offset - pool.first) // STEP
    return pool.seeds[at : at + 1]


# The finaliser of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def seeds_from(seed: int, offset: int, count: int, device: torch.device) -> Tensor:
    """int64 [count]: those of a generator with this seed at `offset` and at the following multiples of STEP."""
    start = seed & _LOW
    for shift, factor in _ROUNDS:  # neighbouring seeds would otherwise have the same sequence, some draws apart
        start = (start ^ start >> shift) * factor & _LOW
    start += offset // STEP * _GAMMA
    with torch.inference_mode(False):  # else backward could not save what was made there
        z = torch.arange(count, device=device) * as_int64(_GAMMA) + as_int64(start)
        for shift, factor in _ROUNDS:
            z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * as_int64(factor)
    return z


_LOW = 2**64 - 1


def as_int64(number: int) -> int:
    """The one with the same 64 low bits."""
    return (number + 2**63) % 2**64 - 2**63
