"""deterministic=true: what it sets, and the same bits on a GPU."""

import os
import subprocess
import sys

import pytest
import torch
import torch._inductor.config  # now, as it imports triton, which is what the environment says at that moment

from tests.forks import Command
from tests.runs import ROOT, bits, corpus, newest, read_json
from training.step import set_deterministic


def test_each_run_of_a_sweep_has_its_own_setting_and_a_workspace_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    for wanted in (True, False):
        set_deterministic(wanted)
        assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic) == (wanted, wanted)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_run_trains_evaluates_and_samples_under_it_and_says_so(tiny, tmp_path):
    done = Command([*tiny, "deterministic=true", "folder=run", "train.steps=4"], tmp_path).finish()
    assert done.returncode == 0, done.stderr
    stored = read_json(newest(tmp_path / "run") / "state.json")["config"]
    assert stored["deterministic"] and stored["train"]["precision"] == "fp32", "what auto was is kept"
    assert "precision   fp32, deterministic" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [[], ["model.kv_heads=1", "model.positions=rotary"], ["train.precision=fp32"]], ids=str)
def test_half_the_steps_and_the_other_half_give_the_bits_of_all_on_a_gpu(tmp_path, changes):
    # wide enough for flash attention's backward to have several blocks of keys, which add to the same gradient of queries
    sizes = ["model.width=256", "model.heads=4", "model.context=512", "train.batch_size=16", "model.dropout=0.1"]
    steps = ["device=cuda", "deterministic=true", *sizes, *changes, "optim.schedule=constant", "train.steps=20"]
    # not forked: CUDA can't be used in a fork of a process that has seen it
    for arguments in (["folder=whole"], ["folder=cut", "train.steps=10"], ["folder=cut", "resume=auto"]):
        command = [sys.executable, str(ROOT / "train.py"), *corpus(tmp_path), *steps, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    assert bits(tmp_path / "cut") == bits(tmp_path / "whole")
