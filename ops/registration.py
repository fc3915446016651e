"""The operators as torch.library knows them: schemas made from the records, shapes without data, kernels.

They take tensors that `functional` has checked and choose no defaults. Outputs that were not asked for are empty tensors,
because a schema can't return None. Opaque to torch.compile, so that eager and compiled run the same kernels on the same
arguments and give the same bits.

`norm_forward` and `norm_backward` allocate what they return; `norm_forward_out` writes into buffers, for inference.
"""

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from . import direct
from .records import BackwardInputs, BackwardOptions, Gradients, Inputs, Options, Outputs

# Derived from the package's name, so that a copy of this folder in another tree registers operators of its own.
NAMESPACE = "prenorm_" + __package__.replace(".", "_")
try:
    LIBRARY = torch.library.Library(NAMESPACE, "DEF")
except RuntimeError as error:
    raise ImportError(
        f"{__package__}: this process has operators called {NAMESPACE} already, from another import of this package or from a "
        "copy whose name differs in dots and underscores only. Import it once, or call the copy something else; after a "
        "reload, restart the process."
    ) from error

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
    tuple[bool, ...]: "bool[]",
    float: "float",
    bool: "bool",
}


def operator(name: str, schema: str, kernel: Callable, fake: Callable) -> torch._ops.OpOverload:
    """Registers an operator that changes none of its arguments.

    The low-level registration, because a call through torch.library.custom_op costs the host 170 µs more with this many
    arguments (H200 machine, torch 2.11, forward with gradients: 239 µs).
    """
    LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def register_autograd(op: torch._ops.OpOverload, with_gradients: Callable) -> None:
    """Routes calls that need gradients through `with_gradients`; the others go straight on."""

    def autograd(*flat):
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in flat):
            return with_gradients(*flat)
        if direct.has_tangents() and any(isinstance(t, Tensor) and unpack_dual(t).tangent is not None for t in flat):
            return with_gradients(*flat)  # which has no formula for them, and raises
        return below_autograd(op, *flat)

    LIBRARY.impl(op._schema.name.split("::")[1], autograd, "Autograd")


def below_autograd(op: torch._ops.OpOverload, *flat: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*flat)


def arguments(*records: type) -> str:
    """The fields of the records as a schema names them."""
    return ", ".join(f"{_SCHEMA_TYPES[t]} {name}" for record in records for name, t in get_type_hints(record).items())


def _norm_forward(*flat):
    inputs, options = forward_records(flat)
    return _no_none(direct.norm_forward(inputs, options), inputs.x)


def _norm_forward_fake(*flat):
    inputs, options = forward_records(flat)
    return _no_none(direct.empty_outputs(inputs, options), inputs.x)


norm_forward = operator(
    "norm_forward",
    f"({arguments(Inputs, Options)}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm_forward,
    _norm_forward_fake,
)


def _norm_backward(*flat):
    inputs, options = backward_records(flat)
    return _no_none(direct.norm_backward(inputs, options), inputs.r)


def _norm_backward_fake(*flat):
    inputs, options = backward_records(flat)
    return _no_none(direct.empty_gradients(inputs, options), inputs.r)


norm_backward = operator(
    "norm_backward",
    f"({arguments(BackwardInputs, BackwardOptions)}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm_backward,
    _norm_backward_fake,
)


def _norm_forward_out(*flat):
    """flat: y, r, then as norm_forward. Returns y1, mask, mask1."""
    y, r, *rest = flat
    inputs, options = forward_records(rest)
    _, y1, _, _, mask, mask1 = _no_none(direct.norm_forward_out(inputs, y, r, options), inputs.x)
    return y1, mask, mask1


def _norm_forward_out_fake(*flat):
    y, _, *rest = flat
    inputs, options = forward_records(rest)
    _, y1, _, _, mask, mask1 = _no_none(direct.empty_outputs(inputs, options, y), inputs.x)
    return y1, mask, mask1


# By custom_op, which also tells autograd that the buffers have changed.
norm_forward_out = torch.library.custom_op(
    f"{NAMESPACE}::norm_forward_out",
    _norm_forward_out,
    mutates_args=("y", "r"),
    schema=f"(Tensor(a!) y, Tensor(b!)? r, {arguments(Inputs, Options)}) -> (Tensor, Tensor, Tensor)",
)
norm_forward_out.register_fake(_norm_forward_out_fake)


dropout = operator(
    "dropout",
    "(Tensor x, Tensor seed, float p, SymInt stream) -> Tensor",
    direct.dropout,
    lambda x, seed, p, stream: x.new_empty(x.shape),
)
dropout_mask = operator(
    "dropout_mask",
    "(Tensor seed, SymInt rows, SymInt cols, float p, SymInt stream) -> Tensor",
    direct.dropout_mask,
    lambda seed, rows, cols, p, stream: seed.new_empty((rows, cols), dtype=torch.bool),
)


def forward_records(flat) -> tuple[Inputs, Options]:
    n = len(Inputs._fields)
    return Inputs(*flat[:n]), Options(*flat[n:])


def backward_records(flat) -> tuple[BackwardInputs, BackwardOptions]:
    n = len(BackwardInputs._fields)
    options = BackwardOptions(*flat[n:])
    return BackwardInputs(*flat[:n]), options._replace(wanted=tuple(options.wanted))


def _no_none(record: Outputs | Gradients, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0, dtype=torch.float32) if t is None else t for t in record)
