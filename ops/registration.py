"""The operators as PyTorch's dispatcher knows them: schemas made from the records, shapes without data, kernels.

They take tensors that `functional` has checked and choose no defaults. Opaque to torch.compile, so that eager and compiled run
the same kernels on the same arguments and give the same bits.

`norm` is what the public functions call. It has the gradients, and passes on to `norm_forward` and `norm_backward`, which
compiled graphs then hold. `norm_forward_out` writes into buffers, for inference.

On small models a compiled graph waits for the host, which calls an operator at each norm. So calls are made cheap: of the
options all but the floats are one string, and what was not asked for is not returned.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor, library
from torch.autograd.forward_ad import unpack_dual

from . import direct
from .records import BackwardInputs, BackwardOptions, Gradients, Inputs, Options, Outputs, packed, unpacked

# Derived from the package's name, so that a copy of this folder in another tree registers operators of its own.
NAMESPACE = "prenorm_" + __package__.replace(".", "_")
try:
    LIBRARY = library.Library(NAMESPACE, "DEF")
except RuntimeError as error:
    raise ImportError(
        f"{__package__}: this process has operators called {NAMESPACE} already, from another import of this package or from a "
        "copy whose name differs in dots and underscores only. Import it once, or call the copy something else; after a "
        "reload, restart the process."
    ) from error


def operator(name: str, schema: str, kernel: Callable, fake: Callable) -> torch._ops.OpOverload:
    """Registers an operator that changes none of its arguments.

    The low-level registration, because a call through custom_op costs the host 170 µs more with 25 arguments
    (H200 machine, torch 2.11, forward with gradients: 239 µs).
    """
    LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def register_autograd(op: torch._ops.OpOverload, below: torch._ops.OpOverload, with_gradients: Callable) -> None:
    """Routes calls of `op` that need gradients through `with_gradients`; the others go on to `below`."""

    def autograd(*flat):
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in flat):
            return with_gradients(*flat)
        if direct.has_tangents() and any(isinstance(t, Tensor) and unpack_dual(t).tangent is not None for t in flat):
            return with_gradients(*flat)  # which has no formula for them, and raises
        return below_autograd(below, *flat)

    LIBRARY.impl(op._schema.name.split("::")[1], autograd, "Autograd")


def below_autograd(op: torch._ops.OpOverload, *flat: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*flat)


def list_operator(name: str, record: type, options: type, kernel: Callable, fake: Callable) -> torch._ops.OpOverload:
    """An operator on records, flattened, that returns those tensors that were asked for."""
    op = operator(name, f"({arguments(record, options)}) -> Tensor[]", kernel, fake)
    library.register_vmap(op, partial(_one_by_one, op), lib=LIBRARY)
    return op


def _one_by_one(op, info, in_dims, *flat):
    """vmap: a call for each sample. PyTorch does that by itself for operators that return no lists."""
    samples = [
        op(*[value if dim is None else value.select(dim, i) for value, dim in zip(flat, in_dims, strict=True)])
        for i in range(info.batch_size)
    ]
    outputs = [torch.stack(tensors) for tensors in zip(*samples, strict=True)]
    return outputs, [0] * len(outputs)


_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float"}


def arguments(record: type, options: type) -> str:
    """The tensors of the record and the options as `packed`, as a schema names them."""
    fields = [*get_type_hints(record).items(), *get_type_hints(options).items()]
    return ", ".join([*(f"{_SCHEMA_TYPES[t]} {name}" for name, t in fields if t in _SCHEMA_TYPES), "str options"])


def records(record: type, options: type, flat: tuple) -> tuple[Any, Any]:
    n = len(record._fields)  # type: ignore[attr-defined]
    return record(*flat[:n]), unpacked(options, *flat[n:])


def present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


def _norm_forward(*flat):
    return present(direct.norm_forward(*records(Inputs, Options, flat)))


def _norm_forward_fake(*flat):
    return present(direct.empty_outputs(*records(Inputs, Options, flat)))


# Two operators that do the same: one that has autograd code in Python goes through the dispatcher twice at each call, whether
# or not there is anything to differentiate, and a compiled graph, which is below autograd, needs none.
norm, norm_forward = (
    list_operator(name, Inputs, Options, _norm_forward, _norm_forward_fake) for name in ("norm", "norm_forward")
)


def _norm_backward(*flat):
    return present(direct.norm_backward(*records(BackwardInputs, BackwardOptions, flat)))


def _norm_backward_fake(*flat):
    return present(direct.empty_gradients(*records(BackwardInputs, BackwardOptions, flat)))


norm_backward = list_operator("norm_backward", BackwardInputs, BackwardOptions, _norm_backward, _norm_backward_fake)


def _norm_forward_out(y, r, *flat):
    """Returns y1, mask, mask1: empty tensors where not asked for, because operators that write to arguments return no lists."""
    inputs, options = records(Inputs, Options, flat)
    return _no_none(direct.norm_forward_out(inputs, y, r, options), inputs.x)


def _norm_forward_out_fake(y, r, *flat):
    inputs, options = records(Inputs, Options, flat)
    return _no_none(direct.empty_outputs(inputs, options, y), inputs.x)


def _no_none(outputs: Outputs, like: Tensor) -> tuple[Tensor, ...]:
    rest = (outputs.y1, outputs.mask, outputs.mask1)
    return tuple(like.new_empty(0, dtype=torch.float32) if t is None else t for t in rest)


# By custom_op, which also tells autograd that the buffers have changed.
norm_forward_out = library.custom_op(
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


def forward(inputs: Inputs, options: Options) -> Outputs:
    """`norm`, of records."""
    return _outputs(norm(*inputs, *packed(options)), inputs, options)


def forward_below_autograd(inputs: Inputs, options: Options) -> Outputs:
    return _outputs(below_autograd(norm_forward, *inputs, *packed(options)), inputs, options)


def forward_out(inputs: Inputs, y: Tensor, r: Tensor | None, options: Options) -> Outputs:
    y1, mask, mask1 = norm_forward_out(y, r, *inputs, *packed(options))
    return Outputs(y, r, y1, mask, mask1)


def backward(inputs: BackwardInputs, options: BackwardOptions) -> Gradients:
    there = (
        options.dz_dtype is not None,
        options.dx_dtype is not None,
        options.dx1_dtype is not None,
        inputs.x is not None,
        inputs.x1 is not None,
        True in options.wanted,
    )
    return _by_name(Gradients, there, norm_backward(*inputs, *packed(options)))


def _outputs(tensors: list[Tensor], inputs: Inputs, options: Options) -> Outputs:
    there = (
        True,
        options.store_residual,
        inputs.weight1 is not None or inputs.bias1 is not None,
        options.return_mask,
        options.return_mask and inputs.x1 is not None,
        options.store_stats,
    )
    return _by_name(Outputs, there, tensors)


def _by_name(record: type, there: tuple[bool, ...], tensors: list[Tensor]) -> Any:
    """What an operator returned as a record: `there` says which of its fields the list holds."""
    given = iter(tensors)
    return record(*[next(given) if is_there else None for is_there in there])
