"""Prepared call sites: an eager call like an earlier one skips the checks and PyTorch's dispatcher.

A reader may skip this file: without it and its two call places in `functional` every call takes the plain path, which gives the
same bits.

A call on the plain path leaves a site for its like (see `prepared`). For add + RMSNorm:

    def call(x, residual, x1, weight, …, seed):              def forward(ctx, x, residual, weight):
        if guard(x, residual, weight) and not observed():        y = empty(y_size, y_stride, y_dtype)
            return apply(x, residual, weight)                    …  r and stats too; their pointers; the launch
                                                                 ctx.save_for_backward(r, weight, stats)
                                                                 return y, r

The first backward of a site takes the plain path too, and leaves code for its like: those where the same upstream gradients are
there and the same gradients are wanted.

A site is found by all that is no tensor, x's shape, which tensors are there, and grad mode. So all layers of a model share one.
Besides the guard it looks out for Dynamo's tracing, torch-function modes, forward-mode AD, and in backward for grad mode
(create_graph). Whatever else a call is takes the plain path, errors among it. What is saved for backward is what the plain path
saves, in the same order, because checkpointing compares them; it is guarded when it comes back, because hooks may bring other
tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import prepared
from .autograd import is_eager, job_of, norm_gradients
from .checks import Plan
from .philox import draw_seed
from .prepared import Table, remember
from .records import BackwardInputs, Inputs, Options

SITES = prepared.table()


def results(given: tuple, request: tuple) -> Any:
    """What norm_fn returns, or None: nothing is prepared. given: its tensors, the fields of Inputs; request: the rest."""
    if not prepared.WORKS or torch._C._len_torch_function_stack() or forward_ad._current_level >= 0:
        return None
    try:
        alike = SITES.get(_key(given, request), ())
    except (AttributeError, TypeError):  # x is no tensor, or something has no hash: the checks have more to say
        return None
    for call in alike:
        found = call(*given)
        if found is not None:
            return found
    return None


def prepare(given: tuple, request: tuple, plan: Plan) -> None:
    """Makes a site for calls like this one, which is eager and has run on kernels."""
    remember(SITES, _key(given, request), lambda: _call(given, request[4], plan))


def _key(given: tuple, request: tuple) -> tuple:
    x, residual, x1, weight, bias, weight1, bias1, rowscale, rowscale1, seed = given
    return (
        # 0.5 and Fraction(1, 2) are equal, and True and 1.0; the checks accept one of them
        request, type(request[1]), type(request[2]), type(request[3]), type(request[5]),
        x.shape, residual is None, x1 is None, weight is None, bias is None, weight1 is None, bias1 is None,
        rowscale is None, rowscale1 is None, type(seed), torch.is_grad_enabled(),
    )  # fmt: skip


def _call(given: tuple, prenorm: bool, plan: Plan) -> Callable | None:
    """A function of the fields of Inputs, the seed as the caller gives it."""
    if plan.drops and isinstance(given[9], int):
        return None
    tensors = {name: t for name, t in zip(Inputs._fields, given, strict=True) if isinstance(t, Tensor)}
    training = torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values())
    options = plan.training if training else plan.inference
    x = tensors["x"]
    inputs = Inputs(*given)._replace(seed=torch.empty(1, dtype=torch.int64, device=x.device) if plan.drops else None)
    text = prepared.begin(tensors, prepared.forward_launchers(inputs, options))
    if text is None:
        return None
    taken = [*prepared.tensors_of(inputs)]
    made = text.forward(inputs, options)
    returned: list[str] = [name for name in ("y", "y1", "r") if name in made and (name != "r" or prenorm)]
    if training:
        text.names["apply"] = _with_gradients(text, tensors, options, plan, taken, returned)
    else:
        text.names["apply"] = text.function("forward", taken, f"return {', '.join(returned)}")
    text.names |= {"draw_seed": draw_seed, "device": x.device}
    drawn = {"seed": "draw_seed(device, True)"} if given[9] is None else {}
    value = f"apply({', '.join([drawn.get(name, name) for name in taken])})"
    if prenorm and plan.r_is_x:
        value = f"(*{value}, x)" if len(returned) > 1 else f"({value}, x)"
    return text.function("call", Inputs._fields, f"if {text.guard}: return {value}")


def _with_gradients(
    text: prepared.Text, tensors: dict[str, Tensor], options: Options, plan: Plan, taken: list[str], returned: list[str]
) -> Callable:
    """`apply` of an autograd function that takes and returns what has these names."""
    adds = "residual" in tensors or "x1" in tensors or plan.drops or "rowscale" in tensors
    scaled = [x for x, scale in (("x", "rowscale"), ("x1", "rowscale1")) if scale in tensors and tensors[scale].requires_grad]
    kept = ["r", *scaled, *[name for name in BackwardInputs._fields[6:] if name in taken or name == "stats"]]
    saved = ", ".join(["r" if adds else "x", *kept[1:]])
    end = (f"ctx.save_for_backward({saved})", "ctx.set_materialize_grads(False)", f"return {', '.join(returned)}")
    upstream = [f"d{name}" for name in returned]
    table: Table = {}

    class PreparedNorm(torch.autograd.Function):
        forward = staticmethod(text.function("forward", ["ctx", *taken], *end))

        @staticmethod
        def backward(ctx, a, b=None, c=None):
            # On a GPU backward has a thread of its own, in which the guard does not see dispatch modes.
            watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
            saved, plain = ctx.saved_tensors, watched or torch.is_grad_enabled()
            key = (ctx.needs_input_grad, a is None, b is None, c is None)
            if not plain and forward_ad._current_level < 0:
                for run in table.get(key, ()):
                    gradients = run(a, b, c, *saved)
                    if gradients is not None:
                        return gradients
            given: Any = dict(zip((*upstream, *kept), (*(a, b, c)[: len(upstream)], *saved), strict=True))
            inputs = BackwardInputs(*map(given.get, BackwardInputs._fields))
            needs = tuple([name in taken and ctx.needs_input_grad[taken.index(name)] for name in Inputs._fields])
            gradients = norm_gradients(inputs, options, plan.dtypes, needs)
            upstream_given = a is not None or b is not None or c is not None
            if upstream_given and not plain and is_eager(inputs):
                job = job_of(options, plan.dtypes, needs, inputs.dy is not None, inputs.dy1 is not None)
                remember(table, key, lambda: _backward(inputs, job, (*upstream, "_1", "_2")[:3], kept, taken))
            return tuple([gradients[Inputs._fields.index(name)] for name in taken])

    return super(torch.autograd.Function, PreparedNorm).apply  # without the Python code of `apply`, which is for functorch


def _backward(inputs: BackwardInputs, job, upstream, kept: list[str], taken: list[str]) -> Callable | None:
    """A function of upstream gradients and saved tensors."""
    text = prepared.begin(prepared.tensors_of(inputs), prepared.backward_launchers(inputs, job.options))
    if text is None:
        return None
    made = text.backward(inputs, job.options)
    found = {x: f"d{x}" for x in ("x", "x1") if f"d{x}" in made}
    takes = {"x": job.x_takes_dz, "residual": job.residual_takes_dz, "x1": job.x1_takes_dz}
    found |= {name: "dz" for name in takes if takes[name]}
    found |= {scale: f"d{scale}.to({scale}.dtype).view({scale}.shape)" for scale in Inputs._fields[7:9] if f"d{scale}" in made}
    for row, (i, dtype) in enumerate(job.casts):
        text.names[f"dtype{i}"] = dtype
        value = "weights" if len(job.casts) == 1 else f"weights[{row}]"
        found[Inputs._fields[3 + i]] = value if dtype == job.options.weight_dtype else f"{value}.to(dtype{i})"
    gradients = ", ".join([found.get(name, "None") for name in taken])
    return text.function("backward", [*upstream, *kept], f"return ({gradients},)", guarded=True)
