"""Who is compared: ours, PyTorch as people write it, torch.compile of that, and the libraries that can be imported.

A provider of norms makes, for a shape, a function of the arguments that `make_inputs` describes, which returns (y,) or
(y, new residual stream); None where the library does not offer the case. All are called as the model calls them, by the norm
switch (model/norm.py, model/libraries.py). Those of rotary positions and losses stand with their programs. Libraries are
imported when they are asked for and never needed.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import DROPOUT_P, DTYPES, EPS, X_DTYPE, Function, Shape, make_inputs
from measure.progress import progress
from measure.timing import free_memory, side_stream
from model import libraries
from model.sites import Affine, How, Inputs, fused_site, torch_site
from ops import Norm

Site = Callable[[Inputs, Affine, How], Any]

MODULES = {  # what has to be importable, by provider; the names of libraries are those of their packages
    "flash-attn": "flash_attn.ops.triton.layer_norm",
    "liger-kernel": "liger_kernel.ops.rms_norm",
    "quack-kernels": "quack.rmsnorm",
}
WIDEST_OF_FLASH = 8192  # columns: above, its autotuning compiles variants of one warp for minutes each


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def how_of(kind: Norm, dtype: torch.dtype, eps: float) -> How:
    """A norm alone."""
    return How(kind, Norm.none, False, False, 1.0, eps, 0.0, False, False, dtype, dtype)


def site_of(site: Site, shape: Shape, exact: bool = False) -> Function:
    """A site of the model as a provider's function; exact: computed and returned in fp64."""
    case = shape.case
    how = how_of(case.norm, X_DTYPE, EPS)._replace(
        branch_kind=case.branch,
        dropout=DROPOUT_P if case.dropout else 0.0,
        prenorm=case.add,
        stream_dtype=DTYPES[shape.residual or "bf16"],
    )
    if exact:
        how = how._replace(stream_dtype=torch.float64, out_dtype=torch.float64)

    def function(
        x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, scalars: Tensor | None,
        *of_branch: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        affine = Affine(weight, bias, None, None, scalars, *of_branch)
        outputs = as_tuple(site(Inputs(x, residual, None, None, None, None), affine, how))
        return outputs[-1:] if shape.y_is_r else outputs

    return function


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for fixed shapes. Call torch._dynamo.reset() between cells: it gives up after eight recompilations."""
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # a backward that is timed runs many times over one forward
    return torch.compile(function, dynamic=False, fullgraph=True)


def flash_attn(shape: Shape) -> Function | None:
    return site_of(libraries.flash_attn, shape) if shape.case.plain and shape.width <= WIDEST_OF_FLASH else None


def liger(shape: Shape) -> Function | None:
    """What it fuses: no dropout; of adds RMSNorm's to a stream of x's dtype. Its Dynamic Tanh comes after PyTorch's add."""
    name = shape.case.name
    if name == "add_dyt":
        tanh = import_module("liger_kernel.ops.dyt").LigerDyTFunction.apply

        def add_dyt(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, alpha: Tensor, *_: None) -> tuple[Tensor, ...]:
            r = residual + x
            return tanh(r, alpha, weight, bias).to(x.dtype), r

        return add_dyt
    if name in ("ln", "rms") or (name == "add_rms" and shape.residual == "bf16"):
        return site_of(libraries.liger, shape)
    return None


PROVIDERS: dict[str, Callable[[Shape], Function | None]] = {
    "ours": partial(site_of, fused_site),
    "torch": partial(site_of, torch_site),
    "compile": lambda shape: compiled(site_of(torch_site, shape)),
    "flash-attn": flash_attn,
    "liger-kernel": liger,
    "quack-kernels": lambda shape: site_of(libraries.quack, shape) if shape.case.name in ("rms", "add_rms") else None,
}


def load_before(folder: Path) -> str:
    """Makes a provider of a copy of ops/, imported under another name, so that its operators are its own; its name."""
    spec = spec_from_file_location("ops_before", folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)

    def site(inputs: Inputs, affine: Affine, how: How) -> Any:
        norm = module.rms_norm_fn if how.kind == Norm.rmsnorm else module.layer_norm_fn
        parameters = {"residual": inputs.residual, "eps": how.eps, "dropout_p": how.dropout, "prenorm": how.prenorm}
        return norm(inputs.x, affine.weight, affine.bias, **parameters)

    PROVIDERS["before"] = lambda shape: site_of(site, shape) if shape.case.plain else None
    return "before"


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
        shape = replace(shape, rows=min(shape.rows, WARM_ROWS + shape.rows % 16))
    with suppress(Exception), side_stream(device):
        if (function := PROVIDERS[name](shape)) is not None:
            (inputs,) = make_inputs(shape, 1, device)
            torch.autograd.grad(function(*inputs.args), inputs.leaves, inputs.upstream, allow_unused=True)
    inputs = None  # type: ignore[assignment]
    free_memory(device)
