"""Where tests run: compiled kernels on a GPU; without one, the kernels of tests/ops in Triton's interpreter on the CPU and
everything else on the PyTorch reference, which is what a machine without a GPU uses."""

import gc
import importlib
import os
import pkgutil
import signal

# One thread a test, and a rank, and a program that a test starts: more cost more than they give at these sizes, most of all
# beside other tests; and sums have one order. OpenMP reads this when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    # Triton reads this when a kernel is defined, so it is set before anything imports them.
    os.environ["TRITON_INTERPRET"] = "1"

from ops import kernels  # noqa: E402

INTERPRET = kernels.INTERPRET
if INTERPRET:
    for module in pkgutil.iter_modules(kernels.__path__, "ops.kernels."):  # defines them all, now for the interpreter
        importlib.import_module(module.name)
    from tests import interpreter

    interpreter.quicken()

# A shell's background jobs, and all that they start, ignore Ctrl-C; what nohup starts ignores the end of the terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def signal_handlers():
    """Those of before: what a signal has stopped keeps its own to the end of the process, which is no test's."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def imported_is_no_garbage():
    """Timers collect garbage before every turn, which takes the longer the more is imported."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before `-m gpu` chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if GPU and {"device", "kernel"} & {*item.fixturenames}:  # where kernels run: on the GPU that is here
            item.add_marker("gpu")
        elif item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Outside tests/ops, CPU tensors take the PyTorch reference, here and in the programs that a test starts; also for the
    fixtures of a whole module, which come before one that does this for a single test."""
    kernels.INTERPRET = INTERPRET and "tests/ops/" in item.path.as_posix()
    if kernels.INTERPRET:
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, in which programs run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_wandb(tmp_path, monkeypatch):
    """W&B without variables or a key, and with a record of the environment that is of this test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    import wandb

    wandb.teardown()  # it reads its variables once
    yield
    wandb.teardown()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> list[str]:
    """Overrides for a corpus of 20 kB, and a model that learns it on a CPU in less than a second."""
    from tests.runs import corpus  # here, as tests/ops needs nothing of a run

    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def deterministic():
    """The same bits each time on a GPU too."""
    from training.precision import set_deterministic

    set_deterministic(True)
    yield
    set_deterministic(False)


@pytest.fixture
def ablations(monkeypatch):
    """Each ablation that was written to disk."""
    from copy import deepcopy

    from ablation import records

    written, save = [], records.save
    monkeypatch.setattr(records, "save", lambda ablation, folder: written.append(deepcopy(ablation)) or save(ablation, folder))
    return written
