"""Stochastic depth: a row with a scale of 0 counts as zeros, whatever it holds."""

from contextlib import nullcontext

import pytest
import torch

from ops import backend, layer_norm_fn, seeded_dropout

from .cases import BF16, FP32, reference_path
from .tiles import SHAPES, tile_for

M, N, P, SEED = 5, 24, 0.3, 11
# Of tiles of two rows one is dropped in part, one altogether, and one is half past the end.
DROPPED = torch.tensor([False, True, True, True, False])
DROPPED1 = torch.tensor([False, False, True, False, True])
WAYS = ["reference", *SHAPES]


@pytest.fixture(params=WAYS)
def way(request, use_tile):
    """Through the reference, or through the kernels with tiles of this shape; a function of the tile's rows."""

    def choose(rows=2):
        if request.param == "reference":
            return reference_path()
        use_tile(tile_for(N, request.param, rows=rows))
        return nullcontext()

    return choose


def site(device, poison, branches=1, learned=False, **how):
    """Inputs whose dropped rows hold `poison`, and what comes of them: outputs, then gradients by the input's name."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape, shift=0.0):
        return (torch.randn(shape, generator=generator) + shift).to(device).requires_grad_()

    tensors = {"x": tensor(M, N), "residual": tensor(M, N), "weight": tensor(N), "bias": tensor(N)}
    dropped = {"rowscale": DROPPED.to(device), "rowscale1": DROPPED1.to(device)}
    if branches == 2:
        tensors["x1"] = tensor(M, N)
    for name, branch in list(zip(dropped, ("x", "x1"), strict=True))[:branches]:
        with torch.no_grad():
            tensors[branch][dropped[name]] = poison
            tensors[name] = tensor(M, shift=3.0).masked_fill_(dropped[name], 0.0).requires_grad_(learned)
    y, r = layer_norm_fn(**tensors, prenorm=True, seed=SEED, **how)
    wanted = {name: t for name, t in tensors.items() if t.requires_grad}
    upstream = [torch.randn(M, N, generator=generator).to(device) for _ in range(2)]
    gradients = torch.autograd.grad((y, r), list(wanted.values()), upstream)
    return tensors, {"y": y, "r": r} | {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}


@pytest.mark.parametrize(("rms", "branches", "dropout_p", "rows"), [(False, 1, 0.0, 1), (False, 1, P, 2), (True, 2, P, 2)])
def test_what_a_dropped_row_holds_reaches_nothing(rms, branches, dropout_p, rows, way, device):
    how = {"branches": branches, "dropout_p": dropout_p, "is_rms_norm": rms}
    with way(rows):
        found, expected = (site(device, poison, **how)[1] for poison in (torch.nan, 0.0))
    with reference_path():
        reference = site(device, 0.0, **how)[1]
    for name in expected:
        torch.testing.assert_close(expected[name], reference[name], rtol=1e-4, atol=1e-5, msg=name)
        assert torch.isfinite(expected[name]).all() and torch.equal(found[name], expected[name]), name
    assert (found["dx"][DROPPED] == 0).all() and (found["dx"][~DROPPED] != 0).any(1).all()
    if branches == 2:
        assert (found["dx1"][DROPPED1] == 0).all() and (found["dx1"][~DROPPED1] != 0).any(1).all()


@pytest.mark.parametrize("dropout_p", [0.0, P])
def test_a_learned_scale_of_zero_has_its_gradient(dropout_p, way, device):
    """Σ dropout(dz) · x, as for every other row: the scale can leave 0 again."""
    with way():
        tensors, found = site(device, 2.0, learned=True, dropout_p=dropout_p)
        dz = seeded_dropout(found["dresidual"], dropout_p, SEED)
    torch.testing.assert_close(found["drowscale"], (dz * tensors["x"]).sum(1), rtol=1e-5, atol=1e-5)
    assert (found["drowscale"] != 0).all() and (found["dx"][DROPPED] == 0).all()


def test_what_a_dropped_row_holds_reaches_only_the_gradient_of_its_own_scale(way, device):
    with way():
        found, expected = (site(device, poison, learned=True)[1] for poison in (torch.inf, 0.0))
    dscale = found.pop("drowscale")
    assert torch.equal(dscale[~DROPPED], expected["drowscale"][~DROPPED]) and not torch.isfinite(dscale[DROPPED]).any()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("scale", [torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0], dtype=BF16)], ids=["negative", "bf16"])
def test_every_zero_drops(scale, way, device):
    x = torch.full((2, N), torch.nan, device=device)
    x[0] = 1.0
    with way():
        y, r = layer_norm_fn(x, None, None, rowscale=scale.to(device), prenorm=True)
    assert torch.equal(r, torch.tensor([[1.0], [0.0]], device=device).expand(2, N))
    assert torch.equal(y[1], torch.zeros_like(y[1]))


def test_a_scale_that_is_not_zero_hides_nothing(way, device):
    x = torch.ones(3, N, device=device)
    x[0, 0] = torch.nan
    with way():
        _, r = layer_norm_fn(x, None, None, rowscale=torch.tensor([1e-30, torch.nan, 1.0], device=device), prenorm=True)
    assert r[0, 0].isnan() and r[1].isnan().all() and torch.equal(r[2], x[2])


@pytest.mark.parametrize("learned", [False, True])
def test_reference_gradients_match_numerical_derivatives_where_a_scale_is_zero(learned):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([0.0, 1.5, 0.0], dtype=torch.float64, requires_grad=learned)

    def fn(x, scale):
        # The residual keeps the norm's own derivatives small where the row is zeros.
        return layer_norm_fn(
            x, None, None, torch.arange(15.0).double().view(3, 5), dropout_p=P, rowscale=scale, prenorm=True, seed=4
        )

    with reference_path():
        assert torch.autograd.gradcheck(fn, (x, scale))
        assert torch.autograd.gradgradcheck(lambda x, scale: fn(x, scale)[1], (x, scale))


def test_reference_is_captured_without_a_graph_break_and_maps_over_a_batch(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRET", False)
    x = torch.randn(2, 3, N, requires_grad=True)
    scale = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]], requires_grad=True)

    def fn(x, scale):
        return layer_norm_fn(x, None, None, x, rowscale=scale, prenorm=True)[1]

    expected = fn(x, scale)
    found = torch.compile(fn, fullgraph=True, backend="aot_eager")(x, scale)
    assert torch.equal(found, expected) and torch.equal(torch.vmap(fn)(x, scale), expected)
    gradients = [torch.autograd.grad(r.sin().sum(), (x, scale)) for r in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_dtypes_of_gradients_follow_the_inputs(way, device):
    x = torch.randn(3, N, device=device).to(BF16).requires_grad_()
    scale = torch.tensor([0.0, 1.0, 2.0], device=device, dtype=BF16, requires_grad=True)
    residual = torch.randn(3, N, device=device, dtype=FP32, requires_grad=True)
    with way():
        layer_norm_fn(x, None, None, residual, rowscale=scale).sin().sum().backward()
    assert (x.grad.dtype, scale.grad.dtype, residual.grad.dtype) == (BF16, BF16, FP32)
