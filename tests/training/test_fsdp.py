"""parallel=fsdp is parallel=ddp with less memory: the same losses, the same checkpoints, whatever the number of ranks."""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import configs
from configs import Config
from configs.machine import Machine
from configs.schema import TrainConfig
from model import GPT
from tests.ranks import go_on_together, on_ranks
from tests.runs import ROOT, assert_same_run, corpus, curves, train_here
from training import distributed
from training.checkpoint import TrainState
from training.distributed import shard
from training.precision import Precision
from training.step import adamw, training_step

SHORT = ["train.steps=6", "eval.every=3", "logging.every=1", "train.accumulation=2", "optim.clip_norm=0.5", "sample.tokens=5"]
# A constant rate lets a run stop by asking for fewer steps; 2 and 4 ranks can't share 69 windows of validation evenly; and of
# four, which hold two rows of six each, the last one holds nothing of those weights
SHORT += ["optim.schedule=constant", "model.bias=false", "model.context=28", "model.mlp_width=6"]
FSDP, HALF = "parallel=fsdp", ["train.steps=3", "checkpoint.every=1"]
DROPPED = ["model.qk_norm=true", "model.drop_path=0.3", "model.dropout=0.1", "model.block=parallel", "norm.impl=torch"]


def on_each(ranks: int, jobs: dict[Path, list[str]]) -> list[dict]:
    """Runs one after the other on the same ranks, as starting ranks takes longer than the runs: overrides by folder.

    Returns:
        What each rank saw, by the folder's name: the numbers of the model that it holds in the end, and how often its gradients
        were reduced; and of two ranks what `_overflow` returns.
    """
    return on_ranks(ranks, _train_all, next(iter(jobs)).parent / f"results_of_{ranks}", jobs)


def _train_all(world: distributed.World, on: Machine, jobs: dict[Path, list[str]]) -> dict:
    torch.compile = partial(torch.compile, backend="eager")  # what is traced, without minutes of a C++ compiler
    found, counted = {}, _watch()
    for folder, overrides in jobs.items():
        go_on_together(configs.load(overrides, on=on), folder, on, world)
        parameters = [getattr(p, "_local_tensor", p) for p in counted["model"].parameters()]
        found[folder.name] = {"held": sum(p.numel() for p in parameters), "reduced": counted["reduced"]}
    return found | ({"overflow": _overflow(world)} if world.size == 2 else {})


def _overflow(world: distributed.World) -> list[tuple[float, bool]]:
    """(loss scale, whether a weight moved) after each of three steps in fp16; the gradient of the last rank overflows in the
    second."""
    cfg = Config(train=TrainConfig(batch_size=2 * world.size))
    model, precision = GPT(cfg.model, cfg.norm, 64), Precision(torch.device("cpu"), torch.float16)
    shard(model, precision, world.size, compiled=False)
    state = TrainState(model, adamw(model, cfg.optim), torch.amp.GradScaler("cpu", init_scale=1024.0), tokenizer="")
    tokens, seen = torch.zeros(2, 8, dtype=torch.int64), []
    for step in range(3):
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        factor = float("inf") if step == 1 and world.rank == world.size - 1 else 1.0
        hook = model.register_forward_hook(lambda *call, factor=factor: call[-1] * factor)
        training_step(model, state, (tokens, tokens), step, cfg, precision, world)
        hook.remove()
        moved = any(not torch.equal(old, new.to_local()) for old, new in zip(before, model.parameters(), strict=True))
        seen.append((state.scaler.get_scale(), moved))
    return seen


def _watch() -> dict:
    """The model of the last run and how often its gradients were scattered."""
    collectives, counted, build = torch.distributed, {"reduced": 0}, GPT.__init__
    names = ("reduce_scatter_single", "reduce_scatter_tensor")  # by PyTorch's age
    name = next(name for name in names if hasattr(collectives, name))
    scatter = getattr(collectives, name)

    def built(model, *arguments):
        build(model, *arguments)
        counted.update(model=model, reduced=0)

    def scattered(*arguments, **options):
        counted["reduced"] += 1
        return scatter(*arguments, **options)

    GPT.__init__ = built  # type: ignore[method-assign]
    setattr(collectives, name, scattered)
    return counted


def test_sharded_runs_are_those_of_one_process_and_of_ddp(tmp_path):
    """One test, since the runs that it compares take longer than all else here."""
    at, base = tmp_path, [*corpus(tmp_path), *SHORT]
    train_here(base, at / "whole")
    train_here([*base, *HALF], at / "begun")
    with (at / "begun" / "last" / "training.safetensors").open("r+b") as file:
        file.truncate(1000)
    bf16 = [*base, "train.precision=bf16"]
    dropped = [*base, *DROPPED, "train.steps=3"]
    counted = on_each(
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
    on_each(4, {at / "fsdp_4": [*base, FSDP], at / "half_2_then_4": [*base, FSDP, "resume=auto"]})
    train_here([*base, "resume=auto"], at / "half_2_then_1")

    for run in ("fsdp_2", "fsdp_4", "begun", "half_2_then_4", "half_2_then_1"):
        assert_same_run(at / run, at / "whole")
        assert (at / run / "sample.txt").read_text() == (at / "whole" / "sample.txt").read_text()
    for name, rtol in (("bf16", 5e-4), ("dropped", 1e-5)):
        torch.testing.assert_close(curves(at / f"{name}_fsdp_2"), curves(at / f"{name}_2"), rtol=rtol, atol=0)
    assert not torch.allclose(curves(at / "bf16_2"), curves(at / "fsdp_2"), rtol=1e-5, atol=0), "it was bf16"
    held = [rank["fsdp_2"]["held"] for rank in counted]
    model = load_file(at / "whole" / "last" / "model.safetensors")
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
