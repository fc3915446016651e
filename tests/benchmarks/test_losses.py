"""The benchmark of softmax and cross-entropy, tried on the CPU."""

import json

from benchmarks import losses


def test_it_records_every_case_and_prints_a_line_for_each(tmp_path, capsys):
    given = ["--device", "cpu", "--quick", "--rounds", "2", "--provider", "ours", "torch", "--output", str(tmp_path)]
    losses.main(given)
    assert "cross-entropy, bf16, both 64×512" in capsys.readouterr().out
    records = json.loads((tmp_path / "losses.json").read_text())["records"]
    assert {(r["case"], r["direction"]) for r in records} == {
        *(((case, direction)) for case in ("softmax", "log_softmax") for direction in ("forward", "backward")),
        ("cross_entropy", "both"),
    }
    assert all(r["us"] > 0 and r["share"] > 0 and "error" not in r for r in records) and len(records) == 10


def test_a_wrong_gradient_is_a_failure_of_its_library(tmp_path, monkeypatch):
    def wrong(logits, targets):
        return 2 * losses._torch_loss(logits, targets) - losses._torch_loss(logits.detach(), targets)

    monkeypatch.setitem(losses._MAKE["cross_entropy"], "torch", lambda: wrong)
    given = ["--device", "cpu", "--quick", "--rounds", "1", "--case", "cross_entropy", "--provider", "torch"]
    losses.main([*given, "--output", str(tmp_path)])
    (record,) = json.loads((tmp_path / "losses.json").read_text())["records"]
    assert record["us"] is None and "WrongResult: gradient is off" in record["error"]
