"""The program that times adopted models of transformers, on tiny sizes. Skipped where transformers is not installed."""

import json

import pytest

pytest.importorskip("transformers", minversion="5.20")

from benchmarks import adoption
from measure.comparison import AGAIN, TORCH


def test_arms_compute_the_same_losses_and_one_that_fails_is_told_beside_the_others(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(adoption, "run_blocks", lambda block, names, cycles, seed: {name: [[2.0], [4.0]] * 6 for name in names})
    monkeypatch.setattr(adoption, "WARM_UP", 0)
    adopt = adoption.adopt

    def broken(model, loss, verbose):
        if loss:
            model.model.norm.weight.data.mul_(2)
        return adopt(model, loss=loss, verbose=verbose)

    monkeypatch.setattr(adoption, "adopt", broken)
    adoption.main(["--device", "cpu", "--model", "Llama", "--output", str(tmp_path)])
    records = {record["arm"]: record for record in json.loads((tmp_path / "adoption.json").read_text())["records"]}
    assert list(records) == [TORCH, AGAIN, adoption.ADOPTED, adoption.ADOPTED_PLAIN]
    assert records[adoption.ADOPTED_PLAIN]["loss"] == pytest.approx(records[TORCH]["loss"])
    assert records[adoption.ADOPTED_PLAIN]["over torch"] == [1.0, 1.0, 1.0] and records[TORCH]["ms"] == 3.0
    assert "its first loss is" in records[adoption.ADOPTED]["error"] and "ms" not in records[adoption.ADOPTED]
    said = capsys.readouterr().out
    assert "Liger's arms are left out: its kernels need a GPU" in said and "failed: adopted: ArithmeticError" in said
