"""The gradients: what backward keeps, and which input gets which result."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from . import operators
from .kit import first_order
from .checks import function_name
from .records import (
    ROWSCALES,
    BackwardInputs,
    BackwardOptions,
    Gradients,
    Inputs,
    Options,
    Outputs,
    fill,
    names_of,
    outputs_of,
    picker,
    present,
)
from .reference import Norm
from .torch_state import apply_of, below_autograd, is_eager, kinds_of

_UPSTREAM, _KEPT = BackwardInputs._fields[:3], BackwardInputs._fields[3:]
_RETURNED = [name for name in Outputs._fields if "stats" not in name]
_CONSTANTS = ("mask", "mask1", "rms", "peak")  # outputs without a gradient


class Training:
    """A call that is differentiated: all that follows from its options and dtypes."""

    def __init__(self, run_with: Callable, options: Options, dtypes: Inputs, learned: list[str]) -> None:
        """run_with: of options, a function of the inputs that are there; dtypes: in the places of the inputs; learned: which
        scales of rows require a gradient."""
        self.of: Any = dtypes
        # What backward needs of each row is stored too.
        statistics, of_branch = Norm(options.norm).statistics, Norm(options.branch_norm).statistics
        self.options = options = options._replace(statistics=statistics, branch_statistics=of_branch)
        self.run, self.function = run_with(options), function_name(options.norm)
        self.names = names_of(dtypes)
        outputs = [*outputs_of(self.names, options)]
        sources = {name: name for name in _KEPT}
        adds = dtypes.residual is not None or dtypes.x1 is not None or options.dropout_p > 0.0 or dtypes.rowscale is not None
        if options.norm == Norm.none and dtypes.weight is None and dtypes.weight1 is None:
            del sources["r"]  # so whoever has the sum may change it in place
        elif not (adds or options.branch):
            sources["r"] = "x"
        # Without a norm of its own, x has a part in one gradient alone: drowscale = Σ dropout(dz) · x.
        if not options.branch and "rowscale" not in learned:
            del sources["x"]
        if "rowscale1" not in learned:
            del sources["x1"]
        there = [*outputs, *self.names]
        self.kept = [name for name, source in sources.items() if source in there]  # of BackwardInputs
        # Of (*outputs, *inputs, None): what is kept for backward; what is returned, y and r and where there is more the fields
        # of Outputs behind them; of that, what has no gradient.
        self.keep = picker([sources[name] for name in self.kept], there)
        self.keeps_r = "r" in self.kept
        self.returned = picker(_RETURNED if set(outputs) & set(_RETURNED[2:]) else _RETURNED[:2], there)
        constants = [name for name in _CONSTANTS if name in outputs]
        self.constants = picker(constants, there) if constants else None
        self.runs: dict[tuple, Callable] = {}  # `backward`, by needs, and kinds of tensors or which of them are there

    def gradients(self, needs: tuple[bool, ...], tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Of the inputs that are there, those that autograd needs. tensors: the upstream gradients, and what was kept."""
        # On a GPU backward has a thread of its own, and hooks on saved tensors may bring any tensors.
        kinds = kinds_of(tensors) if is_eager(()) else None
        key = needs, kinds or tuple([t is None for t in tensors])
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = self.backward(needs, tensors, kinds is not None)
        return run(tensors)

    def backward(self, needs: tuple[bool, ...], like: tuple[Tensor | None, ...], eager: bool) -> Callable:
        """`gradients` of tensors of which the same are there, eagerly also of the same kinds."""
        fields = (*_UPSTREAM, *(() if self.keeps_r else ("r",)), *self.kept)
        given = [name for name, t in zip(fields, like, strict=True) if t is not None]
        options, sources = self.what_backward_computes(needs, given)
        there, pick = picker(given, fields), picker([sources[name] for name in self.names], [*names_of(options.wanted), *given])
        if eager:
            tensors = there(like)
            r, dtypes = tensors[given.index("r")], fill(BackwardInputs, given, [t.dtype for t in tensors])
            run = operators.launches().backward_call(options, r.shape[-1], r.device, dtypes)
        else:
            encoded = operators.encode(BackwardInputs, given, options)
            run = lambda tensors: operators.norm_backward(list(tensors), *encoded)  # noqa: E731

        def gradients(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            tensors = there(tensors)
            return pick((*run(tensors), *tensors, None))

        return gradients

    def what_backward_computes(self, needs: tuple[bool, ...], given: list[str]) -> tuple[BackwardOptions, dict[str, str]]:
        """And which of its results, or of what it is given, is the gradient of an input; none where it is not among them.

        needs: which gradients autograd asks for, of the inputs that there are; given: names of BackwardInputs.
        """
        options, of, has_dy = self.options, self.of, "dy" in given
        needed = [name for name, need in zip(self.names, needs, strict=True) if need]
        sources = {name: f"d{name}" for name in self.names}
        # The residual and the inputs that nothing scales share one gradient, dz, if they also share a dtype.
        changed = options.dropout_p > 0.0 or options.branch or options.residual_scale != 1.0
        scaled = {"x": changed or of.rowscale is not None, "x1": changed or of.rowscale1 is not None, "residual": False}
        sharing = [name for name in ("residual", "x", "x1") if name in needed and not scaled[name]]
        # Without a norm of r, one upstream gradient alone is dz. The residual takes it as it is: nothing is written for it.
        without_norm = options.norm == Norm.none and of.weight is None and of.bias is None
        alone = without_norm and "dy1" not in given and has_dy != ("dr" in given) and options.residual_scale == 1.0
        if "residual" in sharing and alone and of.residual == (options.out_dtype if has_dy else options.residual_dtype):
            sources["residual"] = "dy" if has_dy else "dr"
            sharing.remove("residual")
        wanted: dict[str, Any] = dict.fromkeys(Gradients._fields)
        for shares in sharing:
            if wanted["dz"] in (None, getattr(of, shares)):
                wanted["dz"], sources[shares] = getattr(of, shares), "dz"
        reached = dict.fromkeys(("weight", "bias"), has_dy) | dict.fromkeys(("weight1", "bias1"), "dy1" in given)
        for name in needed:
            if sources[name] in wanted and sources[name] != "dz" and reached.get(name, True):
                wanted[f"d{name}"] = getattr(of, name)
        return BackwardOptions(options, Gradients(**wanted)), sources


class FusedNorm(torch.autograd.Function):
    """The outputs of a call, but for the statistics, as functions of the inputs that there are."""

    @staticmethod
    def forward(ctx, call: Training, *tensors):
        there = (*call.run(tensors), *tensors, None)
        ctx.save_for_backward(*call.keep(there))
        ctx.call, ctx.function = call, call.function
        # A residual output that nobody used has no gradient: it must not be made up as a tensor of zeros and read.
        ctx.set_materialize_grads(False)
        if call.constants is not None:
            ctx.mark_non_differentiable(*call.constants(there))
        outputs = call.returned(there)
        # detach: what autograd takes for a view could not be changed in place.
        return (outputs[0], tensors[0].detach(), *outputs[2:]) if call.options.passes_residual else outputs

    @staticmethod
    @first_order
    def backward(ctx, dy, dr, dy1=None, *_):
        needs = ctx.needs_input_grad
        if dy is None and dr is None and dy1 is None:  # those who used the outputs have given no gradient
            return (None,) * len(needs)
        like = () if ctx.call.keeps_r else (dr if dy is None else dy,)
        return None, *ctx.call.gradients(needs[1:], (dy, dy1, dr, *like, *ctx.saved_tensors))


apply_eager = apply_of(FusedNorm)


def _operator_with_gradients(tensors: list[Tensor], ints: list[int], floats: list[float]) -> list[Tensor]:
    names, options = operators.decode(Inputs, Options, ints, floats)

    def run_with(options: Options) -> Callable:
        encoded = operators.encode(Inputs, names, options)
        return lambda given: below_autograd(operators.norm_forward, list(given), *encoded)

    learned = [name for name, t in zip(names, tensors, strict=True) if name in ROWSCALES and t.requires_grad]
    dtypes = fill(Inputs, names, [t.dtype for t in tensors])
    return present(FusedNorm.apply(Training(run_with, options, dtypes, learned), *tensors))


operators.register_autograd(operators.norm, operators.norm_forward, _operator_with_gradients)
