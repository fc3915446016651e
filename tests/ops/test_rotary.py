"""Norm and rotary positions of queries and keys, against an oracle in fp64 that turns complex numbers."""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from ops import checks, rotary, rotary_qk_fn, rotary_qkv_fn
from ops.kit import Launcher
from ops.rotary import Tile

from .cases import BF16, FP16, FP32, Seen, covering, unaligned

EPS = 0.1  # so large that it must not be forgotten anywhere
# ‖found − oracle‖ / ‖oracle‖: inputs are those of the oracle exactly, and only outputs are rounded.
ROUNDING = {FP32: 1e-6, FP16: 2**-11, BF16: 2**-8}


@dataclass(frozen=True)
class Case:
    norm: str | None = "rmsnorm"
    heads: tuple[int, int] = (3, 1)  # of queries, of keys
    D: int = 16
    part: float = 1.0  # of the features, that is turned
    interleaved: bool = False
    dtype: torch.dtype = FP32
    weight: torch.dtype | None = FP32
    bias: bool = False
    per_head: bool = False
    zero_centered: bool = False
    positions: bool = False
    packed: bool = True
    tokens: tuple[int, ...] = (2, 5)

    @property
    def turned(self) -> int:
        return 2 * round(self.part * self.D / 2)


OPTIONS: dict[str, list] = {
    "norm": ["rmsnorm", "layernorm", None], "heads": [(3, 1), (2, 2), (6, 3)], "D": [16, 20, 2, 48], "part": [1.0, 0.5, 0.0],
    "interleaved": [False, True], "dtype": [FP32, BF16, FP16], "weight": [FP32, BF16, None], "bias": [False, True],
    "per_head": [False, True], "zero_centered": [False, True], "positions": [False, True], "packed": [True, False],
    "tokens": [(2, 5), (7,), (1, 3, 2)],
}  # fmt: skip
CASES = [Case(**chosen) for chosen in covering(**OPTIONS)]


def inputs(case: Case, device: torch.device) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(case.D)
    (heads, kv_heads), D, table = case.heads, case.D, 11

    def tensor(*shape: int, dtype: torch.dtype = case.dtype, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale + shift).to(device, dtype)

    if case.packed:
        found: dict[str, Tensor | None] = {"qkv": tensor(*case.tokens, (heads + 2 * kv_heads) * D, shift=0.3)}
    else:
        found = {"q": tensor(*case.tokens, heads, D, shift=0.3), "k": tensor(*case.tokens, kv_heads, D)}
    found |= {"cos": None, "sin": None}
    if case.turned:
        angles = torch.outer(torch.arange(table), 7.0 ** -(torch.arange(case.turned // 2) / case.turned))
        found |= {"cos": angles.cos().to(device), "sin": angles.sin().to(device)}
        if case.positions:
            found["positions"] = torch.randint(0, table, case.tokens, generator=generator).to(device)
    for name, n in (("q", heads), ("k", kv_heads)) if case.norm else ():
        shape = (n, D) if case.per_head else (D,)
        if case.weight is not None:
            found[f"{name}_weight"] = tensor(*shape, dtype=case.weight, scale=0.3, shift=1.0 - case.zero_centered)
        if case.bias:
            found[f"{name}_bias"] = tensor(*shape, dtype=case.weight or FP32, scale=0.3)
    return found


def call(case: Case, tensors: dict[str, Tensor | None]) -> tuple[Tensor, ...]:
    how = {"norm": case.norm, "eps": EPS, "zero_centered_weight": case.zero_centered, "interleaved": case.interleaved}
    if case.packed:
        return rotary_qkv_fn(**tensors, heads=case.heads[0], kv_heads=case.heads[1], **how)
    return rotary_qk_fn(**tensors, **how)


def oracle(case: Case, tensors: dict[str, Tensor | None]) -> tuple[Tensor, ...]:
    """Pairs as complex numbers, multiplied by e^(i · angle)."""
    heads, kv_heads = case.heads
    if case.packed:
        q, k, *values = tensors["qkv"].unflatten(-1, (-1, case.D)).split((heads, kv_heads, kv_heads), dim=-2)
    else:
        q, k, values = tensors["q"], tensors["k"], ()

    def of(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if case.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        if case.norm is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
            x = x * (1.0 if weight is None else weight + case.zero_centered) + (0.0 if bias is None else bias)
        if not case.turned:
            return x
        first, rest = x[..., : case.turned], x[..., case.turned :]
        pairs = first.unflatten(-1, (-1, 2)) if case.interleaved else first.unflatten(-1, (2, -1)).mT
        turns, rows = torch.complex(tensors["cos"], tensors["sin"]), tensors.get("positions")
        turns = turns[: x.shape[-3]] if rows is None else turns[rows]
        pairs = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turns[..., None, :])
        return torch.cat(((pairs if case.interleaved else pairs.mT).flatten(-2), rest), -1)

    return *(
        of(x, *(tensors.get(f"{name}_{what}") for what in ("weight", "bias"))) for x, name in ((q, "q"), (k, "k"))
    ), *values


def results(function, case: Case, tensors: dict[str, Tensor | None], frozen: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Outputs, and gradients of all that may have one but what is frozen."""
    fixed = ("cos", "sin", "positions", *frozen)
    given = {name: t if name in fixed else t.detach().requires_grad_() for name, t in tensors.items()}
    outputs = function(case, given)
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(t.shape, generator=generator).to(case.dtype).to(t) for t in outputs]
    wanted = {name: t for name, t in given.items() if name not in fixed}
    gradients = torch.autograd.grad(outputs, list(wanted.values()), upstream)
    found = dict(zip(("q_out", "k_out", "v_out"), (t.detach() for t in outputs), strict=False))
    return found | {f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}


def doubles(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: t if t is None or not t.is_floating_point() else t.double() for name, t in tensors.items()}


def check(found: dict[str, Tensor], case: Case, tensors: dict[str, Tensor | None]) -> None:
    expected = results(oracle, case, doubles(tensors))
    assert found.keys() == expected.keys()
    for name, t in found.items():
        error = (t.double() - expected[name]).norm() / expected[name].norm().clamp(min=1e-30)
        assert error <= ROUNDING[t.dtype], (name, error)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_are_the_oracles(case, device):
    tensors = inputs(case, device)
    found = results(call, case, tensors)
    check(found, case, tensors)
    assert all(t.dtype == case.dtype for name, t in found.items() if "_out" in name)
    assert all(found[f"d{name}"].dtype == t.dtype for name, t in tensors.items() if f"d{name}" in found)
    with mock.patch.object(checks, "runs_kernels", return_value=False):
        check(results(call, case, tensors), case, tensors)


@pytest.mark.parametrize("tile", [Tile(64, 1), Tile(512, 4, 2, 1), Tile(2048, 4, 1, 6, 80)], ids=str)
def test_any_tile_gives_the_same(tile, device, monkeypatch):
    for name in ("forward_tile", "backward_tile"):
        monkeypatch.setattr(rotary, name, lambda *_, **__: tile)
    for case in (Case("layernorm", bias=True, D=20), Case("rmsnorm", (6, 3), per_head=True), Case(None, packed=False)):
        tensors = inputs(replace(case, tokens=(2, 11)), device)
        check(results(call, case, tensors), case, tensors)


# ---- layout -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "kept"), [(None, 0), ("rmsnorm", 1)])
def test_values_are_a_view_and_without_a_norm_the_projection_is_not_kept_for_backward(norm, kept, device):
    qkv, saved = inputs(Case(), device)["qkv"].requires_grad_(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t)
    with Seen() as seen, hooks:
        *outputs, v = rotary_qkv_fn(qkv, None, None, 3, 1, norm=norm)
        torch.autograd.grad((*outputs, v), qkv, [torch.ones_like(t) for t in (*outputs, v)])
    assert v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr() and v.shape == (2, 5, 1, 16)
    assert seen.names == ["rotary_forward", "rotary_backward"]  # whose gradient of qkv has that of v in it
    assert saved.count(qkv.shape) == kept


def wider(t: Tensor) -> Tensor:
    wide = t.new_zeros(2, 9, *[n + 3 for n in t.shape[2:-1]], t.shape[-1] + 32)
    part = wide[(slice(None), slice(2, 7), *[slice(1, -2)] * (t.dim() - 3), slice(t.shape[-1]))]
    return part.copy_(t)


# The same values as t [2, 5, heads, D], elsewhere in memory.
VIEWS = {
    "part of a wider and longer one": wider,
    "heads before tokens": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "batches behind tokens": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "features apart": lambda t: torch.stack((t, t), dim=-1)[..., 0],
    "off a boundary of 16 bytes": unaligned,
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("view", VIEWS)
def test_tensors_and_gradients_are_read_where_they_lie(view, packed, device):
    case = Case("layernorm", D=20, packed=packed)
    tensors, names = inputs(case, device), ("qkv",) if packed else ("q", "k")
    moved = tensors | {name: VIEWS[view](tensors[name]) for name in names}
    leaves = [moved[name].requires_grad_() for name in names]
    outputs, expected = call(case, moved), call(case, tensors)
    assert all(map(torch.equal, outputs, expected)) and all(t.is_contiguous() for t in outputs[:2])
    upstream = [torch.randn_like(t) for t in expected]
    plain = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(outputs, leaves, [VIEWS[view](t) for t in upstream]), plain))


def test_positions_may_be_the_same_for_all_sequences_and_others_give_nan(device):
    case = Case(None, positions=True)
    tensors = inputs(case, device)
    row = torch.tensor([10, 0, 3, 3, 7], device=device, dtype=torch.int32)
    expected, *_ = call(case, tensors | {"positions": row.long().expand(2, 5)})
    for same in (row, row[None]):
        assert torch.equal(call(case, tensors | {"positions": same})[0], expected)
    row[1], row[4] = 11, -1
    for kernels in (True, False):
        with mock.patch.object(checks, "runs_kernels", return_value=kernels):
            q, *_ = call(case, tensors | {"positions": row})
        assert q.isnan().all(-1).all(-1)[0].tolist() == [False, True, False, False, True]


ANGLES = {
    "of each token": lambda t: t,
    "the first half of a row": lambda t: torch.cat((t, t.neg()), -1)[..., : t.shape[-1]],
    "every other one of a row": lambda t: torch.stack((t, t.neg()), -1)[..., 0],
    "tokens before sequences": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda t: t[:1].expand(t.shape),
    "shared": lambda t: torch.cat((t, t.neg()), -1)[:1, :, : t.shape[-1]],
    "a table of the first half of rows": lambda t: torch.cat((t[0], t[0].neg()), -1)[:, : t.shape[-1]],
}


@pytest.mark.parametrize("layout", ANGLES)
def test_angles_of_each_token_are_read_where_they_lie(layout, device):
    case = Case(D=20, part=0.6, positions=True, interleaved="every other" in layout, packed=False)
    tensors = inputs(case, device)
    rows = tensors.pop("positions")
    if layout in ("expanded", "shared") or "table" in layout:
        rows = rows[:1].expand(rows.shape)
    expected = results(call, case, tensors | {"positions": rows})
    angles = {name: ANGLES[layout](tensors[name][rows]) for name in ("cos", "sin")}
    if "expanded" in layout:
        angles["sin"] = angles["sin"].contiguous()  # unlike cos
    found = results(call, case, tensors | angles)
    rounding = {} if device.type == "cuda" else {"rtol": 0.0, "atol": 0.0}  # a GPU's compiler joins products and sums
    for name, t in expected.items():
        torch.testing.assert_close(found[name], t, **rounding)
    with mock.patch.object(checks, "runs_kernels", return_value=False):
        check(results(call, case, tensors | angles), case, tensors | {"positions": rows})


@pytest.mark.parametrize(("tokens", "packed"), [((0, 5), True), ((2, 0), False), ((3, 0, 5), True)])
def test_no_tokens_give_empty_outputs_and_zero_weight_gradients(tokens, packed, device):
    case = Case("layernorm", bias=True, tokens=tokens, packed=packed)
    tensors = inputs(case, device)
    found = results(call, case, tensors)
    assert found["q_out"].shape == (*tokens, 3, 16)
    tensors["q_weight"].requires_grad_()
    sum(t.sum() for t in call(case, tensors)).backward()  # upstream gradients that are one number in memory
    assert not tensors["q_weight"].grad.any()
    assert all(not found[f"d{name}"].any() for name in ("q_weight", "q_bias", "k_weight", "k_bias"))


# ---- gradients --------------------------------------------------------------------------------------------------------------


def test_frozen_weights_are_not_summed_up(device, monkeypatch):
    started, original = [], Launcher.__call__
    monkeypatch.setattr(Launcher, "__call__", lambda self, *launch: started.append(self) or original(self, *launch))
    tensors, weights = inputs(Case(), device), ("q_weight", "k_weight")
    expected = results(call, Case(), tensors)
    for frozen in (weights[:1], weights):
        started.clear()
        found = results(call, Case(), tensors, frozen)
        assert found.keys() == expected.keys() - {f"d{name}" for name in frozen}
        assert len(started) == (2 if frozen == weights else 3)
        assert all(torch.equal(t, expected[name]) for name, t in found.items())


def test_outputs_that_nobody_uses_give_zeros(device):
    qkv = inputs(Case(), device)["qkv"].requires_grad_()
    for used, features in enumerate((slice(0, 48), slice(48, 64), slice(64, 80))):
        (gradient,) = torch.autograd.grad(rotary_qkv_fn(qkv, None, None, 3, 1)[used].sum(), qkv)
        assert (gradient[..., features] == 1).all() and gradient.sum() == gradient[..., features].numel()


# ---- on a GPU ---------------------------------------------------------------------------------------------------------------

LARGE = [
    Case("layernorm", heads=(32, 8), D=128, dtype=BF16, tokens=(4, 1000), bias=True),
    Case(None, heads=(7, 7), D=80, dtype=BF16, tokens=(3, 333), part=0.4),
    Case("rmsnorm", heads=(12, 3), D=112, dtype=BF16, tokens=(2, 777), interleaved=True, per_head=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_tensors_are_right_and_runs_give_the_same_bits(case, device):
    tensors = inputs(case, device)
    angles = torch.rand(case.tokens[-1], case.turned // 2, device=device)
    tensors |= {"cos": angles.cos(), "sin": angles.sin()}
    found, again = (results(call, case, tensors) for _ in range(2))
    check(found, case, tensors)
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.gpu
def test_offsets_beyond_31_bits(device):
    heads, D, T = 24, 128, 2**31 // (72 * 128) + 3000
    qkv = torch.randn(1, T, 72 * D, device=device, dtype=BF16).requires_grad_()
    angles, weight = torch.rand(T, D // 2, device=device), torch.rand(D, device=device)
    how = {"norm": "rmsnorm", "q_weight": weight, "k_weight": weight}
    outputs = rotary_qkv_fn(qkv, angles.cos(), angles.sin(), heads, **how)
    (gradient,) = torch.autograd.grad(outputs, qkv, [t.detach().flip(1) for t in outputs])
    end = slice(T - 64, T)
    last = qkv[:, end].detach().requires_grad_()
    expected = rotary_qkv_fn(last, angles[end].cos(), angles[end].sin(), heads, **how)
    (wanted,) = torch.autograd.grad(expected, last, [t.detach().flip(1)[:, end] for t in outputs])
    assert all(torch.equal(t[:, end], right) for t, right in zip(outputs, expected, strict=True))
    assert torch.equal(gradient[:, end], wanted)
