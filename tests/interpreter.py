"""Triton's interpreter in a fraction of its time, which is most of what the tests of kernels take.

It computes the same, but for the order of the sums in a reduction of several values at once, and looks for no overflow of
integers. What it spends its time on is the types of values, which are here made once for each shape.
"""

from dataclasses import replace
from functools import cache
from inspect import unwrap
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, ReduceOps, TensorHandle


def quicken() -> None:
    """For good, in this process."""
    original = interpreter._patch_lang
    # tl.sum and its like are device functions that know triton.language.core alone
    modules = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: original(modules)
    interpreter._patch_attr = _patch_attr
    InterpretedFunction.__call__ = _call
    ReduceOps.generic_reduce = _reduce
    interpreter._get_np_dtype = _Remembered(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    TensorHandle.__init__ = _handle
    tl.block_type.__init__ = _block_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.tensor.__init__ = _tensor
    TritonSemantic.binary_op_type_checking_impl = _operands(TritonSemantic.binary_op_type_checking_impl)


def _call(function, *arguments, **constants):
    """A device function, which finds the language patched by the launch; the interpreter patches it anew in each call."""
    return function.rewrite()(*arguments, **constants)


def _reduce(operation, inputs):
    """By neighbouring pairs, as a GPU does; the interpreter takes one number after another."""
    assert operation.axis is not None, "flatten first"
    dtypes = [t.dtype for t in inputs]
    parts = [np.moveaxis(t.handle.data, operation.axis, 0) for t in inputs]
    while len(parts[0]) > 1:
        pairs = [part[first::2] for first in (0, 1) for part in parts]
        results = operation.combine_fn.fn(*map(operation.to_tensor, pairs, 2 * dtypes))
        parts = [t.handle.data for t in (results if isinstance(results, tuple) else (results,))]
    kept = [np.moveaxis(part, 0, operation.axis) if operation.keep_dims else part[0] for part in parts]
    return list(map(operation.to_tensor, kept, dtypes))


def _patch_attr(owner, name, member, builder, scope):
    scope.set_attr(owner, name, _interpreted(member))


@cache
def _interpreted(member):
    """A function of the language that is given the interpreter's semantic, without one call in another."""
    function, semantic = unwrap(member, stop=lambda f: not tl.core.is_builtin(f)), interpreter.interpreter_semantic

    def call(*arguments, **named):
        named["_semantic"] = semantic
        return function(*arguments, **named)

    return call


@cache
def _shape(sizes):
    """Of a block's type and of its tensor, and the number of elements."""
    numel = validate_block_shape(sizes) if sizes else 1
    return tl.tuple(sizes), tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(numel)


def _block_type(block, element_ty, shape):
    block.element_ty = element_ty
    block.shape, _, numel = _shape(tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape]))
    block.numel = numel.value


def _tensor(tensor, handle, type):
    tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
    _, tensor.shape, tensor.numel = _shape(tuple(type.shape.values) if type.is_block() else ())


def _handle(handle, data, dtype, attr=None):
    handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr


def _operands(check):
    """Two tensors of one shape and one of these types are what they are made to."""
    kept = {"int1", "int32", "uint32", "int64", "uint64", "fp32", "fp64"}

    def operands(semantic, lhs, rhs, *how, **named):
        tensors = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor)
        if tensors and lhs.shape is rhs.shape and lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in kept:
            return lhs, rhs
        return check(semantic, lhs, rhs, *how, **named)

    return operands


class _Remembered(dict):
    """NumPy's dtype for Triton's, by its name."""

    def __init__(self, find) -> None:
        self.find = find

    def __call__(self, dtype):
        if dtype.name not in self:
            self[dtype.name] = self.find(dtype)
        return self[dtype.name]
