"""Dropout's random bits: one counter-based generator, here in PyTorch; `kernels.dropout.keep_mask` gives the same in Triton.

Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with seven rounds, the fewest that pass
BigCrush in that paper.

    key      = (seed low word, seed high word)
    counter  = (⌊col / 8⌋, row low word, row high word, stream)

Each call yields four 32-bit words, which are eight 16-bit draws for eight neighbouring columns: draw j = col mod 8 is the
low half (j even) or the high half (j odd) of word ⌊j / 2⌋. An element is kept when its draw ≥ round(p · 65536).

The mask of an element depends on (seed, row, col, stream) alone: not on the tile, the device, the implementation or on what
was drawn before. So backward regenerates it, and an unfused model can drop the same elements.

A seed that the caller does not give is a function of the state (seed and offset) of torch's generator for the device, and moves
its offset on. So `torch.manual_seed` governs it, and what saves and restores the state, such as activation checkpointing, gets
the same masks again. torch.randint would do that too, and be a launch beside the norm's: here many seeds are made at once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

ROUNDS = 7
COLS_PER_CALL = 8
DRAW_RANGE = 65536

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW_32, _LOW_64 = 2**32 - 1, 2**64 - 1


def drop_threshold(p: float) -> int:
    """Elements whose draw is below this are dropped. p so near 1 that all would go still leaves one draw in 65536."""
    return min(round(p * DRAW_RANGE), DRAW_RANGE - 1)


def keep_scale(p: float) -> float:
    """1 / (1 − p), what PyTorch's dropout scales by: the same mask gives the same numbers in fp32.

    The threshold is p rounded to 1 / 65536, and the scale follows p itself. So the mean of a kept and scaled element differs
    from its value by up to 2⁻¹⁷ / (1 − p) of it: 8.5e-6 at p = 0.1. If p is so near 1 that a single draw in 65536 is kept, the
    scale is 65536.
    """
    return min(1 / (1 - p), float(DRAW_RANGE))


def keep_mask(seed: Tensor, rows: int, cols: int, p: float, stream: int) -> Tensor:
    """Bool [rows, cols], True where kept, on the seed's device. seed: one int64 element."""
    return draws(seed, rows, cols, stream) >= drop_threshold(p)


def draws(seed: Tensor, rows: int, cols: int, stream: int) -> Tensor:
    """int64 [rows, cols] of 16-bit draws on the seed's device. seed: one int64 element."""
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    group = torch.arange((cols + COLS_PER_CALL - 1) // COLS_PER_CALL, device=seed.device)[None, :]
    row = torch.arange(rows, device=seed.device)[:, None]
    seed = seed.reshape(1, 1)
    words = philox(
        key=(seed & _LOW_32, (seed >> 32) & _LOW_32),
        counter=(group, row & _LOW_32, row >> 32, zero + stream),
    )
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=-1).flatten(-2)[:, :cols]


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, ...], rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Four 32-bit words, broadcast over the shapes given; every word is an int64 tensor with values in [0, 2³²)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        (high0, low0), (high1, low1) = _product(c0, _MULTIPLIER_0), _product(c2, _MULTIPLIER_1)
        c0, c2 = high1 ^ c1 ^ k0, high0 ^ c3 ^ k1
        c1, c3 = low1, low0
        k0, k1 = (k0 + _WEYL_0) & _LOW_32, (k1 + _WEYL_1) & _LOW_32
    return torch.broadcast_tensors(c0, c1, c2, c3)


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product of two 32-bit numbers.

    No intermediate result leaves int64: its overflow is undefined in the C++ that torch.compile makes for the CPU.
    """
    lower = word * (multiplier & 0xFFFF)
    upper = word * (multiplier >> 16) + (lower >> 16)
    return upper >> 16, (upper & 0xFFFF) << 16 | lower & 0xFFFF


AHEAD = 1 << 18  # seeds computed at once: 2 MiB
NEAR = AHEAD // 4  # the most that others, such as attention with dropout, may move the offset between draws for which that pays
SINGLES = 4  # draws in a row that are computed one by one before that
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
    seeds: Tensor  # [AHEAD] or [1]: of the offsets from `first` on
    row: int  # how many pools follow each other, each near the end of the one before


# By device and stream: work on another stream could come before the seeds are there, or after their memory is another's.
_pools: dict[tuple[torch.device, int], _Pool] = {}


def _next(generator: Any, device: torch.device, stream: int) -> Tensor:
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + STEP)
    pool = _pools.get((device, stream))
    if pool is None or pool.seed != seed or not 0 <= offset - pool.first < len(pool.seeds) * STEP:
        near = pool is not None and pool.seed == seed and 0 <= offset - pool.first - len(pool.seeds) * STEP <= NEAR
        row = pool.row + 1 if pool is not None and near else 1
        count = AHEAD if row > SINGLES else 1
        pool = _pools[device, stream] = _Pool(seed, offset, seeds_from(seed, offset, count, device), row)
    at = (offset - pool.first) // STEP
    return pool.seeds[at : at + 1]


# The finaliser of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
_GAMMA = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def seeds_from(seed: int, offset: int, count: int, device: torch.device) -> Tensor:
    """int64 [count]: those of a generator with this seed at `offset` and at the following multiples of STEP."""
    start = seed & _LOW_64
    for shift, factor in _ROUNDS:  # neighbouring seeds would otherwise have the same sequence, some draws apart
        start = (start ^ start >> shift) * factor & _LOW_64
    start += offset // STEP * _GAMMA
    with torch.inference_mode(False):  # else backward could not save what was made there
        if count == 1:  # one launch
            one = start & _LOW_64
            for shift, factor in _ROUNDS:
                one = (one ^ one >> shift) * factor & _LOW_64
            return torch.full((1,), as_int64(one), dtype=torch.int64, device=device)
        z = torch.arange(count, device=device) * as_int64(_GAMMA) + as_int64(start)
        for shift, factor in _ROUNDS:
            z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * as_int64(factor)
    return z


def as_int64(number: int) -> int:
    """The one with the same 64 low bits."""
    return (number + 2**63) % 2**64 - 2**63


def seed_tensor(seed: Tensor | int, device: torch.device) -> Tensor:
    if isinstance(seed, int):
        if not -(2**63) <= seed < 2**63:
            seed = as_int64(seed)  # any 64-bit number is a seed
        return torch.full((1,), seed, dtype=torch.int64, device=device)
    return seed
