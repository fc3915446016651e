"""The norm switch: the one place where an implementation is chosen.

A norm site takes the output of the previous sublayer and the residual stream. It returns the input of the next sublayer and the
new stream:

    z = dropout(B(x) · rowscale) + dropout(x1 · rowscale1) + a · residual    x1: the MLP's output where it runs beside attention
    r = z in the residual dtype                                              the new residual stream
    y = N(r) · weight + bias,   y1 = N(r) · weight1 + bias1                  y1 only at parallel sites

`norm.placement` says which of N and B, the norm of the branch, a site has (`norms_of_site`). Where N stands after the add
(norm.placement=post), y is the stream too.

`norm.impl=fused` computes this in one kernel. `torch` uses PyTorch's operators, and `compiled` is that same code under
torch.compile, alone: `model.sites`. `model.libraries` has the norms of other libraries. Parameters, their names and their
initial values do not depend on the implementation, so a checkpoint of one loads in the other.
"""

from typing import Any, assert_never

import torch
from torch import Tensor, nn

from configs.schema import DropoutMasks, NormConfig, NormImpl, NormKind, NormWeight
from model import libraries
from model.sites import Affine, How, Inputs, Outputs, activation_dtype, compiled_alone, fused_site, torch_site
from ops import Norm, seeded_dropout


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

    def forward(
        self, x: Tensor, residual: Tensor | None = None, x1: Tensor | None = None, seed: Tensor | None = None
    ) -> Outputs:
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
        outputs = self.compute(Inputs(x, residual, x1, rowscale, rowscale1, seed), self._affine(), how)
        return (outputs, outputs) if self.y_is_stream and isinstance(outputs, Tensor) else outputs

    def compute(self, inputs: Inputs, affine: Affine, how: How) -> Outputs:
        match self.impl:
            case NormImpl.fused:
                return fused_site(inputs, affine, how)
            case NormImpl.torch:
                return torch_site(inputs, affine, how)
            case NormImpl.compiled:
                return compiled_alone(torch_site)(inputs, affine, how)
            case NormImpl.flash_attn | NormImpl.liger | NormImpl.quack:
                return libraries.SITES[self.impl](inputs, affine, how)
            case _:
                assert_never(self.impl)

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
