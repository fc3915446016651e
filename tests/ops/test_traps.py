"""Mistakes found in other libraries' norms, each with the test that ours passes."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from ops import LayerNorm, RMSNorm, dropout_mask, launch, layer_norm_fn, registration, rms_norm_fn, seeded_dropout

from .cases import BF16, FP32, reference_path


def leaf(*shape, device, dtype=FP32):
    return torch.randn(*shape, device=device).to(dtype).requires_grad_()


def test_residual_out_buffer_is_written_and_returned_and_gradients_flow(device):
    x, residual, w = leaf(5, 32, device=device), leaf(5, 32, device=device), leaf(32, device=device)
    out, residual_out = torch.full((5, 32), torch.nan, device=device), torch.full((5, 32), torch.nan, device=device)
    y, r = layer_norm_fn(x, w, None, residual, prenorm=True, out=out, residual_out=residual_out)
    assert y is out and r is residual_out
    (y.sin() + r.cos()).sum().backward()
    found = [t.grad for t in (x, residual, w)]
    for t in (x, residual, w):
        t.grad = None
    expected_y, expected_r = layer_norm_fn(x, w, None, residual, prenorm=True)
    (expected_y.sin() + expected_r.cos()).sum().backward()
    assert torch.equal(out, expected_y) and torch.equal(residual_out, expected_r)
    assert all(torch.equal(a, t.grad) for a, t in zip(found, (x, residual, w), strict=True))


@pytest.mark.parametrize("looped", [False, True])
def test_inference_updates_the_residual_stream_in_place(looped, device, request):
    if looped:
        request.getfixturevalue("narrow_tiles")
    x, residual, w = torch.randn(5, 40, device=device), torch.randn(5, 40, device=device), torch.rand(40, device=device)
    expected_y, expected_r = layer_norm_fn(x, w, None, residual.clone(), prenorm=True)
    out = torch.full_like(x, torch.nan)
    y, r = layer_norm_fn(x, w, None, residual, prenorm=True, out=out, residual_out=residual)
    assert y is out and r is residual
    assert torch.equal(y, expected_y) and torch.equal(r, expected_r)


def test_residual_out_without_prenorm_is_written(device):
    x, buffer = torch.randn(3, 16, device=device), torch.empty(3, 16, device=device)
    y = layer_norm_fn(x, None, None, x, residual_out=buffer)
    assert isinstance(y, torch.Tensor)
    assert torch.equal(buffer, x + x)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_bias1_without_bias_or_weight1(zero_centered, device):
    x, w, b1 = leaf(5, 32, device=device), leaf(32, device=device), leaf(32, device=device)
    _, y1 = layer_norm_fn(x, w, None, bias1=b1, eps=1e-5, zero_centered_weight=zero_centered)
    torch.testing.assert_close(y1, F.layer_norm(x, (32,), None, b1, 1e-5))
    y1.sum().backward()
    torch.testing.assert_close(b1.grad, torch.full_like(b1, 5.0))


def test_python_floats_do_not_reach_the_kernel_as_fp64(device):
    """eps and the dropout scale that fp32 can't hold exactly: eager and compiled give the same bits."""
    x, w = torch.randn(64, 96, device=device), torch.rand(96, device=device)

    def fn(x, w):
        return layer_norm_fn(x, w, None, x, eps=1.1e-5, dropout_p=0.1, prenorm=True, seed=3)

    compiled = torch.compile(fn, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(fn(x, w), compiled(x, w), strict=True))


def test_unused_residual_output_is_not_made_up_as_zeros(device, monkeypatch):
    seen = []
    original = launch.norm_backward
    monkeypatch.setattr(launch, "norm_backward", lambda inputs, *a: (seen.append(inputs.dr), original(inputs, *a)))
    x, residual = leaf(4, 32, device=device), leaf(4, 32, device=device)
    y, _ = layer_norm_fn(x, None, None, residual, prenorm=True)
    y.sum().backward()
    assert seen == [None]


@pytest.mark.parametrize("looped", [False, True])
def test_gradient_of_the_residual_output_alone_skips_the_norm(looped, device, request):
    """Whatever the norm would make of an infinite row, it has no part in this gradient."""
    if looped:
        request.getfixturevalue("narrow_tiles")
    x, residual, w = leaf(4, 40, device=device), leaf(4, 40, device=device), leaf(40, device=device)
    with torch.no_grad():
        x[2, 7] = torch.inf
    _, r = layer_norm_fn(x, w, None, residual, prenorm=True)
    g = torch.randn_like(r)
    r.backward(g)
    assert torch.equal(x.grad, g) and torch.equal(residual.grad, g)
    assert w.grad is None


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("rms", [False, True])
def test_forward_and_backward_normalise_the_rounded_sum(rms, looped, device, request):
    """Trap: statistics of the unrounded sum, x̂ in backward from the rounded one. A stream so coarse that the two differ."""
    if looped:
        request.getfixturevalue("narrow_tiles")
    x = leaf(6, 40, device=device)
    residual = (300 * torch.randn(6, 40, device=device)).to(BF16).requires_grad_()
    w, g = leaf(40, device=device), torch.randn(6, 40, device=device)
    y, r = layer_norm_fn(x, w, None, residual, prenorm=True, is_rms_norm=rms, eps=1e-5)
    y.backward(g)
    stored = r.detach().float().requires_grad_()
    expected = F.rms_norm(stored, (40,), w, 1e-5) if rms else F.layer_norm(stored, (40,), w, None, 1e-5)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    dx, dw = torch.autograd.grad(expected, (stored, w), g)
    torch.testing.assert_close(w.grad, dw, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad, dx, rtol=1e-4, atol=1e-6)


def test_a_mean_that_overflows_with_rstd_leaves_no_nan(device):
    x = torch.full((2, 17), 1e30, device=device, requires_grad=True)
    layer_norm_fn(x, None, None, eps=1e-20).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("shape", ["leading", "flat", "bf16"])
def test_rowscale_belongs_to_its_row_in_either_shape(shape, device):
    x, scale = torch.randn(2, 3, 16, device=device), torch.rand(2, 3, device=device)
    given = {"leading": scale, "flat": scale.flatten(), "bf16": scale.to(BF16)}[shape]
    _, r = layer_norm_fn(x, None, None, rowscale=given, prenorm=True)
    assert torch.equal(r, x * given.float().view(2, 3, 1))


def test_frozen_weights_skip_the_weight_reduction_and_trained_ones_do_not(device, monkeypatch):
    wanted = []
    original = launch.norm_backward
    monkeypatch.setattr(launch, "norm_backward", lambda *a: (wanted.append(a[-1].wanted), original(*a)))
    for frozen in (True, False):
        x, w, b = leaf(4, 32, device=device), torch.ones(32, device=device), leaf(32, device=device)
        w.requires_grad_(not frozen)
        layer_norm_fn(x, w, b).sin().sum().backward()
        assert x.grad is not None and b.grad is not None and (w.grad is None) == frozen
    assert wanted == [(False, True, False, False), (True, True, False, False)]


@pytest.mark.parametrize("name", ["x", "residual", "x1", "weight", "bias", "weight1", "bias1", "rowscale", "rowscale1"])
def test_any_single_input_may_be_the_only_one_that_requires_a_gradient(name, device):
    """Trap: only the residual requires a gradient, statistics are not saved, backward breaks."""

    def gradients(only):
        g = torch.Generator().manual_seed(0)
        shapes = dict.fromkeys(("x", "residual", "x1"), (4, 32)) | dict.fromkeys(("weight", "bias", "weight1", "bias1"), (32,))
        shapes |= {"rowscale": (4,), "rowscale1": (4,)}
        tensors = {k: torch.randn(s, generator=g).to(device).requires_grad_(only in (k, "all")) for k, s in shapes.items()}
        y, y1, r = layer_norm_fn(**tensors, dropout_p=0.2, prenorm=True, seed=1)
        (y.sin() + y1.cos() + r.square()).sum().backward()
        return {k: t.grad for k, t in tensors.items()}

    alone, together = gradients(name), gradients("all")
    torch.testing.assert_close(alone[name], together[name])
    assert all(grad is None for k, grad in alone.items() if k != name)


def test_statistics_are_fp32_whatever_the_inputs(device):
    x = torch.randn(4, 32, device=device).to(BF16)
    how = (1e-5, 0.0, False, False, BF16, BF16, False, True, False)
    stats = registration.norm_forward(x, None, None, None, None, None, None, None, None, None, *how)[3]
    assert stats.dtype == FP32 and stats.shape == (2, 4)
    torch.testing.assert_close(stats[1], x.float().mean(1))
    torch.testing.assert_close(stats[0], (x.float().var(1, correction=0) + 1e-5).rsqrt())


def test_small_and_zero_weights_have_right_gradients(device):
    """Trap: x̂ recovered as (y − bias) / weight."""
    x, b = leaf(6, 32, device=device), leaf(32, device=device)
    w = torch.cat([torch.zeros(16), torch.full((16,), 1e-20)]).to(device).requires_grad_()
    g = torch.randn(6, 32, device=device)
    layer_norm_fn(x, w, b, eps=1e-5).backward(g)
    x_hat = F.layer_norm(x.detach(), (32,), eps=1e-5)
    torch.testing.assert_close(w.grad, (g * x_hat).sum(0), rtol=1e-4, atol=1e-5)
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("looped", [False, True])
def test_runs_are_bit_identical(looped, device, request):
    if looped:
        request.getfixturevalue("narrow_tiles")
    rows = 300 if device.type == "cuda" else 12
    x, w, b = leaf(rows, 48, device=device), leaf(48, device=device), leaf(48, device=device)
    g = torch.randn(rows, 48, device=device)
    runs = []
    for _ in range(3 if device.type == "cpu" else 20):
        runs.append(torch.autograd.grad(layer_norm_fn(x, w, b, x, dropout_p=0.1, seed=1), (x, w, b), g))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("n", [1, 40])
def test_empty_batch(n, kernels, device):
    with nullcontext() if kernels else reference_path():
        x, residual, w = leaf(0, 3, n, device=device), leaf(0, 3, n, device=device), leaf(n, device=device)
        y, r = layer_norm_fn(x, w, w, residual, dropout_p=0.1, prenorm=True)
        assert y.shape == r.shape == (0, 3, n)
        (y.sum() + r.sum()).backward()
        assert x.grad.shape == x.shape and torch.equal(w.grad, torch.zeros(n, device=device))
        assert seeded_dropout(x, 0.5, 1).shape == x.shape
        assert dropout_mask(1, 0, n, 0.5, device=device).shape == (0, n)


STRIDED = ("x", "x1", "residual", "dy", "dy1", "dr", "weight", "bias1", "rowscale")


@pytest.mark.parametrize("how", ["every second element", "rows apart"])
@pytest.mark.parametrize("name", STRIDED)
def test_strided_inputs(name, how, device):
    g = torch.Generator().manual_seed(0)
    shapes = {"weight": (32,), "bias": (32,), "weight1": (32,), "bias1": (32,), "rowscale": (6,)}
    names = ("x", "x1", "residual", "dy", "dy1", "dr", *shapes)
    dense = {k: torch.randn(shapes.get(k, (6, 32)), generator=g).to(device) for k in names}
    if how == "every second element" or dense[name].dim() == 1:
        strided = dense[name].repeat_interleave(2, dim=-1)[..., ::2]
    else:
        strided = torch.cat((dense[name], torch.full_like(dense[name], torch.nan)), dim=1)[:, :32]
    assert not strided.is_contiguous() and torch.equal(strided, dense[name])

    def run(tensors):
        inputs = {k: t.detach().requires_grad_() for k, t in tensors.items() if k not in ("dy", "dy1", "dr")}
        outputs = layer_norm_fn(**inputs, prenorm=True, dropout_p=0.2, seed=1)
        return *outputs, *torch.autograd.grad(outputs, list(inputs.values()), [tensors[k] for k in ("dy", "dy1", "dr")])

    for a, b in zip(run(dense), run(dense | {name: strided}), strict=True):
        assert torch.equal(a, b)


def test_expanded_gradient(device):
    x, w = leaf(6, 32, device=device), leaf(32, device=device)
    layer_norm_fn(x, w, None).sum().backward()
    assert x.grad.abs().max() < 10 and torch.isfinite(w.grad).all()
    expected = torch.autograd.grad(F.layer_norm(x, (32,), w, None, 1e-6).sum(), (x, w))
    torch.testing.assert_close(x.grad, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad, expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", [False, True])
def test_out_may_be_x_itself(kernels, device):
    x = torch.randn(3, 16, device=device)
    with nullcontext() if kernels else reference_path():
        expected = layer_norm_fn(x, None, None)
        out, buffer = x.clone(), torch.empty_like(x)
        y, r = layer_norm_fn(out, None, None, prenorm=True, out=out)
        assert y is out and torch.equal(y, expected) and torch.equal(r, x)
        out = x.clone()
        layer_norm_fn(out, None, None, out=out, residual_out=buffer)
        assert torch.equal(out, expected) and torch.equal(buffer, x)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_autograd_knows_that_a_buffer_was_overwritten(grad, kernels, device):
    """A buffer that an earlier operation saved must make its backward fail; one whose history is gone has no gradient."""
    a = leaf(3, 16, device=device)
    with nullcontext() if kernels else reference_path():
        b = a * 1.0
        loss = b.square().sum()
        with torch.set_grad_enabled(grad):
            y = layer_norm_fn(torch.randn(3, 16, device=device), None, None, out=b)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(retain_graph=True)
        if grad:
            assert torch.equal(torch.autograd.grad(y.sum(), a)[0], torch.zeros_like(a))


@pytest.mark.gpu
def test_tensors_on_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(8, 64, device="cuda:1", requires_grad=True)
    y = layer_norm_fn(x, None, None, x, dropout_p=0.1, seed=1)
    y.sum().backward()
    assert y.device == x.grad.device == torch.device("cuda:1")
    assert torch.isfinite(x.grad).all()


def test_nothing_is_autotuned_and_a_call_is_one_kernel_forward_and_two_backward(device, monkeypatch):
    """Trap: autotuning that re-runs a kernel on aliased buffers, retunes for every M, or dies inside graph capture."""
    from ops import kernels

    launches = []

    class Counting:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *a, **k: (launches.append(self.kernel), self.kernel[grid](*a, **k))

    for name in ("norm_forward_kernel", "norm_backward_kernel", "finish_weight_gradients_kernel"):
        assert type(getattr(kernels, name)).__name__ in ("JITFunction", "InterpretedFunction")
        monkeypatch.setattr(launch, name, Counting(getattr(kernels, name)))
    x, w = leaf(4, 32, device=device), leaf(32, device=device)
    y, r = layer_norm_fn(x, w, w, x, dropout_p=0.1, prenorm=True)
    assert len(launches) == 1
    (y.sum() + r.sum()).backward()
    assert len(launches) == 3


@pytest.mark.gpu
def test_a_new_batch_size_compiles_nothing(device):
    from ops.kernels import norm_backward_kernel, norm_forward_kernel

    def variants():
        return [len(next(iter(kernel.device_caches.values()))[0]) for kernel in (norm_forward_kernel, norm_backward_kernel)]

    seeds = torch.arange(4, device=device).unbind()

    def run(m):
        x, w = leaf(m, 512, device=device), leaf(512, device=device)
        layer_norm_fn(x, w, w, x, dropout_p=0.1 + 0.4 * (m % 2), seed=seeds[m % 4]).sum().backward()

    run(64)
    before = variants()
    for m in (1, 2, 16, 31, 1000, 4096):
        run(m)
    assert variants() == before


def test_no_decay_by_isinstance_finds_the_fused_modules():
    assert isinstance(LayerNorm(8), torch.nn.LayerNorm)
    assert isinstance(RMSNorm(8), torch.nn.RMSNorm)


@pytest.mark.parametrize(("ours", "theirs"), [(LayerNorm, torch.nn.LayerNorm), (RMSNorm, torch.nn.RMSNorm)])
def test_checkpoints_interchange_with_torchs_modules(ours, theirs, device):
    module, other = ours(32).to(device), theirs(32, eps=1e-5).to(device)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    module.load_state_dict(other.state_dict())
    other.load_state_dict(copy.deepcopy(module.state_dict()))
    x = torch.randn(4, 32, device=device)
    torch.testing.assert_close(module(x), other(x))


def test_module_drops_in_training_mode_only(device):
    module = LayerNorm(64, dropout_p=0.5).to(device)
    x = torch.ones(4, 64, device=device)
    _, r = module(x, x, prenorm=True)
    assert set(r.unique().tolist()) == {1.0, 3.0}
    _, r = module.eval()(x, x, prenorm=True)
    assert set(r.unique().tolist()) == {2.0}


def test_zero_centered_module_starts_as_the_identity_scale(device):
    module = RMSNorm(32, zero_centered_weight=True).to(device)
    assert torch.equal(module.weight, torch.zeros(32, device=device))
    x = torch.randn(4, 32, device=device)
    torch.testing.assert_close(module(x), F.rms_norm(x, (32,), eps=1e-5))


def test_residual_in_fp32_widens_a_stream_that_nothing_is_added_to(device):
    x = torch.randn(4, 32, device=device).to(BF16)
    for module in (LayerNorm(32), RMSNorm(32)):
        y, r = module.to(device)(x, prenorm=True, residual_in_fp32=True)
        assert y.dtype == BF16 and r.dtype == FP32 and torch.equal(r, x.float())


def test_returned_tuple_has_the_documented_order(device):
    x = torch.randn(4, 32, device=device)
    w = torch.ones(32, device=device)
    y, y1, r, mask, mask1 = rms_norm_fn(
        x, w, None, x1=x, weight1=2 * w, prenorm=True, dropout_p=0.5, return_dropout_mask=True, seed=1
    )
    assert torch.equal(y1, 2 * y)
    assert torch.equal(r, x * mask * 2 + x * mask1 * 2)
    y, mask, mask1 = rms_norm_fn(x, w, None, return_dropout_mask=True)
    assert mask.all() and mask1 is None
