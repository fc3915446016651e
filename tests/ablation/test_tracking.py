"""An ablation in W&B: what is logged, and what becomes of it where W&B's servers do not answer."""

from itertools import chain
from unittest.mock import Mock

import pytest

from ablation import tracking
from ablation.config import Config
from ablation.variants import Variant
from tests.ablation import results
from tests.runs import composed
from training.tracking import log_group


@pytest.mark.parametrize("answers", [True, False])
def test_a_run_for_each_arm_and_a_summary_in_one_group_and_a_server_that_does_not_answer_is_asked_once(
    answers, tiny, own_wandb, tmp_path, monkeypatch
):
    runs, asked = [], []

    def init(**given):
        asked.append(given["mode"])
        if given["mode"] == "online" and not answers:
            raise OSError("connection refused")
        runs.append(Mock(**{key: given[key] for key in ("group", "tags", "config")}, called=given["name"]))
        return runs[-1]

    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setattr("wandb.Image", str)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    (tmp_path / "speedup.png").touch()
    cfg = composed([*tiny, "logging.wandb=online", "logging.tags=[mine]", "logging.group=norms"], Config)
    found = results.ablation([{}], modes=["eager"])
    *runs_of, last = tracking.runs_of(found, [Variant(cfg, {}, {})], tmp_path)
    last = last._replace(tables={"arms": (["arm"], [["torch"]])})
    said = log_group(cfg.logging, tmp_path, "ablation", [*runs_of, last])
    assert asked == (["online"] * 6 if answers else ["online", *["offline"] * 6])
    assert said == "online (project prenorm)" if answers else "connection refused" in said and said.startswith("offline")
    *arms, summary = runs
    assert {run.group for run in runs} == {"norms"} and all({"mine", "ablation"} <= set(run.tags) for run in runs)
    named = [(run.called.partition("/")[2], run.config["norm"]["impl"]) for run in arms]
    assert named[1:3] == [("eager_torch-again", "torch"), ("eager_compiled", "compiled")]
    (cell,) = found.cells
    for run, times in zip(arms, cell.arms.values(), strict=True):
        logged = [(call.kwargs["step"], call.args[0]["perf/step_ms"]) for call in run.log.call_args_list]
        assert logged == list(enumerate(chain(*times.blocks_ms)))
    (values,) = summary.summary.update.call_args.args
    assert values["verdicts/cells"] == [cell.verdict]
    assert values["speedup/eager/over torch/median"] == cell.against("torch").speedup.median
    table, picture = (call.args[0] for call in summary.log.call_args_list)
    assert table["tables/arms"].data == [["torch"]] and picture == {"plots/speedup": str(tmp_path / "speedup.png")}
