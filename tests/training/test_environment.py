"""Facts about the machine that a run's numbers depend on. MFU is computed for a known GPU or not at all."""

import os
import stat
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch

from training import environment
from training.environment import _peak, git_state, peak_flops
from training.metrics import crowded


def test_clocks_and_power_are_asked_of_nvidia_smi_and_missing_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.gpu_state(torch.device("cuda")) == {}
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ntest "$3" = --id=GPU-1-2 && echo "1980 MHz, 1980 MHz, 3201 MHz, 89.8 W, 700 W, 31"\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    state = environment.gpu_state(torch.device("cuda"))
    assert state["clocks.sm"] == "1980 MHz" and state["power.limit"] == "700 W" and len(state) == 6


def test_the_state_of_a_gpu_is_asked_for_between_the_first_and_the_last_of_its_steps(monkeypatch):
    taken, asked_at = [], []
    monkeypatch.setattr(environment, "gpu_state", lambda device: asked_at.append(len(taken)) or {"clocks.sm": "1500 MHz"})
    state = environment.gpu_state_during(lambda: taken.append(time.sleep(0.005)), torch.device("cuda"), settle_s=0.1)
    assert state == {"clocks.sm": "1500 MHz"} and 0 < asked_at[0] <= len(taken)


def test_the_git_state_says_whether_the_code_was_changed(tmp_path):
    assert git_state(tmp_path) is None
    (tmp_path / "a").write_text("1")
    for arguments in (["init"], ["add", "a"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)
    clean = git_state(tmp_path)
    (tmp_path / "a").write_text("2")
    assert len(clean["revision"]) == 40 and clean["dirty"] is False
    assert git_state(tmp_path) == {"revision": clean["revision"], "dirty": True}


def test_a_gpu_has_its_datasheets_peak_and_one_that_only_sounds_like_it_has_none():
    for name, tflops in (("H200", 989.4), ("H200 NVL", 835.5), ("H100 80GB HBM3", 989.4)):
        assert _peak(f"NVIDIA {name}", torch.bfloat16) == tflops * 1e12
    for name in ("RTX A4000", "GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 D", "V100"):  # no A40; and V100 has no bf16
        assert _peak(f"NVIDIA {name}", torch.bfloat16) is None
    assert peak_flops(torch.device("cpu"), torch.float32) is None


def test_the_revision_of_another_users_checkout_is_read(tmp_path):
    (tmp_path / "bin").mkdir()
    run = {"cwd": tmp_path, "check": True, "capture_output": True}
    for command in ("init", "-c user.name=a -c user.email=b commit --allow-empty -m x"):
        subprocess.run(["git", *command.split()], **run)
    os.chown(tmp_path, 65534, 65534)
    assert subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True).returncode, (
        "git refuses it by itself"
    )
    state = environment.git_state(tmp_path)
    assert state is not None and len(state["revision"]) == 40


@pytest.mark.parametrize(("load", "threads", "told"), [(9.0, 2, True), (2.5, 2, False), (9.0, 1, False)])
def test_a_run_says_that_other_programs_use_its_cores(load, threads, told):
    assert bool(crowded(load, 2, threads)) == told
    assert not told or "OMP_NUM_THREADS=1" in crowded(load, 2, threads)
