"""profile=true: what it leaves in the run's folder, and that it changes nothing else."""

import json

from tests.runs import bits, train_here
from training.profile import STEPS


def test_a_profiled_run_leaves_a_trace_and_a_table_and_gives_the_same_bits(tiny, tmp_path, capsys):
    tiny = [*tiny, "train.steps=12", "eval.every=0", "logging.every=4", "model.dropout=0.1"]
    train_here(tiny, tmp_path / "plain")
    _, metrics = train_here([*tiny, "profile=true"], tmp_path / "run")
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert [event.get("name") for event in trace["traceEvents"]].count("Optimizer.step#AdamW.step") == STEPS
    assert "aten::addmm" in (tmp_path / "run" / "profile.txt").read_text()
    assert "trace.json and profile.txt of 3 steps are in" in capsys.readouterr().out
    with_profile, plain = bits(tmp_path / "run"), bits(tmp_path / "plain")
    assert with_profile["state"]["config"].pop("profile") and not plain["state"]["config"].pop("profile")
    assert with_profile == plain
    # the first line of metrics has only steps before and in the profile, which are no step time
    assert "perf/step_ms" not in metrics[0] and metrics[-2]["perf/step_ms"] > 0
