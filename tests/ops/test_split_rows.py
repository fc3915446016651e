"""Rows that several programs share, which wait for each other's sums: compiled, on a GPU that launches cooperatively.

Their arithmetic is also tested in the interpreter, which can't wait: `test_tile_classes`.
"""

from dataclasses import replace

import pytest
import torch

from ops import launch, layer_norm_fn, rms_norm_fn, tiling

from .cases import BF16, FP32, SEED, Case, assert_as_accurate_as_pytorch, covering, describe, inputs, leaf, ours, reference_path

pytestmark = pytest.mark.gpu

SPLIT = tiling.Tile(rows=2, block_n=2048, tail_n=0, slices=8, warps=4, stages=3, programs_per_sm=2, hold_weights=True)

# Warps of a program that publish one by one and, last, together; in bf16 also a block narrower than they are; up to 128 words a
# row.
SHAPES = [
    (2, 4, 2048, 16384), (1, 4, 4096, 16384), (1, 1, 1024, 16384), (4, 4, 1024, 16384), (2, 4, 512, 16384), (1, 1, 1024, 65536),
    (2, 4, 2048, 65536), (2, 4, 1024, 65536),
]  # fmt: skip
LAPS = covering(shape=SHAPES, lag=[1, 2], residual=[None, BF16, FP32], rms=[False, True], dropout_p=[0.0, 0.1])


@pytest.fixture(autouse=True)
def cooperative(device):
    if device.type == "cuda" and not launch.device_facts(device).cooperative:
        pytest.skip("rows are not split on this GPU")


@pytest.fixture
def split(use_tile):
    """A function: rows of n columns are split in both directions, whatever the table says of them."""
    return lambda n: use_tile(replace(SPLIT, slices=-(-n // SPLIT.block_n)))


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("residual", [None, BF16, FP32])
@pytest.mark.parametrize("n", [16384, 20000, 65536])
def test_as_accurate_as_pytorch(n, residual, rms, device, split):
    split(n)
    assert_as_accurate_as_pytorch(Case(rms=rms, residual=residual, dropout_p=0.1, m=300, n=n), device)


@pytest.mark.parametrize("m", [1, 2, 3, 37])
def test_few_rows_are_as_accurate_as_pytorch(m, device, split):
    split(20000)
    assert_as_accurate_as_pytorch(Case(residual=BF16, dropout_p=0.1, m=m, n=20000), device)


@pytest.mark.parametrize("chosen", LAPS, ids=lambda chosen: "-".join(map(str, chosen.values())).replace("torch.", ""))
def test_a_board_written_over_many_times_is_as_accurate_as_pytorch(chosen, device, use_tile):
    """1500 rows, each with a scale and a mean of its own, are 22 rounds or more on an H200, and the board has 4 or 8."""
    rows, warps, block_n, n = chosen["shape"]
    use_tile(replace(SPLIT, rows=rows, warps=warps, block_n=block_n, slices=n // block_n, lag=chosen["lag"]))
    case = Case(rms=chosen["rms"], residual=chosen["residual"], dropout_p=chosen["dropout_p"], uneven=True, m=1500, n=n)
    assert_as_accurate_as_pytorch(case, device)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("residual", [None, BF16, FP32])
@pytest.mark.parametrize("n", [20000, 65536, 262144])
def test_the_tables_own_tiles_for_wide_rows_are_as_accurate_as_pytorch(n, residual, rms, device, tiles_used):
    assert_as_accurate_as_pytorch(Case(rms=rms, residual=residual, m=37, n=n), device)
    assert tiling.LOOPED not in tiles_used.values(), "the way of rows that nothing else can do"


@pytest.mark.parametrize(
    "case",
    [
        Case(x=FP32, residual=FP32, dropout_p=0.2),
        Case(x=FP32, residual=None, rms=True, rowscale="fixed", dropout_p=0.2, zero_centered=True),
        Case(x=FP32, residual=FP32, weight=None, bias=False),
    ],
    ids=describe,
)
@pytest.mark.parametrize("n", [16384, 16000])
def test_split_and_looped_rows_agree(n, case, device, use_tile, split):
    case = replace(case, m=150, n=n)
    split(n)
    found = ours(inputs(case, device), case)
    use_tile(tiling.LOOPED)
    expected = ours(inputs(case, device), case)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm()
        assert error < 5e-6, f"{name}: {error:.1e}"


def test_split_and_looped_rows_drop_the_same_elements(device, use_tile, split):
    n, results = 20000, []
    for choose in (lambda: split(n), lambda: use_tile(tiling.LOOPED)):
        choose()
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(70, n, device=device, generator=generator).requires_grad_()
        y, mask, _ = layer_norm_fn(x, None, None, dropout_p=0.3, return_dropout_mask=True, seed=5)
        (dx,) = torch.autograd.grad(y, x, torch.randn(70, n, device=device, generator=generator))
        assert torch.equal(dx != 0, mask)
        results.append(mask)
    assert torch.equal(*results)


def gradient_step(n: int, device: torch.device, m: int = 300, dtype: torch.dtype = BF16, norm_fn=layer_norm_fn):
    """A function that runs forward and backward on the same tensors each time."""
    x, residual, w, b = (leaf(*shape, device=device, dtype=dtype) for shape in ((m, n), (m, n), (n,), (n,)))
    seed, g = torch.tensor([5], device=device), torch.randn(m, n, device=device).to(dtype)

    def step():
        y, r = norm_fn(x, w, b, residual, dropout_p=0.1, prenorm=True, seed=seed)
        return (y, r, *torch.autograd.grad((y, r), (x, residual, w, b), (g, g)))

    return step


def equal(found, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("norm_fn", [layer_norm_fn, rms_norm_fn], ids=["ln", "rms"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("n", [64, 768, 2048, 8192, 16384, 40000, 65536])
def test_twenty_runs_and_replays_of_a_graph_give_the_same_bits(n, dtype, norm_fn, device):
    step, graph = gradient_step(n, device, dtype=dtype, norm_fn=norm_fn), torch.cuda.CUDAGraph()
    # All on one stream: autograd orders the gradient of a leaf after the stream on which the leaf was first used.
    with torch.cuda.stream(torch.cuda.Stream(device)):
        expected = step()
        assert all(equal(step(), expected) for _ in range(20))
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
            captured = step()
        for _ in range(5):
            for t in captured:
                t.detach().fill_(torch.nan)
            graph.replay()
            assert equal(captured, expected)


def test_two_streams_at_once_finish_and_give_the_bits_of_one(device, split):
    split(40000)
    steps = [gradient_step(40000, device) for _ in range(2)]
    expected = [step() for step in steps]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in steps]
    found = []
    for _ in range(20):
        for i, (step, stream) in enumerate(zip(steps, streams, strict=True)):
            with torch.cuda.stream(stream):
                found.append((i, step()))
    torch.cuda.synchronize()
    assert all(equal(results, expected[i]) for i, results in found)


def test_compiled_without_a_graph_break_to_the_bits_of_eager(device, split):
    split(16384)
    torch._dynamo.reset()
    case = Case(dropout_p=0.1, m=300, n=16384)
    eager = ours(inputs(case, device), case)
    tensors = inputs(case, device)

    def fn(x, residual, weight, bias):
        return layer_norm_fn(x, weight, bias, residual, eps=1e-5, dropout_p=0.1, prenorm=True, seed=SEED)

    y, r = torch.compile(fn, fullgraph=True)(**tensors)
    assert torch.equal(y, eager["y"]) and torch.equal(r, eager["r"])
    (y.float().sum() + r.sum()).backward()
    for t in tensors.values():
        assert torch.isfinite(t.grad).all()


def test_inference_updates_the_residual_stream_in_place(device, split):
    split(20000)
    x, residual = torch.randn(70, 20000, device=device), torch.randn(70, 20000, device=device)
    w = torch.rand(20000, device=device)
    expected_y, expected_r = layer_norm_fn(x, w, None, residual.clone(), prenorm=True)
    with reference_path():
        torch.testing.assert_close(layer_norm_fn(x, w, None, residual), expected_y, rtol=1e-4, atol=1e-5)
    y, r = layer_norm_fn(x, w, None, residual, prenorm=True, residual_out=residual)
    assert r is residual and torch.equal(y, expected_y) and torch.equal(r, expected_r)


def test_no_rows(device, split):
    split(20000)
    x, w = leaf(0, 20000, device=device), leaf(20000, device=device)
    layer_norm_fn(x, w, None).sum().backward()
    assert x.grad.shape == (0, 20000) and torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("bits", [0x7FC00000, -1], ids=["usual", "all-ones"])
def test_rows_of_nan_end_and_stay_among_themselves(bits, rms, device, split):
    """All ones is what the board holds where no sum has been written yet."""
    n = 20000
    split(n)
    x = torch.randn(70, n, device=device)
    x[3] = torch.tensor(bits, device=device, dtype=torch.int32).view(FP32)
    x.requires_grad_()
    y = layer_norm_fn(x, None, None, is_rms_norm=rms)
    dy = torch.randn_like(y)
    dy[5] = torch.tensor(bits, device=device, dtype=torch.int32).view(FP32)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert y.isnan().all(1).nonzero().tolist() == [[3]] and y.isnan().any(1).sum() == 1
    assert dx.isnan().all(1).nonzero().tolist() == [[3], [5]] and dx.isnan().any(1).sum() == 2
