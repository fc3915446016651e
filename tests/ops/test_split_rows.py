"""Rows of backward that several programs share and wait for, on a GPU. Their arithmetic: `test_accuracy`, `test_rows`."""

import pytest
import torch

from ops import Norm, kit, norm_fn
from ops.tiling import Tile

from .cases import BF16, FP32, Case, assert_as_accurate_as_pytorch, covering, equal, leaves

pytestmark = pytest.mark.gpu

LAPS = covering(
    shape=[(4, 2048, 20000), (8, 2048, 65536), (4, 4096, 16384), (1, 1024, 16384), (4, 512, 16000)],
    residual=[None, BF16, FP32],
    norm=list(Norm),
    dropout_p=[0.0, 0.1],
    stages=[1, 3],
    m=[1500, 1, 37],
)
STEPS = covering(n=[64, 768, 2304, 8192, 16384, 40000, 65536], norm=list(Norm), dtype=[BF16, FP32])


def name_of(chosen: dict) -> str:
    return "-".join(map(str, chosen.values())).replace("torch.", "")


def split(n, block_n=2048, warps=4, stages=3):
    return Tile(1, block_n, warps, stages, programs_per_sm=2, slices=-(-n // block_n))


@pytest.fixture(autouse=True)
def cooperative(device):
    if device.type == "cuda" and not kit.device_facts(device).cooperative:
        pytest.skip("rows are not split on this GPU")


@pytest.mark.parametrize("chosen", LAPS, ids=name_of)
def test_a_board_written_over_many_times_is_as_accurate_as_pytorch(chosen, device, use_tile):
    """1500 rows, each with a scale and a mean of its own, are tens of turns on an H200, and the board has four."""
    warps, block_n, n = chosen.pop("shape")
    use_tile(split(n, block_n, warps, chosen.pop("stages")))
    assert_as_accurate_as_pytorch(Case(**chosen, uneven=True, n=n), device)


def gradient_step(n: int, device: torch.device, seed: torch.Tensor, dtype: torch.dtype = BF16, norm: Norm = Norm.layernorm):
    """A function that runs forward and backward on the same tensors each time."""
    x, residual, w, b = leaves(device, (300, n), (300, n), (n,), (n,), dtype=dtype)
    g = torch.randn(300, n, device=device).to(dtype)

    def step():
        y, r = norm_fn(norm, x, w, b, residual, dropout_p=0.1, prenorm=True, seed=seed)
        return (y, r, *torch.autograd.grad((y, r), (x, residual, w, b), (g, g)))

    return step


@pytest.mark.parametrize("chosen", STEPS, ids=name_of)
def test_twenty_runs_and_replays_of_a_graph_give_the_same_bits(chosen, device):
    seed = torch.tensor([5], device=device)
    step, graph = gradient_step(device=device, seed=seed, **chosen), torch.cuda.CUDAGraph()
    # All on one stream: autograd orders the gradient of a leaf after the stream on which the leaf was first used.
    with torch.cuda.stream(torch.cuda.Stream(device)):
        expected = step()
        assert all(equal(step(), expected) for _ in range(20))
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
            captured = step()
        for value in (5, 5, 5, 6, 7):  # another seed takes no new capture
            seed.fill_(value)
            for t in captured:
                t.detach().fill_(torch.nan)
            graph.replay()
            assert equal(captured, step()) and equal(captured, expected) == (value == 5)


def test_two_streams_at_once_finish_and_give_the_bits_of_one(device, use_tile):
    use_tile(split(40000))
    steps = [gradient_step(40000, device, torch.tensor([5], device=device)) for _ in range(2)]
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
