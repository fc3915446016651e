"""Weak scaling: what is measured and recorded, its arithmetic, and ranks that fail."""

import json
import math
import os
import signal
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import scaling, scaling_ranks, scaling_tables
from benchmarks.command import load
from benchmarks.scaling import Cell, Measured, records_of
from benchmarks.scaling_ranks import Job, JobError
from tests.benchmarks import records
from tests.forks import Command

SMALL = [*records.SMALL, "train.precision=fp32"]
TURN = ["model=tiny", *SMALL, "device=cpu", "train.batch_size=4", "train.steps=4"]
CPU = ["--device", "cpu", "--rounds", "2", "--steps", "3", "--batch-size", "2", "--common", *SMALL]
KINDS = (("ddp", "DistributedDataParallel"), ("fsdp", "FSDPGPT"))
RANK = "tests.benchmarks.rank"


def cell(parallel, ranks):
    return Cell("tiny", parallel, ranks, (), 4, 10, "bf16", False, "", "")


class Forked(Command):
    """In place of subprocess.Popen of python -m torch.distributed.run, and starts no interpreter."""

    def __init__(self, command, cwd, env, stdout, **_):
        super().__init__(command[3:], cwd, torchrun=True, file=f"/proc/{os.getpid()}/fd/{stdout.fileno()}", **env)
        self.pid = self._process.pid

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def test_one_and_two_ranks_of_ddp_and_fsdp_are_measured_and_recorded(tmp_path, recorded, monkeypatch):
    monkeypatch.setattr(scaling_ranks, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked}))
    monkeypatch.setattr(scaling, "Job", partial(Job, program=RANK))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    file, printed = recorded(scaling, *CPU, "--rounds", "1")
    found = {(r["parallel"], r["ranks"]): r for r in file["records"]}
    assert list(found) == [("alone", 1), ("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)]
    for (_, ranks), r in found.items():
        assert "error" not in r and [len(block) for block in r["blocks_ms"]] == [3] * 2, "two turns in a round"
        assert 0 < r["p10"] <= r["ms"] <= r["p90"] and r["peak_gb"] is None, "memory is not known on a CPU"
        assert r["tokens_per_s"] == pytest.approx(1000 * ranks * 2 * 16 / r["ms"], rel=1e-3), "the batch of a rank stays"
        assert r["tokens_per_s_of_rank"] == pytest.approx(r["tokens_per_s"] / ranks, rel=1e-3)
        assert r["efficiency"] > 0 and (ranks > 1 or r["efficiency"] == 1)
        assert (r["model"], r["precision"], r["compiled"], r["common"]) == ("tiny", "fp32", False, " ".join(SMALL))
    steps = {tuple(json.loads(line)) for line in (tmp_path / "notes").read_text().splitlines()}
    assert steps == {
        ("auto", "GPT", 2, 0, 1),
        *((name, kind, 2, rank, ranks) for name, kind in KINDS for ranks in (1, 2) for rank in range(ranks)),
    }
    assert scaling_tables.plot(file, tmp_path).stat().st_size > 10_000
    assert all(word in printed for word in ("alone", "ddp", "fsdp", "efficiency", "2 × 16 tokens a GPU"))


def test_efficiency_is_the_time_of_one_rank_over_that_of_many_within_a_round():
    """Two rounds of two turns: 10 and 20 ms with one rank, 12.5 and 20 ms with two, so 0.8 and 1.0."""
    found = {
        cell("alone", 1): Measured([[8.0] * 3] * 2 + [[16.0] * 3] * 2),
        cell("ddp", 1): Measured([[9.0, 10.0, 90.0], [10.0, 10.0, 10.0], [20.0] * 3, [20.0] * 3]),
        cell("ddp", 2): Measured([[12.0] * 3, [13.0] * 3, [20.0] * 3, [20.0] * 3], peak_gb=1.23456),
    }
    _, _, record = records_of(found)
    assert record["efficiency"] == pytest.approx(math.sqrt(0.8), abs=1e-4)
    # Student's 97.5 % quantile of one degree of freedom, and the deviation of log 0.8 and log 1, over the root of two
    half = 12.706 * abs(math.log(0.8)) / math.sqrt(2) / math.sqrt(2)
    assert record["efficiency_95"] == pytest.approx([math.sqrt(0.8) * math.exp(s * half) for s in (-1, 1)], rel=1e-3)
    assert record["of_alone"] == pytest.approx(math.sqrt(8 / 12.5 * 16 / 20), abs=1e-4)
    assert record["ms"] == 16.5 and record["tokens_per_s"] == round(2 * 4 * 10 / 0.0165, 1) and record["peak_gb"] == 1.23456


def test_a_single_round_has_no_interval_and_no_efficiency_is_made_up_without_one_rank():
    one = Measured([[10.0], [10.0]])
    assert records_of({cell("ddp", 1): one, cell("ddp", 2): one})[1]["efficiency_95"] is None
    assert "efficiency" not in records_of({cell("ddp", 2): one, cell("fsdp", 1): one})[0]
    assert "efficiency" not in records_of({cell("ddp", 1): Measured(error="no"), cell("ddp", 2): one})[1]


def test_a_failure_is_recorded_and_the_other_cells_have_their_turns(tmp_path, capsys, monkeypatch):
    asked = []

    class FailsUnderFsdp(Job):
        def turn(self, overrides, steps):
            asked.append((self.ranks, "parallel=fsdp" in overrides))
            if asked[-1] == (2, True):
                raise JobError("rank 1: OutOfMemoryError: no")
            return {"steps_ms": [10.0] * steps, "peak_gb": 2.0}

        def join(self):
            if self.ranks == 3:
                raise JobError("no ranks")

        start = dismiss = end = lambda self: None  # no process

    monkeypatch.setattr(scaling, "Job", FailsUnderFsdp)
    scaling.main([*CPU, "--output", str(tmp_path), "--parallel", "ddp", "fsdp", "--ranks", "1", "2", "3"])
    errors = {(r["parallel"], r["ranks"]): r.get("error") for r in load(tmp_path / "scaling.json")["records"]}
    failed = {("fsdp", 2): "rank 1: OutOfMemoryError: no", ("ddp", 3): "no ranks", ("fsdp", 3): "no ranks"}
    assert errors == dict.fromkeys(errors) | failed
    assert asked.count((2, True)) == 1 and all(asked.count(turn) == 4 for turn in ((1, False), (1, True), (2, False)))
    assert "failed: fsdp on 2: rank 1: OutOfMemoryError: no" in capsys.readouterr().out


def test_a_killed_rank_ends_the_turn_the_next_starts_ranks_anew_and_an_error_or_silence_of_theirs_is_told():
    job = Job(2, timeout_s=120, program=RANK)
    with pytest.raises(JobError, match="SIGKILL"):
        job.turn([*TURN, "parallel=ddp", "logging.name=kill_rank_1"], 1)
    job.ranks = 1  # a process less to start
    with pytest.raises(JobError, match=r"rank 0: ConfigError: no\.such\.key"):
        job.turn([*TURN, "no.such.key=1"], 1)
    job.timeout_s = 0
    with pytest.raises(JobError, match=r"no answer in 0 s \(--timeout\)"):
        job.turn([*TURN, "parallel=ddp"], 1)


def test_bad_options_are_refused_by_name(tmp_path, capsys, monkeypatch):
    refused = {f"{key}=1": f"--common {key}=1: .* is set by --" for key in ("parallel", "train.batch_size", "model")}
    refused["train.accumulation=4"] = "train.batch_size=2 can't be cut .* train.accumulation=4"
    for text, message in refused.items():
        with pytest.raises(SystemExit, match=message):
            scaling.main([*CPU, text, "--output", str(tmp_path)])
    with monkeypatch.context() as by_torchrun, pytest.raises(SystemExit, match="Start it without torchrun"):
        by_torchrun.setenv("TORCHELASTIC_RUN_ID", "mine")
        by_torchrun.setenv("LOCAL_RANK", "0")
        scaling.main([*CPU, "--output", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        scaling.main(["--ranks", "4"])
    assert "--ranks 4: each rank needs a GPU of its own, and there are 2" in capsys.readouterr().err
