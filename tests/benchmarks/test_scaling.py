"""Weak scaling: what is measured and recorded, its arithmetic, and ranks that fail."""

import math
import os
import signal

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from benchmarks import scaling
from benchmarks.scaling import Cell, record_of
from tests.benchmarks.records import SMALL
from tests.forks import processes  # noqa: F401  ranks are forked from the process that it preloads

CPU = ["--device", "cpu", "--rounds", "1", "--steps", "3", "--common", *SMALL, "train.precision=fp32"]
rank, step = scaling.rank, scaling.training_step


def watched(number, cell, *rest):
    """A rank that checks what its steps are given; rank 1 is killed in the first where the run's name says so."""

    def watched_step(forward, state, batch, index, cfg, precision, world):
        if cfg.logging.name == f"kill_rank_{world.rank}":
            os.kill(os.getpid(), signal.SIGKILL)
        kind = {"ddp": "DistributedDataParallel", "fsdp": "FSDPGPT"}[cell.facts["parallel"]]
        given = (type(forward).__name__, len(batch[0]), world.rank, world.size)
        assert given == (kind, 8, number, cell.ranks), given
        return step(forward, state, batch, index, cfg, precision, world)

    scaling.training_step = watched_step
    rank(number, cell, *rest)


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(scaling, "START", "forkserver")
    monkeypatch.setattr(scaling, "rank", watched)


def cells(*more):
    return scaling.cells_of(scaling.options_of([*CPU, *more]))


def test_two_ranks_train_together_with_the_batch_of_each(forked):
    cell = cells()["tiny fsdp 2"]
    scaling.take_turn(cell, 3)
    assert cell.error is None and [len(block) for block in cell.blocks_ms] == [3] and cell.peak_gb is None
    record = record_of(cell, {})
    assert 0 < record["p10"] <= record["ms"] <= record["p90"] and "efficiency" not in record, "none is made up without one rank"
    assert record["tokens_per_s"] == pytest.approx(1000 * 2 * 8 * 16 / record["ms"], rel=1e-3)
    assert (record["model"], record["precision"], record["compiled"]) == ("tiny", "fp32", False)


def test_a_killed_rank_and_an_error_of_a_turn_are_told(forked):
    killed, wrong = cells("logging.name=kill_rank_1")["tiny ddp 2"], cells()["tiny ddp 1"]
    wrong.overrides = [*wrong.overrides, "no.such.key=1"]
    for cell in (killed, wrong):
        scaling.take_turn(cell, 1)
    # the rank that lost its connection may end before it is known that the other one was killed
    assert "SIGKILL" in killed.error or "onnection" in killed.error
    assert "rank 0: configs.keys.ConfigError: no.such.key" in wrong.error


def test_efficiency_is_the_time_of_one_rank_over_that_of_many_within_a_round():
    """Two rounds of two turns: 10 and 20 ms with one rank, 12.5 and 20 ms with two, so 0.8 and 1.0."""

    def cell(ranks, blocks_ms, **more):
        return Cell({"model": "m", "parallel": "ddp", "ranks": ranks, "batch_size": 4, "context": 10}, [], blocks_ms, **more)

    run = {"m ddp 1": cell(1, [[9.0, 10.0, 90.0], [10.0, 10.0, 10.0], [20.0] * 3, [20.0] * 3])}
    record = record_of(cell(2, [[12.0] * 3, [13.0] * 3, [20.0] * 3, [20.0] * 3], peak_gb=1.23456), run)
    assert record["efficiency"] == pytest.approx(math.sqrt(0.8), abs=1e-4)
    # Student's 97.5 % quantile of one degree of freedom, and the deviation of log 0.8 and log 1, over the root of two
    half = 12.706 * abs(math.log(0.8)) / math.sqrt(2) / math.sqrt(2)
    assert record["efficiency_95"] == pytest.approx([math.sqrt(0.8) * math.exp(s * half) for s in (-1, 1)], rel=1e-3)
    assert record["ms"] == 16.5 and record["tokens_per_s"] == round(2 * 4 * 10 / 0.0165, 1) and record["peak_gb"] == 1.23456
    one = [[10.0], [10.0]]
    assert record_of(cell(2, one), {"m ddp 1": cell(1, one)})["efficiency_95"] is None, "of a single round"
    assert "efficiency" not in record_of(cell(2, one), {"m ddp 1": cell(1, [], error="no")})


def test_every_cell_has_two_turns_a_round_and_a_failure_is_recorded_beside_the_others(recorded, monkeypatch):
    asked = []

    def turn(cell, steps):
        asked.append((cell.facts["parallel"], cell.ranks))
        if asked[-1] == ("fsdp", 2):
            raise ProcessExitedException("process 1 terminated with signal SIGKILL", 1, 1, -9, "SIGKILL")
        return {"steps_ms": [10.0] * steps, "peak_gb": 2.0}

    monkeypatch.setattr(scaling, "turn", turn)
    file, printed = recorded(scaling, *CPU)
    errors = {(r["parallel"], r["ranks"]): r.get("error") for r in file["records"]}
    assert errors == dict.fromkeys(errors) | {("fsdp", 2): "rank 1: process 1 terminated with signal SIGKILL"}
    assert asked.count(("fsdp", 2)) == 1 and all(asked.count(key) == 2 for key in errors if key != ("fsdp", 2))
    assert "| fsdp | 2 | failed: rank 1: " in printed and "8 × 16 tokens a GPU" in printed
    assert [r["efficiency"] for r in file["records"] if "efficiency" in r] == [1.0] * 3


def test_bad_options_are_refused_by_name(capsys, monkeypatch):
    for text, message in {
        "parallel=ddp": "--common parallel=ddp: .* option of its own",
        "train.accumulation=3": "train.batch_size=8 can't be cut .* train.accumulation=3",
    }.items():
        with pytest.raises(SystemExit, match=message):
            scaling.main([*CPU, text])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        scaling.main(["--ranks", "4"])
    assert "--ranks 4: each rank needs a GPU of its own, and there are 2" in capsys.readouterr().err
