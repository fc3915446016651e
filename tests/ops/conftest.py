from dataclasses import replace

import numpy as np
import pytest
import torch

from ops import backend, tiling

from .tiles import TwiceIfSplit, fitted, interpreted_device, read_at_once


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fresh_launches():
    """Launches are remembered with their tiles and kernels, which tests replace."""
    from ops import launch

    launch.forget()
    yield
    launch.forget()


@pytest.fixture
def narrow_tiles(monkeypatch):
    """Every row is looped over, four at a time, 16 columns at a time: the wide-row path at a size for the interpreter."""
    from ops import launch

    for name in ("forward_tile", "backward_tile"):
        monkeypatch.setattr(launch, name, lambda n, work, device: replace(tiling.LOOPED, rows=4, block_n=16))


@pytest.fixture
def use_tile(monkeypatch):
    """A function: from now on, launches in both directions get this tile."""
    from ops import board_kernels, launch

    if backend.INTERPRET:
        monkeypatch.setattr(launch, "device_facts", interpreted_device)
        monkeypatch.setattr(launch, "ring", lambda tile: 64)
        monkeypatch.setattr(board_kernels, "read_words", read_at_once)
        for kernel in ("norm_forward_kernel", "norm_backward_kernel"):
            monkeypatch.setattr(launch, kernel, TwiceIfSplit(getattr(launch, kernel)))

    def use(tile):
        persistent = replace(tile, programs_per_sm=max(1, tile.programs_per_sm))  # as every backward is
        monkeypatch.setattr(launch, "forward_tile", lambda n, work, device: fitted(tile, n, work, device))
        monkeypatch.setattr(launch, "backward_tile", lambda n, work, device: fitted(persistent, n, work, device))
        launch.forget()

    return use


@pytest.fixture
def tiles_used(monkeypatch):
    """The tiles of launches made for the first time, by direction."""
    from ops import launch

    used = {}
    for direction in ("forward", "backward"):
        choose = getattr(launch, f"{direction}_tile")

        def spy(n, work, device, direction=direction, choose=choose):
            used[direction] = choose(n, work, device)
            return used[direction]

        monkeypatch.setattr(launch, f"{direction}_tile", spy)
    return used


class Recorder:
    """A kernel that notes its launches, but for those that the launcher makes without Triton."""

    def __init__(self, kernel, name, launches) -> None:
        self.kernel, self.name, self.launches = kernel, name, launches

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def __getitem__(self, grid):
        def start(*arguments, **constants):
            compiled = self.kernel[grid](*arguments, **constants)
            self.launches.append((self.name, compiled))
            return compiled

        return start


@pytest.fixture
def first_launches(monkeypatch):
    """(kernel's name, what was compiled for it), in order."""
    from ops import launch

    launches = []
    for name in ("norm_forward_kernel", "norm_backward_kernel", "finish_weight_gradients_kernel"):
        monkeypatch.setattr(launch, name, Recorder(getattr(launch, name), name, launches))
    return launches


@pytest.fixture(autouse=backend.INTERPRET)
def interpreter_rounds_like_a_gpu(monkeypatch):
    """The interpreter of Triton 3.6 and 3.7 cuts fp32 off at bf16 where every GPU rounds to nearest even; that would double
    each rounding error that these tests measure."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(values, input_dtype, output_dtype, rounding_mode):
        if (input_dtype, output_dtype) == (tl.float32, tl.bfloat16):
            fp32 = torch.from_numpy(np.array(values, dtype=np.float32))
            return fp32.bfloat16().view(torch.uint16).numpy().reshape(values.shape)
        return convert(values, input_dtype, output_dtype, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)
