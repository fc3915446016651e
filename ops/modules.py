"""The norms as modules. They are torch's own classes with another forward: the same parameters, so checkpoints interchange,
and code that looks for norm layers with isinstance (to exempt them from weight decay, say) finds them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .checks import as_dropout_p, as_eps, as_flags, as_size
from .norm import norm_fn
from .reference import Norm


class _Fused:
    """What both do in another way than torch's, which come behind it in the order of classes."""

    kind: Norm
    weight: Any
    bias: Any
    eps: Any
    training: bool

    def __init__(
        self,
        hidden_size: int | Sequence[int],
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        elementwise_affine: bool = True,
        **bias: bool,
    ) -> None:
        name = type(self).__name__
        if isinstance(hidden_size, list | tuple):
            if len(hidden_size) != 1:
                raise ValueError(
                    f"{name}: hidden_size is {hidden_size!r}, expected one number: the last dimension is normalised"
                )
            (hidden_size,) = hidden_size
        hidden_size = as_size(name, "hidden_size", hidden_size, 1)
        self.dropout_p = as_dropout_p(name, "dropout_p", dropout_p)
        flags = as_flags(name, zero_centered_weight=zero_centered_weight, elementwise_affine=elementwise_affine, **bias)
        self.zero_centered_weight = flags.pop("zero_centered_weight")
        super().__init__(hidden_size, as_eps(name, eps), device=device, dtype=dtype, **flags)  # type: ignore[call-arg]
        if self.kind is Norm.rmsnorm:  # as FlashAttention's: blocks pass norm.weight and norm.bias on, whichever norm it is
            self.register_parameter("bias", None)  # type: ignore[attr-defined]

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
        hidden_size: N, the size of the last dimension, which is normalised; or (N,). ValueError for several dimensions, which
            torch.nn.LayerNorm alone takes.
        eps: added to the variance: 1e-5 here, as in torch.nn.LayerNorm; the functions have 1e-6.
        dropout_p: in [0, 1); applied to x in training mode only.
        zero_centered_weight: the weight is stored as its distance from 1, and starts at 0.
        device, dtype: of the weights, as in torch.nn.LayerNorm.
        elementwise_affine: whether there is a weight.
        bias: by name; whether there is a bias too, True by default.
    """

    kind = Norm.layernorm


class RMSNorm(_Fused, nn.RMSNorm):  # type: ignore[misc]
    """Dropout → add → RMSNorm. Arguments as for `LayerNorm`, but for bias. eps is 1e-5 by default, where torch's depends on the
    dtype."""

    kind = Norm.rmsnorm


MODULES: dict[Norm, type[nn.Module]] = {Norm.layernorm: LayerNorm, Norm.rmsnorm: RMSNorm}
