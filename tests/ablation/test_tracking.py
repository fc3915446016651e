"""An ablation in W&B: what W&B's servers would have of it, and what is left where they do not answer."""

import json
from unittest.mock import Mock

import pytest
import wandb

import ablate
from tests.ablation import results
from tests.wandb_server import WandbServer


@pytest.fixture
def here(own_wandb, tmp_path, monkeypatch):
    """The folder that the program runs in, with a key for W&B."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_online_ablation_is_a_run_for_each_arm_and_a_summary_in_one_group(tiny, here, ablations, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_PROJECT", "norms")
    with WandbServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert ablate.main([*tiny, *results.SHORT, "logging.wandb=online", "logging.tags=[mine]"]) == 0
        wandb.teardown()
    (folder,) = (here / "runs").iterdir()
    *arms, summary = runs = list(server.runs.values())
    assert "W&B: online (project norms)" in capsys.readouterr().out.splitlines()
    assert {(run.started["project"], run.started["groupName"], run.exit_code) for run in runs} == {("norms", folder.name, 0)}
    assert all({"mine", "ablation"} <= set(run.started["tags"]) for run in runs)
    assert [(run.started["displayName"].split("/")[1], set(run.started["tags"]) - {"mine", "ablation"}) for run in runs] == [
        ("eager_torch", {"torch", "eager", "layernorm"}),
        ("eager_torch-again", {"torch again", "eager", "torch", "layernorm"}),
        ("eager_fused", {"fused", "eager", "layernorm"}),
        ("summary", {"summary"}),
    ]
    assert [run.config["norm"]["impl"] for run in arms] == ["torch", "torch", "fused"]
    found = ablations[-1]
    (cell,) = found.cells
    for run, times in zip(arms, cell.arms.values(), strict=True):
        logged = [(line["_step"], line["perf/step_ms"]) for line in run.history]
        assert logged == list(enumerate(ms for block in times.blocks_ms for ms in block))
        assert run.summary["perf/step_ms_p10"] <= run.summary["perf/step_ms_median"] <= run.summary["perf/step_ms_p90"]
        assert run.summary["perf/tokens_per_s"] > 0 and run.summary["perf/backward_ms"] > 0
    # W&B has one place for a name, and the last to take it would stay alone.
    logged = sorted(name for line in summary.history for name in line if "/" in name)
    pictures, tables = ("parity", "speedup", "step_times"), ("cells", "pairs", "parity")
    assert logged == [*(f"plots/{name}" for name in pictures), *(f"tables/{name}" for name in tables)]
    assert summary.summary["verdicts/cells"] == [cell.verdict]
    for base in cell.opponents:
        assert summary.summary[f"speedup/eager/over {base}/median"] == pytest.approx(cell.against(base).speedup.median)
    assert "identical, as no kernel ran (TRITON_INTERPRET=1" in found.parity[0].verdict
    assert summary.summary["verdicts/parity"] == [one.verdict for one in found.parity]
    tables = {name.split("_")[0]: json.loads(of) for name, of in summary.files.items() if name.startswith("media/table/")}
    cells = tables["media/table/tables/cells"]
    assert cells["data"] == [["eager", cell.verdict]]
    pairs = tables["media/table/tables/pairs"]
    assert [row[:3] for row in pairs["data"]] == [["eager", "torch again", "torch"], ["eager", "fused", "torch"]]
    assert pairs["data"][1][3] == cell.against("torch").speedup.median and {len(row) for row in pairs["data"]} == {9}


def test_a_server_that_does_not_answer_is_asked_once(tiny, here, monkeypatch, capsys):
    found = results.ablation([{}], modes=("eager",), kernels=False)
    monkeypatch.setattr(ablate, "ablate", lambda variants, command, folder, cycles: (folder / "report.md").touch() or found)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # a port that nobody listens on
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    init = Mock(wraps=wandb.init)
    monkeypatch.setattr(wandb, "init", init)
    assert ablate.main([*tiny, "logging.wandb=online"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("W&B: ")]
    assert len(said) == 1 and "connection refused" in said[0]
    assert said[0].startswith("W&B: offline (project prenorm; online start failed: ")
    assert [call.kwargs["mode"] for call in init.call_args_list] == ["online", *["offline"] * 5]
    assert len(list(here.glob("runs/*/wandb/offline-run-*"))) == 5
