"""What is compiled and started: few kernels, few variants."""

from types import SimpleNamespace

import pytest
import torch

from ops import kit, layer_norm_fn, norm_fn
from ops.tiling import H200

from .cases import BF16, FP32, KERNELS, leaves

DEVICES = {
    "H200": H200,
    "H100": H200._replace(bandwidth=3.35e12),
    "A100": H200._replace(multiprocessors=108, shared_memory=166912, since_sm_90=False),
    "MI300": H200._replace(multiprocessors=304, shared_memory=65536, warp_size=64, cooperative=False, since_sm_90=False),
}


@pytest.mark.parametrize("gpu", DEVICES)
@pytest.mark.parametrize("n", [768, 16384, 65536])
def test_only_a_gpu_that_knows_them_is_asked_for_special_launches(n, gpu, device, monkeypatch):
    facts = DEVICES[gpu]
    monkeypatch.setattr(kit, "device_facts", lambda device: facts)
    started = []
    monkeypatch.setattr(kit.Launcher, "__call__", lambda self, *arguments: started.append((self.options, arguments)))
    x, w = (torch.ones(shape, dtype=BF16, device=device, requires_grad=True) for shape in ((64, n), (n,)))
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


class Compiled:
    """What Triton returns of a launch: starts the same variant again."""

    function = packed_metadata = None

    def __init__(self, started: list):
        self.started = started

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, pointers, *rest):
        self.started.append(("again", (x, y), pointers, rest))


class Kernel:
    def __init__(self, started: list):
        self.started = started

    def __getitem__(self, grid):
        def start(record, *rest, **options):
            self.started.append(("by Triton", grid, tuple([t if t is None else t.data_ptr() for t in record]), rest))
            return Compiled(self.started)

        return start


@pytest.fixture
def started(monkeypatch):
    """Launches as a GPU sees them: how, grid, pointers in the places of the record, the other arguments."""
    found: list = []
    hooks = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
    found_there = SimpleNamespace(CompiledKernel=Compiled, knobs=SimpleNamespace(runtime=hooks))
    monkeypatch.setattr(kit, "internals", lambda: found_there)
    make = kit.Launcher.__init__

    def made(self, kernel, *arguments, **options):
        make(self, Kernel(found), *arguments, **options)
        self.current_stream = lambda index: 0

    monkeypatch.setattr(kit.Launcher, "__init__", made)
    return found


CALLS = {
    "all of a parallel block": lambda t: (
        "layernorm", t("x"), t("w"), t("b"),
        {"residual": t("res"), "x1": t("x1"), "weight1": t("w1"), "rowscale": t("rows"), "dropout_p": 0.1, "seed": t("seed")},
    ),
    "sandwich": lambda t: (
        "rmsnorm", t("x"), t("w"), None, {"residual": t("res"), "branch_norm": "rmsnorm", "branch_weight": t("w1")},
    ),
    "learned scalars": lambda t: ("dyt", t("x"), t("w"), t("b"), {"residual": t("res"), "scalars": t("alpha")}),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_that_is_started_again_gets_what_triton_gave_it_first(name, device, started):
    if device.type != "cpu":
        pytest.skip("plays the GPU")
    shapes = {"x": (3, 5, 64), "res": (3, 5, 64), "x1": (3, 5, 64), "rows": (15,), "alpha": (1,), "seed": (1,)}
    tensors: dict = {}

    def tensor(key):
        value = torch.ones(shapes.get(key, (64,)), dtype=torch.int64 if key == "seed" else FP32)
        return tensors.setdefault(key, value.requires_grad_(key != "seed"))

    norm, x, w, b, options = CALLS[name](tensor)
    runs = []
    for _ in range(2):
        started.clear()
        outputs = norm_fn(norm, x, w, b, prenorm=True, **options)
        outputs = [t for t in outputs if t.requires_grad]
        wanted = [t for t in tensors.values() if t.requires_grad]
        torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True)
        runs.append(list(started))
    of = {t.data_ptr(): key for key, t in tensors.items()}
    assert len(runs[0]) == len(runs[1]) >= 2
    for first, again in zip(*runs, strict=True):
        assert (first[0], again[0]) == ("by Triton", "again") and first[1] == again[1] and len(first[3]) == len(again[3])
        # those of outputs are allocated anew
        places = [[p and of.get(p, "made") for p in pointers] for _, _, pointers, _ in (first, again)]
        assert places[0] == places[1]
    assert "x" in [of.get(pointer) for pointer in runs[1][0][2]]


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
