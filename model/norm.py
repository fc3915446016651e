"""The norm switch: the one place where an implementation is chosen.

A norm site takes the output of the previous sublayer and the residual stream. It returns the input of the next sublayer and the
new stream:

    z = dropout(x · rowscale) + dropout(x1 · rowscale1) + residual      x1: the MLP's output where it runs beside attention
    r = z in the residual dtype                                         the new residual stream
    y = norm(r) · weight + bias,   y1 = norm(r) · weight1 + bias1       y1 only at parallel sites

`norm.impl=fused` computes this in one kernel. `torch` uses PyTorch's operators, and `compiled` is that same code under
torch.compile, alone. `model.libraries` has the norms of other libraries. Parameters, their names and their initial values do
not depend on the implementation, so a checkpoint of one loads in the other.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import DropoutMasks, NormConfig, NormImpl
from model import libraries
from ops import Norm, norm_fn, seeded_dropout
from ops.reference import NORMS


class Inputs(NamedTuple):
    """The tensors of one call of a norm site; see PreNorm.forward. Row scales are [...] fp32, of drop path."""

    x: Tensor
    residual: Tensor | None
    x1: Tensor | None
    rowscale: Tensor | None
    rowscale1: Tensor | None
    seed: Tensor | None


class Affine(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    weight1: Tensor | None
    bias1: Tensor | None


class How(NamedTuple):
    """What a norm site does, apart from its tensors."""

    kind: Norm
    eps: float
    dropout: float  # 0 in evaluation
    shared_masks: bool
    prenorm: bool
    stream_dtype: torch.dtype  # of the new residual stream
    out_dtype: torch.dtype  # of y and y1


Drop = Callable[[Tensor, Tensor | None, Tensor | None, int, How], Tensor]
Normalise = Callable[[Tensor, Tensor, Tensor | None, How], Tensor]
Outputs = Tensor | tuple[Tensor, ...]


class PreNorm(nn.Module):
    """One norm site: dropout, drop path, residual add and norm.

    `weight` and `bias` are named and shaped [width] as in torch.nn.LayerNorm and torch.nn.RMSNorm (which has no bias); a
    parallel site also has `weight1` and `bias1`.

    Args:
        width: of the normalised (last) dimension.
        norm: implementation, kind and eps.
        bias: whether a LayerNorm has a bias. Other norms never have one.
        dropout: probability of dropping an element of x and x1 in training.
        drop_path: probabilities of dropping a whole sample of x and of x1 in training.
        parallel: a second pair of weights, and a second output y1 for them.
        prenorm: return the new residual stream too. The final norm does not need it.
        residual_in_fp32: a stream that starts here is fp32, else it has x's dtype. A stream that is passed in keeps its dtype.
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
    ) -> None:
        super().__init__()
        self.width, self.impl, self.kind, self.eps, self.masks = width, norm.impl, Norm[norm.kind], norm.eps, norm.dropout_masks
        self.dropout, self.drop_path, self.prenorm, self.residual_in_fp32 = dropout, drop_path, prenorm, residual_in_fp32
        bias = bias and self.kind == Norm.layernorm

        def parameter(exists: bool, value: float) -> nn.Parameter | None:
            return nn.Parameter(torch.full((width,), value)) if exists else None

        self.weight = nn.Parameter(torch.ones(width))
        self.bias = parameter(bias, 0.0)
        self.weight1 = parameter(parallel, 1.0)
        self.bias1 = parameter(parallel and bias, 0.0)
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
        if self.impl == NormImpl.fused:
            return self._fused(x, residual, x1, rowscale, rowscale1, dropout, seed)
        if residual is not None:
            stream_dtype = residual.dtype
        else:
            stream_dtype = torch.float32 if self.residual_in_fp32 and x.dtype != torch.float64 else x.dtype
        shared = self.masks == DropoutMasks.shared
        how = How(self.kind, self.eps, dropout, shared, self.prenorm, stream_dtype, activation_dtype(x))
        inputs = Inputs(x, residual, x1, rowscale, rowscale1, seed)
        affine = Affine(self.weight, self.bias, self.weight1, self.bias1)
        if self.impl == NormImpl.torch:
            return torch_site(inputs, affine, how, self._drop, self._norm)
        if self.impl == NormImpl.compiled:
            return compiled_alone(torch_site)(inputs, affine, how)
        return libraries.SITES[self.impl](inputs, affine, how)

    def as_function(self, x: Tensor) -> tuple[Affine, How]:
        """What `norm_rows` takes to normalise as this module does, in evaluation or of a site without dropout."""
        how = How(self.kind, self.eps, 0.0, False, False, x.dtype, activation_dtype(x))
        return Affine(self.weight, self.bias, self.weight1, self.bias1), how

    def _fused(
        self,
        x: Tensor,
        residual: Tensor | None,
        x1: Tensor | None,
        rowscale: Tensor | None,
        rowscale1: Tensor | None,
        dropout: float,
        seed: Tensor | None,
    ) -> Tensor | tuple[Tensor, ...]:
        outputs = norm_fn(
            self.kind, x, self.weight, self.bias, residual=residual, x1=x1, weight1=self.weight1, bias1=self.bias1,
            eps=self.eps, dropout_p=dropout, rowscale=rowscale, rowscale1=rowscale1,
            prenorm=self.prenorm, residual_in_fp32=self.residual_in_fp32, out_dtype=activation_dtype(x), seed=seed,
        )  # fmt: skip
        return cast("Tensor | tuple[Tensor, ...]", outputs)  # only masks can be None, and none are asked for

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


def drop(x: Tensor, rowscale: Tensor | None, seed: Tensor | None, stream: int, how: How) -> Tensor:
    """dropout(x · rowscale), in x's dtype."""
    if rowscale is not None:
        x = (x * rowscale[..., None]).to(x.dtype)  # the factor stays fp32, as bf16 has an error of up to 0.4 %
    if how.dropout and how.shared_masks:
        assert seed is not None  # GPT draws one
        return seeded_dropout(x, how.dropout, seed, stream)
    return F.dropout(x, how.dropout)


def normalise(r: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
    # The stream may be bf16 while the weights are fp32. Autocast converts the inputs of F.layer_norm to fp32, but
    # not everywhere those of F.rms_norm, which would then run many small kernels. This converts both.
    dtype = torch.promote_types(r.dtype, weight.dtype)
    bias = None if bias is None else bias.to(dtype)
    return NORMS[how.kind](r.to(dtype), weight.to(dtype), bias, how.eps)


def torch_site(inputs: Inputs, affine: Affine, how: How, drop: Drop = drop, norm: Normalise = normalise) -> Outputs:
    """The site in PyTorch's operators: F.dropout, +, F.layer_norm or F.rms_norm, as people write them."""
    z = drop(inputs.x, inputs.rowscale, inputs.seed, 0, how)
    if inputs.residual is not None:
        z = inputs.residual + z
    if inputs.x1 is not None:
        z = z + drop(inputs.x1, inputs.rowscale1, inputs.seed, 1, how)
    stream = z.to(how.stream_dtype)

    outputs = [norm(stream, affine.weight, affine.bias, how).to(how.out_dtype)]
    if affine.weight1 is not None:
        outputs.append(norm(stream, affine.weight1, affine.bias1, how).to(how.out_dtype))
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
