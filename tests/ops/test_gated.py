"""RMSNorm beside a gate: values and gradients against fp64 for both orders, groups, and rows as they lie in memory."""

import pytest
import torch

from ops import GatedRMSNorm, gated, gated_rms_norm_fn, kit
from ops.tiling import Tile

from .cases import BF16, FP16, FP32, covering

ERROR = {FP32: 2.5e-6, BF16: 2**-7, FP16: 2**-10}
EPS = 0.1  # so large that it must not be forgotten anywhere


def oracle(x, z, weight=None, norm_before_gate=True, group_size=None, activation="silu", zero_centered_weight=False, **_):
    """One group after another, in the dtype that is given."""
    a = torch.sigmoid(z) * (z if activation == "silu" else 1)
    h = x if norm_before_gate else x * a
    parts = h.split(group_size or x.shape[-1], -1)
    y = torch.cat([part / (part.pow(2).mean(-1, keepdim=True) + EPS).sqrt() for part in parts], -1)
    y = y if weight is None else y * (weight + 1 if zero_centered_weight else weight)
    return y * a if norm_before_gate else y


def check(x, z, weight=None, **how):
    given = [t for t in (x, z, weight) if t is not None]
    leaves, exact = ([f(t.detach()).requires_grad_() for t in given] for f in (lambda t: t, torch.Tensor.double))
    y, expected = gated_rms_norm_fn(*leaves, *[None] * (3 - len(given)), eps=EPS, **how), oracle(*exact, **how)
    assert y.shape == expected.shape and y.dtype == how.get("out_dtype", x.dtype) and y.is_contiguous()
    dy = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, leaves, dy)
    for found, right in zip((y, *gradients), (expected, *torch.autograd.grad(expected, exact, dy.double())), strict=True):
        assert found.shape == right.shape
        assert (found.double() - right).norm() <= ERROR[found.dtype] * right.norm()
    return gradients


def drawn(shape, strides, dtype, device, generator):
    """A tensor of the last dimensions of a wider one, of its heads, or with columns that are not neighbours."""
    *lead, tokens, heads, n = shape
    if strides == "columns":
        t = torch.randn(*lead, tokens, heads, 2 * n + 8, generator=generator)[..., 8 : 8 + n]
    elif strides == "heads":
        t = torch.randn(*lead, tokens, heads * n + 16, generator=generator)[..., 16:].unflatten(-1, (heads, n))
    elif strides == "transposed":
        t = torch.randn(*lead, tokens, n, heads, generator=generator).mT
    else:
        t = torch.randn(shape, generator=generator)
    made = torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device)
    return made.copy_(t)


STRIDES = ["dense", "columns", "heads", "transposed"]
CASES = covering(
    norm_before_gate=[True, False], width=[(48, 16), (128, None), (7, None), (1, 1), (1100, None), (6400, None)],
    x=[FP32, BF16, FP16], z=[FP32, BF16], weight=[FP32, BF16, None], x_strides=STRIDES, z_strides=STRIDES,
    activation=["silu", "sigmoid"], zero_centered_weight=[False, True], out_dtype=[None, FP32],
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(device, case):
    generator, (width, group_size) = torch.Generator().manual_seed(0), case["width"]
    x, z = (drawn((2, 2, 2, width), case[f"{t}_strides"], case[t], device, generator) for t in "xz")
    weight = None if case["weight"] is None else torch.randn(width, generator=generator).to(device, case["weight"])
    names = ("norm_before_gate", "activation", "zero_centered_weight")
    how = {name: case[name] for name in names} | {"group_size": group_size}
    check(x, z, weight, **how | ({} if case["out_dtype"] is None else {"out_dtype": case["out_dtype"]}))


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("looped", [True, False])
def test_many_tiles_of_a_program_and_the_same_bits_each_time(device, norm_before_gate, looped, monkeypatch):
    """Also rows that no program holds, which are read twice."""
    facts = kit.device_facts(device)._replace(multiprocessors=2)
    monkeypatch.setattr(kit, "device_facts", lambda _: facts)
    tile = Tile(1 if looped else 4, 16, 1, programs_per_sm=1, looped=looped)
    for name in ("forward_tile", "backward_tile"):
        monkeypatch.setattr(gated, name, lambda *_: tile)
    generator = torch.Generator().manual_seed(1)
    x, z = (torch.randn(11, 48, generator=generator).to(device) for _ in range(2))
    weight = torch.randn(48, generator=generator).to(device)
    for group_size in (48, 24):
        kit.forget()
        found = [check(x, z, weight, norm_before_gate=norm_before_gate, group_size=group_size) for _ in range(2)]
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize("frozen", ["x", "z", "weight", "x z", "z weight", "x weight"])
def test_a_gradient_that_nobody_wants_is_not_computed_and_changes_no_other(device, frozen):
    generator, found = torch.Generator().manual_seed(2), []
    tensors = {name: torch.randn(5, 24, generator=generator).to(device) for name in ("x", "z")}
    tensors["weight"] = torch.randn(24, generator=generator).to(device)
    for without in (set(), set(frozen.split())):
        leaves = {name: t.clone().requires_grad_(name not in without) for name, t in tensors.items()}
        gated_rms_norm_fn(**leaves, norm_before_gate=False).square().sum().backward()
        found.append({name: t.grad for name, t in leaves.items()})
    for name, gradient in found[1].items():
        assert gradient is None if name in frozen.split() else torch.equal(gradient, found[0][name])


def test_slices_of_a_projection_and_its_heads_are_not_copied(device, copies):
    z, x = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(3)).to(device)[..., 4:].chunk(2, -1)
    check(x, z)
    check(x.unflatten(-1, (3, 16)), z.unflatten(-1, (3, 16)))
    assert not copies


def test_without_eps_rows_that_are_not_there_add_nothing(device):
    x, z, weight = torch.ones(3, 24, device=device), torch.ones(3, 24, device=device), torch.ones(24, device=device)
    x.requires_grad_()
    weight.requires_grad_()
    y = gated_rms_norm_fn(x, z, weight, eps=0.0)
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    torch.testing.assert_close(dweight, 3 * torch.nn.functional.silu(z[0]))
    torch.testing.assert_close(dx, torch.zeros_like(x), atol=1e-6, rtol=0)


def test_the_module_takes_a_checkpoint_of_transformers_and_gives_the_same(device):
    theirs = pytest.importorskip("transformers.models.mamba2.modeling_mamba2").MambaRMSNormGated(48, 16, eps=EPS).to(device)
    theirs.weight.data.normal_()
    norm = GatedRMSNorm(48, EPS, norm_before_gate=False, group_size=16, device=device)
    norm.load_state_dict(theirs.state_dict())
    x, z = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(4)).to(device)
    torch.testing.assert_close(norm(x, z), theirs(x, z))


def test_the_module_checks_its_arguments_and_says_them():
    for how in ({"group_size": 5}, {"activation": "gelu"}, {"eps": -1.0}):
        with pytest.raises(ValueError, match=f"GatedRMSNorm: {next(iter(how))}"):
            GatedRMSNorm(48, **how)
    expected = "48, eps=1e-06, norm_before_gate=True, group_size=16, activation=silu, zero_centered_weight=False"
    assert GatedRMSNorm(48, group_size=16).extra_repr() == expected
