"""Without a GPU, tests of adopted models run the PyTorch reference: what is around the kernels is tested, and the interpreter
takes long. A test asks for the kernels by the argument `kernel`."""

import pytest

from ops import kernels, kit


@pytest.fixture(autouse=True)
def reference_on_the_cpu(monkeypatch, request):
    if "kernel" not in request.fixturenames:
        monkeypatch.setattr(kernels, "INTERPRET", False)
        kit.forget()
    yield
    kit.forget()


@pytest.fixture
def kernel() -> None:
    pass
