"""What is compiled and started: few kernels, few variants."""

import pytest
import torch

from ops import launch, layer_norm_fn
from ops.tiling import H200

from .cases import BF16, KERNELS, leaves

DEVICES = {
    "H200": H200,
    "H100": H200._replace(bandwidth=3.35e12),
    "A100": H200._replace(multiprocessors=108, shared_memory=166912, since_sm_90=False),
    "MI300": H200._replace(multiprocessors=304, shared_memory=65536, warp_size=64, cooperative=False, since_sm_90=False),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [768, 16384, 65536])
def test_only_a_gpu_that_knows_them_is_asked_for_special_launches(n, device, monkeypatch):
    facts = DEVICES[device]
    monkeypatch.setattr(launch, "device_facts", lambda device: facts)
    started = []
    monkeypatch.setattr(launch.Launcher, "__call__", lambda self, *arguments: started.append((self.options, arguments)))
    x, w = torch.randn(64, n, dtype=BF16, requires_grad=True), torch.ones(n, dtype=BF16, requires_grad=True)
    layer_norm_fn(x, w, None).backward(torch.ones_like(x))
    assert len(started) == 3  # forward, backward, the sum of weight gradients
    for options, _ in started:
        cooperative = options.get("launch_cooperative_grid", False)
        assert options.get("launch_pdl", False) == (facts.since_sm_90 and not cooperative)
        assert facts.cooperative or not cooperative
    for options, (*_, variant) in started[:2]:
        assert bool(variant.EARLY_START) == options.get("launch_pdl", False)
        assert facts.since_sm_90 or not variant.PREFETCH
    assert (started[1][1][-1].SLICES > 1) == started[1][0].get("launch_cooperative_grid", False)


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
    x, residual, w, b = leaves(device, (64, n), (64, n), (n,), (n,), dtype=BF16)
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
