"""Triton's interpreter in a third of its time, which is most of what the tests of kernels take.

It computes the same, but for the order of the sums in a reduction of several values at once.
"""

from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, ReduceOps


def quicken() -> None:
    """For good, in this process."""
    original = interpreter._patch_lang
    # tl.sum and its like are device functions that know triton.language.core alone
    modules = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: original(modules)
    InterpretedFunction.__call__ = _call
    ReduceOps.generic_reduce = _reduce
    interpreter._get_np_dtype = _Remembered(interpreter._get_np_dtype)


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


class _Remembered(dict):
    """NumPy's dtype for Triton's, by its name."""

    def __init__(self, find) -> None:
        self.find = find

    def __call__(self, dtype):
        if dtype.name not in self:
            self[dtype.name] = self.find(dtype)
        return self[dtype.name]
