"""The norms as modules. They are torch's own classes with another forward: the same parameters, so checkpoints interchange,
and code that looks for norm layers with isinstance (to exempt them from weight decay, say) finds them."""

import torch
from torch import Tensor, nn

from .checks import as_device, check_dropout_p, check_eps, check_flag, check_size
from .functional import norm_fn
from .reference import Norm


class LayerNorm(nn.LayerNorm):
    """Dropout → add → LayerNorm.

    Args:
        hidden_size: N, the size of the last dimension.
        eps: added to the variance.
        dropout_p: in [0, 1); applied to x in training mode only.
        zero_centered_weight: the weight is stored as its distance from 1, and starts at 0.
        elementwise_affine, bias: as in torch.nn.LayerNorm.
    """

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
        _check("LayerNorm", hidden_size, eps, dropout_p, dtype, zero_centered_weight, elementwise_affine, bias)
        device = None if device is None else as_device("LayerNorm", device)
        self.dropout_p, self.zero_centered_weight = dropout_p, zero_centered_weight
        super().__init__(hidden_size, eps, elementwise_affine, bias, device, dtype)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _centre_weight(self)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor | None, ...]:
        """y (..., N), or with prenorm (y, the new residual stream); see `layer_norm_fn`."""
        return _forward(Norm.layernorm, self, x, residual, prenorm, residual_in_fp32)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_extra_repr(self)}"


class RMSNorm(nn.RMSNorm):
    """Dropout → add → RMSNorm. Arguments as for `LayerNorm`. eps is 1e-5 by default, where torch's depends on the dtype."""

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
        _check("RMSNorm", hidden_size, eps, dropout_p, dtype, zero_centered_weight, elementwise_affine)
        device = None if device is None else as_device("RMSNorm", device)
        self.dropout_p, self.zero_centered_weight = dropout_p, zero_centered_weight
        super().__init__(hidden_size, eps, elementwise_affine, device, dtype)
        # As FlashAttention's: blocks pass norm.weight and norm.bias on, whichever norm it is.
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _centre_weight(self)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple[Tensor | None, ...]:
        """y (..., N), or with prenorm (y, the new residual stream); see `rms_norm_fn`."""
        return _forward(Norm.rmsnorm, self, x, residual, prenorm, residual_in_fp32)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_extra_repr(self)}"


MODULES: dict[Norm, type[nn.Module]] = {Norm.layernorm: LayerNorm, Norm.rmsnorm: RMSNorm}


def _check(name, hidden_size, eps, dropout_p, dtype, zero_centered_weight, elementwise_affine, bias=True):
    check_size(name, "hidden_size", hidden_size, 1)
    check_eps(name, eps)
    check_dropout_p(name, "dropout_p", dropout_p)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{name}: dtype must be a float dtype of torch, got {dtype!r}")
    flags = {"zero_centered_weight": zero_centered_weight, "elementwise_affine": elementwise_affine, "bias": bias}
    for argument, flag in flags.items():
        check_flag(name, argument, flag)


def _forward(norm, module, x, residual, prenorm, residual_in_fp32):
    return norm_fn(
        norm,
        x,
        module.weight,
        module.bias,
        residual,
        eps=module.eps,
        dropout_p=module.dropout_p if module.training else 0.0,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        zero_centered_weight=module.zero_centered_weight,
    )


def _centre_weight(module):
    if module.zero_centered_weight and module.weight is not None:
        nn.init.zeros_(module.weight)


def _extra_repr(module):
    return f"dropout_p={module.dropout_p}, zero_centered_weight={module.zero_centered_weight}"
