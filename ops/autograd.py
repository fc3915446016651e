"""The gradients: what backward keeps, which input gets which result, and who may differentiate or watch the operators."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import operators
from .checks import function_name
from .records import BackwardInputs, BackwardOptions, Inputs, Options


class FusedNorm(torch.autograd.Function):
    """Outputs as functions of Inputs, whose dtypes are `dtypes`."""

    @staticmethod
    def forward(ctx, options, dtypes, *tensors):
        inputs = Inputs(*tensors)
        outputs = operators.below_autograd(operators.outputs_of, operators.norm_forward, inputs, options)
        x, residual, x1, weight, _, weight1, _, rowscale, rowscale1, seed = inputs
        _, r, _, mask, mask1, stats = outputs
        adds = residual is not None or x1 is not None or options.dropout_p > 0.0 or rowscale is not None
        # drowscale = Σ dropout(dz) · x is the only gradient that looks at x itself.
        needs_x = rowscale is not None and rowscale.requires_grad
        needs_x1 = rowscale1 is not None and rowscale1.requires_grad
        ctx.save_for_backward(
            r if adds else x, x if needs_x else None, x1 if needs_x1 else None,
            weight, weight1, rowscale, rowscale1, stats, seed,
        )  # fmt: skip
        ctx.options = options
        ctx.dtypes = dtypes
        # A residual output that nobody used has no gradient: it must not be made up as a tensor of zeros and read.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t in (mask, mask1, stats) if t is not None])
        return outputs

    @staticmethod
    def backward(ctx, dy, dr, dy1=None, *_):
        inputs = BackwardInputs(dy, dy1, dr, *ctx.saved_tensors)
        return None, None, *norm_gradients(inputs, ctx.options, ctx.dtypes, ctx.needs_input_grad[2:])


def _operator_with_gradients(tensors: list[Tensor], how: str) -> list[Tensor]:
    inputs, options = operators.decode(Inputs, tensors, how)
    dtypes = tuple([None if t is None else t.dtype for t in inputs])
    return operators.present(FusedNorm.apply(options, dtypes, *inputs))


def norm_gradients(inputs: BackwardInputs, options: Options, dtypes: tuple, needs: tuple) -> tuple[Tensor | None, ...]:
    """Of the fields of Inputs. dtypes: theirs; needs: which of them autograd asks for."""
    if inputs.dy is None and inputs.dr is None and inputs.dy1 is None:  # those who used the outputs have given no gradient
        return (None,) * len(needs)
    if not torch.is_grad_enabled():
        return _gradients(inputs, options, dtypes, needs)
    with torch.no_grad():
        gradients = _gradients(inputs, options, dtypes, needs)
    return refuse_second_order(function_name(options.norm), gradients)


def _gradients(inputs: BackwardInputs, options: Options, dtypes: tuple, needs: tuple) -> tuple[Tensor | None, ...]:
    job = job_of(options, dtypes, needs, inputs.dy is not None, inputs.dy1 is not None)
    gradients: Any = operators.norm_backward_of(inputs, job.options)
    dz, dx, dx1, drowscale, drowscale1, weights = gradients
    rowscale: Any = inputs.rowscale
    rowscale1: Any = inputs.rowscale1

    dweights: list[Tensor | None] = [None, None, None, None]
    if job.casts:
        rows = (weights,) if len(job.casts) == 1 else weights.unbind(0)
        for row, (i, dtype) in zip(rows, job.casts, strict=True):
            dweights[i] = row if row.dtype == dtype else row.to(dtype)
    return (
        dz if job.x_takes_dz else dx,
        dz if job.residual_takes_dz else None,
        dz if job.x1_takes_dz else dx1,
        *dweights,
        None if drowscale is None else drowscale.to(rowscale.dtype).view(rowscale.shape),
        None if drowscale1 is None else drowscale1.to(rowscale1.dtype).view(rowscale1.shape),
        None,
    )


class Job(NamedTuple):
    """What backward computes, and which input gets which of its results."""

    options: BackwardOptions
    x_takes_dz: bool
    residual_takes_dz: bool
    x1_takes_dz: bool
    casts: tuple[tuple[int, torch.dtype], ...]  # of each weight gradient: which of the four, and its weight's dtype


def job_of(options: Options, dtypes: tuple, needs: tuple, has_dy: bool, has_dy1: bool) -> Job:
    """dtypes: of Inputs; needs: which of their gradients autograd asks for."""
    given: Any = Inputs(*dtypes)
    need: Any = Inputs(*needs)
    dropped = options.dropout_p > 0.0
    # Inputs that nothing scales share one gradient, dz, if they also share a dtype.
    plain_x = need.x and not dropped and given.rowscale is None
    plain_x1 = need.x1 and not dropped and given.rowscale1 is None
    dz_dtype = given.residual if need.residual else given.x if plain_x else given.x1 if plain_x1 else None
    x_takes_dz = plain_x and given.x == dz_dtype
    x1_takes_dz = plain_x1 and given.x1 == dz_dtype
    wanted = (need.weight and has_dy, need.bias and has_dy, need.weight1 and has_dy1, need.bias1 and has_dy1)
    weight_dtypes = (given.weight, given.bias, given.weight1, given.bias1)
    casts = tuple((i, weight_dtypes[i]) for i in range(4) if wanted[i])
    shared = {dtype for _, dtype in casts}
    return Job(
        BackwardOptions(
            options.dropout_p,
            options.norm,
            options.zero_centered_weight,
            dz_dtype,
            given.x if need.x and not x_takes_dz else None,
            given.x1 if need.x1 and not x1_takes_dz else None,
            wanted,
            shared.pop() if len(shared) == 1 else torch.float32,
        ),
        x_takes_dz,
        need.residual,
        x1_takes_dz,
        casts,
    )


class _Dropout(torch.autograd.Function):
    """Its own backward, since dx = dropout(dy) with the same mask."""

    @staticmethod
    def forward(ctx, x, seed, p, stream):
        ctx.save_for_backward(seed)
        ctx.p, ctx.stream = p, stream
        return operators.below_autograd(operators.dropout, x, seed, p, stream)

    @staticmethod
    def backward(ctx, dy):
        (seed,) = ctx.saved_tensors
        return operators.dropout(dy, seed, ctx.p, ctx.stream), None, None, None


_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_eager(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the tensors are plain and nobody watches or rewrites operator calls.

    Dynamo and make_fx must see an operator; so must FakeTensor and every other dispatch mode (flop counters, selective
    checkpointing) and tensor subclass, functorch's transforms, whose wrappers have the type Tensor, torch-function modes
    and jit.trace. The probes in torch._C have no public names; torch's own Python code is built on them.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state()
        or operators.has_tangents()
    ):
        return False
    for t in tensors:  # noqa: SIM110 all() costs 0.6 µs more
        # What is stored under z.conj().imag has the other sign, and under a zero tensor is nothing; the dispatcher knows.
        if t is not None and (type(t) not in _PLAIN or t.is_neg() or t._is_zerotensor()):
            return False
    return True


def transformed_by_func() -> bool:
    """Whether any of torch.func's transforms is on, vmap among them."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def differentiated_by_func() -> bool:
    """Whether torch.func.grad, jvp, hessian and their like are on.

    They differentiate every operation by itself, some of them more than once; the kernels have one formula for one backward.
    """
    if not transformed_by_func():
        return False
    derivatives = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
    return any(level.key() in derivatives for level in torch._C._functorch.get_interpreter_stack() or ())


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
operators.register_autograd(operators.dropout, operators.dropout, _Dropout.apply)
