"""The gradients: what backward keeps, and which input gets which result."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import operators
from .checks import function_name
from .records import BackwardInputs, BackwardOptions, Gradients, Inputs, Options, Outputs, dtypes_of
from .reference import Norm
from .torch_state import below_autograd, is_eager, kinds_of

# Of Outputs and Inputs, what BackwardInputs has behind the upstream gradients.
_KEPT = BackwardInputs._fields[3:]
_NAMES = (*Outputs._fields, *Inputs._fields)


class Training(NamedTuple):
    """A call that is differentiated: all that follows from its options and dtypes."""

    run: Callable[[Inputs], Outputs]
    options: Options
    dtypes: tuple[torch.dtype | None, ...]  # of Inputs
    kept: Callable[[tuple], tuple]  # of (*Outputs, *Inputs, None), what is kept for backward
    jobs: dict[tuple, "Job"]  # those that were needed so far


def training_of(run: Callable[[Inputs], Outputs], options: Options, dtypes: tuple, requires_grad: tuple[bool, ...]) -> Training:
    """dtypes: of Inputs; requires_grad: whether rowscale and rowscale1 do."""
    of: Any = Inputs(*dtypes)
    adds = of.residual is not None or of.x1 is not None or options.dropout_p > 0.0 or of.rowscale is not None
    places: dict[str, int | None] = {name: _NAMES.index(name) for name in _KEPT}
    if options.norm == Norm.none and of.weight is None and of.weight1 is None:
        places["r"] = _NAMES.index("y")  # for its shape; something else keeps it anyway
    elif not (adds or options.branch):
        places["r"] = _NAMES.index("x")
    # Without a norm of its own, x has a part in one gradient alone: drowscale = Σ dropout(dz) · x.
    if not options.branch and not requires_grad[0]:
        places["x"] = None
    if not requires_grad[1]:
        places["x1"] = None
    return Training(run, options, dtypes, itemgetter(*[-1 if at is None else at for at in places.values()]), {})


class FusedNorm(torch.autograd.Function):
    """The outputs of a call, but for the statistics, as functions of Inputs."""

    @staticmethod
    def forward(ctx, call: Training, *tensors):
        outputs = call.run(Inputs(*tensors))
        ctx.save_for_backward(*call.kept((*outputs, *tensors, None)))
        ctx.call = call
        # A residual output that nobody used has no gradient: it must not be made up as a tensor of zeros and read.
        ctx.set_materialize_grads(False)
        if outputs.mask is not None or outputs.rms is not None:
            observed = (outputs.mask, outputs.mask1, outputs.rms, outputs.peak)
            ctx.mark_non_differentiable(*[t for t in observed if t is not None])
        elif outputs.y1 is None:
            return outputs.y, outputs.r
        return outputs.y, outputs.r, outputs.y1, outputs.mask, outputs.mask1, outputs.rms, outputs.peak

    @staticmethod
    def backward(ctx, dy, dr, dy1=None, *_):
        if dy is None and dr is None and dy1 is None:  # those who used the outputs have given no gradient
            return (None,) * (1 + len(Inputs._fields))
        call, needs = ctx.call, ctx.needs_input_grad[1:]
        key = (needs, dy is None, dy1 is None, dr is None)
        job = call.jobs.get(key)
        if job is None:
            job = call.jobs[key] = job_of(call.options, call.dtypes, needs, dy is not None, dy1 is not None, dr is not None)
        inputs = BackwardInputs(dy, dy1, dr, *ctx.saved_tensors)
        if not torch.is_grad_enabled():
            return None, *job.gradients_of_inputs(inputs)
        with torch.no_grad():
            gradients = job.gradients_of_inputs(inputs)
        return None, *refuse_second_order(function_name(call.options.norm), gradients)


# In eager code: without the Python code of `apply`, which is for functorch and takes longer than the launch.
apply_eager: Callable[..., tuple] = super(torch.autograd.Function, FusedNorm).apply


def _operator_with_gradients(*call: Any) -> list[Tensor]:
    inputs, options = operators.decode(Inputs, Options, *call)
    run = partial(below_autograd, operators.norm_of, operators.norm_forward, options=options)
    training = training_of(run, options, dtypes_of(inputs), scales_require_grad(inputs))
    return operators.present(FusedNorm.apply(training, *inputs))


def scales_require_grad(inputs: Inputs) -> tuple[bool, bool]:
    """Whether rowscale and rowscale1 require a gradient."""
    rowscale, rowscale1 = inputs.rowscale, inputs.rowscale1
    return rowscale is not None and rowscale.requires_grad, rowscale1 is not None and rowscale1.requires_grad


def _gradients(inputs: BackwardInputs, options: BackwardOptions, runs: dict[tuple, Callable]) -> Gradients:
    """runs: `launch.backward_call` of these options, by the kinds of inputs."""
    # On a GPU backward has a thread of its own, and hooks on saved tensors may bring any tensors.
    if is_eager(()) and (kinds := kinds_of(inputs)) is not None:
        r = inputs.r
        key = kinds, r.shape[-1]
        run = runs.get(key)
        if run is None:
            run = runs[key] = operators.launches().backward_call(options, r.shape[-1], r.device, dtypes_of(inputs))
        return run(inputs)
    return operators.norm_backward_of(inputs, options)


class Job(NamedTuple):
    options: BackwardOptions
    gradients_of_inputs: Callable[[BackwardInputs], tuple[Tensor | None, ...]]  # in the order of Inputs


def job_of(options: Options, dtypes: tuple, needs: tuple, has_dy: bool, has_dy1: bool, has_dr: bool) -> Job:
    """What backward computes, and which input gets which of its results.

    dtypes: of Inputs; needs: which of their gradients autograd asks for.
    """
    of: Any = Inputs(*dtypes)
    need: Any = Inputs(*needs)
    # Without a norm of r, one upstream gradient alone is dz. The residual takes it as it is: nothing is written for it.
    dz_is_upstream = options.norm == Norm.none and of.weight is None and of.bias is None and not has_dy1 and has_dy != has_dr
    upstream_dtype = options.out_dtype if has_dy else options.residual_dtype
    passes = dz_is_upstream and need.residual and upstream_dtype == of.residual and options.residual_scale == 1.0
    changed = options.dropout_p > 0.0 or options.branch or options.residual_scale != 1.0
    # The residual and the inputs that nothing scales share one gradient, dz, if they also share a dtype.
    plain_x = need.x and not changed and of.rowscale is None
    plain_x1 = need.x1 and not changed and of.rowscale1 is None
    dz_dtype = of.residual if need.residual and not passes else of.x if plain_x else of.x1 if plain_x1 else None
    x_takes_dz = plain_x and of.x == dz_dtype
    x1_takes_dz = plain_x1 and of.x1 == dz_dtype
    wanted = {name: need_it for name, need_it in need._asdict().items() if f"d{name}" in Gradients._fields}
    wanted |= {"x": need.x and not x_takes_dz, "x1": need.x1 and not x1_takes_dz}
    reached = dict.fromkeys(("weight", "bias"), has_dy) | dict.fromkeys(("weight1", "bias1"), has_dy1)
    dtypes_of_gradients: dict[str, Any] = {
        f"d{name}_dtype": getattr(of, name) if is_wanted and reached.get(name, True) else None
        for name, is_wanted in wanted.items()
    }
    same: dict[str, Any] = {name: value for name, value in options._asdict().items() if name in BackwardOptions._fields}
    takes = {name: f"d{name}" for name in wanted}
    takes |= {name: "dz" for name, shares in (("x", x_takes_dz), ("x1", x1_takes_dz), ("residual", need.residual)) if shares}
    if passes:
        takes["residual"] = "dy" if has_dy else "dr"
    results = (*Gradients._fields, "dy", "dr", None)
    pick = itemgetter(*[results.index(takes.get(name)) for name in Inputs._fields])
    computed = BackwardOptions(**same, dz_dtype=dz_dtype, **dtypes_of_gradients)
    runs: dict[tuple, Callable] = {}
    return Job(computed, lambda inputs: pick((*_gradients(inputs, computed, runs), inputs.dy, inputs.dr, None)))


def refuse_second_order(name: str, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The same gradients, for a backward pass that is recorded (create_graph=True); another one through them raises.

    PyTorch's `once_differentiable` refuses only where the upstream gradient has a graph of its own. Where that is a constant,
    as of `y.sum()`, a gradient penalty would silently lack what follows from x and the weights.
    """
    anchor = torch.zeros((), device="cpu", requires_grad=True)  # they have a history, whatever they were computed from
    return _Refused.apply(name, anchor, *gradients)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.name = name
        return tuple([None if gradient is None else gradient.detach() for gradient in gradients])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name}: its gradients can't be differentiated again. torch.func's transforms (grad, jvp, hessian) run the "
            "PyTorch reference, which can; so can torch.nn's norms (restore_norms gives back those that replace_norms took)"
        )


operators.register_autograd(operators.norm, operators.norm_forward, _operator_with_gradients)
