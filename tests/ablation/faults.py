"""Operators with a mistake in them, in place of `norm_fn` at the sites of the fused arm, of `linear_cross_entropy_fn`, and of
`gated_activation_fn`."""

from functools import partial

import torch

from ops import gated_activation_fn, linear_cross_entropy_fn, norm_fn


def with_options(operator, **wrong):
    """With these options, whatever is asked for."""
    return lambda *args, **options: operator(*args, **options | wrong)


def gradient_off(operator, factor):
    """The right value, with gradients that are too long."""

    def off(*args, **options):
        y = operator(*args, **options)
        return y.detach() + factor * (y - y.detach())

    return off


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


def handmade(kind, x, weight, bias, *, rough=False, mean_term=True, eps, out_dtype, prenorm, **options):
    """No mistake: it must pass, so that the two below fail for theirs alone."""
    r = norm_fn(kind, x, None, None, **options, eps=eps, out_dtype=out_dtype, prenorm=True)[-1]
    mean, rstd = _statistics(r.float(), eps)
    if rough:  # in forward alone
        mean, rstd = (
            exact + (off - exact).detach() for exact, off in zip((mean, rstd), _statistics(r.bfloat16(), eps), strict=True)
        )
    y = (r.float() - (mean if mean_term else mean.detach())) * rstd * weight + (0.0 if bias is None else bias)
    return (y.to(out_dtype), r) if prenorm else y.to(out_dtype)


def _statistics(r, eps):
    """Mean and 1 / deviation, in the arithmetic of r's dtype."""
    mean = r.mean(-1, keepdim=True)
    return mean.float(), ((r - mean).square().mean(-1, keepdim=True) + eps).rsqrt().float()


bf16_statistics = partial(handmade, rough=True)
no_mean_term = partial(handmade, mean_term=False)  # a backward that treats the mean as a constant


def weight_gradient_off(kind, x, weight, *args, **options):
    """The right value, with gradients of weights that are 3 % too long."""
    return norm_fn(kind, x, weight.detach() + 1.03 * (weight - weight.detach()), *args, **options)


loss_regularised = with_options(linear_cross_entropy_fn, z_loss=1e-4)
loss_gradient_off = gradient_off(linear_cross_entropy_fn, 1.01)
gate_gradient_off = gradient_off(gated_activation_fn, 1.1)


def gate_in_bf16(x, activation):
    return gated_activation_fn(x.bfloat16().to(x.dtype), activation=activation)
