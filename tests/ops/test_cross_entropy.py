"""Cross-entropy: values and gradients against fp64, what in_place overwrites, and the product with its loss."""

import pytest
import torch
import torch.nn.functional as F

from ops import checks, cross_entropy_fn, kernels, linear_cross_entropy_fn
from ops import loss as loss_module
from ops.loss import LossTile, loss_tile, streaming_tile

from .cases import BF16, FP16, FP32, covering

OPTIONS = [
    {},
    {"z_loss": 0.01},
    {"label_smoothing": 0.1},
    {"softcap": 5.0},
    {"softcap": 5.0, "z_loss": 0.01, "label_smoothing": 0.1},
]
# A row whole in registers, and rows of which a part is read twice, so that the last block is full, cut, or empty.
TILES = [LossTile(64, 12, 2, 1), LossTile(64, 1, 2, 1), LossTile(128, 2, 1, 1)]

LOSSES = {
    "F.cross_entropy": lambda hidden, weight, targets, **how: F.cross_entropy(hidden @ weight.mT, targets, **how),
    "cross_entropy_fn": lambda hidden, weight, targets, **how: cross_entropy_fn(hidden @ weight.mT, targets, **how),
    "in place": lambda hidden, weight, targets, **how: cross_entropy_fn(hidden @ weight.mT, targets, in_place=True, **how),
    "linear": lambda hidden, weight, targets, **how: linear_cross_entropy_fn(hidden, weight, targets, chunks=2, **how),
}


def oracle(logits, targets, *, softcap=None, z_loss=0.0, label_smoothing=0.0, ignore_index=-100):
    """Losses by row in the logits' dtype, written down from the definition."""
    x = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    lse = x.logsumexp(-1)
    counts = targets != ignore_index
    at_target = x.gather(-1, targets.long().where(counts, 0)[..., None])[..., 0]
    loss = lse - (1 - label_smoothing) * at_target + z_loss * lse**2
    if label_smoothing:
        loss = loss - label_smoothing * x.mean(-1)
    return loss.masked_fill(~counts, 0.0)


def reduced(losses, targets, reduction):
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / (targets != -100).sum()


def example(device, shape, dtype, scale=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(shape, generator=generator)).to(dtype).to(device)
    targets = torch.randint(shape[-1], shape[:-1], generator=generator)
    targets.view(-1)[::3] = -100
    return logits, targets.to(device)


def exact(logits, targets, upstream, reduction, **options):
    x = logits.detach().double().requires_grad_()
    loss = reduced(oracle(x, targets, **options), targets, reduction)
    (gradient,) = torch.autograd.grad(loss, x, upstream.to(loss))
    return loss.detach(), gradient


def close(found, expected, dtype):
    error = {FP32: 1e-6, BF16: 2**-7, FP16: 2**-10}[dtype]
    bound = error * expected.abs().max().item() + (1e-7 if dtype is FP16 else 0)
    assert (found.double() - expected).abs().max().item() <= bound


@pytest.mark.parametrize(
    "case",
    covering(
        dtype=[FP32, BF16, FP16], in_place=[False, True], reduction=["mean", "sum", "none"], options=OPTIONS, width=[40, 41]
    ),
    ids=str,
)
def test_loss_and_gradient_are_those_of_the_definition(device, case):
    dtype, reduction, options = case["dtype"], case["reduction"], case["options"]
    logits, targets = example(device, (2, 3, case["width"]), dtype)
    upstream = torch.arange(1.0, 7.0, device=device).view(2, 3) if reduction == "none" else torch.tensor(3.0, device=device)
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy_fn(leaf * 1, targets, reduction=reduction, in_place=case["in_place"], **options)
    loss.backward(upstream)
    expected, gradient = exact(logits, targets, upstream, reduction, **options)
    assert loss.dtype == FP32 and loss.shape == expected.shape
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    close(leaf.grad, gradient, dtype)
    assert (leaf.grad[targets == -100] == 0).all()


# Widths of whole words and odd ones, that end with a block or don't; the first row begins with 16 bytes, or anywhere.
@pytest.mark.parametrize(
    "case", covering(dtype=[BF16, FP32, FP16], tile=TILES, width=[600, 601, 640, 643], first=[8, 1]), ids=str
)
def test_every_tile_reads_every_logit_and_writes_no_other(device, case, monkeypatch):
    dtype, width, first = case["dtype"], case["width"], case["first"]
    monkeypatch.setattr(loss_module, "loss_tile", lambda *_: case["tile"])
    around = torch.full((first + 6, width), 7.0, device=device, dtype=dtype)  # a row before and behind is somebody else's
    logits, targets = example(device, (5, width), dtype)
    around[first : first + 5] = logits
    leaf = around.clone().requires_grad_()
    whole = leaf * 1
    loss = cross_entropy_fn(whole[first : first + 5], targets, softcap=9.0, in_place=True)
    loss.backward()
    expected, gradient = exact(logits, targets, torch.ones((), device=device), "mean", softcap=9.0)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    close(leaf.grad[first : first + 5], gradient, dtype)
    assert (whole[first - 1] == 7.0).all() and (whole[first + 5] == 7.0).all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("in_place", [False, True])
def test_logits_of_ten_thousand_and_of_minus_infinity(device, in_place, label_smoothing):
    logits, targets = example(device, (6, 50), FP32, scale=1e4)
    logits[:, ::2] = -torch.inf
    logits[torch.arange(6), targets.clamp(min=0)] = 1e4 * torch.randn(6, device=device)
    logits[1] = -torch.inf  # a row without a number
    logits[2, targets[2]] = -torch.inf
    leaf, double = logits.clone().requires_grad_(), logits.double().requires_grad_()
    how = {"label_smoothing": label_smoothing}
    rows = cross_entropy_fn(logits, targets, reduction="none", **how)
    expected = F.cross_entropy(double, targets, reduction="none", **how)
    torch.testing.assert_close(rows.double(), expected, equal_nan=True, rtol=1e-6, atol=1e-6)
    assert rows[1].isnan() and rows[2] == torch.inf
    cross_entropy_fn(leaf * 1, targets, reduction="sum", in_place=in_place, **how).backward()
    expected.sum().backward()
    torch.testing.assert_close(leaf.grad.double(), double.grad, equal_nan=True, rtol=1e-6, atol=1e-6)


def test_targets_of_both_dtypes_and_any_ignored_number(device):
    logits, targets = example(device, (9, 30), FP32)
    expected = cross_entropy_fn(logits, targets.where(targets != 7, -100))
    targets = targets.where(targets != -100, 7)
    for given in (targets, targets.int()):
        torch.testing.assert_close(cross_entropy_fn(logits, given, ignore_index=7), expected)
    assert (cross_entropy_fn(logits, targets, ignore_index=7, reduction="none")[targets == 7] == 0).all()
    assert cross_entropy_fn(logits, torch.full_like(targets, 7), ignore_index=7).isnan()


@pytest.mark.parametrize("kernels", [False, kernels.INTERPRET])
@pytest.mark.parametrize("loss", LOSSES)
def test_targets_out_of_range_raise_on_the_cpu(loss, kernels, monkeypatch):
    monkeypatch.setattr(checks, "runs_kernels", lambda device: kernels)
    for wrong in (30, -1):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            LOSSES[loss](torch.randn(2, 4), torch.randn(30, 4, requires_grad=True), torch.tensor([3, wrong]))


@pytest.mark.parametrize("in_place", [True, False])
def test_rows_that_lie_apart(device, in_place):
    wide, targets = example(device, (6, 44), FP32)
    targets %= 40
    leaf = wide.clone().requires_grad_()
    whole = leaf * 1 if in_place else (leaf * 1).t().contiguous().t()  # whose elements lie apart too
    cross_entropy_fn(whole[:, :40], targets, in_place=in_place, ignore_index=-1).backward()
    _, gradient = exact(wide[:, :40], targets, torch.ones((), device=device), "mean", ignore_index=-1)
    close(leaf.grad[:, :40], gradient, FP32)
    assert torch.equal(whole[:, 40:], wide[:, 40:])


# ---- in place ----------------------------------------------------------------------------------------------------------------


def test_in_place_the_gradient_takes_the_logits_memory_and_other_uses_of_it_raise(device):
    leaf, targets = example(device, (4, 32), FP32)
    kept, logits = leaf.clone(), leaf.requires_grad_() * 1
    with torch.no_grad():
        cross_entropy_fn(logits, targets, in_place=True)
    cross_entropy_fn(logits.detach(), targets, in_place=True)
    cross_entropy_fn(logits, targets, reduction="none", in_place=True)
    half = leaf.half() * 1
    cross_entropy_fn(half, targets, in_place=True)
    assert torch.equal(logits, kept) and torch.equal(half, kept.half())
    other = logits.sin().sum()  # which keeps the logits for its backward
    loss = cross_entropy_fn(logits, targets, in_place=True)
    assert logits.sum().abs() < 1e-5  # each row of the gradient adds up to 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_gradients_of_scaled_losses_add_up_over_micro_batches(device):
    leaf, targets = example(device, (140, 32), FP32)  # more rows than programs that scale them
    leaf.requires_grad_()
    for part in (slice(0, 70), slice(70, 140)):
        (cross_entropy_fn(leaf[part] * 1, targets[part], reduction="sum", in_place=True) / 8 * 1024).backward()
    _, gradient = exact(leaf, targets, torch.full((), 128.0, device=device), "sum")
    close(leaf.grad, gradient, FP32)


# ---- the product and its loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "chunks"), [(torch.float64, 3), (FP32, 1), (BF16, 3), (FP16, 3)], ids=str)
def test_the_product_with_its_loss_has_the_gradients_of_both_in_one(device, dtype, chunks):
    hidden, _ = example(device, (2, 4, 16), dtype)
    weight, _ = example(device, (30, 16), torch.promote_types(dtype, FP32), seed=1)
    _, targets = example(device, (2, 4, 30), FP32)
    options = {"softcap": 20.0, "z_loss": 0.01}
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    with torch.autocast(device.type, dtype, enabled=dtype in (BF16, FP16)):
        loss = linear_cross_entropy_fn(*leaves, targets, chunks=chunks, **options)
    (4 * loss).backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    rounded = exact[1] + (exact[1].detach().to(dtype).double() - exact[1].detach())
    expected = reduced(oracle(exact[0] @ rounded.mT, targets, **options), targets, "mean")
    gradients = torch.autograd.grad(4 * expected, exact)
    tolerance = {torch.float64: 1e-12, FP32: 1e-5, FP16: 2**-8, BF16: 2**-6}[dtype]
    torch.testing.assert_close(loss.double(), expected, rtol=tolerance, atol=tolerance)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert (leaf.grad.double() - gradient).norm() <= tolerance * gradient.norm()


def test_the_product_computes_only_gradients_that_are_asked_for(device):
    hidden, targets = example(device, (5, 16), FP32)
    weight = torch.randn(16, 16, device=device)
    plain = linear_cross_entropy_fn(hidden, weight, targets, chunks=2)
    frozen = linear_cross_entropy_fn(hidden.requires_grad_(), weight, targets, chunks=2)
    assert not plain.requires_grad and plain == frozen
    first, second = (torch.autograd.grad(frozen, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


# Divided by 0: by the items in the batch.
@pytest.mark.parametrize(
    "case", covering(rows=[0, 3], reduction=["mean", "sum"], divided=[1, 0], kernels=[True, False]), ids=str
)
def test_where_no_target_counts_every_loss_and_gradient_is_pytorchs(device, case, monkeypatch):
    rows, reduction, divided = case["rows"], case["reduction"], case["divided"]
    monkeypatch.setattr(checks, "runs_kernels", lambda device: case["kernels"])
    targets = torch.full((rows,), -100, device=device)
    for how in ({}, {"label_smoothing": 0.1}):
        found = {}
        for name, loss in LOSSES.items():
            hidden, weight = (torch.ones(shape, device=device, requires_grad=True) for shape in ((rows, 4), (5, 4)))
            value = loss(hidden, weight, targets, reduction=reduction, **how) / divided
            value.backward()
            found[name] = (value.detach(), hidden.grad, weight.grad)
        value, *gradients = found.pop("F.cross_entropy")
        assert value.isnan() or (value == 0 and (reduction, divided) == ("sum", 1))
        assert not any(gradient.any() for gradient in gradients)
        for name, ours in found.items():
            torch.testing.assert_close(ours, (value, *gradients), equal_nan=True, msg=name)


def test_tiles_hold_whole_rows_of_every_width():
    for width in (1, 2, 31, 128, 1000, 2048, 16384, 50257, 50304, 65529, 65536, 128256, 262144, 1_000_000):
        for itemsize in (2, 4):
            for tile in (loss_tile(width, itemsize), streaming_tile(width, itemsize)):
                assert tile.block & (tile.block - 1) == 0 and 1 <= tile.warps <= 32 and 1 <= tile.held <= 5
                assert tile.block % (32 * tile.warps * 16 // itemsize) == 0
