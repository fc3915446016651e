"""The gradients: what backward keeps, and which input gets which result."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import operators
from .checks import function_name
from .records import (
    BackwardInputs,
    BackwardOptions,
    Gradients,
    Inputs,
    Options,
    Outputs,
    dtypes_of,
    gradients_of,
    names_of,
    outputs_of,
    picker,
    present,
)
from .reference import Norm
from .torch_state import below_autograd, is_eager, kinds_of

_KEPT = BackwardInputs._fields[3:]  # behind the upstream gradients
_RETURNED = [name for name in Outputs._fields if "stats" not in name]


class Training(NamedTuple):
    """A call that is differentiated: all that follows from its options and dtypes."""

    run: Callable[[tuple[Tensor, ...]], list[Tensor]]  # the outputs that there are, of the inputs that there are
    options: Options
    dtypes: tuple[torch.dtype | None, ...]  # of Inputs
    names: list[str]  # of the inputs that there are
    kept: list[str]  # of BackwardInputs
    keep: Callable[[tuple], tuple]  # of (*outputs, *inputs, None), what is kept for backward
    returned: Callable[[tuple], tuple]  # of (*outputs, None): y and r, and what is behind them in Outputs where there is more
    constants: Callable[[tuple], tuple]  # likewise: the outputs that have no gradient
    jobs: dict[tuple, "Job"]  # those that were needed so far


def training_of(run: Callable, options: Options, dtypes: tuple, requires_grad: tuple[bool, ...]) -> Training:
    """dtypes: of Inputs; requires_grad: whether rowscale and rowscale1 do."""
    of: Any = Inputs(*dtypes)
    adds = of.residual is not None or of.x1 is not None or options.dropout_p > 0.0 or of.rowscale is not None
    names, outputs = names_of(of), [output.name for output in outputs_of(of, options)]
    sources = {name: name for name in _KEPT}
    if options.norm == Norm.none and of.weight is None and of.weight1 is None:
        sources["r"] = "y"  # for its shape; something else keeps it anyway
    elif not (adds or options.branch):
        sources["r"] = "x"
    # Without a norm of its own, x has a part in one gradient alone: drowscale = Σ dropout(dz) · x.
    if not options.branch and not requires_grad[0]:
        del sources["x"]
    if not requires_grad[1]:
        del sources["x1"]
    there = [*outputs, *names]
    kept = [name for name, source in sources.items() if source in there]
    returned = _RETURNED if set(outputs) & set(_RETURNED[2:]) else _RETURNED[:2]
    constants = [name for name in ("mask", "mask1", "rms", "peak") if name in outputs]
    keep = picker([sources[name] for name in kept], there)
    return Training(run, options, dtypes, names, kept, keep, picker(returned, outputs), picker(constants, outputs), {})


class FusedNorm(torch.autograd.Function):
    """The outputs of a call, but for the statistics, as functions of the inputs that there are."""

    @staticmethod
    def forward(ctx, call: Training, *tensors):
        outputs = call.run(tensors)
        ctx.save_for_backward(*call.keep((*outputs, *tensors, None)))
        ctx.call = call
        # A residual output that nobody used has no gradient: it must not be made up as a tensor of zeros and read.
        ctx.set_materialize_grads(False)
        if constants := call.constants((*outputs, None)):
            ctx.mark_non_differentiable(*constants)
        return call.returned((*outputs, None))

    @staticmethod
    def backward(ctx, dy, dr, dy1=None, *_):
        call, needs = ctx.call, ctx.needs_input_grad
        if dy is None and dr is None and dy1 is None:  # those who used the outputs have given no gradient
            return (None,) * len(needs)
        key = (needs, dy is None, dy1 is None, dr is None)
        job = call.jobs.get(key)
        if job is None:
            job = call.jobs[key] = job_of(call, needs[1:], dy is not None, dy1 is not None, dr is not None)
        tensors = job.given((dy, dy1, dr, *ctx.saved_tensors))
        if not torch.is_grad_enabled():
            return None, *job.gradients_of_inputs(tensors)
        with torch.no_grad():
            gradients = job.gradients_of_inputs(tensors)
        return None, *refuse_second_order(function_name(call.options.norm), gradients)


# In eager code: without the Python code of `apply`, which is for functorch and takes longer than the launch.
apply_eager: Callable[..., tuple] = super(torch.autograd.Function, FusedNorm).apply


def _operator_with_gradients(tensors: list[Tensor], ints: list[int], floats: list[float]) -> list[Tensor]:
    inputs, options = operators.decode(Inputs, Options, tensors, ints, floats)
    run = lambda given: below_autograd(operators.norm_forward, list(given), ints, floats)  # noqa: E731
    training = training_of(run, options, dtypes_of(inputs), scales_require_grad(inputs))
    return present(FusedNorm.apply(training, *tensors))


def scales_require_grad(inputs: Inputs) -> tuple[bool, bool]:
    """Whether rowscale and rowscale1 require a gradient."""
    rowscale, rowscale1 = inputs.rowscale, inputs.rowscale1
    return rowscale is not None and rowscale.requires_grad, rowscale1 is not None and rowscale1.requires_grad


class Job(NamedTuple):
    options: BackwardOptions
    given: Callable[[tuple], tuple]  # of the upstream gradients and what was kept, those of BackwardInputs that there are
    gradients_of_inputs: Callable[[tuple], tuple[Tensor | None, ...]]  # of them, for the inputs that there are


def job_of(call: Training, needs: tuple, has_dy: bool, has_dy1: bool, has_dr: bool) -> Job:
    """What backward computes, and which input gets which of its results.

    needs: which gradients autograd asks for, of the inputs that there are.
    """
    options = call.options
    of: Any = Inputs._make(call.dtypes)
    need: Any = Inputs._make([name in call.names and needs[call.names.index(name)] for name in Inputs._fields])
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
    computed = BackwardOptions(**same, dz_dtype=dz_dtype, **dtypes_of_gradients)

    upstream = [name for name, is_there in (("dy", has_dy), ("dy1", has_dy1), ("dr", has_dr)) if is_there]
    names = [*upstream, *call.kept]
    place_of_r = names.index("r")
    pick = picker([takes.get(name) for name in call.names], [*gradients_of(computed), *names])
    in_record = picker(BackwardInputs._fields, names)
    runs: dict[tuple, Callable] = {}  # `launch.backward_call`, by the kinds of tensors

    def gradients(tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        # On a GPU backward has a thread of its own, and hooks on saved tensors may bring any tensors.
        kinds = kinds_of(tensors) if is_eager(()) else None
        if kinds is None:
            return pick((*operators.norm_backward_of(named(tensors), computed), *tensors, None))
        run = runs.get(kinds)
        if run is None:
            r = tensors[place_of_r]
            launch = operators.launches()
            run = runs[kinds] = launch.backward_call(computed, r.shape[-1], r.device, dtypes_of(named(tensors)))
        return pick((*run(tensors), *tensors, None))

    def named(tensors: tuple[Tensor, ...]) -> BackwardInputs:
        return BackwardInputs._make(in_record((*tensors, None)))

    return Job(computed, picker(names, ["dy", "dy1", "dr", *call.kept]), gradients)


def refuse_second_order(name: str, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The same gradients, for a backward pass that is recorded (create_graph=True); another one through them raises.

    PyTorch's `once_differentiable` refuses only where the upstream gradient has a graph of its own. Where that is a constant,
    as of `y.sum()`, a gradient penalty would silently lack what follows from x and the weights.
    """
    anchor = torch.zeros((), device="cpu", requires_grad=True)  # they have a history, whatever they were computed from
    return _Refused.apply(name, anchor, *gradients)


def first_order(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward of a Function, whose gradients `refuse_second_order`. ctx.function: the public function, for the message."""

    @wraps(backward)
    def run(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return backward(ctx, *upstream)
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        return refuse_second_order(ctx.function, gradients)

    return run


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
