"""What is compiled and started: few kernels, few variants, no spilled registers."""

from dataclasses import replace

import pytest
import torch

from ops import launch, layer_norm_fn, tiling

from .cases import BF16, FP32, Case, describe, inputs, leaf, ours

KERNELS = ("norm_forward_kernel", "norm_backward_kernel", "finish_weight_gradients_kernel")


def test_nothing_is_autotuned_and_a_call_is_one_kernel_forward_and_two_backward(device, first_launches):
    """Trap: autotuning that re-runs a kernel on aliased buffers, retunes for every M, or dies inside graph capture."""
    for recorder in (getattr(launch, name) for name in KERNELS):
        assert type(recorder.kernel).__name__ in ("JITFunction", "InterpretedFunction")
    x, w = leaf(4, 32, device=device), leaf(32, device=device)
    y, r = layer_norm_fn(x, w, w, x, dropout_p=0.1, prenorm=True)
    assert [name for name, _ in first_launches] == ["norm_forward_kernel"]
    (y.sum() + r.sum()).backward()
    assert [name for name, _ in first_launches] == list(KERNELS)


def started_on_gpu(fn) -> tuple[object, list[str]]:
    """fn's result, and the names of the kernels, copies and fills that it put on the GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        result = fn()
        torch.cuda.synchronize()
    return result, [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("n", [768, 4096, 65536])
def test_the_gpu_runs_one_kernel_forward_two_backward_and_a_fill_for_each_pass_over_split_rows(
    n, dropout_p, device, tiles_used
):
    shapes = ((64, n), (64, n), (n,), (n,))
    x, residual, w, b = (leaf(*shape, device=device, dtype=BF16) for shape in shapes)
    seed, g = torch.tensor([1], device=device), torch.randn(64, n, device=device, dtype=BF16)

    def forward():
        return layer_norm_fn(x, w, b, residual, prenorm=True, dropout_p=dropout_p, seed=seed)

    def backward():
        return torch.autograd.grad(outputs, (x, residual, w, b), (g, g))

    outputs = forward()
    backward()  # compiled, and the allocator's memory is there
    outputs, started = started_on_gpu(forward)
    assert [name for name in started if name in KERNELS] == ["norm_forward_kernel"]
    assert len(started) == 1 + (tiles_used["forward"].slices > 1), started
    _, started = started_on_gpu(backward)
    assert [name for name in started if name in KERNELS] == ["norm_backward_kernel", "finish_weight_gradients_kernel"]
    assert len(started) == 2 + (tiles_used["backward"].slices > 1), started


def entries() -> dict[Case, set[str]]:
    """By the case that an entry was measured with, the kernels that have one for it.

    At that width others have tiles from between entries, and a few of those spill.
    """
    found: dict[Case, set[str]] = {}
    lines = [(*key, width, BF16) for key, of_key in tiling.TABLE.items() for width, _ in of_key]
    lines += [("forward", *key, FP32) for key in tiling.FP32_WEIGHTS]
    for direction, norm, work, vector, width, weight in lines:
        residual = None if work == "norm" else BF16 if vector == 8 else FP32
        case = Case(rms=norm == "rms", bias=norm == "ln", residual=residual, prenorm=residual is not None, weight=weight, m=4)
        measured = replace(case, n=width, dropout_p=0.1 if work == "dropout" else 0.0)
        found.setdefault(measured, set()).add(f"norm_{direction}_kernel")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "kernels"), entries().items(), ids=map(describe, entries()))
def test_no_tile_of_the_table_spills_registers(case, kernels, device, first_launches):
    ours(inputs(case, device), case)
    assert {name for name, _ in first_launches} == set(KERNELS)
    spilled = {name: compiled.n_spills for name, compiled in first_launches if name in {*kernels, KERNELS[-1]}}
    assert spilled == dict.fromkeys(spilled, 0)


def variants() -> list[int]:
    """How many versions of each kernel Triton holds."""
    return [sum(len(caches[0]) for caches in getattr(launch, name).device_caches.values()) for name in KERNELS]


def step(m: int, n: int, device: torch.device, seed: torch.Tensor, dropout_p: float = 0.1) -> None:
    x, w = leaf(m, n, device=device), leaf(n, device=device)
    layer_norm_fn(x, w, w, x, dropout_p=dropout_p, seed=seed).backward(torch.ones(m, n, device=device))


@pytest.fixture
def nothing_compiled():
    for name in KERNELS:
        getattr(launch, name).device_caches.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [512, 768, 1600, 4096, 65536])
def test_a_new_batch_size_dropout_probability_or_seed_compiles_nothing(n, device, nothing_compiled, tiles_used):
    seeds = torch.arange(4, device=device).unbind()
    for m in (64, 1, 2, 16, 31, 1000, 4096):
        step(m, n, device, seeds[m % 4], 0.1 + 0.4 * (m % 2))
        assert variants() == [1, 1, 1], m
    asked = n == 1600 and launch.device_facts(device).since_sm_90
    assert not asked or tiles_used["forward"].prefetch_ahead, "of 4096 rows later programs' are asked for, of fewer none"


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(800, 864, 1008), (1200, 1216, 1264), (4048, 4064), (20000, 20400)], ids=str)
def test_a_new_width_that_takes_the_same_tile_compiles_nothing(widths, device, nothing_compiled, tiles_used):
    """None of them fills its tile; all are multiples of 16, and others have a variant for what divides them."""
    tiles, seed = [], torch.tensor([1], device=device)
    for n in widths:
        step(64, n, device, seed)
        tiles.append(dict(tiles_used))
    assert tiles == tiles[:1] * len(widths)
    assert variants() == [1, 1, 1]
