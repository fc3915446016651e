"""A study in W&B: what W&B's servers would have of it."""

import json

import wandb

import compare
from study.runs import Result
from tests.runs import read_json
from tests.wandb_server import WandbServer

SWEEP = ["norm.kind=layernorm,rmsnorm", "optim.lr=1e-3", "seed=2,3", "train.steps=6", "eval.every=3", "eval.batches=1"]
SWEEP += ["compare.fresh=0"]


def test_a_study_is_a_run_for_each_arm_and_seed_and_a_summary_in_one_group(tiny, own_wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with WandbServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert compare.main([*tiny, *SWEEP, "logging.wandb=online", "logging.tags=[mine]", f"folder={tmp_path}/kinds"]) == 0
        wandb.teardown()
    *runs, summary = list(server.runs.values())
    results = [Result(**of) for of in read_json(tmp_path / "kinds" / "report.json")["results"]]
    assert len(runs) == len(results) == 3 * 2  # two arms, and the baseline with other seeds
    found = {(run.started["groupName"], *run.started["tags"], run.exit_code) for run in [*runs, summary]}
    assert found == {("kinds", "mine", "study", 0)}
    for run, result in zip(runs, results, strict=True):
        assert (run.config["arm"], run.config["rate"], run.config["seed"]) == (result.arm, result.rate, result.seed)
        assert run.config["stage"] == result.stage
        assert run.config["optim"]["lr"] == result.rate
        assert f"norm.kind={run.config['norm']['kind']}" == result.arm.partition(" ")[0]
        assert [[line["_step"], line["val/loss"]] for line in run.history] == result.evaluated
        assert run.summary["val/last"] == result.last
    [table] = [json.loads(content) for name, content in summary.files.items() if name.endswith(".table.json")]
    assert [line[0] for line in table["data"]] == ["norm.kind=layernorm", "norm.kind=rmsnorm"]
    shown = {name for line in summary.history for name in line if "/" in name}
    assert shown == {"tables/arms", "plots/differences", "plots/rates", "plots/depth"}
