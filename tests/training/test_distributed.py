"""Several ranks are one run: the losses of one process, one folder, one end, and the same checkpoints whatever their number."""

import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from configs.machine import Machine
from model import GPT
from tests.ranks import on_ranks, train_together
from tests.runs import ROOT, assert_same_run, corpus, curves, newest, read_json, train_here
from training import distributed, sharding, storage

SHARDED = ["train.steps=6", "eval.every=3", "logging.every=1", "train.accumulation=2", "optim.clip_norm=0.5", "sample.tokens=5"]
# A constant rate lets a run stop by asking for fewer steps; 2 and 4 ranks can't share 69 windows of validation evenly; and of
# four, which hold two rows of six each, the last one holds nothing of those weights
SHARDED += ["optim.schedule=constant", "optim.min_lr=null", "model.bias=false", "model.context=28", "model.mlp_width=6"]
FSDP, HALF = "parallel=fsdp", ["train.steps=3", "checkpoint.every=1"]
DROPPED = ["model.qk_norm=true", "model.drop_path=0.3", "model.dropout=0.1", "model.block=parallel", "norm.impl=torch"]
DROPPED += ["model.layers=3", "train.steps=3"]
TWO_BLOCKS = 30_000  # bytes: of those with DROPPED, one has 18,000 in its linear layers
SHORT = ["train.steps=12", "eval.every=6", "logging.every=1", "train.accumulation=2", "optim.clip_norm=0.5", "sample.tokens=0"]


@pytest.fixture(scope="module")
def tiny(tiny):
    return [*tiny, *SHORT]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The folder of the run on two ranks, and what they tell."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, train_together(2, tiny, folder, count=[1])


def test_the_same_global_batch_gives_the_same_losses_and_gradients_are_reduced_once_a_step(tiny, whole, tmp_path):
    folder, told = whole
    assert_same_run(folder, train_here(tiny, tmp_path / "run")[0].folder)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]
    assert [(one["ended"], len(one["rows"]), one["reduced"]) for one in told] == [(None, 12 * 8 // 2, 12)] * 2
    seeds = [seed for one in told for seed in one["seeds"]]
    assert len(set(seeds)) == len(seeds) == 2 * 12 * 2 * 5, "other dropout in all ranks × steps × micro-batches × norm sites"


def test_a_signal_to_one_rank_in_an_evaluation_stops_all_at_the_same_step(tiny, whole, tmp_path):
    told = train_together(2, tiny, tmp_path / "run", look=[1, 1])
    assert [(one["ended"], one["steps"], one["looked"]) for one in told] == [(143, 6, 1)] * 2
    assert read_json(newest(tmp_path / "run") / "state.json")["step"] == 6
    train_together(2, [*tiny, "resume=auto"], tmp_path / "run", count=[1])
    assert torch.equal(curves(tmp_path / "run"), curves(whole[0])), "on as many ranks, the same bits"


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ({"nan": [1, 3]}, "NonFiniteError: the loss or the gradient is NaN or infinite at step 3"),
        ({"full": [0, 12]}, "StorageError: .*step_00000012 can't be written"),
    ],
)
def test_what_one_rank_can_not_go_on_with_stops_all_with_the_same_error(tiny, tmp_path, act, error):
    told = train_together(2, tiny, tmp_path / "run", **act)
    assert told[0]["ended"] == told[1]["ended"]
    assert re.match(error, told[0]["ended"])
    assert [storage.step_of(path) for path in storage.checkpoints(tmp_path / "run")] == [6] * ("full" in act)


def _train_all(world: distributed.World, on: Machine, at: Path, jobs: dict[str, list[str]]) -> dict[str, int]:
    """Runs one after the other, as starting ranks takes longer than they do. Returns how many numbers of the model this rank
    held, by the folder's name."""
    models, build, usual = [], GPT.__init__, sharding.GROUP_BYTES
    GPT.__init__ = lambda model, *given: (models.append(model), build(model, *given))[1]  # type: ignore[method-assign]
    torch.compile = partial(torch.compile, backend="eager")  # as a C++ compiler takes minutes
    held = {}
    for name, overrides in jobs.items():
        sharding.GROUP_BYTES = TWO_BLOCKS if name.startswith("dropped") else usual
        train_here(overrides, at / name, on=on, world=world)
        held[name] = sum(getattr(p, "_local_tensor", p).numel() for p in models[-1].parameters())
    return held


def test_sharded_runs_are_those_of_one_process_and_of_ddp(tmp_path):
    """One test, since starting ranks takes longer than the runs that it compares."""
    at, base = tmp_path, [*corpus(tmp_path), *SHARDED]
    bf16, dropped, muon = [*base, "train.precision=bf16"], [*base, *DROPPED], [*base, "optim.kind=muon"]
    for name, overrides in {"whole": base, "begun": [*base, *HALF], "muon": muon}.items():
        train_here(overrides, at / name)
    with (newest(at / "begun") / "training.safetensors").open("r+b") as file:
        file.truncate(1000)
    jobs = {
        "begun": [*base, FSDP, "resume=auto", "norm.impl=torch"],
        "half": [*base, FSDP, *HALF],
        "bf16": bf16,
        "bf16_fsdp": [*bf16, FSDP],
        "dropped": dropped,
        "dropped_fsdp": [*dropped, FSDP, "train.recompute=true", "train.compile=true"],
        "muon_fsdp": [*muon, FSDP],
    }
    counted = on_ranks(2, _train_all, at, jobs)
    shutil.copytree(at / "half", at / "half_then_1")
    on_ranks(4, _train_all, at, {"half": [*base, FSDP, "resume=auto"]})
    train_here([*base, "resume=auto"], at / "half_then_1")

    for run in ("begun", "half", "half_then_1"):
        assert_same_run(at / run, at / "whole")
        assert (at / run / "sample.txt").read_text() == (at / "whole" / "sample.txt").read_text()
    for run, other, rtol in (("dropped_fsdp", "dropped", 1e-5), ("muon_fsdp", "muon", 1e-3), ("bf16_fsdp", "bf16", 1e-3)):
        torch.testing.assert_close(curves(at / run), curves(at / other), rtol=rtol, atol=0)  # Muon computes in bf16
    assert not torch.allclose(curves(at / "bf16"), curves(at / "whole"), rtol=1e-5, atol=0), "it was bf16"
    held = [rank["half"] for rank in counted]
    model = load_file(newest(at / "whole") / "model.safetensors")
    assert sum(held) == sum(tensor.numel() for tensor in model.values()) and max(held) < 0.51 * sum(held)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [[], ["train.precision=bf16"], ["train.compile=true", "train.recompute=true"]], ids=str)
def test_on_gpus_the_losses_are_those_of_one_process(tmp_path, changes):
    ranks = min(2, torch.cuda.device_count())
    base = [*corpus(tmp_path), *SHARDED, "device=cuda", "train.precision=fp32", *changes]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    for program, folder in (([], "alone"), (torchrun, "sharded")):
        arguments = [*base, f"folder={folder}", *([FSDP] if program else [])]
        command = [sys.executable, *program, str(ROOT / "train.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    tolerance = 1e-3 if "train.precision=bf16" in base else 1e-4
    torch.testing.assert_close(curves(tmp_path / "sharded"), curves(tmp_path / "alone"), rtol=tolerance, atol=0)
