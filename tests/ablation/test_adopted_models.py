"""Which pairs of models check_parity and measure compare, and which they refuse."""

import copy
import importlib
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ops
from ablation.adoption import check_parity, measure

WIDTH = 32
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, norm=nn.LayerNorm, **attributes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.final = norm(WIDTH)
        vars(self).update(attributes)

    def forward(self, x):
        return self.final(x + self.layers(x))


class ByHand(Net):
    """As people fuse who call the function: no module of it is ours."""

    def forward(self, x):
        y = self.layers(x)
        return ops.layer_norm_fn(y, self.final.weight, self.final.bias, residual=x, eps=self.final.eps)


class BySwitch(Net):
    def forward(self, x):
        return ByHand.forward(self, x) if self.switch["fused"] else super().forward(x)


def replaced(model):
    ops.replace_norms(model := copy.deepcopy(model), verbose=False)
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    (model := copy.deepcopy(model)).compile(backend="eager")
    return model


def part_compiled(model):
    model = copy.deepcopy(model)
    model.layers = compiled(model.layers)
    return model


@pytest.mark.parametrize("compare", [check_parity, measure])
def test_what_is_no_module_and_one_model_given_twice_are_refused(compare):
    with pytest.raises(TypeError, match=rf"{compare.__name__}: model_b must be a torch\.nn\.Module, got Tensor"):
        compare(Net(), X, X)
    model = replaced(Net())
    for same in (model, compiled(model)):
        with pytest.raises(ValueError, match=r"one and the same model, .* \(before = copy\.deepcopy\(model\)\)"):
            compare(model, same, X)


def test_a_model_before_whose_norms_are_fused_is_refused_with_their_names(tmp_path, monkeypatch):
    """Copied behind replace_norms, the arguments exchanged, compiled, made of our modules, or fused by the installed copy."""
    shutil.copytree(Path(ops.__file__).parent, tmp_path / "their_norms", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    model, theirs = Net(), Net()
    importlib.import_module("their_norms").replace_norms(theirs, verbose=False)
    assert not isinstance(theirs.final, ops.LayerNorm)
    fused = [replaced(model), compiled(replaced(model)), Net(ops.LayerNorm), Net(ops.RMSNorm), theirs]
    for before, after in [(fused[0], replaced(model)), *((one, model) for one in fused)]:
        with pytest.raises(ValueError, match=r"2 of its norms are fused: layers\.1, final\. Copy .* restore_norms .* exchange"):
            check_parity(before, after, X)
    with pytest.raises(ValueError, match="1 of its norms are fused: model_a itself"):
        check_parity(ops.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), X)


@pytest.mark.parametrize("wrap", [compiled, compiled_in_place, part_compiled])
def test_a_model_in_which_nothing_is_replaced_is_refused(wrap):
    model = Net(width=WIDTH, config={"layers": 1}, activation=F.gelu, none=None, plain=torch.zeros(3))
    model.register_buffer("buffer", torch.zeros(3))
    model.layers[2].forward = F.relu  # the same in the copy
    after = copy.deepcopy(model).eval()  # the mode is no difference
    with pytest.raises(ValueError, match=r"nothing is replaced in model_b: .* Call replace_norms"):
        check_parity(model, wrap(after), X)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.layers[1], "forward", lambda x: F.layer_norm(x, (WIDTH,))),
        lambda model: model.final.register_forward_hook(lambda module, args, y: y.clone()),
        lambda model: setattr(model.layers[0], "fused", True),
        lambda model: model.layers.append(nn.Identity()),
        lambda model: setattr(model, "__class__", ByHand),
        lambda model: model.switch.update(fused=True),
    ],
)
def test_any_sign_of_a_change_is_enough(change):
    model = BySwitch(switch={"fused": False})
    other = copy.deepcopy(model)
    change(other)
    assert check_parity(model, other, X).verdict


@pytest.mark.parametrize(
    ("wrap", "todo"),
    [
        (compiled, r"MODEL is compiled, .* pass MODEL\._orig_mod, the model that torch\.compile was given\."),
        (compiled_in_place, r"MODEL is compiled, .* pass copy\.deepcopy\(MODEL\)"),
        (part_compiled, r"MODEL\.layers is compiled, .* pass a model with MODEL\.layers\._orig_mod"),
    ],
)
def test_compiled_models_are_timed_and_have_no_parity_check_whose_error_says_what_to_pass(wrap, todo):
    model = Net()
    after = replaced(model)
    for a, b, name in ((wrap(model), after, "model_a"), (model, wrap(after), "model_b")):
        with pytest.raises(ValueError, match=todo.replace("MODEL", name)):
            check_parity(a, b, X)
    assert measure(wrap(model), wrap(after), X, cycles=6, block_steps=1).a_ms > 0


def test_what_the_errors_say_to_pass_can_be_compared():
    model = Net()
    after = replaced(model)
    restored = copy.deepcopy(after)
    ops.restore_norms(restored, verbose=False)
    for before in (compiled(model)._orig_mod, copy.deepcopy(compiled_in_place(model)), restored):
        assert check_parity(before, after, X).holds
    after.forward = torch.compile(after.forward, backend="eager")
    with pytest.raises(ValueError, match=r"model_b is compiled, .* \(del model_b\.forward\)"):
        check_parity(model, after, X)
    after.forward = torch.compiler.disable(type(after).forward.__get__(after))
    assert check_parity(model, after, X).holds
