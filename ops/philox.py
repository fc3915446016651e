"""The dropout bits: one counter-based generator, here in plain PyTorch; `dropout_kernels.keep_block` gives the same in Triton.

Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with seven rounds, the fewest that pass
BigCrush in that paper.

    key      = (seed low word, seed high word)
    counter  = (⌊col / 8⌋, row low word, row high word, stream)

Each call yields four 32-bit words, which are eight 16-bit draws for eight neighbouring columns: draw j = col mod 8 is the
low half (j even) or the high half (j odd) of word ⌊j / 2⌋. An element is kept when its draw ≥ round(p · 65536).

The mask of an element depends on (seed, row, col, stream) alone: not on the tile, the device, the implementation or on what
was drawn before. So backward regenerates it, and an unfused model can drop the same elements.
"""

import torch
from torch import Tensor

ROUNDS = 7
COLS_PER_CALL = 8
DRAW_RANGE = 65536

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def drop_threshold(p: float) -> int:
    """Elements whose draw is below this are dropped. p so near 1 that all would go still leaves one draw in 65536."""
    return min(round(p * DRAW_RANGE), DRAW_RANGE - 1)


def keep_scale(p: float) -> float:
    """1 / (1 − p), what PyTorch's dropout scales by: the same mask gives the same numbers in fp32.

    The threshold rounds p, so the mean of an element is not its value to the last digit: off by at most 2⁻¹⁷ / (1 − p) of it,
    8.5e-6 at p = 0.1. Where p is so near 1 that one draw is all that is kept, it is that draw's share.
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
        key=(seed & _LOW, (seed >> 32) & _LOW),
        counter=(group, row & _LOW, row >> 32, zero + stream),
    )
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, dim=-1).flatten(-2)[:, :cols]


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, ...], rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Four 32-bit words, broadcast over the shapes given; every word is an int64 tensor with values in [0, 2³²)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # The 64-bit products may wrap into the sign; both halves are right all the same once masked.
        p0, p1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c2 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, ((p0 >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return torch.broadcast_tensors(c0, c1, c2, c3)
