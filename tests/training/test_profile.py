"""profile=true: what it leaves in the run's folder, and that it changes nothing else."""

import json

import pytest

from measure.attribution import GROUPS, NORM_SITE
from tests.runs import bits, train_here
from training.profile import STEPS


def test_a_profiled_run_leaves_a_trace_and_a_table_and_gives_the_same_bits(tiny, tmp_path, capsys):
    tiny = [*tiny, "train.steps=12", "eval.every=0", "logging.every=4", "model.dropout=0.1"]
    train_here(tiny, tmp_path / "plain")
    _, metrics = train_here([*tiny, "profile=true"], tmp_path / "run")
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == STEPS
    assert names.count(NORM_SITE) == STEPS * 7, "three sites of each layer and the last norm, marked in each profiled step"
    table = (tmp_path / "run" / "profile.txt").read_text()
    ms = {line.split()[0]: line.split()[1] for line in table.splitlines() if line.startswith((*GROUPS, "all"))}
    times = [float(ms[group]) for group in GROUPS]
    assert min(times) > 0 and sum(times) == pytest.approx(float(ms["all"]), abs=0.01)
    assert "aten::addmm" in table and "trace.json and profile.txt are in" in capsys.readouterr().out
    with_profile, plain = bits(tmp_path / "run"), bits(tmp_path / "plain")
    assert with_profile["state"]["config"].pop("profile") and not plain["state"]["config"].pop("profile")
    assert with_profile == plain and not (tmp_path / "plain" / "profile.txt").exists()
    # the first line of metrics has only steps before and in the profile, which are no step time
    assert "perf/step_ms" not in metrics[0] and metrics[-2]["perf/step_ms"] > 0
    train_here([*tiny, "profile=true", "train.steps=5"], tmp_path / "short")
    assert "profile=true: nothing will be profiled, as this start has 5 steps and a profile needs 7" in capsys.readouterr().out
    assert not (tmp_path / "short" / "trace.json").exists()
