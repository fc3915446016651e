"""What is compiled and started: few kernels, few variants."""

import pytest
import torch

from ops import Norm, launch, layer_norm_fn
from ops.launch import Launcher
from ops.records import BackwardInputs, BackwardOptions, Inputs, Options
from ops.tiling import H200

from .cases import BF16, KERNELS, leaf

CPU = torch.device("cpu")
DEVICES = {
    "H200": H200,
    "H100": H200._replace(bandwidth=3.35e12),
    "A100": H200._replace(multiprocessors=108, shared_memory=166912, since_sm_90=False),
    "MI300": H200._replace(multiprocessors=304, shared_memory=65536, warp_size=64, cooperative=False, since_sm_90=False),
}


def test_the_kernel_for_aligned_pointers_is_kept_and_no_rows_start_nothing(kernel):
    start = Launcher(kernel, 7, CPU, ("numbers", "how"), num_warps=4, launch_pdl=False)
    even, odd, seed = torch.zeros(8), torch.zeros(9)[1:], torch.zeros(2, dtype=torch.int64)[1:]
    start((odd, None), seed)
    assert kernel.calls == [((7,), ((odd, None), seed, "numbers", "how"), {"num_warps": 4})] and start.compiled is None
    start((even, None), seed)
    assert len(kernel.calls) == 2 and start.compiled is kernel.compiled
    Launcher(kernel, 0, CPU, ())((torch.zeros(0),))  # no rows
    assert len(kernel.calls) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [768, 16384, 65536])
def test_only_a_gpu_that_knows_them_is_asked_for_special_launches(n, device, monkeypatch):
    facts = DEVICES[device]
    monkeypatch.setattr(launch, "device_facts", lambda device: facts)
    dtypes = [
        record(*[BF16 if name in ("x", "r", "dy", "weight") else None for name in record._fields])
        for record in (Inputs, BackwardInputs)
    ]
    dtypes[1] = dtypes[1]._replace(x=None)
    options = Options(1e-5, 0.0, Norm.layernorm, False, BF16, BF16, store_residual=False, store_stats=True, return_mask=False)
    gradients = BackwardOptions(0.0, Norm.layernorm, False, BF16, None, None, (True, False, False, False), BF16)
    forward = launch._forward_launcher(options, torch.Size((64, n)), CPU, dtypes[0], None)
    backward = launch._backward_launch(gradients, torch.Size((64, n)), CPU, dtypes[1], None)
    for launcher in (forward, backward.gradients, backward.finish):
        cooperative = launcher.options.get("launch_cooperative_grid", False)
        assert launcher.options.get("launch_pdl", False) == (facts.since_sm_90 and not cooperative)
        assert facts.cooperative or not cooperative
    for launcher in (forward, backward.gradients):
        how = launcher.rest[-1]
        assert bool(how.EARLY_START) == launcher.options.get("launch_pdl", False)
        assert facts.since_sm_90 or not how.PREFETCH
    assert (backward.gradients.rest[-1].SLICES > 1) == backward.gradients.options.get("launch_cooperative_grid", False)


def started_on_gpu(fn) -> tuple[object, list[str]]:
    """fn's result, and the names of the kernels, copies and fills that it put on the GPU."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        result = fn()
        torch.cuda.synchronize()
    return result, [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu
@pytest.mark.parametrize("n", [768, 4096, 65536])
def test_the_gpu_runs_one_kernel_forward_two_backward_and_a_fill_for_split_rows(n, device):
    x, residual, w, b = (leaf(*shape, device=device, dtype=BF16) for shape in ((64, n), (64, n), (n,), (n,)))
    seed, g = torch.tensor([1], device=device), torch.randn(64, n, device=device, dtype=BF16)

    def forward():
        return layer_norm_fn(x, w, b, residual, prenorm=True, dropout_p=0.1, seed=seed)

    def backward():
        return torch.autograd.grad(outputs, (x, residual, w, b), (g, g))

    outputs = forward()
    backward()  # compiled, and the allocator's memory is there
    outputs, started = started_on_gpu(forward)
    assert started == [KERNELS[0]]
    _, started = started_on_gpu(backward)
    assert [name for name in started if name in KERNELS] == list(KERNELS[1:]) and len(started) <= 3, started


@pytest.mark.gpu
@pytest.mark.parametrize("n", [512, 768, 1600, 2304, 4096, 65536])
def test_a_new_batch_size_dropout_probability_or_seed_compiles_nothing(n, device):
    """Trap: autotuning anew for every M; constants that depend on M."""
    kernels = [getattr(launch, name) for name in KERNELS]
    for kernel in kernels:
        kernel.device_caches.clear()
    for m in (64, 1, 2, 16, 31, 1000, 4096):
        x, w = leaf(m, n, device=device), leaf(n, device=device)
        y = layer_norm_fn(x, w, w, x, dropout_p=0.1 + 0.4 * (m % 2), seed=torch.tensor([m], device=device))
        y.backward(torch.ones(m, n, device=device))
        assert [sum(len(caches[0]) for caches in kernel.device_caches.values()) for kernel in kernels] == [1, 1, 1], m
