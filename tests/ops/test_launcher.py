"""Starting compiled kernels without Triton's launch code, with the compiler and the driver played by the test."""

import pytest
import torch

from ops import launcher
from ops.launcher import Launcher

CPU = torch.device("cpu")


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.runs = []

    def run(self, *arguments):
        self.runs.append(arguments)


class Parameter:
    def __init__(self, specialised=True):
        self.do_not_specialize, self.do_not_specialize_on_alignment = False, not specialised


class Kernel:
    """fn(p_x, p_y, p_seed, M, scale, FLAG, BLOCK)"""

    arg_names = ("p_x", "p_y", "p_seed", "M", "scale", "FLAG", "BLOCK")
    params = (Parameter(), Parameter(), Parameter(specialised=False))

    def __init__(self):
        self.compiled, self.calls = Compiled(), []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: (self.calls.append((grid, arguments, constants)), self.compiled)[1]


@pytest.fixture
def kernel(monkeypatch):
    class Driver:
        class active:
            @staticmethod
            def get_current_stream(index):
                return "stream"

    monkeypatch.setattr(launcher, "driver", Driver)
    monkeypatch.setattr(launcher, "CompiledKernel", Compiled)
    return Kernel()


def start(kernel, programs=7):
    return Launcher(kernel, programs, (5, 0.5), CPU, BLOCK=16, FLAG=True, num_warps=4)


def test_the_second_call_starts_what_the_first_compiled(kernel):
    launch = start(kernel)
    x, y, seed = torch.zeros(8), torch.zeros(8), torch.zeros(1, dtype=torch.int64)
    launch(x, None, seed)
    assert kernel.calls == [((7,), (x, None, seed, 5, 0.5), {"BLOCK": 16, "FLAG": True, "num_warps": 4})]
    launch(y, None, seed)
    assert len(kernel.calls) == 1
    # Arguments in the order of the kernel's signature, constexprs too, without launch options.
    assert kernel.compiled.runs == [
        (7, 1, 1, "stream", "function", "metadata", None, None, None, y.data_ptr(), None, seed.data_ptr(), 5, 0.5, True, 16)
    ]


def test_pointers_off_a_16_byte_boundary_take_tritons_launch(kernel):
    launch = start(kernel)
    even, odd, seeds = torch.zeros(8), torch.zeros(9)[1:], torch.zeros(2, dtype=torch.int64)
    launch(odd, None, seeds[0])  # compiled for any alignment: not to be kept
    launch(even, None, seeds[0])
    launch(odd, None, seeds[0])
    assert len(kernel.calls) == 3 and not kernel.compiled.runs
    launch(even, None, seeds[1])  # the kernel doesn't look at the seed's
    assert len(kernel.calls) == 3 and len(kernel.compiled.runs) == 1


def test_a_profiler_hears_of_every_launch(kernel, monkeypatch):
    launch, x = start(kernel), torch.zeros(8)
    launch(x, None, None)

    def hook(metadata):
        pass

    launcher.knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(x, None, None)
    finally:
        launcher.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(kernel.calls) == 2
    launch(x, None, None)
    assert len(kernel.calls) == 2
    monkeypatch.setattr(launcher.knobs.runtime, "launch_exit_hook", hook)
    launch(x, None, None)
    assert len(kernel.calls) == 3


def test_no_rows_start_nothing(kernel):
    start(kernel, programs=0)(torch.zeros(0), None, None)
    assert not kernel.calls


def test_what_the_interpreter_returns_is_not_kept(kernel):
    kernel.compiled = None
    launch = start(kernel)
    for _ in range(2):
        launch(torch.zeros(8), None, None)
    assert len(kernel.calls) == 2
