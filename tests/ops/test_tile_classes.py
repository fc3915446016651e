"""The kernels over every class of tile: one block, two, several, looped, split; whatever the table picks for this GPU."""

import itertools
from dataclasses import replace

import pytest
import torch

from ops import dropout_mask, launch, layer_norm_fn
from ops.moments_kernels import merge

from .cases import BF16, FP16, FP32, Case, assert_as_accurate_as_pytorch, covering, describe, inputs, ours, reference_path
from .test_accuracy import OPTIONS
from .tiles import SHAPES, tile_for

# With one warp, a thread holds all rows of its columns from 256 columns of bf16 or 128 of fp32 on: there rows are added up
# before weight gradients are kept.
TILES = {
    "shape": SHAPES,
    "rows": [2, 1, 8],
    "warps": [4, 1],
    "stages": [1, 2, 3],
    "programs_per_sm": [0, 1, 2],
    "hold_weights": [False, True],
    "columns": [0, 8],
    "draws_first": [False, True],
    "lag": [1, 2],
    "one_pass": [False, True],
    "past_l1": [False, True],
    "prefetch_l2": [False, True],
}
WHOLE = ["one block", "two blocks", "equal blocks"]
COVERED = covering(**OPTIONS | {"n": [24, 64, 33, 300, 512], "m": [5, 1]}, **TILES)
# What the backward of a split row can do; in the covering array few cases are of this kind.
SPLIT_OPTIONS = {
    "rms": [False, True],
    "x": [BF16, FP32],
    "residual": [None, BF16, FP32],
    "dropout_p": [0.0, 0.25],
    "rowscale": ["none", "fixed"],
    "n": [24, 32, 33],
    "m": [5],
}
SPLIT_TILES = {"shape": ["split"], "warps": [4], "stages": [2], "programs_per_sm": [2, 1], "columns": [0]}
SPLIT = covering(**SPLIT_OPTIONS, **TILES | SPLIT_TILES)
# Where draws come first, in each block and for each input; of the covering array few cases have dropout and several blocks.
DRAWN_OPTIONS = {
    "rms": [False, True],
    "x": [BF16, FP32],
    "residual": [None, BF16, FP32],
    "x1": [None, BF16],
    "rowscale": ["none", "fixed", "learned"],
    "dropout_p": [0.25],
    "n": [300, 33],
    "m": [5],
}
DRAWN_TILES = {"shape": WHOLE, "programs_per_sm": [1], "draws_first": [True]}
DRAWN = covering(**DRAWN_OPTIONS, **TILES | DRAWN_TILES)


def names(chosen: dict) -> str:
    case, fields = split_off_tile(chosen)
    return f"{describe(case)}-{'-'.join(str(value) for value in fields.values())}"


def split_off_tile(chosen: dict) -> tuple[Case, dict]:
    return Case(**{k: v for k, v in chosen.items() if k not in TILES}), {k: chosen[k] for k in TILES}


@pytest.mark.parametrize("chosen", COVERED + SPLIT + DRAWN, ids=names)
def test_every_tile_is_as_accurate_as_pytorch(chosen, device, use_tile):
    case, fields = split_off_tile(chosen)
    use_tile(tile_for(case.n, **fields))
    assert_as_accurate_as_pytorch(case, device)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize(("residual", "n"), [(None, 4096), (BF16, 4096), (FP16, 4000), (FP32, 4096)], ids=str)
@pytest.mark.parametrize("one_pass", [False, True])
def test_rows_of_64_elements_a_thread_in_equal_blocks_are_as_accurate_as_pytorch(
    one_pass, residual, n, dropout_p, rms, device, use_tile
):
    """So many wait in the residual dtype, if that has 16 bits."""
    tile = tile_for(n, "equal blocks", rows=1, warps=2, programs_per_sm=0, stages=1, one_pass=one_pass)
    assert launch.packed(tile, 2, launch.device_facts(device))
    use_tile(tile)
    dtype = residual if residual == FP16 else BF16
    assert_as_accurate_as_pytorch(
        Case(x=dtype, residual=residual, rms=rms, bias=not rms, m=3, n=n, dropout_p=dropout_p), device
    )


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("residual", [None, BF16, FP32], ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("shape", WHOLE)
def test_moments_of_eight_warps_merged_are_as_accurate_as_pytorch(shape, dropout_p, residual, rows, device, use_tile):
    use_tile(tile_for(4096, shape, rows=rows, warps=8, programs_per_sm=0, stages=1, one_pass=True))
    assert_as_accurate_as_pytorch(Case(x=FP32, residual=residual, m=3, n=4096, dropout_p=dropout_p), device)


@pytest.mark.parametrize(("shape", "n", "block_n", "tail_n"), [("two blocks", 640, 512, 128), ("one block", 1000, 1024, 0)])
def test_rows_that_threads_hold_unevenly_have_two_passes(shape, n, block_n, tail_n, device, use_tile):
    """Four warps hold 512 columns of fp32 side by side: four times the tail, or the row ends inside its block."""
    tile = tile_for(n, shape, rows=1, programs_per_sm=0, stages=1, one_pass=True)
    assert (tile.block_n, tile.tail_n) == (block_n, tail_n)
    use_tile(tile)
    assert_as_accurate_as_pytorch(Case(x=FP32, residual=None, m=3, n=n), device)


def test_sets_of_different_sizes_merge_into_the_moments_of_both():
    """The compiler merges halves of one size, and need not."""

    def moments(t):
        return t.numel(), t.mean(), (t - t.mean()).square().sum()

    a, b = (torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) + n for n in (3, 5))
    torch.testing.assert_close(merge.fn(*moments(a), *moments(b)), moments(torch.cat((a, b))))


@pytest.mark.parametrize(("shape", "one_pass"), [("one block", False), ("one block", True), ("split", False)])
@pytest.mark.parametrize("upstream", [False, True])
@pytest.mark.parametrize("stream", [FP32, BF16])
@pytest.mark.parametrize("mean", [0.0, 30.0, 3e3])
def test_gradients_of_rows_far_from_zero_are_as_accurate_as_pytorch(mean, stream, upstream, shape, one_pass, device, use_tile):
    """dy has a part along x, which the mean could spoil; upstream, the residual stream has a gradient too."""
    use_tile(tile_for(512, shape, rows=2, programs_per_sm=1, stages=2, one_pass=one_pass))
    draw = torch.Generator().manual_seed(2)
    x, weight, bias, dy, dr = (torch.randn(*size, generator=draw) for size in ((6, 512), (512,), (512,), (6, 512), (6, 512)))
    x, dy = (x + mean).to(stream), (dy + x).to(stream)

    def gradients(norm, dtype, where):
        """Of r, weight and bias, where r is read by the norm and, upstream, goes on as it is."""
        r, w, b = leaves = [t.to(where, dtype or t.dtype).requires_grad_() for t in (x, weight, bias)]
        outputs, given = norm(r, w, b), [t.to(where, dtype or stream) for t in (dy, dr)]
        return [g.cpu().double() for g in torch.autograd.grad(outputs[: 1 + upstream], leaves, given[: 1 + upstream])]

    def torchs(r, w, b):
        return torch.nn.functional.layer_norm(r.to(w.dtype), (512,), w, b, 1e-5).to(r.dtype), r * 1

    def ours_(r, w, b):
        return layer_norm_fn(torch.zeros_like(r), w, b, residual=r, eps=1e-5, prenorm=True)

    wanted, got, theirs = (
        gradients(torchs, torch.float64, "cpu"),
        gradients(ours_, None, device),
        gradients(torchs, None, device),
    )
    for our, their, exact in zip(got, theirs, wanted, strict=True):
        assert (our - exact).abs().max() <= 2 * (their - exact).abs().max() + 1e-6


@pytest.mark.parametrize(
    ("shape", "where"),
    [
        *itertools.product(["looped", "one block", "equal blocks"], [0, 256, 300, 511]),
        *itertools.product(["looped", "one block", "equal blocks"], [[0, 256], [0, 511], [0, 256, 511]]),
        *itertools.product(["one block", "equal blocks"], [slice(0, 512, 4), slice(0, 4)]),
    ],
)
@pytest.mark.parametrize(("n", "warps"), [(512, 4), (4096, 2)])
def test_a_huge_element_or_two_or_a_huge_mean_cost_one_pass_few_bits(n, warps, shape, where, device, use_tile):
    """The first, middle, some or last element, the first of each thread's or all of a thread's: Σ (r − shift)² − … with a shift
    far from the mean would cancel. It may lose as many bits as the 4 to 64 elements that a thread holds have."""
    tile = tile_for(n, shape, rows=1, warps=warps, programs_per_sm=0, stages=1, one_pass=True)
    held = n // (min(tile.block_n, 32 * warps * 4) // 4)
    use_tile(tile)
    x = torch.randn(4, n, generator=torch.Generator().manual_seed(1)) + torch.tensor([0.0, 1e4, -1e4, 0.0])[:, None]
    x[0, where], x[3, where] = 1e4, 1e17
    got = layer_norm_fn(x.to(device), None, None, eps=1e-5).cpu()
    wide = x.double()
    mean, rstd = wide.mean(-1, keepdim=True), (wide.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    wanted = (wide - mean) * rstd
    error = (got - wanted).abs().amax(-1)
    # roundings of an element, held times as large, and of the mean; some of each
    allowed = 2**-24 * ((8 + 4 * held) * wanted.abs().amax(-1) + 4 * (mean.abs() * rstd)[:, 0])
    assert (error <= allowed).all(), (error, allowed)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize(("n", "block_n", "lag"), [(1100, 512, 1), (1100, 512, 2), (1100, 32, 2), (2048, 1024, 1)])
def test_several_warps_and_more_programs_than_a_warp_has_lanes_share_a_row(n, block_n, lag, rms, device, use_tile):
    """512 columns of bf16 are two warps' and 1024 four; 1100 columns leave the last of them half empty or without any."""
    tile = tile_for(n, "one block", rows=2, lag=lag, programs_per_sm=9)
    use_tile(replace(tile, block_n=block_n, slices=-(-n // block_n)))
    assert_as_accurate_as_pytorch(Case(residual=BF16, rms=rms, bias=not rms, m=5, n=n), device)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("dtype", "n"), [(FP32, 640), (FP32, 768), (BF16, 1280), (BF16, 768)], ids=str)
def test_two_blocks_whose_sums_share_a_reduction_are_as_accurate_as_pytorch(dtype, n, rows, rms, device, use_tile):
    """640 = 512 + 128 and 1280 = 1024 + 256: one warp holds four columns of the first for each of the second."""
    use_tile(tile_for(n, "two blocks", rows=rows, warps=1))
    assert_as_accurate_as_pytorch(Case(x=dtype, residual=dtype, rms=rms, bias=not rms, m=3, n=n), device)


@pytest.mark.parametrize("value", [1288.0, 1368.0, 3.0])
@pytest.mark.parametrize(
    ("shape", "n", "one_pass"),
    [*((shape, 1000, False) for shape in SHAPES), *itertools.product(WHOLE, [1000, 1024], [True])],
)
def test_a_constant_row_has_its_own_mean(shape, n, one_pass, value, device, use_tile):
    """Σ r / N is exact here and Σ r · (1 / N) is not; with a small eps, rstd makes the difference a thousand times larger."""
    use_tile(tile_for(n, shape, one_pass=one_pass))
    y = layer_norm_fn(torch.full((3, n), value, dtype=BF16, device=device), None, None, eps=1e-6)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("value", [1e3, 1e5, 1e30, float("inf")])
@pytest.mark.parametrize("columns", [[0, 256, 511], [0, 256]])
@pytest.mark.parametrize("shape", ["looped", "one block"])
def test_what_is_dropped_spoils_no_statistics(shape, columns, value, device, use_tile):
    """Not even where a row's statistics are taken around some of its elements."""
    with reference_path():
        seed = next(seed for seed in range(99) if not dropout_mask(seed, 1, 512, 0.5, 0, device)[0, columns].any())
    x = torch.randn(1, 512, generator=torch.Generator().manual_seed(3)).to(device)
    wanted = layer_norm_fn(x, None, None, dropout_p=0.5, seed=seed)
    x[0, columns] = value
    use_tile(tile_for(512, shape, rows=1, programs_per_sm=0, stages=1, one_pass=True))
    torch.testing.assert_close(layer_norm_fn(x, None, None, dropout_p=0.5, seed=seed), wanted)


@pytest.mark.parametrize("dtype", [FP32, BF16])  # a thread holds 4 or 8 neighbouring columns
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("draws_first", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_drops_what_the_reference_drops_in_both_directions(shape, draws_first, rows, dtype, device, use_tile):
    m, n, seed, p = 3, 24, 99, 0.4
    with reference_path():
        expected = [dropout_mask(seed, m, n, p, stream, device) for stream in (0, 1)]
    use_tile(tile_for(n, shape, rows=rows, draws_first=draws_first))
    for branches in (1, 2):  # the backward of a split row has one branch
        x, *x1 = (torch.randn(m, n, device=device).to(dtype).requires_grad_() for _ in range(branches))
        y, *masks = layer_norm_fn(x, None, None, x1=x1[0] if x1 else None, dropout_p=p, return_dropout_mask=True, seed=seed)
        gradients = torch.autograd.grad(y, (x, *x1), torch.randn(m, n, device=device).to(dtype))
        for keep, mask, dx in zip(expected[:branches], masks, gradients, strict=False):
            assert torch.equal(mask, keep)
            assert torch.equal(dx != 0, keep)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", ["one block", "two blocks", "split"])
def test_nothing_is_dropped_where_the_threshold_rounds_to_0_and_draws_would_come_first(shape, dtype, device, use_tile):
    use_tile(tile_for(300, shape, draws_first=True))
    x = torch.randn(3, 300, device=device).to(dtype).requires_grad_()
    g = torch.randn(3, 300, device=device).to(dtype)
    dropped, whole = (
        torch.autograd.grad(layer_norm_fn(x, None, None, torch.zeros_like(x), dropout_p=p, seed=1), x, g)[0]
        for p in (1e-6, 0.0)
    )
    torch.testing.assert_close(dropped, whole, rtol=1e-5 if dtype == FP32 else 1e-2, atol=1e-5)
    assert (dropped != 0).all()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "looped"])
def test_what_lies_past_the_end_of_a_row_is_not_read(shape, device, use_tile):
    """Rows of 33 columns that lie apart, between them NaN."""
    n = 33
    use_tile(tile_for(n, shape))
    wide = torch.full((5, 64), torch.nan, device=device)
    wide[:, :n] = torch.randn(5, n, device=device)
    results = []
    for x in (wide[:, :n], wide[:, :n].contiguous()):
        x = x.detach().requires_grad_()
        w = torch.ones(n, device=device, requires_grad=True)
        y, r = layer_norm_fn(x, w, None, x, prenorm=True)
        results.append((y, r, *torch.autograd.grad((y, r), (x, w), (x.detach(), x.detach()))))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("m", [0, 1, 2, 3])
def test_fewer_rows_than_a_tile_or_a_grid_holds(m, shape, device, use_tile):
    use_tile(tile_for(24, shape, rows=2))
    x, w = torch.randn(m, 24, device=device, requires_grad=True), torch.ones(24, device=device, requires_grad=True)
    y = layer_norm_fn(x, w, None, x)
    with reference_path():
        expected = layer_norm_fn(x, w, None, x)
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, (x, w), g), torch.autograd.grad(expected, (x, w), g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_rows_counted_in_64_bits_are_the_same_rows(device, monkeypatch):
    """The indices that 2³¹ rows need, on a few: the tensors would not fit a test."""
    case = Case(m=7, n=40, dropout_p=0.2)
    tensors = inputs(case, device)
    expected = ours(tensors, case)
    constants = launch._constants
    monkeypatch.setattr(launch, "_constants", lambda *a: constants(*a) | {"LONG": True})
    launch.forget()
    found = ours(tensors, case)
    assert all(torch.equal(found[name], t) for name, t in expected.items())


@pytest.mark.gpu
@pytest.mark.parametrize("gap", [2**30 + 64, 2**31 + 64], ids=["rows of 32 bits", "a stride of 64 bits"])
@pytest.mark.parametrize("n", [768, 8192, 65536], ids=str)
def test_rows_that_lie_2_31_elements_apart_are_those_of_a_copy(n, gap, device):
    memory = torch.empty(2 * gap + n, dtype=BF16, device=device)
    apart = memory.as_strided((3, n), (gap, 1))
    apart.copy_(torch.randn(3, n))
    weight = torch.randn(n, dtype=BF16, device=device, requires_grad=True)
    found = []
    for x in (apart, apart.contiguous()):
        x.requires_grad_()
        y = layer_norm_fn(x, weight, None, dropout_p=0.1, seed=1)
        found.append((y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))))
    assert all(map(torch.equal, *found))
