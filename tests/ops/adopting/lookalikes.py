"""Norms as model code has them, by their published formulas, and a way to write near misses of them."""

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


class T5(Llama):
    """The output has the weight's dtype."""

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


def rms(x, eps=1e-6):
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


def like(norm, forward, name="OtherNorm"):
    """The module, with another forward in its class."""
    norm.__class__ = type(name, (type(norm),), {"forward": forward})
    return norm


def randomised(module):
    """The module, of which no weight is 1 or 0 any more."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return module
