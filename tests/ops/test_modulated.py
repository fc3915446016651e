"""Modulated norms: values and gradients against fp64, samples of any number and length, vectors as they lie in memory."""

import pytest
import torch
import torch.nn.functional as F

from ops import ModulatedNorm, kit, modulated_norm_fn
from ops.modulated import gated_sum

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
    rms=[False, True], batch=[1, 3, 12], tokens=[1, 4, 9], width=[7, 48, 160, 1100], x=[BF16, FP32, FP16],
    stream=[None, BF16, FP32], vectors=[FP32, BF16], affine=[None, FP32], names=[VECTORS, VECTORS[:2], VECTORS[2:], ()],
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(device, case):
    rms, batch, tokens, width = (case.pop(name) for name in ("rms", "batch", "tokens", "width"))
    check(draw(device, batch, tokens, width, **case), rms)


@pytest.mark.parametrize("uses", [("y",), ("r",)])
@pytest.mark.parametrize("gated", [False, True])
def test_an_output_that_nobody_uses_has_no_part_in_gradients(device, uses, gated):
    names, stream = (VECTORS, FP32) if gated else (VECTORS[:2], None)
    check(draw(device, 3, 5, 48, stream=stream, names=names, affine=FP32), uses=uses)


@pytest.mark.parametrize("stream", [FP32, BF16])
@pytest.mark.parametrize("frozen", [(), ("gate",), ("x", "residual")])
def test_a_gated_sum_alone(device, stream, frozen):
    given = draw(device, 3, 5, 48, BF16, stream, names=("gate",))
    leaves = [{name: t.detach().to(dtype or t.dtype).requires_grad_(name not in frozen) for name, t in given.items()}
              for dtype in (None, torch.float64)]  # fmt: skip
    r, exact = gated_sum(**leaves[0]), unfused(**leaves[1])[1]
    dr = torch.randn(r.shape, generator=torch.Generator().manual_seed(7)).to(r)
    wanted = [[t for t in of.values() if t.requires_grad] for of in leaves]
    found = [r, *torch.autograd.grad(r, wanted[0], dr)]
    expected = [exact, *torch.autograd.grad(exact, wanted[1], dr.double())]
    assert r.dtype == stream and [t.dtype for t in found[1:]] == [t.dtype for t in wanted[0]]
    for t, right in zip(found, expected, strict=True):
        assert (t.double() - right).norm() <= ERROR[BF16] * right.norm()


def test_a_gated_sum_may_be_changed_in_place(device):
    given = {name: t.detach().requires_grad_() for name, t in draw(device, 3, 5, 48, stream=FP32, names=("gate",)).items()}
    r = gated_sum(**given)
    wanted = torch.autograd.grad(r, [*given.values()], 2 * torch.ones_like(r), retain_graph=True)
    r.mul_(2)
    assert all(map(torch.equal, torch.autograd.grad(r, [*given.values()], torch.ones_like(r)), wanted))


@pytest.mark.parametrize("frozen", [("x",), ("gate", "x"), ("residual",), ("scale", "shift"), ("gate",), ("scale", "weight")])
def test_a_gradient_that_nobody_wants_is_not_computed_and_changes_no_other(device, frozen):
    given = draw(device, 3, 5, 48, stream=FP32, affine=FP32)
    every, some = check(given), check(given, frozen=frozen)
    assert all(torch.equal(every[name], t) for name, t in some.items())


def test_a_sample_has_the_same_bits_each_time_and_however_many_programs_share_it(device, monkeypatch):
    given = draw(device, 3, 37, 48, stream=FP32)
    assert all(map(torch.equal, check(given).values(), check(given).values()))
    for multiprocessors in (1, 32):  # a program with several samples; several programs with one
        facts = kit.device_facts(device)._replace(multiprocessors=multiprocessors)
        monkeypatch.setattr(kit, "device_facts", lambda _, facts=facts: facts)
        kit.forget()
        check(given)


@pytest.mark.parametrize(
    "shapes", [[(3, 1, 1, 16)] * 3, [(16,), (3, 2, 16), (3, 16)], [(3, 2, 4, 16)] * 3, [(1, 1, 1, 16), (1, 16), (3, 2, 1, 16)]]
)
def test_vectors_have_the_first_dimensions_of_x(device, shapes):
    generator = torch.Generator().manual_seed(3)
    x, *vectors = (torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in [(3, 2, 4, 16), *shapes])
    y = modulated_norm_fn(x, *vectors[:2], gate=vectors[2])
    scale, shift, gate = (t.reshape(*t.shape[:-1], *[1] * (4 - t.dim()), 16) if t.dim() > 1 else t for t in vectors)
    expected = F.layer_norm(gate * x, (16,), None, None, 1e-6) * (1 + scale) + shift
    found = (y, *torch.autograd.grad(y.square().sum(), (x, *vectors)))
    right = (expected, *torch.autograd.grad(expected.square().sum(), (x, *vectors)))
    for t, e in zip(found, right, strict=True):
        torch.testing.assert_close(t, e, rtol=1e-4, atol=1e-4)


def test_columns_of_a_projection_are_read_where_they_lie(device, copies):
    given = draw(device, 3, 5, 48)
    assert not given["scale"].is_contiguous()
    check(given)
    assert not copies
    modulated_norm_fn(given["x"], given["scale"].repeat_interleave(2, -1)[:, ::2])
    assert len(copies) == 1


def test_the_stream_is_x_where_nothing_is_added(device):
    x = torch.randn(2, 3, 16, device=device, requires_grad=True)
    _, r = modulated_norm_fn(x, prenorm=True)
    assert r is not x and r.data_ptr() == x.data_ptr()
    with torch.no_grad():
        assert modulated_norm_fn(x, prenorm=True)[1] is x


def test_samples_without_rows(device):
    x, scale = (torch.randn(shape, device=device, requires_grad=True) for shape in ((3, 0, 16), (3, 16)))
    modulated_norm_fn(x, scale, weight=torch.ones(16, device=device)).sum().backward()
    assert x.grad.shape == x.shape and torch.equal(scale.grad, torch.zeros_like(scale))


def test_the_module_has_the_parameters_of_a_norm(device):
    x, scale = torch.randn(2, 3, 16, device=device), torch.randn(2, 16, device=device)
    norm = ModulatedNorm(16, elementwise_affine=True, device=device)
    norm.load_state_dict(torch.nn.LayerNorm(16, device=device).state_dict())
    assert torch.equal(norm(x, scale), modulated_norm_fn(x, scale, None, None, None, norm.weight, norm.bias))
    assert not ModulatedNorm(16).state_dict() and [*ModulatedNorm(16, 1e-5, True, True).state_dict()] == ["weight"]
    y, r = ModulatedNorm(16)(x.bfloat16(), scale, residual=x, prenorm=True, out_dtype=FP16)
    assert y.dtype == FP16 and r.dtype == FP32


def test_rows_that_no_program_holds_are_refused(device):
    with pytest.raises(ValueError, match="x has rows of 8193, expected at most 8192"):
        modulated_norm_fn(torch.zeros(1, 8193, device=device))


@pytest.mark.gpu
def test_a_compiled_chain_has_the_gradients_of_a_table_that_broadcasts_over_samples():
    """torch.compile of PyTorch's own operations loses them at this size in torch 2.10 and 2.11 (pytorch#193061)."""
    B, T, N, depth = 1, 8192, 1536, 2
    draw = torch.Generator("cuda").manual_seed(0)
    x, dy = (torch.randn(B, T, N, device="cuda", generator=draw) for _ in range(2))
    table = torch.randn(1, 2 * depth, N, device="cuda", generator=draw) / 40

    def chain(site, x, table):
        scales, shifts = table.chunk(2, 1)
        for scale, shift in zip(scales.split(1, 1), shifts.split(1, 1), strict=True):
            x = x + site(x, scale, shift)
        return x

    def in_torch(x, scale, shift):
        return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift

    exact, ours = table.double().requires_grad_(), table.clone().requires_grad_()
    chain(in_torch, x.double(), exact).backward(dy.double())
    torch.compile(chain, fullgraph=True)(modulated_norm_fn, x, ours).backward(dy)
    assert (ours.grad.double() - exact.grad).norm() <= 1e-5 * exact.grad.norm()
