"""MFU is computed for this GPU or not at all."""

import pytest
import torch

from training.environment import _peak, peak_flops


@pytest.mark.parametrize(
    ("name", "bf16_tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_known_gpus_have_their_datasheets_peak(name, bf16_tflops):
    assert _peak(name, torch.bfloat16) == bf16_tflops * 1e12


@pytest.mark.parametrize(
    "name", ["NVIDIA RTX A4000", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "Quadro T400", "Some GPU"]
)
def test_a_gpu_that_only_sounds_like_a_known_one_has_no_peak(name):
    assert _peak(name, torch.bfloat16) is None


def test_a_dtype_that_the_gpu_lacks_has_no_peak():
    assert _peak("Tesla V100-SXM2-16GB", torch.bfloat16) is None
    assert _peak("Tesla V100-SXM2-16GB", torch.float16) == 125e12


def test_a_cpu_has_no_peak():
    assert peak_flops(torch.device("cpu"), torch.float32) is None
