"""Runs that end before their time: dead in a step, or reached by a signal in one."""

import signal
from contextlib import contextmanager

import pytest

import train
from tests.runs import train_here

AUTO = ["resume=auto", "logging.every=1", "checkpoint.every=6"]


class Died(BaseException):
    """Stands for the end of a process, which writes nothing more."""


@contextmanager
def in_step(number, act):
    """Within the block `act(state)` happens in the middle of step `number`, counted from 1, before it changes anything."""
    original = train.training_step

    def step(forward, state, batch, index, *rest):
        if index == number - 1:
            act(state)
        return original(forward, state, batch, index, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "training_step", step)
        yield


def die(_):
    raise Died


def spoil(state):
    """A weight becomes NaN."""
    next(state.model.parameters()).data[0, 0] = float("nan")


def train_until(step, overrides, folder):
    """A run that dies in this step. Returns its folder."""
    with in_step(step, die), pytest.raises(Died):
        train_here(overrides, folder)
    return folder


def stop_with(number, step, overrides, folder):
    """A run that a signal reaches in this step. Returns its exit code."""
    with in_step(step, lambda _: signal.raise_signal(number)), pytest.raises(SystemExit) as stop:
        train_here(overrides, folder)
    return stop.value.code
