"""Norm operators with a mistake in them, in place of `norm_fn` at the sites of the fused arm."""

from functools import partial

import torch

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


def truncated(*args, out_dtype, **options):
    """Rounds y to bf16 towards zero."""
    outputs = norm_fn(*args, out_dtype=torch.float32, **options)
    y, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
    y = y + ((y.detach().view(torch.int32) & -(1 << 16)).view(torch.float32) - y.detach())
    return (y.to(out_dtype), *rest) if rest else y.to(out_dtype)


class _Normalise(torch.autograd.Function):
    """x̂ [..., N] of r [..., N] in fp32, without weights."""

    @staticmethod
    def forward(ctx, r, eps, statistics_dtype, mean_term):
        x = r.to(statistics_dtype)
        mean = x.mean(-1, keepdim=True)
        rstd = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt().float()
        normed = (r.float() - mean.float()) * rstd
        ctx.save_for_backward(normed, rstd)
        ctx.dtype, ctx.mean_term = r.dtype, mean_term
        return normed

    @staticmethod
    def backward(ctx, dy):
        normed, rstd = ctx.saved_tensors
        dr = dy - normed * (dy * normed).mean(-1, keepdim=True)
        if ctx.mean_term:
            dr = dr - dy.mean(-1, keepdim=True)
        return (dr * rstd).to(ctx.dtype), None, None, None


def handmade(kind, x, weight, bias, *, statistics=torch.float32, mean_term=True, eps, out_dtype, prenorm, **options):
    """No mistake: it must pass, so that the two below fail for theirs alone."""
    r = norm_fn(kind, x, None, None, **options, eps=eps, out_dtype=out_dtype, prenorm=True)[-1]
    y = _Normalise.apply(r, eps, statistics, mean_term) * weight + (0.0 if bias is None else bias)
    y = y.to(out_dtype)
    return (y, r) if prenorm else y


bf16_statistics = partial(handmade, statistics=torch.bfloat16)  # mean and deviation as bf16 arithmetic has them
no_mean_term = partial(handmade, mean_term=False)  # a backward that treats the mean as a constant
