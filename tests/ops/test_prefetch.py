"""Rows brought into L2 ahead of time: which are asked for, and that nothing but time depends on it."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from ops import backend, backward_kernels, forward_kernels, launch, layer_norm_fn, prefetch_kernels

from .cases import BF16, FP32
from .tiles import SHAPES, tile_for

WHOLE_OR_SPLIT = [shape for shape in SHAPES if shape != "looped"]
WHOLE = [shape for shape in WHOLE_OR_SPLIT if shape != "split"]
INTERPRETED = pytest.mark.skipif(not backend.INTERPRET, reason="what a compiled kernel asks for is not to be seen")


@pytest.fixture
def asked(monkeypatch):
    """By tensor, of those whose address is known: how often each (address, bytes) was asked for."""
    found: dict[int, Counter] = {}
    bring_rows = backward_kernels.bring_rows

    def of_tensor(p, *arguments):
        if p is not None:
            ranges = found.setdefault(number(p), Counter())

            def count(p, size, wanted):
                if number(wanted):
                    ranges[number(p), number(size)] += 1

            def count_at_once(p, size, first_row, M, ROWS):
                size, first_row = number(size), number(first_row)
                rows = min(number(M) - first_row, int(ROWS))
                if rows > 0:
                    ranges[number(p) + first_row * size, rows * size] += 1

            monkeypatch.setattr(prefetch_kernels, "_bring", count)
            monkeypatch.setattr(prefetch_kernels, "_bring_at_once", count_at_once)
            bring_rows(p, *arguments)

    for kernels in (forward_kernels, backward_kernels):
        monkeypatch.setattr(kernels, "bring_rows", of_tensor)
    return found


@pytest.fixture
def with_prefetch(monkeypatch):
    """A function: from now on, tiles of a direction have these fields, though no GPU is there that brings rows; returns a list
    of those that were launched."""

    def use(direction, **fields):
        choose, tiles = getattr(launch, f"{direction}_tile"), []

        def prefetching(n, work, device):
            tiles.append(replace(choose(n, work, device), **fields))
            return tiles[-1]

        monkeypatch.setattr(launch, f"{direction}_tile", prefetching)
        return tiles

    return use


def number(value) -> int:
    """What a kernel's scalar is in the interpreter, or the address that its pointer holds."""
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


@INTERPRETED
@pytest.mark.parametrize("shape", WHOLE)
@pytest.mark.parametrize(("m", "rows", "ahead"), [(37, 1, 1.0), (37, 2, 0.5), (16, 1, 1.5), (16, 1, 0.5), (32, 2, 0.5)])
def test_forward_asks_once_for_each_row_that_is_read_so_many_programs_later(
    m, rows, ahead, shape, device, use_tile, asked, with_prefetch
):
    """For none if all programs may run at once: sixteen do, of 32 warps on eight multiprocessors. Beside x1 rows are wider than
    those that tiles were measured with, and of so many fewer programs are brought: six bytes an element, now eight."""
    n = 44
    use_tile(tile_for(n, shape, rows=rows, warps=32, programs_per_sm=0, stages=1))
    with_prefetch("forward", prefetch_ahead=ahead)
    x, x1, stream = tensors = [
        rows_apart(m, n, apart, None, dtype, device) for apart, dtype in ((2, BF16), (4, BF16), (6, FP32))
    ]
    layer_norm_fn(x, torch.ones(n, device=device), None, stream, x1=x1, prenorm=True)
    first = int(ahead * 8 * 6 / 8) * rows if m / rows > 16 else m
    for t in tensors:
        assert asked.pop(t.data_ptr()) == pieces(t, first, n, times=1)
    assert not asked


@INTERPRETED
@pytest.mark.parametrize(
    ("rows", "apart"), [(4, ""), (8, ""), (16, ""), (8, "x"), (8, "x1"), (8, "stream"), (8, "weight"), (8, "rowscale")]
)
def test_forward_asks_for_eight_rows_and_more_in_one_piece_if_those_of_all_inputs_lie_behind_each_other(
    rows, apart, device, use_tile, asked, with_prefetch
):
    """150 rows, so that the last tile is incomplete. Elements of a weight or of row scales may lie apart."""
    m, n = 150, 44
    use_tile(tile_for(n, "equal blocks", rows=rows, warps=64, programs_per_sm=0, stages=1))
    with_prefetch("forward", prefetch_ahead=1.0)
    x, x1, stream = inputs = [
        rows_apart(m, n, 4 * (apart == name), None, dtype, device)
        for name, dtype in (("x", BF16), ("x1", FP32), ("stream", FP32))
    ]
    weight = torch.ones(n, 1 + (apart == "weight"), device=device)[:, 0]
    scales = {"rowscale1": torch.ones(m, 2, device=device)[:, 0]} if apart == "rowscale" else {}
    layer_norm_fn(x, weight, None, stream, x1=x1, prenorm=True, **scales)
    first = round(8 * 6 / 10) * rows  # fewer than eight, as beside x1 rows are wider than those that tiles were measured with
    row_by_row = rows < 8 or apart in ("x", "x1", "stream")
    for t in inputs:
        expected = pieces(t, first, n, times=1) if row_by_row else pieces(t[first:].view(1, -1), 0, rows * n, times=1)
        assert asked.pop(t.data_ptr(), Counter()) == (Counter() if scales and t is x1 else expected)
    assert not asked


@INTERPRETED
@pytest.mark.parametrize("scaled", ["x", "x1"])
def test_forward_does_not_ask_for_rows_whose_scale_may_be_0(scaled, device, use_tile, asked, with_prefetch):
    use_tile(tile_for(44, "one block", rows=1, warps=32, programs_per_sm=0, stages=1))
    with_prefetch("forward", prefetch_ahead=0.5)
    x, x1, stream = (torch.randn(37, 44, device=device) for _ in range(3))
    scales = {"rowscale" if scaled == "x" else "rowscale1": torch.ones(37, device=device)}
    layer_norm_fn(x, torch.ones(44, device=device), None, stream, x1=x1, prenorm=True, **scales)
    other = x1 if scaled == "x" else x
    assert {address for address, ranges in asked.items() if ranges} == {other.data_ptr(), stream.data_ptr()}


@INTERPRETED
@pytest.mark.parametrize(("rows", "stages", "lag"), [(1, 3, 1), (2, 1, 1), (2, 2, 2)])
def test_forward_of_split_rows_asks_once_for_each_row_to_come(rows, stages, lag, device, use_tile, asked, with_prefetch):
    m, n = 37, 44
    use_tile(tile_for(n, "split", rows=rows, stages=stages, lag=lag))
    tiles = with_prefetch("forward", prefetch_l2=True)
    x, stream = (rows_apart(m, n, apart, None, dtype, device) for apart, dtype in ((2, BF16), (6, FP32)))
    layer_norm_fn(x, torch.ones(n, device=device), None, stream, prenorm=True)
    (tile,) = tiles
    groups = launch.device_facts(device).multiprocessors * tile.programs_per_sm // tile.slices
    for t in (x, stream):
        assert asked.pop(t.data_ptr()) == pieces(t, (stages - 1) * groups * rows, tile.block_n, times=2)
    assert not asked


@INTERPRETED
@pytest.mark.parametrize("shape", WHOLE_OR_SPLIT)
@pytest.mark.parametrize(("rows", "stages", "lag"), [(1, 3, 1), (2, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("upstream", ["norm", "stream", "both"])
def test_backward_asks_once_for_each_row_to_come(upstream, rows, stages, lag, shape, device, use_tile, asked, with_prefetch):
    """Rows of tiles whose copy no earlier stage has begun; where a row is finished rounds after it is read, the stream's
    gradient for it then; r only where the norm has a gradient."""
    if upstream == "stream" and shape == "split":
        pytest.skip("rows are not split where nothing is summed")
    m, n = 37, 44
    use_tile(tile_for(n, shape, rows=rows, stages=stages, lag=lag))
    tiles = with_prefetch("backward", prefetch_l2=True)
    x, stream, dy, dr = (torch.randn(m, n, dtype=dtype, device=device) for dtype in (BF16, FP32, BF16, FP32))
    weight = torch.ones(n, device=device, requires_grad=True)
    y, r = layer_norm_fn(x, weight, None, stream.requires_grad_(), prenorm=True)
    outputs, given, read = {
        "norm": ((y,), (dy,), (dy, r)), "stream": ((r,), (dr,), (dr,)), "both": ((y, r), (dy, dr), (dy, dr, r)),
    }[upstream]  # fmt: skip
    torch.autograd.grad(outputs, stream, given)

    (tile,) = tiles
    groups = launch.device_facts(device).multiprocessors * tile.programs_per_sm // tile.slices
    # The interpreter runs a split row's programs twice, as they can't wait for each other.
    times = 2 if tile.slices > 1 else 1
    for t in read:
        behind = lag if t is dr and tile.slices > 1 else 0
        first = max(0, stages - 1 - behind) * groups * rows
        assert asked.pop(t.data_ptr()) == pieces(t, first, tile.block_n if tile.slices > 1 else n, times)
    assert not asked


BLOCKS = [*product([512, 520, 514], WHOLE_OR_SPLIT), (2, "one block")]
KINDS = [
    *((None, False, n, shape) for n, shape in BLOCKS),
    *((BF16, False, n, shape) for n, shape in BLOCKS),
    *((FP32, False, n, shape) for n, shape in [*BLOCKS, (515, "one block"), (515, "split"), (1, "one block")]),
    *((FP32, True, n, shape) for n, shape in BLOCKS if shape != "split"),  # rows with two norms are not split
]


@pytest.mark.gpu
@pytest.mark.parametrize(("residual", "second", "n", "shape"), KINDS, ids=str)
@pytest.mark.parametrize(("rows", "stages", "lag"), [(1, 3, 1), (2, 1, 1), (2, 2, 2)])
def test_no_gradient_depends_on_it(rows, stages, lag, residual, second, n, shape, device, use_tile, monkeypatch):
    """2001 rows: the last tile is incomplete, and programs ask for tiles that are not there. Rows begin at places that 16 bytes
    do not divide, and end there; so may those of a split row's last program and of a last block."""
    skip_unless_brought(device)
    gradients, tiles = [], []
    apart = 2 + n % 2  # backward does not bring 16-bit rows at odd places

    for prefetch in (False, True):
        draw = torch.Generator(device).manual_seed(0)
        drawn = partial(rows_apart, 2001, n, apart, draw)
        use_tile(tile_for(n, shape, rows=rows, stages=stages, lag=lag, prefetch_l2=prefetch))
        choose = launch.backward_tile
        monkeypatch.setattr(launch, "backward_tile", lambda *given, choose=choose: tiles.append(choose(*given)) or tiles[-1])
        x, stream = drawn(BF16).requires_grad_(), None if residual is None else drawn(residual).requires_grad_()
        weights = torch.randn(4 if second else 2, n, generator=draw, device=device).requires_grad_()
        w, b, w1, b1 = (*weights.unbind(), None, None)[:4]
        y = layer_norm_fn(x, w, b, stream, weight1=w1, bias1=b1, prenorm=stream is not None, dropout_p=0.1, seed=3)
        y = y if isinstance(y, tuple) else (y,)
        leaves = [t for t in (x, stream, weights) if t is not None]
        gradients.append(torch.autograd.grad(y, leaves, [drawn(t.dtype) for t in y]))
    assert [tile.prefetch_l2 for tile in tiles] == [False, True]
    assert all(map(torch.equal, *gradients))


FORWARD_KINDS = [
    *((*kind, "") for kind in KINDS),
    (None, False, 513, "two blocks", ""),
    *product([BF16, FP32], [False], [520], ["one block", "split"], ["x1", "rowscale", "in place"]),
]
DENSE = [
    *product([None, BF16, FP32], [False], [512, 514], ["one block", "equal blocks"], ["dense", "dense x1"]),
    (FP32, False, 513, "one block", "dense"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("residual", "second", "n", "shape", "option", "rows", "ahead"),
    [
        *((*kind, *ahead) for kind in FORWARD_KINDS for ahead in ((1, 0.5), (2, 2.0))),
        *((*kind, 8, ahead) for kind in DENSE for ahead in (0.5, 2.0)),
    ],
    ids=str,
)
def test_no_output_depends_on_it(residual, second, n, shape, option, rows, ahead, device, use_tile):
    """2001 rows, as above; rows of 513 bf16 lie at odd places. Split rows have stages where others have rows ahead. Of tiles of
    eight rows that lie behind each other, the last has one."""
    skip_unless_brought(device)
    outputs, used = [], []
    for prefetch in (False, True):
        fields = {"stages": 1, "warps": 32, "programs_per_sm": 0, "prefetch_ahead": prefetch * ahead}
        if shape == "split":
            fields = {"stages": 1 + rows, "prefetch_l2": prefetch}
        use_tile(tile_for(n, shape, rows=rows, **fields))
        choose = launch.forward_tile
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "forward_tile", lambda *given, choose=choose: used.append(choose(*given)) or used[-1])
            draw = torch.Generator(device).manual_seed(0)
            dense = option.startswith("dense")
            x, x1 = (rows_apart(2001, n, 0 if dense else apart, draw, BF16) for apart in (2, 4))
            assert x.is_contiguous() == dense
            of_stream = 0 if dense or option == "in place" else 6
            stream = None if residual is None else rows_apart(2001, n, of_stream, draw, residual)
            w, b, w1, b1 = torch.randn(4, n, generator=draw, device=device).unbind()
            scale = torch.arange(2001, device=device).remainder(3).float()
            given = {
                "x1": {"x1": x1},
                "dense x1": {"x1": x1},
                "rowscale": {"rowscale": scale},
                "in place": {"residual_out": stream},
            }.get(option, {})
            second_norm = {"weight1": w1, "bias1": b1} if second else {}
            y = layer_norm_fn(x, w, b, stream, prenorm=True, dropout_p=0.1, seed=3, **second_norm, **given)
        outputs.append([t.clone() for t in y])
    assert [tile.forward_prefetches(n) for tile in used] == [False, True]
    assert used[1].asks_at_once(n) == dense
    assert all(map(torch.equal, *outputs))


def pieces(t, first: int, width: int, times: int) -> Counter:
    """Addresses and bytes of the rows from `first` on, `width` columns at a time."""
    (m, n), size = t.shape, t.element_size()
    return Counter({
        (t.data_ptr() + (row * t.stride(0) + col) * size, min(width, n - col) * size): times
        for row in range(first, m) for col in range(0, n, width)
    })  # fmt: skip


def skip_unless_brought(device) -> None:
    if not launch.device_facts(device).since_sm_90:
        pytest.skip("this GPU's L2 is not asked for rows in bulk")


def rows_apart(m: int, n: int, apart: int, draw, dtype, device=None):
    """m rows of n columns, so many columns from one another, the first two columns from where memory begins."""
    memory = torch.randn(m * (n + apart) + 2, generator=draw, device=draw.device if draw else device).to(dtype)
    return memory[2:].view(m, n + apart)[:, :n]
