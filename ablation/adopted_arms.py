"""Arms of `adoption.check_parity`: somebody's model in higher precision, and with the sums of its norms in another order."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ablation.order import in_another_order
from ops.adopt.recognise import Formula, compute, may_be_a_norm, recognise


def norms_of(model: nn.Module) -> dict[str, Formula]:
    """The norms of a model by name, with their formula."""
    return {
        name: formula
        for name, module in model.named_modules()
        if may_be_a_norm(module) and isinstance(formula := recognise(module), Formula)
    }


def exact_copy(model: nn.Module, norms: Mapping[str, Formula], dtype: torch.dtype) -> nn.Module:
    """A copy in a wider dtype, whose norms, which may round to fp32 inside, are computed from their formula."""
    model = copy.deepcopy(model).to(dtype)
    for name, formula in norms.items():
        module = model.get_submodule(name)
        _patch(module, partial(_by_formula, formula, dict(module.named_parameters(recurse=False))))
    return model


def _by_formula(formula: Formula, parameters: Mapping[str, Tensor], own: Callable, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return own(*args, **kwargs)
    return compute(formula, parameters, args[0]).to(args[0].dtype)


def reordered_copy(model: nn.Module, norms: Mapping[str, Formula]) -> nn.Module:
    """A copy whose norms sum in another order."""
    model = copy.deepcopy(model)
    for name in norms:
        module = model.get_submodule(name)
        _patch(module, partial(_in_another_order, module))
    return model


def _in_another_order(module: nn.Module, own: Callable, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return own(*args, **kwargs)

    def norm(rows: Tensor, order: Tensor) -> Tensor:
        clone = object.__new__(type(module))
        clone.__dict__.update(module.__dict__)
        weights = {name: p if p is None else p.index_select(0, order) for name, p in module._parameters.items()}
        clone.__dict__["_parameters"] = weights
        return type(module).forward(clone, rows)

    return in_another_order(norm, args[0])


def _patch(module: nn.Module, forward: Callable) -> None:
    """Puts forward(the module's own forward, its arguments …) in its place."""
    module.forward = partial(forward, module.forward)
