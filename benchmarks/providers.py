"""Who is compared: ours, PyTorch as people write it, torch.compile of that, and the libraries that can be imported.

A provider makes, for a case and a setting, a function of `Inputs` that returns (y,) or (y, new residual stream); None where the
library does not offer the case. Libraries are imported when they are asked for and never needed.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cases import Case, Inputs, Setting, Shape, make_inputs, y_is_r
from measure.progress import progress
from measure.timing import describe, free_memory, side_stream
from ops import Norm, layer_norm_fn, norm_fn, rms_norm_fn
from ops.reference import NORMS

Function = Callable[[Inputs], tuple[Tensor, ...]]
BEFORE = "ops_before"  # the module's name


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _fused_expression(layer_norm: Any, rms_norm: Any, case: Case, setting: Setting) -> Callable[..., tuple[Tensor, ...]]:
    """A call in the interface that FlashAttention's Triton norms and ours share, of (x, residual, weight, bias)."""
    norm = rms_norm if case.rms else layer_norm
    eps, p, prenorm = setting.eps, setting.dropout_p if case.dropout else 0.0, case.add
    return lambda x, residual, weight, bias, *_: _outputs(
        norm(x, weight, bias, residual=residual, dropout_p=p, prenorm=prenorm, eps=eps)
    )


def _fused(layer_norm: Any, rms_norm: Any, case: Case, setting: Setting) -> Function | None:
    return _of_inputs(_fused_expression(layer_norm, rms_norm, case, setting)) if case.plain else None


def ours(case: Case, setting: Setting) -> Function:
    return _fused(layer_norm_fn, rms_norm_fn, case, setting) or _of_inputs(_site_expression(case, setting))


def _site_expression(case: Case, setting: Setting) -> Callable[..., tuple[Tensor, ...]]:
    eps, p = setting.eps, setting.dropout_p if case.dropout else 0.0

    def expression(x: Tensor, residual: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weight, bias, scalars, branch_weight, branch_bias, branch_scalars = parameters
        found: Any = norm_fn(
            case.norm, x, weight, bias, residual, eps=eps, dropout_p=p, prenorm=True, scalars=scalars, branch_norm=case.branch,
            branch_weight=branch_weight, branch_bias=branch_bias, branch_scalars=branch_scalars,
        )  # fmt: skip
        return found[-1:] if y_is_r(case, x.itemsize, residual.itemsize) else tuple(found)

    return expression


def ours_seeded(case: Case, setting: Setting) -> Function | None:
    """Ours as a model calls it: with a seed, because a model draws the seeds of all sites at once."""
    if not (case.dropout and case.plain):
        return None
    norm, eps, p = rms_norm_fn if case.rms else layer_norm_fn, setting.eps, setting.dropout_p
    return lambda i: _outputs(norm(i.x, i.weight, i.bias, residual=i.residual, dropout_p=p, prenorm=True, eps=eps, seed=i.seed))


def torch_expression(case: Case, setting: Setting) -> Callable[..., tuple[Tensor, ...]]:
    """F.dropout, +, F.layer_norm or F.rms_norm, as people write them, of x, residual and the parameters of the norms.

    With a stream or weights in fp32 the norm runs in fp32 and its output is rounded, which is what autocast makes of it.
    """
    eps, p = setting.eps, setting.dropout_p
    norm, of_branch = NORMS[case.norm], None if case.branch == Norm.none else NORMS[case.branch]
    stream = setting.residual_dtype
    same = stream is not None and y_is_r(case, setting.x_dtype.itemsize, stream.itemsize)

    def normed(norm: Callable[..., Tensor], r: Tensor, parameters: Sequence[Tensor | None], y_dtype: torch.dtype) -> Tensor:
        weight, bias, scalars = (*parameters, None)[:3]
        dtype = r.dtype if weight is None else torch.promote_types(r.dtype, weight.dtype)
        weight, bias, scalars = (None if t is None else t.to(dtype) for t in (weight, bias, scalars))
        return norm(r.to(dtype), weight, bias, eps, scalars).to(y_dtype)

    def expression(x: Tensor, residual: Tensor | None, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        if residual is None:
            return (normed(norm, x, parameters[:3], x.dtype),)
        branch = x if of_branch is None else normed(of_branch, x, parameters[3:], x.dtype)
        r = residual + (F.dropout(branch, p) if case.dropout else branch)
        return (r,) if same else (normed(norm, r, parameters[:3], x.dtype), r)

    return expression


def _of_inputs(expression: Callable[..., tuple[Tensor, ...]]) -> Function:
    return lambda i: expression(i.x, i.residual, *i.of_norm, *i.of_branch)


def plain_torch(case: Case, setting: Setting) -> Function:
    return _of_inputs(torch_expression(case, setting))


def compiled(expression: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for fixed shapes. Call torch._dynamo.reset() between cells: it gives up after eight recompilations."""
    import torch._functorch.config as functorch

    functorch.donated_buffer = False  # a backward that is timed runs many times over one forward
    return torch.compile(expression, dynamic=False, fullgraph=True)


def torch_compile(case: Case, setting: Setting) -> Function:
    return _of_inputs(compiled(torch_expression(case, setting)))


def ours_compiled(case: Case, setting: Setting) -> Function:
    """torch.compile of ours. The device runs the same kernels; only the host's cost differs, which `host` measures."""
    return _of_inputs(compiled(_fused_expression(layer_norm_fn, rms_norm_fn, case, setting)))


def before(case: Case, setting: Setting) -> Function | None:
    """Another revision of ours, which `load_before` has imported."""
    module = import_module(BEFORE)
    return _fused(module.layer_norm_fn, module.rms_norm_fn, case, setting)


def load_before(folder: Path) -> None:
    """Imports a copy of ops/ under another name, so that its operators are its own.

    Raises:
        ImportError: the folder is no such copy.
    """
    spec = spec_from_file_location(BEFORE, folder / "__init__.py", submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None or not (folder / "functional.py").is_file():
        raise ImportError(f"{folder} is not a copy of ops/: it needs __init__.py and functional.py")
    module = module_from_spec(spec)
    digest = sha256(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py"))))
    module.__version__ = digest.hexdigest()[:12]  # type: ignore[attr-defined]
    sys.modules[BEFORE] = module
    spec.loader.exec_module(module)


def flash_attn(case: Case, setting: Setting) -> Function | None:
    module = import_module("flash_attn.ops.triton.layer_norm")
    return _fused(module.layer_norm_fn, module.rms_norm_fn, case, setting)


def liger(case: Case, setting: Setting) -> Function | None:
    """Its Triton kernels, with their own defaults. No dropout; the stream is kept in x's dtype."""
    eps = setting.eps
    if case.name == "add_dyt":  # its Dynamic Tanh, after PyTorch's add
        tanh = import_module("liger_kernel.ops.dyt").LigerDyTFunction.apply

        def function(i: Inputs) -> tuple[Tensor, ...]:
            weight, bias, alpha = i.of_norm
            assert i.residual is not None
            r = i.residual + i.x
            return tanh(r, alpha, weight, bias).to(i.x.dtype), r

        return function
    if case.name == "ln":
        norm = import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        return lambda i: (norm.apply(i.x, i.weight, i.bias, eps),)
    if case.name == "rms":
        norm = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        return lambda i: (norm.apply(i.x, i.weight, eps),)
    if case.name == "add_rms" and setting.residual_dtype == setting.x_dtype:
        norm = import_module("liger_kernel.ops.fused_add_rms_norm").LigerFusedAddRMSNormFunction
        return lambda i: norm.apply(i.x, i.residual, i.weight, eps)
    return None


def quack(case: Case, setting: Setting) -> Function | None:
    """RMSNorm; LayerNorm as a pair of functions without autograd, for weights in fp32."""
    module, eps = import_module("quack.rmsnorm"), setting.eps
    if case.name in ("rms", "add_rms"):
        return lambda i: _outputs(module.rmsnorm(i.x, i.weight, residual=i.residual, eps=eps, prenorm=case.add))
    if case.name != "ln" or setting.weight_dtype != torch.float32:
        return None

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            y, rstd, mean = module.layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx, dy):
            x, weight, rstd, mean = ctx.saved_tensors
            return module.layernorm_bwd(x, weight, dy, rstd, mean)

    return lambda i: (LayerNorm.apply(i.x, i.weight, i.bias),)


@dataclass(frozen=True)
class Provider:
    make: Callable[[Case, Setting], Function | None]
    module: str | None = None  # what has to be importable
    package: str | None = None  # what carries its version
    overwrites_dy: tuple[str, ...] = ()  # cases whose backward stores dx over dy
    widest: int | None = None  # columns that it is measured at


PROVIDERS = {
    "ours": Provider(ours),
    "ours-seeded": Provider(ours_seeded),
    "before": Provider(before, BEFORE, BEFORE),
    "torch": Provider(plain_torch),
    "compile": Provider(torch_compile),
    # Above this width, its autotuning compiles variants of one warp for minutes each.
    "flash-attn": Provider(flash_attn, "flash_attn.ops.triton.layer_norm", "flash-attn", widest=8192),
    "liger-kernel": Provider(liger, "liger_kernel.ops.rms_norm", "liger-kernel", overwrites_dy=("rms",)),
    "quack-kernels": Provider(quack, "quack.rmsnorm", "quack-kernels"),
}
OURS = ("ours", "ours-seeded", "before")
PEERS = ("compile", "flash-attn", "liger-kernel", "quack-kernels")  # who may be the fastest other
TRAFFIC = "traffic"  # beside them in norms: a kernel that moves the same tensors and computes nothing


def functions_of(case: Case, setting: Setting, names: Sequence[str], width: int) -> dict[str, Function]:
    """Those of the named providers that offer the case and are measured at this width."""
    made = {name: PROVIDERS[name].make(case, setting) for name in names if width <= (PROVIDERS[name].widest or width)}
    return {name: function for name, function in made.items() if function is not None}


def missing(names: list[str]) -> dict[str, str]:
    """The providers that can't be imported here, with the reason."""
    reasons = {}
    for name in names:
        module = PROVIDERS[name].module
        if module is None:
            continue
        try:
            import_module(module)
        except Exception as error:  # without a GPU some fail in other ways than by ImportError
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return reasons


def versions(names: list[str]) -> dict[str, str]:
    """The versions of the providers' libraries. A library that was copied and not installed may still have __version__."""
    found = {}
    for name in names:
        provider = PROVIDERS[name]
        if provider.module is None or provider.package is None:
            continue
        try:
            found[name] = version(provider.package)
        except PackageNotFoundError:
            found[name] = str(getattr(import_module(provider.module.partition(".")[0]), "__version__", "unknown"))
    return found


# ---- compiling ahead --------------------------------------------------------------------------------------------------------


WARM_ROWS = 2048  # enough to compile by, but for torch.compile, whose code is for one number of rows


def pool(processes: int, before: Path | None) -> Executor:
    return ProcessPoolExecutor(processes, get_context("spawn"), prepare, (before,))


def prepare(before: Path | None) -> None:
    """Prepares each process."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # not a pool of compilers in each of the processes
    # It would keep on disk which of its configurations was fastest, as seen on a device shared with other processes.
    inductor.autotune_local_cache = False
    if before is not None:
        load_before(before)


def compile_in_processes(
    shapes: Sequence[Shape], names: Sequence[str], device: torch.device, processes: int, before: Path | None
) -> None:
    """Compiles in parallel. A failure is printed, and occurs again where it is measured. `before` is that provider's folder."""
    jobs = [(shape, name) for shape in shapes for name in functions_of(shape.case, shape.setting, names, shape.width)]
    # flash-attn tries tiles that take long to compile for its widest rows: those go first, so that no process ends with one.
    jobs.sort(key=lambda job: (job[1] != "flash-attn", -job[0].width))
    with (
        pool(processes, before) as executor,
        progress(len(jobs), f"compiling in {processes} processes", "kernel") as bar,
    ):
        try:
            for done in as_completed([executor.submit(compile_one, *job, device) for job in jobs]):
                if error := done.result():
                    print(error, file=sys.stderr)
                bar.update()
        except BrokenProcessPool as error:
            print(f"{describe(error)} The rest is compiled when measured", file=sys.stderr)
        except KeyboardInterrupt:
            executor.shutdown(cancel_futures=True)
            raise


def compile_one(shape: Shape, name: str, device: torch.device) -> str | None:
    """Runs forward and backward once, so that both are compiled; returns what failed."""
    torch._dynamo.reset()
    if name != "compile":  # the remainder, because kernels are compiled apart for numbers that 16 divides
        shape = replace(shape, rows=min(shape.rows, WARM_ROWS + shape.rows % 16))
    try:
        function = PROVIDERS[name].make(shape.case, shape.setting)
        assert function is not None
        with side_stream(device):
            (inputs,) = make_inputs(shape.case, shape.setting, shape.rows, shape.width, 1, device)
            torch.autograd.grad(function(inputs), inputs.leaves, inputs.upstream, allow_unused=True)
            del inputs
            free_memory(device)
    except Exception as error:
        return f"compiling {name}, {shape}: {describe(error)}"
    return None
