"""The operators as PyTorch's dispatcher knows them: schemas made from the records, shapes without data, kernels.

They take tensors that `functional` has checked and choose no defaults. Opaque to torch.compile, so that eager and compiled run
the same kernels on the same arguments and give the same bits.

`norm` is what the public functions call. It has the gradients, and passes on to `norm_forward` and `norm_backward`, which
compiled graphs then hold. `norm_forward_out` writes into buffers, for inference.

Every value that an operator returns costs the host time, so what was not asked for is not returned.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, library
from torch.autograd import forward_ad

from . import prepared
from .prepared import launches
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
    """Registers an operator that changes none of its arguments. custom_op takes 170 µs more a call (25 arguments, H200)."""
    LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def register_autograd(op: torch._ops.OpOverload, below: torch._ops.OpOverload, with_gradients: Callable) -> None:
    """Routes calls of `op` that need gradients through `with_gradients`; the others go on to `below`."""

    def autograd(first, *rest):
        tensors = [t for t in (first if isinstance(first, list) else (first, *rest)) if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return with_gradients(first, *rest)
        if has_tangents() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            return with_gradients(first, *rest)  # which has no formula for them, and raises
        return below_autograd(below, first, *rest)

    LIBRARY.impl(op._schema.name.split("::")[1], autograd, "Autograd")


def below_autograd(op: Callable, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments)


def has_tangents() -> bool:
    """Whether forward-mode differentiation is on; the norm has no formula for it, and autograd must be there to say so."""
    return forward_ad._current_level >= 0


def record_operator(name: str, record: Any, kernel: Callable, prepare: Callable, empty: Callable) -> torch._ops.OpOverload:
    """An operator on the tensors of a record that returns those that were asked for.

    (Tensor[] tensors, str how) -> Tensor[]: `how` names the fields and holds the options, because the dispatcher's price is by
    the argument, and the records have twenty-five. A call like an earlier one does without the dispatcher (see `prepared`).
    kernel, empty: of record and options; prepare: of both, makes a function of the tensors for calls like this one.
    """
    table = prepared.table()

    def run(tensors: list[Tensor], how: str) -> list[Tensor]:
        inputs, options = decode(record, tensors, how)
        outputs = present(kernel(inputs, options))
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):  # else autograd warns, at each call
            prepared.remember(table, (how, tensors[0].shape), lambda: prepare(inputs, options))
        return outputs

    def fake(tensors: list[Tensor], how: str) -> list[Tensor]:
        return present(empty(*decode(record, tensors, how)))

    op = operator(name, "(Tensor[] tensors, str how) -> Tensor[]", run, fake)
    library.register_vmap(op, partial(_one_by_one, op), lib=LIBRARY)
    prepared.put_before_dispatcher(op, table)
    return op


def encode(inputs: Inputs | BackwardInputs, options: Options | BackwardOptions) -> tuple[list[Tensor], str]:
    """The arguments of an operator. Written out, as Dynamo can't trace repr."""
    names = [name for name, t in zip(inputs._fields, inputs, strict=True) if t is not None]
    values = [f"{name}={value}" for name, value in zip(options._fields, options, strict=True)]
    return present(inputs), f"{' '.join(names)}: {type(options).__name__}({', '.join(values)})"


def decode(record: Any, tensors: Sequence[Tensor], how: str) -> tuple[Any, Any]:
    names, options = _decoded(how)
    return record(*map(dict(zip(names, tensors, strict=True)).get, record._fields)), options


@lru_cache(maxsize=1024)
def _decoded(how: str) -> tuple[list[str], Options | BackwardOptions]:
    names, _, options = how.partition(": ")
    return names.split(), eval(
        options, {"Options": Options, "BackwardOptions": BackwardOptions, "torch": torch, "inf": math.inf}
    )


def _one_by_one(op, info, in_dims, tensors, how):
    """vmap: a call for each sample. PyTorch does that by itself for operators that return no lists."""
    samples = [
        op([t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims[0], strict=True)], how)
        for i in range(info.batch_size)
    ]
    outputs = [torch.stack(same) for same in zip(*samples, strict=True)]
    return outputs, [0] * len(outputs)


def present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [t for t in tensors if t is not None]


# Two operators that do the same: one that has autograd code in Python goes through the dispatcher twice at each call, whether
# or not there is anything to differentiate, and a compiled graph, which is below autograd, needs none. The gradient of `norm`
# is registered at the end of autograd.py.
norm, norm_forward = (
    record_operator(name, Inputs, lambda *given: launches().forward(*given), prepared.forward, empty_outputs)
    for name in ("norm", "norm_forward")
)
norm_backward = record_operator(
    "norm_backward", BackwardInputs, lambda *given: launches().backward(*given), prepared.backward, empty_gradients
)


def _beside_buffers(outputs: Outputs) -> tuple[Tensor, ...]:
    """y1, mask, mask1: empty tensors where not asked for, because operators that write to arguments return no lists."""
    rest = (outputs.y1, outputs.mask, outputs.mask1)
    return tuple(outputs.y.new_empty(0, dtype=torch.float32) if t is None else t for t in rest)


# By custom_op, which also tells autograd that the buffers have changed.
norm_forward_out = library.custom_op(
    f"{NAMESPACE}::norm_forward_out",
    lambda y, r, tensors, how: _beside_buffers(launches().forward(*decode(Inputs, tensors, how), y, r)),
    mutates_args=("y", "r"),
    schema="(Tensor(a!) y, Tensor(b!)? r, Tensor[] tensors, str how) -> (Tensor, Tensor, Tensor)",
)
norm_forward_out.register_fake(lambda y, r, tensors, how: _beside_buffers(empty_outputs(*decode(Inputs, tensors, how), y, r)))


dropout = operator(
    "dropout",
    "(Tensor x, Tensor seed, float p, SymInt stream) -> Tensor",
    lambda x, *how: launches().dropout(x, torch.empty_like(x, memory_format=torch.contiguous_format), *how),
    lambda x, *how: x.new_empty(x.shape),
)
dropout_mask = operator(
    "dropout_mask",
    "(Tensor seed, SymInt rows, SymInt cols, float p, SymInt stream) -> Tensor",
    lambda seed, rows, cols, *how: launches().dropout(None, seed.new_empty((rows, cols), dtype=torch.bool), seed, *how),
    lambda seed, rows, cols, *how: seed.new_empty((rows, cols), dtype=torch.bool),
)


def norm_of(inputs: Inputs, options: Options) -> Outputs:
    return outputs_of(norm, inputs, options)


def outputs_of(op: Callable, inputs: Inputs, options: Options) -> Outputs:
    """op: `norm`, or `norm_forward` below autograd."""
    there = (
        True,
        options.store_residual,
        inputs.weight1 is not None or inputs.bias1 is not None,
        options.return_mask,
        options.return_mask and inputs.x1 is not None,
        options.store_stats,
    )
    return Outputs(*_in_places(there, op(*encode(inputs, options))))


def norm_into(inputs: Inputs, options: Options, y: Tensor | None, r: Tensor | None) -> Outputs:
    x = inputs.x
    if y is None:
        y = x.new_empty(x.shape, dtype=options.out_dtype)
    if r is None and options.store_residual:
        r = x.new_empty(x.shape, dtype=options.residual_dtype)
    y1, mask, mask1 = norm_forward_out(y, r, *encode(inputs, options))
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
    return Gradients(*_in_places(there, norm_backward(*encode(inputs, options))))


def _in_places(there: tuple[bool, ...], tensors: list[Tensor]) -> list[Any]:
    """The tensors that an operator returned, with None in place of those that were not asked for."""
    given = iter(tensors)
    return [next(given) if is_there else None for is_there in there]
