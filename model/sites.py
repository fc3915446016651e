"""A norm site as a function of its tensors: in one kernel, and in PyTorch's operators."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ops import Norm, norm_fn, seeded_dropout
from ops.reference import NORMS


class Inputs(NamedTuple):
    """The tensors of one call; see NormSite.forward. Row scales are [...] fp32, of drop path."""

    x: Tensor
    residual: Tensor | None
    x1: Tensor | None
    rowscale: Tensor | None
    rowscale1: Tensor | None
    seed: Tensor | None


class Affine(NamedTuple):
    """The parameters of a site."""

    weight: Tensor | None
    bias: Tensor | None
    weight1: Tensor | None
    bias1: Tensor | None
    scalars: Tensor | None
    branch_weight: Tensor | None
    branch_bias: Tensor | None
    branch_scalars: Tensor | None


class How(NamedTuple):
    """What a norm site does, apart from its tensors."""

    kind: Norm
    branch_kind: Norm
    parallel: bool  # there is y1
    zero_centered: bool
    residual_scale: float
    eps: float
    dropout: float  # 0 in evaluation
    shared_masks: bool
    prenorm: bool
    stream_dtype: torch.dtype  # of the new residual stream
    out_dtype: torch.dtype  # of y and y1


Drop = Callable[[Tensor, Tensor | None, Tensor | None, int, How], Tensor]
Normalise = Callable[..., Tensor]  # of the arguments of `normalise`
Outputs = Tensor | tuple[Tensor, ...]


def drop(x: Tensor, rowscale: Tensor | None, seed: Tensor | None, stream: int, how: How) -> Tensor:
    """dropout(x · rowscale), in x's dtype."""
    if rowscale is not None:
        x = (x * rowscale[..., None]).to(x.dtype)  # the factor stays fp32, as bf16 has an error of up to 0.4 %
    if how.dropout and how.shared_masks:
        assert seed is not None  # GPT draws one
        return seeded_dropout(x, how.dropout, seed, stream)
    return F.dropout(x, how.dropout)


def normalise(r: Tensor, weight: Tensor | None, bias: Tensor | None, how: How, scalars: Tensor | None = None) -> Tensor:
    # The stream may be bf16 while the weights are fp32. Autocast converts the inputs of F.layer_norm to fp32, but
    # not everywhere those of F.rms_norm, which would then run many small kernels. This converts both.
    dtype = r.dtype if weight is None else torch.promote_types(r.dtype, weight.dtype)
    weight, bias, scalars = (None if t is None else t.to(dtype) for t in (weight, bias, scalars))
    if weight is not None and how.zero_centered:
        weight = 1.0 + weight
    return NORMS[how.kind](r.to(dtype), weight, bias, how.eps, scalars)


def fused_site(inputs: Inputs, affine: Affine, how: How) -> Outputs:
    """The site in one kernel."""
    outputs = norm_fn(
        how.kind, inputs.x, residual=inputs.residual, x1=inputs.x1, rowscale=inputs.rowscale, rowscale1=inputs.rowscale1,
        **affine._asdict(), branch_norm=how.branch_kind, zero_centered_weight=how.zero_centered,
        residual_scale=how.residual_scale, eps=how.eps, dropout_p=how.dropout, prenorm=how.prenorm,
        residual_in_fp32=how.stream_dtype == torch.float32, out_dtype=how.out_dtype, seed=inputs.seed,
    )  # fmt: skip
    return cast(Outputs, outputs)  # only masks can be None, and none are asked for


def torch_site(inputs: Inputs, affine: Affine, how: How, drop: Drop = drop, norm: Normalise = normalise) -> Outputs:
    """The site in PyTorch's operators: F.dropout, +, F.layer_norm or F.rms_norm, as people write them."""
    x, residual = inputs.x, inputs.residual
    if how.branch_kind != Norm.none:
        branch = affine.branch_weight, affine.branch_bias, how._replace(kind=how.branch_kind), affine.branch_scalars
        x = norm(x, *branch).to(x.dtype)
    z = drop(x, inputs.rowscale, inputs.seed, 0, how)
    if residual is not None:
        z = (residual if how.residual_scale == 1.0 else how.residual_scale * residual) + z
    if inputs.x1 is not None:
        z = z + drop(inputs.x1, inputs.rowscale1, inputs.seed, 1, how)
    stream = z.to(how.stream_dtype)

    def normed(weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = stream if how.kind == Norm.none else norm(stream, weight, bias, how, affine.scalars)
        return y.to(how.out_dtype)

    outputs = [normed(affine.weight, affine.bias)]
    if how.parallel:
        outputs.append(normed(affine.weight1, affine.bias1))
    if how.prenorm:
        outputs.append(stream)
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def norm_rows(x: Tensor, affine: Affine, how: How) -> Tensor:
    """A site of one input and one output: the norm alone."""
    return cast(Tensor, torch_site(Inputs(x, None, None, None, None, None), affine, how))


@cache
def compiled_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function through torch.compile, and nothing around it. Inside a model that is compiled whole it is a part of that.

    All sites share it. Each kind of call (first, middle or final site, training or evaluation) is compiled once, so PyTorch's
    limit of recompilations, after which fullgraph raises, is set higher than its 8.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(function, fullgraph=True)


def activation_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a linear layer computes with input x: autocast's dtype if autocast is on, else the dtype of x.

    A norm that writes y in this dtype saves the cast that autocast would insert before the layer.
    """
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
