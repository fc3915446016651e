"""Softmax and log-softmax: values and gradients against fp64, masks in every shape, wide rows."""

import pytest
import torch

from ops import log_softmax_fn, softmax, softmax_fn
from ops.softmax import SoftmaxTile, softmax_tile

from .cases import BF16, FP16, FP32, covering

FUNCTIONS = {"softmax": softmax_fn, "log-softmax": log_softmax_fn}  # named, as all processes of pytest give a test one name
ERROR = {FP32: 1e-5, BF16: 2**-7, FP16: 2**-10}


def oracle(x, scale, mask, log):
    z = x * scale
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else z + mask
    return z.log_softmax(-1) if log else z.softmax(-1)


def close(found, expected, dtype):
    assert found.dtype == dtype
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite)
    largest = expected[finite].abs().max().item() if finite.any() else 0.0
    assert (found.double() - expected)[finite].abs().max().item() <= ERROR[dtype] * max(1.0, largest)


def check(fn, x, scale=1.0, mask=None):
    x = x.clone().requires_grad_()
    mask = mask.clone().requires_grad_() if mask is not None and mask.is_floating_point() else mask
    y = fn(x, scale, mask)
    dy = torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape).to(x.dtype)
    y.backward(dy)
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, mask) if leaf is not None and leaf.is_floating_point()]
    expected = oracle(leaves[0], scale, leaves[1] if len(leaves) > 1 else mask, fn is log_softmax_fn)
    gradients = torch.autograd.grad(expected, leaves, dy.double())
    close(y, expected, x.dtype)
    close(x.grad, gradients[0], x.dtype)
    if len(leaves) > 1:
        close(mask.grad, gradients[1], mask.dtype)


@pytest.mark.parametrize("case", covering(width=[1, 7, 40, 300, 1100], dtype=[FP32, BF16, FP16], fn=list(FUNCTIONS)), ids=str)
def test_values_and_gradients(device, case):
    x = 3 * torch.randn(3, 5, case["width"], generator=torch.Generator().manual_seed(0)).to(device)
    check(FUNCTIONS[case["fn"]], x.to(case["dtype"]))


SHAPES = [(24,), (5, 24), (2, 3, 5, 24), (2, 1, 5, 24), (2, 1, 1, 24), (1, 3, 1, 24), (2, 3, 5, 1), (2, 1, 5, 1), (1,), ()]


@pytest.mark.parametrize("case", covering(shape=SHAPES, dtype=[torch.bool, BF16], fn=list(FUNCTIONS)), ids=str)
def test_a_mask_broadcasts_as_pytorch_has_it(device, case):
    dtype, shape = case["dtype"], case["shape"]
    generator = torch.Generator().manual_seed(0)
    x, mask = torch.randn(2, 3, 5, 24, generator=generator), torch.randn(shape, generator=generator).to(dtype)
    if dtype is torch.bool:
        mask = mask & (torch.rand(shape, generator=generator) < 0.7)  # of some rows nothing is left
    check(FUNCTIONS[case["fn"]], x.to(device), 0.5, mask.to(device))


@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize(
    "tile", [SoftmaxTile(1, 64, 1, looped=True), SoftmaxTile(2, 128, 1), SoftmaxTile(4, 64, 2, distance=1)], ids=str
)
def test_every_tile(device, fn, tile, monkeypatch):
    if tile.distance and device.type == "cpu":
        pytest.skip("only a GPU can bring rows into L2")
    monkeypatch.setattr(softmax, "softmax_tile", lambda *_: tile)
    x = torch.randn(7, 200, generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones(200, dtype=torch.bool, device=device)
    mask[:100] = False  # whole blocks of nothing
    check(fn, x, 2.0, mask)
    check(fn, x[:3, :197])  # rows that lie apart
    check(fn, x.t()[:7])


@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_large_numbers_and_rows_of_minus_infinity(device, fn):
    x = 1e4 * torch.randn(4, 50, generator=torch.Generator().manual_seed(2)).to(device)
    x[1, ::2] = -torch.inf
    check(fn, x[:2])
    x[2] = -torch.inf
    x[3, 7] = torch.inf
    assert fn(x)[2:].isnan().any(-1).all() and fn(x)[2].isnan().all()


@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_a_mask_hides_is_known_from_the_mask_and_not_from_the_result(device, fn):
    """Results of -inf come from logits of -inf and from fp16, NaN from a row that is hidden throughout."""
    x = torch.tensor([[6e4, -6e4, 1.0, -torch.inf], [1.0, 2.0, 3.0, 4.0]], dtype=FP16, device=device).requires_grad_()
    mask = torch.tensor([[True, True, False, True], [False] * 4], device=device)
    dy = torch.tensor([[1.0, 2.0, 4.0, 8.0], [0.0] * 4], dtype=FP16, device=device)
    wide = x.detach().double().requires_grad_()
    (found,), (expected,) = (
        torch.autograd.grad(y, leaf, dy.to(y))
        for y, leaf in ((fn(x, 1.0, mask), x), (oracle(wide, 1.0, mask, fn is log_softmax_fn), wide))
    )
    assert torch.equal(found.double(), expected)


def test_tiles_hold_whole_rows_of_every_width():
    for width in (1, 5, 32, 100, 512, 768, 1000, 1025, 2048, 5000, 32768, 40000, 1_000_000):
        for vector in (4, 8):
            for backward in (False, True):
                tile = softmax_tile(width, vector, backward)
                assert tile.block_n & (tile.block_n - 1) == 0 and tile.rows & (tile.rows - 1) == 0 and 1 <= tile.warps <= 32
                per_thread = tile.rows * -(-width // tile.block_n) * tile.block_n / (32 * tile.warps)
                assert tile.looped or per_thread <= (64 if tile.rows == 1 else 32), tile
