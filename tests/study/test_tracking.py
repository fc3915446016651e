"""A study in W&B: what W&B is given of it."""

from unittest.mock import Mock

import compare
from study.runs import Result
from tests.runs import read_json

SWEEP = ["norm.kind=layernorm,rmsnorm", "optim.lr=1e-3", "seed=2,3", "train.steps=6", "eval.every=3", "eval.batches=1"]
SWEEP += ["compare.fresh=0"]


def test_a_study_is_a_run_for_each_arm_and_seed_and_a_summary_in_one_group(tiny, own_wandb, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr("wandb.init", lambda **given: runs.append(Mock(**given | {"called": given.pop("name")})) or runs[-1])
    monkeypatch.setattr("wandb.Image", str)
    assert compare.main([*tiny, *SWEEP, "logging.wandb=offline", "logging.tags=[mine]", f"folder={tmp_path}/kinds"]) == 0
    *arms, summary = runs
    results = [Result(**of) for of in read_json(tmp_path / "kinds" / "report.json")["results"]]
    assert len(arms) == len(results) == 3 * 2  # two arms, and the baseline with other seeds
    for run in runs:
        assert (run.group, run.tags) == ("kinds", ["mine", "study"])
        run.finish.assert_called_once_with(exit_code=0)
    for run, result in zip(arms, results, strict=True):
        assert (run.config["arm"], run.config["rate"], run.config["seed"]) == (result.arm, result.rate, result.seed)
        assert run.config["stage"] == result.stage
        assert run.config["optim"]["lr"] == result.rate
        assert f"norm.kind={run.config['norm']['kind']}" == result.arm.partition(" ")[0]
        assert [[call.kwargs["step"], call.args[0]["val/loss"]] for call in run.log.call_args_list] == result.evaluated
        assert run.summary.update.call_args.args[0]["val/last"] == result.last
    shown = {name: of for call in summary.log.call_args_list for name, of in call.args[0].items()}
    assert shown.keys() == {"tables/arms", "plots/differences", "plots/rates", "plots/depth"}
    assert [line[0] for line in shown["tables/arms"].data] == ["norm.kind=layernorm", "norm.kind=rmsnorm"]
