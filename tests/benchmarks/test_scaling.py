"""Weak scaling: what is measured and recorded, and its arithmetic."""

import math

import pytest

from benchmarks import scaling
from benchmarks.scaling import record_of
from configs import ConfigError
from tests.benchmarks.records import SMALL
from tests.forks import torchrun

CPU = [*SMALL, "train.precision=fp32", "--device", "cpu", "--rounds", "1", "--steps", "3", "--warm-up", "1"]


def forked(words, cwd, env, check):
    """In place of subprocess.run: torchrun's ranks without the start of three interpreters."""
    assert words[1:3] == ["-m", "torch.distributed.run"] and check
    done = torchrun(words[3:], cwd, **env)
    assert done.returncode == 0, done.stderr


def test_two_ranks_train_together_with_the_batch_of_each(monkeypatch):
    monkeypatch.setattr(scaling.subprocess, "run", forked)
    facts, keys = scaling.cell_of(scaling.options_of(CPU), "ddp", 2)
    assert (
        "train.batch_size=16" in keys and facts["batch_size"] == 8 and (facts["model"], facts["precision"]) == ("tiny", "fp32")
    )
    found = scaling.turn(2, 1, keys)
    assert len(found["steps_ms"]) == 3 and min(found["steps_ms"]) > 0 and found["peak_gb"] is None
    record = record_of(facts, [found, found], None)
    assert record["tokens_per_s_of_rank"] == pytest.approx(1000 * 8 * 16 / record["ms"], rel=1e-3)
    assert 0 < record["p10"] <= record["ms"] <= record["p90"] and "efficiency" not in record, "none is made up without one rank"


def test_efficiency_is_the_time_of_one_rank_over_that_of_many_within_a_round():
    """Two rounds of two turns: 10 and 20 ms with one rank, 12.5 and 20 ms with two, so 0.8 and 1.0."""

    def turns(*blocks_ms):
        return [{"steps_ms": ms, "peak_gb": 1.2345678} for ms in blocks_ms]

    facts = {"ranks": 2, "batch_size": 4, "context": 10}
    one = turns([9.0, 10.0, 90.0], [10.0, 10.0, 10.0], [20.0] * 3, [20.0] * 3)
    record = record_of(facts, turns([12.0] * 3, [13.0] * 3, [20.0] * 3, [20.0] * 3), one)
    assert record["efficiency"] == pytest.approx(math.sqrt(0.8), abs=1e-4)
    # Student's 97.5 % quantile of one degree of freedom, and the deviation of log 0.8 and log 1, over the root of two
    half = 12.706 * abs(math.log(0.8)) / math.sqrt(2) / math.sqrt(2)
    assert record["efficiency_95"] == pytest.approx([math.sqrt(0.8) * math.exp(s * half) for s in (-1, 1)], rel=1e-3)
    assert record["ms"] == 16.5 and record["tokens_per_s"] == round(2 * 4 * 10 / 0.0165, 1) and record["peak_gb"] == 1.234568
    assert record_of(facts, one[:2], one[:2])["efficiency_95"] is None, "of a single round"


def test_every_cell_has_two_turns_a_round_and_a_row(recorded, monkeypatch):
    asked = []
    found = {"steps_ms": [10.0] * 3, "peak_gb": 2.0}
    found["code"] = {"modules": {"of/a/rank.py": "1"}, "kernels": {"of_a_rank": ["2"]}, "backward": "one thread"}
    monkeypatch.setattr(scaling, "turn", lambda *of: asked.append(of) or found)
    file, printed = recorded(scaling, *CPU)
    assert (
        file["code"]["kernels"]["of_a_rank"] == ["2"]
        and {"of/a/rank.py", "benchmarks/scaling.py"} <= file["code"]["modules"].keys()
    )
    cells = [(r["parallel"], r["ranks"]) for r in file["records"]]
    assert cells == [("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)] and len(asked) == 2 * len(cells)
    assert all(asked.count(one) == 2 for one in asked) and [r["efficiency"] for r in file["records"]] == [1.0] * 4
    assert "| fsdp | 2 | 10.00 |" in printed and "8 × 16 tokens a GPU" in printed
    with pytest.raises(ConfigError, match=r"train.batch_size=8 can't be cut .* train.accumulation=3"):
        scaling.main(["train.accumulation=3", *CPU])
