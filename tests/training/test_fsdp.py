"""parallel=fsdp is parallel=ddp with less memory: the same losses, the same checkpoints, whatever the number of ranks."""

import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import ROOT, corpus, curves, train_here
from tests.sharded_ranks import train_one_after_the_other

SHORT = ["train.steps=6", "eval.every=3", "logging.every=1", "train.accumulation=2", "optim.clip_norm=0.5", "sample.tokens=5"]
# A constant rate lets a run stop by asking for fewer steps; 2 and 4 ranks can't share 69 windows of validation evenly; and of
# four, which hold two rows of six each, the last one holds nothing of those weights
SHORT += ["optim.schedule=constant", "model.bias=false", "model.context=28", "model.mlp_width=6"]
FSDP, HALF = "parallel=fsdp", ["train.steps=3", "checkpoint.every=1"]
DROPPED = ["model.qk_norm=true", "model.drop_path=0.3", "model.dropout=0.1", "model.block=parallel", "norm.impl=torch"]


def train_all(at):
    base = [*corpus(at), *SHORT]
    train_here(base, at / "whole")
    train_here([*base, *HALF], at / "begun")
    with (at / "begun" / "last" / "training.safetensors").open("r+b") as file:
        file.truncate(1000)
    bf16 = [*base, "train.precision=bf16"]
    dropped = [*base, *DROPPED, "train.steps=3"]
    counted = train_one_after_the_other(
        2,
        {
            at / "fsdp_2": [*base, FSDP],
            at / "begun": [*base, FSDP, "resume=auto", "norm.impl=torch"],
            at / "half_2": [*base, FSDP, *HALF, "checkpoint.background=true"],
            at / "bf16_2": bf16,
            at / "bf16_fsdp_2": [*bf16, FSDP],
            at / "dropped_2": dropped,
            at / "dropped_fsdp_2": [*dropped, FSDP, "train.recompute=true", "train.compile=true"],
        },
    )
    for ranks in (1, 4):
        shutil.copytree(at / "half_2", at / f"half_2_then_{ranks}", symlinks=True)
    train_one_after_the_other(4, {at / "fsdp_4": [*base, FSDP], at / "half_2_then_4": [*base, FSDP, "resume=auto"]})
    train_here([*base, "resume=auto"], at / "half_2_then_1")
    return counted


def assert_same_run(found, whole):
    torch.testing.assert_close(curves(found), curves(whole), rtol=1e-5, atol=0)
    for file in ("model.safetensors", "training.safetensors"):
        ours, expected = (load_file(folder / "last" / file) for folder in (found, whole))
        assert ours.keys() == expected.keys()
        for name, tensor in expected.items():
            # a second moment is smaller than any tolerance that is not its own
            atol = 1e-4 * tensor.abs().max().item() if file.startswith("training") else 1e-5
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=atol, msg=lambda why, name=name: f"{name}: {why}")
    assert (found / "sample.txt").read_text() == (whole / "sample.txt").read_text()


def test_sharded_runs_are_those_of_one_process_and_of_ddp(tmp_path):
    """One test, since the runs that it compares take longer than all else here."""
    counted = train_all(tmp_path)
    for run in ("fsdp_2", "fsdp_4", "begun", "half_2_then_4", "half_2_then_1"):
        assert_same_run(tmp_path / run, tmp_path / "whole")
    for name, rtol in (("bf16", 5e-4), ("dropped", 1e-5)):
        torch.testing.assert_close(curves(tmp_path / f"{name}_fsdp_2"), curves(tmp_path / f"{name}_2"), rtol=rtol, atol=0)
    assert not torch.allclose(curves(tmp_path / "bf16_2"), curves(tmp_path / "fsdp_2"), rtol=1e-5, atol=0), "it was bf16"
    held = [rank["fsdp_2"]["held"] for rank in counted]
    model = load_file(tmp_path / "whole" / "last" / "model.safetensors")
    assert sum(held) == sum(tensor.numel() for tensor in model.values()) and max(held) < 0.51 * sum(held)
    assert [rank["fsdp_2"]["reduced"] for rank in counted] == [6 * 3] * 2, "steps × (blocks and the rest), of two micro-batches"
    # a gradient that overflows on one rank is skipped by all, and halves their scale
    assert [rank["overflow"] for rank in counted] == [[[1024.0, True], [512.0, False], [512.0, True]]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [[], ["train.precision=bf16"], ["train.compile=true", "train.recompute=true"]], ids=str)
def test_on_gpus_the_losses_are_those_of_one_process(tmp_path, changes):
    ranks = min(2, torch.cuda.device_count())
    base = [*corpus(tmp_path), *SHORT, "device=cuda", "train.precision=fp32", *changes]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    for program, folder in (([], "alone"), (torchrun, "sharded")):
        arguments = [*base, f"folder={folder}", *([FSDP] if program else [])]
        command = [sys.executable, *program, str(ROOT / "train.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    tolerance = 1e-3 if "train.precision=bf16" in base else 1e-4
    torch.testing.assert_close(curves(tmp_path / "sharded"), curves(tmp_path / "alone"), rtol=tolerance, atol=0)
