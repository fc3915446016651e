"""Norms as model code has them, by their published formulas; some of them near misses."""

import torch
import torch.nn.functional as F
from torch import nn


class Llama(nn.Module):
    """Rounds x̂ to the input's dtype before the weight. Mistral's and Qwen's are the same."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class Gemma(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class T5(nn.Module):
    """The output has the weight's dtype."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        x = hidden_states * torch.rsqrt(hidden_states.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x.to(self.weight.dtype) if self.weight.dtype in (torch.float16, torch.bfloat16) else x)


class NanoGPT(nn.Module):
    """LayerNorm with an optional bias and eps written into forward."""

    def __init__(self, width, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, input):
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class OddlyNamed(nn.Module):
    """Neither its class nor its parameters are called what they are."""

    def __init__(self, width):
        super().__init__()
        self.shift, self.gain = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))

    def forward(self, x):
        d = x - x.mean(-1, keepdim=True)
        return d / (d.square().mean(-1, keepdim=True) + 3e-5).sqrt() * self.gain + self.shift


class InFp32(nn.LayerNorm):
    """A subclass that overrides forward and computes the same."""

    def forward(self, input):
        return super().forward(input.float()).type_as(input)


class Weightless(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class WeightlessNorm(Weightless):
    pass


class InPlace(Llama):
    """Overwrites its input."""

    def forward(self, x):
        return x.mul_(torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) * self.weight


class InPlaceDetached(Llama):
    """Overwrites its input, with a statistic that has no gradient."""

    def forward(self, x):
        return x.mul_(torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-6)) * self.weight


class WithoutGradient(NanoGPT):
    """As kernels for inference are."""

    @torch.no_grad()
    def forward(self, input):
        return super().forward(input)


# ---- near misses -------------------------------------------------------------------------------------------------------------


class RMSNormOfPart(Llama):
    """The root mean square of the first quarter."""

    def forward(self, x):
        part = x[..., : x.shape[-1] // 4]
        return self.weight * x * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6)


class UnbiasedLayerNorm(NanoGPT):
    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt() + self.bias


class EpsOutsideRMSNorm(Llama):
    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6)


class UnitNorm(Llama):
    """F.normalize: without eps under the root."""

    def forward(self, x):
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * self.weight


class ScaledLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return 0.5 * super().forward(input)


class GatedRMSNorm(Llama):
    def forward(self, x, gate=None):
        return super().forward(x) * (1.0 if gate is None else F.silu(gate))


class NoisyLayerNorm(nn.LayerNorm):
    """Another function in training."""

    def forward(self, input):
        y = super().forward(input)
        return y + 0.1 * torch.randn_like(y) if self.training else y


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of [B, C, H, W]."""

    def forward(self, input):
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class AbsoluteWeightRMSNorm(Llama):
    """The same as long as weights are positive."""

    def forward(self, x):
        return self.weight.abs() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class ClampedLayerNorm(nn.LayerNorm):
    """The same until a feature stands out."""

    def forward(self, input):
        return super().forward(input).clamp(-10, 10)


class DetachedRMSNorm(Llama):
    """The same forward; the statistic has no gradient."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-6)


class DetachedWeightLayerNorm(nn.LayerNorm):
    def forward(self, input):
        return F.layer_norm(input, self.normalized_shape, self.weight.detach(), self.bias, self.eps)


class EpsByDtypeLayerNorm(NanoGPT):
    """eps 1e-5 in fp32, 1e-3 in half precision, as much diffusion code has it."""

    def forward(self, x):
        eps = 1e-5 if x.dtype == torch.float32 else 1e-3
        d = x - x.mean(-1, keepdim=True)
        return d * (d.square().mean(-1, keepdim=True) + eps).rsqrt() * self.weight + self.bias


class BuffersRMSNorm(Llama):
    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))


def with_plain_tensors(norm):
    """As FullyShardedDataParallel leaves a norm: its parameters are in a flat one, of which these are views."""
    for name, parameter in list(norm.named_parameters()):
        delattr(norm, name)
        setattr(norm, name, parameter.data)
    return norm


def randomised(module):
    """The module, of which no weight is 1 or 0 any more."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module
