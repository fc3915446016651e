"""The corpus of these tests, which take one thread each."""

import pytest
import torch

from tests.runs import corpus


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def one_thread():
    """Threads cost more than they give at these sizes, most of all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
