"""The program that times adopted models, on tiny sizes."""

import json
from importlib import import_module
from types import SimpleNamespace

import pytest
from torch import nn

from adoption import benchmark
from benchmarks import command
from measure.comparison import TORCH


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """The models that the arms compile. Nothing is timed."""
    found = []
    monkeypatch.setattr(benchmark, "alternating_blocks", lambda steps, *_: {name: [[2.0], [4.0]] * 6 for name in steps})
    monkeypatch.setattr(benchmark, "WARM_UP", 0)
    monkeypatch.setattr(command, "SCRATCH", tmp_path)
    monkeypatch.setattr(nn.Module, "compile", lambda model: found.append(model))
    return found


def records_of(model, tmp_path):
    benchmark.main(["--device", "cpu", "--model", model])
    return {record["arm"]: record for record in json.loads((tmp_path / "cpu" / "adoption.json").read_text())["records"]}


def test_arms_compute_the_same_losses_and_one_that_fails_is_told_beside_the_others(compiled, monkeypatch, tmp_path, capsys):
    """Queries and keys are turned by the model's own function but in the arms of Liger. The compiled arms come behind them,
    and Liger's function breaks their graphs."""
    pytest.importorskip("transformers", minversion="5.20")
    modeling = import_module("transformers.models.llama.modeling_llama")
    adopt, own, turned = benchmark.adopt, modeling.apply_rotary_pos_emb, []

    def broken(model, **how):
        if how["loss"] and how["rotary"] and how["mlp"]:
            model.model.norm.weight.data.mul_(2)
        return adopt(model, **how)

    def theirs(*args):
        turned.append(len(compiled))
        return own(*args)

    def patch(**_):
        modeling.apply_rotary_pos_emb = theirs

    liger = SimpleNamespace(apply_liger_kernel_to_llama=patch)
    monkeypatch.setattr(benchmark, "adopt", broken)
    monkeypatch.setattr(benchmark, "import_module", lambda name: liger if "liger" in name else import_module(name))
    records = records_of("Llama", tmp_path)
    assert tuple(records) == benchmark.ARMS and len(compiled) == 2
    failed = {arm: record["error"] for arm, record in records.items() if "error" in record}
    assert failed.keys() == {benchmark.ADOPTED, benchmark.ADOPTED_COMPILED} and "ms" not in records[benchmark.ADOPTED]
    assert "its first loss is" in failed[benchmark.ADOPTED]
    assert "failed: adopted: ArithmeticError" in capsys.readouterr().out
    assert records[benchmark.ADOPTED_PLAIN]["loss"] == pytest.approx(records[TORCH]["loss"])
    assert records[benchmark.ADOPTED_PLAIN]["over torch"] == [1.0, 1.0, 1.0] and records[TORCH]["ms"] == 3.0
    assert turned and set(turned) == {0} and modeling.apply_rotary_pos_emb is own


def test_a_dit_by_hand_has_the_loss_and_gradient_of_the_plain_and_the_adopted_one(compiled, tmp_path):
    records = records_of("DiT-B/2", tmp_path)
    assert tuple(records) == benchmark.DIT_ARMS and len(compiled) == 3
    for record in records.values():
        assert "error" not in record
        assert record["loss"] == pytest.approx(records[TORCH]["loss"], rel=1e-5)
        assert record["gradient"] == pytest.approx(records[TORCH]["gradient"], rel=1e-4)
    assert records[benchmark.ADOPTED]["over by hand"] == [1.0, 1.0, 1.0]
