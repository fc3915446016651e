"""The facts that a run's numbers depend on: code, versions, machine."""

import os
import platform
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
    """Facts for environment.json; null where there is none."""
    facts: dict[str, Any] = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git": git_state(ROOT),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {name: _version(name) for name in ("torch", "triton", "numpy", "datasets", "tokenizers", "wandb")},
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
    """Clocks and power as nvidia-smi tells them now, with their units; nothing where it can't be asked."""
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
    """`gpu_state` while the GPU takes one step after the other: an idle one has its highest clock and draws little.

    Args:
        settle_s: seconds of steps before it is asked; the power it tells is a mean over about one.
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
    """Revision, and whether tracked files differ from it; None outside a git repository."""
    revision = _git(folder, "rev-parse", "HEAD")
    if revision is None:
        return None
    return {"revision": revision, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """NVIDIA's driver release, read from the kernel: nvidia-smi would take seconds on some machines."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("\n")[0].split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)
