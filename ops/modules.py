"""The norms as modules. They are torch's own classes with another forward: the same parameters, so checkpoints interchange,
and code that looks for norm layers with isinstance (to exempt them from weight decay, say) finds them."""

from typing import Any

import torch
from torch import Tensor, nn

from .checks import as_device, check_dropout_p, check_eps, check_flags, check_size
from .functional import norm_fn
from .reference import Norm


class _Fused:
    """What both do in another way than torch's."""

    kind: Norm
    weight: Any
    bias: Any
    eps: Any
    dropout_p: float
    zero_centered_weight: bool
    training: bool

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        if self.zero_centered_weight and self.weight is not None:
            nn.init.zeros_(self.weight)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor | None, ...]:
        """y (..., N), or with prenorm (y, the new residual stream); see `norm_fn`."""
        return norm_fn(
            self.kind, x, self.weight, self.bias, residual,
            eps=self.eps, dropout_p=self.dropout_p if self.training else 0.0, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32, zero_centered_weight=self.zero_centered_weight,
        )  # fmt: skip

    def extra_repr(self) -> str:
        given = super().extra_repr()  # type: ignore[misc]
        return f"{given}, dropout_p={self.dropout_p}, zero_centered_weight={self.zero_centered_weight}"


class LayerNorm(_Fused, nn.LayerNorm):  # type: ignore[misc]
    """Dropout → add → LayerNorm.

    Args:
        hidden_size: N, the size of the last dimension.
        eps: added to the variance: 1e-5 here, as in torch.nn.LayerNorm; the functions have 1e-6.
        dropout_p: in [0, 1); applied to x in training mode only.
        zero_centered_weight: the weight is stored as its distance from 1, and starts at 0.
        elementwise_affine, bias: as in torch.nn.LayerNorm.
    """

    kind = Norm.layernorm

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        device = _checked(
            "LayerNorm", hidden_size, eps, dropout_p, device, dtype, zero_centered_weight, elementwise_affine, bias
        )
        self.dropout_p, self.zero_centered_weight = dropout_p, zero_centered_weight
        super().__init__(hidden_size, eps, elementwise_affine, bias, device, dtype)


class RMSNorm(_Fused, nn.RMSNorm):  # type: ignore[misc]
    """Dropout → add → RMSNorm. Arguments as for `LayerNorm`. eps is 1e-5 by default, where torch's depends on the dtype."""

    kind = Norm.rmsnorm

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        elementwise_affine: bool = True,
    ) -> None:
        device = _checked("RMSNorm", hidden_size, eps, dropout_p, device, dtype, zero_centered_weight, elementwise_affine)
        self.dropout_p, self.zero_centered_weight = dropout_p, zero_centered_weight
        super().__init__(hidden_size, eps, elementwise_affine, device, dtype)
        # As FlashAttention's: blocks pass norm.weight and norm.bias on, whichever norm it is.
        self.register_parameter("bias", None)


MODULES: dict[Norm, type[nn.Module]] = {Norm.layernorm: LayerNorm, Norm.rmsnorm: RMSNorm}


def _checked(name, hidden_size, eps, dropout_p, device, dtype, zero_centered_weight, elementwise_affine, bias=True):
    """The device, if one is given."""
    check_size(name, "hidden_size", hidden_size, 1)
    check_eps(name, eps)
    check_dropout_p(name, "dropout_p", dropout_p)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{name}: dtype must be a float dtype of torch, got {dtype!r}")
    check_flags(name, zero_centered_weight=zero_centered_weight, elementwise_affine=elementwise_affine, bias=bias)
    return None if device is None else as_device(name, device)
