"""Who is compared: ours, PyTorch as people write it, torch.compile of that, and the libraries that can be imported.

A provider of norms makes, for a shape, a function of the arguments that `make_inputs` describes, which returns (y,) or
(y, new residual stream); None where the library does not offer the case. Those of rotary positions and losses stand with their
programs. Libraries are imported when they are asked for and never needed.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import ops
from benchmarks.cases import DROPOUT_P, EPS, Function, Shape, make_inputs
from measure.progress import progress
from measure.timing import free_memory, side_stream
from ops import Norm, norm_fn
from ops.reference import NORMS

MODULES = {  # what has to be importable, by provider; the names of libraries are those of their packages
    "flash-attn": "flash_attn.ops.triton.layer_norm",
    "liger-kernel": "liger_kernel.ops.rms_norm",
    "quack-kernels": "quack.rmsnorm",
}
WIDEST_OF_FLASH = 8192  # columns: above, its autotuning compiles variants of one warp for minutes each


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _fused(module: Any, shape: Shape) -> Function | None:
    """A call in the interface that FlashAttention's Triton norms and ours share."""
    case = shape.case
    if not case.plain:
        return None
    norm = module.rms_norm_fn if case.norm == Norm.rmsnorm else module.layer_norm_fn
    p, prenorm = DROPOUT_P if case.dropout else 0.0, case.add
    return lambda x, residual, weight, bias, *_: as_tuple(
        norm(x, weight, bias, residual=residual, dropout_p=p, prenorm=prenorm, eps=EPS)
    )


def ours(shape: Shape) -> Function:
    return _fused(ops, shape) or _site(shape)


def _site(shape: Shape) -> Function:
    case, p = shape.case, DROPOUT_P if shape.case.dropout else 0.0

    def site(x: Tensor, residual: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weight, bias, scalars, branch_weight, branch_bias, branch_scalars = parameters
        found: Any = norm_fn(
            case.norm, x, weight, bias, residual, eps=EPS, dropout_p=p, prenorm=True, scalars=scalars, branch_norm=case.branch,
            branch_weight=branch_weight, branch_bias=branch_bias, branch_scalars=branch_scalars,
        )  # fmt: skip
        return found[-1:] if shape.y_is_r else tuple(found)

    return site


def plain_torch(shape: Shape, dropout: Callable[[Tensor, float], Tensor] = F.dropout) -> Function:
    """F.dropout, +, F.layer_norm or F.rms_norm, as people write them.

    With a stream or weights in fp32 the norm runs in fp32 and its output is rounded, which is what autocast makes of it.
    """
    case = shape.case

    def normed(norm: Norm, r: Tensor, parameters: Sequence[Tensor | None], y_dtype: torch.dtype) -> Tensor:
        dtype = r.dtype if parameters[0] is None else torch.promote_types(r.dtype, parameters[0].dtype)
        weight, bias, scalars = (None if t is None else t.to(dtype) for t in parameters)
        return NORMS[norm](r.to(dtype), weight, bias, EPS, scalars).to(y_dtype)

    def expression(x: Tensor, residual: Tensor | None, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        if residual is None:
            return (normed(case.norm, x, parameters[:3], x.dtype),)
        branch = x if case.branch == Norm.none else normed(case.branch, x, parameters[3:], x.dtype)
        r = residual + (dropout(branch, DROPOUT_P) if case.dropout else branch)
        return (r,) if shape.y_is_r else (normed(case.norm, r, parameters[:3], x.dtype), r)

    return expression


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for fixed shapes. Call torch._dynamo.reset() between cells: it gives up after eight recompilations."""
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # a backward that is timed runs many times over one forward
    return torch.compile(function, dynamic=False, fullgraph=True)


def flash_attn(shape: Shape) -> Function | None:
    return _fused(import_module(MODULES["flash-attn"]), shape) if shape.width <= WIDEST_OF_FLASH else None


def liger(shape: Shape) -> Function | None:
    """Its Triton kernels, with their own defaults. No dropout; the stream is kept in x's dtype."""
    name = shape.case.name
    if name == "add_dyt":  # its Dynamic Tanh, after PyTorch's add
        tanh = import_module("liger_kernel.ops.dyt").LigerDyTFunction.apply

        def add_dyt(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor, *_: None) -> tuple[Tensor, ...]:
            r = residual + x
            return tanh(r, alpha, weight, bias).to(x.dtype), r

        return add_dyt
    if name == "ln":
        layer_norm = import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction.apply
        return lambda x, _, weight, bias, *__: (layer_norm(x, weight, bias, EPS),)
    if name == "rms":
        rms_norm = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction.apply
        # in_place=False: else backward stores dx over the upstream gradient, and the next call is timed on other numbers
        return lambda x, _, weight, *__: (rms_norm(x, weight, EPS, 0.0, "llama", False),)
    if name == "add_rms" and shape.residual == "bf16":
        add_rms = import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction.apply
        return lambda x, residual, weight, *_: add_rms(x, residual, weight, EPS)
    return None


def quack(shape: Shape) -> Function | None:
    """RMSNorm."""
    norm, case = import_module("quack.rmsnorm").rmsnorm, shape.case
    if case.name not in ("rms", "add_rms"):
        return None
    return lambda x, residual, weight, *_: as_tuple(norm(x, weight, residual=residual, eps=EPS, prenorm=case.add))


PROVIDERS: dict[str, Callable[[Shape], Function | None]] = {
    "ours": ours,
    "torch": plain_torch,
    "compile": lambda shape: compiled(plain_torch(shape)),
    "flash-attn": flash_attn,
    "liger-kernel": liger,
    "quack-kernels": quack,
}


def load_before(folder: Path) -> str:
    """Makes a provider of a copy of ops/, imported under another name, so that its operators are its own; its name."""
    spec = spec_from_file_location("ops_before", folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    PROVIDERS["before"] = partial(_fused, module)
    return "before"


def versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of the providers' libraries. A library that was copied and not installed may still have __version__."""
    found = {}
    for name in (name for name in names if name in MODULES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = str(getattr(import_module(MODULES[name].partition(".")[0]), "__version__", "unknown"))
    return found


# ---- compiling ahead --------------------------------------------------------------------------------------------------------


WARM_ROWS = 2048  # enough to compile by, but for torch.compile, whose code is for one number of rows


def compile_in_processes(shapes: Sequence[Shape], names: Sequence[str], device: torch.device, processes: int) -> None:
    """Compiles in parallel. What fails here fails again, and is recorded, where it is measured."""
    jobs = [(shape, name, device) for shape in shapes for name in names]
    # flash-attn tries tiles that take long to compile for its widest rows: those go first, so that no process ends with one.
    jobs.sort(key=lambda job: (job[1] != "flash-attn", -job[0].width))
    with (
        suppress(BrokenProcessPool),  # a process was killed, for memory: the rest is compiled when measured
        ProcessPoolExecutor(processes, get_context("spawn"), _set_up_process) as executor,
        progress(len(jobs), f"compiling in {processes} processes", "kernel") as bar,
    ):
        for _ in executor.map(_compile, *zip(*jobs, strict=True)):
            bar.update()


def _set_up_process() -> None:
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # not a pool of compilers in each of the processes
    # It would keep on disk which of its configurations was fastest, as seen on a device shared with other processes.
    inductor.autotune_local_cache = False


def _compile(shape: Shape, name: str, device: torch.device) -> None:
    """Runs forward and backward once, so that both are compiled."""
    torch._dynamo.reset()
    if name != "compile":  # the remainder, because kernels are compiled apart for numbers that 16 divides
        shape = replace(shape, asked_rows=min(shape.rows, WARM_ROWS + shape.rows % 16))
    with suppress(Exception), side_stream(device):
        if (function := PROVIDERS[name](shape)) is not None:
            (inputs,) = make_inputs(shape, 1, device)
            torch.autograd.grad(function(*inputs.args), inputs.leaves, inputs.upstream, allow_unused=True)
    inputs = None  # type: ignore[assignment]
    free_memory(device)
