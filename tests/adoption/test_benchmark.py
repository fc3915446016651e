"""The program that times adopted models of transformers, on tiny sizes. Skipped where transformers is not installed."""

import json

import pytest
from torch import nn

pytest.importorskip("transformers", minversion="5.20")

from adoption import benchmark
from benchmarks import command
from measure.comparison import TORCH


def test_arms_compute_the_same_losses_and_one_that_fails_is_told_beside_the_others(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "alternating_blocks", lambda steps, *_: {name: [[2.0], [4.0]] * 6 for name in steps})
    monkeypatch.setattr(benchmark, "WARM_UP", 0)
    monkeypatch.setattr(command, "SCRATCH", tmp_path)
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda model: compiled.append(model))
    adopt = benchmark.adopt

    def broken(model, loss, **how):
        if loss:
            model.model.norm.weight.data.mul_(2)
        return adopt(model, loss=loss, **how)

    monkeypatch.setattr(benchmark, "adopt", broken)
    benchmark.main(["--device", "cpu", "--model", "Llama"])
    records = {record["arm"]: record for record in json.loads((tmp_path / "cpu" / "adoption.json").read_text())["records"]}
    assert tuple(records) == benchmark.ARMS and len(compiled) == 2
    assert records[benchmark.ADOPTED_PLAIN]["loss"] == pytest.approx(records[TORCH]["loss"])
    assert records[benchmark.ADOPTED_PLAIN]["over torch"] == [1.0, 1.0, 1.0] and records[TORCH]["ms"] == 3.0
    assert "its first loss is" in records[benchmark.ADOPTED]["error"] and "ms" not in records[benchmark.ADOPTED]
    assert "failed: adopted: ArithmeticError" in capsys.readouterr().out
