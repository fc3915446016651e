import numpy as np
import pytest
import torch
import triton.language as tl

from ops import kernels, kit, norm
from ops.kernels import backward, exchange

from .tiles import TwiceIfSplit, fitted, read_at_once


@pytest.fixture
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU in Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fresh_launches():
    kit.forget()
    yield
    kit.forget()


@pytest.fixture
def use_tile(monkeypatch):
    """A function: from now on, launches in both directions get this tile."""
    facts = kit.device_facts(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if kernels.INTERPRET:
        monkeypatch.setattr(backward, "norm_backward_kernel", TwiceIfSplit(backward.norm_backward_kernel))
        monkeypatch.setattr(exchange, "wait_for_words", read_at_once)
        # So long that no word takes the place of another. Loops count in plain ints there, which know no constexpr.
        monkeypatch.setattr(exchange, "RING", 64)

    def use(tile):
        if kernels.INTERPRET:  # two groups of programs that share rows, so that each has several
            monkeypatch.setattr(kit, "device_facts", lambda device: facts._replace(multiprocessors=2 * tile.slices))
        for name in ("forward_tile", "backward_tile"):
            monkeypatch.setattr(norm, name, lambda n, work, device, name=name: fitted(tile, n, work, facts, name))
        kit.forget()

    return use


@pytest.fixture
def copies(monkeypatch):
    """A list that grows with every tensor that is copied to become contiguous."""
    found, own = [], torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: own(t) if t.is_contiguous() else found.append(t) or own(t))
    return found


@pytest.fixture(autouse=kernels.INTERPRET)
def interpreter_rounds_like_a_gpu(monkeypatch):
    """The interpreter of Triton 3.6 and 3.7 cuts fp32 off at bf16 where every GPU rounds to nearest even; that would double
    each rounding error that these tests measure."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(values, input_dtype, output_dtype, rounding_mode):
        if (input_dtype, output_dtype) == (tl.float32, tl.bfloat16):
            fp32 = torch.from_numpy(np.array(values, dtype=np.float32))
            return fp32.bfloat16().view(torch.uint16).numpy().reshape(values.shape)
        return convert(values, input_dtype, output_dtype, rounding_mode)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)
