"""Gated MLPs of models: which are replaced, that they compute the same, and that tools see what they saw."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops import adopt, replace_mlps, restore_mlps
from ops.adopting import mlp as mlps


class Apart(nn.Module):
    """As Llama's."""

    def __init__(self, act_fn=None, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(16, 24, bias=bias) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(24, 16, bias=bias), act_fn or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Packed(nn.Module):
    """As Phi-3's."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(16, 48), nn.Linear(24, 16)

    def forward(self, x):
        gate, value = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(value * F.gelu(gate))


class Swapped(Packed):
    def forward(self, x):
        value, gate = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(value * F.gelu(gate))


class Dropping(Apart):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)


class NotDroppingYet(nn.Module):
    """Its p may be set later."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj, self.dropout = nn.Linear(16, 48), nn.Linear(24, 16), nn.Dropout(0.0)

    def forward(self, x):
        return self.dropout(Packed.forward(self, x))


class Scaled(Apart):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


class Logging(Apart):
    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Counting(Apart):
    def __init__(self):
        super().__init__()
        self.seen, self.last = {"calls": 0}, [None]
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        y = super().forward(x)
        if self.how == "buffer":
            self.calls.add_(1)
        elif self.how == "dict":
            self.seen["calls"] += 1
        else:
            self.last[0] = y
        return y


def counting(how):
    module = Counting()
    module.how = how
    return module


class Flagged(Apart):
    def forward(self, x, flag=None):
        return super().forward(x)


class Clamped(Apart):
    def forward(self, x):
        gate, value = self.gate_proj(x).clamp(max=10.0), self.up_proj(x).clamp(-10.0, 10.0)
        return self.down_proj(self.act_fn(gate) * value)


class Experts(nn.Module):
    """Parameters with the names of layers."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.ones(2, 4, 8)), nn.Parameter(torch.ones(2, 4, 4))


def pair(module):
    torch.manual_seed(0)
    plain = nn.Sequential(module)
    return plain, copy.deepcopy(plain)


KINDS = [Apart, Packed, lambda: Apart(nn.GELU("tanh"), bias=True)]


@pytest.mark.parametrize("make", KINDS, ids=["apart", "packed", "biases"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adopted_mlp_gives_the_same_values_and_gradients(make, dtype):
    plain, ours = pair(make().to(dtype))
    ((name, what),) = replace_mlps(ours)
    assert name == "0" and what.endswith("and product in one kernel")
    x = torch.randn(3, 5, 16).to(dtype)
    found = []
    for model in (plain, ours):
        y = model(x)
        found.append([y, *torch.autograd.grad(y.float().square().sum(), [*model.parameters()])])
    for a, b in zip(*found, strict=True):
        error = (a.double() - b.double()).norm() / a.double().norm()
        assert a.dtype == b.dtype and error < (1e-5 if dtype is torch.float32 else 2e-2)
    again = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    assert torch.equal(again(x), ours(x)) and isinstance(again[0], mlps.AdoptedMLP)
    assert restore_mlps(ours) == [f"0: {type(plain[0]).__name__} as it was"] and type(ours[0]) is type(plain[0])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Apart(nn.ELU()), "it computes something else than gelu, gelu_tanh, silu of its gate"),
        (Swapped, "it computes something else"),
        (Clamped, "it computes something else"),
        (Dropping, "it has other parts: act_fn, dropout"),
        (NotDroppingYet, "it has other parts: dropout"),
        (Scaled, "it computes something else"),
        *((partial(counting, how), "its forward keeps something as an attribute") for how in ("buffer", "dict", "list")),
        (Logging, "its forward keeps something as an attribute"),
        (Flagged, "its forward takes more than one tensor"),
    ],
)
def test_what_is_something_else_is_left_alone_with_the_reason(make, why):
    plain, ours = pair(make())
    ((_, what),) = replace_mlps(ours)
    assert f"activation left alone: {why}" in what and type(ours[0]) is type(plain[0])


def test_hooks_and_tools_see_what_they_saw(monkeypatch):
    plain, ours = pair(Apart())
    replace_mlps(ours)
    x, seen = torch.randn(3, 16), []
    for model in (plain, ours):
        model[0].act_fn.register_forward_hook(lambda module, args, y: seen.append(y) or y * 2)
        model[0].up_proj.register_forward_hook(lambda module, args, y: y + 1)
    torch.testing.assert_close(ours(x), plain(x))
    assert len(seen) == 2 and torch.equal(*seen)
    monkeypatch.setattr(Apart, "forward", lambda self, x: x + 1)
    for model in (ours, copy.deepcopy(ours)):
        assert torch.equal(model(x), x + 1)


def test_x_by_name_another_activation_and_another_dtype_are_those_of_the_module():
    plain, ours = pair(Apart())
    replace_mlps(ours)
    x = torch.randn(3, 16)
    torch.testing.assert_close(ours[0](x=x), plain[0](x=x))
    for model in (plain, ours):
        model[0].up_proj.register_forward_hook(lambda module, args, y: y.double())
        model[0].down_proj.double()
    assert ours(x).dtype == plain(x).dtype == torch.float64
    for model in (plain, ours):
        model[0].act_fn = nn.ReLU()
    torch.testing.assert_close(ours(x), plain(x))


def test_parameters_with_the_names_of_layers_are_no_mlp_and_no_generator_but_the_cpus_is_seeded(monkeypatch):
    assert replace_mlps(nn.Sequential(Experts())) == []
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("it seeds the GPUs too"))
    model, state = nn.Sequential(Apart()), torch.get_rng_state()
    adopt(model, verbose=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_exported_program_has_the_operator(device, kernel):
    _, ours = pair(Apart().to(device))
    replace_mlps(ours)
    program = torch.export.export(ours, (torch.randn(3, 16, device=device),), strict=False)
    assert any("activation" in str(node.target) for node in program.graph.nodes)


def test_adopt_replaces_and_undoes_them_and_can_be_told_not_to():
    plain, ours = pair(Apart())
    adopted = adopt(ours, verbose=False)
    assert "0: Apart, silu and product in one kernel" in str(adopted)
    adopted.undo()
    assert type(ours[0]) is type(plain[0])
    assert "Apart" not in str(adopt(ours, mlp=False, verbose=False))
    assert "Apart" not in str(adopt(ours, only=lambda name, module: not isinstance(module, Apart), verbose=False))


def test_a_subclass_of_tensor_goes_through_pytorchs_operations():
    plain, ours = pair(Apart())
    replace_mlps(ours)
    x = torch.randn(3, 16).as_subclass(type("Own", (torch.Tensor,), {}))
    y = ours(x)
    assert type(y) is type(x)
    torch.testing.assert_close(y, plain(x))
