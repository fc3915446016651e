"""What nvidia-smi tells, and when it is asked. MFU is computed for a known GPU or not at all."""

import stat
import time
from types import SimpleNamespace

import torch

from measure import gpu
from measure.gpu import peak_flops


def test_clocks_and_power_are_asked_of_nvidia_smi_and_missing_without_it(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.gpu_state(torch.device("cuda")) == {}
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ntest "$3" = --id=GPU-1-2 && echo "1980 MHz, 1980 MHz, 3201 MHz, 89.8 W, 700 W, 31"\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    state = gpu.gpu_state(torch.device("cuda"))
    assert state["clocks.sm"] == "1980 MHz" and state["power.limit"] == "700 W" and len(state) == 6


def test_the_state_of_a_gpu_is_asked_for_between_the_first_and_the_last_of_its_steps(monkeypatch):
    taken, asked_at = [], []
    monkeypatch.setattr(gpu, "gpu_state", lambda device: asked_at.append(len(taken)) or {"clocks.sm": "1500 MHz"})
    state = gpu.gpu_state_during(lambda: taken.append(time.sleep(0.005)), torch.device("cuda"), settle_s=0.1)
    assert state == {"clocks.sm": "1500 MHz"} and 0 < asked_at[0] <= len(taken)


def test_a_gpu_has_its_datasheets_peak_and_one_that_only_sounds_like_it_has_none():
    for name, tflops in (("H200", 989.4), ("H200 NVL", 835.5), ("H100 80GB HBM3", 989.4)):
        assert peak_flops(f"NVIDIA {name}", torch.bfloat16) == tflops * 1e12
    for name in ("RTX A4000", "GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 D", "V100"):  # no A40; and V100 has no bf16
        assert peak_flops(f"NVIDIA {name}", torch.bfloat16) is None
