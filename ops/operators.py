"""The operators as PyTorch's dispatcher knows them: records as their arguments, shapes without data, kernels.

They take tensors that `functional` has checked and choose no defaults. Opaque to torch.compile, so that eager and compiled run
the same kernels on the same arguments and give the same bits.

`norm` is what the public functions call. It has the gradients, and passes on to `norm_forward` and `norm_backward`, which
compiled graphs then hold. Eager calls that nobody watches start the kernels without the dispatcher, see `functional`.

Every value that an operator returns costs the host time, so what was not asked for is not returned.
"""

from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, library
from torch.autograd import forward_ad

from .records import (
    BackwardInputs,
    BackwardOptions,
    Gradients,
    Inputs,
    Options,
    dtypes_of,
    empty_gradients,
    empty_outputs,
    fill,
    outputs_of,
    shapes_of,
)
from .reference import Norm
from .torch_state import below_autograd, has_tangents

from .kit import LIBRARY, NAMESPACE

@cache
def launches(name: str = "launch") -> ModuleType:
    """A module that starts kernels, imported when the first one starts: it needs Triton, which may be missing without a GPU."""
    return import_module(f".{name}", __package__)


def operator(name: str, schema: str, kernel: Callable, fake: Callable) -> Any:
    """Registers an operator that changes none of its arguments. custom_op takes 170 µs more a call (25 arguments, H200)."""
    LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def register_autograd(op: Any, below: Any, with_gradients: Callable) -> None:
    """Routes calls of `op` that need gradients through `with_gradients`; the others go on to `below`."""

    def autograd(first, *rest):
        tensors = [t for t in (first if isinstance(first, list) else (first, *rest)) if isinstance(t, Tensor)]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return with_gradients(first, *rest)
        if has_tangents() and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            return with_gradients(first, *rest)  # which has no formula for them, and raises
        return below_autograd(below, first, *rest)

    LIBRARY.impl(op.name().split("::")[1], autograd, "Autograd")


# The arguments of an operator on a record of tensors. Three, because the dispatcher's price is by the argument:
# - the tensors that are there, without None, because not everything that rewrites calls looks into lists of optional tensors
#   (views of the other sign, jit.trace, autograd's warnings);
# - the options that are no floats, in their order, and before them LAYOUT, and which fields the tensors are: bit i for field i;
# - the options that are floats.
SCHEMA = "(Tensor[] tensors, int[] options, float[] numbers) -> Tensor[]"
DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)  # an option that is a dtype: its place here


def layout_of(*records: Any) -> int:
    """A number that is another one where a field, a norm or a dtype is: exported programs hold their places."""
    fields = [(name, kind is float) for record in records for name, kind in record.__annotations__.items()]
    return crc32(repr((fields, [(norm.name, norm.value) for norm in Norm], DTYPES)).encode())


LAYOUT = layout_of(Inputs, Options, BackwardInputs, Gradients)


def encode(record: Any, names: Iterable[str], options: Any) -> tuple[list[int], list[float]]:
    """The arguments behind the tensors, which are these fields of the record."""
    flat = [one for value in options for one in (value if isinstance(value, tuple) else (value,))]
    floats = [value for value in flat if isinstance(value, float)]
    others = [value for value in flat if not isinstance(value, float)]
    ints = [DTYPES.index(value) if value is None or isinstance(value, torch.dtype) else int(value) for value in others]
    return [LAYOUT, sum([1 << record._fields.index(name) for name in names]), *ints], floats


def decode(record: Any, options: Any, ints: Iterable[int], floats: Iterable[float]) -> tuple[list[str], Any]:
    """The names and the options that `encode` was given; given are the classes of record and options."""
    layout, fields, *rest = ints
    if layout != LAYOUT:
        raise RuntimeError(f"{NAMESPACE}: this program was exported with other options of the norms; export it again")
    others, numbers = iter(rest), iter(floats)

    def value(kind: Any) -> Any:
        if hasattr(kind, "_fields"):
            return kind(*[value(field) for field in kind.__annotations__.values()])
        return next(numbers) if kind is float else kind(next(others)) if kind in (int, bool) else DTYPES[next(others)]

    return [name for i, name in enumerate(record._fields) if fields >> i & 1], value(options)


def record_operator(name: str, record: Any, options: Any, launch: str, empty: Callable) -> Any:
    """An operator on the tensors of a record and the fields of its options; returns the tensors that were asked for.

    launch: the function of `launch` that makes the call; empty: of tensors, names and options, the results without computing.
    """

    @lru_cache(maxsize=1024)
    def call_of(ints: tuple, floats: tuple, N: int, device: torch.device, dtypes: tuple) -> Callable:
        names, given = decode(record, options, ints, floats)
        return getattr(launches(), launch)(given, N, device, fill(record, names, dtypes))

    def run(tensors: list[Tensor], ints: list[int], floats: list[float]) -> list[Tensor]:
        first = tensors[0]  # x, or a gradient that backward is given
        return call_of(tuple(ints), tuple(floats), first.shape[-1], first.device, dtypes_of(tensors))(tensors)

    def fake(tensors: list[Tensor], ints: list[int], floats: list[float]) -> list[Tensor]:
        return empty(tensors, *decode(record, options, ints, floats))

    op = operator(name, SCHEMA, run, fake)
    library.register_vmap(op, partial(_one_by_one, op), lib=LIBRARY)
    return op


def _one_by_one(op, info, in_dims, tensors, *rest):
    """vmap: a call for each sample. PyTorch does that by itself for operators that return no lists."""
    samples = [
        op([t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims[0], strict=True)], *rest)
        for i in range(info.batch_size)
    ]
    outputs = [torch.stack(same) for same in zip(*samples, strict=True)]
    return outputs, [0] * len(outputs)


def _forward_shapes(tensors: list[Tensor], names: list[str], options: Options) -> list[Tensor]:
    x = tensors[0]
    return empty_outputs(x, outputs_of(names, options).values(), x.numel() // x.shape[-1])


def _backward_shapes(tensors: list[Tensor], names: list[str], options: BackwardOptions) -> list[Tensor]:
    return empty_gradients(tensors, shapes_of(options.wanted, names), tensors[0].shape[-1])


# Two operators that do the same: one that has autograd code in Python goes through the dispatcher twice at each call, whether
# or not there is anything to differentiate, and a compiled graph, which is below autograd, needs none. The gradient of `norm`
# is registered at the end of autograd.py. It has `norm_forward` return the statistics too, which are for backward alone.
norm, norm_forward = (
    record_operator(name, Inputs, Options, "forward_call", _forward_shapes) for name in ("norm", "norm_forward")
)
norm_backward = record_operator("norm_backward", BackwardInputs, BackwardOptions, "backward_call", _backward_shapes)
