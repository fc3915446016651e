"""The norm switch: the one place where an implementation is chosen.

A norm site takes the output of the previous sublayer and the residual stream. It returns the input of the next sublayer and the
new stream:

    z = dropout(B(x) · rowscale) + dropout(x1 · rowscale1) + a · residual    x1: the MLP's output where it runs beside attention
    r = z in the residual dtype                                              the new residual stream
    y = N(r) · weight + bias,   y1 = N(r) · weight1 + bias1                  y1 only at parallel sites

`norm.placement` says which of N and B, the norm of the branch, a site has (`norms_of_site`). Where N stands after the add
(norm.placement=post), y is the stream too.

`norm.impl=fused` computes this in one kernel. `torch` uses PyTorch's operators, and `compiled` is that same code under
torch.compile, alone. `model.libraries` has the norms of other libraries. Parameters, their names and their initial values do
not depend on the implementation, so a checkpoint of one loads in the other.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, assert_never, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import DropoutMasks, NormConfig, NormImpl, NormKind, NormWeight
from model import libraries
from ops import Norm, norm_fn, seeded_dropout
from ops.reference import NORMS


class Inputs(NamedTuple):
    """The tensors of one call of a norm site; see NormSite.forward. Row scales are [...] fp32, of drop path."""

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


class NormSite(nn.Module):
    """One norm site: dropout, drop path, residual add and norm.

    `weight` and `bias` are named and shaped [width] as in torch.nn.LayerNorm and torch.nn.RMSNorm (which has no bias); a
    parallel site also has `weight1` and `bias1`, and the norm of the branch `branch_weight` and `branch_bias`. `scalars` and
    `branch_scalars` are α of Dynamic Tanh, α and s of Derf.

    Args:
        width: of the normalised (last) dimension.
        norm: implementation, kind and eps.
        bias: whether a LayerNorm, Dynamic Tanh or Derf has a bias. RMSNorm never has one.
        dropout: probability of dropping an element of x and x1 in training.
        drop_path: probabilities of dropping a whole sample of x and of x1 in training.
        parallel: a second pair of weights, and a second output y1 for them.
        prenorm: return the new residual stream too. The final norm does not need it.
        residual_in_fp32: a stream that starts here is fp32, else it has x's dtype. A stream that is passed in keeps its dtype.
        norms: whether there is a norm of the stream, and one of the branch.
        y_is_stream: return y twice, in the stream's dtype, instead of y and r.
        residual_scale: factor of the residual.
    """

    def __init__(
        self,
        width: int,
        norm: NormConfig,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        drop_path: tuple[float, float] = (0.0, 0.0),
        parallel: bool = False,
        prenorm: bool = True,
        residual_in_fp32: bool = False,
        norms: tuple[bool, bool] = (True, False),
        y_is_stream: bool = False,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.kind, self.branch_kind = (Norm[norm.kind] if there else Norm.none for there in norms)
        self.width, self.impl, self.eps, self.shared_masks = width, norm.impl, norm.eps, are_shared(norm.dropout_masks)
        self.dropout, self.drop_path, self.prenorm, self.residual_in_fp32 = dropout, drop_path, prenorm, residual_in_fp32
        self.parallel = parallel
        one = first_weight(norm.weight)
        self.residual_scale, self.zero_centered = residual_scale, one == 0
        self.y_is_stream = y_is_stream

        def parameter(value: float | None, exists: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.full((width,), value)) if exists and value is not None else None

        def scalars(kind: Norm) -> nn.Parameter | None:
            start = [norm.alpha, 0.0][: kind.scalars]
            return nn.Parameter(torch.tensor(start)) if start else None

        bias = bias and one is not None and has_bias(norm.kind)
        self.weight = parameter(one, norms[0])
        self.bias = parameter(0.0, bias and norms[0])
        self.weight1 = parameter(one, parallel)
        self.bias1 = parameter(0.0, bias and parallel)
        self.scalars = scalars(self.kind)
        self.branch_weight = parameter(one, norms[1])
        self.branch_bias = parameter(0.0, bias and norms[1])
        self.branch_scalars = scalars(self.branch_kind)
        self._drop: Drop = drop  # of norm.impl=torch; parity tests exchange them
        self._norm: Normalise = normalise

    def forward(
        self, x: Tensor, residual: Tensor | None = None, x1: Tensor | None = None, seed: Tensor | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """The next sublayers' inputs and the new residual stream.

        Args:
            x: [..., width], the previous sublayer's output; [B, ..., width] where drop path is on.
            residual: like x, in the dtype of the stream. None at the first site.
            x1: like x; the MLP's output where x is attention's.
            seed: one int64 on x's device, from which masks are drawn. None: the implementation's generator draws them. In
                training, shared masks (norm.dropout_masks) and drop path need a seed.

        Returns:
            y [, y1 at parallel sites] [, residual with prenorm]: y and y1 in `activation_dtype(x)`.
        """
        dropout = self.dropout if self.training else 0.0
        rowscale = self._rowscale(x, self.drop_path[0], seed, stream=2)
        rowscale1 = self._rowscale(x1, self.drop_path[1], seed, stream=3)
        if residual is not None:
            stream_dtype = residual.dtype
        else:
            stream_dtype = torch.float32 if self.residual_in_fp32 and x.dtype != torch.float64 else x.dtype
        how = self._how(dropout, self.shared_masks, self.prenorm, stream_dtype, activation_dtype(x))
        if self.y_is_stream:
            how = how._replace(prenorm=False, out_dtype=stream_dtype)
        inputs = Inputs(x, residual, x1, rowscale, rowscale1, seed)
        affine = self._affine()
        match self.impl:
            case NormImpl.fused:
                outputs = fused_site(inputs, affine, how)
            case NormImpl.torch:
                outputs = torch_site(inputs, affine, how, self._drop, self._norm)
            case NormImpl.compiled:
                outputs = compiled_alone(torch_site)(inputs, affine, how)
            case NormImpl.flash_attn | NormImpl.liger | NormImpl.quack:
                outputs = libraries.SITES[self.impl](inputs, affine, how)
            case _:
                assert_never(self.impl)
        return (outputs, outputs) if self.y_is_stream and isinstance(outputs, Tensor) else outputs

    def as_function(self, x: Tensor) -> tuple[Affine, How]:
        """What `norm_rows` takes to normalise as this module does, in evaluation or of a site without dropout."""
        return self._affine(), self._how(0.0, False, False, x.dtype, activation_dtype(x))

    def _how(self, *more: Any) -> How:
        return How(self.kind, self.branch_kind, self.parallel, self.zero_centered, self.residual_scale, self.eps, *more)

    def _affine(self) -> Affine:
        return Affine(*[getattr(self, name) for name in Affine._fields])

    def _rowscale(self, x: Tensor | None, p: float, seed: Tensor | None, stream: int) -> Tensor | None:
        """Drop path's factor for each position of x [B, T, width]: 0 or 1/(1-p), with one draw per sample; [B, T] fp32.

        The draws come from the dropout generator (streams 2 and 3; dropout of x and x1 uses 0 and 1), so that both
        implementations drop the same samples.
        """
        if x is None or not p or not self.training:
            return None
        assert seed is not None  # GPT draws one
        samples = torch.ones(x.shape[0], 1, device=x.device)
        return seeded_dropout(samples, p, seed, stream).expand(x.shape[:-1])

    def extra_repr(self) -> str:
        return f"{self.width}, impl={self.impl}, kind={self.kind.name}, eps={self.eps}, dropout={self.dropout}"


def are_shared(masks: DropoutMasks) -> bool:
    match masks:
        case DropoutMasks.native:
            return False
        case DropoutMasks.shared:
            return True
        case _:
            assert_never(masks)


def first_weight(weight: NormWeight) -> float | None:
    """What a norm's weights start at; None: it has none."""
    match weight:
        case NormWeight.ones:
            return 1.0
        case NormWeight.zero_centered:
            return 0.0
        case NormWeight.none:
            return None
        case _:
            assert_never(weight)


def has_bias(kind: NormKind) -> bool:
    match kind:
        case NormKind.rmsnorm:
            return False
        case NormKind.layernorm | NormKind.dyt | NormKind.derf:
            return True
        case _:
            assert_never(kind)


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
