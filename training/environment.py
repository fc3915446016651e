"""The facts that a run's numbers depend on: code, versions, machine, and the peak arithmetic of known GPUs."""

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent


def environment(device: torch.device) -> dict[str, Any]:
    """Facts for environment.json. None: the machine does not tell."""
    facts: dict[str, Any] = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git": git_state(ROOT),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {
            name: _version(name) for name in ("prenorm", "torch", "triton", "numpy", "datasets", "tokenizers", "wandb")
        },
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = {
            "name": properties.name,
            "memory_gb": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "driver": _driver(),
        }
    return facts


def gpu_state(device: torch.device) -> dict[str, str]:
    """Clocks and power as nvidia-smi reports them now, with their units. Empty where nvidia-smi does not run."""
    names = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
    query = [f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    try:
        done = subprocess.run(
            ["nvidia-smi", *query, *([f"--id=GPU-{uuid}"] if uuid else [])], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.strip().split(", ")
    return dict(zip(names, values, strict=True)) if done.returncode == 0 and len(values) == len(names) else {}


def gpu_state_during(step: Callable[[], None], device: torch.device, settle_s: float = 1.5) -> dict[str, str]:
    """`gpu_state` while the GPU works: an idle GPU has its highest clock and draws little power.

    Args:
        step: called again and again meanwhile.
        settle_s: seconds of steps before nvidia-smi runs. It reports the mean power of about one second.
    """

    def ask() -> dict[str, str]:
        time.sleep(settle_s)
        return gpu_state(device)

    with ThreadPoolExecutor(max_workers=1) as pool:
        asked = pool.submit(ask)
        while not asked.done():
            step()
    return asked.result()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Revision, and whether tracked files differ from it. Outside a git repository that of GIT_REVISION, or None."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        given = os.environ.get("GIT_REVISION")  # of code that was copied without its repository
        return {"revision": given, "dirty": False} if given else None
    return {"revision": revision, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        # another user's checkout is read too; none of its programs is run
        command = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The release of NVIDIA's driver, read from the kernel: nvidia-smi takes seconds on some machines."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("\n")[0].split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)


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


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense FLOP/s of the device in `dtype`, for MFU. None: the device or its peak is not known, and no MFU is reported."""
    return _peak(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def _peak(name: str, dtype: torch.dtype) -> float | None:
    column = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype]
    if "Laptop" in name or name.endswith(" D"):
        return None  # slower chips under the name of a faster one
    for fragment, peaks in PEAK_TFLOPS.items():
        if re.search(rf"\b{fragment}\b", name):  # whole words: A4000 is no A40
            tflops = peaks[column]
            return tflops * 1e12 if tflops is not None else None
    return None
