"""Where tests run: compiled kernels on a GPU; without one, the kernels of tests/ops in Triton's interpreter on the CPU and
everything else on the PyTorch reference, which is what a machine without a GPU uses."""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    # Triton reads this when a kernel is defined, so it is set before anything imports them.
    os.environ["TRITON_INTERPRET"] = "1"

from ops import backend  # noqa: E402


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def reference_on_cpu(request, monkeypatch):
    """Outside tests/ops, CPU tensors take the PyTorch reference, here and in the programs that a test starts."""
    if "tests/ops/" not in str(request.path.as_posix()):
        monkeypatch.setattr(backend, "INTERPRET", False)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
