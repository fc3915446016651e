"""MFU is computed for a known GPU or not at all."""

import torch

from measure.gpu import peak_flops


def test_a_gpu_has_its_datasheets_peak_and_one_that_only_sounds_like_it_has_none():
    for name, tflops in (("H200", 989.4), ("H200 NVL", 835.5), ("H100 80GB HBM3", 989.4)):
        assert peak_flops(f"NVIDIA {name}", torch.bfloat16) == tflops * 1e12
    for name in ("RTX A4000", "GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 D", "V100"):  # no A40; and V100 has no bf16
        assert peak_flops(f"NVIDIA {name}", torch.bfloat16) is None
