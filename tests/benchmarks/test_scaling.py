"""Weak scaling: what is measured and recorded, its arithmetic, and ranks that fail."""

import json
import math
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import scaling
from benchmarks.scaling import Cell, Measured, TurnError, records_of, turn
from tests.benchmarks import records
from tests.forks import Command

SMALL = [*records.SMALL, "train.precision=fp32"]
CPU = ["--device", "cpu", "--rounds", "1", "--steps", "3", "--batch-size", "2", "--common", *SMALL]
KINDS = (("ddp", "DistributedDataParallel"), ("fsdp", "FSDPGPT"))


def cell(parallel, ranks, *overrides):
    return Cell("tiny", parallel, ranks, 4, 10, "bf16", False, "", "", ("model=tiny", *SMALL, "device=cpu", *overrides))


class Forked(Command):
    """In place of subprocess.Popen of python -m torch.distributed.run, and starts no interpreter."""

    def __init__(self, command, cwd, env, stdout, **_):
        words = ["tests.benchmarks.rank" if word == "benchmarks.scaling" else word for word in command[3:]]
        super().__init__(words, cwd, torchrun=True, file=str(Path(stdout.name).absolute()), **env)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


@pytest.fixture(autouse=True)
def forked(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked}))
    monkeypatch.chdir(tmp_path)  # where turns leave their answers
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))


def test_ranks_of_ddp_and_fsdp_and_a_step_alone_are_measured_and_recorded(tmp_path, recorded):
    file, printed = recorded(scaling, "--ranks", "2", *CPU)
    found = {r["parallel"]: r for r in file["records"]}
    for how, ranks in (("alone", 1), ("ddp", 2), ("fsdp", 2)):
        r = found.pop(how)
        assert "error" not in r and [len(block) for block in r["blocks_ms"]] == [3] * 2, "two turns in a round"
        assert 0 < r["p10"] <= r["ms"] <= r["p90"] and r["peak_gb"] is None, "memory is not known on a CPU"
        assert r["tokens_per_s"] == pytest.approx(1000 * ranks * 2 * 16 / r["ms"], rel=1e-3), "the batch of a rank stays"
        assert r["tokens_per_s_of_rank"] == pytest.approx(r["tokens_per_s"] / ranks, rel=1e-3) and r["of_alone"] > 0
        assert (r["model"], r["precision"], r["compiled"], r["common"]) == ("tiny", "fp32", False, " ".join(SMALL))
    assert not found
    steps = {tuple(json.loads(line)) for line in (tmp_path / "notes").read_text().splitlines()}
    assert steps == {("auto", "GPT", 2, 0, 1), *((name, kind, 2, rank, 2) for name, kind in KINDS for rank in (0, 1))}
    assert all(word in printed for word in ("alone", "ddp", "fsdp", "of alone", "2 × 16 tokens a GPU"))


def test_efficiency_is_the_time_of_one_rank_over_that_of_many_within_a_round():
    """Two rounds of two turns: 10 and 20 ms with one rank, 12.5 and 20 ms with two, so 0.8 and 1.0."""
    found = {
        cell("alone", 1): Measured([[8.0] * 3] * 2 + [[16.0] * 3] * 2),
        cell("ddp", 1): Measured([[9.0, 10.0, 90.0], [10.0, 10.0, 10.0], [20.0] * 3, [20.0] * 3]),
        cell("ddp", 2): Measured([[12.0] * 3, [13.0] * 3, [20.0] * 3, [20.0] * 3], peak_gb=1.23456),
    }
    *_, record = records_of(found)
    assert record["efficiency"] == pytest.approx(math.sqrt(0.8), abs=1e-4)
    # Student's 97.5 % quantile of one degree of freedom, and the deviation of log 0.8 and log 1, over the root of two
    half = 12.706 * abs(math.log(0.8)) / math.sqrt(2) / math.sqrt(2)
    assert record["efficiency_95"] == pytest.approx([math.sqrt(0.8) * math.exp(s * half) for s in (-1, 1)], rel=1e-3)
    assert record["of_alone"] == pytest.approx(math.sqrt(8 / 12.5 * 16 / 20), abs=1e-4)
    assert record["ms"] == 16.5 and record["tokens_per_s"] == round(2 * 4 * 10 / 0.0165, 1) and record["peak_gb"] == 1.23456
    one = Measured([[10.0], [10.0]])
    assert records_of({cell("ddp", 1): one, cell("ddp", 2): one})[1]["efficiency_95"] is None, "of a single round"
    for others in ({cell("fsdp", 1): one}, {cell("ddp", 1): Measured(error="no")}):
        assert "efficiency" not in records_of({cell("ddp", 2): one, **others})[0], "none is made up without one rank"


def test_a_failure_is_recorded_and_the_other_cells_have_their_turns(recorded, monkeypatch):
    asked = []

    def turn(cell, steps):
        asked.append((cell.parallel, cell.ranks))
        if asked[-1] == ("fsdp", 2):
            raise TurnError("rank 1: OutOfMemoryError: no")
        return {"steps_ms": [10.0] * steps, "peak_gb": 2.0}

    monkeypatch.setattr(scaling, "turn", turn)
    file, printed = recorded(scaling, "--parallel", "ddp", "fsdp", *CPU)
    errors = {(r["parallel"], r["ranks"]): r.get("error") for r in file["records"]}
    assert errors == dict.fromkeys(errors) | {("fsdp", 2): "rank 1: OutOfMemoryError: no"}
    assert asked.count(("fsdp", 2)) == 1 and all(asked.count(key) == 2 for key in errors if key != ("fsdp", 2))
    assert "failed: tiny, fsdp on 2: rank 1: OutOfMemoryError: no" in printed


def test_a_killed_rank_an_error_and_silence_of_a_turn_are_told(monkeypatch):
    # torchrun names the signal, unless it hears first of the rank that lost its connection
    with pytest.raises(TurnError, match=r"SIGKILL|rank 0: .*[Cc]onnection (reset|closed)"):
        turn(cell("ddp", 2, "parallel=ddp", "train.batch_size=4", "train.steps=4", "logging.name=kill_rank_1"), 1)
    with pytest.raises(TurnError, match=r"rank 0: ConfigError: no\.such\.key"):
        turn(cell("ddp", 1, "no.such.key=1"), 1)
    monkeypatch.setattr(scaling, "TIMEOUT_S", 0.1)
    with pytest.raises(TurnError, match=r"no answer in 0\.1 s"):
        turn(cell("ddp", 1), 1)


def test_bad_options_are_refused_by_name(capsys, monkeypatch):
    refused = {f"{key}=1": f"--common {key}=1: .* option of its own" for key in ("parallel", "train.batch_size", "model")}
    refused["train.accumulation=4"] = "train.batch_size=2 can't be cut .* train.accumulation=4"
    for text, message in refused.items():
        with pytest.raises(SystemExit, match=message):
            scaling.main([*CPU, text])
    with monkeypatch.context() as by_torchrun, pytest.raises(SystemExit, match="Start it without torchrun"):
        by_torchrun.setenv("TORCHELASTIC_RUN_ID", "mine")
        by_torchrun.setenv("LOCAL_RANK", "0")
        scaling.main(CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        scaling.main(["--ranks", "4"])
    assert "--ranks 4: each rank needs a GPU of its own, and there are 2" in capsys.readouterr().err
