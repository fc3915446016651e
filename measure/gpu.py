"""The most arithmetic that a known GPU can do."""

import re

import torch

# name fragment → dense TFLOP/s (no sparsity) with fp32 accumulation, as in the vendor's datasheet: (bf16, fp16, fp32 without
# TF32). The first fragment found in the device's name counts, so longer names come first. None: the GPU lacks the dtype.
PEAK_TFLOPS: dict[str, tuple[float | None, float, float]] = {
    "B200": (2250, 2250, 75),
    "GH200": (989.4, 989.4, 66.9),
    "H200 NVL": (835.5, 835.5, 60),
    "H200": (989.4, 989.4, 66.9),
    "H100 NVL": (835.5, 835.5, 60),
    "H100 PCIe": (756, 756, 51.2),
    "H100": (989.4, 989.4, 66.9),  # SXM: "NVIDIA H100 80GB HBM3"
    "A100": (312, 312, 19.5),
    "A800": (312, 312, 19.5),
    "A40": (149.7, 149.7, 37.4),
    "A30": (165, 165, 10.3),
    "L40S": (362, 362, 91.6),
    "L40": (181, 181, 90.5),
    "RTX 6000 Ada": (364.2, 364.2, 91.1),
    "RTX A6000": (154.8, 154.8, 38.7),
    "L4": (121, 121, 30.3),
    "RTX 4090": (165.2, 165.2, 82.6),
    "RTX 3090 Ti": (80, 80, 40),
    "RTX 3090": (71, 71, 35.6),
    "V100": (None, 125, 15.7),
    "T4": (None, 65, 8.1),
    "MI300X": (1307.4, 1307.4, 163.4),
}


def peak_flops(gpu: str, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of the GPU of that name in `dtype`, for MFU. None: its peak is not known, and no MFU is reported."""
    if "Laptop" in gpu or gpu.endswith(" D"):
        return None  # slower chips under the name of a faster one
    column = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype]
    for fragment, peaks in PEAK_TFLOPS.items():
        if re.search(rf"\b{fragment}\b", gpu):  # whole words: A4000 is no A40
            tflops = peaks[column]
            return tflops * 1e12 if tflops is not None else None
    return None
