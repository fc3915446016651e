"""Dropout by itself, with the masks of the norms: for models that are not fused and must drop the same elements."""

from collections import namedtuple
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks, kit, reference
from .kernels import runs_kernels
from .philox import drop_threshold, keep_scale, seed_tensor


def seeded_dropout(x: Tensor, p: float, seed: Tensor | int, stream: int = 0) -> Tensor:
    """Dropout of x (..., N) that drops what `layer_norm_fn` drops of x (stream 0) or of x1 (stream 1) with the same seed.

    No mask is stored: backward regenerates it from the seed.

    Args:
        p: in [0, 1).
        seed: an int or a one-element int64 tensor on x's device.
    """
    name = "seeded_dropout"
    kernels, _ = checks.check_input(name, x)
    p = checks.as_dropout_p(name, "p", p)
    checks.check_mask(name, seed, stream, x.device)
    if p == 0.0:
        return x
    rows = checks.as_rows(x)
    seed = seed_tensor(seed, x.device)
    if kernels:
        return dropout((rows, seed), Options(p, stream))[0].view(x.shape)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return reference.dropout(rows.to(compute), p, seed, stream)[0].to(x.dtype).view(x.shape)


def dropout_mask(
    seed: Tensor | int, rows: int, cols: int, p: float, stream: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """Bool [rows, cols], True where `layer_norm_fn` with this seed keeps an element of x (stream 0) or of x1 (stream 1).

    Args:
        p: in [0, 1).
        device: where the mask is made; by default the seed's, or the CPU for an int.
    """
    if device is None:
        device = seed.device if isinstance(seed, Tensor) else "cpu"
    device = torch.empty(0, device=device).device  # "cuda" has an index then
    p = checks.as_dropout_p("dropout_mask", "p", p)
    checks.check_mask("dropout_mask", seed, stream, device)
    seed = seed_tensor(seed, device)
    if runs_kernels(device):
        return dropout((seed.reshape(1, 1).expand(rows, cols), seed), Options(p, stream, mask=True))[0]
    return reference.keep_mask(seed, rows, cols, p, stream)


class Inputs(NamedTuple):
    x: Tensor  # [M, N]; for a mask, any of its shape
    seed: Tensor


class Options(NamedTuple):
    p: float
    stream: int
    mask: bool = False  # the mask is written, not what it leaves of x


class Dropout(kit.Op):
    """Its own backward, since dx = dropout(dy) with the same mask."""

    name, Inputs, Options = "dropout", Inputs, Options
    Backward = namedtuple("Backward", "dy seed")

    def function(self, given, o):
        return "seeded_dropout"

    def outputs(self, i, o):
        return kit.Output(i.x.new_empty(i.x.shape, dtype=torch.bool if o.mask else None))

    def start(self, i, o):
        kernels, N = kit.kernels("dropout"), i.x.shape[1]
        block_n = min(1024, max(16, 1 << (N - 1).bit_length()))
        rows, blocks = 2048 // block_n, -(-N // block_n)
        numbers = (drop_threshold(o.p), keep_scale(o.p), N, o.stream, rows, block_n)
        launch = kit.Launcher(kernels.dropout_kernel, kernels.Pointers, i.x.device, num_warps=4)

        def run(i):
            x, seed = i
            M, _ = x.shape
            y = x.new_empty((M, N), dtype=torch.bool if o.mask else None)
            launch(-(-M // rows) * blocks, (None if o.mask else x, y), seed, M, *numbers)
            return (y,)

        return run

    def start_backward(self, b, o, wanted):
        run = self.start(Inputs(*b), o)
        return lambda b: (*run(b), None)

    def again(self, b, o):
        return *self(b, o), None


dropout = Dropout()
