"""Which pairs of models check_parity and measure compare, and which they refuse."""

import copy
import importlib
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import ops
from ablation.adoption import check_parity, measure

WIDTH = 32
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.final = norm(WIDTH)

    def forward(self, x):
        return self.final(x + self.layers(x))


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
    """Copied behind replace_norms, compiled, made of our modules, or fused by the installed copy."""
    shutil.copytree(Path(ops.__file__).parent, tmp_path / "their_norms", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.syspath_prepend(tmp_path)
    model, theirs = Net(), Net()
    importlib.import_module("their_norms").replace_norms(theirs, verbose=False)
    for before in (replaced(model), compiled(replaced(model)), Net(ops.RMSNorm), theirs):
        with pytest.raises(ValueError, match=r"2 of its norms are fused: layers\.1, final\. Copy .* restore_norms .* exchange"):
            check_parity(before, model, X)


def test_a_model_in_which_nothing_is_replaced_is_told_by_its_bits():
    model = Net()
    asked = "model_b gives the same bits as model_a: is anything replaced in it?"
    assert asked in check_parity(model, copy.deepcopy(model), X).verdict
    assert asked not in check_parity(model, replaced(model), X).verdict


@pytest.mark.parametrize(
    ("wrap", "where"), [(compiled, "MODEL is"), (compiled_in_place, "MODEL is"), (part_compiled, "MODEL.layers is")]
)
def test_compiled_models_are_timed_and_have_no_parity_check_whose_error_says_what_to_pass(wrap, where):
    model = Net()
    after = replaced(model)
    for a, b, name in ((wrap(model), after, "model_a"), (model, wrap(after), "model_b")):
        with pytest.raises(ValueError, match=f"{where.replace('MODEL', name)} compiled, .* pass what torch.compile was given"):
            check_parity(a, b, X)
    assert measure(wrap(model), wrap(after), X, cycles=6, block_steps=1).a_ms > 0


def test_what_the_errors_say_to_pass_can_be_compared():
    model = Net()
    after = replaced(model)
    restored = copy.deepcopy(after)
    ops.restore_norms(restored, verbose=False)
    for before in (compiled(model)._orig_mod, copy.deepcopy(compiled_in_place(model)), restored):
        assert check_parity(before, after, X).holds
