"""Timers collect garbage before every turn, which takes the longer the more is imported."""

import gc

import pytest


@pytest.fixture(autouse=True)
def imported_is_no_garbage():
    gc.freeze()
    yield
    gc.unfreeze()
