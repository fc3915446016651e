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
            ranges = found.setdefault(number(p), Counter())

            def count(p, size, wanted):
                if number(wanted):
                    ranges[number(p), number(size)] += 1

            monkeypatch.setattr(prefetch_kernels, "_bring", count)
            bring_rows(p, *arguments)

    monkeypatch.setattr(backward_kernels, "bring_rows", of_tensor)
    return found


def number(value) -> int:
    """What a kernel's scalar is in the interpreter, or the address that its pointer holds."""
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


@pytest.mark.skipif(not backend.INTERPRET, reason="what a compiled kernel asks for is not to be seen")
@pytest.mark.parametrize("shape", WHOLE_OR_SPLIT)
@pytest.mark.parametrize(("rows", "stages", "lag"), [(1, 3, 1), (2, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("upstream", ["norm", "stream", "both"])
def test_each_row_to_come_is_asked_for_once(upstream, rows, stages, lag, shape, device, use_tile, asked, monkeypatch):
    """Rows of tiles whose copy no earlier stage has begun; where a row is finished rounds after it is read, the stream's
    gradient for it then; r only where the norm has a gradient."""
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
        width, size = (tile.block_n if tile.slices > 1 else n), t.element_size()
        expected = Counter({
            (t.data_ptr() + (row * n + col) * size, min(width, n - col) * size): times
            for row in range(first, m) for col in range(0, n, width)
        })  # fmt: skip
        assert asked.pop(t.data_ptr()) == expected
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
    if not launch.device_facts(device).since_sm_90:
        pytest.skip("this GPU's L2 is not asked for rows in bulk")
    gradients, tiles = [], []
    apart = 2 + n % 2  # 16-bit rows at odd places are not brought

    for prefetch in (False, True):
        draw = torch.Generator(device).manual_seed(0)

        def drawn(dtype, draw=draw):
            memory = torch.randn(2001 * (n + apart) + 2, generator=draw, device=device).to(dtype)
            return memory[2:].view(2001, n + apart)[:, :n]

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
