"""Modulated norms: values and gradients against fp64, samples of any number and length, vectors as they lie in memory."""

import pytest
import torch
import torch.nn.functional as F

from ops import modulated_norm_fn

from .cases import BF16, FP16, FP32, covering

VECTORS = ("scale", "shift", "gate")
ERROR = {FP32: 3e-6, BF16: 2**-7, FP16: 2**-10}


def unfused(x, scale=None, shift=None, residual=None, gate=None, weight=None, bias=None, rms=False, eps=1e-6):
    """As people write it; y and r. Vectors are [B, N]."""

    def row(t, without):
        return without if t is None else t[:, None]

    r = row(gate, 1.0) * x + (0.0 if residual is None else residual)
    norm = F.rms_norm(r, r.shape[-1:], weight, eps) if rms else F.layer_norm(r, r.shape[-1:], weight, None, eps)
    norm = norm if bias is None else norm + bias
    return norm * (1 + row(scale, 0.0)) + row(shift, 0.0), r


def draw(device, B, T, N, x=FP32, stream=None, vectors=FP32, affine=None, names=VECTORS):
    """What modulated_norm_fn takes; scale, shift and gate are views of one projection."""
    generator = torch.Generator().manual_seed(B * 100 + N)

    def normal(*shape, dtype=FP32):
        return torch.randn(shape, generator=generator).to(device, dtype)

    given = {"x": normal(B, T, N, dtype=x) + 0.3}
    if stream is not None:
        given["residual"] = 2 * normal(B, T, N, dtype=stream)
    vectors = dict(zip(VECTORS, normal(B, 3 * N, dtype=vectors).chunk(3, -1), strict=True))
    given |= {name: vectors[name] for name in names}
    if affine is not None:
        given |= {"weight": 1 + 0.3 * normal(N, dtype=affine), "bias": normal(N, dtype=affine)}
    return given


def check(given, rms=False, uses=("y", "r"), frozen=()):
    """Values and gradients against fp64, on the rounded r. Returns ours."""
    leaves = {name: t.detach().requires_grad_(name not in frozen) for name, t in given.items()}
    exact = {name: t.detach().double().requires_grad_(name not in frozen) for name, t in given.items()}
    found = dict(zip(("y", "r"), modulated_norm_fn(**leaves, is_rms_norm=rms, prenorm=True), strict=True))
    expected = dict(zip(("y", "r"), unfused(**exact, rms=rms), strict=True))
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(t.shape, generator=generator).to(t) for t in found.values()]
    upstream = [t for name, t in zip(found, upstream, strict=True) if name in uses]
    wanted = [name for name in leaves if name not in frozen]
    for outputs, tensors, dtype in ((found, leaves, None), (expected, exact, torch.float64)):
        of, dy = [outputs[name] for name in uses], [t if dtype is None else t.to(dtype) for t in upstream]
        gradients = torch.autograd.grad(of, [tensors[name] for name in wanted], dy, allow_unused=True)
        outputs |= {f"d{name}": t for name, t in zip(wanted, gradients, strict=True)}
    for name, right in expected.items():
        t = found[name]
        if right is None:
            assert t is None
            continue
        allowed = max(ERROR[u.dtype] for u in (t, *given.values()) if u.shape[-1:] == t.shape[-1:])
        error = ((t.double() - right).norm() / right.norm().clamp(min=1e-30)).item()
        assert t.shape == right.shape and error <= allowed, f"{name}: error {error:.1e}, allowed {allowed:.1e}"
    assert found["y"].dtype == given["x"].dtype
    return found


CASES = covering(
    rms=[False, True], batch=[1, 3, 64], tokens=[1, 5, 17], width=[7, 48, 160, 1100], x=[BF16, FP32, FP16],
    stream=[None, BF16, FP32], vectors=[FP32, BF16], affine=[None, FP32], names=[VECTORS, VECTORS[:2], VECTORS[2:], ()],
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(device, case):
    rms, batch, tokens, width = (case.pop(name) for name in ("rms", "batch", "tokens", "width"))
    check(draw(device, batch, tokens, width, **case), rms)
