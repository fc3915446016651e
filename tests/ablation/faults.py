"""Norm operators with a mistake in them, in place of `norm_fn` at the sites of the fused arm."""

import torch
from torch import Tensor

from ops import norm_fn


def wrong_eps(eps):
    """An eps of its own, whatever the site asks for."""
    return lambda *args, **options: norm_fn(*args, **options | {"eps": eps})


def wrong_elements(*args, **options):
    """Dropout by another seed."""
    seed = options.pop("seed")
    return norm_fn(*args, **options, seed=None if seed is None else seed + 1)


def no_number(kind, x, *args, **options):
    """NaN where there was a number."""
    return norm_fn(kind, x * float("nan"), *args, **options)


def bf16_statistics(kind, x, weight, bias, **options):
    """Mean and deviation as they come out of bf16 arithmetic; everything else as it should be."""
    return _with_norm(_Bf16Statistics, kind, x, weight, bias, **options)


def no_mean_term(kind, x, weight, bias, **options):
    """A backward that treats the mean as a constant."""
    return _with_norm(_NoMeanTerm, kind, x, weight, bias, **options)


def truncated(*args, out_dtype, **options):
    """Rounds y to bf16 towards zero."""
    outputs = norm_fn(*args, out_dtype=torch.float32, **options)
    y, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
    y = y + ((y.detach().view(torch.int32) & -(1 << 16)).view(torch.float32) - y.detach())
    return (y.to(out_dtype), *rest) if rest else y.to(out_dtype)


def _with_norm(norm, kind, x, weight, bias, *, eps, out_dtype, prenorm, **options):
    """The right sum r, and a norm of it that may be wrong."""
    r = norm_fn(kind, x, None, None, **options, eps=eps, out_dtype=out_dtype, prenorm=True)[-1]
    y = norm.apply(r, eps) * weight + (0.0 if bias is None else bias)
    y = y.to(out_dtype)
    return (y, r) if prenorm else y


class _Normalise(torch.autograd.Function):
    """x̂ [..., N] of r [..., N] in fp32, without weights: right, unless a subclass says otherwise."""

    mean_term = True

    @staticmethod
    def statistics(r: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return r.mean(-1, keepdim=True), (r.var(-1, keepdim=True, correction=0) + eps).rsqrt()

    @classmethod
    def forward(cls, ctx, r, eps):
        mean, rstd = cls.statistics(r.float(), eps)
        normed = (r.float() - mean.float()) * rstd.float()
        ctx.save_for_backward(normed, rstd.float())
        ctx.dtype = r.dtype
        return normed

    @classmethod
    def backward(cls, ctx, dy):
        normed, rstd = ctx.saved_tensors
        dr = dy - normed * (dy * normed).mean(-1, keepdim=True)
        if cls.mean_term:
            dr = dr - dy.mean(-1, keepdim=True)
        return (dr * rstd).to(ctx.dtype), None


class _Bf16Statistics(_Normalise):
    @staticmethod
    def statistics(r: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        r = r.bfloat16()
        mean = r.mean(-1, keepdim=True)
        return mean, ((r - mean).square().mean(-1, keepdim=True) + eps).rsqrt()


class _NoMeanTerm(_Normalise):
    mean_term = False


def handmade(kind, x, weight, bias, **options):
    """No mistake: the mould of the faults above, which must pass so that they fail for their mistake alone."""
    return _with_norm(_Normalise, kind, x, weight, bias, **options)
