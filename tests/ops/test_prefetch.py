"""Backward's rows brought into L2 ahead of time: nothing but time depends on it, wherever the rows lie."""

from itertools import product

import pytest
import torch

from ops import launch, layer_norm_fn

from .cases import BF16, FP32
from .tiles import SHAPES, tile_for

pytestmark = pytest.mark.gpu

WHOLE_OR_SPLIT = [shape for shape in SHAPES if shape != "looped"]


@pytest.fixture(autouse=True)
def able(device):
    if device.type == "cuda" and not launch.device_facts(device).sm_90:
        pytest.skip("this GPU's L2 is not asked for rows in bulk")


# A last block or program with fewer columns than the others, rows that are no multiple of 16 bytes, and one column.
@pytest.mark.parametrize(("n", "shape"), [*product([512, 520, 515], WHOLE_OR_SPLIT), (1, "one block")], ids=str)
@pytest.mark.parametrize(("rows", "stages", "lag"), [(1, 3, 1), (2, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize(("residual", "second"), [(None, False), (BF16, False), (FP32, True)], ids=str)
def test_no_gradient_depends_on_it(residual, second, rows, stages, lag, shape, n, device, use_tile):
    """2001 rows: the last tile is incomplete, and programs ask for tiles that are not there. They begin at odd addresses."""
    gradients = []
    for prefetch in (False, True):
        draw = torch.Generator(device).manual_seed(0)

        def apart(dtype, draw=draw):
            memory = torch.randn(2001 * (n + 3) + 1, generator=draw, device=device).to(dtype)
            return memory[1:].view(2001, n + 3)[:, :n]

        use_tile(tile_for(n, shape, rows=rows, stages=stages, lag=lag, prefetch_l2=prefetch))
        x, stream = apart(BF16).requires_grad_(), None if residual is None else apart(residual).requires_grad_()
        weights = torch.randn(4 if second else 2, n, generator=draw, device=device).requires_grad_()
        w, b, w1, b1 = (*weights.unbind(), None, None)[:4]
        y = layer_norm_fn(x, w, b, stream, weight1=w1, bias1=b1, prenorm=stream is not None, dropout_p=0.1, seed=3)
        y = y if isinstance(y, tuple) else (y,)
        leaves = [t for t in (x, stream, weights) if t is not None]
        gradients.append(torch.autograd.grad(y, leaves, [apart(t.dtype) for t in y]))
    assert all(map(torch.equal, *gradients))
