"""Calls of one device function that Triton 3.6 takes for the same, and compiles once, though a tensor is in another tuple.

As a program (`python -m tests.ops.test_offline_calls`) it makes the IR of kernels for an H100, on a machine without one. It
prints a line of JSON for each such pair of calls, and the number of kernels last.
"""

import json
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from triton.compiler import ASTSource
from triton.compiler.code_generator import CodeGenerator

from .offline import OfflineLauncher, launches_of, prepare

N = 2048  # one row a tile: rows, weights, and what a sample has are of one type


def test_no_two_calls_of_a_device_function_are_taken_for_the_same():
    *pairs, last = launches_of("test_offline_calls")
    assert not pairs and last["kernels"] > 100


def leaves(value: Any, path: tuple[int, ...] = ()) -> list[tuple]:
    """Of a tensor its type, and of a constant where it is and what: by these Triton 3.6 tells calls apart."""
    if isinstance(value, tuple | list) or type(value).__name__ == "tuple":
        return [leaf for i, one in enumerate(value) for leaf in leaves(one, (*path, i))]
    return [(str(value.type),) if hasattr(value, "handle") else (path, repr(value))]


def form(value: Any) -> str:
    if isinstance(value, tuple | list) or type(value).__name__ == "tuple":
        return f"({' '.join(map(form, value))})"
    return "tensor" if hasattr(value, "handle") else "constant"


class Made(Exception):
    """The IR is; no more is needed."""


def watch(modules: list) -> None:
    """Prints what is found, and adds the module of each kernel."""
    forms: dict[tuple, str] = {}
    call, make_ir = CodeGenerator.call_JitFunction, ASTSource.make_ir

    def seen(generator: Any, fn: Any, args: list, *rest: Any, **more: Any) -> Any:
        key = (id(generator.module), fn.fn, len(args), str(leaves(args)), str((rest, more)))
        if forms.setdefault(key, form(args)) != form(args):
            print(json.dumps({"function": fn.fn.__name__, "forms": [forms[key], form(args)]}))
        return call(generator, fn, args, *rest, **more)

    def made(*arguments: Any) -> Any:
        modules.append(make_ir(*arguments))  # kept, so that each has an id of its own
        raise Made

    def launch(launcher: Any, programs: int, tensors: tuple, *rest: Any) -> None:
        with suppress(Made):
            launcher.kernel.run(launcher.record(*tensors), *rest, grid=(1,), warmup=True, **launcher.options)

    CodeGenerator.call_JitFunction, ASTSource.make_ir, OfflineLauncher.__call__ = seen, made, launch  # type: ignore[method-assign]


def main() -> None:
    from ops import layer_norm_fn, modulated_norm_fn, norm_fn

    prepare()
    watch(modules := [])
    for there in product((False, True), repeat=4):
        a, b, c, d = (torch.ones(N, requires_grad=True) if one else None for one in there)
        x, residual = (torch.ones(2, 3, N, requires_grad=True) for _ in range(2))
        scale, shift = (one if one is None else torch.ones(2, N, requires_grad=True) for one in (c, d))
        results = [
            layer_norm_fn(x, a, b, weight1=c, bias1=d),
            norm_fn("layernorm", x, a, b, branch_norm="layernorm", branch_weight=c, branch_bias=d),
            modulated_norm_fn(x, scale, shift, residual, None, a, b),
            modulated_norm_fn(x, scale, shift, None, torch.ones(2, N, requires_grad=True), a, b),
        ]
        for result in results:
            outputs = result if isinstance(result, tuple) else (result,)
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    print(json.dumps({"kernels": len(modules)}))


if __name__ == "__main__":
    main()
