"""The operators as PyTorch's dispatcher knows them: schemas made from the records, shapes without data, kernels.

They take tensors that `functional` has checked and choose no defaults. Opaque to torch.compile, so that eager and compiled run
the same kernels on the same arguments and give the same bits.

`norm` is what the public functions call. It has the gradients, and passes on to `norm_forward` and `norm_backward`, which
compiled graphs then hold. `norm_forward_out` writes into buffers, for inference.

Every value that an operator returns costs the host time, so what was not asked for is not returned.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor, library
from torch.autograd import forward_ad

from .backend import launches
from .records import BackwardInputs, BackwardOptions, Gradients, Inputs, Options, Outputs, empty_gradients, empty_outputs

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
        if has_tangents() and any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in flat):
            return with_gradients(*flat)  # which has no formula for them, and raises
        return below_autograd(below, *flat)

    LIBRARY.impl(op._schema.name.split("::")[1], autograd, "Autograd")


def below_autograd(op: torch._ops.OpOverload, *flat: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*flat)


def has_tangents() -> bool:
    """Whether forward-mode differentiation is on; the norm has no formula for it, and autograd must be there to say so."""
    return forward_ad._current_level >= 0


def list_operator(name: str, record: type, options: type, kernel: Callable, fake: Callable) -> torch._ops.OpOverload:
    """An operator on records, flattened, that returns those tensors that were asked for."""

    def run(function, *flat):
        return present(function(*records(record, options, flat)))

    op = operator(name, f"({arguments(record, options)}) -> Tensor[]", partial(run, kernel), partial(run, fake))
    library.register_vmap(op, partial(_one_by_one, op), lib=LIBRARY)
    return op


def records(record: type, options: type, flat: tuple) -> tuple[Any, Any]:
    """Both, of the values of their fields."""
    count = len(record._fields)  # type: ignore[attr-defined]
    return record(*flat[:count]), options(*[tuple(v) if isinstance(v, list) else v for v in flat[count:]])  # lists have no hash


def _one_by_one(op, info, in_dims, *flat):
    """vmap: a call for each sample. PyTorch does that by itself for operators that return no lists."""
    samples = [
        op(*[value if dim is None else value.select(dim, i) for value, dim in zip(flat, in_dims, strict=True)])
        for i in range(info.batch_size)
    ]
    outputs = [torch.stack(tensors) for tensors in zip(*samples, strict=True)]
    return outputs, [0] * len(outputs)


_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", int: "int", bool: "bool",
    torch.dtype: "ScalarType", torch.dtype | None: "ScalarType?", tuple[bool, ...]: "bool[]",
}  # fmt: skip


def arguments(record: type, options: type) -> str:
    """The fields of both, as a schema names them."""
    fields = [*get_type_hints(record).items(), *get_type_hints(options).items()]
    return ", ".join(f"{_SCHEMA_TYPES[t]} {name}" for name, t in fields)


def present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


# Two operators that do the same: one that has autograd code in Python goes through the dispatcher twice at each call, whether
# or not there is anything to differentiate, and a compiled graph, which is below autograd, needs none.
norm, norm_forward = (
    list_operator(name, Inputs, Options, lambda *records: launches().forward(*records), empty_outputs)
    for name in ("norm", "norm_forward")
)
norm_backward = list_operator(
    "norm_backward", BackwardInputs, BackwardOptions, lambda *records: launches().backward(*records), empty_gradients
)


def _norm_forward_out(y, r, *flat):
    """Returns y1, mask, mask1: empty tensors where not asked for, because operators that write to arguments return no lists."""
    return _no_none(launches().forward(*records(Inputs, Options, flat), y, r))


def _norm_forward_out_fake(y, r, *flat):
    return _no_none(empty_outputs(*records(Inputs, Options, flat), y, r))


def _no_none(outputs: Outputs) -> tuple[Tensor, ...]:
    rest = (outputs.y1, outputs.mask, outputs.mask1)
    return tuple(outputs.y.new_empty(0, dtype=torch.float32) if t is None else t for t in rest)


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
    lambda *arguments: launches().dropout(*arguments),
    lambda x, seed, p, stream: x.new_empty(x.shape),
)
dropout_mask = operator(
    "dropout_mask",
    "(Tensor seed, SymInt rows, SymInt cols, float p, SymInt stream) -> Tensor",
    lambda *arguments: launches().dropout_mask(*arguments),
    lambda seed, rows, cols, p, stream: seed.new_empty((rows, cols), dtype=torch.bool),
)


def norm_of(inputs: Inputs, options: Options) -> Outputs:
    return _outputs(norm(*inputs, *options), inputs, options)


def norm_below_autograd(inputs: Inputs, options: Options) -> Outputs:
    return _outputs(below_autograd(norm_forward, *inputs, *options), inputs, options)


def norm_into(inputs: Inputs, options: Options, y: Tensor | None, r: Tensor | None) -> Outputs:
    x = inputs.x
    if y is None:
        y = x.new_empty(x.shape, dtype=options.out_dtype)
    if r is None and options.store_residual:
        r = x.new_empty(x.shape, dtype=options.residual_dtype)
    y1, mask, mask1 = norm_forward_out(y, r, *inputs, *options)
    return Outputs(y, r, y1, mask, mask1)


def norm_backward_of(inputs: BackwardInputs, options: BackwardOptions) -> Gradients:
    there = (
        options.dz_dtype is not None,
        options.dx_dtype is not None,
        options.dx1_dtype is not None,
        inputs.x is not None,
        inputs.x1 is not None,
        True in options.wanted,
    )
    return Gradients(*_in_places(there, norm_backward(*inputs, *options)))


def _outputs(tensors: list[Tensor], inputs: Inputs, options: Options) -> Outputs:
    there = (
        True,
        options.store_residual,
        inputs.weight1 is not None or inputs.bias1 is not None,
        options.return_mask,
        options.return_mask and inputs.x1 is not None,
        options.store_stats,
    )
    return Outputs(*_in_places(there, tensors))


def _in_places(there: tuple[bool, ...], tensors: list[Tensor]) -> list[Any]:
    """The tensors that an operator returned, with None in place of those that were not asked for."""
    given = iter(tensors)
    return [next(given) if is_there else None for is_there in there]
