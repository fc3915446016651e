"""Providers as contenders: functions of inputs become the calls that are timed, checked once before."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import FORWARD, Case, Inputs, Setting
from benchmarks.checks import check_backward, check_forward
from benchmarks.providers import Function
from benchmarks.timing import Call, Contender


def contender(
    name: str, function: Function, case: Case, setting: Setting, direction: str, sets: Sequence[Inputs], overwrites_dy: bool
) -> Contender:
    """One direction of a provider's function on all sets of inputs.

    Forward runs with gradients on, as in training: what backward needs is stored.
    """
    if direction == FORWARD:

        def build() -> Sequence[Call]:
            check_forward(case, setting, sets[0], function(sets[0]))
            return [partial(function, inputs) for inputs in sets]

        return Contender(name, build)

    # A backward that overwrites dy would time the others on numbers that grow or vanish: it gets its own, fresh each turn.
    own: list[Tensor] = []

    def restore() -> None:
        for dy, inputs in zip(own, sets, strict=True):
            dy.copy_(inputs.dy)

    def build_backward() -> Sequence[Call]:
        own.extend(inputs.dy.clone() if overwrites_dy else inputs.dy for inputs in sets)
        calls: list[Call] = []
        for index, (inputs, dy) in enumerate(zip(sets, own, strict=True)):
            outputs = function(inputs)
            upstream = (dy, *inputs.upstream[1:])
            call = partial(torch.autograd.grad, outputs, inputs.leaves, upstream, retain_graph=True, allow_unused=True)
            if index == 0:
                factor = check_forward(case, setting, inputs, outputs)
                check_backward(case, setting, inputs, outputs, call(), factor)
            calls.append(call)
        return calls

    return Contender(name, build_backward, restore if overwrites_dy else None)
