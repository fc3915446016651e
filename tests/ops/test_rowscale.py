"""Stochastic depth: a row with a scale of 0 counts as zeros, whatever it holds."""

from contextlib import nullcontext

import pytest
import torch

from ops import Norm, layer_norm_fn, norm_fn, seeded_dropout

from .cases import BF16, reference_path
from .tiles import SHAPES, tile_for

M, N, P, SEED = 5, 24, 0.3, 11
# Of tiles of two rows one is dropped in part, one altogether, and one is half past the end.
DROPPED = torch.tensor([False, True, True, True, False])
DROPPED1 = torch.tensor([False, False, True, False, True])


@pytest.fixture(params=["reference", *SHAPES])
def way(request, use_tile):
    """Through the reference, or through the kernels with tiles of this shape."""
    if request.param != "reference":
        use_tile(tile_for(N, request.param))
    with reference_path() if request.param == "reference" else nullcontext():
        yield


def site(device, poison, norm=Norm.layernorm, branches=1, learned=False, dropout_p=0.0, branch_norm=None):
    """Inputs whose dropped rows hold `poison`, and what comes of them: outputs, then gradients by the input's name."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape, shift=0.0):
        return (torch.randn(shape, generator=generator) + shift).to(device).requires_grad_()

    tensors = {"x": tensor(M, N), "residual": tensor(M, N), "weight": tensor(N), "bias": tensor(N)}
    if branch_norm is not None:
        tensors |= {"branch_weight": tensor(N), "branch_bias": tensor(N)}
        if branch_norm.scalars:
            tensors["branch_scalars"] = tensor(branch_norm.scalars, shift=1.0)
    if branches == 2:
        tensors["x1"] = tensor(M, N)
    for name, branch, dropped in (("rowscale", "x", DROPPED), ("rowscale1", "x1", DROPPED1))[:branches]:
        with torch.no_grad():
            tensors[branch][dropped.to(device)] = poison
            tensors[name] = tensor(M, shift=3.0).masked_fill_(dropped.to(device), 0.0).requires_grad_(learned)
    y, r = norm_fn(norm, **tensors, prenorm=True, seed=SEED, dropout_p=dropout_p, branch_norm=branch_norm)
    wanted = {name: t for name, t in tensors.items() if t.requires_grad}
    upstream = [torch.randn(M, N, generator=generator).to(device) for _ in range(2)]
    gradients = torch.autograd.grad((y, r), list(wanted.values()), upstream)
    return tensors, {"y": y, "r": r} | {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}


@pytest.mark.parametrize(
    ("norm", "branches", "dropout_p", "branch_norm"),
    [
        (Norm.rmsnorm, 2, P, None), (Norm.rmsnorm, 1, P, Norm.layernorm), (Norm.layernorm, 1, 0.0, Norm.derf),
    ],
)  # fmt: skip
def test_what_a_dropped_row_holds_reaches_nothing(norm, branches, dropout_p, branch_norm, way, device):
    how = {"norm": norm, "branches": branches, "dropout_p": dropout_p, "branch_norm": branch_norm}
    found, expected = (site(device, poison, **how)[1] for poison in (torch.nan, 0.0))
    with reference_path():
        reference = site(device, 0.0, **how)[1]
    for name in expected:
        torch.testing.assert_close(expected[name], reference[name], rtol=1e-4, atol=1e-5, msg=name)
        assert torch.isfinite(expected[name]).all() and torch.equal(found[name], expected[name]), name
    for name, dropped in (("dx", DROPPED), ("dx1", DROPPED1))[:branches]:
        assert (found[name][dropped] == 0).all() and (found[name][~dropped] != 0).any(1).all()


def test_a_learned_scale_of_zero_has_its_gradient(way, device):
    """Σ dropout(dz) · x, as for every other row: the scale can leave 0 again."""
    tensors, found = site(device, 2.0, learned=True, dropout_p=P)
    dz = seeded_dropout(found["dresidual"], P, SEED)
    torch.testing.assert_close(found["drowscale"], (dz * tensors["x"]).sum(1), rtol=1e-5, atol=1e-5)
    assert (found["drowscale"] != 0).all() and (found["dx"][DROPPED] == 0).all()
    # What the row holds reaches the gradient of its own scale, and no other.
    spoilt = site(device, torch.inf, learned=True, dropout_p=P)[1]
    assert not torch.isfinite(spoilt["drowscale"][DROPPED]).any()
    found["drowscale"], spoilt["drowscale"] = (t["drowscale"][~DROPPED] for t in (found, spoilt))
    assert all(torch.equal(spoilt[name], t) for name, t in found.items() if name != "r")


@pytest.mark.parametrize(
    "scale", [torch.tensor([1.0, -0.0, 1e-30, torch.nan]), torch.tensor([1.0, 0.0, 2.0, torch.nan]).to(BF16)]
)
def test_every_zero_drops_and_nothing_else_does(scale, way, device):
    x = torch.full((4, N), torch.nan, device=device)
    x[0] = 1.0
    y, r = layer_norm_fn(x, None, None, rowscale=scale.to(device), prenorm=True)
    assert (r[0] == 1).all() and (r[1] == 0).all() and (y[1] == 0).all() and r[2:].isnan().all()


@pytest.mark.parametrize("shape", ["leading", "flat", "bf16"])
def test_rowscale_belongs_to_its_row_in_either_shape(shape, device):
    x, scale = torch.randn(2, 3, N, device=device), torch.rand(2, 3, device=device)
    given = {"leading": scale, "flat": scale.flatten(), "bf16": scale.to(BF16)}[shape]
    _, r = layer_norm_fn(x, None, None, rowscale=given, prenorm=True)
    assert torch.equal(r, x * given.float().view(2, 3, 1))
