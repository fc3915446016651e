"""Backward's rows brought into L2 ahead of time: which are asked for, and that nothing but time depends on it."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from ops import backend, backward_kernels, launch, layer_norm_fn, prefetch_kernels

from .cases import BF16, FP32
from .tiles import SHAPES, tile_for

WHOLE_OR_SPLIT = [shape for shape in SHAPES if shape != "looped"]


@pytest.fixture
def asked(monkeypatch):
    """By tensor, of those whose address is known: how often each (address, bytes) was asked for."""
    found: dict[int, Counter] = {}
    bring_rows = backward_kernels.bring_rows

    def of_tensor(p, *arguments):
        if p is not None:
            ranges = found.setdefault(address(p), Counter())

            def count(p, size, wanted):
                if number(wanted):
                    ranges[address(p), number(size)] += 1

            monkeypatch.setattr(prefetch_kernels, "_bring", count)
            bring_rows(p, *arguments)

    monkeypatch.setattr(backward_kernels, "bring_rows", of_tensor)
    return found


def number(value) -> int:
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


address = number


@pytest.mark.skipif(not backend.INTERPRET, reason="what a compiled kernel asks for is not to be seen")
@pytest.mark.parametrize("shape", WHOLE_OR_SPLIT)
@pytest.mark.parametrize(("rows", "stages", "lag"), [(1, 3, 1), (2, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("upstream", ["norm", "stream", "both"])
def test_each_row_to_come_is_asked_for_once(upstream, rows, stages, lag, shape, device, use_tile, asked, monkeypatch):
    """Those of tiles that are read when the first round has begun, in each program; where a row is finished rounds after it is
    read, the stream's gradient for it. r only where the norm has a gradient."""
    if upstream == "stream" and shape == "split":
        pytest.skip("rows are not split where nothing is summed")
    m, n = 37, 44
    use_tile(tile_for(n, shape, rows=rows, stages=stages, lag=lag))
    choose, tiles = launch.backward_tile, []

    def prefetching(n, work, device):
        tiles.append(replace(choose(n, work, device), prefetch_l2=True))
        return tiles[-1]

    monkeypatch.setattr(launch, "backward_tile", prefetching)
    x, stream, dy, dr = (torch.randn(m, n, dtype=dtype, device=device) for dtype in (BF16, FP32, BF16, FP32))
    weight = torch.ones(n, device=device, requires_grad=True)
    y, r = layer_norm_fn(x, weight, None, stream.requires_grad_(), prenorm=True)
    given = {"norm": ((y,), (dy,)), "stream": ((r,), (dr,)), "both": ((y, r), (dy, dr))}[upstream]
    torch.autograd.grad(given[0], stream, given[1])

    (tile,) = tiles
    groups = launch.device_facts(device).multiprocessors * tile.programs_per_sm // tile.slices
    # The interpreter runs a split row's programs twice, as they can't wait for each other.
    times = 2 if tile.slices > 1 else 1
    for t in (dy, dr, r) if upstream == "both" else (dy, r) if upstream == "norm" else (dr,):
        behind = lag if t is dr and tile.slices > 1 else 0
        first = max(0, stages - 1 - behind) * groups * rows
        width, size = (tile.block_n if tile.slices > 1 else n), t.element_size()
        expected = Counter({
            (t.data_ptr() + (row * n + col) * size, min(width, n - col) * size): times
            for row in range(first, m) for col in range(0, n, width)
        })  # fmt: skip
        assert asked.pop(t.data_ptr()) == expected
    assert not asked


@pytest.mark.gpu
# A last block or program with fewer columns than the others, rows that are no multiple of 16 bytes, and one column.
@pytest.mark.parametrize(("n", "shape"), [*product([512, 520, 515], WHOLE_OR_SPLIT), (1, "one block")], ids=str)
@pytest.mark.parametrize(("rows", "stages", "lag"), [(1, 3, 1), (2, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize(("residual", "second"), [(None, False), (BF16, False), (FP32, False), (FP32, True)], ids=str)
def test_no_gradient_depends_on_it(residual, second, rows, stages, lag, shape, n, device, use_tile):
    """2001 rows: the last tile is incomplete, and programs ask for tiles that are not there. They begin at odd addresses."""
    if not launch.device_facts(device).since_sm_90:
        pytest.skip("this GPU's L2 is not asked for rows in bulk")
    if second and shape == "split":
        pytest.skip("rows are not split where there are two norms")
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
